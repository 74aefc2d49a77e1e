"""The Python in the README and in docs/ runs, one namespace per page; links lead to files."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch

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
def test_page_runs(page: Path, seeded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    torch.set_default_dtype(torch.float32)  # as readers have it
    try:
        for line, block in blocks(page):
            run_block(page, line, block, namespace)
    finally:
        torch.set_default_dtype(torch.float64)


def test_readme_has_something_to_run():
    assert len(list(blocks(ROOT / "README.md"))) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_a_wrong_block_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n```python\n>>> 1 + 1\n3\n```\n\n```python\nraise KeyError('here')\n```\n"
    )
    (first, session), (second, script) = blocks(page)
    assert (first, second) == (3, 8)
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        run_block(page, first, session, {})
    with pytest.raises(KeyError, match="here") as caught:
        run_block(page, second, script, {})
    assert caught.traceback[-1].lineno == second


def shown(values: dict[str, list[float]]) -> list[str]:
    """The cells that the README has for a row of its table."""
    accuracy, nll, ece, scaled = (
        fmean(values[m]) for m in ("accuracy", "nll", "ece", "nll_scaled")
    )
    cells = [f"{100 * accuracy:.1f} %", f"{nll:.3f}", f"{100 * ece:.1f} %", f"{scaled:.3f}"]
    return [*cells, str(len(values["nll"]))]


def values_of(experiment: str, where: dict) -> dict[str, list[float]]:
    """Values by metric of the units in ``results`` that are as asked for."""
    values: dict[str, list[float]] = {}
    for line in (ROOT / "results" / experiment / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        if where.items() <= row["unit"].items():
            values.setdefault(row["metric"], []).append(row["value"])
    return values


def test_numbers_of_the_readme_are_those_of_the_rows():
    methods = {"PS-MAP": "ps-map", "L-MAP, λ = 1e-6": "other"}
    baselines = {"label smoothing, 0.05": "label-smoothing", "SAM, ρ = 0.05": "sam"}
    places = {
        "FashionMNIST": ("image-table", {"dataset": "fmnist"}),
        "CIFAR-10": ("image-table", {"dataset": "cifar10"}),
        "CIFAR-10, 20 % random labels": ("label-noise", {"dataset": "cifar10", "level": 0.2}),
    }
    text = (ROOT / "README.md").read_text().split("## What it is worth")[1].split("\n## ")[0]
    found = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]
    wanted = [[place, method] for place in places for method in methods]
    wanted[2:2] = [["FashionMNIST", method] for method in baselines]
    assert [line[:2] for line in found[2:]] == wanted
    methods |= baselines
    for place, method, *cells in found[2:]:
        experiment, where = places[place]
        assert cells == shown(values_of(experiment, {**where, "row": methods[method]})), (
            place,
            method,
        )


def test_numbers_of_the_guide_to_strengths_are_those_of_the_rows():
    text = (ROOT / "docs" / "guide" / "strength.md").read_text()
    lines = ("| c |" + text.split("| c |")[1].split("\n\n")[0]).splitlines()
    head, _, *body = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    measured = (ROOT / "benchmarks" / "results" / "strength.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, measured) if row["set"] == "steering"]
    metrics = {"T": "temperature", "log loss": "nll", "accuracy": "accuracy", "ECE": "ece"}
    assert [name for name, *_ in body] == list(metrics)
    for name, *cells in body:
        for c, cell in zip(head[1:], cells, strict=True):
            way = "plain" if c == "0" else f"nats={c}"
            mean = fmean(row["test"][metrics[name]] for row in rows if row["way"] == way)
            percent = cell.endswith(" %")
            decimals = len(cell.removesuffix(" %").partition(".")[2])
            assert cell.removesuffix(" %") == f"{mean * (100 if percent else 1):.{decimals}f}", name
    plain, other = (
        values_of("image-table", {"dataset": "fmnist", "row": row}) for row in ("ps-map", "other")
    )
    R, T = ([fmean(v[m]) for v in (other, plain)] for m in ("laplacian_other", "test_temperature"))
    assert f"R = {R[0]:.0f} instead of {round(R[1], -3):,.0f} at p_X" in text
    assert f"T = {T[0]:.2f} instead of {T[1]:.2f}" in text
