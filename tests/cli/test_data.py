"""``fsmap data``: what it lists, fetches and finds damaged."""

from __future__ import annotations

import hashlib

import pytest

from fsmap.cli import main
from fsmap.data import catalogue, fetch
from fsmap.data.catalogue import DataFile, DataSet, Download
from fsmap.errors import MissingDataError

CSV = b"a,b\n1,2\n"
ENTRY = DataSet(
    "toy",
    "a toy",
    (DataFile("toy/toy.csv", hashlib.sha256(CSV).hexdigest(), len(CSV)),),
    "http://source",
    (Download("http://source/toy.csv", "toy/toy.csv"),),
)


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FSMAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(catalogue, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(catalogue, "catalogue", lambda: {"toy": ENTRY})
    return tmp_path / "xdg" / "fsmap" / "toy" / "toy.csv"


def put(path, content: bytes = CSV) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def test_list_says_where_it_is_and_where_it_is_looked_for(toy, capsys):
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert "not here" in out
    assert "cache: " in out
    put(toy)
    assert main(["data"]) == 0
    assert str(toy.parent) in capsys.readouterr().out


def test_get(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "_download", lambda url, limit: CSV)
    assert main(["data", "list", "toy"]) == 0
    assert "fsmap data get toy" in capsys.readouterr().out
    assert main(["data", "get", "toy", "--data-dir", "mine"]) == 0
    assert (tmp_path / "mine" / "toy" / "toy.csv").read_bytes() == CSV
    assert main(["data", "get", "toy"]) == 0
    assert toy.read_bytes() == CSV
    assert "toy: 1 files in" in capsys.readouterr().out


def test_get_that_fails_goes_on_and_ends_with_2(monkeypatch, capsys):
    def refuse(name, *_, **__):
        raise MissingDataError("could not get it")

    monkeypatch.setattr(fetch, "get", refuse)
    assert main(["data", "get", "toy"]) == 2
    assert "fsmap: could not get it" in capsys.readouterr().err


def test_check_of_everything_passes_over_what_is_missing(toy, capsys):
    assert main(["data", "check"]) == 0
    assert "toy: not here" in capsys.readouterr().out
    put(toy)
    assert main(["data", "check"]) == 0
    assert "toy: right" in capsys.readouterr().out


def test_check_of_a_damaged_or_missing_file(toy, capsys):
    assert main(["data", "check", "toy"]) == 2
    assert "toy/toy.csv not found" in capsys.readouterr().out
    put(toy, b"a,b\n1,3\n")
    assert main(["data", "check"]) == 2
    out = capsys.readouterr().out
    assert f"wrong checksum: {toy}" in out
    assert "Get it with: fsmap data get toy" in out
