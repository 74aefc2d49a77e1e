"""What a summary must hold to be read, and where it is read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fsmap.cli.list import last_result
from fsmap.errors import CheckpointError
from fsmap.paper.run_folder import coverage, read_run, write_summary

WHOLE = {"experiment": "squares", "size": "full", "claims": [{"claim": "c", "holds": True}]}


def write(folder, summary):
    folder.mkdir()
    if isinstance(summary, dict):
        write_summary(folder, summary)
    else:
        (folder / "summary.json").write_text(json.dumps(summary))


def test_what_every_reader_needs_is_enough(tmp_path):
    write(tmp_path / "squares", WHOLE | {"covers": {"units": 2, "of": 4}})
    run = read_run(tmp_path / "squares")
    assert (run.id, run.held, coverage(run.summary)) == ("squares", 1, "2 of 4 units")
    assert coverage(WHOLE) == ""


@pytest.mark.parametrize(
    "summary",
    [
        [],
        {key: value for key, value in WHOLE.items() if key != "size"},
        {**WHOLE, "claims": [{"claim": "c"}]},
        {**WHOLE, "covers": [2, 4]},
        {**WHOLE, "covers": "2 of 4"},
        {**WHOLE, "covers": {"units": 2}},
        {**WHOLE, "covers": {"units": 2, "of": "four"}},
    ],
)
def test_a_damaged_summary_is_refused_wherever_it_is_read(tmp_path, summary):
    write(tmp_path / "squares", summary)
    with pytest.raises(CheckpointError, match=r"squares/summary.json is not a summary of fsmap"):
        read_run(tmp_path / "squares")
    assert "cannot read" in last_result("squares", [tmp_path])


def test_who_reads_a_run_needs_nothing_of_the_page():
    check = (
        "import sys, fsmap.paper.run_folder; assert 'fsmap.paper.report.view' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
