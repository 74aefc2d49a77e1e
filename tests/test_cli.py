"""The command line: help, versions, errors in one line, and what each command prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fake_experiment import Broken, Squares, only
from fsmap import __version__
from fsmap.cli import main
from fsmap.errors import MissingDataError
from fsmap.paper.rows import RunFolder


class NeedsData(Squares):
    id = "needs-data"

    def units(self, config):
        raise MissingDataError("boston is not there.\nGet it with: fsmap data get boston")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Squares, "trouble", None)
    with only(Squares, NeedsData, Broken):
        yield tmp_path


def test_version_and_help(capsys):
    said = {"--version": f"fsmap {__version__}\n", "run --help": "Examples:\n  fsmap run"}
    for words, text in said.items():
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        assert ended.value.code == 0
        assert text in capsys.readouterr().out
    said = {"fitt": "Did you mean 'fit'?\nSee `fsmap -", "version": "Did you mean '--version'"}
    said["fit a.csv --targt x"] = "Did you mean '--target'?\nSee `fsmap fit --help`"
    for words, text in said.items():
        with pytest.raises(SystemExit, match="2"):
            main(words.split())
        assert text in capsys.readouterr().err
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.index(" list ") < out.index(" run ") < out.index(" report ")


def test_run_list_report(here, capsys):
    assert main(["run", "squares", "--quick", "--silent"]) == 0
    out = capsys.readouterr().out
    assert "squares  1 of 2 claims agree, 1 differs" in out
    assert "✗ the last square is a million (4.0)" in out
    assert "Make a page of it with: fsmap report runs" in out
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "Figures and tables of the main text" in out
    assert max(map(len, out.splitlines())) <= 100
    line = next(line for line in out.splitlines() if line.startswith("squares"))
    assert line.split()[1:6] == ["Fig.", "0", "cpu", "1", "s"]
    assert line.endswith("1/2 agree, 1 differ, quick")
    assert main(["report"]) == 0
    assert capsys.readouterr().out.strip() == str(here / "report" / "index.html")
    page = (here / "report" / "index.html").read_text()
    assert "fsmap run needs-data" in page
    assert main(["run", "squares", "--quick", "--resume"]) == 0
    assert "squares  finished before  runs/squares" in capsys.readouterr().out


def test_list_shows_one_experiment_with_its_settings(capsys):
    assert main(["list", "squares"]) == 0
    out = capsys.readouterr().out
    assert "exact arithmetic" in out
    assert "sizes  1,2,3,4  1,2" in out
    assert main(["list", "square"]) == 2
    assert "Did you mean 'squares'?" in capsys.readouterr().err


def test_list_says_what_is_unfinished_or_damaged(here, capsys):
    (here / "runs" / "squares").mkdir(parents=True)
    (here / "runs" / "squares" / "units.jsonl").write_text("{}\n")
    (here / "runs" / "broken").mkdir()
    (here / "runs" / "broken" / "summary.json").write_text("{")
    main(["list"])
    assert capsys.readouterr().out.count("damaged in runs") == 2


def test_missing_data_is_one_message_and_exit_code_two(capsys):
    assert main(["run", "needs-data"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fsmap: ")
    assert "fsmap data get boston" in said


def test_debug_shows_the_traceback(capsys):
    for words in (["--debug", "report", "nowhere"], ["report", "nowhere", "--debug"]):
        assert main(words) == 2
        assert "Traceback" in capsys.readouterr().err


def test_all_skips_in_one_line_and_ends_with_one_after_a_bug(capsys):
    assert main(["run", "all", "--quick", "--silent"]) == 1
    captured = capsys.readouterr()
    skipped = "needs-data  skipped: boston is not there. Get it with: fsmap data get boston\n"
    assert skipped in captured.out
    assert "squares  1 of 2" in captured.out
    assert "ZeroDivisionError" in captured.err
    assert "fsmap: 1 of 3 failed." in captured.err
    assert "Make a page" not in captured.out


def test_redraw_makes_the_claims_anew(here, monkeypatch, capsys):
    main(["run", "squares", "--quick", "--silent"])
    monkeypatch.setattr(Squares, "claims", lambda self, rows: [])
    assert main(["report", "--redraw"]) == 0
    assert "squares: drawing" in capsys.readouterr().err
    assert "larger numbers" not in (here / "report" / "index.html").read_text()
    summary = here / "runs" / "squares" / "summary.json"
    before = summary.read_bytes()
    with RunFolder(here / "runs" / "squares").lock():
        assert main(["report", "--redraw"]) == 0
    assert "squares: not drawn again: another process" in capsys.readouterr().err
    assert summary.read_bytes() == before


def test_a_reader_who_has_had_enough_is_no_error():
    command = f"{sys.executable} -m fsmap list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 141)
