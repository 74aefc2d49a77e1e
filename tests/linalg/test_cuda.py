"""On a GPU: the same numbers as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

import cases
import fsmap
from fsmap.linalg import probes

pytestmark = pytest.mark.gpu
MODELS = ("wide", "layernorm", "cnn", "batchnorm_train", "sequence", "shared", "dict_input")


def on_gpu(case):
    """The case there: function, parameters, points."""
    f, params = fsmap.functional(case.module.cuda())
    return f, params, tree_map(lambda t: t.cuda(), case.x)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["dense", "dual", "slq", "svd_clip", "pseudo", "first_order"])
def test_log_det_is_that_of_the_cpu(name, method):
    options = {"jitter": 0.1, "method": method, "probes": 10**9}
    here, there = cases.case(name), on_gpu(cases.case(name))
    expected = fsmap.log_det(here.f, here.params, here.x, **options)
    found = fsmap.log_det(*there, **options)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-8)
    for ours, theirs in zip(
        torch.autograd.grad(found, there[1].values(), materialize_grads=True),
        torch.autograd.grad(expected, here.params.values(), materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["fd", "fd_central", "jvp", "exact"])
def test_trace_is_that_of_the_cpu(name, method):
    here, there = cases.case(name), on_gpu(cases.case(name))
    psi = probes.normal(here.params, 3, torch.Generator().manual_seed(0))
    drawn = 1 if method == "exact" else psi
    expected = fsmap.trace(here.f, here.params, here.x, method=method, probes=drawn)
    moved = 1 if method == "exact" else {n: p.cuda() for n, p in psi.items()}
    found = fsmap.trace(*there, method=method, probes=moved)
    torch.testing.assert_close(found.value.cpu(), expected.value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", ["jvp", "vjp", "slq"])
def test_draws_on_the_gpu(method):
    there = on_gpu(cases.case("wide"))
    generator = torch.Generator("cuda").manual_seed(0)
    if method == "slq":
        found = fsmap.log_det(*there, jitter=0.1, method="slq", probes=4, generator=generator)
    else:
        found = fsmap.trace(*there, method=method, probes=4, generator=generator).value
    assert torch.isfinite(found)
