"""On a GPU: the same numbers as on the CPU, and half precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import cases
import fsmap
from fsmap.linalg import probes
from fsmap.linalg.jacobian import SecondOrder

pytestmark = pytest.mark.gpu
MODELS = ("wide", "layernorm", "cnn", "batchnorm_train", "sequence", "shared", "dict_input")


def on_gpu(case):
    """The case there: function, parameters, points."""
    module = case.module.cuda()
    f, params = fsmap.functional(module)
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


def test_jvp_in_bf16_is_within_two_percent(seeded):
    net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).float()
    f, params = fsmap.functional(net.cuda())
    x = torch.randn(32, 8, dtype=torch.float32).cuda()
    psi = probes.normal(params, 4, torch.Generator("cuda").manual_seed(0))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half = fsmap.trace(f, params, x, method="jvp", probes=psi).value
    net.double()
    params, wide = dict(net.named_parameters()), {n: p.double() for n, p in psi.items()}
    exact = fsmap.trace(f, params, x.double(), method="jvp", probes=wide).value
    assert float(half.detach()) == pytest.approx(float(exact.detach()), rel=0.02)


def test_layer_norm_returns_the_dtype_that_torch_returns():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).cuda()
    for autocast in (True, False):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            expected = F.layer_norm(x.bfloat16(), (6,))
            with SecondOrder():
                found = F.layer_norm(x.bfloat16(), (6,))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
