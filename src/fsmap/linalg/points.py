"""Evaluation points, a plain pass of a model through them, and precision of values.

Points are a tensor, or a dict or tuple of tensors that share their first dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fsmap.errors import FsmapError, InputError, UnsupportedModuleError
from fsmap.functional import State, differentiable_attention
from fsmap.types import Inputs, ModelFn, Params


def count(x: Inputs) -> int:
    """S, the number of points."""
    return int(_tensors(x)[0].shape[0])


def check(x: Inputs) -> None:
    """Raise InputError if ``x`` is empty, has NaN or inf, or its tensors disagree about S."""
    leaves = _tensors(x)
    if any(leaf.ndim == 0 for leaf in leaves):
        message = (
            "x needs a first dimension for the points, got a 0-dimensional tensor. Use x[None]."
        )
        raise InputError(message)
    sizes = {int(leaf.shape[0]) for leaf in leaves}
    if len(sizes) > 1:
        message = f"the tensors of x must share their first dimension, got {sorted(sizes)}"
        raise InputError(message)
    if any(leaf.numel() == 0 for leaf in leaves):
        found = [tuple(leaf.shape) for leaf in leaves]
        message = f"x is empty: shapes {found}. At least one evaluation point is needed."
        raise InputError(message)
    for leaf in leaves:
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            bad = (~torch.isfinite(leaf)).reshape(leaf.shape[0], -1).any(1).nonzero().flatten()
            shown = ", ".join(str(i) for i in bad[:5].tolist())
            message = (
                f"x has NaN or inf in {len(bad)} of {len(leaf)} points (first: {shown}). "
                "Remove or impute them."
            )
            raise InputError(message)


def concat(a: Inputs, b: Inputs) -> Inputs:
    """Points of ``a`` followed by points of ``b``, in ``a``'s dtype and on its device."""
    try:
        return tree_map(lambda s, t: torch.cat([s, t.to(s)]), a, b)
    except (RuntimeError, ValueError, AttributeError) as error:
        message = f"points of shape {shapes(a)} and {shapes(b)} cannot be one batch: {error}"
        raise InputError(message) from error


def shapes(x: Inputs) -> str:
    """The shapes of the points, for messages."""
    if isinstance(x, Tensor):
        return str(tuple(x.shape))
    return str(tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else t, x))


def take(x: Inputs, rows: slice | Tensor) -> Inputs:
    """Some of the points."""
    return tree_map(lambda t: t[rows], x)


def to(
    x: Inputs, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Inputs:
    """Points on a device; floating-point leaves in ``dtype``, others as they are."""
    in_order = device is not None and torch.device(device).type == "cuda"  # copies need no wait

    def move(t: Tensor) -> Tensor:
        kept = dtype if t.is_floating_point() else None
        return t.to(device=device, dtype=kept, non_blocking=in_order)

    return tree_map(move, x)


def _tensors(x: Inputs) -> list[Tensor]:
    leaves: list[Any] = tree_leaves(x)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves}) or [type(x).__name__]
        message = f"x must be a tensor, or a dict or tuple of tensors, got {', '.join(kinds)}"
        raise InputError(message)
    return leaves


# What torch raises for inputs that do not fit, and for derivatives that it does not have.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


def is_pointwise(f: ModelFn) -> bool:
    """Whether f treats each point alone; a plain function is taken to."""
    return bool(getattr(f, "pointwise", True))


def outputs(f: ModelFn, params: Params, x: Inputs) -> Tensor:
    """F at the points, trailing dimensions flattened: ``[S, K]``."""
    return flat(run(f, params, x)[0], x)


def run(f: ModelFn, params: Params, x: Inputs) -> tuple[Tensor, State]:
    """One plain pass: f, and what the pass left behind (nothing, for a plain function)."""
    try:
        return with_state(f, params, x)
    except FAILURES as error:
        explain(error, f, x)


def with_state(f: ModelFn, params: Params, x: Inputs) -> tuple[Tensor, State]:
    """:func:`run` with torch's own errors, for use inside its transforms."""
    call = getattr(f, "with_state", None)
    return (f(params, x), State({})) if call is None else call(params, x)


def flat(out: Tensor, x: Inputs) -> Tensor:
    """An output as ``[S, K]``; raises UnsupportedModuleError if dimension 0 is not the point."""
    S = count(x)
    if out.ndim == 0 or out.shape[0] != S:
        message = (
            f"the model returned shape {tuple(out.shape)} for {S} points; the first dimension must "
            "be the point. Pass forward=lambda module, x: ... to functional if the layout differs."
        )
        raise UnsupportedModuleError(message)
    return out.reshape(S, -1)


def check_params(params: object) -> None:
    """Raise InputError if ``params`` is not a dict of tensors."""
    if not isinstance(params, dict) or not params:
        got = "an empty dict" if isinstance(params, dict) else type(params).__name__
        message = f"params must be a dict {{name: tensor}}, got {got}. fsmap.functional makes one."
        raise InputError(message)
    other = next((n for n, p in params.items() if not isinstance(p, Tensor)), None)
    if other is not None:
        message = f"params[{other!r}] must be a tensor, got {type(params[other]).__name__}"
        raise InputError(message)


def check_finite(params: Params) -> None:
    """Raise InputError with the name of the first parameter that has NaN or inf."""
    for name, p in params.items():
        if not torch.isfinite(p).all():
            message = f"params[{name!r}] has NaN or inf: training diverged before this point"
            raise InputError(message)


def finite(out: Tensor) -> Tensor:
    """An output ``[S, K]`` as it is; raises InputError if it has NaN or inf."""
    if not torch.isfinite(out).all():
        bad = int((~torch.isfinite(out)).any(1).sum())
        message = f"the model returns NaN or inf at {bad} of {len(out)} points"
        raise InputError(message)
    return out


def check_chunk(chunk: object) -> None:
    """Raise InputError if ``chunk`` is neither None nor an integer above 0."""
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        message = f"chunk must be None or an integer of at least 1, got {chunk!r}"
        raise InputError(message)


def detached(params: Params) -> Params:
    """The same values, without their history."""
    return {name: p.detach() for name, p in params.items()}


def over_probes(
    f: ModelFn, one: Callable[..., Tensor], *probes: Params | Tensor, chunk: int | None = None
) -> Tensor:
    """``one``, a function of one probe, for all of them, stacked; ``chunk`` at a time.

    Together if that is possible, in turn if f has random layers or a part that cannot be vmapped.
    """
    R = len(tree_leaves(probes)[0])
    if R > 1 and is_pointwise(f):
        try:
            with differentiable_attention():  # the fused kernels cannot be vmapped
                values: Tensor = vmap(one, chunk_size=chunk)(*probes)
            return values
        except (RuntimeError, UnsupportedModuleError):
            pass  # if vmap is not the reason it fails again below
    return torch.stack([one(*tree_map(lambda t, r=r: t[r], probes)) for r in range(R)])


def explain(
    error: Exception,
    f: ModelFn,
    x: Inputs,
    params: Params | None = None,
    failed: str = "",
    kind: type[UnsupportedModuleError] = UnsupportedModuleError,
) -> NoReturn:
    """Raise an error that says why a pass failed.

    If ``params`` are given, f failed while being differentiated: a plain pass is tried to tell a
    missing derivative (``kind`` is raised, with ``failed``) from points that do not fit
    (InputError).
    """
    if isinstance(error, FsmapError | torch.OutOfMemoryError):
        raise error
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if params is not None and _works(f, params, x):
        message = f"{failed.format(where=_where(error, f))}: {reason}"
        raise kind(message) from error
    message = (
        f"the model cannot be evaluated at x of shape {shapes(x)}{_where(error, f)}: "
        f"{reason}. Give points of the shape, dtype and device that the model takes."
    )
    raise InputError(message) from error


def _works(f: ModelFn, params: Params, x: Inputs) -> bool:
    """Whether a plain pass works; what fsmap itself has to say about it comes first."""
    try:
        with torch.enable_grad():  # so that checkpointed layers are found
            f(params, x)
    except FsmapError:
        raise
    except FAILURES:
        return False
    return True


def _where(error: Exception, f: ModelFn) -> str:
    """The innermost module on the way to the error, by name and class."""
    root = getattr(f, "module", None)
    names = {id(m): n for n, m in root.named_modules()} if isinstance(root, nn.Module) else {}
    found, step = None, error.__traceback__
    while step is not None:
        owner = step.tb_frame.f_locals.get("self")
        found = owner if id(owner) in names else found
        step = step.tb_next
    if found is None:
        return ""
    name = names[id(found)]
    kind = type(found).__name__
    return f", in {name!r} ({kind})" if name else f", in {kind}"


HALF = (torch.bfloat16, torch.float16)


def number(tensor: Tensor) -> float | None:
    """The value of a 0-dimensional tensor, or None where it has not one."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    try:
        return float(tensor.detach())
    except RuntimeError:  # what torch raises for .item() on a tensor that vmap has batched
        return None


def holds(condition: Tensor, *, otherwise: bool) -> bool:
    """Whether a condition holds, or ``otherwise`` where that cannot be asked."""
    value = number(condition)
    return otherwise if value is None else bool(value)


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in at least single precision, for sums of squares."""
    return tensor.to(wide(tensor.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of :func:`accumulate`."""
    return torch.float32 if dtype in HALF else dtype


def check_positive(name: str, value: float | Tensor) -> None:
    """Raise InputError if an entry of a scale is zero, negative, infinite or nan."""
    scale = torch.as_tensor(value).detach().reshape(-1)
    bad = scale[~(torch.isfinite(scale) & (scale > 0))]
    if len(bad):
        message = (
            f"{name} must be finite and > 0, got {bad[0].item():g} "
            f"({len(bad)} of {len(scale)} entries). Give a positive standard deviation or scale."
        )
        raise InputError(message)
