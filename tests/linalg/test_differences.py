"""Traces that are no numbers, or rounding, are refused; all others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cases
import fsmap
from fsmap.errors import InputError
from fsmap.linalg.estimators import Site, check_trace


def checked(f, params, x, method, beta=1e-3) -> None:
    found = fsmap.trace(f, params, x, method=method, beta=beta, probes=8)
    check_trace(found.value, Site(f, params, x), beta if method.startswith("fd") else None)


@pytest.mark.parametrize("method", ["fd", "fd_central", "jvp", "vjp", "exact"])
@pytest.mark.parametrize("name", ["wide", "sequence", "batchnorm_train", "dict_input"])
def test_ordinary_traces_pass(seeded, method, name):
    case = cases.case(name)
    checked(case.f, case.params, case.x, method)


@pytest.mark.parametrize("method", ["fd", "fd_central", "jvp", "exact"])
def test_parameters_that_are_not_finite(seeded, method):
    case = cases.case("wide")
    name = next(iter(case.params))
    broken = case.params | {name: torch.full_like(case.params[name], torch.nan)}
    with pytest.raises(InputError, match="NaN"):
        checked(case.f, broken, case.x, method)


@pytest.mark.parametrize("method", ["fd", "fd_central"])
def test_a_step_that_is_lost(seeded, method):
    case = cases.case("wide")
    for beta in (1e-20, 1e-16):
        with pytest.raises(InputError, match="beta"):
            checked(case.f, case.params, case.x, method, beta)


@pytest.mark.parametrize("method", ["fd", "fd_central"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e8, 1e12, 1e16, 1e30])
def test_scales_at_which_differences_are_wrong(seeded, method, dtype, scale):
    """Refused, or within 20 % of the exact trace."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    x = torch.randn(6, 3).to(dtype)
    f, params = fsmap.functional(net)
    for what in (
        {n: scale * p for n, p in params.items()},
        params | {"2.bias": params["2.bias"] + scale},
    ):
        exact = fsmap.trace(f, what, x, method="exact").value
        generator = torch.Generator().manual_seed(0)
        given = {"beta": 1e-3, "probes": 4000, "generator": generator}
        try:
            found = fsmap.trace(f, what, x, method=method, **given).value
        except InputError:
            continue
        assert abs((found / exact).item() - 1) < 0.2
