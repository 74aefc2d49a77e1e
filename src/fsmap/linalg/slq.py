r"""log det(𝒥 + εI) from matrix–vector products alone: stochastic Lanczos quadrature.

With whitened rows A ``[Q, P]`` (𝒥 = AᵀA), Sylvester's identity gives $\log\det(\mathcal J + \epsilon I) = P\log\epsilon + \mathrm{tr}\log(I + M/\epsilon)$ for
M = AAᵀ as well as for M = AᵀA. The smaller side is taken, products with it are a ``vjp`` and a ``jvp``, and nothing of size Q·P is ever held.
The trace is a mean over random signs z of $z^\top \log(I + M/\epsilon)\,z$, each by Lanczos; the same Lanczos vectors solve $w = (M + \epsilon I)^{-1} z$, and
$\nabla \log\det = E[w^\top (\nabla M)\, z]$.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fsmap.functional import count, differentiable_attention, ravel
from fsmap.linalg import probes as draw
from fsmap.linalg.jacobian import is_pointwise, jvp, outputs, unit_tangents, vjp
from fsmap.linalg.metric import Metric
from fsmap.linalg.trace import resolve
from fsmap.types import Estimate, Inputs, ModelFn, Params

DEFAULT_PROBES = 16
CHECK_EVERY = 8  # Lanczos steps between two looks at the truncation error


class Quadrature(NamedTuple):
    """What Lanczos knows after k steps, for R probes."""

    values: Tensor  # [R]  zᵀ log(I + M/ε) z
    truncation: Tensor  # [R]  change over the last steps
    solves: Tensor  # [R, n]  (M + εI)⁻¹ z


def slq(
    f: ModelFn,
    params: Params,
    x: Inputs,
    jitter: Tensor,
    *,
    metric: Metric | Tensor | None = None,
    probes: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    chunk: int | None = None,
) -> Estimate:
    """Estimate log det(𝒥 + εI) with its gradient.

    Args:
        f: Model function.
        params: Parameters.
        x: Evaluation points.
        jitter: ε > 0.
        metric: g; where it has negative eigenvalues the P×P side is used.
        probes: How many (default 16), or the probes ``[R, n]`` with n = min(Q, P). As many as n or more gives the complete set: exact.
        generator: Where probes are drawn from; None is torch's own.
        chunk: Probes at a time, for memory.

    Returns:
        Estimate: the value (its gradient is the estimate above) and its error: spread over probes and truncation of
        Lanczos together.
    """
    fixed = {name: p.detach() for name, p in params.items()}
    matvec, form, size = _operator(f, fixed, x, metric, chunk)
    z = _probe_vectors(probes, size, generator, jitter)
    eps = jitter.detach().double()
    quadrature = lanczos(matvec, z, eps)
    values = count(params) * eps.log() + quadrature.values
    spread = values.std() / len(z) ** 0.5 if _is_random(probes, size) else values.new_zeros(())
    stderr = (spread.square() + quadrature.truncation.mean().square()).sqrt()
    value = values.mean()
    if torch.is_grad_enabled():
        value = _attach_gradient(value, params, fixed, jitter, form, z, quadrature.solves, size, chunk)
    return Estimate(value, stderr)


def lanczos(matvec: Callable[[Tensor], Tensor], z: Tensor, eps: Tensor) -> Quadrature:
    """Lanczos with full reorthogonalisation for all probes at once, until truncation no longer matters.

    Args:
        matvec: V ``[R, n]`` → VM.
        z: Probes, ``[R, n]``.
        eps: ε.

    Returns:
        Quadrature values, their truncation and the solves.
    """
    R, n = z.shape
    norms = z.norm(dim=1)  # [R]
    basis = [z / norms[:, None]]
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    previous = None
    while True:
        w = matvec(basis[-1])
        alphas.append((w * basis[-1]).sum(1))
        stacked = torch.stack(basis)  # [k, R, n]
        for _ in range(2):  # twice is enough
            w = w - torch.einsum("krn,kr->rn", stacked, torch.einsum("krn,rn->kr", stacked, w))
        beta = w.norm(dim=1)
        exhausted = beta <= 1e-12 * torch.stack(alphas).abs().amax(0).clamp_min(eps)
        k = len(basis)
        if k == n or bool(exhausted.all()) or k % CHECK_EVERY == 0:
            values, weights = _gauss(alphas, betas, eps)
            values = values * norms.square()
            change = torch.zeros_like(values) if previous is None else (values - previous).abs()
            done = k == n or bool(exhausted.all())
            settled = previous is not None and R > 1 and bool(change.mean() < 0.05 * values.std() / R**0.5)
            settled = settled or (previous is not None and bool((change < 1e-10 * values.abs() + 1e-12).all()))
            if done or settled:
                change = torch.zeros_like(change) if done else change
                solves = norms[:, None] * torch.einsum("krn,rk->rn", stacked, weights)
                return Quadrature(values, change, solves)
            previous = values
        betas.append(torch.where(exhausted, torch.zeros_like(beta), beta))
        basis.append(torch.where(exhausted[:, None], torch.zeros_like(w), w / beta.clamp_min(1e-300)[:, None]))


def _gauss(alphas: list[Tensor], betas: list[Tensor], eps: Tensor) -> tuple[Tensor, Tensor]:
    """e₁ᵀ log(I + T/ε) e₁ and (T + εI)⁻¹ e₁ of the tridiagonal matrices: [R], [R, k]."""
    T = torch.diag_embed(torch.stack(alphas, 1))  # [R, k, k]
    if betas:
        off = torch.stack(betas, 1)
        T = T + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    eigenvalues, vectors = torch.linalg.eigh(T)
    first = vectors[:, 0]  # [R, k]
    # M is positive semi-definite up to a signed metric, whose own check is in logdet: -eps is the pole.
    values = (first.square() * torch.log1p(eigenvalues / eps)).sum(1)
    return values, (vectors @ (first / (eigenvalues + eps))[:, :, None])[..., 0]


def _operator(
    f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None, chunk: int | None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Params, Tensor, Tensor], Tensor], int]:
    """Products with the smaller of AAᵀ and AᵀA, the form wᵀMz as a function of θ, and the side's size."""
    with torch.no_grad():
        whiten = resolve(metric, x, outputs(f, params, x))
    P = count(params)
    dtype = next(iter(params.values())).dtype
    dual = whiten.size < P and whiten.signs is None

    def forward(p: Params, v: Params) -> Tensor:  # Av, signs applied: [Q]
        out, tangent, _ = jvp(f, p, x, v)
        return resolve(metric, x, out).rows(tangent)

    def backward(p: Params, u: Tensor) -> Params:  # Aᵀu
        out, transpose, _ = vjp(f, p, x)
        return transpose(resolve(metric, x, out).adjoint(u.to(dtype)))

    def through(v: Tensor) -> Tensor:
        if dual:
            return forward(params, backward(params, v))
        u = forward(params, unit_tangents(params, v.to(dtype)))
        return ravel(backward(params, u if whiten.signs is None else whiten.signs * u))

    def form(p: Params, w: Tensor, z: Tensor) -> Tensor:
        if dual:
            left, right = backward(p, w), backward(p, z)
            return torch.stack([(left[n] * right[n]).sum() for n in left]).sum()
        left_rows = forward(p, unit_tangents(p, w.to(dtype)))
        right_rows = forward(p, unit_tangents(p, z.to(dtype)))
        product = left_rows * right_rows
        return (product if whiten.signs is None else whiten.signs * product).sum()

    batched = is_pointwise(f)

    def matvec(V: Tensor) -> Tensor:
        with torch.no_grad(), differentiable_attention():
            rows = vmap(through, chunk_size=chunk)(V) if batched else torch.stack([through(v) for v in V])
        return rows.double()

    return matvec, form, whiten.size if dual else P


def _attach_gradient(
    value: Tensor,
    params: Params,
    fixed: Params,
    jitter: Tensor,
    form: Callable[[Params, Tensor, Tensor], Tensor],
    z: Tensor,
    solves: Tensor,
    size: int,
    chunk: int | None,
) -> Tensor:
    """The value with gradient E[wᵀ(∇M)z] in θ and tr (M+εI)⁻¹ + (P−n)/ε in ε; held as one vector, not as a graph."""
    groups = zip(solves.split(chunk or len(z)), z.split(chunk or len(z)), strict=True)
    total = {name: torch.zeros_like(p) for name, p in fixed.items()}
    for w, v in groups:

        def summed(p: Params, w: Tensor = w, v: Tensor = v) -> Tensor:
            return torch.stack([form(p, a, b) for a, b in zip(w, v, strict=True)]).sum()

        grads = torch.func.grad(summed)(fixed)
        total = {name: t + grads[name].detach() / len(z) for name, t in total.items()}
    inverse_trace = (solves * z).sum(1).mean() + (count(params) - size) / jitter.detach().double()
    linear = torch.stack([(p * total[n]).sum() for n, p in params.items()]).sum() + jitter * inverse_trace
    return value + (linear - linear.detach())


def _probe_vectors(
    probes: int | Tensor | None, size: int, generator: torch.Generator | None, like: Tensor
) -> Tensor:
    if isinstance(probes, Tensor):
        return probes.double()
    if not _is_random(probes, size):
        return size**0.5 * torch.eye(size, dtype=torch.float64, device=like.device)
    return draw.rademacher(probes or DEFAULT_PROBES, size, generator, like.double())


def _is_random(probes: int | Tensor | None, size: int) -> bool:
    if isinstance(probes, Tensor):
        return len(probes) > 1
    return (probes or DEFAULT_PROBES) < size
