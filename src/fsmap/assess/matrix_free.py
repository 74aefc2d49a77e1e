"""The largest eigenvalue and the trace of 𝒥 from products with the Jacobian alone, in a given time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.errors import UnsupportedModuleError
from fsmap.functional import differentiable_attention, ravel
from fsmap.linalg import points
from fsmap.linalg import probes as draw
from fsmap.linalg.jacobian import is_pointwise, jvp, vjp
from fsmap.linalg.metric import Metric, Whitening
from fsmap.linalg.trace import resolve
from fsmap.types import Estimate, Inputs, ModelFn, Params

PROBES = 4  # for the trace, and as stand-ins of the rows
STEPS = (4, 40)  # of Lanczos: at least, at most


class Bounds(NamedTuple):
    """What products tell."""

    rows: int  # Q, of the points that were used
    points: int
    largest: Estimate  # value: a lower bound; stderr: how far above it the largest may be
    trace: Estimate
    probes: Tensor  # [R, P]  uᵀA with u ~ N(0, I)


def bounds(
    f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None, seconds: float
) -> Bounds:
    """Lanczos on AAᵀ for the largest eigenvalue, Hutchinson on what it has not seen for the trace.

    Args:
        f: Model function.
        params: Parameters, detached.
        x: Points; only the first ones are used where all of them take too long.
        metric: g, without negative eigenvalues.
        seconds: About how long it may take.

    Returns:
        The bounds.
    """
    until = time.perf_counter() + seconds
    products, used = _affordable(f, params, x, metric, seconds)
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
    normal = torch.randn(PROBES, Q, generator=generator, dtype=like.dtype, device=like.device)
    probes = torch.stack([products.transpose(u) for u in normal])
    largest = Estimate(ritz[-1], (upper - ritz[-1]).clamp_min(0))
    return Bounds(Q, used, largest, trace, probes)


def lanczos(
    matvec: Callable[[Tensor], Tensor], start: Tensor, until: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal basis ``[k, n]``, tridiagonal matrix ``[k, k]`` and norm of what is left after k steps."""
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
            with differentiable_attention():  # Jv as the transpose of the linear map u → Jᵀu
                tangent = torch.func.vjp(self.pull, cotangent)[1](v)[0]
        return self.whiten.rows(tangent).detach()


def _affordable(
    f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None, seconds: float
) -> tuple[Products, int]:
    """Products with as many points as leave time for the least number of steps, and how many these are."""
    S = points.count(x)
    used = S
    if metric is None and is_pointwise(f):
        few = points.take(x, slice(0, min(S, 2)))
        begin = time.perf_counter()
        trial = Products(f, params, few, None)
        trial.gram(torch.ones(trial.whiten.size).to(next(iter(params.values()))))
        each = (time.perf_counter() - begin) / points.count(few)
        used = max(1, min(S, int(seconds / (2 * STEPS[0] + 2 * PROBES) / each)))
    return Products(f, params, points.take(x, slice(0, used)), metric), used
