"""One process at a time writes to a folder, and one that wrote nothing leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsmap import files
from fsmap.errors import InputError
from fsmap.files import exclusive


def fail_in(folder: Path, *names: str) -> None:
    with exclusive(folder / ".lock", folder):
        assert (folder / ".lock").exists()
        for name in names:
            (folder / name).touch()
        raise ZeroDivisionError


def test_a_folder_made_for_nothing_is_removed(tmp_path: Path):
    with pytest.raises(ZeroDivisionError):
        fail_in(tmp_path / "runs" / "one")
    assert [*tmp_path.iterdir()] == []


def test_what_was_written_stays(tmp_path: Path):
    with pytest.raises(ZeroDivisionError):
        fail_in(tmp_path / "runs", "log")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {".lock", "log"}


def test_what_was_there_before_stays(tmp_path: Path):
    folder = tmp_path / "one"
    folder.mkdir()
    with exclusive(folder / ".lock", folder):
        pass
    assert [*folder.iterdir()] == [folder / ".lock"]
    other = tmp_path / "runs" / "two"
    with exclusive(other / ".lock", other):
        (tmp_path / "runs" / "three").mkdir()
    assert [*(tmp_path / "runs").iterdir()] == [tmp_path / "runs" / "three"]


def test_a_folder_that_was_removed_meanwhile(tmp_path: Path):
    folder = tmp_path / "one"
    with exclusive(folder / ".lock", folder):
        (folder / ".lock").unlink()
        folder.rmdir()
    assert not folder.exists()


def test_a_place_that_may_not_be_looked_at(tmp_path: Path, monkeypatch):
    def forbidden(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", forbidden)
    words = "cannot write to .*: Permission denied. Choose another"
    with pytest.raises(InputError, match=words), exclusive(tmp_path / ".lock", tmp_path):
        pass


def test_a_lock_beside_its_folder_stays(tmp_path: Path):
    """Locks of several folders lie together, and other processes come and go."""
    path = tmp_path / "locks" / "one.lock"
    with exclusive(path, tmp_path / "one"):
        pass
    assert path.exists()


@pytest.mark.parametrize("again", [False, True])
def test_a_lock_that_was_removed_meanwhile_is_not_held(tmp_path: Path, monkeypatch, again: bool):
    """Another process removed the file (and a third made a new one) before it was held."""
    path = tmp_path / ".lock"

    def held(_: int) -> bool:
        path.unlink()
        if again:
            path.touch()
        return True

    monkeypatch.setattr(files, "_held", held)
    with pytest.raises(InputError, match="another process"), exclusive(path, tmp_path):
        pass


def test_one_at_a_time(tmp_path: Path):
    folder = tmp_path / "one"
    path = folder / ".lock"
    with exclusive(path, folder):
        with pytest.raises(InputError, match="another process"), exclusive(path, folder):
            pass
        assert path.exists()
    with exclusive(path, folder):
        pass
