"""Hyper-parameters: conversion, sign, and tables by name."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap
from torch.testing import assert_close

from fsmap.errors import InputError
from fsmap.linalg.points import check_positive
from fsmap.objective.likelihood import entry, tensor_like, working


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [2, 2.0, torch.tensor(2.0), torch.tensor([2.0, 2.0])])
def test_tensor_like_takes_dtype_and_keeps_shape(value, dtype):
    got = tensor_like(value, torch.zeros(3, dtype=dtype))
    assert got.dtype == dtype
    assert got.shape == torch.as_tensor(value).shape
    assert (got == 2).all()


def test_tensor_like_keeps_the_graph_and_the_batch():
    like = torch.zeros(3, dtype=torch.float32)
    slopes = vmap(grad(lambda s: tensor_like(s, like).square()))(torch.tensor([1.0, 3.0]))
    assert_close(slopes, torch.tensor([2.0, 6.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_working_raises_half_precision_only(dtype):
    assert working(torch.ones(2, dtype=dtype)).dtype == torch.float32
    for full in (torch.float32, torch.float64):
        assert working(torch.ones(2, dtype=full)).dtype == full


def test_check_positive_counts_what_is_wrong():
    check_positive("std", torch.tensor([1.0, 2.0]))
    with pytest.raises(InputError, match=r"std must be finite and > 0, got 0 \(2 of 3 entries\)"):
        check_positive("std", torch.tensor([1.0, 0.0, torch.inf]))


def test_entry_is_the_value_or_the_named_one():
    assert entry("std", 3.0, "a", ["a"]) == 3.0
    assert entry("std", {"a": 1.0, "b": 2.0}, "b", ["a", "b"]) == 2.0
    with pytest.raises(InputError, match=r"std has no entry for \['b', 'c'\]; it has \['a'\]"):
        entry("std", {"a": 1.0}, "b", ["a", "b", "c"])
