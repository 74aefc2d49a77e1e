"""The wheel that users get: built, installed into an environment of its own, and imported there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left behind in the source tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in INGREDIENTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    for leftover in (source / "src").glob("*.egg-info"):
        shutil.rmtree(leftover)
    call(sys.executable, "-m", "build", "-w", "-n", "-o", out, cwd=source)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the executables of a new environment that holds the wheel and borrows the rest.

    The dependencies come from the running environment's site-packages, by a .pth file: a folder
    named there is put on the path, but its own .pth files, and so this checkout, are not followed.
    """
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False)
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    pip = (sys.executable, "-m", "pip", "--python", scripts / "python", "-q")
    call(*pip, "install", "--no-deps", "--no-index", wheel, cwd=home)
    site = Path(call(scripts / "python", "-c", SITE, cwd=home))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts


SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def test_wheel_ships_every_file_of_the_package(wheel: Path):
    package = Path(fsmap.__file__).parent
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.*")}
    expected = {name for name in files if "__pycache__" not in name}
    assert expected <= set(zipfile.ZipFile(wheel).namelist())


def test_wheel_ships_nothing_else(wheel: Path):
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"fsmap", f"fsmap-{fsmap.__version__}.dist-info"}


def test_wheel_ships_its_types_and_license(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert "fsmap/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_hard_dependencies_are_three(wheel: Path):
    metadata = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    required = [
        line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert [line.split()[1].partition(">")[0] for line in required] == [
        "torch",
        "numpy",
        "safetensors",
    ]


def test_installed_package_imports_from_its_own_place(installed: Path, tmp_path: Path):
    code = "import fsmap; print(fsmap.__file__); print(fsmap.__version__)"
    where, version = call(installed / "python", "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(installed.parent)
    assert version == fsmap.__version__


def test_every_public_name_is_there(installed: Path, tmp_path: Path):
    code = "import fsmap; print(sorted(n for n in fsmap.__all__ if hasattr(fsmap, n)))"
    assert call(installed / "python", "-c", code, cwd=tmp_path) == str(sorted(fsmap.__all__))


def test_console_script_runs(installed: Path, tmp_path: Path):
    assert "usage: fsmap" in call(installed / "fsmap", "--help", cwd=tmp_path)
