"""What ``torch.compile`` may touch: ordinary passes through the model, and nothing around them.

Drawing ψ and counting steps is Python that changes at every step, which the compiler would trace
again and again. Forward mode has no compiled kernels, and a try that fails switches the compiler
off for that model, for ordinary passes too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Runs as written, and so does all that it calls (but for models that were compiled before)."""
    made: Function = torch.compiler.disable(function)
    return made


def not_itself_compiled(function: Function) -> Function:
    """Runs as written; what it calls may be compiled."""
    made: Function = torch.compiler.disable(function, recursive=False)
    return made


def as_written(method: str) -> AbstractContextManager[Any]:
    """Compiled models run as written where an estimator differentiates them by ``torch.func``."""
    if method.startswith("fd"):  # ordinary passes
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
