"""How sphinx builds the site: ``make docs``."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import fsmap

project = "fsmap"
author = "The fsmap authors"
project_copyright = author
version = release = fsmap.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the readme and the changelog begin where they begin

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "fsmap"
html_show_sourcelink = False

autodoc_typehints = "none"  # signatures have them; lists of arguments say what they mean
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_rtype = False

MATH = re.compile(r"(?<![\\$`])\$([^$`\n]+(?:\n[^$`\n]+)?)\$(?!\$)")


def _math(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings write formulas as ``$...$``."""
    text = MATH.sub(lambda found: f":math:`{' '.join(found[1].split())}`", "\n".join(lines))
    lines[:] = text.splitlines()


SHORT = re.compile(r"(\\[td]?frac)\s?(\d)\s?(\d)")  # docutils reads \frac12 as 12 over what follows


def _tex(node: Any) -> str:
    return SHORT.sub(r"\1{\2}{\3}", node.astext())


def _inline(translator: Any, node: Any) -> None:
    translator.body.append(tex2mathml(_tex(node)))
    raise nodes.SkipNode


def _block(translator: Any, node: Any) -> None:
    formula = tex2mathml(_tex(node), as_block=True)
    translator.body.append(f'<div style="overflow-x: auto">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register the hooks. Formulas become MathML: no script, nothing to download."""
    app.connect("autodoc-process-docstring", _math)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
