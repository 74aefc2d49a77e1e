"""The smaller of AAᵀ and AᵀDA as an operator: products, and a form to differentiate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_map

from fsmap.functional import NoiseReplay, count, ravel
from fsmap.linalg import points
from fsmap.linalg.determinants import normal_matrix
from fsmap.linalg.factors import Factors
from fsmap.linalg.jacobian import jvp, tangents, vjp
from fsmap.linalg.linearize import linearize, look
from fsmap.linalg.metric import Metric, resolve
from fsmap.linalg.passes import detached, flat, is_pointwise, outputs, over_probes
from fsmap.types import Inputs, ModelFn, Params

LARGEST_EXPLICIT = 4096  # side up to which the matrix is formed
FACTOR_BYTES = 2**30  # what the factored Jacobian may take
PROBE_BYTES = 2**27  # parameter vectors of probes that pass through the model together


class Operator(NamedTuple):
    """M, symmetric, n×n."""

    size: int  # n
    matvec: Callable[[Tensor], Tensor]  # V [R, n] -> VM, at fixed θ
    form: Callable[[Tensor, Tensor], Tensor]  # W, Z [R, n] -> mean of wᵀMz, differentiable in θ


def build(
    f: ModelFn,
    params: Params,
    x: Inputs,
    metric: Metric | Tensor | None,
    chunk: int | None = None,
    kind: str | None = None,
) -> Operator:
    """The operator on the smaller side; on the parameters' side where g has negative eigenvalues.

    Args:
        f: Model function.
        params: Parameters.
        x: Points.
        metric: g.
        chunk: Probes at a time in passes through the model.
        kind: One of ``KINDS``; None takes the first one that fits. On the parameters' side
            "factored" is "passes".

    Returns:
        The operator.
    """
    replay = NoiseReplay(f, params)
    with torch.no_grad():
        whiten = resolve(metric, x, outputs(f, params, x))
    replay()
    P = count(params)
    dual = whiten.size < P and whiten.signs is None
    kind = kind or cheapest(f, params, x, whiten.size, P, dual=dual)
    if kind == "explicit":
        return _explicit(f, params, x, metric, dual=dual)
    if kind == "factored" and dual:
        return _factored(f, params, x, metric)
    return _by_passes(f, params, x, metric, chunk, dual=dual)


KINDS = ("explicit", "factored", "passes")


def cheapest(f: ModelFn, params: Params, x: Inputs, Q: int, P: int, *, dual: bool) -> str:
    """The first of ``KINDS`` that fits: by size and memory, never by values."""
    numbers = Q * P
    if dual and is_pointwise(f):
        seen = look(f, params, x)
        keep = torch.is_grad_enabled()  # then all that a point takes stays for the gradient
        each = (seen.numbers_per_point if keep else seen.compact_numbers)(params)
        numbers = points.count(x) * each
    if 8 * numbers > FACTOR_BYTES:
        return "passes"
    if (Q if dual else P) <= LARGEST_EXPLICIT:
        return "explicit"
    return "factored" if dual else "passes"


def _explicit(
    f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None, *, dual: bool
) -> Operator:
    """The matrix itself."""
    factors = linearize(f, params, x)
    whiten = resolve(metric, x, factors.out)
    if dual:
        matrix = whiten.gram(factors.gram(), points.count(x))
    else:
        matrix = normal_matrix(whiten.rows(factors.rows().double()), whiten.signs)
    fixed = matrix.detach()

    def form(W: Tensor, Z: Tensor) -> Tensor:
        return (matrix * (W.mT @ Z)).sum() / len(Z)

    return Operator(len(matrix), lambda V: V @ fixed, form)


def _factored(f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None) -> Operator:
    """AAᵀ from the factors of J, without the matrix."""
    factors = linearize(f, params, x).compact().to(torch.float64)
    whiten = resolve(metric, x, factors.out)

    def product(factors: Factors, V: Tensor) -> Tensor:
        inner = factors.gram_product(vmap(whiten.adjoint)(V))  # [R, S, K]
        return whiten.rows(inner.movedim(0, -1)).mT

    fixed = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, factors)

    def matvec(V: Tensor) -> Tensor:
        with torch.no_grad():
            return product(fixed, V)

    def form(W: Tensor, Z: Tensor) -> Tensor:
        return (W * product(factors, Z)).sum() / len(Z)

    return Operator(whiten.size, matvec, form)


def _by_passes(
    f: ModelFn,
    params: Params,
    x: Inputs,
    metric: Metric | Tensor | None,
    chunk: int | None,
    *,
    dual: bool,
) -> Operator:
    """Passes through the model: nothing of size Q·P is ever held."""
    fixed = detached(params)
    size = chunk or max(1, PROBE_BYTES // (8 * count(params)))
    replay = NoiseReplay(f, params)
    out, pull, _ = vjp(f, fixed, x)  # one pass: every product sees the same masks
    whiten = resolve(metric, x, out)
    push = _transposed(pull, flat(out, x))

    def product(v: Tensor) -> Tensor:  # Mv
        if dual:
            return whiten.rows(push(pull(whiten.adjoint(v.to(out.dtype))))).double()
        u = whiten.rows(push(tangents(fixed, v)))
        return ravel(pull(whiten.adjoint(u if whiten.signs is None else whiten.signs * u))).double()

    def forms(p: Params, W: Tensor, Z: Tensor) -> Tensor:  # wᵀMz of each pair
        replay()
        if not dual:
            return over_probes(f, partial(_in_rows, f, p, x, metric), W, Z)
        here, transpose, _ = vjp(f, p, x)
        adjoint = resolve(metric, x, here).adjoint

        def in_parameters(w: Tensor, z: Tensor) -> Tensor:
            left, right = (transpose(adjoint(u.to(out.dtype))) for u in (w, z))
            return torch.stack([(left[n] * right[n]).sum() for n in left]).sum()

        return over_probes(f, in_parameters, W, Z)

    def form(W: Tensor, Z: Tensor) -> Tensor:
        """Held as one gradient vector, not as a graph."""
        total = {name: torch.zeros_like(p) for name, p in fixed.items()}
        value = torch.zeros_like(W[0, 0])
        for w, z in zip(W.split(size), Z.split(size), strict=True):
            grads, part = grad_and_value(lambda p, w=w, z=z: forms(p, w, z).sum())(fixed)
            value = value + part / len(Z)
            total = {name: t + grads[name].detach() / len(Z) for name, t in total.items()}
        linear = torch.stack([(p * total[n]).sum() for n, p in params.items()]).sum()
        return value + (linear - linear.detach())

    def matvec(V: Tensor) -> Tensor:
        return over_probes(f, product, V, chunk=size)

    return Operator(whiten.size if dual else count(params), matvec, form)


def _transposed(pull: Callable[[Tensor], Params], out: Tensor) -> Callable[[Params], Tensor]:
    """Jv as the transpose of the linear map u → Jᵀu: nothing of the first pass is repeated."""
    push = torch.func.vjp(pull, torch.zeros_like(out))[1]
    return lambda v: push(v)[0]


def _in_rows(
    f: ModelFn, p: Params, x: Inputs, metric: Metric | Tensor | None, w: Tensor, z: Tensor
) -> Tensor:
    """(Aw)ᵀD(Az)."""
    out, left, _ = jvp(f, p, x, tangents(p, w))
    _, right, _ = jvp(f, p, x, tangents(p, z))
    whiten = resolve(metric, x, out)
    product = whiten.rows(left) * whiten.rows(right)
    return (product if whiten.signs is None else whiten.signs * product).sum()
