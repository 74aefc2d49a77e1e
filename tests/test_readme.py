"""The Python in the README and in docs/ runs, one namespace per page; links lead to files."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of each Python block of a page."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        yield text.count("\n", 0, found.start(1)), found[1]


def run_block(page: Path, line: int, block: str, namespace: dict[str, object]) -> None:
    """Run a block; one that is written as a session must also print what it shows."""
    if not block.lstrip().startswith(">>>"):
        exec(compile("\n" * line + block, str(page), "exec", dont_inherit=True), namespace)
        return
    test = doctest.DocTestParser().get_doctest(block, namespace, page.name, str(page), line)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    outcome = runner.run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)
    assert not outcome.failed, "".join(report)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if FENCE.search(page.read_text())], ids=lambda page: page.name
)
@pytest.mark.usefixtures("float32", "seeded")
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, block in blocks(page):
        run_block(page, line, block, namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_tables_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    made = importlib.import_module("benchmarks.pages")
    for page in made.PAGES:
        text = page.read_text()
        assert text == made.filled(text), f"run `python -m benchmarks.pages`: {page.name} differs"


def test_a_number_of_the_readme_is_the_mean_of_its_rows():
    """A second way to the number, without the code that made the table."""
    rows = map(json.loads, (ROOT / "results/image-table/rows.jsonl").read_text().splitlines())
    unit = {"dataset": "fmnist", "row": "sam"}
    nll = [r["value"] for r in rows if r["metric"] == "nll" and unit.items() <= r["unit"].items()]
    (line,) = [
        li for li in (ROOT / "README.md").read_text().splitlines() if "FashionMNIST | SAM," in li
    ]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[4].split(" ± ")[0] == f"{fmean(nll):.3f}"
    assert cells[8] == str(len(nll))


def test_readme_is_short():
    words = (ROOT / "README.md").read_text().split()
    assert sum(any(c.isalnum() for c in word) for word in words) <= 1_200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short(page: Path):
    lines = page.read_text().splitlines()
    assert [li for li in lines if len(li) > (160 if li.startswith("|") else 120)] == []
