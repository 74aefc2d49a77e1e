"""The page in a real browser: it renders from a file, alone, in both themes, on both sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fake_experiment import Squares, only
from fsmap.paper import engine
from fsmap.paper.experiment import Frame, Interactive
from fsmap.paper.options import Options
from fsmap.paper.report import figures
from fsmap.paper.report.page import Entry, build
from fsmap.paper.run_folder import write_summary

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-background-networking
    --disable-component-update --disable-sync --no-first-run
""".split()


class Pictures(Squares):
    """A slider over pictures, and a wide figure."""

    id = "pictures"
    title = "A very long title, longer than what a telephone can show on a single line"

    def draw(self, rows):
        figure, panels = figures.axes(4)
        for ax in panels:
            ax.plot([0, 1], [0, 1], **figures.method_style("l-map"))
        return {"wide": figure}

    def interactive(self, rows):
        frames = []
        for jitter in (0.1, 1.0, 10.0):
            figure, ax = figures.axes()
            ax.set_title(f"jitter {jitter}")
            ax.imshow([[0, jitter], [jitter, 0]])
            frames.append(Frame(f"ε = {jitter:g}", figure=figure))
        return Interactive("Move the jitter", "ε", frames)

    def table(self, rows):
        return [{f"column {k}": 1.2345 for k in range(20)} for _ in range(3)]


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("page")
    with only(Squares, Pictures):
        outcomes = list(engine.run(["all"], Options(out=out / "runs", silent=True)))
    assert [outcome.status for outcome in outcomes] == ["finished"] * 2
    catalogue = [Entry("pictures", group="A"), Entry("squares", group="B"), Entry("absent")]
    return build([out / "runs"], out / "report", catalogue).as_uri()


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


def test_it_renders_from_a_file(visit):
    page = visit()
    assert page.locator("article").count() == 2
    box = page.locator("#pictures .plot svg").first.bounding_box()
    assert box["width"] > 600
    assert box["height"] > 80
    letters = page.evaluate(
        """() => [...document.querySelectorAll("#pictures .plot use")]
                 .filter((use) => use.getBoundingClientRect().width > 0).length"""
    )
    assert letters > 20  # the shared outlines are found


@pytest.mark.parametrize("width", [320, 390, 768, 1280, 1920])
def test_the_page_never_scrolls_sideways(visit, width):
    page = visit(width=width)
    for details in page.locator("details").all():
        details.evaluate("element => { element.open = true; }")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    table = page.locator("#pictures .numbers .scroll")
    assert table.evaluate("element => element.scrollWidth > element.clientWidth")  # in its box


def test_dark_follows_the_system_and_the_button_overrules_it(visit):
    light, dark = "rgb(255, 255, 254)", "rgb(21, 24, 28)"
    page = visit(color_scheme="dark")
    assert background(page) == dark
    page.click("#theme")
    assert background(page) == light
    page.reload()
    assert background(page) == light  # remembered
    page.click("#theme")
    assert background(page) == dark
    assert background(visit(color_scheme="light")) == light


def test_lines_and_letters_of_figures_change_with_the_theme(visit):
    page = visit(color_scheme="dark")
    strokes = page.evaluate(
        """() => [...document.querySelectorAll("#squares .plot path")]
                 .map((path) => getComputedStyle(path).stroke)"""
    )
    assert "rgb(108, 176, 245)" in strokes  # the dark twin of FS-MAP's blue
    assert "rgb(36, 104, 178)" not in strokes


def test_the_slider_over_curves_works_by_keyboard(visit):
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


def test_the_slider_over_pictures_shows_one_at_a_time(visit):
    page = visit()
    slider = page.locator("#pictures-slider")
    visible = "frames => frames.map((frame) => !frame.hidden)"
    frames = slider.locator(".frame")
    assert frames.evaluate_all(visible) == [True, False, False]
    slider.locator("input").fill("2")
    assert frames.evaluate_all(visible) == [False, False, True]
    assert slider.locator("output").inner_text() == "ε = 10"


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


def test_contents_are_folded_on_a_telephone_and_lead_to_the_experiment(visit):
    page = visit(width=390, height=800)
    link = page.locator(".contents a", has_text="very long title")
    assert not link.is_visible()
    page.click(".contents summary")
    link.click()
    page.wait_for_function("location.hash === '#pictures'")
    assert visit().locator(".contents a").first.is_visible()


def test_the_command_can_be_copied_or_is_selected(visit):
    page = visit()
    page.click("#squares .copy")
    page.wait_for_function(
        "['copied', 'selected'].includes(document.querySelector('#squares .copy').textContent)"
    )


def test_paper_is_white_and_everything_unfolded(visit):
    page = visit(color_scheme="dark")
    page.emulate_media(media="print")
    assert background(page) == "rgb(255, 255, 254)"
    assert page.locator("#theme").is_hidden()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    folded = "all => all.filter((details) => !details.open).length"
    assert page.locator("article details").evaluate_all(folded) == 0


MARK = "window.hacked = (window.hacked || 0) + 1"
NAME = f'x"><script>{MARK}</script><img src=x onerror="{MARK}">'
HOSTILE_SVG = f"""<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"
  viewBox="0 0 10 10" onload="{MARK}">
 <script>{MARK}</script>
 <style>body {{ display: none }}</style>
 <foreignObject><iframe xmlns="http://www.w3.org/1999/xhtml" srcdoc="x"/></foreignObject>
 <meta http-equiv="refresh" content="0; url=https://example.org"/>
 <a xlink:href="javascript:{MARK}"><text>click</text></a>
 <animate onbegin="{MARK}" attributeName="x" dur="1s"/>
 <image href="https://example.org/a.png" onerror="{MARK}" width="1" height="1"/>
 <use xlink:href="data:image/svg+xml,x"/>
 <rect style="fill: url(https://example.org/b)" width="5" height="5"/>
 <g id="a" onclick="{MARK}"><path d="M0 0L9 9" stroke="#000000"/></g>
 <text>&lt;script&gt;{MARK}&lt;/script&gt;</text>
</svg>"""


@pytest.fixture
def hostile(tmp_path):
    """A page of a run whose names, claims and pictures try to run scripts."""
    with only(Squares):
        next(iter(engine.run(["squares"], Options(out=tmp_path, quick=True, silent=True))))
    folder = tmp_path / "squares"
    summary = json.loads((folder / "summary.json").read_text())
    texts = ("experiment", "title", "label", "see", "size", "command", "device", "protocol")
    claim = {"claim": NAME, "holds": True, "ours": NAME, "paper": NAME}
    table = [{NAME: NAME, "metric": NAME, "ours": NAME}]
    more = {"claims": [claim], "table": table, "deviations": [NAME], "config": {NAME: NAME}}
    write_summary(folder, summary | dict.fromkeys(texts, NAME) | more)
    hover = '<metadata id="fsmap-hover">[{"panel": 0, "x": "</script>", "y": "", "name": "&lt;b>",'
    hover += ' "color": "red", "points": [[1, 1, 1, 1]]}]</metadata></svg>'
    (folder / "squares.svg").write_text(HOSTILE_SVG.replace("</svg>", hover))
    slider = json.loads((folder / "interactive.json").read_text())
    slider |= {"title": NAME, "parameter": NAME}
    for frame in slider["frames"]:
        frame |= {"label": NAME, "note": NAME, "svg": HOSTILE_SVG, "curves": []}
    (folder / "interactive.json").write_text(json.dumps(slider))
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
    assert page.url == hostile.as_uri()
    assert [url for url in requests if not url.startswith("data:")] == [hostile.as_uri()]
    live = "[...document.querySelectorAll('script')].filter(s => !s.type).length"
    assert page.evaluate(live) == 3
    assert page.locator("iframe, foreignObject, meta[http-equiv=refresh], img").count() == 0
    handlers = """[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())
        .filter(n => n.startsWith('on')).length"""
    assert page.evaluate(handlers) == 0
    assert page.locator(".plot svg path").count() == 1  # what draws is still there
    moved = "input => { input.value = 2; input.dispatchEvent(new Event('input')); }"
    page.locator("input[type=range]").evaluate(moved)  # the page's own scripts run
    assert page.locator(".frame:not([hidden]) svg").count() == 1
    assert page.locator("output").text_content() == NAME
    assert errors == []
    page.close()


def test_the_policy_stops_a_script_that_gets_in(browser, hostile, tmp_path):
    other = tmp_path / "other.html"
    other.write_text(hostile.read_text().replace("</body>", f"<script>{MARK}</script></body>"))
    page = browser.new_page()
    page.goto(other.as_uri())
    assert page.evaluate("window.hacked") is None
    page.close()
