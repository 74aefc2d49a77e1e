"""What ``torch.compile`` may touch: ordinary passes through the model, and nothing around them.

Drawing ψ and counting steps is Python that changes at every step, which the compiler would trace
again and again. Forward mode has no compiled kernels, and a try that fails switches the compiler
off for that model, for ordinary passes too. None of this imports the compiler before it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Runs as written, and so does all that it calls (but for models that were compiled before)."""
    return _left_out(function, recursive=True)


def not_itself_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Runs as written; what it calls may be compiled."""
    return _left_out(function, recursive=False)


def _left_out(function: Callable[P, T], *, recursive: bool) -> Callable[P, T]:
    # torch.compiler.disable imports the compiler at once (seconds); this one at the first call.
    disabled: Callable[P, T] = torch._disable_dynamo(function, recursive)  # type: ignore[attr-defined]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def as_written(method: str) -> AbstractContextManager[Any]:
    """Compiled models run as written where an estimator differentiates them by ``torch.func``."""
    if method.startswith("fd") or "torch._dynamo" not in sys.modules:  # nothing is compiled then
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
