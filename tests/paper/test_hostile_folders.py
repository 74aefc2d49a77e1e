"""Run folders from strangers, with checksums that fit: no code runs, and errors are typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fake_experiment import Squares, only
from fsmap.cli import main
from fsmap.paper import rows as records
from fsmap.paper.run_folder import write_summary


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change each row, and seal the units anew."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    lines = [records.encode(change(row)) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    head, *units = map(json.loads, (folder / "units.jsonl").read_text().splitlines())
    by_unit: dict[str, list[bytes]] = {}
    for line in lines:
        found = records.parse(line)
        unit = found.get("unit") if isinstance(found, dict) else None
        if isinstance(unit, dict):
            by_unit.setdefault(records.key_of(unit), []).append(line.encode())
    sealed = [
        records.sealed(records.unsealed(unit), by_unit.get(records.key_of(unit["unit"]), []))
        for unit in units
    ]
    text = "".join(records.encode(line) + "\n" for line in (head, *sealed))
    (folder / "units.jsonl").write_text(text)


def nested(depth: int) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = [value]
    return value


ROWS = {
    "nested": lambda row: {**row, "value": nested(400)},
    "nested a little": lambda row: {**row, "value": nested(30)},
    "seconds": lambda row: {**row, "seconds": "long"},
    "value": lambda row: {**row, "value": "text"},
    "metric": lambda row: {**row, "metric": "other"},
    "config": lambda row: {**row, "config": {}},
    "unit": lambda row: {**row, "unit": 7},
    "list": lambda row: [],
    "huge": lambda row: {**row, "value": 10**400},
}
SUMMARIES = {
    "claims": 7,
    "claims.": [7],
    "claims..": [{"claim": 7, "holds": "x", "ours": {}, "paper": [[]]}],
    "table": 7,
    "table.": [7],
    "table..": [{"metric": 7, "method": [1]}],
    "size": 7,
    "seconds": "long",
    "experiment": ["x"],
    "config": 7,
    "deviations": 7,
    "figures": 7,
    "figures.": ["../../secret", "/etc/passwd", 7, None],
    "machine": 7,
    "covers": {"units": "x", "of": 2},
    "command": {"a": 1},
    "date": [1],
    "title": {"a": 1},
}
SLIDERS = ["", "7", "{}", "[" * 100_000, '{"frames": 7}', '{"frames": []}', '{"frames": [{}]}']
PICTURES = [
    "",
    "no svg",
    "<svg",
    "<!DOCTYPE a [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;'>"
    "<!ENTITY c '&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;'><!ENTITY d '&c;&c;&c;&c;&c;&c;&c;&c;&c;&c;'>"
    "<!ENTITY e '&d;&d;&d;&d;&d;&d;&d;&d;&d;&d;'><!ENTITY f '&e;&e;&e;&e;&e;&e;&e;&e;&e;&e;'>"
    "<!ENTITY g '&f;&f;&f;&f;&f;&f;&f;&f;&f;&f;'>]><svg><text>&g;&g;&g;&g;</text></svg>",
    "<!DOCTYPE a [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><svg><text>&a;</text></svg>",
    '<svg viewBox="0 0 1 1"><metadata id="fsmap-hover">{</metadata></svg>',
    '<svg viewBox="0 0 1 1"><metadata id="fsmap-hover">7</metadata></svg>',
    '<svg viewBox="0 0 1.1.1 1"></svg>',
    "<svg>" + "<g>" * 100_000 + "</g>" * 100_000 + "</svg>",
]
COMMANDS = [
    ["report", "runs", "--out", "page"],
    ["report", "runs", "--redraw", "--out", "page"],
    ["list"],
    ["run", "squares", "--quick", "--resume", "--silent"],
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with only(Squares):
        assert main(["run", "squares", "--quick", "--silent"]) == 0
        yield tmp_path / "runs" / "squares"


def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command ends with 0 or 2: no traceback, and no file but its own."""
    allowed = {folder.parent, folder.parent.parent / "page"}
    for command in COMMANDS:
        assert main(command) in (0, 2), command
        told = capsys.readouterr()
        assert "Traceback" not in told.out + told.err
        assert {*folder.parent.parent.iterdir()} <= allowed
    page = folder.parent.parent / "page" / "index.html"
    assert not page.exists() or "root:x:" not in page.read_text()


@pytest.mark.parametrize("name", ROWS)
def test_rows(folder: Path, name: str, capsys: pytest.CaptureFixture[str]):
    summary = json.loads((folder / "summary.json").read_text())
    rewritten(folder, ROWS[name])
    write_summary(folder, summary)
    check(folder, capsys)


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries(folder: Path, name: str, capsys: pytest.CaptureFixture[str]):
    summary = json.loads((folder / "summary.json").read_text())
    write_summary(folder, summary | {name.rstrip("."): SUMMARIES[name]})
    check(folder, capsys)


@pytest.mark.parametrize("number", range(len(SLIDERS)))
def test_sliders(folder: Path, number: int, capsys: pytest.CaptureFixture[str]):
    (folder / "interactive.json").write_text(SLIDERS[number])
    check(folder, capsys)


@pytest.mark.parametrize("number", range(len(PICTURES)))
def test_pictures(folder: Path, number: int, capsys: pytest.CaptureFixture[str]):
    (folder / "squares.svg").write_text(PICTURES[number])
    check(folder, capsys)


@pytest.mark.parametrize("name", ["rows.jsonl", "units.jsonl", "summary.json", "squares.svg"])
def test_links_and_folders(folder: Path, name: str, capsys: pytest.CaptureFixture[str]):
    for make in (Path.mkdir, lambda path: path.symlink_to("/etc/passwd")):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        make(folder / name)
        check(folder, capsys)
        if (folder / name).is_dir():
            (folder / name).rmdir()
        else:
            (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(kept)
