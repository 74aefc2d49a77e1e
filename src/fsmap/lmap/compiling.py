"""``torch.compile`` around R: one graph for the pass, its tangent and what the loss needs.

Forward-mode tangents do not survive a call of a compiled module (pytorch issue 187284), but
``torch.compile`` around ``torch.func.jvp`` works. So :func:`fsmap.lmap.core.evaluate` is compiled
whole, drawing and counting stay outside, and compiled modules inside never see tangents.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.errors import FallbackWarning, FsmapError
from fsmap.functional import is_random, seeded

TOLERANCE = 0.02  # largest relative difference of compiled and eager that is not rounding
HALF_TOLERANCE = 0.1  # under autocast: R of one draw is off by up to 5 %, eager or compiled


class Compiled:
    """Compile functions on their first use, check them once, and run eagerly if that fails."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        """Keep the options of ``torch.compile``; None: compile only if a call asks for it."""
        self.options = options
        self._functions: dict[bool, Callable[..., Any]] = {}
        self._checked = self._failed = False

    def __reduce__(self) -> Any:
        """A copy belongs to another module, and compiles its own functions."""
        return Compiled, (self.options,)

    def plain(self, function: Callable[..., Any], *args: Any) -> Any:
        """An ordinary pass."""
        return self._get(function, whole=False)(*args)

    def checked(
        self,
        function: Callable[..., Any],
        eager: Callable[[], Any],
        args: tuple[Any, ...],
        module: nn.Module,
    ) -> Any:
        """The compiled function of ``args``; the R of its first result is compared with eager."""
        if self._failed:
            return eager()
        try:
            compiled = self._get(function, whole=True)
            why = None if self._checked else _difference(compiled, eager, args, module)
            if why is None:
                self._checked = True
                return compiled(*args)
        except (FsmapError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            causes = [line.strip() for line in lines[1:] if "Error" in line][:1]
            why = f"it cannot be compiled: {': '.join([lines[0], *causes])}"
        self._failed = True
        message = f"R of {type(module).__name__} runs eagerly from now on: {why}"
        warnings.warn(message, FallbackWarning, stacklevel=5)
        return eager()

    def _get(self, function: Callable[..., Any], *, whole: bool) -> Callable[..., Any]:
        if whole not in self._functions:
            options = {**(self.options or {}), **({"fullgraph": True} if whole else {})}
            self._functions[whole] = torch.compile(_with_own_code(function), **options)
        return self._functions[whole]


def _difference(
    compiled: Callable[..., Any], eager: Callable[[], Any], args: tuple[Any, ...], module: nn.Module
) -> str | None:
    """A text on how compiled and eager R or gradient differ; None if they agree."""
    params = [p for p in module.parameters() if p.requires_grad]
    device = params[0].device
    tolerance = HALF_TOLERANCE if torch.is_autocast_enabled(device.type) else TOLERANCE
    with seeded(None, device):
        try:
            ordinary = _with_gradient(eager().R, params)
            with torch.autocast(device.type, enabled=False):
                exact = _with_gradient(eager().R, params)
        except torch.OutOfMemoryError:  # a compiled pass needs less
            name = type(module).__name__
            message = f"compiled R of {name} was not compared with the eager one: out of memory"
            warnings.warn(message, FallbackWarning, stacklevel=6)
            return None
        found = _with_gradient(compiled(*args).R, params)
    if any(is_random(m) for m in module.modules()):
        return None  # random layers draw other numbers in a compiled graph
    names = ("R", "the gradient of R")
    for what, ours, theirs, right in zip(names, found, ordinary, exact, strict=True):
        # In half precision gradients are off by tens of percent in deep networks: compiled ones may
        # be twice as far from full precision as eager ones.
        size = right.norm().clamp_min(1e-30)
        off, usual = float((ours - right).norm() / size), float((theirs - right).norm() / size)
        if not off <= 2 * usual + tolerance:
            return (
                f"{what} of the compiled model differs from full precision by {off:.1%}, of the "
                f"eager one by {usual:.1%}"
            )
    return None


def _with_gradient(value: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """R, and its gradient as one vector, in float64."""
    grads = torch.autograd.grad(value, params, allow_unused=True, materialize_grads=True)
    return value.detach().double(), torch.cat([g.detach().double().flatten() for g in grads])


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a method with a code object of its own: torch counts recompilations by code."""
    method: Any = function
    f, code = method.__func__, method.__code__.replace()
    copy = FunctionType(code, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    return MethodType(copy, method.__self__)
