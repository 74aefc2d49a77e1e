"""The page holds everything a run says, escapes it, and needs nothing from outside."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from fake_experiment import Squares, only
from fsmap.errors import CheckpointError, InputError
from fsmap.paper import engine
from fsmap.paper.options import Options
from fsmap.paper.report.page import Entry, build, find_runs
from fsmap.paper.report.view import embedded
from fsmap.paper.run_folder import write_summary

CATALOGUE = [
    Entry("missing-one", "Fig. 9", "Something else", "Other things"),
    Entry("squares", "Fig. 0", "Squares", "Numbers"),
]


class Text(HTMLParser):
    """The text and the tags of a page, and whether it is nested properly."""

    VOID = {"meta", "link", "input", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


@pytest.fixture
def runs(tmp_path):
    with only(Squares):
        for folder, quick in (("runs", True), ("results", False)):
            options = Options(out=tmp_path / folder, quick=quick, silent=True)
            (outcome,) = engine.run(["squares"], options)
            assert outcome.status == "finished"
    return tmp_path


def change(folder, **entries):
    file = folder / "squares" / "summary.json"
    write_summary(file.parent, {**json.loads(file.read_text()), **entries})


def page_of(runs, *folders, catalogue=CATALOGUE):
    page = build([runs / name for name in folders], runs / "report", catalogue)
    assert page == runs / "report" / "index.html"
    text = page.read_text()
    return text, Text(text)


def test_the_page_says_everything(runs):
    _, page = page_of(runs, "runs")
    said = " ".join(page.text.split())
    for words in (
        *("Fig. 0", "Squares of small numbers", "The curve is a parabola.", "quick size"),
        *("1 of 2", "larger numbers have larger squares", "the last square is a million"),
        *("Claims that do not hold here", "made up", "exact arithmetic", "cpu", "FS-MAP"),
        *("1.00 ± 0.10", "fsmap run squares --quick", "commit", "torch", "α = 2", "scaled by 2"),
        *("Not run yet", "Something else", "fsmap run missing-one"),
    ):
        assert words in said, words
    labels = [a.get("aria-label") for tag, a in page.tags if tag == "svg"]
    assert labels.count("holds") == 1
    assert labels.count("does not hold") == 1


def test_the_page_needs_nothing_from_outside(runs):
    text, page = page_of(runs, "runs")
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


def test_names_are_unique_and_links_lead_somewhere(runs):
    _, page = page_of(runs, "runs")
    names = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(names) == len(set(names))
    targets = {a["href"][1:] for _, a in page.tags if (a.get("href") or "").startswith("#")}
    assert targets <= set(names)
    used = {a["xlink:href"][1:] for _, a in page.tags if a.get("xlink:href")}
    assert used
    assert used <= set(names)


def test_a_full_run_is_shown_before_a_quick_one_which_is_named(runs):
    _, page = page_of(runs, "runs", "results")
    said = " ".join(page.text.split())
    assert "full size" in said
    assert f"Another run: {runs / 'runs' / 'squares'}: quick, cpu, 1 of 2 claims hold." in said
    assert said.count("The curve is a parabola.") == 1


def test_one_run_can_be_named_and_need_not_be_in_the_catalogue(runs):
    _, page = page_of(runs, "runs/squares", catalogue=[])
    assert "Other runs" in page.text


def test_text_is_escaped(runs):
    nasty = "</script><script>alert(1)</script> & <b>"
    change(runs / "runs", title=nasty, claims=[{"claim": nasty, "holds": True, "ours": nasty}])
    file = runs / "runs" / "squares" / "interactive.json"
    slider = json.loads(file.read_text())
    slider["frames"][0]["note"] = slider["frames"][0]["curves"][0]["name"] = nasty
    file.write_text(json.dumps(slider))
    text, page = page_of(runs, "runs")
    assert "alert(1)</script>" not in text
    assert nasty in page.text
    assert all(attributes.get("src") is None for _, attributes in page.tags)


def test_embedded_json_is_read_back():
    data = {"a": "</script>\u2028", "b": [1.5, float("nan")]}
    assert "<" not in embedded(data)
    assert json.loads(embedded(data)) == {"a": "</script>\u2028", "b": [1.5, "nan"]}


def test_a_summary_with_the_contracts_entries_only_is_enough(runs):
    file = runs / "runs" / "squares" / "summary.json"
    keep = "experiment size protocol seconds device commit claims table".split()
    whole = json.loads(file.read_text())
    write_summary(file.parent, {key: whole[key] for key in keep})
    (runs / "runs" / "squares" / "interactive.json").unlink()
    text, page = page_of(runs, "runs")
    assert "fsmap run squares" in page.text
    assert 'aria-label="squares: squares"' in text  # the picture is found by its file


def test_nothing_to_show(tmp_path):
    with pytest.raises(InputError, match="there is no folder .*nowhere.*fsmap run fourier --quick"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="no finished run in"):
        find_runs([tmp_path])


def test_a_damaged_summary_is_named(runs):
    file = runs / "runs" / "squares" / "summary.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"squares/summary.json is not a summary of fsmap"):
        find_runs([runs / "runs"])


def test_an_unwritable_folder(runs):
    (runs / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot write to .*file.*Choose another"):
        build([runs / "runs"], runs / "file", CATALOGUE)
