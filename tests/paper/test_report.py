"""The page holds everything the rows say, escapes it, and needs nothing from outside."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_experiment import Squares, only, run
from fsmap.cli import build_parser
from fsmap.errors import InputError
from fsmap.paper.engine import get, override, registry
from fsmap.paper.report import figures, tables
from fsmap.paper.report.page import build, embedded, find_runs
from fsmap.paper.report.picture import collect, picture
from fsmap.paper.rows import Claim, encode, judge, not_tested, plain

RESULTS = Path(__file__).parents[2] / "results"
LOOK = "What to look for: The curve is a parabola."


class Absent(Squares):
    id = "missing-one"
    label = "Fig. 9"
    title = "Something else"


class Text(HTMLParser):
    """The text and the tags of a page, and whether it is nested properly."""

    VOID = {"meta", "link", "input", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said = ""
        self.feed(text)
        assert self.open == []
        self.said = " ".join(self.said.split())

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
            self.said += data


@pytest.fixture
def runs(tmp_path):
    with only(Squares, Absent):
        for folder, quick in (("runs", True), ("results", False)):
            (outcome,) = run(tmp_path / folder, quick=quick)
            assert outcome.status == "finished"
        yield tmp_path


def page_of(runs, *folders):
    page = build([runs / name for name in folders], runs / "report")
    assert page == runs / "report" / "index.html"
    text = page.read_text()
    return text, Text(text)


def test_the_page_says_everything(runs):
    _, page = page_of(runs, "runs")
    for words in (
        *("Fig. 0", "Squares of small numbers", "The curve is a parabola.", "quick"),
        *("1 of 2 agree, 1 differs", "larger numbers have larger squares", "paper 3"),
        *("the last square is a million", "made up", "exact arithmetic", "cpu", "FS-MAP"),
        *("1.00 ± 0.10", "fsmap run squares --quick", "commit", "torch", "α = 2", "scaled by 2"),
        *("Something else", "not tested", "fsmap run missing-one"),
    ):
        assert words in page.said, words
    verdicts = [a["aria-label"] for _, a in page.tags if a.get("class") == "sign"]
    assert verdicts.count("agrees") == 1  # at the claim: the head does not count a quick run
    assert verdicts.count("differs") == 2  # and on the scoreboard
    assert verdicts.count("not tested") == 1
    assert "claims none Our own none Items not counted 1 not run, 1 quick" in page.said


def test_the_page_needs_nothing_from_outside_and_links_lead_somewhere(runs):
    text, page = page_of(runs, "runs")
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text
    names = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(names) == len(set(names))
    for key in ("href", "xlink:href"):
        targets = {a[key][1:] for _, a in page.tags if (a.get(key) or "").startswith("#")}
        assert targets
        assert targets <= set(names)


def test_a_full_run_is_shown_before_a_quick_one_which_is_named(runs):
    _, page = page_of(runs, "runs", "results")
    assert f"Another run: {runs / 'runs' / 'squares'}: quick" in page.said
    assert page.said.count("The curve is a parabola.") == 1
    _, alone = page_of(runs, "results/squares")  # a single run
    assert "The curve is a parabola." in alone.said


def test_a_damaged_run_is_named_and_does_not_stop_the_others(runs):
    file = runs / "results" / "squares" / "rows.jsonl"
    file.write_text(file.read_text().replace('"value": 1.0', '"value": 7.0'))
    _, page = page_of(runs, "results", "runs")
    assert f"{runs / 'results' / 'squares'} is damaged: 1 of its units do not match" in page.said
    assert "The curve is a parabola." in page.said  # of the quick run
    (runs / "runs" / "squares" / "units.jsonl").unlink()
    (runs / "runs" / "squares").rename(runs / "runs" / "unheard-of")
    _, page = page_of(runs, "results", "runs")
    assert "unheard-of is damaged" in page.said
    assert "The curve is a parabola." not in page.said


def test_a_page_is_made_in_any_locale(runs, monkeypatch):
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *how: read(path, *(how or ["ascii"])))
    assert build([runs / "runs"], runs / "report") == build([runs / "runs"], runs / "report")


def test_rows_that_cannot_be_judged_are_said(runs, monkeypatch):
    monkeypatch.setattr(Squares, "claims", lambda self, rows: {}["gone"])
    _, page = page_of(runs, "runs")
    assert "claims cannot be made of these rows: KeyError: 'gone'" in page.said
    assert "made up" in page.said  # and the rest is shown


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ([Claim("a", True)], "Squares of small numbers The curve"),
        ([Claim("a", True), Claim("b", False)], f"{LOOK} So far 1 of 2 claims agree, 1 differs."),
        ([Claim("a", True, source="check")], f"{LOOK} So far no claim was judged."),
    ],
)
def test_the_sentence_is_chosen_by_the_rows(runs, monkeypatch, claims, words):
    monkeypatch.setattr(Squares, "claims", lambda self, rows: claims)
    assert words in page_of(runs, "runs")[1].said


def test_claims_of_the_paper_of_ours_and_checks_are_apart(runs, monkeypatch):
    ours = judge("ours falls", -1.0, 0.1, 5, below=0, source="ours")
    claims = [ours, not_tested("b", "no rows"), Claim("sane", True, source="check")]
    monkeypatch.setattr(Squares, "claims", lambda self, rows: claims)
    said = page_of(runs, "results")[1].said
    out = runs / "results"
    assert f"Claims of the paper b not tested: fsmap run squares --out {out} --resume" in said
    assert "Our own claims ours falls effect −1.00 ± 0.10n 5" in said
    assert "Checks sane" in said
    assert "The paper's claims 1 not tested Our own 1 agree" in said


def test_text_is_escaped(runs, monkeypatch):
    nasty = "</script><script>alert(1)</script> & <b>"
    monkeypatch.setattr(Squares, "title", nasty)
    monkeypatch.setattr(Squares, "table", lambda self, rows: [{nasty: nasty}])
    monkeypatch.setattr(Squares, "claims", lambda self, rows: [Claim(nasty, True, nasty, nasty)])
    text, page = page_of(runs, "runs")
    assert "alert(1)</script>" not in text
    assert nasty in page.said
    assert "<" not in embedded({"a": "</script>\u2028"})
    assert json.loads(embedded({"b": [1.5, float("nan")]})) == {"b": [1.5, "nan"]}


def test_a_page_of_somebody_else_is_kept(runs, tmp_path):
    page = build([runs / "runs"], tmp_path / "report")
    assert build([runs / "runs"], tmp_path / "report") == page  # its own page is replaced
    page.write_text("my page")
    with pytest.raises(InputError, match="--out"):
        build([runs / "runs"], tmp_path / "report")
    assert page.read_text() == "my page"


def test_nothing_to_show_and_nowhere_to_write(runs, tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        find_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no run"):
        find_runs([tmp_path / "empty"])
    (runs / "file").write_text("in the way")
    with pytest.raises(InputError, match="write"):
        build([runs / "runs"], runs / "file")


def test_the_commands_for_what_is_missing_work():
    reasons = [claim.reason for e in registry().values() for claim in e.claims([])]
    commands = [reason[reason.index("fsmap run") :] for reason in reasons if "fsmap run" in reason]
    assert len(commands) > 20
    for words in (command.split()[1:] for command in commands):
        parsed = build_parser(words).parse_args(words)
        (experiment,) = map(get, parsed.ids)
        units = [encode(unit) for unit in experiment.units(override(experiment.config, parsed.set))]
        assert 0 < len(units) <= len(experiment.units(experiment.config))
        changed = [text.partition("=")[0] for text in parsed.set]
        assert set(changed) <= set(experiment.selecting), words  # can be added to a run


def test_fields_that_select_change_the_units():
    for e in registry().values():
        for name in {*e.selecting} & {*vars(e.config)} - {"compile", "graph"}:
            value = getattr(e.config, name)
            less = value - 1 if isinstance(value, int) else value[:-1]
            assert e.units(dataclasses.replace(e.config, **{name: less})) != e.units(e.config), e.id


def test_committed_runs_can_be_resumed():
    for found in find_runs([RESULTS]):
        assert not found.trouble, found.folder
        experiment, config = get(found.id), found.content.header["config"]
        asked = plain(dataclasses.asdict(experiment.config))
        names = ({*config} | {*asked}) - {*experiment.selecting}
        assert {n: config.get(n) for n in names} == {n: asked.get(n) for n in names}, found.id


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


def test_the_style_leaves_no_trace_and_every_color_has_a_dark_twin(figure):
    before = dict(matplotlib.rcParams)
    figures.to_svg(figure)
    assert dict(matplotlib.rcParams) == before
    used = {figures.INK, figures.MUTED, figures.GRID, figures.PAPER, *figures.COLORS.values()}
    assert used == set(figures.DARK)


def test_files_are_written_and_the_same_for_the_same_values(tmp_path):
    for name in ("one", "two"):
        figures.save(make(), tmp_path, name)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
    assert "<image" in (tmp_path / "one.svg").read_text()  # a mesh


def test_hover_values_lie_where_the_svg_draws_them(figure):
    made = picture(figure, "p")
    line, dots = made.hover  # the axhline is no series; nor is the band
    assert (line["name"], line["color"]) == ("FS-MAP", "var(--fs-map)")
    assert (line["x"], line["y"]) == ("points N", "ε & <b>")
    assert [point[2:] for point in line["points"]] == [[1, 1], [10, 2], [100, 4]]
    use = r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: var\(--fs-map'
    uses = re.findall(use, made.markup)
    for px, py, *_ in line["points"]:
        assert min(abs(px - float(x)) + abs(py - float(y)) for x, y in uses) < 0.05
    assert dots["name"] == "data"
    assert [point[2:] for point in dots["points"]] == [[1, 2]]  # the other one is outside
    assert len(made.panels) == 2


def test_tooltips_name_series_seed_and_category():
    made, ax = figures.axes()
    ax.plot([0], [1.0], "o", color="red", label="PS-MAP")
    ax.plot([1.1], [2.0], "o", color="red", label="_PS-MAP, seed 3")
    ax.errorbar([0.1], [2.0], yerr=[0.1], color="blue", marker="s", label="L-MAP")
    ax.set_xticks([0, 1], ["fmnist", "cifar10"])
    ax.set_title("ECE, %")
    made.canvas.draw()
    found = [(s["name"], s["points"][0][2]) for s in collect(made)]
    assert found == [("PS-MAP", "fmnist"), ("PS-MAP, seed 3", "cifar10"), ("L-MAP", "fmnist")]
    assert {s["y"] for s in collect(made)} == {"ECE, %"}


def test_tooltips_of_bars_and_of_horizontal_lines():
    made, ax = figures.axes()
    ax.bar(0, -2.0, yerr=0.1, color="#ff0000")
    ax.bar([1], [3.0], color="#00ff00")
    ax.axhline(1.0, color="#0000ff", label="PS-MAP")
    ax.axhline(0.0)  # marks a place
    ax.set_xticks([0, 1], ["boston", "concrete"])
    made.canvas.draw()
    found = {(s["name"], s["color"], p[3]): p[2] for s in collect(made) for p in s["points"]}
    assert set(found) == {("PS-MAP", "#0000ff", 1), ("", "#ff0000", -2), ("", "#00ff00", 3)}
    assert found["", "#ff0000", -2] == "boston"


def test_pictures_share_no_names(figure):
    one, two = (picture(figure, prefix) for prefix in "ab")
    names = []
    for made in (one, two):
        tree = ElementTree.fromstring(made.markup.replace("xlink:", ""))  # still well-formed
        names.append({e.get("id") for e in tree.iter() if e.get("id")})
        assert all(name.startswith(("a", "b")) for name in names[-1])
        assert not any(color in made.markup for color in figures.DARK)
        assert "<style" not in made.markup
    assert not names[0] & names[1]
    assert (one.width, one.height) == (2 * 3.3 * 72, 2.5 * 72)


def entry(metric: str, ours: float, **more: object) -> dict[str, object]:
    about = {"dataset": "fmnist", "row": "other", "method": "l-map", "px": "kmnist"}
    return {**about, "metric": metric, "ours": ours, "stderr": 0.1234, "runs": 3, **more}


def test_a_table_of_images_is_laid_out_as_the_papers():
    table = [
        entry("accuracy", 93.9, paper=93.9, paper_stderr=0.1),
        entry("temperature", 1.2),
        entry("ece", 4.0, dataset="cifar10", runs=2),
        entry("accuracy", 95.0, dataset="cifar10", row="ps-map", stderr=math.nan),
    ]
    main, more = tables.arranged(table, "images")
    assert main.groups == [("", 1), ("FashionMNIST", 1), ("CIFAR-10", 2), ("", 1)]
    assert main.header == ["row", "Acc. ↑ %", "ECE ↓ %", "Acc. ↑ %", "seeds"]
    assert main.labels[1] == "FashionMNIST Acc. ↑ %"
    assert [[cell.text for cell in line] for line in main.lines] == [
        ["L-MAP, D'", "93.90 ± 0.12", "4.00 ± 0.12", "—", "3"],
        ["PS-MAP", "—", "—", "95.00", "3"],
    ]
    assert [cell.sub for cell in main.lines[0]] == ["", "(93.9 ± 0.1)", "2 seeds", "", ""]
    assert more.name == "More metrics"


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30))
def test_mean_and_standard_error_are_numpys(values):
    found = tables.mean(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-9)
    assert found.n == len(values)


def test_means_of_few_or_bad_values():
    assert repr(tables.mean([2.0])) == "Mean(mean=2.0, stderr=nan, n=1)"
    means = [tables.mean(values).mean for values in ([], [1.0, math.nan], [1.0, math.inf])]
    assert repr(means) == "[nan, nan, inf]"


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        *((-0.12346, None, "−0.1235"), (999999.9, None, "1000000"), (True, None, "yes")),
        *((-2.5e-9, None, "−2.5e−9"), (-math.inf, None, "−∞"), (-3, None, "−3")),
        *(("text", None, "text"), ([0.5, 1], None, "0.5, 1")),
        *((0.329, 0.033, "0.329 ± 0.033"), (-12345.6, 678.9, "−12346 ± 679")),
        *((3e8, 2e6, "3e8 ± 2e6"), (0.5, math.nan, "0.5"), (0.5, 0.0, "0.5")),
        *((math.nan, 0.1, "nan"), (None, None, "\u2014"), (0.2352034, 3e-7, "0.2352")),
    ],
)
def test_numbers_are_written_and_errors_to_the_same_place(value, stderr, text):
    assert tables.with_error(value, stderr) == text
