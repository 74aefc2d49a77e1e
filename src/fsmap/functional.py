"""A module as a pure function ``f(params, x)``: its points, its passes, its random layers.

Points are a tensor, or a dict or tuple of tensors that share their first dimension.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fsmap.errors import FsmapError, InputError, UnsupportedModuleError
from fsmap.types import Inputs, ModelFn, Params

Forward = Callable[..., Any]
"""``forward(module, x)``, and keyword arguments where they are given."""


class State(NamedTuple):
    """Buffers and output tensors after one pass through a module."""

    buffers: dict[str, Tensor]  # after the pass: running statistics
    parts: tuple[Tensor, ...] = ()  # tensors of the output, if the module returned an object


def take_apart(out: Any) -> tuple[tuple[Tensor, ...], Callable[[Iterable[Tensor]], Any]]:
    """The tensors of an output object, and a function that rebuilds it from other tensors."""
    leaves, spec = tree_flatten(out)
    kind = None  # for containers that pytree knows
    if len(leaves) == 1 and leaves[0] is out and not isinstance(out, Tensor):
        kind = type(out)
        leaves, spec = tree_flatten(dict(vars(out)))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    rest = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tensors, partial(_put_together, kind, spec, rest)


def _put_together(kind: Any, spec: Any, leaves: list[Any], tensors: Iterable[Tensor]) -> Any:
    given = iter(tensors)
    made = tree_unflatten([next(given) if leaf is Tensor else leaf for leaf in leaves], spec)
    if kind is None:
        return made
    new = kind.__new__(kind)
    new.__dict__.update(made)
    return new


class Functional:
    """A module as a pure function ``f(params, x)``; made by :func:`functional`.

    In training mode buffers are cloned inside every call, so that the module never changes and
    forward-mode differentiation works. The mode (``train`` or ``eval``) is read at the call.
    """

    def __init__(self, module: nn.Module, forward: Forward | None = None) -> None:
        self.module = module
        self._call = _Call(module, forward or call_module)
        self.parts: tuple[nn.Module, ...] = ()
        self.find_parts()
        self._names: set[str] = set()
        self._checked = False  # for reentrant checkpoints
        self.output: Callable[[Iterable[Tensor]], Any] | None = None  # of the last eager pass
        named = module.named_modules()
        self.scripted = [name for name, m in named if isinstance(m, torch.jit.ScriptModule)]

    def find_parts(self) -> bool:
        """Find the parts of the module; returns whether they are other ones than before."""
        parts = tuple(self.module.modules())
        if parts == self.parts:
            return False
        self.parts, self._unusual = parts, tuple(filter(may_couple, parts))
        return True

    @property
    def pointwise(self) -> bool:
        """Whether a point's output depends on that point alone, with no random stream."""
        return not any(is_random(m) or couples_points(m) for m in self._unusual)

    @property
    def padding(self) -> dict[str, int]:
        """``padding_idx`` of embeddings by parameter, if no layer shares it: a constant row."""
        # looked for each time: weights may have been tied since the last step
        parts = list(self.module.modules())
        uses = Counter(p for m in parts for p in m._parameters.values())
        layers = [m for m in parts if isinstance(m, nn.Embedding)]
        rows = {m._parameters.get("weight"): m.padding_idx for m in layers}
        found = {n: rows.get(p) for n, p in self.module.named_parameters() if uses[p] == 1}
        return {name: row for name, row in found.items() if row is not None}

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which parts of the module are in training mode."""
        return tuple(part.training for part in self.parts)

    def __call__(self, params: Params, x: Inputs) -> Tensor:
        """The module's output at ``params``."""
        return self.with_state(params, x)[0]

    def with_state(
        self, params: Params, x: Inputs, buffers: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, State]:
        """The output, and the buffers after a pass that starts from copies of ``buffers``."""
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._check_names(params)
        if buffers is None:
            buffers = dict(self.module.named_buffers()) if any(self.modes) else {}
        buffers = {n: b.clone() for n, b in buffers.items()}
        values = {f"module.{name}": t for name, t in {**params, **buffers}.items()}
        with no_recomputation():
            raw = functional_call(self._call, values, (x,))
        out = tensor_of(raw)
        parts: tuple[Tensor, ...] = ()
        if out is not raw:
            parts, put_together = take_apart(raw)
            if not compiling:
                self.output = put_together
        if not (compiling or self._checked) and out.grad_fn is not None:
            check_not_recomputed(out)
            self._checked = True
        return out, State({n: values[f"module.{n}"] for n in buffers}, parts)

    def _check_names(self, params: Params) -> None:
        """Raise for names that ``functional_call`` would ignore; a subset of names is allowed."""
        if params and params.keys() <= self._names:
            return
        self._names = {n for n, _ in self.module.named_parameters(remove_duplicate=False)}
        unknown = [name for name in params if name not in self._names]
        if unknown or not params:
            known = sorted(self._names)
            raise InputError(
                "params must be a dict named as in the module's named_parameters(), got "
                f"{unknown or 'an empty one'}; known: {known[:6]}{' ...' if len(known) > 6 else ''}"
            )

    def plain(self, x: Inputs) -> Tensor:
        """The tensor of an ordinary call, hooks and running statistics included."""
        return tensor_of(self._call(x))

    def raw(self, x: Inputs) -> Any:
        """The return value of an ordinary call."""
        return self._call(x)


class Wrapped(Functional):
    """A model function around another one; subclasses define :meth:`with_state`."""

    def __init__(self, inner: Functional) -> None:
        self.inner = inner
        self.module, self.scripted, self._call = inner.module, inner.scripted, inner._call
        self.parts, self._unusual = inner.parts, inner._unusual


def without_row(psi: Tensor, row: int | None) -> Tensor:
    """ψ of a parameter with zeros in one row."""
    if row is not None:
        psi = psi.clone()
        psi[row] = 0.0
    return psi


def check_differences(f: ModelFn) -> None:
    """Raise if differences would be far too large: torch rounds parameters in a householder map."""
    maps = [vars(m).get("orthogonal_map") for m in getattr(f, "parts", ())]
    if any(getattr(kind, "name", "") == "householder" for kind in maps):
        raise UnsupportedModuleError(
            "parametrizations.orthogonal rounds parameters (not in its orthogonal_map='matrix_exp')"
            ", and differences would be far too large. Use that map, or the estimator 'jvp'."
        )


def functional(module: nn.Module, *, forward: Forward | None = None) -> tuple[Functional, Params]:
    """Split a module into a pure function and its trainable parameters.

    Args:
        module: Any module; frozen parameters (``requires_grad=False``) and buffers become constants
            of ``f``, a parameter that is used twice appears once.
        forward: ``forward(module, x)``; by default ``module(x)``, ``module(**x)`` for a dict and
            ``module(*x)`` for a tuple.

    Returns:
        ``f`` and ``params``: ``f(params, x)`` equals ``module(x)``. The parameters are the module's
        own tensors, so a ``backward`` through ``f`` fills the module's ``.grad``.

    Example:
        >>> import torch, fsmap
        >>> f, params = fsmap.functional(torch.nn.Linear(2, 1))
        >>> f(params, torch.zeros(3, 2)).shape
        torch.Size([3, 1])
    """
    given: object = module
    if not isinstance(given, nn.Module):
        kind = getattr(given, "__name__", type(given).__name__)
        hint = "A function f(params, x) of your own needs no wrapping: pass it as f."
        raise UnsupportedModuleError(f"functional takes an nn.Module, got {kind}. {hint}")
    call: object = forward
    if not (call is None or callable(call)):
        raise InputError(f"forward must be a function of (module, x), got {call!r}")
    params: Params = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if not params:
        kind = type(module).__name__
        raise UnsupportedModuleError(
            f"{kind} has no trainable parameter. Set requires_grad on at least one of them."
        )
    lazy = [n for n, p in params.items() if is_lazy(p)]
    if lazy:
        raise UnsupportedModuleError(
            f"{lazy[0]!r} has no shape yet (a lazy module). Call the module once on data before."
        )
    return Functional(module, forward), params


class _Call(nn.Module):
    """A module for ``functional_call`` with one forward method for every calling convention."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self._forward_fn = forward

    def forward(self, x: Inputs) -> Any:
        return self._forward_fn(self.module, x)


def call_module(module: nn.Module, x: Inputs, **keywords: Any) -> Any:
    """``module(x)``, ``module(**x)`` for a dict and ``module(*x)`` for a tuple."""
    if isinstance(x, Mapping):
        return module(**x, **keywords)
    return module(*x, **keywords) if isinstance(x, tuple | list) else module(x, **keywords)


def tensor_of(out: Any) -> Tensor:
    """An output, or the logits of an output object."""
    tensor = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if isinstance(tensor, Tensor):
        return tensor
    raise UnsupportedModuleError(
        f"the module returned {type(out).__name__}, which is neither a tensor nor an object with "
        ".logits. Pass forward=lambda module, x: ... that picks the tensor, or, to keep the others "
        "too, makes an object such as types.SimpleNamespace(logits=tensor, rest=...)."
    )


def ravel(params: Params) -> Tensor:
    """All parameters as one vector, in the order of the dict."""
    return torch.cat([p.reshape(-1) for p in params.values()])  # [P]


def unravel(vector: Tensor, like: Params) -> Params:
    """A vector cut into the shapes of ``like``; the inverse of :func:`ravel`."""
    pieces = vector.split([p.numel() for p in like.values()], dim=-1)
    pairs = zip(like.items(), pieces, strict=True)
    return {name: piece.reshape(piece.shape[:-1] + p.shape) for (name, p), piece in pairs}


def count(params: Params) -> int:
    """P, the number of parameters."""
    return sum(p.numel() for p in params.values())


def num_points(x: Inputs) -> int:
    """S, the number of points."""
    return int(_tensors(x)[0].shape[0])


def plain_points(x: Any) -> Any:
    """A batch as p_X draws it: of a mapping (BatchEncoding) a dict, of a list or so a tuple."""
    return dict(x) if isinstance(x, Mapping) else tuple(x) if isinstance(x, list | tuple) else x


def check_points(x: Inputs) -> None:
    """Raise InputError if ``x`` is empty, has NaN or inf, or its tensors differ in S."""
    leaves = _tensors(x)
    if len({leaf.shape[:1] for leaf in leaves}) > 1 or not all(leaf.ndim for leaf in leaves):
        what = "the tensors of x must share their first dimension, the evaluation points"
        raise InputError(f"{what}, got {shapes(x)}")
    if any(leaf.numel() == 0 for leaf in leaves):
        raise InputError(f"x is empty: shapes {shapes(x)}. Give at least one evaluation point.")
    for leaf in leaves:
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            bad = (~torch.isfinite(leaf)).reshape(leaf.shape[0], -1).any(1).nonzero().flatten()
            shown = ", ".join(str(i) for i in bad[:5].tolist())
            found = f"NaN or inf in {len(bad)} of {len(leaf)} points (first: {shown})"
            raise InputError(f"x has {found}. Remove or impute them.")


def concat_points(a: Inputs, b: Inputs) -> Inputs:
    """Points of ``a`` followed by points of ``b``, in ``a``'s dtype and on its device."""
    try:
        return tree_map(lambda s, t: torch.cat([s, t.to(s)]), a, b)
    except (RuntimeError, ValueError, AttributeError) as error:
        raise InputError(
            f"points of shape {shapes(a)} and {shapes(b)} cannot be one batch: both need the same "
            f"keys and shapes of a point ({error})"
        ) from error


def shapes(x: Inputs) -> str:
    """The shapes of the points, for messages."""
    if isinstance(x, Tensor):
        return str(tuple(x.shape))
    return str(tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else t, x))


def take_points(x: Inputs, rows: slice | Tensor) -> Inputs:
    """Some of the points."""
    return tree_map(lambda t: t[rows], x)


def move_points(
    x: Inputs, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Inputs:
    """Points on a device; floating-point leaves in ``dtype``, others as they are."""
    in_order = device is not None and torch.device(device).type == "cuda"  # copies need no wait

    def move(t: Tensor) -> Tensor:
        kept = dtype if t.is_floating_point() else None
        return t.to(device=device, dtype=kept, non_blocking=in_order)

    return tree_map(move, x)


def as_device(name: str | torch.device) -> torch.device:
    """A device by name, such as ``"cuda:1"``; ``"auto"`` is CUDA if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {name!r}: there are auto, cpu, cuda, cuda:1 …") from error
    if device.type == "cpu":
        return device
    own = torch.accelerator.current_accelerator(check_available=True)
    found = torch.accelerator.device_count()
    if own is None or device.type != own.type:
        raise InputError(f"torch sees no {device.type.upper()} device here. Use device cpu.")
    if (device.index or 0) >= found:
        raise InputError(f"device {name}: torch sees {found} of them here")
    return device


def _tensors(x: Inputs) -> list[Tensor]:
    leaves: list[Any] = tree_leaves(x)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or type(x).__name__
        raise InputError(f"x must be a tensor, or a dict or tuple of tensors, got {kinds}")
    return leaves


# What torch raises for inputs that do not fit, and for derivatives that it does not have.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


def is_pointwise(f: ModelFn) -> bool:
    """Whether f may treat each point alone: its layers do; assumed of a plain function."""
    return bool(getattr(f, "pointwise", True))


def outputs(f: ModelFn, params: Params, x: Inputs) -> Tensor:
    """Outputs at the points, trailing dimensions flattened: ``[S, K]``."""
    return flat(run(f, params, x)[0], x)


def run(f: ModelFn, params: Params, x: Inputs) -> tuple[Tensor, State]:
    """Output and state of one plain pass; the state of a plain function is empty."""
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
    S, shape = num_points(x), tuple(getattr(out, "shape", ()))
    if shape[:1] != (S,):
        got = f"shape {shape}" if isinstance(out, Tensor) else type(out).__name__
        raise UnsupportedModuleError(
            f"the model returned {got} for {S} points; it must return a tensor whose first "
            "dimension is the point. If it differs, pass forward=lambda module, x: ..."
        )
    return out.reshape(S, -1)


def check_derivatives(what: str) -> None:
    """Raise InputError inside ``torch.inference_mode``, where torch drops derivatives silently."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        how = "Call it outside, or inside torch.no_grad(), which allows it"
        raise InputError(f"{what} needs derivatives, and torch.inference_mode() has none. {how}")


def check_params(params: object) -> None:
    """Raise InputError if ``params`` is not a dict of tensors."""
    values = params.values() if isinstance(params, dict) else ()
    if not values or not all(isinstance(p, Tensor) for p in values):
        got = [type(p).__name__ for p in values] or f"{type(params).__name__} {params!r:.40}"
        raise InputError(f"params must be a dict {{name: tensor}}, got {got}; see fsmap.functional")


def check_finite(params: Params) -> None:
    """Raise InputError with the name of the first parameter that has NaN or inf."""
    for name, p in params.items():
        if not torch.isfinite(p).all():
            raise InputError(f"params[{name!r}] has NaN or inf: training diverged earlier")


def finite(out: Tensor) -> Tensor:
    """An output ``[S, K]`` as it is; raises InputError if it has NaN or inf."""
    bad = int((~torch.isfinite(out)).any(1).sum())
    if bad:
        raise InputError(f"the model returns NaN or inf at {bad} of {len(out)} points")
    return out


def detached(params: Params) -> Params:
    """The same values, without their history."""
    return {name: p.detach() for name, p in params.items()}


def explain(
    error: Exception,
    f: ModelFn,
    x: Inputs,
    params: Params | None = None,
    failed: str = "",
    kind: type[UnsupportedModuleError] = UnsupportedModuleError,
) -> NoReturn:
    """Raise an error that says why a pass failed; with ``params`` f was being differentiated."""
    if isinstance(error, FsmapError | torch.OutOfMemoryError):
        raise error
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    where = _where(error, f)
    if params is not None:
        try:
            with torch.enable_grad():  # so that checkpointed layers are found
                f(params, x)
        except FsmapError:
            raise
        except FAILURES:
            pass
        else:
            raise kind(f"{failed.format(where=where)}: {reason}") from error
    raise InputError(
        f"the model cannot be evaluated at x of shape {shapes(x)}{where}: {reason}. Give points of "
        "the shape, dtype and device that the model takes."
    ) from error


def _where(error: Exception, f: ModelFn) -> str:
    """The innermost module on the way to the error, by name and class."""
    names = {id(m): n for n, m in f.module.named_modules()} if isinstance(f, Functional) else {}
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    inside = [owner for owner in owners if id(owner) in names]
    if not inside:
        return ""
    name, kind = names[id(inside[-1])], type(inside[-1]).__name__
    return f", in {name!r} ({kind})" if name else f", in {kind}"


# Names of drop rates in torch and in model libraries.
DROP_RATES = ("p", "dropout", "drop_prob", "dropout_p", "attention_dropout", "drop_rate")


class NoiseReplay:
    """Repeats the dropout masks of the first pass: call it before each further pass."""

    def __init__(self, f: ModelFn, params: Params) -> None:
        device = next(iter(params.values())).device
        self._restore: list[Callable[[], None]] = []
        traced = torch.compiler.is_compiling() or capturing(device)
        if not traced or any(map(is_random, getattr(f, "parts", ()))):  # torch refuses in a capture
            self._restore.append(partial(torch.set_rng_state, torch.get_rng_state()))
            if device.type == "cuda":
                state = torch.cuda.get_rng_state(device)
                self._restore.append(partial(torch.cuda.set_rng_state, state, device))

    def __call__(self) -> None:
        """Restore the random state."""
        for restore in self._restore:
            restore()


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """A module in ``eval()`` mode; each part gets its own mode back."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def replaced_forward(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context manager: another ``forward`` of a module; one that an object had is put back."""
    own = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Context manager: torch's CPU and device generators are restored at the end, seeded before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        if seed is not None and device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def is_random(module: nn.Module) -> bool:
    """Whether a pass draws from torch's generator, by the names of drop rates."""
    if not module.training:
        return False
    own, shared = vars(module), type(module)
    for name in DROP_RATES:  # getattr(module, name) is slow for a missing attribute
        rate = own[name] if name in own else getattr(shared, name, None)
        if isinstance(rate, int | float) and 0 < rate <= 1:
            return True
    return isinstance(module, nn.RReLU)


def may_couple(module: nn.Module) -> bool:
    """Whether the module can draw random numbers or couple points, in either mode."""
    named = any(hasattr(module, name) for name in DROP_RATES)
    return named or isinstance(module, _BatchNorm | nn.RReLU)


def couples_points(module: nn.Module) -> bool:
    """Whether a point's output depends on the other points."""
    return isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)


class Replacing(TorchFunctionMode):
    """Context manager that replaces functions wherever a model calls them."""

    def __init__(self, replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function or its replacement."""
        if func is torch.Tensor.unflatten:  # calls super(), which the compiler cannot trace here
            func = torch.unflatten
        return self._replaced.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Use attention kernels that have all derivatives (the fused ones lack forward mode)."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


RECOMPUTES = (
    "the model uses activation checkpointing, reversible layers or saved-tensor hooks: a pass at "
    "given parameters would be recomputed in the backward pass with the module's own, and its "
    "gradient would be wrong without an error. Switch checkpointing off for this model, or use "
    "fsmap.InPlacePenalty, which moves the parameters themselves."
)


@contextmanager
def no_recomputation() -> Iterator[None]:
    """Raise for layers that run again in the backward pass, at the module's own parameters then."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    try:
        with disable_saved_tensors_hooks(RECOMPUTES):
            yield
    except RuntimeError as error:
        frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
        if saved_tensors_hooks.__enter__.__code__ in frames:  # saved-tensor hooks
            raise UnsupportedModuleError(RECOMPUTES) from error
        raise


def check_not_recomputed(out: Any) -> None:
    """Raise if the graph of an output holds a reentrant checkpoint or a reversible layer."""
    nodes, visited = [getattr(out, "grad_fn", None)], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if re.search("Checkpoint|Reversible", type(node).__name__):  # of Reformer, RevNets
            raise UnsupportedModuleError(RECOMPUTES)
        nodes.extend(parent for parent, _ in node.next_functions)


HALF = (torch.bfloat16, torch.float16)


def clock(device: torch.device) -> float:
    """Seconds; on CUDA after all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def number(tensor: Tensor) -> float | None:
    """The value of a 0-dimensional tensor, or None under vmap, in a compiled or captured graph."""
    if torch.compiler.is_compiling() or capturing(tensor.device):
        return None
    try:
        return float(tensor.detach())
    except RuntimeError:  # what torch raises for .item() on a tensor that vmap has batched
        return None


def holds(condition: Tensor, *, otherwise: bool) -> bool:
    """Whether a condition holds, or ``otherwise`` where :func:`number` gives None."""
    value = number(condition)
    return otherwise if value is None else bool(value)


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in at least single precision, for sums of squares."""
    return tensor.float() if tensor.dtype in HALF else tensor


def aligned(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both as ``[B, ..., K]`` in the working dtype; never broadcasts [B] against [B, 1]."""
    if out.dim() == y.dim() + 1 == 2 and out.shape[1] == 1:
        y = y.unsqueeze(1)
    if y.dim() == out.dim() + 1 == 2 and y.shape[1] == 1:
        out = out.unsqueeze(1)
    if out.shape != y.shape or out.dim() == 0:
        raise InputError(
            f"outputs {list(out.shape)} and targets {list(y.shape)} do not match: they must have "
            "the same shape [B, ...] ([B] and [B, 1] count as the same). Reshape y, or change the "
            "model's last layer."
        )
    out = accumulate(out if out.dim() > 1 else out.unsqueeze(1))
    return out, y.reshape(out.shape).to(out.dtype)


def check_positive(name: str, value: float | Tensor) -> None:
    """Raise InputError if an entry of a scale is zero, negative, infinite or nan."""
    scale = torch.as_tensor(value).detach().reshape(-1)
    bad = scale[~(torch.isfinite(scale) & (scale > 0))]
    if len(bad):
        raise InputError(f"{name} must be finite and > 0, got {bad[0].item():g}")


ALWAYS = 2**26  # bytes up to which memory is not checked
SHARE = 0.8  # of the free memory that may be used


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, control-group limits included."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + reserved)
    found = re.search(r"MemAvailable:\s+(\d+)", _read("/proc/meminfo"))
    free = 1024 * int(found[1]) if found else 8 * 2**30  # macOS, Windows: assume a small laptop
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return ""


def fits(needed: int, device: torch.device) -> bool:
    """Whether ``needed`` bytes may be allocated."""
    return needed <= ALWAYS or needed <= SHARE * free_bytes(device)
