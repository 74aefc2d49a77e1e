"""The catalogue: entries, spellings, where files are looked for, what a missing one says."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest

from fsmap.data import catalogue as sources
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


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch, tmp_path):
    """Neither the machine's own folders nor its catalogue."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FSMAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sources, "SHARED", tmp_path / "shared")
    monkeypatch.setattr(sources, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(sources, "find", lambda _: entry())


def put(root: Path, csv: bytes = CONTENT, level: int = 9) -> Path:
    (root / "toy").mkdir(parents=True)
    (root / "toy" / "toy.csv").write_bytes(csv)
    (root / "toy" / "toy.gz").write_bytes(gzip.compress(ZIPPED, level))
    return root


def test_the_order_of_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("FSMAP_DATA", "/named")
    found = sources.roots("given")
    assert list(found.items()) == [
        ("--data-dir", Path("given")),
        ("$FSMAP_DATA", Path("/named")),
        ("shared", tmp_path / "shared"),
        ("system", tmp_path / "system"),
        ("cache", tmp_path / "xdg" / "fsmap"),
    ]


def test_the_first_folder_wins(monkeypatch, tmp_path):
    for name in ("given", "named", "system", "xdg/fsmap"):
        put(tmp_path / name)
    monkeypatch.setenv("FSMAP_DATA", str(tmp_path / "named"))
    assert sources.locate("toy", tmp_path / "given")["toy.csv"].is_relative_to(tmp_path / "given")
    assert sources.locate("toy")["toy.csv"].is_relative_to(tmp_path / "named")
    monkeypatch.delenv("FSMAP_DATA")
    assert sources.locate("toy")["toy.gz"].is_relative_to(tmp_path / "system")


def test_a_damaged_copy_is_passed_over(tmp_path):
    put(tmp_path / "shared", csv=b"a,b\n1,3\n")
    put(tmp_path / "system", level=1)  # the same content, compressed in another way
    assert sources.locate("toy")["toy.csv"].is_relative_to(tmp_path / "system")
    found = sources.look_for(entry().files[0])
    assert found.damaged == (tmp_path / "shared" / "toy" / "toy.csv",)


def test_a_missing_set_says_what_where_and_how(tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    with pytest.raises(MissingDataError) as caught:
        sources.locate("toy", given)
    text = str(caught.value)
    assert text.startswith(f"data set 'toy': toy/toy.csv, toy/toy.gz not found. Looked in {given}")
    assert f"{tmp_path / 'system'} (system)" in text
    assert text.endswith("Get it with: fsmap data get toy")


def test_a_given_folder_must_be_one(tmp_path):
    """Even where the files are found elsewhere: a slip of the pen is not another data set."""
    put(tmp_path / "shared")
    with pytest.raises(InputError, match="folder"):
        sources.locate("toy", tmp_path / "givne")


def test_a_damaged_set_says_so(tmp_path):
    bad = put(tmp_path / "shared", csv=b"short") / "toy" / "toy.csv"
    with pytest.raises(MissingDataError, match="checksum") as e:
        sources.locate("toy")
    assert str(bad) in str(e.value)
    assert "toy/toy.gz" not in str(e.value)


def test_a_truncated_archive_is_damaged_not_an_error(tmp_path):
    folder = put(tmp_path / "shared")
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
        if download.columns:
            assert len(download.columns) == len(download.header.split())


@pytest.mark.parametrize(
    ("spelled", "name"), [("wine_red", "winered"), ("FMNIST", "fashion-mnist"), ("Naval", "naval")]
)
def test_other_spellings(spelled, name):
    assert find(spelled).name == name


def test_an_unknown_name_says_which_are_known():
    with pytest.raises(InputError, match=r"no data set 'bosten'. Did you mean 'boston'\? Known: b"):
        find("bosten")
