"""Values that a user may mistype: each ends in one line on standard error and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsmap.cli import main

TABLE = "a,b,y\n" + "".join(f"{i % 7},{i % 5},{i * i % 11}.5\n" for i in range(40))
CODE = {
    "raises_on_import": "raise RuntimeError('boom')",
    "raises_when_called": "def make():\n    raise KeyError('boom')",
    "fine": "import torch\n\ndef make():\n    return torch.nn.Linear(2, 1)",
}

EDGES = [
    ("doctor fine:make --seed -1", "seed"),
    ("doctor fine:make --seed 9999999999999", "seed"),
    ("doctor fine:make --device tpu", "device"),
    ("doctor raises_on_import:make", "boom"),
    ("doctor raises_when_called:make", "boom"),
    ("train --quick --model raises_on_import:make", "boom"),
    ("train --quick --seeds 0,-1", "seeds"),
    ("train --quick --seeds 9999999999999", "seeds"),
    ("train --quick --split-seed -1", "split-seed"),
    ("train --quick --device tpu", "device"),
    ("run fourier --quick --set sizes=", "value"),
    ("run fourier --quick --set lr=1e30", "lr"),
    ("run fourier --quick --seeds -1", "seeds"),
    ("run fourier --quick --device tpu", "device"),
    ("sweep fourier --quick --set sizes=", "value"),
    ("sweep fourier --quick --set lr=1e30", "lr"),
    ("landscape nowhere --seed -1", "seed"),
    ("fit table.csv --target y --seed -1", "seed"),
    ("fit table.csv --target y --seed 9999999999999", "seed"),
    ("fit table.csv --target y --device tpu", "device"),
    ("fit table.csv --target y --hidden 9999999 --silent", "hidden"),
]


@pytest.mark.parametrize(("line", "word"), EDGES, ids=[line for line, _ in EDGES])
def test_a_message_and_no_traceback(
    line: str,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    for name, code in CODE.items():
        (tmp_path / f"{name}.py").write_text(code)
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert word in said
    assert "Traceback" not in said
