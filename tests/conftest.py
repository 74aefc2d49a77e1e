"""What every test stands on: float64, one thread, seeded generators, a guard of torch's globals."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers of pytest-xdist are the parallelism

import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# The same examples on every run; `--hypothesis-profile=thorough` looks further.
hypothesis.settings.register_profile(
    "fsmap", max_examples=25, deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("thorough", max_examples=500, deadline=None)
hypothesis.settings.load_profile("fsmap")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def torch_globals() -> dict[str, object]:
    """Everything global in torch that a test could leave changed, by name."""
    return {
        "state of the global random generator": torch.random.get_rng_state().numpy().tobytes(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "number of threads": torch.get_num_threads(),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "fast path of attention": torch.backends.mha.get_fastpath_enabled(),
        "validation of distributions": torch.distributions.Distribution._validate_args,
    }


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Names of the entries that differ."""
    return [name for name in before if before[name] != after[name]]


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    """Make float64 the default, and fail a test that leaves one of torch's globals changed."""
    original = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    before = torch_globals()
    yield
    differences = changed(before, torch_globals())
    torch.set_default_dtype(original)
    assert not differences, (
        f"this test changed torch's {', '.join(differences)}. Library code takes a generator or "
        "draws as arguments; a test that builds an nn.Module uses the `seeded` fixture or "
        "torch.random.fork_rng()."
    )


@pytest.fixture
def seeded(guard: None) -> Iterator[None]:
    """Seed torch's global generator (nn.Module initializers use it), and put it back after."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def float32(guard: None) -> Iterator[None]:
    """The default precision that users have."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and no data where data is looked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FSMAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("fsmap.data.catalogue.SHARED", tmp_path / "shared")
    monkeypatch.setattr("fsmap.data.catalogue.SYSTEM", tmp_path / "system")
    return tmp_path


@pytest.fixture
def generator() -> torch.Generator:
    """A generator with a fixed seed, to hand to what draws."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def fresh_compiler(guard: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty compiler; what it switches off for the whole process is put back after the test."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium executable, for tests with the mark ``browser``."""
    return next(filter(None, map(shutil.which, BROWSERS)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, with the reason."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none here")
    if item.get_closest_marker("browser") and not any(map(shutil.which, BROWSERS)):
        pytest.skip(f"no browser found (looked for {', '.join(BROWSERS)} on the PATH)")
