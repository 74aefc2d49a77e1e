"""The functions a model runs on: others in their place, with all derivatives, none run twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fsmap.errors import UnsupportedModuleError


class Replacing(TorchFunctionMode):
    """Within it, functions are replaced by others, wherever a model calls them."""

    def __init__(self, replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        """Say which.

        Args:
            replaced: What stands for a function.
        """
        super().__init__()
        self._replaced = replaced

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, or what stands for it."""
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
    "the model uses activation checkpointing or saved-tensor hooks: a pass at given parameters "
    "would be recomputed in the backward pass with the module's own, and its gradient would be "
    "wrong without an error. Switch checkpointing off for this model, or use fsmap.InPlacePenalty, "
    "which moves the parameters themselves."
)


@contextmanager
def no_recomputation() -> Iterator[None]:
    """Refuse layers that run again in the backward pass: at the module's own parameters, then."""
    if not torch.is_grad_enabled():
        yield
        return

    def refuse(*_: Any) -> None:
        raise UnsupportedModuleError(RECOMPUTES)

    reentrant: Any = torch.utils.checkpoint.CheckpointFunction
    apply = reentrant.apply
    reentrant.apply = refuse
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(RECOMPUTES):
            yield
    except RuntimeError as error:
        if RECOMPUTES in str(error):
            raise UnsupportedModuleError(RECOMPUTES) from error
        raise
    finally:
        reentrant.apply = apply
