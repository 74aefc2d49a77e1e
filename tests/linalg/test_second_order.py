"""Gradients of Jacobian products through every kind of layer, against differences.

Second derivatives of fused layers are where torch is silently wrong; a new layer belongs in LAYERS.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jvp, vjp, vmap
from torch.linalg import cholesky

import fsmap
from fsmap.errors import FallbackWarning, ForwardModeError, UnsupportedModuleError
from fsmap.linalg import jacobian
from fsmap.linalg.jacobian import SecondOrder

S = 4
BATCH = (None, None, True, 0.1, 1e-5, False)
BAGS = torch.tensor([[0, 1, 3], [2, 2, 0], [3, 0, 1], [1, 1, 1]])
aten = torch.ops.aten
W = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
LAYERS = {
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), (S, 6)),
    "layer_norm_affine": (lambda x: F.layer_norm(x, (6,), W, W), (S, 6)),
    "layer_norm_two_dims": (lambda x: F.layer_norm(x, (2, 3)), (S, 2, 3)),
    "rms_norm": (lambda x: F.rms_norm(x, (6,), W), (S, 6)),
    "group_norm": (lambda x: F.group_norm(x, 2, W, W), (S, 6, 3)),
    "instance_norm": (lambda x: F.instance_norm(x), (S, 2, 5)),
    "instance_norm_affine": (lambda x: F.instance_norm(x, None, None, W[:2], W[:2]), (S, 2, 5)),
    "native_layer_norm": (lambda x: torch.native_layer_norm(x, (6,), W, W, 1e-5)[0], (S, 6)),
    "layer_norm_of_aten": (lambda x: aten.layer_norm.default(x, [6], W, W), (S, 6)),
    "attention_of_aten": (lambda x: aten.scaled_dot_product_attention(x, x.sin(), x), (S, 3, 4)),
    "select_scatter": (lambda x: torch.select_scatter(x.sin(), x[:, 0].cos(), -1, -2), (S, 6)),
    "scatter_sum": (lambda x: x.scatter_reduce(1, x.argsort(), x.sin(), "sum"), (S, 6)),
    "torch_instance_norm": (lambda x: torch.instance_norm(x, W[:2], W[:2], *BATCH), (S, 2, 5)),
    "batch_norm_eval": (lambda x: F.batch_norm(x.sin(), W, W, W, W), (S, 6)),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), (S, 4, 3)),
    "normalize": (F.normalize, (S, 6)),
    "softmax": (lambda x: x.softmax(-1), (S, 6)),
    "log_softmax": (lambda x: x.log_softmax(-1), (S, 6)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos()), (S, 3, 4)),
    "glu": (F.glu, (S, 6)),
    "glu_of_aten": (aten.glu.default, (S, 6)),
    "gelu": (F.gelu, (S, 6)),
    "silu": (F.silu, (S, 6)),
    "mish": (F.mish, (S, 6)),
    "elu": (F.elu, (S, 6)),
    "softplus": (F.softplus, (S, 6)),
    "conv": (lambda x: F.conv1d(x[:, None].tanh(), torch.ones(1, 1, 2)), (S, 6)),
    "conv_transpose": (lambda x: F.conv_transpose1d(x[:, None].sin(), torch.ones(1, 1, 2)), (S, 6)),
    "max_pool": (lambda x: F.max_pool1d(x[:, None].sin(), 2), (S, 6)),
    "adaptive_pool": (lambda x: F.adaptive_avg_pool1d(x[:, None].sin(), 4), (S, 6)),
    "interpolate": (lambda x: F.interpolate(x[:, None].sin(), size=9, mode="linear"), (S, 6)),
    "std": (lambda x: x.std(-1, keepdim=True), (S, 6)),
    "softmax_of_torch": (lambda x: torch.softmax(x, -1, torch.float64) * W, (S, 6)),
    "logsumexp": (lambda x: x.logsumexp(-1, keepdim=True).sin(), (S, 6)),
    "softmin": (lambda x: F.softmin(x, -1), (S, 6)),
    "by_keyword": (lambda x: torch.add(x.sin(), other=W), (S, 6)),
    "numbers": (lambda x: (2 - x.sin() / 3) * (1 + 0.5 * x.cos() - 4), (S, 6)),
    "constants": (lambda x: (W - x.sin()) * (x * W + W) - (x - W) / W + W / (1 + x * x), (S, 6)),
    "in_place_after_sum": (lambda x: (x.sin() + W).relu_() * x.sin(), (S, 6)),
    "broadcast": (lambda x: x[:, :1].sin() * W + (W - x[:, 1:2].cos()), (S, 6)),
}


def square(x):
    """A positive definite matrix."""
    return x.mT @ x + torch.eye(x.shape[-1])


def last(x):
    """The same numbers, channels last in memory."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


COUPLED = {
    "batch_norm": (lambda x: F.batch_norm(x, None, None, W, W, training=True), (S, 6)),
    "torch_batch_norm": (lambda x: torch.batch_norm(x, W, W, *BATCH), (S, 6)),
    "batch_norm_2d": (lambda x: F.batch_norm(x, None, None, training=True), (S, 2, 3, 3)),
    "group_norm_channels_last": (
        lambda x: F.group_norm(last(x).sin(), 2, W[:4], W[:4]),
        (S, 4, 3, 2),
    ),
    "torch_group_norm_channels_last": (lambda x: torch.group_norm(last(x).sin(), 2), (S, 4, 3, 2)),
    "embedding_bag": (lambda x: F.embedding_bag(BAGS, x.sin()), (S, 6)),
    "embedding_bag_padding": (lambda x: F.embedding_bag(BAGS, x.sin(), padding_idx=1), (S, 6)),
    "embedding_bag_sum": (lambda x: F.embedding_bag(BAGS, x.sin(), mode="sum"), (S, 6)),
    "embedding_bag_max": (lambda x: F.embedding_bag(BAGS, x.sin(), mode="max"), (S, 6)),
    "embedding_bag_weights": (
        lambda x: F.embedding_bag(BAGS, x, mode="sum", per_sample_weights=x[:, :3].cos()),
        (S, 6),
    ),
    "weight_norm": (lambda x: torch._weight_norm(x, x[:, :1].sin(), 0), (S, 6)),
    "weight_norm_of_all": (lambda x: torch._weight_norm(x, x[0, 0].sin(), -1), (S, 6)),
    "solve": (lambda x: torch.linalg.solve(square(x), x.mT), (S, 6)),
    "solve_vector": (lambda x: torch.linalg.solve(square(x), x[0]), (S, 6)),
    "solve_right": (lambda x: torch.linalg.solve(square(x), x, left=False), (S, 6)),
    "slogdet": (lambda x: torch.linalg.slogdet(square(x) - 3.5)[1][None], (S, 6)),
    "det_complex": (lambda x: torch.view_as_real((square(x) - 2j).det())[None], (S, 6)),
    "logdet_complex": (lambda x: torch.view_as_real((square(x) - 2j).logdet())[None], (S, 6)),
    "slogdet_of_aten": (lambda x: aten.slogdet(square(x) - 3.5)[1][None], (S, 6)),
    "det": (lambda x: torch.det(square(x) - 3.5)[None], (S, 6)),
    "det_of_tensor": (lambda x: square(x).det()[None], (S, 6)),
    "logdet": (lambda x: square(x).logdet()[None], (S, 6)),
    "cholesky_inverse": (lambda x: torch.cholesky_inverse(cholesky(square(x))), (S, 6)),
    "householder": (lambda x: torch.orgqr(x.mT, x[:2, 0].sin()), (S, 6)),
    "hardsigmoid": (lambda x: F.hardsigmoid(3 * x) * x.sin(), (S, 6)),
    "cholesky": (lambda x: cholesky(square(x)), (S, 6)),
}


class Layer(nn.Module):
    """A function whose input is a parameter."""

    def __init__(self, f):
        super().__init__()
        self.f, self.x = f, None

    def forward(self, points):
        return self.f(self.x)


def by_duals(f, x, psi):
    """Jψ as eager passes of L-MAP compute it."""
    layer = Layer(f.plain)
    layer.x = nn.Parameter(x.detach())
    points = torch.zeros(len(f.plain(x)))
    tangent = jacobian.jvp(fsmap.functional(layer)[0], {"x": x}, points, {"x": psi})[1]
    by_duals.tried = list(jacobian.DUALS_WORK[layer].values())
    return tangent


def cotangent(out):
    return torch.arange(out.numel()).to(out).cos().reshape(out.shape)


PRODUCTS = {
    "jvp": lambda f, x, psi: jvp(f, (x,), (psi,))[1],
    "duals": by_duals,
    "jvp_of_probes": lambda f, x, psi: vmap(lambda p: jvp(f, (x,), (p,))[1])(
        torch.stack([psi, 2 * psi])
    ),
    "vjp": lambda f, x, psi: vjp(f, x)[1](cotangent(f(x)))[0],
    "vjp_of_probes": lambda f, x, psi: vmap(lambda u: vjp(f, x)[1](u)[0])(
        torch.stack([cotangent(f(x)), cotangent(f(x)).square()])
    ),
}
OF_POINTS = {
    "jvp_of_points": lambda f, x, psi: vmap(lambda a, p: jvp(single(f), (a,), (p,))[1])(x, psi),
    "vjp_of_points": lambda f, x, psi: vmap(
        lambda a: vjp(single(f), a)[1](cotangent(single(f)(a)))[0]
    )(x),
}
ALL = LAYERS | COUPLED
TRIALS = [
    *[(kind, how) for kind in LAYERS for how in PRODUCTS | OF_POINTS],
    *[(kind, how) for kind in COUPLED for how in PRODUCTS],
]


def single(f):
    return lambda a: f(a[None])[0]


def safe(f):
    def call(x):
        with SecondOrder():
            return f(x)

    call.plain = f
    return call


def draws(shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(("kind", "how"), TRIALS)
def test_gradient_of_products(kind, how):
    f, shape = ALL[kind]
    f, product = safe(f), (PRODUCTS | OF_POINTS)[how]
    x, psi, direction = draws(shape)
    leaf = x.clone().requires_grad_()
    out = product(f, leaf, psi)
    weight = cotangent(out).detach()
    found = torch.zeros_like(x)
    if out.requires_grad:
        (found,) = torch.autograd.grad((weight * out).sum(), leaf)

    def value(h):
        return float((weight * product(f, x + h * direction, psi)).sum())

    h = 1e-4
    near, far = value(h) - value(-h), value(2 * h) - value(-2 * h)
    wanted = (8 * near - far) / (12 * h)
    assert float((found * direction).sum()) == pytest.approx(wanted, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("kind", ALL)
def test_eager_passes_use_dual_tensors(kind):
    f, shape = ALL[kind]
    x, psi, _ = draws(shape)
    found = by_duals(safe(f), x.clone().requires_grad_(), psi)
    expected = jvp(safe(f), (x,), (psi,))[1]
    torch.testing.assert_close(found, expected.reshape(found.shape), rtol=1e-12, atol=1e-12)
    assert by_duals.tried == [True]


def test_what_is_trained_may_change(seeded):
    """Whether dual tensors can be used is tried again for other parameters."""
    net = nn.Sequential(nn.Linear(3, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 2))
    forward = lambda m, x: m[2](m[1](*[m[0](x[:, None])] * 3)[0][:, 0])  # noqa: E731
    net.requires_grad_(False)[2].requires_grad_(True)
    for _ in range(2):
        lm = fsmap.LMAP(net, torch.ones(4, 3), num_points=4, forward=forward)
        lm(torch.randn(6, 3))[1].backward()  # failed after the model was unfrozen
        net.requires_grad_(True)
    assert net[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ALL)
def test_values_are_torchs(kind):
    f, shape = ALL[kind]
    x = draws(shape)[0]
    torch.testing.assert_close(safe(f)(x), f(x), rtol=1e-12, atol=1e-12)


def test_torch_still_gets_it_wrong():
    """When this fails torch has been mended, and the replacement of layer_norm can go."""
    x, psi, _ = draws((S, 6))
    leaf = x.clone().requires_grad_()

    def gradient(f):
        out = jvp(f, (leaf,), (psi,))[1]
        return torch.autograd.grad((cotangent(out) * out).sum(), leaf)[0]

    fused = gradient(lambda x: F.layer_norm(x, (6,)))
    right = gradient(safe(lambda x: F.layer_norm(x, (6,))))
    assert (fused - right).abs().max() > 0.01 * right.abs().max()


def test_instance_norm_with_running_statistics_is_left_alone():
    x, kept = draws((4, 2, 5))[0], [torch.zeros(2), torch.ones(2)]
    with SecondOrder():
        out = F.instance_norm(x, *kept, use_input_stats=True)
    torch.testing.assert_close(out, F.instance_norm(x))
    assert kept[0].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_precision_and_autocast_return_what_torch_returns(dtype, device):
    x = draws((S, 6))[0].to(device, dtype)
    for autocast in (True, False):
        layer = nn.LayerNorm(6, device=device, dtype=torch.float32 if autocast else dtype)
        with torch.autocast(device, dtype=dtype, enabled=autocast):
            expected = layer(x)
            with SecondOrder():
                found = layer(x)
        assert found.dtype == expected.dtype
        assert device == "cuda" or found.dtype == dtype  # autocast on a GPU gives float32
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_bags_of_several_sizes_are_torchs():
    weight, indices = draws((5, 3))[0], torch.tensor([0, 4, 2, 2, 3])
    for more in ({"offsets": torch.tensor([0, 2])}, {"offsets": torch.tensor([0, 0, 3])}):
        expected = F.embedding_bag(indices, weight, **more)
        with SecondOrder():
            assert torch.equal(F.embedding_bag(indices, weight, **more), expected)


@pytest.mark.parametrize("grouped", [F.grouped_mm, torch._grouped_mm, aten._grouped_mm.default])
@pytest.mark.parametrize("ends", [[1, 1, 5], [0, 2, 4], [5, 5, 5]])
def test_products_of_groups(grouped, ends, seeded):
    """Mixtures of experts: with forward mode, and the values and gradients of torch's."""
    a = torch.randn(5, 4, dtype=torch.float32, requires_grad=True)
    b = torch.randn(3, 4, 8, dtype=torch.float32, requires_grad=True)
    ends, n = torch.tensor(ends, dtype=torch.int32), ends[-1]
    found = []
    for context in (torch.enable_grad, SecondOrder):
        with context():
            out = grouped(a, b, offs=ends)[:n]  # what is behind the last group is undefined
        of_a, of_b = torch.autograd.grad(out.sin().sum(), (a, b))
        found.append((out, of_a[:n], of_b))
    torch.testing.assert_close(*found)
    psi = torch.randn_like(a), torch.randn_like(b)
    with SecondOrder():
        tangent = jvp(lambda a, b: grouped(a, b, offs=ends)[:n].sin(), (a, b), psi)[1]
    gates = torch.searchsorted(ends, torch.arange(n, dtype=torch.int32), right=True)
    slow = jvp(lambda a, b: (a[:n, None] @ b[gates])[:, 0].sin(), (a, b), psi)[1]
    gradients = [torch.autograd.grad(t.square().sum(), (a, b)) for t in (tangent, slow)]
    torch.testing.assert_close((tangent, *gradients[0]), (slow, *gradients[1]))


def test_padding_of_an_embedding_is_constant(seeded):
    net = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 1))
    f, params = fsmap.functional(net)
    x = torch.tensor([[0, 1], [2, 0], [3, 3], [0, 0]])
    psi = {name: torch.randn(1, *p.shape) for name, p in params.items()}
    other = {**psi, "0.weight": psi["0.weight"].index_fill(1, torch.tensor([0]), 7.0)}
    exact = fsmap.trace(f, params, x, method="exact").value
    for method in ("jvp", "fd", "fd_central"):
        one, two = (fsmap.trace(f, params, x, method=method, probes=p).value for p in (psi, other))
        torch.testing.assert_close(one, two)
        found = fsmap.trace(f, params, x, method=method, probes=4000)
        assert abs(found.value - exact) < 4 * found.stderr
    functional = fsmap.LaplacianPenalty(net, x, num_points=4, estimator="fd")
    in_place = fsmap.InPlacePenalty(net, x, num_points=4)
    torch.testing.assert_close(in_place.backward(), functional().detach())
    tied = nn.Sequential(copy.deepcopy(net[0]), nn.Tanh(), nn.Linear(3, 5))
    penalties = [fsmap.LaplacianPenalty(tied, x, num_points=4, estimator="fd")]
    penalties[0]()
    tied[2].weight = tied[0].weight  # after it was wrapped: no row of the head is constant
    penalties.append(fsmap.LaplacianPenalty(tied, x, num_points=4, estimator="fd"))
    penalties[1].step = penalties[0].step
    torch.testing.assert_close(penalties[0](), penalties[1]())
    for options in ({"scale_grad_by_freq": True}, {"sparse": True}):  # not about J
        other = nn.Embedding(5, 3, padding_idx=0, _weight=net[0].weight, **options)
        f = fsmap.functional(nn.Sequential(other, *net[1:]))[0]
        torch.testing.assert_close(fsmap.trace(f, params, x, method="exact").value, exact)


def test_a_sparse_bag_has_r_by_every_estimator(seeded):
    net = nn.Sequential(nn.EmbeddingBag(5, 3, mode="sum", sparse=True), nn.Tanh(), nn.Linear(3, 2))
    x, found = torch.tensor([[0, 1], [2, 0], [3, 3], [1, 1]]), []
    for name in ("fd_central", "jvp"):  # of the same ψ
        R = fsmap.LaplacianPenalty(net, x, num_points=4, estimator=name, beta=1e-4)()
        grads = torch.autograd.grad(R, list(net.parameters()), materialize_grads=True)
        found.append([R.detach(), *(g.to_dense() for g in grads)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)
    for name in ("vjp", "exact"):
        fsmap.LaplacianPenalty(net, x, num_points=4, estimator=name)().backward()
    assert net[0].weight.grad.isfinite().all()


WRONG = {
    "solve_ex": lambda A: torch.linalg.solve_ex(A, A.sin())[0],
    "triangular_solve": lambda A: torch.triangular_solve(A.sin(), A)[0],
    "_linalg_slogdet": lambda A: aten._linalg_slogdet.default(A)[1],
    "linalg_eigh": lambda A: torch.linalg.eigh(A)[1].abs(),  # its gradient is NaN
    "native_batch_norm": lambda A: torch.native_batch_norm(A, *BATCH[:2], *BATCH[:5])[0][0],
    "scatter_reduce": lambda A: A.cos().scatter_reduce(1, A.argsort(), A, reduce="prod"),
}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_derivatives_of_forward_mode_are_refused(name, seeded):
    """Of these R or its gradient would be wrong, without an error; differences are not."""

    class Mixing(nn.Linear):
        def forward(self, x):
            return x + WRONG[name](square(self.weight)).mean()

    net, x = Mixing(3, 3), torch.linspace(-1, 1, 12).reshape(4, 3)
    f, params = fsmap.functional(net)
    with pytest.raises(ForwardModeError, match=name):
        fsmap.trace(f, params, x, method="jvp")
    assert fsmap.trace(f, params, x, method="fd_central").value > 0
    lm = fsmap.LMAP(net, x, num_points=4, batchnorm="frozen")
    with pytest.warns(FallbackWarning, match=name):
        assert lm(x)[1] > 0


def test_what_is_hidden_in_torchscript_is_refused(seeded):
    """Inside a scripted layer nothing can be replaced, and the gradient would be wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: TorchScript is deprecated
        scripted = torch.jit.trace(nn.LayerNorm(3), torch.zeros(2, 3))
    f, params = fsmap.functional(nn.Sequential(nn.Linear(3, 3), scripted))
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    for method in ("jvp", "vjp", "exact"):
        with pytest.raises(UnsupportedModuleError, match="TorchScript"):
            fsmap.trace(f, params, x, method=method)
    assert fsmap.trace(f, params, x, method="fd_central").value > 0
    lm = fsmap.LMAP(f.module, x, num_points=4, batchnorm="frozen")
    with pytest.warns(FallbackWarning, match="TorchScript"):
        assert lm(x)[1] > 0
