"""``torch.compile`` around R: one graph for the pass, its tangent and what the loss needs.

Forward-mode tangents do not survive a call of a compiled module (pytorch issue 187284), but
``torch.compile`` around ``torch.func.jvp`` works. So :func:`fsmap.lmap.core.evaluate` is compiled
whole, drawing and counting stay outside, and compiled modules inside never see tangents.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fsmap.errors import FallbackWarning, FsmapError
from fsmap.functional import is_random

P = ParamSpec("P")
T = TypeVar("T")

TOLERANCE = 0.02
"""Largest relative difference between compiled and eager, besides what rounding explains."""


WHAT = ("R", "the gradient of R")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as written if it is called from code that is being compiled."""
    # torch.compiler.disable imports the compiler at once (seconds); this one at the first call.
    disabled: Callable[P, T] = torch._disable_dynamo(function, True)  # type: ignore[attr-defined]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def as_written(module: nn.Module, *, forward_mode: bool) -> AbstractContextManager[Any]:
    """Compiled modules inside run as written, so that tangents are not lost in them."""
    if not forward_mode or "torch._dynamo" not in sys.modules or not _holds_compiled(module):
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _holds_compiled(module: nn.Module) -> bool:
    return any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None
        for m in module.modules()
    )


class Compiled:
    """Functions that are compiled on their first use, checked once, and eager where that fails."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        """Keep the options of ``torch.compile``; None: nothing is compiled unless asked for."""
        self.options = options
        self._functions: dict[str, Callable[..., Any]] = {}
        self._checked = self._failed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """A copy belongs to another module, and compiles its own functions."""
        return Compiled(self.options)

    def __getstate__(self) -> dict[str, Any]:
        """Compiled functions are not pickled."""
        return {**Compiled(self.options).__dict__}

    def plain(self, function: Callable[..., T], *args: Any) -> T:
        """An ordinary pass."""
        found: T = self._get("plain", function)(*args)
        return found

    def checked(
        self,
        function: Callable[..., T],
        eager: Callable[[], T],
        args: tuple[Any, ...],
        module: nn.Module,
        value: Callable[[T], Tensor],
    ) -> T:
        """The compiled function, compared with the eager one on its first call.

        Args:
            function: What is compiled, whole.
            eager: The same, as written.
            args: Of the function.
            module: The model, for messages and parameters.
            value: R of a result.

        Returns:
            The result.
        """
        if self._failed:
            return eager()
        if not self._checked and not self._check(function, eager, args, module, value):
            return eager()
        try:
            found: T = self._get("whole", function, fullgraph=True)(*args)
        except (FsmapError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._give_up(module, f"it cannot be compiled: {_first_line(error)}")
            return eager()
        return found

    def _get(self, name: str, function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
        if name not in self._functions:
            options = {**(self.options or {}), **fixed}
            self._functions[name] = torch.compile(_with_own_code(function), **options)
        return self._functions[name]

    def _check(
        self,
        function: Callable[..., T],
        eager: Callable[[], T],
        args: tuple[Any, ...],
        module: nn.Module,
        value: Callable[[T], Tensor],
    ) -> bool:
        """Whether compiled and eager agree in R and its gradient."""
        params = [p for p in module.parameters() if p.requires_grad]
        device = params[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            eagerly = _with_gradient(value(eager()), params)
            with torch.autocast(device.type, enabled=False):
                wanted = _with_gradient(value(eager()), params)
            try:
                result = self._get("whole", function, fullgraph=True)(*args)
                got = _with_gradient(value(result), params)
            except (FsmapError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                self._give_up(module, f"it cannot be compiled: {_first_line(error)}")
                return False
        self._checked = True
        if any(is_random(m) for m in module.modules()):
            return True  # random layers draw other numbers in a compiled graph
        for what, ours, theirs, exact in zip(WHAT, got, eagerly, wanted, strict=True):
            # In half precision eager passes are off by tens of percent in deep networks: compiled
            # ones may be twice as far from full precision, no more.
            size = exact.norm().clamp_min(1e-30)
            off, usual = float((ours - exact).norm() / size), float((theirs - exact).norm() / size)
            if not off <= 2 * usual + TOLERANCE:
                self._give_up(
                    module,
                    f"{what} of the compiled model differs from full precision by {off:.1%}, of "
                    f"the eager one by {usual:.1%}",
                )
                return False
        return True

    def _give_up(self, module: nn.Module, why: str) -> None:
        self._failed = True
        name = type(module).__name__
        message = f"R of {name} runs eagerly from now on: {why}"
        warnings.warn(message, FallbackWarning, stacklevel=6)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a method with a code object of its own: torch counts recompilations by code."""
    inner: Any = function
    plain = inner.__func__
    copy = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__,
        plain.__closure__,
    )  # fmt: skip
    return MethodType(copy, inner.__self__)


def _with_gradient(value: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """R, and its gradient as one vector, in float64."""
    grads = torch.autograd.grad(value, params, allow_unused=True)
    parts = [
        (torch.zeros_like(p) if g is None else g).detach().double().flatten()
        for g, p in zip(grads, params, strict=True)
    ]
    return value.detach().double(), torch.cat(parts)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
