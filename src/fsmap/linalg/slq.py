r"""log det(𝒥 + εI) from matrix–vector products alone: stochastic Lanczos quadrature.

With whitened rows A ``[Q, P]`` (𝒥 = AᵀA), Sylvester's identity gives
$\log\det(\mathcal J + \epsilon I) = P\log\epsilon + \mathrm{tr}\log(I + M/\epsilon)$
for M = AAᵀ as well as for M = AᵀA; the smaller side, n, is taken. The trace is a mean over random
signs z of $z^\top \log(I + M/\epsilon)\,z$, each by :func:`lanczos`. The same Lanczos
vectors give $u = (M + \epsilon I)^{-1/2} z$, and
$\nabla \log\det = E[u^\top (\nabla M)\, u]$: this symmetric form has far less noise than
$E[z^\top (M + \epsilon I)^{-1} (\nabla M)\, z]$, because u is small where M is large.

Products with M come from one of three operators (:func:`build`): the matrix itself, the factors
of J, or passes through the model, which never hold anything of size Q·P.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_map

from fsmap.errors import InputError
from fsmap.functional import (
    NoiseReplay,
    count,
    detached,
    flat,
    is_pointwise,
    num_points,
    number,
    ravel,
    unravel,
)
from fsmap.linalg import probes as draw
from fsmap.linalg.estimators import over_probes
from fsmap.linalg.jacobian import Factors, Site, jvp, linearize, recorded_calls, vjp
from fsmap.types import Estimate, Params

DEFAULT_PROBES = 16


def slq(
    site: Site,
    jitter: Tensor,
    probes: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    *,
    kind: str | None = None,
    bounded: bool = False,
) -> Estimate:
    """Estimate log det(𝒥 + εI) with its gradient.

    ``probes`` are how many (default 16) or a tensor ``[R, n]`` with n = min(Q, P); as many as n or
    more give the complete set: exact. ``kind`` is one of ``KINDS`` (None: by size). The error holds
    the spread over probes (nan for one), the truncation of Lanczos and, if ``bounded``, the
    rounding of the Jacobian to the model's dtype.
    """
    params = site.params
    if number(jitter + 0 * next(iter(params.values())).sum()) is None:
        message = (
            "slq stops when its error is small, so it cannot be vmapped; use 'dense' or 'dual'"
        )
        raise InputError(message)
    operator = build(site, kind)
    z = _vectors(probes, operator.size, generator, jitter)
    eps = jitter.detach().double()
    complete = len(z) == operator.size and not isinstance(probes, Tensor)
    quadrature = lanczos(operator.matvec, z, eps, complete=complete)
    values = count(params) * eps.log() + quadrature.values  # [R]
    value = values.mean()
    if torch.is_grad_enabled():
        u = quadrature.roots
        inverse_trace = u.square().sum(1).mean() + (count(params) - operator.size) / eps
        linear = operator.form(u, u) + jitter * inverse_trace
        value = value + (linear - linear.detach())
    spread = torch.zeros_like(value)
    if not complete:
        spread = values.std() / math.sqrt(len(z)) if len(z) > 1 else spread + torch.nan
    error = torch.hypot(spread, (quadrature.truncation + quadrature.rounding).mean())
    if bounded:
        trace = (z * operator.matvec(z)).sum(1).mean().detach()
        dtype = next(iter(params.values())).dtype
        error = torch.hypot(error, rounding_at_most(trace, eps, dtype, operator.size))
    return Estimate(value, error)


def _vectors(
    probes: int | Tensor | None, size: int, generator: torch.Generator | None, like: Tensor
) -> Tensor:
    if isinstance(probes, Tensor):
        if probes.ndim != 2 or probes.shape[1] != size:
            message = f"probes of slq must be [R, {size}] here, got {tuple(probes.shape)}"
            raise InputError(message)
        return probes.double()
    num = DEFAULT_PROBES if probes is None else probes
    if not isinstance(num, int) or num < 1:
        message = f"probes must be an integer of at least 1, or a tensor [R, {size}], got {probes}"
        raise InputError(message)
    if num >= size:
        return math.sqrt(size) * torch.eye(size, dtype=torch.float64, device=like.device)
    return draw.rademacher(num, size, generator, like.double())


CHECK_EVERY = 4  # steps between two checks of the truncation error
# Lanczos ends if the truncation error is below one of:
OF_SPREAD = 0.05  # this part of the standard error over probes
OF_VALUE = 1e-4  # this part of the value, if there is one probe
ROUNDING = 1e-10  # relative


class Quadrature(NamedTuple):
    """The result of Lanczos after k steps, for R probes."""

    values: Tensor  # [R]  zᵀ log(I + M/ε) z
    truncation: Tensor  # [R]  change over the last steps
    roots: Tensor  # [R, n]  (M + εI)^(−½) z
    rounding: Tensor  # [R]  what an error of M in its last digit does to the value


def lanczos(
    matvec: Callable[[Tensor], Tensor], z: Tensor, eps: Tensor, *, complete: bool = False
) -> Quadrature:
    """Lanczos with full reorthogonalization, for all probes, until truncation no longer matters.

    ``matvec`` maps V ``[R, n]`` to VM, ``z`` are the probes ``[R, n]``. If ``complete`` the probes
    are no sample, and only rounding ends it.
    """
    R, n = z.shape
    norms = z.norm(dim=1)  # [R]
    basis = z.new_empty(R, min(n, 2 * CHECK_EVERY), n)
    T = z.new_zeros(R, min(n, 64), min(n, 64))
    basis[:, 0] = z / norms[:, None]
    previous = None
    k = 0
    while True:
        held = basis[:, : k + 1]  # [R, k+1, n]
        w = matvec(basis[:, k])
        T[:, k, k] = (w * basis[:, k]).sum(1)
        for _ in range(2):  # twice is enough
            w = w - ((held @ w[:, :, None]).mT @ held)[:, 0]
        beta = w.norm(dim=1)
        largest = T[:, : k + 1].diagonal(dim1=1, dim2=2).abs().amax(1).clamp_min(eps)
        exhausted = beta <= 1e-12 * largest
        k += 1
        done = k == n or bool(exhausted.all())
        if done or k % CHECK_EVERY == 0:
            values, weights = _gauss(T[:, :k, :k], eps)
            values = values * norms.square()
            change = torch.zeros_like(values)
            if not done and previous is not None:
                change = (values - previous).abs()
            if done or (previous is not None and _settled(values, change, complete)):
                roots = norms[:, None] * (weights[:, None] @ held)[:, 0]
                digit = torch.finfo(T.dtype).eps * T[:, :k, :k].abs().sum(1).amax(1)  # ≥ eps·λ_max
                return Quadrature(values, change, roots, digit * roots.square().sum(1))
            previous = values
        basis, T = _grown(basis, T, k, n)
        T[:, k, k - 1] = T[:, k - 1, k] = torch.where(exhausted, 0.0, beta)
        basis[:, k] = torch.where(exhausted[:, None], 0.0, w / beta.clamp_min(1e-300)[:, None])


def _settled(values: Tensor, change: Tensor, complete: bool) -> bool:
    only_rounding = bool((change <= ROUNDING * values.abs()).all())
    if complete or only_rounding:
        return only_rounding
    if len(values) == 1:
        return bool(change[0] < OF_VALUE * values[0].abs())
    return bool(change.mean() < OF_SPREAD * values.std() / len(values) ** 0.5)


def _grown(basis: Tensor, T: Tensor, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Room for vector k, doubled when it is used up."""
    if k == basis.shape[1]:
        more = basis.new_empty(len(basis), min(n, 2 * k) - k, n)
        basis = torch.cat([basis, more], dim=1)
    if k == T.shape[1]:
        T = torch.nn.functional.pad(T, (0, min(n, 2 * k) - k, 0, min(n, 2 * k) - k))
    return basis, T


def _gauss(T: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """e₁ᵀ log(I + T/ε) e₁ and (T + εI)^(−½) e₁ of the tridiagonal matrices: [R], [R, k]."""
    eigenvalues, vectors = torch.linalg.eigh(T)
    first = vectors[:, 0]  # [R, k]
    values = (first.square() * torch.log1p(eigenvalues / eps)).sum(1)
    return values, (vectors @ (first * (eigenvalues + eps).rsqrt())[:, :, None])[..., 0]


LARGEST_EXPLICIT = 4096  # side up to which the matrix is formed
FACTOR_BYTES = 2**30  # what the factored Jacobian may take
PROBE_BYTES = 2**27  # parameter vectors of probes that pass through the model together


class Operator(NamedTuple):
    """M, symmetric, n×n."""

    size: int  # n
    matvec: Callable[[Tensor], Tensor]  # V [R, n] -> VM, at fixed θ
    form: Callable[[Tensor, Tensor], Tensor]  # W, Z [R, n] -> mean of wᵀMz, differentiable in θ


def build(site: Site, kind: str | None = None) -> Operator:
    """M on the smaller side.

    ``kind`` is one of ``KINDS``; None takes the first one that fits. On the parameters' side
    "factored" is "passes".
    """
    with torch.no_grad():
        whiten = site.resolve(site.output())
    P = count(site.params)
    dual = whiten.size < P
    kind = kind or cheapest(site, whiten.size, dual=dual)
    if kind == "explicit":
        return _explicit(site, dual=dual)
    if kind == "factored" and dual:
        return _factored(site)
    return _by_passes(site, dual=dual)


KINDS = ("explicit", "factored", "passes")


def cheapest(site: Site, Q: int, *, dual: bool) -> str:
    """The first of ``KINDS`` that fits: by size and memory, never by values."""
    f, params, x, _ = site
    P = count(params)
    numbers = Q * P
    if dual and is_pointwise(f):
        compact = not torch.is_grad_enabled()  # else all that a point takes stays for the gradient
        each = recorded_calls(f, params, x).numbers_per_point(params, compact=compact)
        numbers = num_points(x) * each
    if 8 * numbers > FACTOR_BYTES:
        return "passes"
    if (Q if dual else P) <= LARGEST_EXPLICIT:
        return "explicit"
    return "factored" if dual else "passes"


def _explicit(site: Site, *, dual: bool) -> Operator:
    """The matrix itself."""
    factors = linearize(*site[:3])
    whiten = site.resolve(factors.out)
    if dual:
        matrix = whiten.gram(factors.gram(), num_points(site.x))
    else:
        rows = whiten.rows(factors.rows().double())
        matrix = rows.mT @ rows
    fixed = matrix.detach()

    def form(W: Tensor, Z: Tensor) -> Tensor:
        return (matrix * (W.mT @ Z)).sum() / len(Z)

    return Operator(len(matrix), lambda V: V @ fixed, form)


def _factored(site: Site) -> Operator:
    """AAᵀ from the factors of J, without the matrix."""
    factors = linearize(*site[:3]).compact().to(torch.float64)
    whiten = site.resolve(factors.out)

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


def _by_passes(site: Site, *, dual: bool) -> Operator:
    """Passes through the model: nothing of size Q·P is ever held."""
    f, params, x, _ = site
    fixed = detached(params)
    size = max(1, PROBE_BYTES // (8 * count(params)))
    replay = NoiseReplay(f, params)
    out, pull, _ = vjp(f, fixed, x)  # one pass: every product sees the same masks
    whiten = site.resolve(out)
    # Jv as the transpose of the linear map u → Jᵀu: nothing of the first pass is repeated.
    push = torch.func.vjp(pull, torch.zeros_like(flat(out, x)))[1]

    def product(v: Tensor) -> Tensor:  # Mv
        if dual:
            return whiten.rows(push(pull(whiten.adjoint(v.to(out.dtype))))[0]).double()
        u = whiten.rows(push(unravel(v.to(out.dtype), fixed))[0])
        return ravel(pull(whiten.adjoint(u))).double()

    def forms(p: Params, W: Tensor, Z: Tensor) -> Tensor:  # wᵀMz of each pair
        replay()
        if not dual:
            return over_probes(f, partial(_in_rows, site._replace(params=p)), W, Z)
        here, transpose, _ = vjp(f, p, x)
        adjoint = site.resolve(here).adjoint

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


def _in_rows(site: Site, w: Tensor, z: Tensor) -> Tensor:
    """(Aw)ᵀ(Az)."""
    dtype = next(iter(site.params.values())).dtype
    out, left, _ = jvp(*site[:3], unravel(w.to(dtype), site.params))
    _, right, _ = jvp(*site[:3], unravel(z.to(dtype), site.params))
    whiten = site.resolve(out)
    return (whiten.rows(left) * whiten.rows(right)).sum()


def rounding_at_most(trace: Tensor, jitter: Tensor, precision: torch.dtype, count: int) -> Tensor:
    """As :func:`rounding_bound`, without the eigenvalues: larger, from the trace of 𝒥 alone."""
    shift = torch.finfo(precision).eps * trace.clamp_min(0).sqrt()
    noise = torch.finfo(torch.float64).eps * count * trace.abs()
    return count * torch.log1p(shift / jitter.sqrt() + (shift.square() + noise) / jitter)
