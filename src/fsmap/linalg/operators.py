"""The smaller of AAᵀ and AᵀDA as an operator: products with vectors, and a form to differentiate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.functional import NoiseReplay, count, ravel
from fsmap.linalg import points
from fsmap.linalg.determinants import normal_matrix
from fsmap.linalg.jacobian import jvp, tangents, vjp
from fsmap.linalg.linearize import linearize, look
from fsmap.linalg.metric import Metric, resolve
from fsmap.linalg.passes import is_pointwise, outputs, over_probes
from fsmap.types import Inputs, ModelFn, Params

LARGEST_EXPLICIT = 4096  # side up to which the matrix is formed
EXPLICIT_BYTES = 2**29  # what its factors may take


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
    chunk: int | None,
    explicit: bool | None,
) -> Operator:
    """The operator that is cheaper at this size.

    Args:
        f: Model function.
        params: Parameters.
        x: Points.
        metric: g.
        chunk: Probes at a time in passes through the model.
        explicit: Whether to form the matrix; None decides.

    Returns:
        The operator on the smaller side; on the parameters' side where g has negative eigenvalues.
    """
    replay = NoiseReplay(f, params)
    with torch.no_grad():
        whiten = resolve(metric, x, outputs(f, params, x))
    replay()
    P = count(params)
    dual = whiten.size < P and whiten.signs is None
    if explicit is None:
        explicit = _is_small(f, params, x, whiten.size, P, dual=dual)
    if explicit:
        return _explicit(f, params, x, metric, dual=dual)
    return _by_passes(f, params, x, metric, chunk, whiten.size if dual else P, dual=dual)


def _is_small(f: ModelFn, params: Params, x: Inputs, Q: int, P: int, *, dual: bool) -> bool:
    if (Q if dual else P) > LARGEST_EXPLICIT:
        return False
    numbers = Q * P
    if dual and is_pointwise(f):
        numbers = points.count(x) * look(f, params, x).numbers_per_point(params)
    return 8 * numbers <= EXPLICIT_BYTES


def _explicit(
    f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None, *, dual: bool
) -> Operator:
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


def _by_passes(
    f: ModelFn,
    params: Params,
    x: Inputs,
    metric: Metric | Tensor | None,
    chunk: int | None,
    size: int,
    *,
    dual: bool,
) -> Operator:
    fixed = {name: p.detach() for name, p in params.items()}
    replay = NoiseReplay(f, params)  # every pass has to see the same masks

    def forward(p: Params, v: Params) -> tuple[Tensor, Tensor | None]:  # Av [Q], signs
        replay()
        out, tangent, _ = jvp(f, p, x, v)
        whiten = resolve(metric, x, out)
        return whiten.rows(tangent), whiten.signs

    def backward(p: Params, u: Tensor) -> Params:  # Aᵀu
        replay()
        out, transpose, _ = vjp(f, p, x)
        return transpose(resolve(metric, x, out).adjoint(u.to(out.dtype)))

    def product(v: Tensor) -> Tensor:  # Mv
        if dual:
            return forward(fixed, backward(fixed, v))[0].double()
        u, signs = forward(fixed, tangents(fixed, v))
        return ravel(backward(fixed, u if signs is None else signs * u)).double()

    def form_of_one(p: Params, w: Tensor, z: Tensor) -> Tensor:  # wᵀMz
        if dual:
            left, right = backward(p, w), backward(p, z)
            return torch.stack([(left[n] * right[n]).sum() for n in left]).sum()
        (left, signs), (right, _) = forward(p, tangents(p, w)), forward(p, tangents(p, z))
        return (left * right if signs is None else signs * left * right).sum()

    def matvec(V: Tensor) -> Tensor:
        return over_probes(f, product, V, chunk=chunk)

    def form(W: Tensor, Z: Tensor) -> Tensor:
        """Held as one gradient vector, not as a graph."""
        size = chunk or len(Z)
        total = {name: torch.zeros_like(p) for name, p in fixed.items()}
        value = torch.zeros_like(W[0, 0])
        for start in range(0, len(Z), size):
            part = slice(start, start + size)

            def summed(p: Params, part: slice = part) -> Tensor:
                return over_probes(f, partial(form_of_one, p), W[part], Z[part]).sum()

            grads, value_of_part = torch.func.grad_and_value(summed)(fixed)
            value = value + value_of_part / len(Z)
            total = {name: t + grads[name].detach() / len(Z) for name, t in total.items()}
        linear = torch.stack([(p * total[n]).sum() for n, p in params.items()]).sum()
        return value + (linear - linear.detach())

    return Operator(size, matvec, form)
