"""The style leaves matplotlib as it was; a figure's values travel in its SVG and come out right."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest

from fsmap.errors import MissingExtraError
from fsmap.paper.report import figures
from fsmap.paper.report.figures import MOST_POINTS, collect, extract
from fsmap.paper.report.inline_svg import Glyphs, inline, untex


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
    ax.set_yscale("log")
    figures.plain_log(ax.yaxis)
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
