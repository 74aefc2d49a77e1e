"""The page about a table: the verdict, its numbers, and a browser that is content."""

from __future__ import annotations

import re

import pytest
import torch

from fsmap.paper.report import table_page
from fsmap.tables.encoder import Target
from fsmap.tables.model import TableOptions, fit_table
from fsmap.tables.reader import read_table
from small_tables import flowers, houses

OPTIONS = TableOptions(hidden=(8,), steps=40, device="cpu", progress=False)
TARGETS = {houses: "price", flowers: "kind"}


@pytest.fixture(scope="module", params=TARGETS)
def fitted(request, tmp_path_factory):
    table = read_table(request.param(tmp_path_factory.mktemp("t") / "table.csv"))
    return fit_table(table, TARGETS[request.param], OPTIONS)


def render(fitted) -> str:
    given = {"source": "a<b>.csv", "command": "fsmap fit 'a<b>.csv'", "model": "model.pt"}
    return table_page.render(fitted, **given)


def test_the_table_of_methods(fitted):
    header, lines = table_page.results(fitted)
    names = [line[0] for line in lines]
    assert names[0] == table_page.NAMES[fitted.model.chosen]
    assert set(names) == {"Linear", "PS-MAP", "L-MAP", "Boosting", "Constant"}
    key, name = ("R²", "r2") if "R²" in header else ("NLL", "nll")
    shown = float(lines[names.index("L-MAP")][header.index(key)].replace("−", "-"))
    assert shown == pytest.approx(fitted.measured["l-map"][name], rel=5e-3)


def test_the_verdict_comes_first_with_the_base_rate(fitted):
    text = table_page.verdict(fitted)
    assert text.startswith(table_page.NAMES[fitted.model.chosen])
    assert "base rate" in text
    assert "per test row" in text
    page = render(fitted)
    assert page.index("base rate") < page.index('id="methods"')


def test_the_recommendation(fitted):
    model = fitted.model._replace(target=Target("y", "classification", classes=("a", "b")))
    made = fitted._replace(model=model, learned={}, out={}, y=torch.zeros(100).long())
    for mine, boosting, advice in (  # the true class of the first 50, 40 and 10 rows, in logits
        ((0.1, -2, -2), (2, 2, -2), "use gradient boosting"),
        ((0.4, -0.1, -0.1), (4, 4, -20), "for classes use gradient boosting"),
        ((4, 4, 4), (9, 9, 9), "use it"),
        ((0.1, -2, -2), (0.1, -2, -2), "do not use it yet"),
    ):
        rows = {model.chosen: mine, "boosting": boosting, "constant": (0.0, 0.0, 0.0)}
        for name, logits in rows.items():
            first = torch.tensor(logits).repeat_interleave(torch.tensor([50, 40, 10]))
            made.out[name] = torch.stack([first.double(), 0 * first.double()], 1)
        assert table_page._recommendation(made).startswith(f"Recommendation: {advice}")


def test_the_page_stands_alone_and_escapes(fitted):
    text = render(fitted)
    assert "a&lt;b&gt;.csv" in text
    assert "<b>.csv" not in text
    assert not re.search(r'(src|href)="(https?:)?//', text)
    assert len(text) < 600_000
    for column in fitted.model.encoder.columns:
        assert column.name in text
    for name in ("importance", "coverage" if fitted.spread else "confusion"):
        assert f'id="{name}"' in text
