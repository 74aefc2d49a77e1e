"""The scripts that users copy: each runs, learns something, and uses what it is about.

Those for several processes run under torchrun in test_matrix.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.usefixtures("seeded", "float32")  # as users have it

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNS = {
    "padded_batches": ({}, lambda loss, R: loss < 0.5 and R > 0),
    "unusual_forward": ({}, lambda loss, R: loss < 2.0 and R > 0),  # the targets' variance is 6
    "vocabulary": ({}, lambda loss, R: loss < 7.0 and R > 0),  # log V is 7.6
    "compiled": ({"backend": "aot_eager"}, lambda loss, R: loss < 0.5 and R > 0),
    "accumulation": ({}, lambda loss, steps: loss < 0.3 and steps == 10 * 512 // 64),
    "adapters": ({}, lambda names, loss: len(names) == 6 and loss < 0.3),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_loss_and_r(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    options, holds = RUNS[name]
    found = example(name).main(**options)
    assert holds(*found), found


def test_amp() -> None:
    for loss, R in example("amp").main().values():
        assert loss < 0.5
        assert R > 0


def test_lightning() -> None:
    assert 0 < example("lightning_module").main(epochs=5)["share"] < 1


def test_transformers() -> None:
    found = example("huggingface_trainer").main(epochs=12)
    assert found["loss"][-1] < 0.97 * found["loss"][0]
    assert min(found["R"]) > 0


def test_ema() -> None:
    torch.set_default_dtype(torch.float64)  # the two losses differ by little
    rows = example("ema").main()
    assert rows["average"]["R"] > 0
    assert rows["average"]["nll"] < rows["last"]["nll"]
