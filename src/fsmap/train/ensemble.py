"""One step of many members: who gets which batch and draws, gradients under ``vmap``, one update.

Random numbers belong to a seed, not to a member: all configurations of a seed see the same batches,
evaluation points and ψ, and they are those that ``fit`` makes for that seed. So a member does not
depend on its neighbors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from fsmap.errors import InputError
from fsmap.functional import (
    SHARE,
    check_fits,
    count,
    differentiable_attention,
    free_bytes,
    is_pointwise,
    take_points,
)
from fsmap.objective.geometry import LogDet, TraceBound
from fsmap.objective.objective import Objective
from fsmap.px import Stream
from fsmap.train.fit import (
    Batches,
    as_batch,
    check_pure,
    gradient,
    layer_noise,
    make_loss,
    sample_batch,
    update,
)
from fsmap.train.grid import SEED, SPLIT, Grid
from fsmap.train.loop import PARTS, Settings
from fsmap.types import Batch, Draws, ModelFn, Params

CPU_WORK = 3e7
"""P·B above which a CPU gains nothing by vectorizing: the arithmetic of one member keeps it busy.
Measured by ``python -m benchmarks.population``."""
COPIES = 8  # tensors like the parameters in a step: gradients, moments, ψ, shifted copies
PASSES = 4  # memory of a pass over evaluation points, derivative included, in training passes

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def by_split(sets: Any, names: tuple[Hashable, ...]) -> list[Any]:
    """What a dict or list has for each value of the ``split`` axis."""
    if not isinstance(sets, Mapping | list):
        kind = type(sets).__name__
        message = f"the grid has a 'split' axis, so data must be a dict or list of sets, got {kind}"
        raise InputError(message)
    known = dict(sets) if isinstance(sets, Mapping) else dict(enumerate(sets))
    missing = [name for name in names if name not in known]
    if missing:
        message = f"the grid has the splits {missing}, and data has only {list(known)}"
        raise InputError(message)
    return [known[name] for name in names]


def _joined_sets(sets: list[Batch]) -> Batch:
    """Training sets of equal size one after the other."""
    sizes = [len(one.y) for one in sets]
    if len(set(sizes)) > 1:
        message = (
            f"training sets of one population must have the same size, got {sizes}: N is a "
            "constant of the objective. Train one population per size, or cut the sets to the "
            "smallest."
        )
        raise InputError(message)
    if len(sets) == 1:
        return sets[0]
    xs = tree_map(lambda *parts: torch.cat(parts), *(one.x for one in sets))
    return Batch(xs, torch.cat([one.y for one in sets]))


class Members:
    """Stacked parameters, hyper-parameters, objectives and training data of a grid."""

    def __init__(
        self,
        build: Callable[..., Objective],
        grid: Grid,
        f: ModelFn,
        starts: Mapping[Any, Params],
        data: Any,
    ) -> None:
        self.build, self.grid, self.f, self.starts = build, grid, f, starts
        self.seeds = [int(member.get(SEED, 0)) for member in grid]
        names = self.first(0)
        self.params: Params = {
            n: torch.stack([self.first(k)[n] for k in range(len(grid))]).requires_grad_()
            for n in names
        }
        self.like = next(iter(names.values()))
        self.hypers = grid.hypers(self.like)
        self.splits: tuple[Hashable, ...] = grid.axes.get(SPLIT, (0,))
        sets = by_split(data, self.splits) if SPLIT in grid.names else [data]
        self.data = _joined_sets([as_batch(one, names) for one in sets])  # [splits·N]
        self.num_data = len(self.data.y) // len(sets)  # N
        self.extra: dict[str, Tensor] = {}  # further state of a checkpoint
        self._objectives: dict[tuple[Any, ...], Objective] = {}

    def first(self, member: int) -> Params:
        """The parameters that a member starts from."""
        return self.starts[self.seeds[member]]

    def present(self, member: int) -> Params:
        """The parameters of a member."""
        return {name: p.detach()[member] for name, p in self.params.items()}

    def objective(self, member: int) -> Objective:
        """What ``build`` makes for a member, on plain numbers; once for equal hyper-parameters."""
        values = self.grid.members[member]
        key = tuple(values[name] for name in self.grid.hyper_names)
        if key not in self._objectives:
            made: object = self.build(**{n: h[member] for n, h in self.hypers.items()})
            if not isinstance(made, Objective):
                kind = type(made).__name__
                message = f"build must return an objective (ps_map, fs_map, l_map), got {kind}"
                raise InputError(message)
            self._objectives[key] = made
        return self._objectives[key]

    def check(self, batch_size: int | None) -> None:
        """Check every configuration on every split, on plain numbers."""
        N = self.num_data
        samples = {
            name: sample_batch(_rows(self.data, slice(g * N, (g + 1) * N)), batch_size)
            for g, name in enumerate(self.splits)
        }
        check_pure(self.f, self.first(0), next(iter(samples.values())).x)
        for members in self.grid.groups(SPLIT, *self.grid.hyper_names).values():
            k = members[0]
            with layer_noise(self.f, Stream(0, 0), self.like.device):
                sample = samples[self.grid[k].get(SPLIT, 0)]
                self.objective(k).check(self.f, self.first(k), sample)

    def start(self) -> None:
        """Make R₀ of ``reg_nats`` a hyper-parameter, from the start of each member."""
        geometry = self.objective(0).geometry
        if not isinstance(geometry, TraceBound) or geometry.r0 is not None:
            return
        found = []
        for k, seed in enumerate(self.seeds):
            with layer_noise(self.f, Stream(seed, 0), self.like.device):
                term = self.objective(k).started(self.f, self.first(k), Stream(seed, 0)).geometry
            found.append(term.r0.to(self.like))  # type: ignore[attr-defined]
        self.hypers["r0"] = self.extra["r0"] = torch.stack(found)
        build = self.build

        def with_r0(r0: Tensor, **hypers: Tensor) -> Objective:
            made = build(**hypers)
            return made._replace(geometry=made.geometry._replace(r0=r0))  # type: ignore[attr-defined]

        self.build = with_r0
        self._objectives.clear()


class Feed(NamedTuple):
    """One step's worth: groups stacked in the first dimension."""

    rows: Tensor | None  # [G, B]  None: all points of the only training set, in order
    draws: Draws  # leaves [D, ...]
    step: int = 0


class Feeder:
    """Makes the feed of every step, and hands each member its part."""

    def __init__(self, members: Members, settings: Settings) -> None:
        self.members = members
        grid, seeds, N = members.grid, members.seeds, members.num_data
        whole = settings.batch_size is None  # every step sees all data: then seeds do not matter
        streams = grid.groups(SPLIT) if whole else grid.groups(SEED, SPLIT)
        places = [members.splits.index(key[-1]) if SPLIT in grid.names else 0 for key in streams]
        self._starts = N * torch.tensor(places)[:, None]  # [G, 1]  first row of the training set
        self._orders = [
            Batches(N, settings.batch_size, seed=seeds[group[0]], replace=settings.replace)
            for group in streams.values()
        ]
        device = members.data.y.device
        self._whole, self._everything = whole, None
        if whole and len(streams) > 1:
            self._everything = (self._starts + torch.arange(N)).to(device)  # [G, N]
        self._stream_of = _group_of(streams, len(grid), device)  # [M]
        by_seed = grid.groups(SEED)
        self.adaptive = any(members.objective(k).adaptive for k in range(len(grid)))
        if self.adaptive:  # draws depend on the parameters of a member
            by_seed = {(k,): [k] for k in range(len(grid))}
        elif not self._same_draws(next(iter(by_seed.values()))):
            by_seed = grid.groups(SEED, *grid.hyper_names)  # p_X depends on a hyper-parameter
        self._drawing = [group[0] for group in by_seed.values()]
        self._draw_of = _group_of(by_seed, len(grid), device)  # [M]

    def _same_draws(self, group: list[int]) -> bool:
        """Whether members of a seed draw the same numbers: not if p_X has a hyper-parameter."""
        first, *others = (tree_flatten(self._draw(k, 0)) for k in group)
        return all(
            structure == first[1] and all(map(_equal, leaves, first[0]))
            for leaves, structure in others
        )

    def _draw(self, member: int, step: int) -> Draws:
        members = self.members
        params = members.present(member) if self.adaptive else members.first(member)
        stream = Stream(members.seeds[member], step)
        return members.objective(member).draw(members.f, params, stream)

    def make(self, step: int) -> Feed:
        """Rows and draws of one step."""
        drawn = [self._draw(k, step) for k in self._drawing]
        draws: Draws = tree_map(lambda *t: None if t[0] is None else torch.stack(t), *drawn)
        if self._whole:
            return Feed(self._everything, draws, step)
        found = [order.rows(step) for order in self._orders]
        rows = self._starts + torch.stack([r for r in found if r is not None])  # [G, B]
        device = self._stream_of.device
        if device.type == "cuda":
            rows = rows.pin_memory()  # one transfer for all, without waiting
        return Feed(rows.to(device, non_blocking=True), draws, step)

    def chunk(self, feed: Feed, members: slice) -> tuple[Batch, Draws, tuple[Any, Any]]:
        """Inputs of some members, and the dimension of the member: None for what all share."""
        batch, batch_dim = self.members.data, None
        if feed.rows is not None and len(self._orders) == 1:
            batch = _rows(batch, feed.rows[0])  # [B, ...]
        elif feed.rows is not None:
            batch, batch_dim = _rows(batch, feed.rows[self._stream_of[members]]), 0  # [c, B, ...]
        shared = len(self._drawing) == 1
        which: Any = 0 if shared else self._draw_of[members]
        draws = tree_map_only(Tensor, lambda t: t[which], feed.draws)
        draw_dims = tree_map_only(Tensor, lambda _: None if shared else 0, feed.draws)
        return batch, draws, (batch_dim, draw_dims)

    def single(self, feed: Feed, member: int) -> tuple[Batch, Draws]:
        """The inputs of one member, as ``fit`` has them."""
        batch, draws, (batch_dim, _) = self.chunk(feed, slice(member, member + 1))
        if batch_dim is not None:
            batch = tree_map(lambda t: t[0], batch)
        if len(self._drawing) > 1:
            draws = tree_map_only(Tensor, lambda t: t[0], draws)
        return batch, draws


def _rows(data: Batch, rows: Tensor | slice) -> Batch:
    return Batch(take_points(data.x, rows), data.y[rows])


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _group_of(
    groups: dict[tuple[Hashable, ...], list[int]], size: int, device: torch.device
) -> Tensor:
    """The group of every member, [M]."""
    found = torch.empty(size, dtype=torch.long)
    for place, members in enumerate(groups.values()):
        found[members] = place
    return found.to(device)


class Ensemble:
    """Takes a step of all members: ``chunk`` at a time under ``vmap``, 1 one by one."""

    def __init__(
        self,
        members: Members,
        feeder: Feeder,
        optimizer: Optimizer,
        *,
        clip: float | None,
        chunk: int,
        compile: bool = False,
    ) -> None:
        self.members, self.feeder, self.optimizer = members, feeder, optimizer
        self.loss = make_loss(members.f, members.build)
        self.clip, self.compile = clip, compile
        self._compiled: dict[object, Callable[..., Any]] = {}
        self._vectorizes = False  # whether a step under vmap has worked
        self.chunk_size = torch.tensor(chunk)  # a tensor, so that a checkpoint can keep it
        self.finite = torch.ones(len(members.grid), dtype=torch.bool, device=members.like.device)

    def step(self, feed: Feed) -> Tensor:
        """Differentiate and update; the measured columns, [C, M], on the device."""
        grads, row = self.gradients(feed)
        return update(self.members.params, grads, row, self.optimizer, self.clip, self.finite)

    def state(self) -> list[Tensor]:
        """Every tensor that a step changes. Adam and SGD add theirs at the first step."""
        params = list(self.members.params.values())
        moments = [t for p in params for t in self.optimizer.state[p].values()]
        tensors = [*(p.detach() for p in params), self.finite, *moments]
        return [t for t in tensors if isinstance(t, Tensor)]

    def gradients(self, feed: Feed) -> tuple[Params, Tensor]:
        """Gradients [M, ...] and the loss with its terms, [4, M]."""
        size, M = int(self.chunk_size), len(self.finite)
        slices = [slice(first, min(first + size, M)) for first in range(0, M, size)]
        try:
            return _joined([self._chunk(feed, members) for members in slices])
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            self.chunk_size.fill_((size + 1) // 2)  # nothing has been updated yet
            torch.cuda.empty_cache()
            return self.gradients(feed)

    def _chunk(self, feed: Feed, members: slice) -> tuple[Params, Tensor]:
        if members.stop - members.start > 1 or self.compile:
            try:
                found = self._together(feed, members)
                self._vectorizes = True
                return found
            except LinAlgError:
                pass  # torch stops all members if one matrix has no decomposition
            except RuntimeError as error:
                if self._vectorizes or isinstance(error, torch.OutOfMemoryError):
                    raise
                self._alone(feed, members.start)  # raises if vmap is not the reason
                reason = str(error).strip().splitlines()[0]
                message = (
                    f"the objective works for one member, not for many at once: {reason} If build, "
                    "or a term it makes, decides something by the value of a hyper-parameter (if, "
                    "float(), .item()), train one population per decision, or give chunk=1."
                )
                raise InputError(message) from error
        return _joined([self._alone(feed, k) for k in range(members.start, members.stop)])

    def _together(self, feed: Feed, members: slice) -> tuple[Params, Tensor]:
        batch, draws, dims = self.feeder.chunk(feed, members)
        params = {n: p.detach()[members] for n, p in self.members.params.items()}
        hypers = {n: h[members] for n, h in self.members.hypers.items()}
        vectorized = vmap(grad_and_value(self.loss, has_aux=True), in_dims=(0, 0, *dims))
        inputs = (params, hypers, batch, draws)
        with differentiable_attention():  # the fused kernels cannot be vectorized
            if self.compile:
                vectorized = self._compile(vectorized, inputs)
            grads, (value, parts) = vectorized(*inputs)
        return grads, torch.stack([value, *(parts[name].to(value.dtype) for name in PARTS)])

    def _compile(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """The operators that the gradient runs, recorded and compiled once for each shape.

        torch.compile cannot follow ``build``, which looks at numbers; a record has its constants.
        """
        key = tuple(None if t is None else t.shape for t in tree_leaves(inputs))
        if key not in self._compiled:
            from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

            recorded = make_fx(function)(*inputs)
            self._compiled[key] = torch.compile(recorded, fullgraph=True, dynamic=False)
        return self._compiled[key]

    def _alone(self, feed: Feed, member: int) -> tuple[Params, Tensor]:
        """A chunk of one, without vmap; nan if a matrix has no decomposition."""
        members = self.members
        batch, draws = self.feeder.single(feed, member)
        params = {n: p.requires_grad_() for n, p in members.present(member).items()}
        hypers = {n: h[member] for n, h in members.hypers.items()}
        stream = Stream(members.seeds[member], feed.step)
        try:
            with layer_noise(members.f, stream, members.like.device):
                grads, row = gradient(self.loss, params, hypers, batch, draws)
        except LinAlgError:
            grads = {n: torch.full_like(p.detach(), torch.nan) for n, p in params.items()}
            row = torch.full((1 + len(PARTS),), torch.nan, device=members.like.device)
        return {n: g[None] for n, g in grads.items()}, row[:, None]


def _joined(found: list[tuple[Params, Tensor]]) -> tuple[Params, Tensor]:
    if len(found) == 1:
        return found[0]
    grads = {n: torch.cat([g[n] for g, _ in found]) for n in found[0][0]}
    return grads, torch.cat([row for _, row in found], dim=1)


def choose_chunk(chunk: int | str, members: Members, feeder: Feeder) -> int:
    """How many members to vectorize: as many as fit; on a CPU only if it is faster.

    1 means one by one, without ``vmap``; random layers need that, they are seeded member by member.
    """
    if chunk != "auto" and (not isinstance(chunk, int) or chunk < 1):
        message = f"chunk must be a number of members >= 1, or 'auto', got {chunk!r}"
        raise InputError(message)
    M, params = len(members.grid), members.first(0)
    if not is_pointwise(members.f):
        return 1
    if isinstance(chunk, int):
        return min(chunk, M)
    device = members.like.device
    batch, draws = feeder.single(feeder.make(0), 0)
    if device.type == "cpu" and count(params) * len(batch.y) > CPU_WORK:
        return 1
    needed = member_bytes(members.f, params, batch, members.objective(0), draws)
    check_fits(needed, device, what="one member", instead="Use a smaller batch_size or num_points.")
    most = max(1, min(M, int(SHARE * free_bytes(device)) // needed))
    chunks = -(-M // most)  # as few chunks as possible, of nearly equal size
    return -(-M // chunks)


def member_bytes(
    f: ModelFn, params: Params, batch: Batch, objective: Objective, draws: Draws
) -> int:
    """Roughly the memory that one member needs during a step; makes forward passes."""
    size = count(params) * next(iter(params.values())).element_size()
    with torch.no_grad(), _Counter() as counter:
        f(params, batch.x)
        kept = counter.bytes
        needed: int = COPIES * size + kept
        if draws.x is not None:
            outputs = f(params, draws.x).numel()
            needed += PASSES * (counter.bytes - kept)
            if isinstance(objective.geometry, LogDet):
                needed += 3 * outputs * size  # the Jacobian and its gradient
    return needed


class _Counter(TorchDispatchMode):
    """Adds up the sizes of what operations return, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.bytes += sum(t.nbytes for t in made if _address(t) not in given)
        return result


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
