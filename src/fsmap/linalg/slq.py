r"""log det(𝒥 + εI) from matrix–vector products alone: stochastic Lanczos quadrature.

With whitened rows A ``[Q, P]`` (𝒥 = AᵀA), Sylvester's identity gives
$\log\det(\mathcal J + \epsilon I) = P\log\epsilon + \mathrm{tr}\log(I + M/\epsilon)$
for M = AAᵀ as well as for M = AᵀA; the smaller side, n, is taken. The trace is a mean over random
signs z of $z^\top \log(I + M/\epsilon)\,z$, each by :func:`lanczos`. The same Lanczos
vectors give $u = (M + \epsilon I)^{-1/2} z$, and
$\nabla \log\det = E[u^\top (\nabla M)\, u]$: this symmetric form has far less noise than
$E[z^\top (M + \epsilon I)^{-1} (\nabla M)\, z]$, because u is small where M is large.

Products with M come from the matrix itself if that is small (:func:`explicit`), else from passes
through the model, which never hold anything of size Q·P (:func:`by_passes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from fsmap.errors import InputError
from fsmap.functional import NoiseReplay, count, detached, flat, num_points, number, ravel, unravel
from fsmap.linalg import probes as draw
from fsmap.linalg.estimators import over_probes
from fsmap.linalg.jacobian import Site, alone, jvp, linearize, recorded_calls, vjp
from fsmap.types import Estimate, Params

DEFAULT_PROBES = 16


def slq(
    site: Site,
    jitter: Tensor,
    probes: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    *,
    operator: Operator | None = None,
) -> Estimate:
    """Estimate log det(𝒥 + εI) with its gradient.

    ``probes`` are how many (default 16) or a tensor ``[R, n]`` with n = min(Q, P); as many as n or
    more give the complete set: exact. The error holds the spread over probes (nan for one), the
    truncation of Lanczos and the rounding of the Jacobian to the model's dtype.
    """
    params = site.params
    P, like = count(params), next(iter(params.values()))
    if number(jitter + 0 * like.sum()) is None:
        why = "slq stops when its error is small, so it cannot be vmapped"
        raise InputError(f"{why}; use 'dense' or 'dual'")
    operator = operator or build(site)
    z = _vectors(probes, operator.size, generator, jitter)
    eps = jitter.detach().double()
    complete = len(z) == operator.size and not isinstance(probes, Tensor)
    quadrature = lanczos(operator.matvec, z, eps, complete=complete)
    values = P * eps.log() + quadrature.values  # [R]
    value = values.mean()
    if torch.is_grad_enabled():
        u = quadrature.roots
        inverse_trace = u.square().sum(1).mean() + (P - operator.size) / eps
        linear = operator.form(u) + jitter * inverse_trace
        value = value + (linear - linear.detach())
    spread = torch.zeros_like(value)
    if not complete:
        spread = values.std() / math.sqrt(len(z)) if len(z) > 1 else spread + torch.nan
    error = torch.hypot(spread, quadrature.error.mean())
    rounding = rounding_at_most(quadrature.squares.mean(), eps, like.dtype, operator.size)
    return Estimate(value, torch.hypot(error, rounding))


def _vectors(
    probes: int | Tensor | None, size: int, generator: torch.Generator | None, like: Tensor
) -> Tensor:
    if isinstance(probes, Tensor):
        draw.check_signs(probes, size)
        return probes.double()
    num = draw.check_number(DEFAULT_PROBES if probes is None else probes)
    if num >= size:
        return math.sqrt(size) * torch.eye(size, dtype=torch.float64, device=like.device)
    return draw.rademacher(num, size, generator, like.double())


CHECK_EVERY = 4  # steps between two checks of the truncation error
# Lanczos ends if the truncation error is below one of:
OF_SPREAD = 0.05  # this part of the standard error over probes
OF_VALUE = 1e-4  # this part of the value, if there is one probe
ROUNDING = 1e-10  # relative


class Quadrature(NamedTuple):
    """The result of Lanczos, for R probes."""

    values: Tensor  # [R]  zᵀ log(I + M/ε) z
    error: Tensor  # [R]  change over the last steps, and the rounding of M
    roots: Tensor  # [R, n]  (M + εI)^(−½) z
    squares: Tensor  # [R]  zᵀMz


def lanczos(
    matvec: Callable[[Tensor], Tensor], z: Tensor, eps: Tensor, *, complete: bool = False
) -> Quadrature:
    """Lanczos with full reorthogonalization, for all probes, until truncation no longer matters.

    ``matvec`` maps V ``[R, n]`` to VM, ``z`` are the probes ``[R, n]``. If ``complete`` the
    probes are a basis, not a sample, and only rounding error is left at the end.
    """
    R, n = z.shape
    norms = z.norm(dim=1)  # [R]
    basis = z.new_empty(R, min(n, 2 * CHECK_EVERY), n)
    basis[:, 0] = z / norms[:, None]
    diagonal: list[Tensor] = []  # of the tridiagonal matrix, [R] each
    beside: list[Tensor] = []
    previous, largest = None, eps
    for k in range(1, n + 1):
        held = basis[:, :k]
        w = matvec(held[:, -1])
        diagonal.append((w * held[:, -1]).sum(1))
        for _ in range(2):  # twice is enough
            w = w - ((held @ w[:, :, None]).mT @ held)[:, 0]
        beta, largest = w.norm(dim=1), torch.maximum(largest, diagonal[-1].abs())
        exhausted = beta <= 1e-12 * largest
        done = k == n or bool(exhausted.all())
        if done or k % CHECK_EVERY == 0:
            T = torch.diag_embed(torch.stack(diagonal, 1))
            if k > 1:
                side = torch.diag_embed(torch.stack(beside, 1), 1)
                T = T + side + side.mT
            eigenvalues, vectors = torch.linalg.eigh(T)
            first = vectors[:, 0]  # [R, k]
            values = (first.square() * torch.log1p(eigenvalues / eps)).sum(1) * norms.square()
            known = done or previous is None
            change = torch.zeros_like(values) if known else (values - previous).abs()
            if done or (previous is not None and _settled(values, change, complete)):
                break
            previous = values
        if k == basis.shape[1]:
            basis = torch.cat([basis, basis.new_empty(R, min(n, 2 * k) - k, n)], dim=1)
        beside.append(torch.where(exhausted, 0.0, beta))
        basis[:, k] = torch.where(exhausted[:, None], 0.0, w / beta.clamp_min(1e-300)[:, None])
    weights = vectors @ (first * (eigenvalues + eps).rsqrt())[:, :, None]  # (T + εI)^(−½) e₁
    roots = norms[:, None] * (weights.mT @ held)[:, 0]
    digit = torch.finfo(T.dtype).eps * T.abs().sum(1).amax(1)  # ≥ eps·λ_max
    error = change + digit * roots.square().sum(1)
    return Quadrature(values, error, roots, diagonal[0] * norms.square())


def _settled(values: Tensor, change: Tensor, complete: bool) -> bool:
    only_rounding = bool((change <= ROUNDING * values.abs()).all())
    if complete or only_rounding:
        return only_rounding
    if len(values) == 1:
        return bool(change[0] < OF_VALUE * values[0].abs())
    return bool(change.mean() < OF_SPREAD * values.std() / len(values) ** 0.5)


LARGEST_EXPLICIT = 4096  # side up to which the matrix is formed
FACTOR_BYTES = 2**30  # of the Jacobian, up to which the matrix is formed
PROBE_BYTES = 2**27  # parameter vectors of probes that pass through the model together


class Operator(NamedTuple):
    """M, symmetric, n×n."""

    size: int  # n
    matvec: Callable[[Tensor], Tensor]  # V [R, n] -> VM, at fixed θ
    form: Callable[[Tensor], Tensor]  # U [R, n] -> mean of uᵀMu, differentiable in θ


def build(site: Site) -> Operator:
    """M on the smaller side, explicit if that fits: by size, never by values."""
    f, params, x, _ = site
    with torch.no_grad():
        Q, P = site.resolve(site.output()).size, count(params)
    numbers = Q * P
    if Q < P and alone(f, params, x):
        numbers = num_points(x) * recorded_calls(f, params, x).numbers_per_point(params)
    fits = min(Q, P) <= LARGEST_EXPLICIT and 8 * numbers <= FACTOR_BYTES
    return explicit(site) if fits else by_passes(site)


def explicit(site: Site) -> Operator:
    """M as a matrix."""
    factors = linearize(*site[:3])
    whiten = site.resolve(factors.out)
    if whiten.size < count(site.params):
        matrix = whiten.gram(factors.gram(), num_points(site.x))
    else:
        rows = whiten.rows(factors.rows().double())
        matrix = rows.mT @ rows
    fixed = matrix.detach()
    return Operator(
        len(matrix), lambda V: V @ fixed, lambda U: (matrix * (U.mT @ U)).sum() / len(U)
    )


def by_passes(site: Site) -> Operator:
    """M by passes through the model: nothing of size Q·P is ever held."""
    f, params, x, _ = site
    fixed, P = detached(params), count(params)
    size = max(1, PROBE_BYTES // (8 * P))
    replay = NoiseReplay(f, params)
    out, pull, _ = vjp(f, fixed, x)  # one pass: every product sees the same masks
    whiten = site.resolve(out)
    dual = whiten.size < P
    # Jv as the transpose of the linear map u → Jᵀu: nothing of the first pass is repeated.
    push = torch.func.vjp(pull, torch.zeros_like(flat(out, x)))[1]

    def product(v: Tensor) -> Tensor:  # Mv
        if dual:
            return whiten.rows(push(pull(whiten.adjoint(v.to(out.dtype))))[0]).double()
        u = whiten.rows(push(unravel(v.to(out.dtype), fixed))[0])
        return ravel(pull(whiten.adjoint(u))).double()

    def squares(p: Params, U: Tensor) -> Tensor:  # uᵀMu of each
        replay()
        if dual:
            here, transpose, _ = vjp(f, p, x)
            adjoint = site.resolve(here).adjoint

        def one(u: Tensor) -> Tensor:
            if dual:
                return ravel(transpose(adjoint(u.to(out.dtype)))).square().sum()
            at, tangent, _ = jvp(f, p, x, unravel(u.to(out.dtype), p))
            return site._replace(params=p).resolve(at).quadratic(tangent)

        return over_probes(f, one, U)

    def form(U: Tensor) -> Tensor:
        """Keep one gradient vector in place of the graph."""
        total = {name: torch.zeros_like(p) for name, p in fixed.items()}
        value = torch.zeros_like(U[0, 0])
        for some in U.split(size):
            grads, part = grad_and_value(lambda p, some=some: squares(p, some).sum())(fixed)
            value = value + part / len(U)
            total = {name: t + grads[name].detach() / len(U) for name, t in total.items()}
        linear = torch.stack([(p * total[n]).sum() for n, p in params.items()]).sum()
        return value + (linear - linear.detach())

    return Operator(min(whiten.size, P), lambda V: over_probes(f, product, V, chunk=size), form)


def rounding_at_most(trace: Tensor, jitter: Tensor, precision: torch.dtype, count: int) -> Tensor:
    """As :func:`rounding_bound`, without the eigenvalues: larger, from the trace of 𝒥 alone."""
    shift = torch.finfo(precision).eps * trace.clamp_min(0).sqrt()
    noise = torch.finfo(torch.float64).eps * count * trace.abs()
    return count * torch.log1p(shift / jitter.sqrt() + (shift.square() + noise) / jitter)
