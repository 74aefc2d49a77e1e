"""Files appear whole or not at all, and a folder that cannot be written to is refused first."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fsmap.errors import InputError
from fsmap.train.files import make_folder, write_whole


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


def test_a_file_in_no_folder_names_itself(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file/x\.json'$"):
        write_whole(tmp_path / "file" / "x.json", "text")


def test_text_is_utf_8(tmp_path: Path):
    write_whole(tmp_path / "a", "λ")
    write_whole(tmp_path / "b", "λ".encode())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == b"\xce\xbb"


def test_a_folder_is_made_and_left_empty(tmp_path: Path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert not [*(tmp_path / "a" / "b").iterdir()]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write to .*file/x: Not a directory. Choose"):
        make_folder(tmp_path / "file" / "x")
    full = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(full))
    with pytest.raises(InputError, match="Read-only file system"):
        make_folder(tmp_path)
