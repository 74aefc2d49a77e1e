r"""Tr 𝒥, the Laplacian regularizer R(θ) of L-MAP (``eq:mc-laplace``), by five estimators.

==============  =================================  ============================================
``fd``          ‖f(θ+βψ) − f(θ)‖²/β², ψ ~ N(0, I)  the paper's; full precision inside autocast
``fd_central``  ‖f(θ+βψ/2) − f(θ−βψ/2)‖²/β²        as ``fd``, even in ψ
``jvp``         ‖Jψ‖²                              exact in β, safe in bf16; no ReLU kinks
``vjp``         ‖Jᵀv‖², v random signs             few outputs, models without forward mode
``exact``       Σ_k ‖∇f_k‖²                        K reverse passes; cheap for linear layers
==============  =================================  ============================================

All are means over evaluation points and sums over outputs, in the metric g.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import Functional, NoiseReplay
from fsmap.linalg import points
from fsmap.linalg import probes as draw
from fsmap.linalg.estimators import Pass, estimate, exact, last_layer_trace
from fsmap.linalg.metric import Metric, resolve
from fsmap.linalg.passes import check_chunk, check_params, outputs, over_probes, run
from fsmap.linalg.values import HALF
from fsmap.types import Estimate, Inputs, ModelFn, Params

__all__ = [
    "METHODS",
    "PARAMETER_PROBES",
    "Pass",
    "check_method",
    "estimate",
    "evaluate",
    "exact",
    "last_layer_trace",
    "resolve",
    "trace",
]

METHODS = ("fd", "fd_central", "jvp", "vjp", "exact")
PARAMETER_PROBES = ("fd", "fd_central", "jvp")  # the ones whose probe is a ψ


def trace(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    method: str,
    probes: int | Params | Tensor = 1,
    beta: float = 1e-3,
    generator: torch.Generator | None = None,
    metric: Metric | Tensor | None = None,
    antithetic: bool = False,
    last_layer: str | None = None,
    chunk: int | None = None,
) -> Estimate:
    r"""Tr 𝒥 with 𝒥 = E[JᵀgJ] over the points ``x``, differentiable in ``params``.

    Args:
        f: Model function.
        params: Parameters.
        x: Evaluation points, [S, ...].
        method: One of fd, fd_central, jvp, vjp, exact; see the table at the top of this module.
        probes: How many, or the probes themselves: ``{name: [R, ...]}``, for ``vjp`` ``[R, S·K]``.
        beta: Step of the differences (``fd``, ``fd_central``).
        generator: Where probes are drawn from; None is torch's own generator.
        metric: g; see :mod:`fsmap.metric`.
        antithetic: Use each ψ with −ψ (``fd`` only: the others are even in ψ).
        last_layer: ``"exact"`` takes the last linear layer's block in closed form, K·(‖h‖² + 1);
            the probes then leave that layer alone. Needs ``functional(module, last_layer=NAME)``.
        chunk: Points (``exact``) or probes (others) at a time.

    Returns:
        Estimate: mean and standard error over probes; nan for one probe, zero for ``exact``.

    Example:
        >>> import torch, fsmap
        >>> f, params = fsmap.functional(torch.nn.Linear(3, 1))
        >>> x = torch.eye(3)
        >>> round(fsmap.trace(f, params, x, method="exact").value.item(), 6)  # mean of ‖x‖² + 1
        2.0
    """
    check_method(method)
    points.check(x)
    check_params(params)
    check_chunk(chunk)
    _check_options(f, params, method, beta, antithetic, last_layer, metric)
    drawn = None if method == "exact" else _draw(f, params, x, method, probes, generator, metric)
    return evaluate(
        f,
        params,
        x,
        drawn,
        method=method,
        beta=beta,
        metric=metric,
        antithetic=antithetic,
        last_layer=last_layer,
        chunk=chunk,
    )


def evaluate(
    f: ModelFn,
    params: Params,
    x: Inputs,
    drawn: Params | Tensor | None,
    *,
    method: str,
    beta: float = 1e-3,
    metric: Metric | Tensor | None = None,
    antithetic: bool = False,
    last_layer: str | None = None,
    chunk: int | None = None,
) -> Estimate:
    """:func:`trace` with the probes given and no check that looks at values: it can be vmapped."""
    if drawn is None:
        value = exact(f, params, x, metric=metric, chunk=chunk)
        return Estimate(value, torch.zeros_like(value))
    if antithetic:
        assert isinstance(drawn, dict)
        drawn = draw.antithetic(drawn)
    probes, block = _last_layer_block(f, params, x, drawn, last_layer)

    def one(probe: Params | Tensor) -> Tensor:
        return estimate(f, params, x, probe, method=method, beta=beta, metric=metric).value

    values = over_probes(f, one, probes, chunk=chunk) + block  # [R]
    if antithetic:
        values = values.reshape(2, -1).mean(0)
    return Estimate(values.mean(), _standard_error(values))


def check_method(method: str) -> None:
    """Refuse an unknown estimator.

    Args:
        method: Its name.

    Raises:
        InputError: With the list of the known ones.
    """
    if method not in METHODS:
        message = f"unknown trace estimator {method!r}; known: {', '.join(METHODS)}"
        raise InputError(message)


def _check_options(
    f: ModelFn,
    params: Params,
    method: str,
    beta: float,
    antithetic: bool,
    last_layer: str | None,
    metric: Metric | Tensor | None,
) -> None:
    message = None
    half = next((p.dtype for p in params.values() if p.dtype in HALF), None)
    if method.startswith("fd") and not beta > 0:
        message = f"beta must be > 0, got {beta:g}"
    elif method.startswith("fd") and half is not None:
        name = str(half).removeprefix("torch.")
        message = f"differences of size {beta=:g} drown in {name} parameters; use 'jvp'"
    elif antithetic and method != "fd":
        message = f"antithetic probes change nothing for {method!r}, which is even in ψ; use 'fd'"
    elif last_layer not in (None, "exact"):
        message = f"last_layer must be None or 'exact', got {last_layer!r}"
    elif last_layer and method not in PARAMETER_PROBES:
        known = ", ".join(PARAMETER_PROBES)
        message = f"last_layer='exact' goes with {known}, not with {method!r}"
    elif last_layer and metric is not None:
        message = "last_layer='exact' is for the Euclidean metric; leave metric out"
    elif last_layer and not (isinstance(f, Functional) and f.last_layer):
        message = "last_layer='exact' needs f from functional(module, last_layer=NAME)"
    if message:
        raise InputError(message)


def _draw(
    f: ModelFn,
    params: Params,
    x: Inputs,
    method: str,
    given: int | Params | Tensor,
    generator: torch.Generator | None,
    metric: Metric | Tensor | None,
) -> Params | Tensor:
    if isinstance(given, int | float) and (given < 1 or given != int(given)):
        message = f"probes must be an integer of at least 1, got {given}"
        raise InputError(message)
    if method in PARAMETER_PROBES:
        if isinstance(given, int):
            return draw.normal(params, given, generator)
        draw.check(given, params)
        return given
    replay = NoiseReplay(f, params)
    with torch.no_grad():
        out = outputs(f, params, x)
        size = resolve(metric, x, out).size
    replay()
    if isinstance(given, int):
        return draw.rademacher(given, size, generator, out)
    if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != size:
        got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        message = f"probes of 'vjp' must be [R, {size}], got {got}"
        raise InputError(message)
    return given


def _last_layer_block(
    f: ModelFn, params: Params, x: Inputs, drawn: Params | Tensor, last_layer: str | None
) -> tuple[Params | Tensor, Tensor | float]:
    """Probes with the last layer's entries at zero, and that layer's own trace in closed form."""
    if last_layer is None:
        return drawn, 0.0
    assert isinstance(f, Functional)
    assert isinstance(drawn, dict)
    names = f.last_layer_names()
    masked = {n: torch.zeros_like(p) if n in names else p for n, p in drawn.items()}
    out, state = run(f, params, x)
    return masked, last_layer_trace(f, out, state.features[0])


def _standard_error(values: Tensor) -> Tensor:
    if len(values) < 2:
        return torch.full_like(values[0], torch.nan)
    spread: Tensor = values.detach().std()
    return spread / math.sqrt(len(values))
