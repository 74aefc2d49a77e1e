r"""log det(𝒥 + εI) from matrix–vector products alone: stochastic Lanczos quadrature.

With whitened rows A ``[Q, P]`` (𝒥 = AᵀA), Sylvester's identity gives
$\log\det(\mathcal J + \epsilon I) = P\log\epsilon + \mathrm{tr}\log(I + M/\epsilon)$
for M = AAᵀ as well as for M = AᵀA; the smaller side, n, is taken. The trace is a mean over random
signs z of $z^\top \log(I + M/\epsilon)\,z$, each by Lanczos (:mod:`fsmap.linalg.lanczos`). The same
Lanczos vectors give $u = (M + \epsilon I)^{-1/2} z$, and
$\nabla \log\det = E[u^\top (\nabla M)\, u]$: this symmetric form has far less noise than
$E[z^\top (M + \epsilon I)^{-1} (\nabla M)\, z]$, because u is small where M is large.

Products with M come from one of three operators (:mod:`fsmap.linalg.operators`): the matrix itself,
the factors of J, or passes through the model, which never hold anything of size Q·P.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import count
from fsmap.linalg import operators
from fsmap.linalg import probes as draw
from fsmap.linalg.determinants import rounding_at_most
from fsmap.linalg.lanczos import Quadrature, lanczos
from fsmap.linalg.metric import Metric
from fsmap.linalg.values import number
from fsmap.types import Estimate, Inputs, ModelFn, Params

DEFAULT_PROBES = 16


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
    kind: str | None = None,
    bounded: bool = False,
) -> Estimate:
    """Estimate log det(𝒥 + εI) with its gradient.

    Args:
        f: Model function.
        params: Parameters.
        x: Evaluation points.
        jitter: ε > 0.
        metric: g; where it has negative eigenvalues the P×P side is used.
        probes: How many (default 16), or the probes ``[R, n]`` with n = min(Q, P). As many as n or
            more gives the complete set: exact.
        generator: Where probes are drawn from; None is torch's own.
        chunk: Probes at a time in passes through the model, for memory.
        kind: Where products come from, one of ``operators.KINDS``; None decides by size.
        bounded: Let the error contain the rounding of the Jacobian to the model's dtype.

    Returns:
        Estimate: the value (its gradient is the estimate above) and its error: spread over probes,
        truncation of Lanczos and rounding together; nan for one probe.

    Raises:
        InputError: Inside ``vmap``, or if probes of the wrong shape are given.
    """
    if number(jitter + 0 * next(iter(params.values())).sum()) is None:
        message = (
            "slq stops when its error is small, so it cannot be vmapped; use 'dense' or 'dual'"
        )
        raise InputError(message)
    operator = operators.build(f, params, x, metric, chunk, kind)
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
    error = _error(values, quadrature, complete)
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
    number_of = DEFAULT_PROBES if probes is None else probes
    if not isinstance(number_of, int) or number_of < 1:
        message = f"probes must be an integer of at least 1, or a tensor [R, {size}], got {probes}"
        raise InputError(message)
    if number_of >= size:
        return math.sqrt(size) * torch.eye(size, dtype=torch.float64, device=like.device)
    return draw.rademacher(number_of, size, generator, like.double())


def _error(values: Tensor, found: Quadrature, complete: bool) -> Tensor:
    """Spread over probes (none for the complete set, nan for one), truncation and rounding."""
    R = len(values)
    spread = torch.zeros_like(values[0])
    if not complete:
        spread = values.std() / math.sqrt(R) if R > 1 else torch.full_like(spread, torch.nan)
    error: Tensor = torch.hypot(spread, (found.truncation + found.rounding).mean())
    return error
