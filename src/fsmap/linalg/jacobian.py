"""The Jacobian J = ∂f/∂θ at evaluation points: dense, or as products with vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_map

from fsmap.errors import UnsupportedModuleError
from fsmap.functional import State, count, differentiable_attention, unravel
from fsmap.linalg import points
from fsmap.types import Inputs, ModelFn, Params


def is_pointwise(f: ModelFn) -> bool:
    """Whether f treats each point alone; a plain function is taken to."""
    return bool(getattr(f, "pointwise", True))


def outputs(f: ModelFn, params: Params, x: Inputs) -> Tensor:
    """f at the points, trailing dimensions flattened: ``[S, K]``."""
    return _flat(f(params, x), points.count(x))


def jacobian(f: ModelFn, params: Params, x: Inputs, *, chunk: int | None = None) -> Tensor:
    """J as one tensor, differentiable in ``params``.

    Args:
        f: Model function. Where points do not see each other (all but active BatchNorm and dropout)
            each point is differentiated alone, S times cheaper than reverse mode over the batch.
        params: Parameters.
        x: Points.
        chunk: Points (or, where points see each other, rows) differentiated at a time.

    Returns:
        ``[S, K, P]``.
    """
    S = points.count(x)
    with differentiable_attention():
        if is_pointwise(f):

            def one(params: Params, point: Inputs) -> Tensor:
                return outputs(f, params, tree_map(lambda t: t[None], point))[0]  # [K]

            rows = vmap(jacrev(one), in_dims=(None, 0), chunk_size=chunk)(params, x)
        else:
            rows = jacrev(lambda p: outputs(f, p, x), chunk_size=chunk)(params)
    return torch.cat([r.flatten(2) for r in rows.values()], dim=-1).reshape(S, -1, count(params))


def jvp(f: ModelFn, params: Params, x: Inputs, psi: Params) -> tuple[Tensor, Tensor, State]:
    """One pass in forward mode.

    Args:
        f: Model function.
        params: Parameters.
        x: Points.
        psi: Tangent, shaped like ``params``.

    Returns:
        f(x) as f returns it, Jψ ``[S, K]``, and the state of the pass (empty for a plain function).

    Raises:
        UnsupportedModuleError: If a part of the model has no forward-mode derivative.
    """
    S = points.count(x)
    with differentiable_attention():
        try:
            out, tangent, state = torch.func.jvp(
                lambda p: with_state(f, p, x), (params,), (psi,), has_aux=True
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            message = (
                f"forward-mode differentiation failed in this model: {_first_line(error)} "
                "Use the estimator 'fd_central', which needs forward passes only."
            )
            raise UnsupportedModuleError(message) from error
    return out, _flat(tangent, S), state


def vjp(f: ModelFn, params: Params, x: Inputs) -> tuple[Tensor, Callable[[Tensor], Params], State]:
    """One pass in reverse mode: f(x), the map u ``[S, K]`` → Jᵀu, and the state of the pass."""
    with differentiable_attention():
        out, pull, state = torch.func.vjp(lambda p: with_state(f, p, x), params, has_aux=True)

    def transpose(u: Tensor) -> Params:
        with differentiable_attention():
            (cotangent,) = pull(u.reshape(out.shape).to(out.dtype))
        return cotangent

    return out, transpose, state


def with_state(f: ModelFn, params: Params, x: Inputs) -> tuple[Tensor, State]:
    """f and what its pass left behind; empty for a plain function."""
    call = getattr(f, "with_state", None)
    return (f(params, x), State({})) if call is None else call(params, x)


def add(params: Params, scale: float, psi: Params) -> Params:
    """θ + scale·ψ."""
    return {name: p + scale * psi[name] for name, p in params.items()}


def unit_tangents(params: Params, rows: Tensor) -> Params:
    """Vectors ``[R, P]`` as stacked tangents ``{name: [R, ...]}``."""
    return unravel(rows, params)


def _flat(out: Tensor, S: int) -> Tensor:
    if out.ndim == 0 or out.shape[0] != S:
        message = (
            f"the model returned shape {tuple(out.shape)} for {S} points; the first dimension must be the point. "
            "Pass forward=lambda module, x: ... to functional if the module's layout differs."
        )
        raise UnsupportedModuleError(message)
    return out.reshape(S, -1)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
