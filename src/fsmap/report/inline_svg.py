"""SVG files of matplotlib's in one page: no clashing names, glyphs once, colors by theme."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from fsmap.report import figures
from fsmap.report.hover import extract

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

_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>\s*", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
_GROUP_ID = re.compile(r'<g id="[^"]*"')
# A space has no outline, hence no d.
_GLYPH = re.compile(r'\s*<path id="((?:STIX|DejaVu)[^"]*)"(?: d="([^"]*)")? transform="([^"]*)"/>')
_EMPTY_DEFS = re.compile(r"\s*<defs>\s*</defs>")
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
        """Move the outlines out of a picture.

        Args:
            svg: A picture.

        Returns:
            The picture, which refers to them by name.
        """

        def remember(match: re.Match[str]) -> str:
            name, outline, transform = match.groups()
            outline = " ".join((outline or "").split())
            self._found.setdefault(
                name, f'<path id="{name}" d="{outline}" transform="{transform}"/>'
            )
            return ""

        return _EMPTY_DEFS.sub("", _GLYPH.sub(remember, svg))

    def markup(self) -> str:
        """An invisible picture that defines all outlines.

        Returns:
            SVG.
        """
        inner = "".join(self._found.values())
        return f'<svg width="0" height="0" aria-hidden="true"><defs>{inner}</defs></svg>'


def inline(svg: str, prefix: str, label: str, glyphs: Glyphs) -> Inlined:
    """Prepare a picture for a page with other pictures on it.

    Args:
        svg: Text of an SVG file.
        prefix: Put before the names inside, so that no two pictures share one.
        label: What a screen reader says.
        glyphs: Takes the outlines of letters.

    Returns:
        The markup, the values for hovering, and the size in points.
    """
    svg, hover = extract(svg)
    for pattern in (_HEAD, _METADATA, _STYLE, _COMMENT):
        svg = pattern.sub("", svg, count=0 if pattern is _COMMENT else 1)
    svg = glyphs.take(_GROUP_ID.sub("<g", svg))
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


def untex(label: str) -> str:
    r"""An axis label without TeX, for a tooltip.

    Args:
        label: Text with ``$…$``.

    Returns:
        Plain text.

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
