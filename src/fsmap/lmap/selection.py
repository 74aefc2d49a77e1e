"""R over a part of the model: some of its layers, or a random sample of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import Functional, NoiseReplay
from fsmap.linalg.metric import Metric, Weights, Whitening
from fsmap.px import Stream, generator
from fsmap.types import Inputs, Params

Layers = str | Iterable[str] | Callable[[str], bool]
"""Names of layers or parameters, with ``*`` and ``?``, or a function of a parameter's name."""


def trainable(module: nn.Module, layers: Layers | None = None) -> Params:
    """The trainable parameters that count.

    Args:
        module: The model.
        layers: Which; None for all.

    Returns:
        Live tensors, keyed as in ``named_parameters()``.

    Raises:
        InputError: If no trainable parameter is among ``layers``.
        UnsupportedModuleError: If there is no trainable parameter (any more).
    """
    found: Params = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if not found:
        message = (
            f"no parameter of {type(module).__name__} is trainable, so there is no R. Set "
            "requires_grad on some of them, or call the model alone."
        )
        raise UnsupportedModuleError(message)
    if layers is None:
        return found
    chosen = {n: p for n, p in found.items() if _matches(n.replace("_orig_mod.", ""), layers)}
    if not chosen:
        known = sorted({n.rpartition(".")[0] or n for n in found})
        message = (
            f"layers={layers!r} matches no trainable parameter. Layers with trainable parameters: "
            f"{known[:8]}{' ...' if len(known) > 8 else ''}. Give names, patterns such as "
            "'block.*', or a function of a parameter's name."
        )
        raise InputError(message)
    return chosen


def _matches(name: str, layers: Layers) -> bool:
    if callable(layers):
        return bool(layers(name))
    patterns = (layers,) if isinstance(layers, str) else layers
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)


class Outputs(NamedTuple):
    """What a model returns: the size V of its last dimension, and the linear layer behind it."""

    size: int
    head: str | None

    def draw(self, num: int, stream: Stream) -> Tensor:
        """``[num]`` of them without replacement, the same on every rank and micro-batch."""
        source = generator(stream.seed, stream.step, "outputs")
        return torch.randperm(self.size, generator=source)[:num].sort().values


def survey(f: Functional, params: Params, x: Inputs) -> Outputs:
    """Look at one pass for what makes the output; the random stream is left as it was.

    Args:
        f: Model function.
        params: Parameters.
        x: Points.

    Returns:
        The size of the last dimension, and the linear layer whose output is returned as it is (None
        where there is no such layer, or it is compiled and cannot be cut).
    """
    layers = {n: m for n, m in f.module.named_modules() if type(m) is nn.Linear}
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        m.register_forward_hook(lambda _, __, out, name=n: seen[name].append(out))
        for n, m in layers.items()
        if "_orig_mod" not in n
    ]
    replay = NoiseReplay(f, params)
    try:
        with torch.no_grad():
            out = f(params, x)
    finally:
        replay()
        for hook in hooks:
            hook.remove()
    if f.last_layer is not None:
        return Outputs(int(out.shape[-1]), f.last_layer)
    heads = [n for n, outs in seen.items() if len(outs) == 1 and outs[0] is out]
    return Outputs(int(out.shape[-1]), heads[0] if heads else None)


def cut(f: Functional, rows: Tensor, head: str | None) -> Functional:
    """The model with only some of its outputs, ``[S, ..., k]``.

    Where the linear layer behind them is known only those rows of it are multiplied, so that
    nothing of size V exists; elsewhere the output is indexed.

    Args:
        f: Model function.
        rows: Which outputs, ``[k]``.
        head: Name of the linear layer.

    Returns:
        A model function of the same parameters.
    """

    def some(module: nn.Module, x: Inputs) -> Tensor:
        if head is None:
            return f.tensor(module, x)[..., rows]
        layer = module.get_submodule(head)
        assert isinstance(layer, nn.Linear)
        with _only(layer, rows):
            return f.tensor(module, x)

    return Functional(f.module, some, f.last_layer)


@contextmanager
def _only(layer: nn.Linear, rows: Tensor) -> Iterator[None]:
    def forward(x: Tensor) -> Tensor:
        bias: Tensor | None = layer.bias
        return F.linear(x, layer.weight[rows], None if bias is None else bias[rows])

    layer.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del layer.forward


class SomeOutputs(NamedTuple):
    """A metric in which only some outputs count, each V/k times: for a pass that returns all."""

    rows: Tensor  # [k]
    size: int  # V
    metric: Metric | None = None  # None or per-point weights

    def at(self, x: Inputs, out: Tensor) -> Whitening:
        """Weights that are zero on the other outputs."""
        mask = out.new_zeros(self.size)
        mask[self.rows] = self.size / len(self.rows)
        weights = mask.repeat(out.shape[1] // self.size)  # [K]
        if isinstance(self.metric, Weights):
            weights = weights * self.metric.spread(x, out)
        return Weights(weights.expand(out.shape)).at(x, out)
