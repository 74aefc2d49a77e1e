"""From official formats to the CSV files of the catalogue."""

from __future__ import annotations

import gzip
import hashlib
import io
import zipfile

import numpy as np
import pandas
import pytest

from fsmap.data.catalogue import Download, find
from fsmap.data.fetch import convert, write_csv
from fsmap.data.sources import look_for
from fsmap.errors import InputError, MissingExtraError

WANTED = b"a,b\n1,0.25\n-3,1e-07\n"


def zipped(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"folder/{name}", content)
    return stream.getvalue()


def download(kind: str, member: str = "", **changes) -> Download:
    return Download("http://source", "a.csv", kind, member, ("a", "b"))._replace(**changes)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("comma", b'"x","y"\n1.0,0.250\n-3,0.0000001\n'),
        ("semicolon", b"x;y\r\n1;.25\r\n-3.0;1E-7\r\n"),
        ("space", b"  1.0000e+00   2.5e-1\n -3 1e-7 \n\n"),
    ],
)
def test_text(kind, source):
    assert convert(source, download(kind)) == WANTED


def test_a_member_of_an_archive():
    assert (
        convert(zipped(data=b"1 .25\n-3 1e-7\n", other=b"x"), download("space", "data")) == WANTED
    )


def test_two_files_side_by_side():
    raw = zipped(inputs=b"1\n-3\n", outputs=b".25\n1e-7\n")
    assert convert(raw, download("pair", "inputs outputs")) == WANTED


def test_columns_are_chosen_and_ordered():
    raw = b"y,z,x\n0.25,9,1\n1e-7,9,-3\n"
    assert convert(raw, download("comma", columns=(2, 0))) == WANTED


def test_rows_on_two_lines():
    prose = b"about houses\n" * 22
    rows = b" 1 2 3 4 5 6 7 8 9 10 11\n  12 13 14.5\n"
    made = convert(prose + rows, Download("u", "p", "statlib", header=tuple("abcdefghijklmn")))
    assert made.splitlines()[1] == b"1,2,3,4,5,6,7,8,9,10,11,12,13,14.5"


def test_excel_through_pandas(monkeypatch):
    sheet = pandas.DataFrame({"x": [1.0, -3.0, np.nan], "y": [0.25, 1e-7, np.nan], "z": np.nan})
    monkeypatch.setattr(pandas, "read_excel", lambda _: sheet)
    assert convert(b"", download("excel")) == WANTED


def test_excel_without_its_engine(monkeypatch):
    def refuse(_):
        raise ImportError("Missing optional dependency 'xlrd'.")

    monkeypatch.setattr(pandas, "read_excel", refuse)
    with pytest.raises(MissingExtraError, match="openpyxl"):
        convert(b"", download("excel"))


def test_copy_and_gunzip():
    assert convert(b"raw", download("copy")) == b"raw"
    assert convert(gzip.compress(b"raw"), download("gunzip")) == b"raw"


def test_the_wrong_number_of_columns():
    with pytest.raises(InputError, match=r"http://source has 3 columns, expected 2 \(a, b\)"):
        convert(b"1 2 3\n", download("space"))


def test_something_that_is_no_table():
    with pytest.raises(InputError, match="expected"):
        convert(b"moved\n", download("space"))


def test_an_archive_without_the_member():
    with pytest.raises(InputError, match="archive"):
        convert(zipped(other=b""), download("space", "data"))


def rows_of(file) -> np.ndarray:
    path = look_for(file).path
    if path is None:
        pytest.skip(f"{file.path} is not on this machine")
    return np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)


def text(table: np.ndarray, delimiter: str, header: str = "") -> bytes:
    lines = [header] if header else []
    lines += [delimiter.join(f"{v:.17g}" for v in row) for row in table.tolist()]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("name", ["winered", "winewhite", "protein", "naval", "yacht", "kin8nm"])
def test_the_official_form_of_a_real_table_has_the_checksum_of_the_catalogue(name):
    entry = find(name)
    recipe, file = entry.downloads[0], entry.files[0]
    table = rows_of(file)
    if name == "protein":
        source = text(np.roll(table, 1, axis=1), ",", "RMSD,F1")
    elif name == "naval":
        source = text(np.hstack([table, table[:, :1]]), "   ")
    else:
        delimiter = {"semicolon": ";", "comma": ",", "space": " "}[recipe.kind]
        source = text(table, delimiter, "" if recipe.kind == "space" else "header")
    raw = zipped(**{recipe.member: source}) if recipe.member else source
    assert hashlib.sha256(convert(raw, recipe)).hexdigest() == file.sha256


def test_excel_sheets_of_real_tables_have_the_checksum_of_the_catalogue(monkeypatch):
    for name in ("concrete", "energy", "power"):
        entry = find(name)
        recipe, file = entry.downloads[0], entry.files[0]
        table = pandas.DataFrame(rows_of(file))
        table["extra"] = 1.0
        sheet = table if recipe.columns else table.drop(columns="extra")
        monkeypatch.setattr(pandas, "read_excel", lambda _, sheet=sheet: sheet)
        raw = zipped(**{recipe.member: b""})
        assert hashlib.sha256(convert(raw, recipe)).hexdigest() == file.sha256


def test_numbers_in_their_shortest_form():
    table = np.array([[61.887365759999994, 540.0, 1e16]])
    assert write_csv(("a", "b", "c"), table) == b"a,b,c\n61.887365759999994,540,1e+16\n"
