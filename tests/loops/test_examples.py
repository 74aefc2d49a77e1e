"""The scripts that users copy: each runs, learns something, and uses what it is about.

Those for several processes run under torchrun in test_matrix.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def as_users_have_it(seeded: None) -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_amp() -> None:
    for loss, R in example("amp").main().values():
        assert loss < 0.5
        assert R > 0


def test_accumulation() -> None:
    loss, steps = example("accumulation").main()
    assert loss < 0.3
    assert steps == 10 * 512 // 64


def test_adapters() -> None:
    names, loss = example("adapters").main()
    assert names == [f"{layer}.{part}" for layer in (0, 2, 4) for part in "AB"]
    assert loss < 0.3


def test_padded_batches() -> None:
    loss, R = example("padded_batches").main()
    assert loss < 0.5
    assert R > 0


def test_unusual_forward() -> None:
    loss, R = example("unusual_forward").main()
    assert loss < 2.0  # the targets' variance is 6
    assert R > 0


def test_vocabulary() -> None:
    loss, R = example("vocabulary").main()
    assert loss < 7.0  # log V is 7.6
    assert R > 0


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    loss, R = example("compiled").main(backend="aot_eager")
    assert loss < 0.5
    assert R > 0
