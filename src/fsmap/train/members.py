"""The members of a population before the first step: what each starts from, minimizes and sees."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.linalg.probes import Stream
from fsmap.objective.compose import Objective
from fsmap.objective.geometry import TraceBound
from fsmap.train import chunking
from fsmap.train.batches import sample_batch
from fsmap.train.describe import describe, describe_model
from fsmap.train.feed import Feeder
from fsmap.train.grid import SEED, SPLIT, Grid
from fsmap.train.splits import as_splits
from fsmap.train.start import Init, start
from fsmap.train.step import check_pure, layer_noise
from fsmap.types import ModelFn, Params

ONE_FOR_ALL = ("lr", "learning_rate", "betas", "eps", "momentum", "weight_decay", "clip")
"""What torch.optim, or the loop, takes as one number for all members."""


class Members:
    """Stacked starts, hyper-parameters, objectives and data of a grid."""

    def __init__(
        self, build: Callable[..., Objective], grid: Grid, f: ModelFn, init: Init | None, data: Any
    ) -> None:
        """Make them.

        Args:
            build: From hyper-parameters to an objective.
            grid: The members.
            f: The model function.
            init: Where a seed starts.
            data: Training data.
        """
        check_names(build, grid)
        self.build, self.grid, self.f = build, grid, f
        self._starts = {seed: start(init, f, int(seed)) for seed in grid.axes.get(SEED, (0,))}
        _check_shapes(self._starts)
        names = self.first(0)
        self.params: Params = {
            n: torch.stack([self.first(k)[n] for k in range(len(grid))]).requires_grad_()
            for n in names
        }
        self.like = next(iter(names.values()))
        self.hypers = grid.hypers(self.like)
        self.splits = as_splits(data, grid.axes.get(SPLIT), names)
        self.extra: dict[str, Tensor] = {}  # what a checkpoint holds besides
        self._objectives: dict[tuple[Any, ...], Objective] = {}

    def first(self, member: int) -> Params:
        """The parameters that a member starts from."""
        return self._starts[self.grid[member].get(SEED, 0)]

    def objective(self, member: int) -> Objective:
        """The objective of a member, on plain numbers.

        Args:
            member: Which.

        Returns:
            What ``build`` makes; made once for members with equal hyper-parameters.

        Raises:
            InputError: If ``build`` makes something else.
        """
        key = tuple(self.grid[member][n] for n in self.grid.hyper_names)
        if key not in self._objectives:
            made: object = self.build(**{n: h[member] for n, h in self.hypers.items()})
            if not isinstance(made, Objective):
                kind = type(made).__name__
                message = f"build must return an objective (ps_map, fs_map, l_map), got {kind}"
                raise InputError(message)
            self._objectives[key] = made
        return self._objectives[key]

    def check(self, batch_size: int | None) -> None:
        """Look once at every configuration on every split, on plain numbers."""
        splits = [
            sample_batch(self.splits.batch(g), batch_size) for g in range(len(self.splits.rows))
        ]
        check_pure(self.f, self.first(0), splits[0].x)
        for members in self.grid.groups(SPLIT, *self.grid.hyper_names).values():
            k = members[0]
            sample = splits[self.splits.index(self.grid[k].get(SPLIT, 0))]
            with layer_noise(self.f, Stream(0, 0), self.like.device):
                self.objective(k).check(self.f, self.first(k), sample)

    def start(self) -> None:
        """Make R₀ of ``reg_nats`` a hyper-parameter, from the start of each member."""
        geometry = self.objective(0).geometry
        if not isinstance(geometry, TraceBound) or geometry.r0 is not None:
            return
        found = []
        for k, member in enumerate(self.grid):
            first, stream = self.first(k), Stream(int(member.get(SEED, 0)), 0)
            term = self.objective(k).geometry
            assert isinstance(term, TraceBound)
            with layer_noise(self.f, stream, self.like.device):
                term = term.started(self.f, first, stream)
            found.append(term.r0)
        r0 = torch.stack([r0.to(self.like) for r0 in found if r0 is not None])
        self.hypers["r0"] = self.extra["r0"] = r0
        build = self.build

        def with_r0(r0: Tensor, **hypers: Tensor) -> Objective:
            made = build(**hypers)
            assert isinstance(made.geometry, TraceBound)
            return made._replace(geometry=made.geometry._replace(r0=r0))

        self.build = with_r0
        self._objectives.clear()

    def chunk(self, wanted: int | str, feeder: Feeder) -> int:
        """How many members are vectorized at a time."""
        batch, draws = feeder.single(feeder.make(0), 0)
        first, objective = self.first(0), self.objective(0)
        return chunking.choose(wanted, len(self.grid), self.f, first, batch, objective, draws)

    def describe(self, **knobs: Any) -> dict[str, Any]:
        """What run this is, in plain values."""
        first = self.objective(0)
        if self.extra and isinstance(first.geometry, TraceBound):  # R₀ is in the checkpoint
            first = first._replace(geometry=first.geometry._replace(r0=None))
        return {
            "kind": "fit_population",
            "members": describe(list(self.grid)),
            "objective of member 0": describe(first),
            "model": describe_model(self.f, self.first(0)),
            "starts": describe(list(self._starts.values())),
            "data": describe(self.splits._asdict()),
            **describe(knobs),
        }


def check_names(build: Callable[..., Objective], grid: Grid) -> None:
    """Refuse axes that ``build`` does not know.

    Args:
        build: From hyper-parameters to an objective.
        grid: The members.

    Raises:
        InputError: With the names on both sides.
    """
    try:
        signature = inspect.signature(build)
        signature.bind(**dict.fromkeys(grid.hyper_names))
    except TypeError as error:
        scalar = [n for n in grid.hyper_names if n in ONE_FOR_ALL]
        if scalar:
            message = (
                f"{', '.join(scalar)} cannot vary within a population: the optimizer takes one "
                "value for all members. Train one population for each value: "
                "fit_population(..., optimizer=adam(lr))."
            )
        else:
            message = (
                f"the grid varies {list(grid.hyper_names)}, and build takes {signature}: {error}. "
                "Every axis but seed and split must be an argument of build, and vice versa."
            )
        raise InputError(message) from error


def _check_shapes(starts: dict[Any, Params]) -> None:
    shapes = [{n: tuple(p.shape) for n, p in params.items()} for params in starts.values()]
    for seed, found in zip(starts, shapes, strict=True):
        if found != shapes[0]:
            message = (
                f"all members share one architecture, but seed {seed} starts with parameters "
                f"{found}, and the first seed with {shapes[0]}"
            )
            raise InputError(message)
