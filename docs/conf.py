"""How sphinx builds the site: ``make docs``."""

from __future__ import annotations

import re
from typing import Any

import fsmap

project = "fsmap"
author = "The fsmap authors"
project_copyright = author
version = release = fsmap.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the readme and the changelog begin where they begin

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


def setup(app: Any) -> None:
    """Register the hook."""
    app.connect("autodoc-process-docstring", _math)
