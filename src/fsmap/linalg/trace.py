r"""Tr 𝒥 with its standard error, by any of the estimators of :mod:`fsmap.linalg.estimators`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fsmap.errors import InputError
from fsmap.functional import Functional, State
from fsmap.linalg import points
from fsmap.linalg.differences import check_trace
from fsmap.linalg.estimators import ESTIMATORS, Estimator, Probes, by_name
from fsmap.linalg.metric import Metric
from fsmap.linalg.passes import check_chunk, check_params, over_probes, run
from fsmap.linalg.probes import FromGenerator
from fsmap.linalg.values import accumulate, wide
from fsmap.types import Estimate, Inputs, ModelFn, Params

METHODS = tuple(ESTIMATORS)


def trace(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    method: str | Estimator,
    probes: int | Params | Tensor = 1,
    beta: float = 1e-3,
    generator: torch.Generator | None = None,
    metric: Metric | Tensor | None = None,
    antithetic: bool = False,
    chunk: int | None = None,
) -> Estimate:
    r"""Tr 𝒥 with 𝒥 = E[JᵀgJ] over the points ``x``, differentiable in ``params``.

    If f was made by ``functional(module, last_layer=NAME)``, the block of that layer is taken in
    closed form, K·(‖h‖² + 1), by the estimators that probe the parameters in the Euclidean metric.

    Args:
        f: Model function.
        params: Parameters.
        x: Evaluation points, [S, ...].
        method: One of fd, fd_central, jvp, vjp, exact, or an
            :class:`~fsmap.linalg.estimators.Estimator`.
        probes: How many, or the probes themselves: ``{name: [R, ...]}``, for ``vjp`` ``[R, S·K]``.
        beta: Step of the differences (``fd``, ``fd_central``).
        generator: Where probes are drawn from; None is torch's own generator.
        metric: g; see :mod:`fsmap.metric`.
        antithetic: Use each ψ with −ψ (``fd`` only: the others are even in ψ).
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
    estimator = by_name(method, beta=beta, antithetic=antithetic, chunk=chunk)
    points.check(x)
    check_params(params)
    check_chunk(chunk)
    estimator.check(params)
    if antithetic and not getattr(estimator, "antithetic", False):
        message = f"antithetic probes change nothing for {estimator.name!r}, which is even in ψ"
        raise InputError(message)
    if isinstance(probes, int | float):
        if probes < 1 or probes != int(probes):
            message = f"probes must be an integer of at least 1, got {probes}"
            raise InputError(message)
        source = FromGenerator(generator)
        drawn = estimator.draw(source, f, params, x, int(probes), metric)
    else:
        estimator.check_probes(probes, f, params, x, metric)
        drawn = probes
    found = estimate(f, params, x, drawn, estimator=estimator, metric=metric, chunk=chunk)
    check_trace(found.value, f, params, x, getattr(estimator, "beta", None))
    return found


def estimate(
    f: ModelFn,
    params: Params,
    x: Inputs,
    probes: Probes,
    *,
    estimator: Estimator,
    metric: Metric | Tensor | None = None,
    chunk: int | None = None,
) -> Estimate:
    """:func:`trace` with the probes given and no check that looks at values: it can be vmapped."""
    values = evaluate(f, params, x, probes, estimator=estimator, metric=metric, chunk=chunk).values
    if probes is None:
        return Estimate(values[0], torch.zeros_like(values[0]))
    return Estimate(values.mean(), _standard_error(values))


class Evaluated(NamedTuple):
    """R from each probe, and the unperturbed pass if one was made."""

    values: Tensor  # [R]
    out: Tensor | None
    state: State | None


def evaluate(
    f: ModelFn,
    params: Params,
    x: Inputs,
    probes: Probes,
    *,
    estimator: Estimator,
    metric: Metric | Tensor | None = None,
    chunk: int | None = None,
) -> Evaluated:
    """The one place that puts R together: all probes, and the last layer's block if f knows it.

    Args:
        f: Model function.
        params: Parameters.
        x: Evaluation points.
        probes: What ``estimator.draw`` made.
        estimator: The estimator.
        metric: g.
        chunk: Probes at a time.

    Returns:
        The values; they can be differentiated, vmapped and compiled.
    """
    layer = f.last_layer if isinstance(f, Functional) else None
    if layer is not None and (not estimator.parameter_probes or metric is not None):
        layer = None
    if layer is not None:
        assert isinstance(f, Functional)
        assert isinstance(probes, dict)
        own = f.last_layer_names()
        probes = {n: torch.zeros_like(p) if n in own else p for n, p in probes.items()}

    def one(probe: Any) -> Tensor:
        return estimator.at(f, params, x, probe, metric).value

    first = None if probes is None else tree_map(lambda t: t[0], probes)
    value, out, state = estimator.at(f, params, x, first, metric)
    values = value[None]
    if probes is not None and len(tree_leaves(probes)[0]) > 1:
        rest = tree_map(lambda t: t[1:], probes)
        values = torch.cat([values, over_probes(f, one, rest, chunk=chunk)])
    if layer is not None:
        assert isinstance(f, Functional)
        if out is None or state is None:
            out, state = run(f, params, x)
        values = values + last_layer_trace(f, out, state.features[0])
    return Evaluated(values, out, state)


def last_layer_trace(f: Functional, out: Tensor, features: Tensor) -> Tensor:
    """Trace of the last linear layer's block, a mean over points.

    Args:
        f: Model function that knows its last layer.
        out: Its output, [S, ..., K].
        features: Input h of the layer, [S, ..., i].

    Returns:
        Per application of the layer K·‖h‖² for the weight and K for the bias.
    """
    names = f.last_layer_names()
    S, K = out.shape[0], out.shape[-1]
    value = out.new_zeros((), dtype=wide(out.dtype))
    if any(n.endswith("weight") for n in names):
        value = value + K * accumulate(features).square().sum() / S
    if any(n.endswith("bias") for n in names):
        value = value + out[0].numel()
    return value


def _standard_error(values: Tensor) -> Tensor:
    if len(values) < 2:
        return torch.full_like(values[0], torch.nan)
    spread: Tensor = values.detach().std()
    return spread / math.sqrt(len(values))
