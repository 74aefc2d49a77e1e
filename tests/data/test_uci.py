"""Regression tables: reading, the authors' splits, two ways to standardize."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsmap.data import uci
from fsmap.data.catalogue import find, look_for
from fsmap.errors import InputError


def toy(rows: int = 200) -> uci.Table:
    rng = np.random.default_rng(0)
    x = rng.normal([5.0, -2.0, 0.0], [3.0, 0.1, 1.0], (rows, 3))
    y = 100 + 10 * x.sum(1, keepdims=True) + rng.normal(size=(rows, 1))
    return uci.Table("toy", x, y)


def test_a_real_table():
    if look_for(find("naval").files[0]).path is None:
        pytest.skip("naval is not on this machine")
    table = uci.read_table("naval")
    assert table.x.shape == (11934, 14)  # two constant columns are left out
    assert table.y.shape == (11934, 1)
    assert np.isfinite(table.x).all()


@pytest.mark.parametrize(("text", "word"), [("a,y\n1,high\n", "numbers"), ("a\n1,2\n", "columns")])
def test_what_is_no_table(tmp_path, text, word, monkeypatch):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match=word):
        uci.parse_table("t", tmp_path / "t.csv")
    monkeypatch.setattr(uci, "locate", lambda *_: {"x.gz": tmp_path / "x.gz"})
    with pytest.raises(InputError, match="kmnist"):
        uci.read_table("kmnist")


def test_a_table_with_a_constant_column(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,y\n1,7,3\n2,7,4\n")
    table = uci.parse_table("t", tmp_path / "t.csv")
    assert (table.x.tolist(), table.y.tolist()) == ([[1.0], [2.0]], [[3.0], [4.0]])


def test_splits_are_those_of_the_loaders_and_of_the_authors():
    """Written as those programs do it, with numpy's old global generator."""
    state = np.random.get_state()

    def shuffled(size, seed):
        order = np.arange(size)
        np.random.seed(seed)
        np.random.shuffle(order)
        np.random.set_state(state)
        return order

    order, again, held = shuffled(100, 0), shuffled(100, 3), shuffled(90, 42)
    before = np.random.get_state()[1].tolist()
    assert uci.split_rows(100, 0).test.tolist() == order[90:].tolist()
    third = uci.split_rows(100, 3)
    assert np.random.get_state()[1].tolist() == before  # no global generator is used
    assert third.test.tolist() == order[again][90:].tolist()
    assert third.valid.tolist() == order[again][:90][held][:9].tolist()
    for seed in (0, 1, 19):
        rows = uci.split_rows(506, seed)
        assert sorted(np.concatenate(rows).tolist()) == list(range(506))  # each has one use
        assert [len(part) for part in rows] == [410, 45, 51]


def test_training_statistics():
    parts = uci.split(toy(), 1, dtype=torch.float64)
    for t in parts.train:
        assert t.mean(0).abs().max() < 1e-12
        assert (t.std(0, correction=0) - 1).abs().max() < 1e-12
    table, rows = toy(), uci.split_rows(200, 1)
    mean, std = table.y[rows.train].mean(), table.y[rows.train].std()
    expected = (table.y[rows.test] - mean) / std
    assert np.allclose(parts.test.y.numpy(), expected, rtol=1e-12)


def test_the_authors_scaling_leaves_test_rows_on_another_scale():
    parts = uci.split(toy(), 0, scaling="authors", dtype=torch.float64)
    table, rows = toy(), uci.split_rows(200, 0)
    expected = (table.y[rows.test] - table.y.mean()) / (table.y.std() + 1e-6)
    assert np.allclose(parts.test.y.numpy(), expected, rtol=1e-12)
    seen = torch.cat([parts.train.y, parts.valid.y])
    assert seen.mean().abs() < 1e-12
    assert (seen.std(correction=0) - 1).abs() < 1e-7


def test_a_column_that_is_constant_in_training_becomes_zero():
    table = toy(20)
    x = np.zeros((20, 1))
    x[uci.split_rows(20, 0).test] = 1.0
    parts = uci.split(table._replace(x=x), 0)
    assert torch.equal(parts.train.x, torch.zeros_like(parts.train.x))
    assert torch.isfinite(parts.test.x).all()
    assert sum(len(part.y) for part in uci.split(toy(), 0, max_rows=50)) == 50
