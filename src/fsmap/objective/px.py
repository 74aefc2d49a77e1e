r"""Evaluation distributions $p_X$: the geometry of function space (section 3.2 of the paper).

``sample(n, generator)`` draws n points ``[n, ...]``; the generator is required, and a CPU generator
gives the same points whatever device they end on. Distributions are never changed after they are
made; ``to`` returns another one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

from fsmap.errors import InputError
from fsmap.objective.continuous import Normal, Uniform
from fsmap.objective.empirical import Empirical, Lattice
from fsmap.objective.sampling import EvalDistribution, check_draw, moved
from fsmap.types import Inputs

__all__ = ["Empirical", "EvalDistribution", "Lattice", "Mixture", "Normal", "Uniform", "as_px"]


class Mixture:
    """Each point from one of several distributions, chosen independently by their weights.

    The numbers of points per component are therefore multinomial, and the points are in random
    order. Components that draw without replacement do so within their share of one draw.

    Args:
        components: Whatever :func:`as_px` accepts; all must draw points of one shape.
        weights: Not negative, in any unit; None: equal ones.

    Raises:
        InputError: If there are no components or the weights do not fit them.
    """

    def __init__(
        self, components: Sequence[Any], weights: Sequence[float] | Tensor | None = None
    ) -> None:
        if isinstance(components, Mapping):
            message = "a mixture takes a list of components and a list of weights, got a dict."
            raise InputError(message)
        self.components = [as_px(component) for component in components]
        given = torch.ones(len(self.components)) if weights is None else torch.as_tensor(weights)
        self.weights = given.detach().to("cpu", torch.float64)
        wrong = self.weights.shape != (len(self.components),) or not self.components
        if wrong or not torch.isfinite(self.weights).all() or not (self.weights >= 0).all():
            message = (
                f"a mixture needs one finite weight >= 0 for each component, got "
                f"{len(self.components)} components and weights {self.weights.tolist()}."
            )
            raise InputError(message)
        if not self.weights.sum() > 0:
            message = "all weights of the mixture are zero. At least one must be positive."
            raise InputError(message)

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Draw ``n`` points.

        Args:
            n: How many.
            generator: Source of randomness.

        Returns:
            ``[n, ...]``.

        Raises:
            InputError: If the components draw points of different shapes.
        """
        check_draw(n, generator)
        weights = self.weights.to(generator.device)
        label = torch.multinomial(weights, n, replacement=True, generator=generator)  # [n]
        counts = label.bincount(minlength=len(self.components)).tolist()
        pairs = zip(self.components, counts, strict=True)
        parts = [c.sample(count, generator) for c, count in pairs if count]
        place = label.argsort(stable=True).argsort()  # where the sorted points belong

        def join(*tensors: Tensor) -> Tensor:
            return torch.cat(tensors)[place.to(tensors[0].device)]

        try:
            return tree_map(join, *parts)
        except (TypeError, RuntimeError, ValueError) as error:
            shapes = [[tuple(t.shape) for t in tree_leaves(part)] for part in parts]
            message = (
                f"the components of the mixture draw points that do not fit together: {shapes}. "
                "They must agree in structure, shape and device."
            )
            raise InputError(message) from error

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same mixture with all components on another device or in another dtype."""
        other = copy.copy(self)
        other.components = [component.to(device, dtype) for component in self.components]
        return other

    def __repr__(self) -> str:
        return f"Mixture({self.components}, weights={self.weights.tolist()})"


class FromFunction:
    """Points by a function of the user's, ``(n, generator) -> x``."""

    def __init__(self, function: Callable[[int, torch.Generator], Inputs]) -> None:
        self.function = function
        self.target: tuple[torch.device | str | None, torch.dtype | None] = (None, None)

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Call the function.

        Args:
            n: How many points.
            generator: Source of randomness.

        Returns:
            What the function returned, moved where ``to`` said.

        Raises:
            InputError: If it did not return ``n`` points.
        """
        check_draw(n, generator)
        x = self.function(n, generator)
        shapes = [tuple(getattr(t, "shape", ())) for t in tree_leaves(x)]
        if not shapes or any(shape[:1] != (n,) for shape in shapes):
            message = (
                f"{self!r} was asked for {n} points and returned {type(x).__name__} of shapes "
                f"{shapes}. Return a tensor [n, ...], or a dict or tuple of them."
            )
            raise InputError(message)
        return moved(x, *self.target)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same function, its points moved."""
        other = copy.copy(self)
        other.target = (device or self.target[0], dtype or self.target[1])
        return other

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"FromFunction({name})"


def _check_signature(function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind(1, None)
    except ValueError:  # no signature to look at (built-in)
        return
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        message = (
            f"{name}{inspect.signature(function)} cannot be an evaluation distribution: it is "
            "called as function(n, generator) and returns n points"
        )
        raise InputError(message) from error


def as_px(obj: Any) -> EvalDistribution:
    """An evaluation distribution out of what a user may hand over.

    Args:
        obj: A distribution of this module (or anything with ``sample(n, generator)`` and ``to``);
            a tensor, array, tuple or dict of tensors, Dataset or DataLoader (points of a data
            set); or a function ``(n, generator) -> x``.

    Returns:
        The distribution.

    Raises:
        InputError: If it is something else.
    """
    if isinstance(obj, EvalDistribution) and not isinstance(obj, type):
        return obj
    if isinstance(obj, Tensor | np.ndarray | tuple | Mapping | Dataset | DataLoader):
        return Empirical(obj)
    if callable(obj) and not isinstance(obj, type | nn.Module):
        _check_signature(obj)
        return FromFunction(obj)
    message = (
        f"{obj!r} ({type(obj).__name__}) is no evaluation distribution. Allowed are px.Uniform, "
        "px.Normal, px.Empirical, px.Lattice and px.Mixture, a tensor, array, tuple or dict of "
        "tensors, a Dataset or DataLoader, or a function (n, generator) -> x."
    )
    raise InputError(message)
