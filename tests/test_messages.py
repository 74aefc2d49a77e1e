"""What messages point to exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pages_that_are_named_exist():
    named = {
        (page, str(source.relative_to(ROOT)))
        for source in (ROOT / "src").rglob("*.py")
        for page in re.findall(r"docs/[a-z_/]+\.md", source.read_text())
    }
    assert len(named) > 2
    assert not {(page, where) for page, where in named if not (ROOT / page).exists()}
