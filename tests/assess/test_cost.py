"""Predicted costs: right order of magnitude, and the method that auto picks."""

from __future__ import annotations

import pytest
import torch

from cases import case
from fsmap.assess import cost
from fsmap.assess.cost import costs
from fsmap.functional import count
from fsmap.linalg import logdet, memory, points

METHODS = ["dense", "dual", "slq", "jvp", "fd"]


@pytest.mark.parametrize("name", ["tanh_mlp", "wide", "cnn", "batchnorm_train", "sequence"])
def test_every_method_has_a_price_and_auto_is_the_one_of_log_det(name):
    c = case(name)
    S, K, P = logdet.shape(c.f, c.params, c.x)
    rows, auto = costs(c.f, c.params, c.x, K, 1e4)
    assert [row.method for row in rows] == METHODS
    assert all(row.seconds > 0 and row.bytes > 0 and row.fits for row in rows)
    gram = logdet.gram_bytes(c.f, c.params, c.x)
    assert auto == logdet.choose("auto", S * K, P, torch.device("cpu"), gram=gram)


def test_memory_is_that_of_the_formulas():
    c = case("wide")
    S, K, P = logdet.shape(c.f, c.params, c.x)
    rows = {row.method: row for row in costs(c.f, c.params, c.x, K, 1e6)[0]}
    assert rows["dense"].bytes == 8 * (3 * S * K * P + 2 * P**2)
    assert rows["dual"].bytes == logdet.gram_bytes(c.f, c.params, c.x)
    assert rows["jvp"].bytes == 2 * (8 * P + 10**6)
    assert rows["fd"].bytes == 2 * 8 * P + 10**6


def test_what_does_not_fit_is_said(monkeypatch):
    c = case("wide")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2000)
    fits = {row.method: row.fits for row in costs(c.f, c.params, c.x, 3, 10.0)[0]}
    assert fits["dense"] is False
    assert fits["fd"] is True


def test_times_grow_with_the_points(monkeypatch):
    c = case("tanh_mlp")
    ticks = iter(range(10**6))
    monkeypatch.setattr(cost, "now", lambda device: float(next(ticks)))  # each pass: 1 s
    few = {row.method: row.seconds for row in costs(c.f, c.params, c.x, 1, 0.0)[0]}
    many = points.take(c.x, torch.arange(120) % 12)
    more = {row.method: row.seconds for row in costs(c.f, c.params, many, 1, 0.0)[0]}
    assert more["fd"] == pytest.approx(10 * few["fd"])
    assert few["fd"] == pytest.approx(2 * 12 / cost.FEW)
    assert count(c.params) == 10
