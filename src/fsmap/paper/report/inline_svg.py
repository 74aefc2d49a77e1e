"""SVG files of matplotlib's in one page: no clashing names, glyphs once, colors by theme.

A file may come from anywhere: only elements that draw get into the page, without scripts, links
and addresses.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from xml.etree import ElementTree

from fsmap.errors import CheckpointError
from fsmap.paper.report import figures
from fsmap.paper.report.figures import extract

VARIABLES = {
    figures.INK: "--ink",
    figures.MUTED: "--muted",
    figures.GRID: "--grid",
    figures.PAPER: "--paper",
    "#000000": "--ink",
    **{figures.COLORS[name]: f"--{name}" for name in ("ps-map", "fs-map", "l-map", "bma")},
}
"""Name of the CSS variable that stands for a color of the shared style."""

GREEK = {
    **{"alpha": "α", "beta": "β", "gamma": "γ", "epsilon": "ε", "varepsilon": "ε", "theta": "θ"},
    **{"lambda": "λ", "mu": "μ", "rho": "ρ", "sigma": "σ", "phi": "φ", "psi": "ψ", "pi": "π"},
    **{"Phi": "Φ", "Sigma": "Σ", "Delta": "Δ", "nabla": "∇", "sum": "Σ", "infty": "∞"},
    **{"cdot": "·", "times": "×", "pm": "±", "leq": "≤", "geq": "≥", "approx": "≈", "mid": "|"},
    **{
        "log": "log",
        "det": "det",
        "exp": "exp",
        "Vert": "‖",
        "star": "*",
        "ast": "*",
        "prime": "′",
    },
}

DRAWING = {
    *("svg", "g", "defs", "clipPath", "path", "rect", "circle", "ellipse", "line", "polyline"),
    *("polygon", "text", "tspan", "image", "use", "linearGradient", "radialGradient", "stop"),
    *("pattern", "mask", "symbol", "title", "desc"),
}
"""Elements that are kept."""

_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_INSIDE = re.compile(r"#|data:image/(?:png|jpeg|gif);base64,")  # what a picture may refer to
_ADDRESS = re.compile(r"url\((?!\s*['\"]?#)|@import|\\", re.IGNORECASE)
_GROUP_ID = re.compile(r'<g id="[^"]*"')
# A space has no outline, hence no d.
_GLYPH = re.compile(
    r'\s*<path id="((?:STIX|DejaVu)[^"]*)"(?: d="([^"]*)")? transform="([^"]*)" ?/>'
)
_EMPTY_DEFS = re.compile(r"\s*<defs>\s*</defs>|\s*<defs ?/>")
_OPENING = re.compile(r'<svg[^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>')
_NAME = re.compile(r'(\bid="|href="#|url\(#)(?!STIX|DejaVu)([^")]+)')
_COLOR = re.compile("|".join(map(re.escape, VARIABLES)), re.IGNORECASE)
_SPACE = re.compile(r"\s*\n\s*")


class Inlined(NamedTuple):
    """A picture ready for the page."""

    markup: str
    hover: list[dict[str, Any]]
    width: float
    height: float


class Glyphs:
    """Outlines of letters, collected over all pictures of a page so that each stands there once."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def take(self, svg: str) -> str:
        """Move the outlines out of a picture."""

        def remember(match: re.Match[str]) -> str:
            name, outline, transform = match.groups()
            outline = " ".join((outline or "").split())
            self._found.setdefault(
                name, f'<path id="{name}" d="{outline}" transform="{transform}"/>'
            )
            return ""

        return _EMPTY_DEFS.sub("", _GLYPH.sub(remember, svg))

    def markup(self) -> str:
        """An invisible picture that defines all outlines."""
        inner = "".join(self._found.values())
        return f'<svg width="0" height="0" aria-hidden="true"><defs>{inner}</defs></svg>'


def inline(svg: str, prefix: str, label: str, glyphs: Glyphs) -> Inlined:
    """Prepare a picture for a page with other pictures on it."""
    svg, hover = extract(svg)
    svg = glyphs.take(_GROUP_ID.sub("<g", clean(svg)))
    prefix = re.sub(r"[^\w-]", "-", prefix)
    svg = _NAME.sub(rf"\g<1>{prefix}-\g<2>", svg)
    svg = _COLOR.sub(lambda match: f"var({VARIABLES[match.group().lower()]})", svg)
    found = _OPENING.search(svg)
    width, height = (float(number) for number in found.groups()) if found else (0.0, 0.0)
    title = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{title}">'
    )
    markup = _SPACE.sub(" ", _OPENING.sub(opening, svg, count=1)).strip()
    for series in hover:
        series.update(x=untex(series["x"]), y=untex(series["y"]), name=untex(series["name"]))
        series["color"] = _COLOR.sub(
            lambda match: f"var({VARIABLES[match.group().lower()]})", series["color"]
        )
    return Inlined(markup, hover, width, height)


def clean(svg: str) -> str:
    """The elements of a picture that draw."""
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError as error:
        message = f"a picture of this run is no SVG ({error}). Draw it again with --redraw."
        raise CheckpointError(message) from error
    _strip(root)
    return ElementTree.tostring(root, encoding="unicode")


def _strip(element: ElementTree.Element) -> None:
    element.tag = element.tag.removeprefix(_SVG)
    for name, value in list(element.attrib.items()):
        del element.attrib[name]
        short = name.replace(_XLINK, "xlink:")
        link = short.removeprefix("xlink:") in ("href", "src")
        if short.lower().startswith("on") or "{" in short or _ADDRESS.search(value):
            continue
        if not link or _INSIDE.match(value):
            element.attrib[short] = value
    for child in list(element):
        name = child.tag.removeprefix(_SVG) if isinstance(child.tag, str) else ""
        if name in DRAWING:
            _strip(child)
        else:
            element.remove(child)


def untex(label: str) -> str:
    r"""An axis label without TeX, for a tooltip.

    Args:
        label: Text with ``$…$``.

    Examples:
        >>> untex(r"noise $\sigma/\sigma^*$, $\log p(f\mid\mathcal{D})$")
        'noise σ/σ*, log p(f|D)'
    """
    if "$" not in label and "\\" not in label:
        return label
    label = re.sub(r"\\(?:mathcal|mathrm|mathbf|mathit|text|operatorname)\s*", "", label)
    label = re.sub(r"\\([A-Za-z]+)\s?", lambda m: _word(m.group(1)), label)
    return re.sub(r"[${}^_\\]", "", re.sub(r"\\[,;!: ]", "", label)).strip()


def _word(name: str) -> str:
    found = GREEK.get(name, name)
    return found + " " if found.isascii() and found.isalpha() else found
