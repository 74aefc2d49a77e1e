"""Follows units through a module, in one pass in which every torch function is looked at.

Nothing is compiled and nothing symbolic is run, so any module that runs can be followed as far as
its functions are known; the first unknown one closes the units that enter it, and is named. What is
concluded from the result is checked numerically, so a wrong turn here costs a finding, never the
truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fsmap.assess.wiring.facts import Facts, Wiring, level
from fsmap.assess.wiring.units import Member
from fsmap.functional import Functional, differentiable_attention
from fsmap.types import Inputs, Params


class Units(NamedTuple):
    """Where a tensor carries units: dimensions ``dims`` together count units · block entries."""

    node: int
    dims: tuple[int, ...]
    block: int = 1


class View(NamedTuple):
    """A parameter, or a transpose of it: dimension i of the tensor is its ``order[i]``."""

    name: str
    order: tuple[int, ...]


class Tracer(TorchFunctionMode):
    """Looks at every torch function; the handlers are in :mod:`fsmap.assess.wiring.handlers`."""

    def __init__(self, module: nn.Module, handlers: dict[str, Callable[..., None]]) -> None:
        super().__init__()
        self.facts = Facts()
        self.handlers = handlers
        self.tracked: Any = WeakIdKeyDictionary()  # tensor -> Units
        self.views: Any = WeakIdKeyDictionary()  # tensor -> View
        for name, p in module.named_parameters():
            self.views[p] = View(name, tuple(range(p.ndim)))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function, then note what it did."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        name = function_name(func)
        if made or name == "__setitem__":
            self.facts.bytes += sum(t.numel() * t.element_size() for t in made)
            self._note(name, func, out, args, kwargs)
        return out

    def _note(self, name: str, func: Any, out: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        handler = self.handlers.get(name)
        if handler is None:
            self.close(name, (args, kwargs))
            return
        try:
            handler(self, func, out, *args, **kwargs)
        except (TypeError, ValueError, IndexError):  # a form of the call that the handler lacks
            self.close(name, (args, kwargs), f"{name}: called in a form that is not known")

    def units(self, x: Any) -> Units | None:
        """The units that a tensor carries."""
        return self.tracked.get(x) if isinstance(x, Tensor) else None

    def view(self, x: Any) -> View | None:
        """The parameter that a tensor is."""
        return self.views.get(x) if isinstance(x, Tensor) else None

    def close(self, name: str, inputs: Any, reason: str | None = None) -> None:
        """An end of the road: what enters can no longer be permuted or scaled.

        Args:
            name: The function.
            inputs: Its arguments.
            reason: Why it could not be followed; by default, that it is not known.
        """
        for leaf in tree_leaves(inputs):
            units, view = self.units(leaf), self.view(leaf)
            if units is not None:
                self.facts.pin(units.node, reason or f"{name}: units are not followed through it")
            if view is not None:
                self.facts.opaque.add(view.name)
                if reason:
                    self.facts.unfollowed[reason] = None
                else:
                    self.facts.applied.setdefault(name, {})[view.name] = None

    def make(self, out: Tensor, dims: tuple[int, ...], units: int) -> int:
        """New units on a tensor."""
        node = self.facts.node(units)
        self.tracked[out] = Units(node, tuple(d % out.ndim for d in dims))
        return node

    def member(self, node: int, member: Member) -> None:
        """A parameter belongs to these units."""
        self.facts.members.append((node, member))

    def read(self, name: str, x: Tensor, dim: int, member: Member) -> None:
        """A layer reads units along ``dim``; ``member.units`` is the size of that dimension."""
        units = self.units(x)
        size = member.units
        if units is None:
            node = self.facts.node(size)  # data, or what an unknown function made of it
            self.facts.pin(node)
            self.member(node, member)
            return
        count = self.facts.units[units.node]
        if units.dims != (dim % x.ndim,) or count * units.block != size:
            self.close(name, x, f"{name}: reads along another dimension than that of the units")
            node = self.facts.node(size)
            self.facts.pin(node)
            self.member(node, member)
            return
        self.member(units.node, member._replace(units=count, block=units.block))
        self.facts.levels.append((units.node, level(x, units.dims, count)))


def trace(f: Functional, x: Inputs) -> Wiring:
    """Follow one pass of a module.

    Args:
        f: The module as a function; it is called as it is, without gradients.
        x: Points.

    Returns:
        Its units: who makes them, who reads them, what happens in between.
    """
    from fsmap.assess.wiring.handlers import HANDLERS

    tracer = Tracer(f.module, HANDLERS)
    params: Params = dict(f.module.named_parameters())
    with torch.no_grad(), differentiable_attention(), tracer:
        out = f(params, x)
    for leaf in tree_leaves(out):
        units = tracer.units(leaf)
        if units is not None:
            tracer.facts.pin(units.node)
    return tracer.facts.summary()


def function_name(func: Any) -> str:
    """Short name of a torch function: ``relu``, ``add``, ``T``; in-place variants as the others."""
    full: str = resolve_name(func) or getattr(func, "__name__", str(func))
    parts = [part for part in full.split(".") if part not in ("__get__", "__call__")]
    name = parts[-1]
    if name.startswith("__") and name.endswith("__"):
        plain = name.strip("_")
        arithmetic = {"iadd": "add", "radd": "add", "isub": "sub", "imul": "mul", "rmul": "mul"}
        arithmetic |= {"itruediv": "div", "truediv": "div", "rmatmul": "__rmatmul__"}
        return arithmetic.get(plain, plain if plain in ("add", "sub", "mul", "matmul") else name)
    return name.rstrip("_") if not name.startswith("_") else name


def reshaped(units: Units, count: int, old: Iterable[int], new: Iterable[int]) -> Units | None:
    """Where units are after a reshape, or None where entries of different units have been mixed.

    Args:
        units: Before.
        count: How many units there are.
        old: Shape before.
        new: Shape after.

    Returns:
        After.
    """
    old, new = tuple(old), tuple(new)
    first, last = units.dims[0], units.dims[-1]
    if units.dims != tuple(range(first, last + 1)):
        return None
    before, after = math.prod(old[:first]), math.prod(old[last + 1 :])
    start = next((i for i in range(len(new) + 1) if math.prod(new[:i]) == before), None)
    if start is None:
        return None
    while start < len(new) and new[start] == 1 and count > 1:
        start += 1
    for end in range(start, len(new)):
        size = math.prod(new[start : end + 1])
        if size == count:
            return Units(units.node, tuple(range(start, end + 1)))
        if size > count:
            block = size // count
            tail = math.prod(new[end + 1 :])
            whole = size % count == 0 and block * tail == units.block * after
            return Units(units.node, (end,), block) if whole and end == start else None
    return None
