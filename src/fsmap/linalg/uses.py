"""How parameters enter a model: as the weight of a linear layer or a convolution, or otherwise.

A weight W that enters through z = hWᵀ + b alone has a Jacobian of rank T per output:
∂f_k/∂W = Σ_t δ_kt hₜᵀ, with the layer's input h, the cotangent δ_k = ∂f_k/∂z and the sum over
the T places (tokens, pixels) where the layer is applied. :mod:`fsmap.linalg.factors` keeps it in
this form. What happens is read from the calls that the model makes (``torch.overrides``), not from
its modules: ``F.linear`` in a forward method, shared weights and plain functions are seen like an
``nn.Linear``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsmap.linalg.second_order import SecondOrder
from fsmap.types import Params

Window = dict[str, Any]  # stride, padding and dilation of a convolution


class Use(NamedTuple):
    """One call of a linear map with parameters that are watched, at one point."""

    weight: str | None  # names; None where it is not a parameter
    bias: str | None
    shape: tuple[int, ...]  # of the output at one point
    kernel: tuple[int, ...]  # of the weight, without its first dimension: (i,) or (c, *window)
    window: Window | None  # None for a linear layer

    @property
    def places(self) -> int:
        """T, the number of times that the layer is applied at one point."""
        return math.prod(self.shape) // self.width

    @property
    def width(self) -> int:
        """o, the number of outputs of the layer."""
        return self.shape[-1 if self.window is None else 1]

    def inputs(self, h: Tensor) -> Tensor:
        """Inputs of the layer at S points, [S, B, ...], as rows that meet the weight: [S, T, i]."""
        S = len(h)
        if self.window is None:
            return h.reshape(S, self.places, -1)
        flat = h.flatten(0, 1)
        if flat.ndim == 3:  # a convolution in one dimension is one in two
            flat = flat[:, :, None]
        patches = F.unfold(flat, **self.window)  # [SB, i, L]
        return patches.reshape(S, -1, *patches.shape[1:]).mT.reshape(S, self.places, -1)

    def grads(self, d: Tensor) -> Tensor:
        """Cotangents of the layer's output, [..., B, ...], as [..., T, o]."""
        lead = d.shape[: d.ndim - len(self.shape)]
        if self.window is None:
            return d.reshape(*lead, self.places, self.width)
        images = d.flatten(len(lead) + 2)  # [..., B, o, L]
        return images.mT.reshape(*lead, self.places, self.width)  # a view where B = 1


class Survey(NamedTuple):
    """What a pass at one point showed."""

    uses: tuple[Use, ...]
    others: tuple[str, ...]  # parameters that enter in another way
    outputs: int  # K

    @property
    def leads(self) -> bool:
        """Whether the first dimension of every layer is the point: a batch can go through whole."""
        return not self.others and all(use.shape[0] == 1 for use in self.uses)

    def numbers_per_point(self, params: Params) -> int:
        """How many numbers the Jacobian of one point takes while it is made."""
        return self._others(params) + sum(
            factored + (0 if use.places == 1 else written)
            for use, (factored, written) in zip(self.uses, self._sizes(), strict=True)
        )

    def compact_numbers(self, params: Params) -> int:
        """How many it takes afterwards, each block in the form that takes less."""
        return self._others(params) + sum(min(sizes) for sizes in self._sizes())

    def _others(self, params: Params) -> int:
        return self.outputs * sum(params[name].numel() for name in self.others)

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Numbers of each layer's block at one point: factored, written out."""
        for use in self.uses:
            fan_in, fan_out = math.prod(use.kernel), self.outputs * use.width
            yield use.places * (fan_in + fan_out), fan_in * fan_out


class Watch(SecondOrder):
    """Records the uses of parameters; with taps, adds tap i to the output of use i."""

    def __init__(self, params: Params, taps: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self._taps = taps
        self.uses: list[Use] = []
        self.inputs: list[Tensor] = []  # [B, ...] of each use
        self.others: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function; note what it does with watched parameters."""
        out = super().__torch_function__(func, types, args, kwargs)
        if not isinstance(out, Tensor | tuple | list):
            return out  # a question about shape or dtype
        seen = {
            self._names[id(t)]
            for t in _flat((*args, *(kwargs or {}).values()))
            if id(t) in self._names
        }
        if not seen or not any(isinstance(t, Tensor) for t in _flat((out,))):
            return out
        call = LINEAR_MAPS[func](*args, **(kwargs or {})) if func in LINEAR_MAPS else None
        if call is None or id(call.input) in self._names:
            self.others |= seen
            return out
        assert isinstance(out, Tensor)
        return self._record(call, out)

    def _record(self, call: Call, out: Tensor) -> Tensor:
        weight, bias = self._names.get(id(call.weight)), self._names.get(id(call.bias))
        kernel = tuple(call.weight.shape[1:])
        self.uses.append(Use(weight, bias, tuple(out.shape), kernel, call.window))
        self.inputs.append(call.input)
        if self._taps is None:
            return out
        index = len(self.uses) - 1
        if index >= len(self._taps) or self._taps[index].shape != out.shape:
            raise ChangedError
        return out + self._taps[index].to(out.dtype)

    def finish(self) -> list[Tensor]:
        """The inputs of all uses, if they were those that the taps are for.

        Returns:
            One tensor per use.

        Raises:
            ChangedError: If not.
        """
        if self._taps is not None and (self.others or len(self.uses) != len(self._taps)):
            raise ChangedError
        return self.inputs


class ChangedError(RuntimeError):
    """The model made other calls than it did when it was surveyed."""


class Call(NamedTuple):
    """The arguments of a linear map."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    window: Window | None


def survey(call: Callable[[], Tensor], params: Params) -> Survey:
    """Watch a pass at one point.

    Args:
        call: Evaluates the model at one point, at ``params``.
        params: The tensors to look for.

    Returns:
        The uses in the order of the calls. A parameter with one use of another kind, or with none
        that could be seen (compiled code), counts as other.
    """
    watch = Watch(params)
    with torch.no_grad(), watch:
        out = call()
    known = {name for use in watch.uses for name in (use.weight, use.bias)} - watch.others

    def keep(name: str | None) -> str | None:
        return name if name in known else None

    uses = tuple(use._replace(weight=keep(use.weight), bias=keep(use.bias)) for use in watch.uses)
    others = tuple(name for name in params if name not in known)
    return Survey(uses, others, out.numel())


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    """Everything in nested lists and tuples."""
    for item in items:
        if isinstance(item, tuple | list):
            yield from _flat(item)
        else:
            yield item


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    return Call(input, weight, bias, None)


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Call | None:
    if groups != 1 or isinstance(padding, str) or input.ndim != weight.ndim or weight.ndim > 4:
        return None

    def pair(value: Any, fill: int) -> tuple[int, int]:
        items = tuple(value) if isinstance(value, Sequence) else (value,) * (weight.ndim - 2)
        return (fill, items[0]) if len(items) == 1 else (items[0], items[1])

    window = {
        "kernel_size": pair(tuple(weight.shape[2:]), 1),
        "stride": pair(stride, 1),
        "padding": pair(padding, 0),
        "dilation": pair(dilation, 1),
    }
    return Call(input, weight, bias, window)


LINEAR_MAPS: dict[Callable[..., Any], Callable[..., Call | None]] = {
    F.linear: _linear,
    F.conv1d: _conv,
    F.conv2d: _conv,
}
