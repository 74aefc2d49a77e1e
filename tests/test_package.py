"""What users get: an sdist, the wheel built from it, installed into an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import fsmap

ROOT = Path(__file__).parents[1]
INGREDIENTS = ("pyproject.toml", "README.md", "LICENSE", "src")


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command away from the source tree; what it prints."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    options = {"capture_output": True, "text": True, "timeout": 100, "env": clean, "cwd": cwd}
    done = subprocess.run([str(part) for part in command], **options)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel, built from a copy of the source tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in INGREDIENTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    for leftover in (source / "src").glob("*.egg-info"):
        shutil.rmtree(leftover)
    call(sys.executable, "-m", "build", "-n", "-o", out, cwd=source)  # the wheel from the sdist
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


@pytest.mark.slow
def test_the_wheel_ships_the_package_and_nothing_else(wheel: zipfile.ZipFile):
    package, names = Path(fsmap.__file__).parent, set(wheel.namelist())
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.*")}
    assert {name for name in files if "__pycache__" not in name} <= names
    about = f"fsmap-{fsmap.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"fsmap", about}
    assert {"fsmap/py.typed", f"{about}/licenses/LICENSE"} <= names


@pytest.mark.slow
def test_hard_dependencies_are_three(wheel: zipfile.ZipFile):
    metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    lines = wheel.read(metadata).decode().splitlines()
    required = [x.split()[1] for x in lines if x.startswith("Requires-Dist:") and "extra" not in x]
    assert [name.partition(">")[0] for name in required] == ["torch", "numpy", "safetensors"]
    assert any(line.startswith("Project-URL: Paper, https://arxiv.org/abs/") for line in lines)


@pytest.mark.slow
def test_an_installed_wheel_imports_and_runs(built: Path, tmp_path: Path):
    """The dependencies come from this environment's site-packages, by a .pth file.

    A folder named there is put on the path, but its own .pth files, and so this checkout, are not
    followed.
    """
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "-q")
    call(*pip, "install", "--no-deps", "--no-index", next(built.glob("*.whl")), cwd=home)
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home)
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import fsmap; print(fsmap.__file__, fsmap.__version__); print(*dir(fsmap))"
    first, names = call(python, "-c", code, cwd=tmp_path).splitlines()
    where, version = first.split()
    assert Path(where).is_relative_to(home)
    assert version == fsmap.__version__
    assert set(fsmap.__all__) <= set(names.split())
    assert "usage: fsmap" in call(scripts / "fsmap", "--help", cwd=tmp_path)


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fsmap.__version__"}
    assert f"\nversion: {fsmap.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_pages_that_messages_name_exist():
    named = {
        (page, str(source.relative_to(ROOT)))
        for source in (ROOT / "src").rglob("*.py")
        for page in re.findall(r"docs/[a-z_/]+\.md", source.read_text())
    }
    assert len(named) > 2
    assert not {(page, where) for page, where in named if not (ROOT / page).exists()}
