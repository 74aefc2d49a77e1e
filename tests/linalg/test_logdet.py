"""log det(𝒥 + εI): all methods against eigenvalues of the written-out matrix, and gradients."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap

import cases
import fsmap
import oracles
from cases import symmetric
from fsmap import metric as m
from fsmap.errors import InputError, MemoryLimitError, SingularGeometryError
from fsmap.functional import count
from fsmap.linalg import logdet
from fsmap.linalg.jacobian import Site

memory = sys.modules["fsmap.functional"]  # fsmap.functional is the function

ORACLES = {
    "dense": oracles.logdet_slow,
    "dual": oracles.logdet_slow,
    "slq": oracles.logdet_slow,
    "auto": oracles.logdet_slow,
    "svd_clip": oracles.svd_clip_slow,
    "pseudo": oracles.pseudo_slow,
    "first_order": lambda f, p, x, eps, g=None: (
        count(p) * math.log(eps) + oracles.trace_slow(f, p, x, g) / eps
    ),
}
ALL = 10**9  # as many probes of slq as there are directions: no randomness is left


def log_det(case, probes=ALL, **options):
    return fsmap.log_det(case.f, case.params, case.x, probes=probes, **options)


@pytest.mark.parametrize("method", ["dense", "dual", "svd_clip", "pseudo", "slq"])
def test_small_eigenvalues_are_kept(method):
    """A column of size 1e-6 makes an eigenvalue of 1e-12; in single precision it would be gone."""
    params = {"w": torch.ones(2, dtype=torch.float32)}
    x = torch.tensor([[1.0, 0.0], [0.0, 1e-6]], dtype=torch.float32)
    f = lambda p, x: x @ p["w"]  # noqa: E731
    value = fsmap.log_det(f, params, x, jitter=1e-14, method=method, probes=ALL)
    expected = math.log(0.5) + math.log(0.5e-12)
    assert value.dtype == torch.float64
    assert float(value) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("method", ["dense", "dual", "slq"])
@pytest.mark.parametrize("name", ["wide", "cnn", "sequence", "layernorm"])
def test_single_precision_model(method, name):
    case = cases.case(name)
    double = log_det(case, jitter=1e-2, method=method)
    case.module.float()
    params = dict(case.module.named_parameters())
    single = fsmap.log_det(case.f, params, case.x.float(), jitter=1e-2, method=method, probes=ALL)
    assert float(single.detach()) == pytest.approx(float(double.detach()), rel=1e-5)
    grads = torch.autograd.grad(single, params.values(), materialize_grads=True)
    assert all(g.dtype == torch.float32 for g in grads)


@pytest.mark.parametrize("method", ["dense", "dual", "svd_clip", "first_order"])
def test_vmaps_over_jitter_and_members(method):
    case = cases.case("wide")
    eps = torch.tensor([1e-2, 1.0, 10.0])
    together = vmap(lambda e: log_det(case, jitter=e, method=method))(eps)
    members = {n: torch.stack([p.detach(), 2 * p.detach()]) for n, p in case.params.items()}

    def member(p):
        return logdet.evaluate(Site(case.f, p, case.x), eps[0], method).value

    values = vmap(member)(members)
    gradients = vmap(grad(member))(members)
    for k in range(3):
        torch.testing.assert_close(together[k], log_det(case, jitter=float(eps[k]), method=method))
    for k in range(2):
        one = {n: p[k] for n, p in members.items()}
        torch.testing.assert_close(values[k], member(one))
        for name, g in grad(member)(one).items():
            torch.testing.assert_close(gradients[name][k], g)


@pytest.mark.parametrize("method", ["dense", "dual"])
def test_second_derivative_and_forward_mode(method, seeded):
    case = cases.case("tanh_mlp")

    def value(*tensors):
        params = dict(zip(case.params, tensors, strict=True))
        return logdet.evaluate(Site(case.f, params, case.x), torch.tensor(0.1), method).value

    leaves = tuple(case.params.values())
    assert torch.autograd.gradcheck(value, leaves)
    assert torch.autograd.gradgradcheck(value, leaves)
    tangents = tuple(cases.direction(case.params).values())
    gradient = torch.autograd.grad(value(*leaves), leaves, materialize_grads=True)
    along = sum((g * t).sum() for g, t in zip(gradient, tangents, strict=True))
    torch.testing.assert_close(jvp(value, leaves, tangents)[1], along)


def test_factors_of_a_metric_are_differentiated():
    case = cases.case("wide")
    factor = symmetric(3, 3).requires_grad_()

    def value(L):
        return fsmap.log_det(case.f, case.params, case.x, jitter=0.1, metric=m.Output(factor=L))

    (found,) = torch.autograd.grad(value(factor), factor)
    direction = {"L": symmetric(3, 3, seed=1)}
    expected = oracles.directional_slow(lambda p: value(p["L"]).detach(), {"L": factor}, direction)
    assert float((found * direction["L"]).sum()) == pytest.approx(expected, rel=1e-7)


def test_weights_of_the_points_vmap():
    """One set of points per member, as in a population: signs cannot be looked at."""
    case = cases.case("wide")
    sets = torch.stack([case.x, case.x.flip(0) + 0.5])
    metric = m.Weights(lambda x: x.square().sum(1))

    def value(x):
        return logdet.evaluate(Site(case.f, case.params, x, metric), torch.tensor(0.1)).value

    together = torch.func.vmap(value)(sets)
    for k in range(2):
        torch.testing.assert_close(together[k], value(sets[k]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("times", [0.5, 2.0])
def test_pseudo_leaves_out_what_rounding_makes(dtype, times):
    """σ below max(shape)·eps·σ_max counts as zero, by the precision of the parameters."""
    threshold = 4 * torch.finfo(dtype).eps * 100
    sizes = torch.tensor([100.0, 3.0, 1.0, times * threshold], dtype=dtype)
    params, x = {"a": torch.ones(4, dtype=dtype)}, torch.ones(1, 4, dtype=dtype)
    f = lambda p, x: x * sizes * p["a"]  # noqa: E731  J = diag(sizes)
    found = fsmap.log_det(f, params, x, jitter=1e-60, method="pseudo")
    kept = sizes.double() if times > 1 else sizes[:3].double()
    torch.testing.assert_close(found.double(), kept.square().log().sum(), rtol=1e-6, atol=0)


CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["auto", "dense", "dual", "svd_clip", "slq"])
@pytest.mark.parametrize("scale", [1.0, 1 / 7, 1e3])
def test_points_of_rank_one_have_no_log_det_without_jitter(seeded, method, scale):
    """In float32 the zero eigenvalues are 1e-14 of the largest, and have a finite log."""
    f, params = fsmap.functional(nn.Linear(3, 1).float())
    x = scale * torch.linspace(-1, 1, 20).float()[:, None] * torch.tensor([[1.0, 2.0, 3.0]]).float()
    with pytest.raises(SingularGeometryError):
        fsmap.log_det(f, params, x, jitter=0.0, method=method)
    if method != "slq":
        with pytest.raises(SingularGeometryError):
            fsmap.log_det(f, params, x, jitter=0.0, method=method, return_estimate=True)


@pytest.mark.parametrize("method", ["dense", "dual", "svd_clip", "slq"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("jitter", [1e-12, 1e-9, 1e-6, 1e-3])
def test_the_error_contains_what_rounding_does(seeded, method, dtype, jitter):
    for points in (12, 40):  # fewer and more than parameters
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        x = torch.randn(points, 2).to(dtype)
        f, params = fsmap.functional(net)
        options = {"jitter": jitter, "method": method, "probes": 1000 if method == "slq" else None}
        found = fsmap.log_det(f, params, x, **options, return_estimate=True)
        g, exact = fsmap.functional(net.double())
        squares = torch.linalg.svdvals(logdet.whitened_rows(g, exact, x.double())).square()
        kept = squares.clamp_min(jitter) if method == "svd_clip" else squares + jitter
        truth = kept.log().sum() + (33 - len(squares)) * torch.tensor(jitter).log()
        assert abs(found.value - truth) <= found.stderr + 1e-6 * abs(truth)


def test_a_value_that_is_rounding_is_refused(seeded):
    """Without its error bar; in float64 it is a number."""
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(torch.bfloat16)
    x = torch.randn(40, 2).to(torch.bfloat16)
    f, params = fsmap.functional(net)
    for method in ("dense", "dual"):
        with pytest.raises(SingularGeometryError, match="bfloat16"):
            fsmap.log_det(f, params, x, jitter=1e-12, method=method)
    f, params = fsmap.functional(net.double())
    assert fsmap.log_det(f, params, x.double(), jitter=1e-3, return_estimate=True).stderr == 0


@pytest.mark.parametrize("name", cases.MODELS)
@pytest.mark.parametrize("method", ORACLES)
def test_value_and_gradient(name, method):
    case = cases.case(name)
    slow = lambda p: ORACLES[method](case.f, p, case.x, 1e-2)  # noqa: E731
    value = log_det(case, jitter=1e-2, method=method)
    torch.testing.assert_close(value.detach(), slow(case.params), rtol=1e-9, atol=0)
    assert value.requires_grad or name in ("linear", "frozen")  # else 𝒥 is a constant
    for found, expected in cases.slopes(value, slow, case.params):
        assert found == pytest.approx(expected, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("method", ["dense", "dual", "slq", "svd_clip", "first_order"])
def test_gradient_in_jitter(method):
    case = cases.case("wide")
    eps = {"eps": torch.tensor(0.05, requires_grad=True)}
    (found,) = torch.autograd.grad(log_det(case, jitter=eps["eps"], method=method), eps["eps"])
    slow = lambda e: ORACLES[method](*case[:3], float(e["eps"]))  # noqa: E731
    expected = oracles.directional_slow(slow, eps, {"eps": torch.tensor(1.0)}, step=1e-5)
    assert float(found) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("metric", cases.METRICS)
@pytest.mark.parametrize("method", ["dense", "dual", "slq", "svd_clip", "pseudo"])
@pytest.mark.parametrize("name", ["wide", "batchnorm_train", "shared"])
def test_value_and_gradient_in_metrics(metric, method, name):
    case = cases.case(name)
    S, K = case.f(case.params, case.x).shape
    g, full = cases.metric(metric, S, K)
    value = log_det(case, jitter=1e-2, method=method, metric=g)
    slow = lambda p: ORACLES[method](case.f, p, case.x, 1e-2, full)  # noqa: E731
    torch.testing.assert_close(value.detach(), slow(case.params), rtol=1e-9, atol=1e-9)
    for found, expected in cases.slopes(value, slow, case.params, num=1):
        assert found == pytest.approx(expected, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("method", ["dense", "dual", "slq"])
def test_softmax_fisher_depends_on_the_parameters(method, detach):
    case = cases.case("wide")
    value = log_det(case, jitter=1e-2, method=method, metric=m.SoftmaxFisher(detach))
    slow = lambda p, g: oracles.logdet_slow(case.f, p, case.x, 1e-2, g)  # noqa: E731
    cases.check_softmax_fisher(value, case, slow, detach)


@pytest.mark.parametrize("method", logdet.METHODS)
def test_bad_points_and_parameters(method):
    case = cases.case("wide")
    for bad, word in [
        (torch.zeros(5, 3), r"'0' \(Linear\)"),
        (torch.zeros(5, 2, dtype=torch.float32), "dtype"),
    ]:
        with pytest.raises(InputError, match=word):
            log_det(case._replace(x=bad), jitter=0.1, method=method)
    name = next(iter(case.params))
    broken = case.params | {name: torch.full_like(case.params[name], torch.nan)}
    with pytest.raises(InputError, match=name):
        log_det(case._replace(params=broken), jitter=0.1, method=method)


@pytest.mark.parametrize("method", ["dense", "auto"])
def test_a_singular_geometry_is_named(method):
    """Two parameters that do the same thing, and no jitter; then a model that is not finite."""
    params, x = {"a": torch.ones(1), "b": torch.ones(1)}, torch.arange(1.0, 5)[:, None]
    with pytest.raises(SingularGeometryError, match="positive"):
        fsmap.log_det(lambda p, x: x * (p["a"] + p["b"]), params, x, jitter=0.0, method=method)
    with pytest.raises(InputError, match="returns"):
        fsmap.log_det(lambda p, x: p["a"] / (x - 1), params, x, jitter=1.0, method=method)


def test_a_jacobian_larger_than_memory(monkeypatch):
    case = cases.case("sequence")  # S·K = 12, P = 155
    sizes = logdet.sizes(*case[:3])
    assert sizes[:2] == (12, 155)
    monkeypatch.setattr(memory, "ALWAYS", 0)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**3)
    for method in ("dense", "dual", "pseudo"):
        with pytest.raises(MemoryLimitError, match="Jacobian"):
            log_det(case, jitter=0.1, method=method)
    assert logdet.choose("auto", sizes, CPU) == "slq"
    found = log_det(case, jitter=0.1, probes=12)  # auto: slq
    monkeypatch.undo()
    torch.testing.assert_close(found, log_det(case, jitter=0.1))


def test_auto_chooses_by_shape(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**11)
    shapes = {(10, 5): "dense", (5, 10): "dual", (10**4, 10**4): "slq", (10, 10**7): "dual"}
    for (rows, P), expected in shapes.items():
        assert logdet.choose("auto", logdet.Sizes(rows, P, 24 * rows * P), CPU) == expected
