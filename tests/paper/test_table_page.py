"""The page about a table: numbers, a verdict that can go either way, a browser that is content."""

from __future__ import annotations

import re

import pytest
import torch

from fsmap.assess.table_fit import TableOptions, fit_table
from fsmap.assess.tables import Difference
from fsmap.data.tables import read_table
from fsmap.paper.report import table_page
from small_tables import flowers, houses

OPTIONS = TableOptions(hidden=(8,), steps=40, device="cpu", progress=False)
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-background-networking
    --disable-component-update --disable-sync --no-first-run
""".split()


@pytest.fixture(
    scope="module", params=[(houses, "price"), (flowers, "kind")], ids=["price", "kind"]
)
def fitted(request, tmp_path_factory):
    make, target = request.param
    return fit_table(read_table(make(tmp_path_factory.mktemp("t") / "table.csv")), target, OPTIONS)


def render(fitted) -> str:
    return table_page.render(
        fitted, source="a<b>.csv", command="fsmap fit 'a<b>.csv'", model="model.pt"
    )


def test_the_table_of_methods(fitted):
    header, lines = table_page.results(fitted)
    assert [line[0] for line in lines] == ["Linear", "PS-MAP", "L-MAP"]
    assert header[-2:] == ["weight decay", "λ"]
    assert [line[-1] == "—" for line in lines] == [True, True, False]
    key = "R²" if "R²" in header else "NLL"
    name = {"R²": "r2", "NLL": "nll"}[key]
    shown = float(lines[2][header.index(key)].replace("−", "-"))
    assert shown == pytest.approx(fitted.runs["l-map"].measured[name], rel=5e-3)


def test_the_verdict_follows_the_numbers(fitted):
    same = fitted._replace(versus=Difference(-0.01, 0.02))
    assert "cannot be told apart" in table_page.verdict(same)
    assert "0.01 ± 0.02 per row" in table_page.verdict(same)
    assert " is lower than PS-MAP's, by 0.1 ± 0.02" in table_page.verdict(
        fitted._replace(versus=Difference(-0.1, 0.02))
    )
    assert " is higher than PS-MAP's" in table_page.verdict(
        fitted._replace(versus=Difference(0.1, 0.02))
    )


def test_pictures_show_what_was_measured(fitted):
    found = {p.name: p for p in table_page.pictures(fitted)}
    regression = fitted.model.target.task == "regression"
    names = ["predictions", "calibration", "strengths"]
    assert list(found) == (names if regression else names[1:])
    left = found["strengths"].figure.axes[0]
    drawn = [y for line in left.get_lines()[:4] for y in line.get_ydata()]
    assert sorted(drawn) == sorted(v["value"] for v in fitted.runs["l-map"].trained.search)
    if regression:
        panel = found["predictions"].figure.axes[1]
        target, out = fitted.model.target, fitted.runs["l-map"].out[:, 0]
        guess = torch.from_numpy(panel.get_lines()[0].get_ydata())
        torch.testing.assert_close(guess, target.mean + target.std * out)


def test_the_page_stands_alone_and_escapes(fitted):
    text = render(fitted)
    assert "a&lt;b&gt;.csv" in text
    assert "<b>.csv" not in text
    assert not re.search(r'(src|href)="(https?:)?//', text)
    for method in ("Linear", "PS-MAP", "L-MAP"):
        assert method in text
    assert len(text) < 600_000
    for column in fitted.model.encoder.columns:
        assert column.name in text


def test_columns_are_explained(fitted):
    lines = {line["name"]: line for line in table_page._columns(fitted)}
    if fitted.model.target.classes:
        assert [line["kind"] for line in lines.values()] == ["number"] * 2
        return
    assert sorted(lines["town"]["about"].split(", ")) == ["Basel", "Bern", "Chur"]
    assert re.fullmatch(r"mean [\d.]+, standard deviation [\d.]+", lines["size"]["about"])
    assert "missing values: median" in lines["age"]["about"]


@pytest.mark.browser
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_a_browser_on_both_sizes_and_themes(fitted, tmp_path, chromium):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = tmp_path / "page.html"
    path.write_text(render(fitted))
    trouble = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        for width, scheme, paper in (
            (320, "dark", "rgb(21, 24, 28)"),
            (390, "light", "rgb(255, 255, 254)"),
            (1280, "dark", "rgb(21, 24, 28)"),
        ):
            context = browser.new_context(
                viewport={"width": width, "height": 800}, color_scheme=scheme
            )
            page = context.new_page()
            page.on("console", lambda message: trouble.append(message.text))
            page.on("pageerror", lambda error: trouble.append(str(error)))
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
            boxes = [svg.bounding_box() for svg in page.locator(".plot svg").all()]
            assert all(box["width"] > 200 and box["height"] > 100 for box in boxes)
            context.close()
        browser.close()
    assert trouble == []


def test_edges_of_the_grid_are_said_in_words(fitted):
    odd = fitted._replace(edges={"ps-map": [], "l-map": ["λ = 5e-06 is the largest tried"]})
    assert table_page.edges(odd) == ["L-MAP: λ = 5e\u22126 is the largest tried"]
    assert '<p class="note">L-MAP: λ = 5e\u22126 is the largest tried.</p>' in render(odd)


@pytest.mark.parametrize(("value", "cell"), [(0.01, "≤ 0.01"), (100.0, "≥ 100"), (1.234, "1.23")])
def test_a_temperature_at_its_bound_may_lie_beyond(value, cell):
    assert table_page._cell("temperature", value) == cell
    text = table_page._calibration({"ece": 0.1, "temperature": value})
    assert text == f"ECE 10.0 %, T {cell if cell[0] in '≤≥' else f'= {cell}'}"


def test_minus_signs_are_minus_signs():
    assert table_page._cell("nll", -0.5) == "\u22120.500"
