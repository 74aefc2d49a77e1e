"""The page in a real browser: it renders from a file, alone, in both themes, on both sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fake_experiment import Squares, only, run
from fsmap.paper.closed_form import mixture
from fsmap.paper.engine import Claim
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import Curve, Frame, Interactive
from fsmap.paper.report.page import build
from fsmap.paper.rows import RunFolder

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-background-networking
    --disable-component-update --disable-sync --no-first-run
""".split()


class Pictures(Squares):
    """A wide figure."""

    id = "pictures"
    title = "A very long title, longer than what a telephone can show on a single line"

    def draw(self, rows):
        figure, panels = figures.axes(4)
        for ax in panels:
            ax.plot([0, 1], [0, 1], **figures.method_style("l-map"))
        return {"wide": figure}

    def interactive(self, rows):
        return None

    def table(self, rows):
        return [{f"column {k}": 1.2345 for k in range(20)} for _ in range(3)]


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("page")
    with only(Squares, Pictures):
        assert [outcome.status for outcome in run(out / "runs", "all")] == ["finished"] * 2
        return build([out / "runs"], out / "report").as_uri()


@pytest.fixture(scope="module")
def browser(chromium) -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def visit(browser, address):
    """Open the page; afterwards, nothing may have been logged, raised or requested."""
    contexts, trouble = [], []

    def open_page(width=1280, height=900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: note_request(request.url))
        page.goto(address)
        return page

    def note_request(url: str) -> None:
        if url.split("#")[0] != address and not url.startswith("data:"):
            trouble.append(f"request: {url}")

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


def background(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize("width", [320, 390, 768, 1440])
def test_the_page_never_scrolls_sideways(visit, width):
    page = visit(width=width)
    for details in page.locator("details").all():
        details.evaluate("element => { element.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cells = page.locator("#pictures td, .score td").evaluate_all(
        "cells => cells.map((cell) => cell.getBoundingClientRect().right)"
    )
    if width <= 390:
        assert max(cells) <= width  # no column off-screen


def test_panels_are_stacked_on_a_telephone(visit):
    page = visit(width=390, height=800)
    panels = page.locator("#pictures .figures .panels svg")
    boxes = [panel.bounding_box() for panel in panels.all()]
    assert len(boxes) == 4
    tops = [box["y"] for box in boxes]
    assert tops == sorted(tops)
    assert all(a["y"] + a["height"] <= b["y"] for a, b in zip(boxes, boxes[1:], strict=False))
    assert all(box["width"] > 250 for box in boxes)
    assert not visit().locator("#pictures .panels").first.is_visible()


def test_dark_follows_the_system_and_the_button_overrules_it(visit):
    light, dark = "rgb(255, 255, 254)", "rgb(21, 24, 28)"
    page = visit(color_scheme="dark")
    assert background(page) == dark
    strokes = page.locator("#squares .plot path").evaluate_all(
        "paths => paths.map((path) => getComputedStyle(path).stroke)"
    )
    assert "rgb(255, 116, 104)" in strokes  # the dark twin of FS-MAP's red
    assert "rgb(208, 49, 45)" not in strokes
    page.click("#theme")
    assert background(page) == light
    page.reload()
    assert background(page) == light  # remembered
    page.click("#theme")
    assert background(page) == dark
    assert background(visit(color_scheme="light")) == light


def test_the_slider_works_by_keyboard(visit):
    page = visit()
    slider = page.locator("#squares-slider")
    assert slider.locator("output").inner_text() == "α = 2"
    before = slider.locator("path.curve").get_attribute("d")
    slider.locator("input").focus()
    page.keyboard.press("ArrowRight")
    assert slider.locator("output").inner_text() == "α = 3"
    assert slider.locator(".note").inner_text() == "scaled by 3"
    assert slider.locator("input").get_attribute("aria-valuetext") == "α = 3"
    assert slider.locator("path.curve").get_attribute("d") != before
    page.keyboard.press("Home")
    assert slider.locator("output").inner_text() == "α = 1"


def test_hovering_shows_values(visit):
    page = visit()
    plot = page.locator("#squares .plot")
    plot.scroll_into_view_if_needed()
    page.wait_for_timeout(100)
    place = plot.evaluate(
        """(element) => {
          const svg = element.querySelector("svg");
          const [line] = JSON.parse(element.querySelector("script.hover").textContent);
          const [x, y] = line.points[1];
          const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
          return [at.x, at.y];
        }"""
    )
    page.mouse.move(*place)
    tip = page.locator("#tip")
    assert tip.inner_text().split("\n") == ["FS-MAP", "n: 2", "square of n: 4.05"]
    page.mouse.move(place[0], place[1] - 300)
    assert tip.is_hidden()
    chart = page.locator("#squares .chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "FS-MAP:" in tip.inner_text()


MARK = "window.hacked = (window.hacked || 0) + 1"
NAME = f'x"><script>{MARK}</script><img src=x onerror="{MARK}">--><script>{MARK}</script>'
SHORT = "--><script>hacked=1</script>"


class Hostile(Squares):
    """Names, claims and labels that try to run scripts."""

    id = "hostile"
    title = label = see = protocol = NAME

    def claims(self, rows):
        return [Claim(NAME, True, NAME, NAME, reason=NAME)]

    def table(self, rows):
        return [{NAME: NAME, "metric": NAME, "ours": NAME}]

    def draw(self, rows):
        figure, ax = figures.axes()
        ax.plot([0, 1], [0, 1], label=NAME)
        ax.set(xlabel=SHORT, title=SHORT)
        ax.set_xticks([0, 1], [SHORT, SHORT])
        return {NAME.replace("/", ""): figure}

    def interactive(self, rows):
        curve = Curve(NAME, [0, 1], [0, 1])
        return Interactive(NAME, NAME, [Frame(NAME, [curve], note=NAME)] * 2, NAME, NAME)


@pytest.fixture
def hostile(tmp_path):
    with only(Hostile):
        run(tmp_path, "hostile", quick=True)
        return build([tmp_path], tmp_path / "report")


def test_hostile_names_claims_and_pictures_run_nothing(browser, hostile):
    requests: list[str] = []
    page = browser.new_page()
    page.on("request", lambda request: requests.append(request.url))
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(hostile.as_uri())
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert [url for url in requests if not url.startswith("data:")] == [hostile.as_uri()]
    live = "[...document.querySelectorAll('script')].filter(s => !s.type).length"
    assert page.evaluate(live) == 4
    assert page.locator("iframe, foreignObject, img").count() == 0
    handlers = """[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())
        .filter(n => n.startsWith('on')).length"""
    assert page.evaluate(handlers) == 0
    assert page.locator("output").first.text_content() == NAME  # the page's own scripts run
    assert errors == []
    page.close()


def test_the_policy_stops_a_script_that_gets_in(browser, hostile, tmp_path):
    other = tmp_path / "other.html"
    other.write_text(hostile.read_text().replace("</body>", f"<script>{MARK}</script></body>"))
    page = browser.new_page()
    page.goto(other.as_uri())
    assert page.evaluate("window.hacked") is None
    page.close()


RELIABILITY = Path(__file__).parents[2] / "results" / "reliability"


def test_the_slider_over_strength_shows_the_rows(browser, tmp_path):
    """Each position has the bins of its rows, beside PS-MAP before and after a temperature."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(build([RELIABILITY], tmp_path).as_uri())
    slider = page.locator("#reliability-slider")
    slider.locator("input").focus()
    page.keyboard.press("Home")
    rows = RunFolder(RELIABILITY).content().rows
    strengths = sorted({row.config["nats"] for row in rows})
    assert len(strengths) >= 7
    frames = json.loads(slider.locator("script.curves").text_content())["frames"]
    for nats, frame in zip(strengths, frames, strict=True):
        assert slider.locator("output").inner_text() == f"{nats:g} nats"
        curves = {curve["name"]: curve["y"] for curve in frame["curves"]}
        for name, state, at in (
            ("PS-MAP", "as trained", 0.0),
            ("PS-MAP + temperature", "after temperature scaling", 0.0),
            (f"LogTrace, {nats:g} nats" if nats else "PS-MAP", "as trained", nats),
        ):
            count, right = (
                np.array(tables.values(rows, metric=f"bin_{part}", nats=at, state=state))
                for part in ("count", "accuracy")
            )
            total = count.sum(0)
            mean = (count * right).sum(0)[total > 0] / total[total > 0]
            assert curves[name] == pytest.approx(mean[-len(curves[name]) :].tolist())
        page.keyboard.press("ArrowRight")
    page.close()


@pytest.fixture(scope="module")
def mixture_page(browser, tmp_path_factory):
    """Fig. 1 with its live figure."""
    out = tmp_path_factory.mktemp("mixture")
    (outcome,) = run(out, "mixture-posterior", quick=True, seeds=1)
    assert outcome.status == "finished", outcome.reason
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(build([out], out / "report").as_uri())
    yield page, out
    page.close()


@pytest.mark.parametrize(("alpha", "mean"), [(0.5, 1.13315), (3.0, 82.817), (20.0, 21523)])
def test_the_live_figure_without_a_point_at_the_right(mixture_page, alpha, mean):
    found, area = mixture_page[0].evaluate(
        """(alpha) => {
          const m = JSON.parse(document.querySelector(".mixture script.start").textContent);
          m.alpha = alpha; m.x[10] = -1;
          const { average, density } = window.fsmap.mixture, step = alpha / 100;
          const grid = Array.from({ length: 2001 }, (_, i) => (i - 1000) * step - alpha ** 2);
          return [average(m)[1], density(m, 1, 0, grid).reduce((a, b) => a + b) * step];
        }""",
        alpha,
    )
    assert found == pytest.approx(mean, rel=1e-3)  # by a sum over 40,001 values of θ_R in Python
    assert area == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("alpha", [1.2, 10.0])
def test_the_live_figure_computes_what_python_does(mixture_page, alpha):
    config = mixture.BMAConfig(seeds=1)
    (data,) = draws = mixture.draw_data(config)
    solved = {key: theta[0] for key, theta in mixture.solve(config, draws, alpha).items()}
    ps, fs = solved["ps-map", "none"], solved["fs-map", mixture.TRUE]
    average = mixture.quadrature(config, data, alpha, ps).mean
    found = mixture_page[0].evaluate(
        """(alpha) => {
          const start = JSON.parse(document.querySelector(".mixture script.start").textContent);
          const m = { ...start, alpha }, { solve, average } = window.fsmap.mixture;
          const ps = solve(m, 0), fs = solve(m, 1);
          return { ps: ps.map(Math.exp), fs: fs.map(Math.exp), average: average(m) };
        }""",
        alpha,
    )
    assert found["ps"] == pytest.approx(ps.exp().tolist(), abs=1e-4)
    assert found["fs"] == pytest.approx(fs.exp().tolist(), abs=1e-4)
    assert found["average"] == pytest.approx(average.tolist(), rel=1e-4, abs=1e-6)


def test_the_live_densities_are_those_of_the_rows(mixture_page):
    page, out = mixture_page
    rows = RunFolder(out / "mixture-posterior").content().rows
    for row in tables.select(rows, metric="density", objective=("none", mixture.TRUE)):
        found = page.evaluate(
            """(weight) => {
              const m = JSON.parse(document.querySelector(".mixture script.start").textContent);
              const { solve, density } = window.fsmap.mixture;
              const grid = Array.from({ length: 2201 }, (_, i) => -8 + i * 0.005);
              return density(m, weight, solve(m, 0)[0], grid);
            }""",
            int(row.method == "fs-map"),
        )
        assert found == pytest.approx(row.value, abs=1e-3)


def test_the_live_figure_follows_a_dragged_point_and_the_prior(mixture_page):
    page, _ = mixture_page
    note = page.locator(".mixture .note")
    note.scroll_into_view_if_needed()
    before = note.inner_text()
    box = page.locator(".mixture .handle").last.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 40, y - 60, steps=3)
    page.mouse.up()
    dragged = note.inner_text()
    assert dragged != before
    page.locator(".mixture .handle").last.focus()
    page.keyboard.press("ArrowUp")
    assert note.inner_text() != dragged
    page.locator(".mixture .reset").click()
    assert note.inner_text() == before
    page.locator("#live-alpha").fill("15")
    assert "Nearer to the model average: FS-MAP" in note.inner_text()


@pytest.mark.parametrize("sigma", ["0.02", "0.5"])
def test_the_live_densities_stay_inside_their_axes(mixture_page, sigma):
    page, _ = mixture_page
    page.locator("#live-sigma").fill(sigma)
    highest = page.locator(".density .curve").evaluate_all(
        "(curves) => Math.min(...curves.map((curve) => curve.getBBox().y))"
    )
    assert 10 <= highest <= 200  # px from the top; the margin there is 10
