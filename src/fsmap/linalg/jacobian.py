"""The Jacobian J = ∂f/∂θ at evaluation points, and its products with vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsmap.errors import ForwardModeError
from fsmap.functional import State, unravel
from fsmap.linalg.linearize import linearize
from fsmap.linalg.passes import FAILURES, detached, explain, flat, is_pointwise, outputs, with_state
from fsmap.linalg.second_order import SecondOrder, check_replaceable
from fsmap.types import Inputs, ModelFn, Params

__all__ = ["add", "is_pointwise", "jacobian", "jvp", "outputs", "tangents", "vjp", "with_state"]


def jacobian(f: ModelFn, params: Params, x: Inputs, *, chunk: int | None = None) -> Tensor:
    """J as one tensor, differentiable in ``params``.

    Args:
        f: Model function.
        params: Parameters.
        x: Points.
        chunk: Points (or, where points see each other, rows) differentiated at a time.

    Returns:
        ``[S, K, P]``.
    """
    return linearize(f, params, x, chunk=chunk).rows()


def jvp(f: ModelFn, params: Params, x: Inputs, psi: Params) -> tuple[Tensor, Tensor, State]:
    """One pass in forward mode.

    Args:
        f: Model function.
        params: Parameters.
        x: Points.
        psi: Tangent, shaped like ``params``.

    Returns:
        f(x) as f returns it, Jψ ``[S, K]``, and the state of the pass (empty for a plain function).
    """
    check_replaceable(f, "forward")

    def call(p: Params) -> tuple[Tensor, State]:
        with SecondOrder(forward_mode=True):
            return with_state(f, p, x)

    try:
        # torch.autograd.forward_ad is a fifth quicker, but some of its formulas (softmax) change
        # saved tensors in place, so that the gradient of the tangent fails.
        out, tangent, state = torch.func.jvp(call, (params,), (psi,), has_aux=True)  # type: ignore[misc]
    except FAILURES as error:
        failed = (
            "forward-mode differentiation failed{where} (use the estimator 'fd_central', which "
            "needs forward passes only)"
        )
        explain(error, f, x, params, failed, ForwardModeError)
    return out, flat(tangent, x), state


def vjp(f: ModelFn, params: Params, x: Inputs) -> tuple[Tensor, Callable[[Tensor], Params], State]:
    """One pass in reverse mode.

    Args:
        f: Model function.
        params: Parameters.
        x: Points.

    Returns:
        f(x) as f returns it, the map u ``[S, K]`` → Jᵀu, and the state of the pass.
    """
    if not torch.is_grad_enabled():  # some kernels then keep nothing for a derivative, such as LSTM
        with torch.enable_grad():
            return vjp(f, detached(params), x)

    check_replaceable(f, "reverse")

    def call(p: Params) -> tuple[Tensor, State]:
        with SecondOrder():
            return with_state(f, p, x)

    failed = "reverse-mode differentiation failed{where}"
    try:
        out, pull, state = torch.func.vjp(call, params, has_aux=True)  # type: ignore[misc]
    except FAILURES as error:
        explain(error, f, x, params, failed)

    def transpose(u: Tensor) -> Params:
        try:
            (cotangent,) = pull(u.reshape(out.shape).to(out.dtype))
        except FAILURES as error:
            explain(error, f, x, params, failed)
        return cotangent  # type: ignore[no-any-return]

    return out, transpose, state


def add(params: Params, scale: float, psi: Params) -> Params:
    """θ + scale·ψ."""
    return {name: p + scale * psi[name] for name, p in params.items()}


def tangents(params: Params, rows: Tensor) -> Params:
    """Vectors ``[..., P]`` as tangents ``{name: [..., *shape]}``, in the parameters' dtype."""
    return unravel(rows.to(next(iter(params.values())).dtype), params)
