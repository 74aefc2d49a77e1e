"""The page holds everything a run says, escapes it, and needs nothing from outside."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_experiment import Squares, only
from fsmap.errors import CheckpointError, InputError, MissingExtraError
from fsmap.paper import engine
from fsmap.paper.options import Options
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import MOST_POINTS, collect, extract
from fsmap.paper.report.inline_svg import Glyphs, inline, untex
from fsmap.paper.report.page import Entry, build, find_runs
from fsmap.paper.report.view import embedded, pivot
from fsmap.paper.rows import Row
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
    assert (
        f"Another run: {runs / 'runs' / 'squares'}: quick, cpu, 1 of 2 claims agree, 1 differs."
        in said
    )
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
    with pytest.raises(InputError, match="nowhere"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="finished"):
        find_runs([tmp_path])


def test_a_damaged_summary_is_named(runs):
    file = runs / "runs" / "squares" / "summary.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="summary.json"):
        find_runs([runs / "runs"])


def test_an_unwritable_folder(runs):
    (runs / "file").write_text("in the way")
    with pytest.raises(InputError, match="write"):
        build([runs / "runs"], runs / "file", CATALOGUE)


def make():
    made, (left, right) = figures.axes(2)
    with figures.style():
        figures.plot_mean(left, [1, 10, 100], [1.0, 2.0, 4.0], [0.1, 0.1, np.nan], "fs-map")
        left.axhline(2.0)
        left.set_xscale("log")
        left.set_xlabel(r"points $N$")
        left.set_ylabel(r"$\epsilon$ & <b>")
        left.legend()
        right.pcolormesh(np.zeros((30, 30)), vmin=0, vmax=1)
        right.scatter([1, 50], [2, 3], color=figures.INK, label="data")
        right.set_xlim(0, 30)
    return made


@pytest.fixture
def figure():
    return make()


def test_the_style_leaves_no_trace(figure):
    before = dict(matplotlib.rcParams)
    figures.to_svg(figure)
    with figures.style():
        assert matplotlib.rcParams["font.family"] == ["STIXGeneral", "DejaVu Sans"]
    assert dict(matplotlib.rcParams) == before


def test_every_color_of_the_style_has_a_dark_twin():
    used = {figures.INK, figures.MUTED, figures.GRID, figures.PAPER, *figures.COLORS.values()}
    assert used == set(figures.DARK)


def test_files_are_written_and_the_same_for_the_same_values(tmp_path):
    figures.save(make(), tmp_path, "one")
    figures.save(make(), tmp_path, "two")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
    assert {file.name for file in tmp_path.iterdir()} == {
        *("one.png", "one.svg", "two.png", "two.svg")
    }


def test_hover_values_lie_where_the_svg_draws_them(figure):
    svg, series = extract(figures.to_svg(figure))
    assert "fsmap-hover" not in svg
    line, dots = series  # the axhline is no series; nor is the band
    assert (line["name"], line["color"]) == ("FS-MAP", figures.COLORS["fs-map"])
    assert [point[2:] for point in line["points"]] == [[1, 1], [10, 2], [100, 4]]
    marks = [
        (float(use.get("x")), float(use.get("y")))
        for use in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}use")
        if figures.COLORS["fs-map"] in use.get("style", "")
    ]
    for px, py, *_ in line["points"]:
        assert min(abs(px - x) + abs(py - y) for x, y in marks) < 0.05
    assert dots["name"] == "data"
    assert [point[2:] for point in dots["points"]] == [[1, 2]]  # the other one is outside


@pytest.mark.parametrize(
    ("top", "labels"), [(0.8, ["0.1", "0.2", "0.5"]), (100, ["0.1", "1", "10", "100"])]
)
def test_logarithmic_axes_have_plain_labels(top, labels):
    made, ax = figures.axes()
    ax.plot([1, 2], [0.1, top])
    figures.log_scale(ax, "y")
    made.canvas.draw()
    low, high = ax.get_ylim()
    shown = [label.get_text() for label in ax.get_yticklabels() if low <= label._y <= high]
    assert shown == labels


def test_a_dense_line_is_thinned_for_hovering():
    made, ax = figures.axes()
    ax.plot(np.linspace(0, 1, 10_000))
    figures.to_svg(made)
    (line,) = collect(made)
    assert 100 < len(line["points"]) <= MOST_POINTS


def test_a_mesh_becomes_an_image(figure):
    assert "<image" in figures.to_svg(figure)


def test_pictures_share_letters_and_no_names(figure):
    glyphs = Glyphs()
    svg = figures.to_svg(figure)
    one, two = (inline(svg, prefix, 'a "title" & <more>', glyphs) for prefix in "ab")
    names = []
    for picture in (one, two):
        tree = ElementTree.fromstring(picture.markup)  # still well-formed
        assert tree.get("aria-label") == 'a "title" & <more>'
        names.append({e.get("id") for e in tree.iter() if e.get("id")})
        assert all(name.startswith(("a-", "b-")) for name in names[-1])
        assert not any(color in picture.markup for color in figures.DARK)
    assert not names[0] & names[1]
    letters = {e.get("id") for e in ElementTree.fromstring(glyphs.markup()).iter("path")}
    used = one.markup.count('href="#STIX')
    assert letters
    assert used > 0
    assert all(
        part.split('"')[0] in letters
        for part in one.markup.split('href="#')[1:]
        if part.startswith("STIX")
    )
    assert (one.width, one.height) == (2 * 3.3 * 72, 2.5 * 72)
    assert one.hover[0]["color"] == "var(--fs-map)"
    assert one.hover[0]["x"] == "points N"
    assert one.hover[0]["y"] == "ε & <b>"


def test_a_picture_without_values():
    svg = '<?xml version="1.0"?><svg viewBox="0 0 4 2"><g id="x"/></svg>'
    found = inline(svg, "p", "t", Glyphs())
    assert found.hover == []
    assert (found.width, found.height) == (4, 2)


def test_labels_lose_their_tex():
    assert untex(r"$\mathcal{J}_{ij}$ of $\sigma^\star$") == "Jij of σ*"
    assert untex("plain_text") == "plain_text"


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"fsmap\[report\]"), figures.style():
        pass


def entry(metric: str, ours: float, **more: object) -> dict[str, object]:
    return {"dataset": "fmnist", "px": None, "metric": metric, "ours": ours, "runs": 3, **more}


def test_lines_of_one_run_become_one():
    table = [
        entry("accuracy", 93.91, stderr=0.12, paper=93.9, paper_stderr=0.1),
        entry("nll_scaled", 0.2),
        {**entry("accuracy", 95.0), "dataset": "cifar10"},
    ]
    first, second = pivot(table)
    assert first == {
        "dataset": "fmnist",
        "px": None,
        "accuracy %": "93.91 ± 0.12 (93.90 ± 0.10)",
        "NLL after T": "0.2",
        "runs": 3,
    }
    assert second["accuracy %"] == "95"
    assert list(second) == list(first)  # the same columns in the same order, blank or not
    assert second["NLL after T"] == ""


def test_another_table_stays():
    table = [{"run": "a", "nll": 1.0}, entry("nll", 2.0)]
    assert pivot(table) == table


def test_a_column_per_method_says_what_differs():
    line = {"dataset": "boston", "protocol": "fair", "stderr": 0.01, "runs": 20}
    table = [
        {**line, "method": "L-MAP", "ours": 0.3, "reg_strength": 1e-5, "edge": "λ↓", "paper": 0.35},
        {**line, "method": "scikit-learn MLP", "ours": 0.4, "alpha": 1.0, "edge": None, "runs": 5},
        {**line, "method": "once", "ours": 0.5, "runs": 1},
    ]
    assert pivot(table, "method") == [
        {
            "dataset": "boston",
            "protocol": "fair",
            "L-MAP": "0.300 ± 0.010 (0.35) λ↓",
            "scikit-learn MLP": "0.400 ± 0.010, 5 runs",
            "once": "0.500 ± 0.010, 1 run",
            "runs": 20,
        }
    ]


def rows():
    for n in (200, 100):
        for method, value in (("ps-map", 2.0), ("fs-map", 1.0)):
            for seed in range(3):
                yield Row("e", "rmse", value * n + seed, method, seed, {"n_train": n})
    yield Row("e", "curve", [1.0], "fs-map", 0, {})


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30))
def test_mean_and_standard_error_are_numpys(values):
    found = tables.mean(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-9)
    assert found.n == len(values)


def test_means_of_few_or_bad_values():
    assert tables.mean([2.0])[::2] == (2.0, 1)
    assert math.isnan(tables.mean([2.0]).stderr)
    assert math.isnan(tables.mean([]).mean)
    assert math.isnan(tables.mean([1.0, math.nan]).mean)
    assert tables.mean([1.0, math.inf]).mean == math.inf


def test_select_by_field_and_by_config():
    assert len(tables.select(rows(), metric="rmse", n_train=100)) == 6
    assert len(tables.select(rows(), method=("ps-map", "fs-map"), seed=0)) == 5
    assert tables.select(rows(), n_train=300) == []
    assert tables.select(rows(), experiment="other") == []


def test_a_line_is_sorted_and_averaged():
    line = tables.line(tables.select(rows(), metric="rmse", method="fs-map"), "n_train")
    assert line.x == [100, 200]
    assert line.mean == [101.0, 201.0]
    assert line.stderr == pytest.approx([1 / math.sqrt(3)] * 2)


def test_summarize_puts_the_paper_beside_ours():
    paper = {(100, "fs-map"): (99.0, 2.0), (200, "fs-map"): 199.0}
    table = tables.summarize(tables.select(rows(), metric="rmse"), "n_train", "method", paper=paper)
    lines = {(entry["n_train"], entry["method"]): entry for entry in table}
    assert len(lines) == 4
    assert lines[100, "fs-map"]["ours"] == 101.0
    assert lines[100, "fs-map"]["runs"] == 3
    assert (lines[100, "fs-map"]["paper"], lines[100, "fs-map"]["paper_stderr"]) == (99.0, 2.0)
    assert (lines[200, "fs-map"]["paper"], lines[200, "fs-map"]["paper_stderr"]) == (199.0, None)
    assert lines[100, "ps-map"]["paper"] is None
    single = tables.summarize(tables.select(rows(), metric="rmse"), "method", paper={"fs-map": 5})
    assert {entry["method"]: entry["paper"] for entry in single} == {"ps-map": None, "fs-map": 5}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.12346, "\u22120.1235"),
        (123456.0, "123456"),
        (999999.9, "1000000"),
        (1.5e9, "1.5e9"),
        (-2.5e-9, "\u22122.5e\u22129"),
        (math.nan, "nan"),
        (-math.inf, "\u2212∞"),
        (True, "yes"),
        (-3, "\u22123"),
        ("text", "text"),
        ([0.5, 1], "0.5, 1"),
        (None, "\u2014"),
    ],
)
def test_numbers_are_written(value, text):
    assert tables.number(value) == text


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (0.329, 0.033, "0.329 ± 0.033"),
        (95.4, 0.1, "95.40 ± 0.10"),
        (-12345.6, 678.9, "\u221212346 ± 679"),
        (3e8, 2e6, "3e8 ± 2e6"),
        (1e-7, 2e-9, "1e\u22127 ± 2e\u22129"),
        (0.5, math.nan, "0.5"),
        (0.5, 0.0, "0.5"),
        (math.nan, 0.1, "nan"),
        (None, None, "\u2014"),
    ],
)
def test_errors_are_written_to_the_same_place(value, stderr, text):
    assert tables.with_error(value, stderr) == text


def test_a_table_joins_errors_and_uses_the_papers_letters():
    table = [
        {"n_train": 100, "ours": 0.1, "stderr": 0.01, "paper": 0.2, "paper_stderr": None},
        {"n_train": 200, "ours": 0.1, "stderr": math.nan, "remark": "x"},
    ]
    header, lines = tables.shown(table)
    assert header == ["N", "ours", "paper", "remark"]
    assert lines == [["100", "0.100 ± 0.010", "0.2", ""], ["200", "0.1", "", "x"]]


def test_an_error_without_its_value_keeps_its_column():
    assert tables.shown([{"stderr": 0.1}]) == (["stderr"], [["0.1"]])
    assert tables.shown([]) == ([], [])
