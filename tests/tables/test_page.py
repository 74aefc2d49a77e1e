"""The page about a table: the verdict, its numbers, and a browser that is content."""

from __future__ import annotations

import re

import pytest
import torch

from fsmap.paper.report import table_page
from fsmap.tables.encoder import Target
from fsmap.tables.model import Fitted, TableModel, TableOptions, fit_table
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
    assert "Recommendation: use it" in text
    assert "per test row" in text
    page = render(fitted)
    assert page.index("base rate") < page.index('id="methods"')


def test_the_recommendation():
    def made(right, wrong, share):  # chance of the true class if right and if wrong; share right
        p = torch.where(torch.arange(200) < 200 * share, right, wrong)
        return torch.stack([p, 1 - p, 0 * p], 1).clamp_min(1e-9).log()

    model = TableModel(None, Target("y", "classification", classes=("a", "b")), None, "l-map", None)
    fitted = Fitted(model, None, None, torch.zeros(200).long(), {}, {}, {"l-map": 0}, *[None] * 4)
    fitted.out["constant"] = torch.zeros(200, 3)
    for mine, boosting, advice in (
        ((0.51, 0.2, 0.5), (0.9, 0.2, 0.9), "use gradient boosting"),  # although no better than 1/3
        ((0.6, 0.45, 0.5), (0.99, 1e-4, 0.9), "for classes use gradient boosting"),
        ((0.97, 0, 1), (1, 0, 1), "use it"),  # the log loss is lower by 0.03
        ((0.51, 0.2, 0.5), (0.51, 0.2, 0.5), "do not use it yet"),
    ):
        fitted.out.update({"l-map": made(*mine), "boosting": made(*boosting)})
        assert table_page._recommendation(fitted).startswith(f"Recommendation: {advice}")


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
