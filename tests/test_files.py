"""Files appear whole or not at all; one process at a time writes to a folder."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

import fsmap
from fsmap import files
from fsmap.errors import CheckpointError, InputError
from fsmap.files import beside, exclusive, make_folder, remove_partial, write_whole


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("disk full"), "disk full"),
        (OSError(errno.ENOSPC, "No space left on device"), r"No space left.*summary\.json"),
        (KeyboardInterrupt("now"), "now"),
    ],
)
def test_a_file_is_replaced_in_one_piece(tmp_path: Path, monkeypatch, error, said):
    file = tmp_path / "summary.json"
    write_whole(file, "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(error))
    with pytest.raises(type(error), match=said):
        write_whole(file, "new and longer")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="directory"):
        make_folder(tmp_path / "file" / "x")
    full = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(full))
    with pytest.raises(InputError, match="system"):
        make_folder(tmp_path)


def test_permissions_stay_and_those_of_a_new_file_are_of_the_umask(tmp_path: Path):
    file = tmp_path / "model.pt"
    file.touch()
    for mode in (0o600, 0o640, 0o755):
        file.chmod(mode)
        write_whole(file, "new")
        assert file.stat().st_mode & 0o777 == mode
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_symbolic_links_are_not_followed(tmp_path: Path):
    target, file = tmp_path / "target", tmp_path / "a"
    target.write_text("stays")
    (tmp_path / ".a.partial").symlink_to(target)
    file.symlink_to(target)
    write_whole(file, "new")
    assert (target.read_text(), file.read_text()) == ("stays", "new")
    assert not file.is_symlink()


def test_two_writers_do_not_meet(tmp_path: Path):
    """Each file that is read is one that was written, and no writer fails."""
    file, texts = tmp_path / "a", [str(n) * 100_000 for n in range(4)]
    write_whole(file, texts[0])
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(write_whole, file, text) for text in texts * 10]
        seen = {file.read_text() for _ in range(100)}
        for job in jobs:
            job.result()
    assert seen <= set(texts)
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("name", ["[a]", "a*"])
def test_any_name(tmp_path: Path, name: str):
    write_whole(tmp_path / name, "text")
    for path in (tmp_path / name, tmp_path / "other"):
        beside(path, "1234.partial").touch()
    remove_partial(tmp_path / name)
    assert {p.name for p in tmp_path.iterdir()} == {name, ".other.1234.partial"}


def test_two_fits_do_not_share_a_checkpoint(tmp_path: Path):
    x = torch.linspace(-1, 1, 4)[:, None]
    objective = fsmap.ps_map(fsmap.Gaussian(1.0), fsmap.Normal(1.0), num_data=4)
    f, params = (lambda p, x: x * p["a"]), {"a": torch.ones(1)}
    once = partial(fsmap.fit, objective, f, params, (x, x), steps=3, progress=False)
    fit = partial(once, checkpoint=tmp_path / "a.safetensors")

    def second(step: int, _: object) -> None:
        with pytest.raises(InputError, match="another process"):
            fit()

    fit(callback=second)
    with pytest.raises(CheckpointError):
        fit()
    fit(resume=True)  # the lock was released
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("written", [False, True])
def test_a_folder_made_for_nothing_is_removed(tmp_path: Path, written: bool):
    folder = tmp_path / "runs"
    with suppress(ZeroDivisionError), exclusive(folder / ".lock", folder):
        if written:
            (folder / "log").touch()
        raise ZeroDivisionError
    left = {folder, folder / ".lock", folder / "log"} if written else set()
    assert set(tmp_path.rglob("*")) == left


def test_what_was_there_before_or_belongs_to_others_stays(tmp_path: Path):
    folder, other = tmp_path / "one", tmp_path / "runs" / "two"
    folder.mkdir()
    with exclusive(folder / ".lock", folder):
        pass
    assert [*folder.iterdir()] == [folder / ".lock"]
    with exclusive(other / ".lock", other):
        (tmp_path / "runs" / "three").mkdir()
    assert [*(tmp_path / "runs").iterdir()] == [tmp_path / "runs" / "three"]
    with exclusive(other / ".lock", other):
        (other / ".lock").unlink()
        other.rmdir()
    assert not other.exists()


@pytest.mark.parametrize("again", [False, True])
def test_a_lock_that_was_removed_meanwhile_is_not_held(tmp_path: Path, monkeypatch, again: bool):
    """Another process removed the file (and a third made a new one) before it was held."""
    path = tmp_path / ".lock"

    def held(_: int) -> bool:
        path.unlink()
        if again:
            path.touch()
        return True

    monkeypatch.setattr(files, "_take_lock", held)
    with pytest.raises(InputError, match="another process"), exclusive(path, tmp_path):
        pass
