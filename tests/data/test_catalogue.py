"""The catalogue: entries, spellings, where files are looked for, what a missing one says."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from fsmap.cli import main
from fsmap.data import catalogue as sources
from fsmap.data import fetch
from fsmap.data.catalogue import DataFile, DataSet, Download, catalogue, find
from fsmap.data.fetch import READERS
from fsmap.errors import InputError, MissingDataError

CONTENT = b"a,b\n1,2\n"
ZIPPED = b"numbers " * 50
ENTRIES = catalogue()


def entry(**changes) -> DataSet:
    files = (
        DataFile("toy/toy.csv", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT)),
        DataFile("toy/toy.gz", hashlib.sha256(ZIPPED).hexdigest(), len(ZIPPED), content=True),
    )
    downloads = (Download("http://nowhere/toy.csv", "toy/toy.csv"),)
    return DataSet("toy", "a toy", files, "http://nowhere", downloads)._replace(**changes)


@pytest.fixture
def toy(monkeypatch, no_data):
    """A catalogue with one set, and empty folders to look into."""
    monkeypatch.setattr(sources, "catalogue", lambda: {"toy": entry()})
    return no_data


def put(root: Path, csv: bytes = CONTENT, level: int = 9) -> Path:
    (root / "toy").mkdir(parents=True)
    (root / "toy" / "toy.csv").write_bytes(csv)
    (root / "toy" / "toy.gz").write_bytes(gzip.compress(ZIPPED, level))
    return root


def test_the_order_of_folders(monkeypatch, toy):
    monkeypatch.setenv("FSMAP_DATA", "/named")
    names, folders = zip(*sources.roots("given").items(), strict=True)
    assert names == ("--data-dir", "$FSMAP_DATA", "shared", "system", "cache")
    usual = (toy / name for name in ("shared", "system", "xdg/fsmap"))
    assert folders == (Path("given"), Path("/named"), *usual)


def test_the_first_folder_wins(monkeypatch, toy):
    for name in ("given", "named", "system", "xdg/fsmap"):
        put(toy / name)
    monkeypatch.setenv("FSMAP_DATA", str(toy / "named"))
    assert sources.locate("toy", toy / "given")["toy.csv"].is_relative_to(toy / "given")
    assert sources.locate("toy")["toy.csv"].is_relative_to(toy / "named")
    monkeypatch.delenv("FSMAP_DATA")
    assert sources.locate("toy")["toy.gz"].is_relative_to(toy / "system")


def test_a_damaged_copy_is_passed_over(toy):
    put(toy / "shared", csv=b"a,b\n1,3\n")
    put(toy / "system", level=1)  # the same content, compressed in another way
    assert sources.locate("toy")["toy.csv"].is_relative_to(toy / "system")
    found = sources.look_for(entry().files[0])
    assert found.damaged == (toy / "shared" / "toy" / "toy.csv",)


def test_a_missing_set_says_what_where_and_how(toy):
    given = toy / "given"
    given.mkdir()
    with pytest.raises(MissingDataError) as caught:
        sources.locate("toy", given)
    text = str(caught.value)
    assert text.startswith(f"data set 'toy': toy/toy.csv, toy/toy.gz not found. Looked in {given}")
    assert f"{toy / 'system'} (system)" in text
    assert text.endswith("Get it with: fsmap data get toy")


def test_a_given_folder_must_be_one(toy):
    """Even where the files are found elsewhere: a slip of the pen is not another data set."""
    put(toy / "shared")
    with pytest.raises(InputError, match="folder"):
        sources.locate("toy", toy / "givne")


def test_a_truncated_archive_is_damaged_not_an_error(toy):
    folder = put(toy / "shared")
    file = folder / "toy" / "toy.gz"
    file.write_bytes(file.read_bytes()[:-12])
    assert sources.look_for(entry().files[1]).damaged == (file,)
    assert sources.checksum(file, content=True).startswith("unreadable")


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_complete(name):
    entry = ENTRIES[name]
    assert entry.title
    assert entry.page.startswith("http")
    assert entry.size == sum(file.size for file in entry.files) > 0
    for file in entry.files:
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
        assert not file.path.startswith("/")
    paths = {file.path for file in entry.files}
    for download in entry.downloads:
        assert download.path in paths
        assert download.kind in {"copy", "gunzip", *READERS}
        header = download.header.split()
        assert len(download.columns) in (0, len(header))
        path = sources.look_for(next(f for f in entry.files if f.path == download.path)).path
        if path is not None and header:
            assert path.read_text().splitlines()[0] == ",".join(header)


def test_other_spellings():
    found = [find(name).name for name in ("wine_red", "FMNIST", "Naval")]
    assert found == ["winered", "fashion-mnist", "naval"]


def test_list_says_where_it_is_and_where_it_is_looked_for(toy, capsys):
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert "not here" in out
    assert "cache: " in out
    assert main(["data", "list", "toy"]) == 0
    assert "fsmap data get toy" in capsys.readouterr().out
    put(toy / "shared")
    assert main(["data", "--data-dir", str(put(toy / "other", b"damaged"))]) == 0
    assert str(toy / "shared" / "toy") in capsys.readouterr().out


def test_get_that_fails_goes_on_and_ends_with_2(toy, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "get", lambda name, into, **_: {name: into / name})
    assert main(["data", "get", "toy", "--data-dir", "mine"]) == 0
    assert "toy: 1 files in mine, checksums right" in capsys.readouterr().out
    monkeypatch.setattr(fetch, "get", Mock(side_effect=MissingDataError("could not get it")))
    assert main(["data", "get", "toy"]) == 2
    assert "fsmap: could not get it" in capsys.readouterr().err


def test_check(toy, capsys):
    assert main(["data", "check", "toy"]) == 2
    assert "toy/toy.csv, toy/toy.gz not found" in capsys.readouterr().out
    assert main(["data", "check"]) == 0
    assert "not here" in capsys.readouterr().out
    file = put(toy / "shared") / "toy" / "toy.csv"
    assert main(["data", "check"]) == 0
    assert "toy: right" in capsys.readouterr().out
    file.write_bytes(b"a,b\n1,3\n")
    assert main(["data", "check"]) == 2
    out = capsys.readouterr().out
    assert f"wrong checksum: {file}" in out
    assert "Get it with: fsmap data get toy" in out
