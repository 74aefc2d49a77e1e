"""The site builds without a warning, has every public name, and its gallery runs."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsmap

ROOT = Path(__file__).parents[1]
API = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
SPACES = {
    "px": ("Uniform", "Normal", "Empirical", "Lattice", "Mixture"),
    "metric": ("Weights", "Output", "SoftmaxFisher", "General"),
    "metrics": (
        *("accuracy", "nll", "ece", "selective_accuracy", "ood_auroc", "rmse", "brier"),
        *("temperature", "reliability"),
    ),
}
"""Modules that users call into, with the names of the contract."""


def public_names() -> list[str]:
    names = [name for name in fsmap.__all__ if not inspect.ismodule(getattr(fsmap, name))]
    names.remove("__version__")
    return [*names, *(f"{space}.{name}" for space, some in SPACES.items() for name in some)]


@pytest.mark.parametrize("name", public_names())
def test_reference_has(name: str):
    """Each public name has an entry, and an example in its docstring or on the page."""
    last = name.rpartition(".")[2]
    assert re.search(rf"^\.\. auto(class|function):: (\S+\.)?{last}$", API, re.MULTILINE)
    found = fsmap
    for part in name.split("."):
        found = getattr(found, part)
    blocks = re.findall(r"^```python\n(.*?)^```$", API, re.MULTILINE | re.DOTALL)
    shown = any(re.search(rf"\b{last}\b", block) for block in blocks)
    assert last == "Estimate" or ">>>" in (found.__doc__ or "") or shown


def test_site_builds(tmp_path: Path):
    pytest.importorskip("sphinx", reason="sphinx is missing: pip install '.[docs]'")
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, ROOT / "docs", tmp_path / "site"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert "LogTrace" in (tmp_path / "site" / "api" / "loop.html").read_text()


def gallery(name: str):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib").use("Agg")
    path = ROOT / "examples" / "gallery" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def closed() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.usefixtures("float32", "seeded", "closed")
class TestGallery:
    def test_has_a_page_and_a_picture_for_every_script(self):
        scripts = {path.stem for path in (ROOT / "examples" / "gallery").glob("*.py")}
        for ending in ("md", "svg"):
            found = {path.stem for path in (ROOT / "docs" / "gallery").glob(f"*.{ending}")}
            assert found - {"index"} == scripts

    def test_bare_loop(self):
        plain, smooth = gallery("bare_loop").main()[1].values()
        assert smooth < plain / 2

    def test_image_calibration(self):
        plain, smooth = gallery("image_calibration").main(epochs=25)[1].values()
        assert smooth["nll"] < plain["nll"]
        assert smooth["accuracy"] > plain["accuracy"]

    def test_language_model(self):
        found = gallery("language_model").main(steps=50)[1]
        assert all(loss < 3.5 for loss in found.values())  # log of 70 characters is 4.2

    def test_table(self):
        found = gallery("table").main()[1]
        assert found["rmse"] < 0.9 * found["constant"]
        assert found["covered"] > 0.8

    def test_figure_1(self):
        best = gallery("figure_1").main(size=41)[1]
        assert best["FS-MAP"] < best["PS-MAP"]  # the right bump is lower

    def test_own_metric(self):
        plain, *with_metric = gallery("own_metric").main()[1].values()
        assert max(with_metric) < 0.8 * plain
