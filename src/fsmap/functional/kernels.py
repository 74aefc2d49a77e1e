"""Replace the functions that a model calls, and find parts that run twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fsmap.errors import UnsupportedModuleError


class Replacing(TorchFunctionMode):
    """Within it, functions are replaced by others, wherever a model calls them."""

    def __init__(self, replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        """Keep what is called instead of each function."""
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
    "the model uses activation checkpointing or saved-tensor hooks: a pass at given parameters "
    "would be recomputed in the backward pass with the module's own, and its gradient would be "
    "wrong without an error. Switch checkpointing off for this model, or use fsmap.InPlacePenalty, "
    "which moves the parameters themselves."
)


@contextmanager
def no_recomputation() -> Iterator[None]:
    """Raise for layers that run again in the backward pass: at the module's own parameters, then.

    Checkpointing with ``use_reentrant=True`` is found by :func:`check_not_recomputed`.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(RECOMPUTES):
            yield
    except RuntimeError as error:
        if RECOMPUTES in str(error):
            raise UnsupportedModuleError(RECOMPUTES) from error
        raise


def check_not_recomputed(out: Any) -> None:
    """Raise if the graph of an output holds a reentrant checkpoint."""
    nodes, seen = [getattr(out, "grad_fn", None)], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise UnsupportedModuleError(RECOMPUTES)
        nodes.extend(parent for parent, _ in node.next_functions)
