r"""Evaluation distributions $p_X$: the geometry of function space (section 3.2 of the paper).

``sample(n, generator)`` draws n points ``[n, ...]``; the generator is required, and a CPU generator
gives the same points whatever device they end on. Distributions are never changed after they are
made; ``to`` returns another one.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from fsmap.errors import InputError
from fsmap.functional import (
    check_points,
    check_positive,
    count,
    move_points,
    num_points,
    take_points,
    unravel,
)
from fsmap.linalg.probes import rademacher, randn_like
from fsmap.types import Inputs, Params

Coordinates = float | Sequence[float] | Tensor
"""One number for all dimensions of a point, or one for each."""

Shape = int | Sequence[int] | None
"""Shape of one point; None: that of the coordinates."""

Device = torch.device | str | None

MAX_BYTES = 4 * 2**30
"""A Dataset or DataLoader that holds more than this is not read into memory."""


@runtime_checkable
class EvalDistribution(Protocol):
    """p_X, the evaluation distribution: the inputs at which the function matters."""

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Draw ``n`` points, ``[n, ...]``."""

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Self:
        """The same distribution on another device or in another floating-point dtype."""


class _Held:
    """A distribution that holds tensors."""

    _tensors: ClassVar[tuple[str, ...]]

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Self:
        """The same distribution on another device or in another floating-point dtype."""
        other = copy.copy(self)
        for name in self._tensors:
            setattr(other, name, move_points(getattr(self, name), device, dtype))
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(getattr(self, self._tensors[0]).shape)})"


class Uniform(_Held):
    """Uniform on a box.

    Args:
        low: Lower corner: a number for all dimensions, or one for each.
        high: Upper corner.
        shape: Shape of one point. None: the shape of the corners, and ``(1,)`` for two numbers.

    Example:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> Uniform(0, 1, shape=(3, 32, 32)).sample(5, generator).shape
        torch.Size([5, 3, 32, 32])
    """

    _tensors = ("low", "high")

    def __init__(self, low: Coordinates, high: Coordinates, shape: Shape = None) -> None:
        self.low, self.high = box(low, high, shape)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw ``n`` points, ``[n, *shape]``."""
        return torch.lerp(self.low, self.high, _draw(torch.rand, n, self.low, generator))


class Normal(_Held):
    """Independent Gaussians.

    Args:
        mean: Center: a number for all dimensions, or one for each.
        std: Standard deviation, likewise.
        shape: Shape of one point. None: that of ``mean`` and ``std``, and ``(1,)`` for numbers.

    Example:
        >>> import torch
        >>> Normal(shape=13).sample(5, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 13])
    """

    _tensors = ("mean", "std")

    def __init__(
        self, mean: Coordinates = 0.0, std: Coordinates = 1.0, shape: Shape = None
    ) -> None:
        self.mean, self.std = per_point({"mean": mean, "std": std}, shape)
        check_positive("std", self.std)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw ``n`` points, ``[n, *shape]``."""
        return torch.addcmul(self.mean, self.std, _draw(torch.randn, n, self.mean, generator))


class Empirical(_Held):
    """Points of a data set, each equally likely; none comes twice in a draw of up to D points.

    A tensor is shared with the caller and with every ``copy.deepcopy`` (so with an EMA copy of a
    model), and never changed. A Dataset or DataLoader is read through **once**, kept in memory
    (twice its size while reading) and read with a fixed seed, so a shuffling loader gives the same
    points in every run. Random augmentation inside it is thereby frozen: use a function
    ``(n, generator) -> x`` for that.

    Args:
        data: A tensor or array ``[D, ...]``; a tuple or dict of them, for modules with several
            inputs; a map-style Dataset or a DataLoader with items ``x`` or ``(x, y, ...)``, of
            which ``x`` is taken.

    Example:
        >>> import torch
        >>> px = Empirical(torch.arange(10.0))
        >>> sorted(px.sample(10, torch.Generator().manual_seed(0)).tolist()) == list(range(10))
        True
    """

    _tensors = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = _in_memory(data)  # [D, ...]
        check_points(self.data)

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Draw ``n`` points, ``[n, ...]``."""
        check_draw(n, generator)
        device = tree_leaves(self.data)[0].device
        return take_points(self.data, choose(len(self), n, generator).to(device, non_blocking=True))

    def all(self) -> Inputs:
        """All D points in their order."""
        return self.data

    def __len__(self) -> int:
        return num_points(self.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # never changed, so a copy of a model need not carry a copy of the data

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(t.shape[1:])) for t in tree_leaves(self.data))
        return f"{type(self).__name__}({len(self)} points, shape={shapes})"


class Lattice(Empirical):
    """A regular grid on a box, both ends included.

    Args:
        low: Lower corner: a number (one dimension), or one for each dimension.
        high: Upper corner.
        num: Points along each dimension, at least 2: one integer, or one for each.

    Example:
        >>> Lattice(-1, 1, 3).all()
        tensor([[-1.],
                [ 0.],
                [ 1.]])
        >>> len(Lattice([-5, -5], [5, 5], 40))
        1600
    """

    def __init__(self, low: Coordinates, high: Coordinates, num: int | Sequence[int]) -> None:
        lower, upper = box(low, high, None)  # [dim]
        counts = [num] * lower.numel() if isinstance(num, int) else [int(k) for k in num]
        if lower.dim() != 1 or len(counts) != len(lower) or min(counts) < 2:
            raise InputError(
                f"num must be an integer >= 2, or one for each of the {lower.numel()} dimensions "
                f"of the box, got {num} for corners of shape {list(lower.shape)}."
            )
        _check_size(math.prod(counts) * lower.numel() * lower.element_size())
        ends = zip(lower.tolist(), upper.tolist(), counts, strict=True)
        kind: dict[str, Any] = {"dtype": lower.dtype, "device": lower.device}
        axes = [torch.linspace(a, b, k, **kind) for a, b, k in ends]
        super().__init__(torch.cartesian_prod(*axes).reshape(-1, len(axes)))  # [prod(num), dim]


class Mixture:
    """Each point from one of several distributions, chosen independently by their weights.

    The numbers of points per component are therefore multinomial, and the points are in random
    order.

    Args:
        components: Whatever :func:`as_px` accepts; all must draw points of one shape.
        weights: Not negative, in any unit; None: equal ones.
    """

    def __init__(
        self, components: Sequence[Any], weights: Sequence[float] | Tensor | None = None
    ) -> None:
        if isinstance(components, Mapping):
            raise InputError("a mixture takes a list of components and one of weights, got a dict.")
        self.components = [as_px(component) for component in components]
        given = torch.ones(len(self.components)) if weights is None else torch.as_tensor(weights)
        self.weights = given.detach().to("cpu", torch.float64)
        fit = self.weights.shape == (len(self.components),) and (self.weights >= 0).all()
        if not (fit and 0 < self.weights.sum() < math.inf):
            raise InputError(
                "a mixture needs one finite weight >= 0 for each component, at least one of them "
                f"> 0, got {len(self.components)} components and weights {self.weights.tolist()}."
            )

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Draw ``n`` points, ``[n, ...]``."""
        check_draw(n, generator)
        weights = self.weights.to(generator.device)
        label = torch.multinomial(weights, n, replacement=True, generator=generator)  # [n]
        counts = label.bincount(minlength=len(self.components)).tolist()
        pairs = zip(self.components, counts, strict=True)
        parts = [c.sample(count, generator) for c, count in pairs if count]
        place = label.argsort(stable=True).argsort()  # where the sorted points belong
        try:
            return tree_map(lambda *ts: torch.cat(ts)[place.to(ts[0].device)], *parts)
        except (TypeError, RuntimeError, ValueError) as error:
            shapes = [[tuple(t.shape) for t in tree_leaves(part)] for part in parts]
            raise InputError(
                f"the components of the mixture draw points that do not fit together: {shapes}. "
                "They must agree in structure, shape and device."
            ) from error

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Self:
        """The same mixture with all components on another device or in another dtype."""
        other = copy.copy(self)
        other.components = [component.to(device, dtype) for component in self.components]
        return other

    def __repr__(self) -> str:
        return f"Mixture({self.components}, weights={self.weights.tolist()})"


class FromFunction:
    """Points from a function of the user, ``(n, generator) -> x``."""

    def __init__(self, function: Callable[[int, torch.Generator], Inputs]) -> None:
        self.function = function
        self.target: tuple[Device, torch.dtype | None] = (None, None)
        try:
            inspect.signature(function).bind(1, None)
        except TypeError as error:
            raise InputError(f"{self!r} is not a function (n, generator) -> x: {error}") from error
        except ValueError:  # a built-in function has no signature
            pass

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Draw ``n`` points, ``[n, ...]``."""
        check_draw(n, generator)
        x = self.function(n, generator)
        leaves: list[Any] = tree_leaves(x)
        if not leaves or any(not isinstance(t, Tensor) or t.shape[:1] != (n,) for t in leaves):
            found = [f"{type(t).__name__} {list(getattr(t, 'shape', ()))}" for t in leaves]
            raise InputError(
                f"{self!r} was called for {n} points and returned {', '.join(found) or 'nothing'}. "
                "Return a tensor [n, ...], or a dict or tuple of tensors."
            )
        return move_points(x, *self.target)

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Self:
        """The same function, its points moved."""
        other = copy.copy(self)
        other.target = (device or self.target[0], dtype or self.target[1])
        return other

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"FromFunction({name})"


def as_px(obj: Any) -> EvalDistribution:
    """A distribution as it is, or one of data (tensors, Dataset, DataLoader) or of a function."""
    if isinstance(obj, EvalDistribution) and not isinstance(obj, type):
        return obj
    if callable(obj) and not isinstance(obj, type | nn.Module):
        return FromFunction(obj)
    return Empirical(obj)


def sample(px: EvalDistribution, num: int, params: Params, stream: Stream) -> Inputs:
    """S evaluation points on the device and in the dtype of the parameters."""
    like = next(iter(params.values()))
    return move_points(px.sample(num, stream.points()), device=like.device, dtype=like.dtype)


class Stream(NamedTuple):
    """The random numbers of one optimizer step.

    ψ depends on the seed, the step and the model's trainable parameters alone: it is the same on
    every rank, in all micro-batches of a step, after a resume, and for a member of a population
    whatever the other members are. It is drawn as one vector, by one kernel.
    """

    seed: int
    step: int
    rank: int = 0
    micro: int = 0  # which micro-batch of the step

    def points(self) -> torch.Generator:
        """Generator of the evaluation points, different on every rank and micro-batch."""
        return torch.Generator().manual_seed(self._derived_seed("points"))

    def noise(self) -> int:
        """Seed of dropout in the evaluation pass, different on every rank and micro-batch."""
        return self._derived_seed("noise")

    def _derived_seed(self, purpose: str) -> int:
        micro = [self.micro] if self.micro else []
        return integer(self.seed, self.step, purpose, self.rank, *micro)

    def flat_psi(self, size: int, num: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """ψ as one tensor ``[num, size]``."""
        source = generator(self.seed, self.step, "psi", device=device)
        return torch.randn((num, size), generator=source, device=device, dtype=dtype)

    def psi(self, params: Params, num: int = 1) -> Params:
        """ψ ~ N(0, I), ``{name: [num, ...]}``: the same on every rank."""
        device = next(iter(params.values())).device
        drawn = unravel(self.flat_psi(count(params), num, device, torch.float32), params)
        return {name: t.to(params[name]) for name, t in drawn.items()}

    def psi_of(self, name: str, like: Tensor, num: int = 1) -> Tensor:
        """ψ of one parameter alone, ``[num, ...]``, for parameters that no rank holds whole."""
        name = name.replace("_orig_mod.", "")  # torch.compile's prefix changes no draw
        return randn_like(num, like, generator(self.seed, self.step, name, device=like.device))

    def signs(self, num: int, size: int, like: Tensor) -> Tensor:
        """Random signs ``[num, size]``, different on every rank."""
        return rademacher(num, size, generator(self.seed, self.step, "signs", self.rank), like)


def integer(*parts: object) -> int:
    """A 63-bit number that depends on all parts and on nothing else."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded by :func:`integer` of the parts."""
    return torch.Generator(device).manual_seed(integer(*parts))


def _draw(kind: Callable[..., Tensor], n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard draws ``[n, *like.shape]``, made where the generator lives, in float32 or better."""
    check_draw(n, generator)
    fine = torch.promote_types(like.dtype, torch.float32)
    unit = kind((n, *like.shape), generator=generator, dtype=fine, device=generator.device)
    return unit.to(like)


def _in_memory(data: Any) -> Inputs:
    """Data of any accepted kind as tensors, by reference where they are tensors already."""
    if isinstance(data, Tensor | np.ndarray | tuple | Mapping):
        return _tensors(data)
    if isinstance(data, DataLoader):
        return _read(data)
    mapped = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if mapped and not isinstance(data, list | str | IterableDataset):
        return _read(DataLoader(data, batch_size=256))
    raise InputError(
        f"{reprlib.repr(data)} ({type(data).__name__}) is not an evaluation distribution. Allowed: "
        "px.Uniform, px.Normal, px.Empirical, px.Lattice and px.Mixture, a tensor or array "
        "[D, ...], a tuple or dict of them, a map-style Dataset, a DataLoader (also around an "
        "iterable Dataset), or a function (n, generator) -> x. Stack a list with torch.stack."
    )


def _read(loader: DataLoader[Any]) -> Inputs:
    """All batches of a loader, concatenated."""
    batches: list[Inputs] = []
    size = 0
    try:
        with torch.random.fork_rng(devices=[]):  # loaders draw from torch's global CPU generator
            torch.default_generator.manual_seed(0)
            for batch in loader:
                x = _tensors(batch[0] if isinstance(batch, list | tuple) else batch)
                batches.append(x)
                size += sum(t.numel() * t.element_size() for t in tree_leaves(x))
                _check_size(size)
        if batches:
            return tree_map(lambda *ts: torch.cat(ts), *batches)
    except (TypeError, RuntimeError, KeyError) as error:
        raise InputError(
            f"the data cannot be read as tensors: {error} Make its items tensors of one shape, for "
            "instance by the Dataset's transform or the DataLoader's collate_fn."
        ) from error
    raise InputError("the data set is empty. At least one point is needed.")


def _tensors(x: Any) -> Inputs:
    """Plain containers of detached tensors."""
    if isinstance(x, Mapping):
        return {key: _tensors(value) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return tuple(_tensors(value) for value in x)
    try:
        return torch.as_tensor(x).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(x).__name__
        raise InputError(f"points must be tensors or arrays, got {kind}: {error}") from error


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise InputError(
            f"these points need {size / 2**30:.2f} GiB in memory, the limit is "
            f"{MAX_BYTES / 2**30:.2f} GiB. Take a random subset (torch.utils.data.Subset; some ten "
            "thousand points serve as well), give a tensor that is in memory already, or a "
            "function (n, generator) -> x that reads what it draws."
        )


def check_draw(n: object, generator: object) -> None:
    """Raise InputError unless n is an integer >= 1 and there is a generator."""
    if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1:
        raise InputError(f"the number of points must be an integer >= 1, got {n!r}.")
    if not isinstance(generator, torch.Generator):
        what = f"sample needs a torch.Generator, got {type(generator).__name__}"
        raise InputError(f"{what}. Use torch.Generator().manual_seed(0).")


def choose(total: int, n: int, generator: torch.Generator) -> Tensor:
    """Indices ``[n]`` of ``total`` points in random order; with repetitions if ``n > total``."""
    device = generator.device
    if n > total:
        return torch.randint(total, (n,), generator=generator, device=device)
    if device.type == "cpu" and 4 * n <= total:
        return _first_distinct(total, n, generator)
    return torch.randperm(total, generator=generator, device=device)[:n]


def _first_distinct(total: int, n: int, generator: torch.Generator) -> Tensor:
    """Distributed as ``randperm(total)[:n]``, in O(n): draw with replacement, drop repetitions."""
    drawn = torch.randint(total, (2 * n,), generator=generator, device=generator.device)
    while True:
        values, order = drawn.sort(stable=True)
        is_first = torch.cat([values.new_ones(1).bool(), values[1:] != values[:-1]])
        kept = order[is_first].sort().values[:n]
        if len(kept) == n:
            return drawn[kept]
        more = torch.randint(total, (n,), generator=generator, device=generator.device)
        drawn = torch.cat([drawn, more])


def per_point(named: dict[str, Coordinates], shape: Shape) -> tuple[Tensor, ...]:
    """Coordinates as tensors of one shape, in the dtype of the first floating-point tensor."""
    dtypes = [v.dtype for v in named.values() if isinstance(v, Tensor) and v.is_floating_point()]
    dtype = dtypes[0] if dtypes else torch.get_default_dtype()
    values = [torch.as_tensor(v, dtype=dtype).detach() for v in named.values()]
    shapes = [tuple(v.shape) for v in values]
    try:
        if shape is None:
            target = tuple(torch.broadcast_shapes(*shapes)) or (1,)
        else:
            target = (shape,) if isinstance(shape, int) else tuple(shape)
        points = tuple(v.expand(target) for v in values)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{' and '.join(named)} have shapes {', '.join(map(str, shapes))}, which do not fit "
            f"points of shape {shape if shape is not None else 'common to them'}. Give numbers, or "
            "one entry for each dimension of a point."
        ) from error
    for name, value in zip(named, values, strict=True):
        if not torch.isfinite(value).all():
            raise InputError(f"{name} must be finite, got {named[name]}.")
    return points


def box(low: Coordinates, high: Coordinates, shape: Shape) -> tuple[Tensor, Tensor]:
    """The two corners of a box, ``[*shape]`` each; raises InputError unless low < high."""
    lower, upper = per_point({"low": low, "high": high}, shape)
    if not (lower < upper).all():
        raise InputError(f"low must be below high in every dimension, got low={low}, high={high}.")
    return lower, upper
