"""`fsmap sweep`: the grid, a folder per point, the table, going on, and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import sys

import pytest

from fake_experiment import Squares, only
from fsmap.cli import main
from fsmap.errors import InputError
from fsmap.paper import sweep
from fsmap.paper.options import Options
from fsmap.paper.run_folder import RunFolder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Squares, "trouble", None)
    with only(Squares):
        yield tmp_path


def raising(error):
    def trouble(unit):
        raise error

    return staticmethod(trouble)


GRID = ("sweep", "squares", "--silent", "--set", "scale=1,2", "--set", "sizes=1,2;3,4,5")


def test_a_folder_for_each_point_and_a_table(here, capsys):
    assert main(GRID) == 0
    out, notes = capsys.readouterr()
    assert "squares: 4 points in sweeps/squares" in notes
    folder = here / "sweeps" / "squares"
    names = {"scale=1 sizes=1,2", "scale=1 sizes=3,4,5", "scale=2 sizes=1,2", "scale=2 sizes=3,4,5"}
    assert {path.name for path in folder.iterdir()} == names | {"table.csv"}
    rows = RunFolder(folder / "scale=2 sizes=3,4,5" / "squares").rows()
    assert {row.value for row in rows if row.metric == "square" and row.seed == 0} == {18, 32, 50}
    with (folder / "table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * (2 + 3)  # curves have no place in it
    first = {"scale": "1", "sizes": "1,2", "method": "fs-map", "n": "1", "metric": "square"}
    assert table[0] == first | {"mean": "1.05", "stderr": table[0]["stderr"], "runs": "2"}
    assert float(table[0]["stderr"]) == pytest.approx(0.05)
    assert "1 of 2" in out
    assert "fsmap report 'sweeps/squares/scale=1 sizes=1,2'" in out


def test_a_metric_of_every_point(capsys):
    assert main([*GRID, "--metric", "square"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["scale", "sizes", "method", "n", "square", "runs"]
    assert lines[1] == ["1", "1,2", "fs-map", "1", "1.05", "±", "0.05", "2"]
    assert main([*GRID, "--resume", "--metric", "cubes"]) == 2
    assert "no point has a metric 'cubes'. Known: square." in capsys.readouterr().err


def test_a_point_that_fails_does_not_stop_the_others_and_is_repeated_alone(capsys, monkeypatch):
    def trouble(unit):
        if unit["n"] == 4:
            raise RuntimeError("boom")

    monkeypatch.setattr(Squares, "trouble", staticmethod(trouble))
    assert main(GRID) == 1
    errors = capsys.readouterr().err
    assert "RuntimeError: boom" in errors
    assert "2 of 4 points failed" in errors
    again = "fsmap sweep squares --set scale=1,2 --set 'sizes=1,2;3,4,5' --resume"
    assert again in errors
    assert main(GRID) == 2
    assert "holds an unfinished run (1 units done)" in capsys.readouterr().err

    done = []
    monkeypatch.setattr(Squares, "trouble", staticmethod(lambda unit: done.append(unit["n"])))
    assert main([*GRID, "--resume"]) == 0
    assert done == [4, 5, 4, 5]  # what was finished is not repeated


def scales_in_the_table(here):
    with (here / "sweeps" / "squares" / "table.csv").open(newline="") as file:
        return {line["scale"] for line in csv.DictReader(file)}


def test_the_table_leaves_out_points_that_lack_units(here, monkeypatch, capsys):
    grid = ["sweep", "squares", "--quick", "--silent", "--set"]
    assert main([*grid, "scale=1,2"]) == 0
    monkeypatch.setattr(Squares, "selecting", ("sizes",))
    monkeypatch.setattr(Squares, "quick", dataclasses.replace(Squares.quick, sizes=(1, 2, 3)))
    monkeypatch.setattr(Squares, "trouble", raising(RuntimeError("boom")))
    assert main([*grid, "scale=1", "--resume"]) == 1
    assert scales_in_the_table(here) == {"2"}
    monkeypatch.setattr(Squares, "trouble", None)
    assert main([*grid, "scale=3"]) == 0
    assert scales_in_the_table(here) == {"2", "3"}
    assert "and of 1 point measured before" in capsys.readouterr().out
    assert main([*grid, "scale=1", "--resume"]) == 0
    assert scales_in_the_table(here) == {"1", "2", "3"}


def test_a_point_with_a_damaged_summary_is_left_out_until_it_is_resumed(here, monkeypatch, capsys):
    grid = ["sweep", "squares", "--quick", "--silent", "--set"]
    assert main([*grid, "scale=1,2"]) == 0
    (here / "sweeps" / "squares" / "scale=1" / "squares" / "summary.json").write_text("{")
    assert main([*grid, "scale=3"]) == 0
    assert "left out" in capsys.readouterr().err
    assert scales_in_the_table(here) == {"2", "3"}
    with monkeypatch.context() as patch:
        patch.setattr(Squares, "draw", lambda self, rows: 1 / 0)
        assert main([*grid, "scale=1", "--resume"]) == 1
    assert "unfinished" in capsys.readouterr().out
    assert main([*grid, "scale=1", "--resume"]) == 0
    assert scales_in_the_table(here) == {"1", "2", "3"}


def test_the_table_keeps_the_points_of_other_grids(here, capsys):
    small = ["sweep", "squares", "--quick", "--silent"]
    assert main([*small, "--set", "scale=1,2", "--set", "sizes=1,2;3,4"]) == 0
    assert main(["sweep", "squares", "--silent", "--set", "scale=5"]) == 0  # another size
    assert main([*small, "--set", "scale=3"]) == 0
    out, notes = capsys.readouterr()
    assert "squares: 1 point in sweeps/squares" in notes
    assert "table.csv has every metric, and of 4 points measured before; a point: " in out
    with (here / "sweeps" / "squares" / "table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[:3] == ["scale", "sizes", "method"]
    points = list(dict.fromkeys((line["scale"], line["sizes"]) for line in table))
    assert points == [("3", ""), ("1", "1,2"), ("1", "3,4"), ("2", "1,2"), ("2", "3,4")]
    assert len(table) == 5 * 2
    assert main([*small, "--resume", "--set", "scale=3", "--metric", "square"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 + 1  # only this grid is shown


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_pictures_that_cannot_be_drawn_are_said_before_the_work(command, here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(Squares, "trouble", raising(AssertionError("a unit was measured")))
    assert main([command, "squares", "--quick", "--silent", "--set", "scale=1"]) == 2
    assert "pip install 'fsmap[report]'" in capsys.readouterr().err
    assert not any(here.iterdir())


def test_an_interrupt_says_how_to_go_on(monkeypatch, capsys):
    monkeypatch.setattr(Squares, "trouble", raising(KeyboardInterrupt()))
    arguments = ["--out", "here", "--seeds", "3", "--quick", "--set", "scale=1,2", "--silent"]
    assert main(["sweep", "squares", *arguments]) == 130
    command = "fsmap sweep squares --quick --out here --seeds 3 --set scale=1,2 --resume"
    assert command in capsys.readouterr().err


def test_a_grid_of_too_many_points_is_refused():
    grid = [f"{name}={','.join(map(str, range(1, 201)))}" for name in ("scale", "seeds")]
    with pytest.raises(InputError, match="40000 points"):
        sweep.points("squares", grid, Options())


def test_names_of_folders():
    assert sweep.folder_name(["data=a/b:c"]).startswith("data=a-b-c ")
    assert sweep.folder_name(["data=a/b"]) != sweep.folder_name(["data=a:b"])
    assert len(sweep.folder_name(["sizes=" + "1," * 200])) < 130
