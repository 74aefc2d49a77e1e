"""``fsmap fit`` and ``fsmap predict``: what they print and write, and every bad table in words."""

from __future__ import annotations

import csv
import errno
import sys

import pytest

from fsmap.cli import main
from small_tables import FAST, flowers, houses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two tables and their models."""
    here = tmp_path_factory.mktemp("tables")
    for make, name, target in ((houses, "houses", "price"), (flowers, "flowers", "kind")):
        table, model = make(here / f"{name}.csv"), here / f"{name}.pt"
        assert main(["fit", str(table), "--target", target, "--out", str(model), *FAST]) == 0
    return here


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments) -> tuple[int, str, str]:
    return (main([*map(str, arguments)]), *capsys.readouterr())


def test_a_table_a_verdict_two_files(here, capsys):
    houses(here / "houses.csv")
    code, out, _ = run(capsys, "fit", "houses.csv", "--target", "price", *FAST)
    assert code == 0
    assert "houses.csv: 120 rows, 6 columns" in out
    assert "target 'price': regression (120 distinct numbers)" in out
    header = next(line for line in out.splitlines() if "RMSE" in line)
    assert all(word in header for word in ("R²", "NLL", "90 % intervals hold", "weight decay"))
    assert "model.pt and model.html written" in out
    command = "fsmap fit houses.csv --target price --hidden 8 --steps 40"
    assert command in (here / "model.html").read_text()


def test_nothing_is_overwritten_without_force(folder, here, capsys):
    for name in ("model.pt", "model.html"):
        (here / name).write_text("precious")
        code, _, err = run(capsys, "fit", folder / "houses.csv", "--target", "price", *FAST)
        assert code == 2
        assert f"{name} exists already. Choose another --out, or overwrite it with --force" in err
        assert (here / name).read_text() == "precious"
        (here / name).unlink()
    (here / "pred.csv").write_text("precious")
    arguments = ["predict", folder / "houses.pt", folder / "houses.csv", "--out", "pred.csv"]
    code, _, err = run(capsys, *arguments)
    assert (code, (here / "pred.csv").read_text()) == (2, "precious")
    assert "pred.csv exists already" in err
    assert run(capsys, *arguments, "--force")[0] == 0
    assert (here / "pred.csv").read_text().startswith("prediction,low,high\n")


def test_inputs_are_never_overwritten(folder, here, capsys):
    houses(here / "houses.csv")
    houses(here / "page.html")  # a table with an odd name: the page would take its place
    (here / "link.csv").symlink_to("houses.csv")
    (here / "houses.pt").write_bytes((folder / "houses.pt").read_bytes())
    kept = {path.name: path.read_bytes() for path in here.iterdir()}
    fit, predict = ["fit", "houses.csv", "--target", "price"], ["predict", "houses.pt"]
    for arguments in (
        [*fit, "--out", "houses.csv"],
        [*fit, "--out", "./link.csv"],
        ["fit", "page.html", "--target", "price", "--out", "page.pt"],
        [*predict, "houses.csv", "--out", here / "houses.csv"],
        [*predict, "houses.csv", "--out", "houses.pt"],
    ):
        for force in ([], ["--force"]):
            code, _, err = run(capsys, *arguments, *force)
            assert code == 2
            assert "is what this command reads" in err
    assert {path.name: path.read_bytes() for path in here.iterdir()} == kept


def test_predictions_to_the_terminal_and_to_files(folder, here, capsys):
    inputs = folder / "houses.pt", folder / "houses.csv"
    code, out, _ = run(capsys, "predict", *inputs)
    rows = list(csv.DictReader(out.splitlines()))
    assert (code, len(rows)) == (0, 120)
    assert list(rows[0]) == ["prediction", "low", "high"]
    assert all(float(r["low"]) < float(r["prediction"]) < float(r["high"]) for r in rows)
    assert run(capsys, "predict", *inputs, "--out", "pred.csv")[0] == 0
    assert (here / "pred.csv").read_text() == out


def test_columns_by_name_in_any_order_extra_ones_told(folder, here, capsys):
    _, expected, _ = run(capsys, "predict", folder / "houses.pt", folder / "houses.csv")
    with (folder / "houses.csv").open() as file:
        rows = [{**row, "color": "red"} for row in csv.DictReader(file)]
    with (here / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["color", "town", "age", "size"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows([*rows, {}, rows[0]])
    code, out, err = run(capsys, "predict", folder / "houses.pt", "new.csv")
    assert (code, out.startswith(expected), out.count("\n")) == (0, True, 1 + 120 + 2)
    assert "columns that the model does not use: color" in err


def test_what_means_no_value_is_kept_with_the_model(here, capsys):
    numbers = "".join(f"{k},{k}\n" for k in range(40))
    (here / "t.csv").write_text(f"x,y\n-999.0,1\n?,1\n{numbers}")
    fit = "fit t.csv --target y --method linear --missing -999 --silent"
    assert "--missing -999: 1 cells\n" in run(capsys, *fit.split())[1]
    _, first, second, *_ = run(capsys, "predict", "model.pt", "t.csv")[1].splitlines()
    assert first == second


LONG = "\n".join(f"{k},{k % 5},{k * 7 % 11}" for k in range(30)) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        "x,z,price\n" + LONG.replace("3,3,", ",3,"),
        "x,z,price\n" + "".join(f"{k * k},,{k}\n" for k in range(30)),
        "x,z,price\n" + LONG + "3,4,\n",
        "x,t,price\n" + "".join(f"{k * k},2024-1-{k + 1},{k}\n" for k in range(30)),
    ],
)
def test_gaps_and_dates_are_no_mistakes(here, content):
    (here / "t.csv").write_text(content)
    assert main("fit t.csv --target price --hidden 4 --steps 2 --silent".split()) == 0


def test_a_missing_extra_is_told_before_the_work(folder, here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, out, err = run(capsys, "fit", folder / "houses.csv", "--target", "price", *FAST)
    assert (code, out) == (2, "")
    assert "pip install 'fsmap[report]'" in err


def test_a_place_that_cannot_be_written_is_found_before_training(here, capsys, monkeypatch):
    houses(here / "houses.csv")
    monkeypatch.setattr("fsmap.tables.model.fit_table", lambda *_: pytest.fail("trained"))
    code, _, err = run(capsys, "fit", "houses.csv", "--target", "price", "--out", "m" * 300)
    assert code == 2
    assert "too long" in err
    closed = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(closed))
    code, _, err = run(capsys, "fit", "houses.csv", "--target", "price")
    assert code == 2
    assert "Read-only" in err


def test_the_model_is_there_if_the_page_fails(here, capsys, monkeypatch):
    houses(here / "houses.csv")
    monkeypatch.setattr("fsmap.paper.report.table_page.render", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["fit", "houses.csv", "--target", "price", *FAST])
    assert run(capsys, "predict", "model.pt", "houses.csv")[0] == 0


def test_numbers_outside_the_training_range(folder, here, capsys):
    (here / "new.csv").write_text("size,age,town\n9e9,20,Bern\n200,20,Atlantis\n")
    arguments = ["predict", folder / "houses.pt", "new.csv"]
    _, _, err = run(capsys, *arguments)
    assert "'size' was between" in err
    assert "'Atlantis'; in 1 rows" in err
    (here / "new.csv").write_text("size,age,town\n1e308,20,Bern\n")
    code, _, err = run(capsys, *arguments)
    assert code != 0
    assert "row 1 is not finite" in err
