"""Eigenvalues of 𝒥 without the Jacobian, in a given time and memory.

The Gram matrix AAᵀ of as many points as there is time for has all non-zero eigenvalues of 𝒥 on
these points. Where even two points take too long (many outputs: each is a reverse pass), Lanczos
bounds the largest eigenvalue from below, and Hutchinson's estimate on what Lanczos has not seen
gives the trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.assess.clock import now
from fsmap.errors import UnsupportedModuleError
from fsmap.functional import ravel
from fsmap.linalg import memory, points
from fsmap.linalg import probes as draw
from fsmap.linalg.jacobian import is_pointwise, jvp, vjp
from fsmap.linalg.logdet import gram_bytes, shape, whitened_gram
from fsmap.linalg.metric import Metric, Whitening, resolve
from fsmap.types import Estimate, Inputs, ModelFn, Params

PROBES = 4  # for the trace, and as stand-ins of the rows
STEPS = (4, 40)  # of Lanczos: at least, at most
LARGEST_MATRIX = 1024  # side of the Gram matrix: its eigenvalues take about a second
LARGEST_GRAM = 6 * 2**30  # bytes of it and its factors with gradient; without, here, a third


class Bounds(NamedTuple):
    """What products tell."""

    rows: int  # Q, of the points that were used
    points: int
    largest: Estimate  # value: a lower bound; stderr: how far above it the largest may be
    trace: Estimate
    probes: Tensor  # [R, P]  uᵀA with u ~ N(0, I)
    eigenvalues: Tensor | None = None  # [rows], descending


def bounds(
    f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None, seconds: float
) -> Bounds:
    """All eigenvalues on some points, or bounds of the largest.

    Args:
        f: Model function.
        params: Parameters, detached.
        x: Points; only the first ones are used where all of them take too long.
        metric: g, without negative eigenvalues.
        seconds: About how long it may take.

    Returns:
        The bounds.
    """
    free = metric is None and is_pointwise(f)
    used = _points_of_gram(f, params, x, metric, seconds, free=free)
    if used:
        return _by_gram(f, params, points.take(x, slice(0, used)), metric)
    return _by_lanczos(f, params, x, metric, seconds, free=free)


def _points_of_gram(
    f: ModelFn,
    params: Params,
    x: Inputs,
    metric: Metric | Tensor | None,
    seconds: float,
    *,
    free: bool,
) -> int:
    """How many points the Gram matrix can be formed of; 0: it cannot."""
    S = points.count(x)
    two = points.take(x, slice(0, min(S, 2)))
    room = min(LARGEST_GRAM, memory.SHARE * memory.free_bytes(next(iter(params.values())).device))
    if not free:
        fits = gram_bytes(f, params, x) <= room and shape(f, params, x)[1] * S <= LARGEST_MATRIX
        return S if fits and metric is not None and is_pointwise(f) else 0
    if gram_bytes(f, params, two) > room:
        return 0
    first = _gram_seconds(f, params, two)  # imports and allocates
    took = first if first > seconds else _gram_seconds(f, params, two)
    if took > seconds:
        return 0
    each = took / points.count(two)
    if 16 * each < seconds / 10:  # a small model: two points are mostly overhead
        several = points.take(x, slice(0, 16))
        each = _gram_seconds(f, params, several) / points.count(several)
    outputs = shape(f, params, two)[1]
    used = min(S, int(seconds / each), LARGEST_MATRIX // outputs)
    while used > 1 and gram_bytes(f, params, points.take(x, slice(0, used))) > room:
        used -= max(1, used // 5)
    return used if used > 1 or S == 1 else 0


def _gram_seconds(f: ModelFn, params: Params, x: Inputs) -> float:
    begin = now(params)
    whitened_gram(f, params, x)
    return now(params) - begin


def _by_gram(f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None) -> Bounds:
    gram, _ = whitened_gram(f, params, x, metric=metric)
    values = torch.linalg.eigvalsh(gram.detach()).flip(0).clamp_min(0)
    zero = values.new_zeros(())
    products = Products(f, params, x, metric)
    probes = products.random(torch.Generator(gram.device).manual_seed(0))
    largest, trace = Estimate(values[0], zero), Estimate(values.sum(), zero)
    return Bounds(len(values), points.count(x), largest, trace, probes, values)


def _by_lanczos(
    f: ModelFn,
    params: Params,
    x: Inputs,
    metric: Metric | Tensor | None,
    seconds: float,
    *,
    free: bool,
) -> Bounds:
    until = time.perf_counter() + seconds
    products, used = _affordable(f, params, x, metric, seconds, free=free)
    like = next(iter(params.values()))
    Q = products.whiten.size
    generator = torch.Generator(like.device).manual_seed(0)
    start = draw.rademacher(1, Q, generator, like)[0]
    basis, T, norm = lanczos(products.gram, start, until)
    ritz, vectors = torch.linalg.eigh(T)
    signs = draw.rademacher(PROBES, Q, generator, like)
    unseen = signs - (signs @ basis.mT) @ basis  # [R, Q]
    tails = torch.stack([products.transpose(z).square().sum() for z in unseen])
    trace = Estimate(T.diagonal().sum() + tails.mean(), tails.std() / PROBES**0.5)
    upper = torch.minimum(ritz[-1] + norm * vectors[-1, -1].abs(), trace.value + 2 * trace.stderr)
    largest = Estimate(ritz[-1], (upper - ritz[-1]).clamp_min(0))
    return Bounds(Q, used, largest, trace, products.random(generator))


def lanczos(
    matvec: Callable[[Tensor], Tensor], start: Tensor, until: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Basis ``[k, n]``, tridiagonal matrix ``[k, k]`` and norm of what is left after k steps."""
    basis = [start / start.norm()]
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    while True:
        w = matvec(basis[-1])
        alphas.append(w @ basis[-1])
        stacked = torch.stack(basis)
        for _ in range(2):  # twice is enough
            w = w - stacked.mT @ (stacked @ w)
        k, norm = len(basis), w.norm()
        late = time.perf_counter() > until and k >= STEPS[0]
        exhausted = bool(norm <= 1e-12 * torch.stack(alphas).abs().max())
        if late or exhausted or k == min(STEPS[1], len(start)):
            T = torch.diag(torch.stack(alphas))
            if betas:
                off = torch.stack(betas)
                T = T + torch.diag(off, 1) + torch.diag(off, -1)
            return stacked, T, torch.zeros_like(norm) if exhausted else norm
        betas.append(norm)
        basis.append(w / norm)


class Products:
    """Aᵀu and AAᵀu by passes through the model; the graph of one reverse pass is kept."""

    def __init__(
        self, f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None
    ) -> None:
        out, self.pull, _ = vjp(f, params, x)
        self.whiten: Whitening = resolve(metric, x, out.detach())
        self.f, self.params, self.x = f, params, x

    def random(self, generator: torch.Generator) -> Tensor:
        """Random combinations of rows, ``[R, P]``."""
        like = next(iter(self.params.values()))
        shape = (PROBES, self.whiten.size)
        u = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        return torch.stack([self.transpose(row) for row in u])

    def transpose(self, u: Tensor) -> Tensor:
        """Aᵀu ``[P]``."""
        return ravel(self.pull(self.whiten.adjoint(u))).detach()

    def gram(self, u: Tensor) -> Tensor:
        """AAᵀu ``[Q]``."""
        cotangent = self.whiten.adjoint(u)
        v = {name: t.detach() for name, t in self.pull(cotangent).items()}
        try:
            tangent = jvp(self.f, self.params, self.x, v)[1]
        except UnsupportedModuleError:
            # Jv as the transpose of the linear map u → Jᵀu
            tangent = torch.func.vjp(self.pull, cotangent)[1](v)[0]
        return self.whiten.rows(tangent).detach()


def _affordable(
    f: ModelFn,
    params: Params,
    x: Inputs,
    metric: Metric | Tensor | None,
    seconds: float,
    *,
    free: bool,
) -> tuple[Products, int]:
    """Products with as many points as leave time for some steps, and how many these are."""
    S = points.count(x)
    used = S
    if free:
        few = points.take(x, slice(0, min(S, 2)))
        for _ in range(2):
            begin = now(params)
            trial = Products(f, params, few, None)
            trial.gram(torch.ones(trial.whiten.size).to(next(iter(params.values()))))
        each = (now(params) - begin) / points.count(few)
        used = max(1, min(S, int(seconds / (2 * STEPS[0] + PROBES) / each)))
    return Products(f, params, points.take(x, slice(0, used)), metric), used
