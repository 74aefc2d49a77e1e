"""A gradient function as one flat graph of tensor operations, compiled where that is wanted.

Tracing runs the function once on tensors without content and records every operation below the
derivatives: forward mode, reverse mode and autocast are resolved, what is left are convolutions
and arithmetic on the inputs. The mathematics is thereby the eager function's by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fsmap.train.images.gradient import Gradient
from fsmap.train.images.step import GradientOfInputs
from fsmap.types import Params

Flat = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Traced:
    """A flat function, and the structures of what goes in and comes out."""

    call: Flat
    inputs: TreeSpec
    outputs: TreeSpec

    def __call__(
        self, params: Params, buffers: dict[str, Tensor], inputs: dict[str, Tensor], /
    ) -> Gradient:
        """The gradient, as the function that was traced gives it."""
        flat, structure = tree_flatten((params, buffers, inputs))
        assert structure == self.inputs
        with torch.no_grad():  # the derivatives are inside
            found: Gradient = tree_unflatten(self.call(*flat), self.outputs)
        return found


_known: dict[object, Traced] = {}
"""By everything the trace depends on: runs of one process that differ in seed share it."""


def traced(
    function: GradientOfInputs,
    params: Params,
    buffers: dict[str, Tensor],
    inputs: dict[str, Tensor],
    *,
    compiled: bool,
    key: tuple[object, ...] | None,
) -> Traced:
    """Trace a gradient function, or find the trace of an equal one.

    Args:
        function: Pure, without random layers.
        params: Example parameters.
        buffers: Example buffers.
        inputs: Example inputs: draws, images, ψ.
        compiled: Whether inductor makes kernels of the graph.
        key: What decides the operations, besides the shapes of the examples; None: not known, so
            the trace is shared with nobody.

    Returns:
        A function of the same arguments.
    """
    detached = {n: p.detach() for n, p in params.items()}
    flat, takes = tree_flatten((detached, buffers, inputs))
    shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in flat)
    whole = (key, compiled, str(takes), shapes)
    if key is not None and whole in _known:
        return _known[whole]
    structure: list[TreeSpec] = []

    def call(*leaves: Tensor) -> list[Tensor]:
        found, spec = tree_flatten(function(*tree_unflatten(list(leaves), takes)))
        structure.append(spec)
        return found

    graph: Any = make_fx(call, tracing_mode="fake")(*flat)
    run = _kernels(graph, flat) if compiled else graph
    made = Traced(run, takes, structure[0])
    if key is not None:
        _known[whole] = made
    return made


def _kernels(graph: torch.fx.GraphModule, flat: list[Tensor]) -> Flat:
    """Compile; the tracing context lets inductor keep what it made for the next process."""
    from torch import _inductor
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from fsmap.train.images.merging import MergeConvolutions

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    examples: list[Any] = [mode.from_tensor(t) for t in flat]
    with tracing(TracingContext(mode)):
        options = {"post_grad_custom_pre_pass": MergeConvolutions()}
        run: Any = _inductor.compile(graph, examples, options=options)
    return run  # type: ignore[no-any-return]
