"""Batches, evaluation points and ψ of many steps at once, made where the parameters are.

Drawing per step costs more than the step itself once it is one graph. Here a generator belongs to
(seed, block of steps): a member sees the same numbers whatever its neighbors are and after a
resume. They are not the numbers that ``fit`` makes for that seed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.linalg import probes
from fsmap.objective.px import EvalDistribution
from fsmap.train.fused.layout import Layout
from fsmap.train.splits import Splits

BLOCK_STEPS = 20
"""Steps per generator; another number would be another stream of random numbers."""


class StackedFeed(NamedTuple):
    """One step's worth."""

    x: Tensor  # [G, R, inputs]
    rest: tuple[Tensor, Tensor | None]  # targets [G, B]; ψ [G, P'] or None


class BlockFeed:
    """Draws blocks of steps and hands out their parts.

    Args:
        layout: Sizes.
        splits: Training data.
        streams: (seed, place of the training set) of every group.
        px: p_X, or None.
    """

    def __init__(
        self,
        layout: Layout,
        splits: Splits,
        streams: list[tuple[int, int]],
        px: EvalDistribution | None,
    ) -> None:
        self.layout, self.streams = layout, streams
        like = splits.data.y
        self._data = [splits.batch(place) for _, place in streams]
        self._px = None if px is None else px.to(like.device, like.dtype)
        lead = (BLOCK_STEPS, len(streams))
        self._x = like.new_zeros(*lead, layout.rows, layout.inputs)
        self._y = like.new_empty(*lead, layout.batch)
        self._psi = None if px is None else like.new_empty(*lead, layout.stride)
        self._block = -1

    def make(self, step: int) -> StackedFeed:
        """The feed of one step; its tensors are overwritten when the next block begins."""
        block, place = divmod(step, BLOCK_STEPS)
        if block != self._block:
            for group, (seed, _) in enumerate(self.streams):
                self._draw(group, seed, block)
            self._block = block
        psi = None if self._psi is None else self._psi[place]
        return StackedFeed(self._x[place], (self._y[place], psi))

    def _draw(self, group: int, seed: int, block: int) -> None:
        """Fill the place of one group."""
        B, S, plain, d = (
            self.layout.batch,
            self.layout.points,
            self.layout.rows_plain,
            self.layout.sizes[0],
        )
        data, x = self._data[group], self._x[:, group]
        device = data.y.device
        generator = probes.generator(seed, block, "rows", device=device)
        rows = torch.randint(
            len(data.y), (BLOCK_STEPS, B), generator=generator, device=device
        )  # [T, B]
        x[:, :B, :d] = data.x[rows]
        self._y[:, group] = data.y.reshape(len(data.y))[rows]
        if self._px is None or self._psi is None:
            return
        generator = probes.generator(seed, block, "points", device=device)
        points = self._px.sample(BLOCK_STEPS * S, generator).reshape(BLOCK_STEPS, S, d)
        x[:, B : B + S, :d] = points
        x[:, plain : plain + S, :d] = points
        generator = probes.generator(seed, block, "psi", device=device)
        self._psi[:, group] = torch.randn(
            self._psi[:, group].shape, generator=generator, device=device, dtype=x.dtype
        )
