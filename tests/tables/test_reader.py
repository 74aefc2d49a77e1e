"""Files that are tables, and files that are not."""

from __future__ import annotations

import pytest

from fsmap.errors import InputError
from fsmap.tables.reader import read_table, write_table


@pytest.fixture
def written(tmp_path):
    def write(content: str | bytes, name: str = "table.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_any_usual_separator(written, separator):
    text = "a,b\n1,x\n2,y\n".replace(",", separator)
    table = read_table(written(text))
    assert (list(table.columns), table.columns["a"].tolist()) == (["a", "b"], ["1", "2"])
    assert table.mark == ("," if separator == ";" else ".")
    assert read_table(written(text.replace("1", "0.5"))).mark == "."


def test_quotes_blank_lines_and_byte_order_mark(written):
    table = read_table(written(b'\xef\xbb\xbfname,"a,b"\n\n"x,y",1\nz,2\n'))
    assert list(table.columns) == ["name", "a,b"]
    assert table.columns["name"].tolist() == ["x,y", "z"]


def test_cells_without_a_value_are_none(written):
    table = read_table(written("a,b\nNA,1\n?,2\n-999,3\nNone,\n"), missing=["-999"])
    assert table.columns["a"].tolist() == [None] * 4
    assert table.columns["b"].tolist() == ["1", "2", "3", None]


def test_trailing_separators_encodings_and_an_index(written):
    assert list(read_table(written("a,b,\n1,2,\n3,4,\n")).columns) == ["a", "b"]
    table = read_table(written("a,b\n1,2,,\n\n,\n3,4,,\n,,\n"))
    assert table.columns["a"].tolist() == ["1", None, "3"]
    assert table.notes == ("the last 1 of 4 rows have no values: left out",)
    assert read_table(written('a\n1\n""\n2\n')).num_rows == 3
    table = read_table(written("name,n\nZürich,1\n".encode("latin-1")))
    assert table.columns["name"].tolist() == ["Zürich"]
    assert "Latin-1" in table.notes[0]
    table = read_table(written(",a\n0,5\n1,6\n"))
    assert list(table.columns) == ["a"]
    assert "taken for row numbers" in table.notes[0]
    assert list(read_table(written("<a>\t[b]\n1\t2\n".encode("utf-16"))).columns) == ["<a>", "[b]"]


def test_a_text_that_would_be_a_formula_is_quoted():
    text = write_table({"prediction": ["=HYPERLINK(1)", "@cmd|x"], "p(=1)": [0.5, -0.5]})
    assert text.splitlines() == ["prediction,p(=1)", "'=HYPERLINK(1),0.5", "'@cmd|x,-0.5"]
    assert write_table({"p": ["-1", "+", "-", "=a"]}) == "p\n-1\n+\n-\n=a\n"


def test_what_is_written_can_be_read(written):
    columns = {"a": [1.5, 2.0], "b": ["x, y", 'say "z"']}
    table = read_table(written(write_table(columns)))
    assert [float(v) for v in table.columns["a"]] == [1.5, 2.0]
    assert table.columns["b"].tolist() == ["x, y", 'say "z"']


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty. A table has a line of column names"),
        ("a,b\n", r"has column names \('a', 'b'\) and no rows"),
        ("a,b\n1,2\n3\n", r"row 2 has 1 cells and the header has 2 \(separator ','\): '3'"),
        ("a,b\n1,2,3\n4,5\n6,7\n", "row 1 has 3 cells and the header has 2"),
        ("a,b,a\n1,2,3\n", "has several columns named 'a'. Rename or remove"),
        ("1.5,2\n3,4\n", "is '1.5', '2': data, not column names. Add a line of names"),
        ("a,,b\n1,2,3\n", "column 2 of the header has no name"),
        ("<html><body>404</body></html>", "is not a CSV: it looks like HTML or XML"),
        ('{"a": [1, 2]}', "it looks like JSON. Export it as CSV"),
        (b"PK\x03\x04rest", r"a zip archive or an Excel workbook \(.xlsx\)"),
        (b"\x7fELF\x00\x01", "it looks like a binary file"),
        ("a,b\n" + "x" * 200_000 + ",1\n", "is not a CSV: field larger than field limit"),
        (b"PAR1 and then nothing", "it looks like a Parquet file"),
    ],
)
def test_what_is_no_table_says_what_it_is(written, content, message):
    with pytest.raises(InputError, match=message):
        read_table(written(content))
