"""One step of many members: gradients under ``vmap``, clipped one by one, one optimizer for all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.optim import Optimizer

from fsmap.errors import InputError
from fsmap.functional import differentiable_attention
from fsmap.train.feed import Chunk, Feed, Feeder
from fsmap.train.optim import clip_factor, global_norm, scale
from fsmap.train.step import PARTS, Hypers, LossFn
from fsmap.types import Params


class Ensemble:
    """Stacked members and how they take a step together."""

    def __init__(
        self,
        loss: LossFn,
        params: Params,
        hypers: Hypers,
        feeder: Feeder,
        optimizer: Optimizer,
        *,
        clip: float | None,
        chunk: int,
    ) -> None:
        """Keep everything that a step needs.

        Args:
            loss: The pure loss of one member.
            params: Stacked leaves, [M, ...].
            hypers: Stacked hyper-parameters, [M].
            feeder: Hands out batches and draws.
            optimizer: Updates the stacked leaves.
            clip: Largest norm of a member's gradient.
            chunk: Members that are vectorized at a time; 1 takes them one by one.
        """
        self.loss, self.params, self.hypers, self.feeder = loss, params, hypers, feeder
        self.optimizer, self.clip = optimizer, clip
        self.chunk_size = torch.tensor(chunk)  # a tensor, so that a checkpoint can keep it
        first = next(iter(params.values()))
        self.members, self.device = len(first), first.device
        self.alive = torch.ones(self.members, dtype=torch.bool, device=self.device)

    def step(self, feed: Feed) -> Tensor:
        """Differentiate, clip and update; a member that is not finite gets no more gradients.

        Args:
            feed: Batches and draws.

        Returns:
            The measured columns, [C, M], on the device.
        """
        grads, measured = self.gradients(feed)
        norm = global_norm(grads, stacked=True)  # [M]
        self.alive &= torch.isfinite(measured[0]) & torch.isfinite(norm)
        if self.clip is not None:
            grads = scale(grads, clip_factor(norm, self.clip))
        if self.device.type != "cpu" or not self.alive.all():
            grads = {n: torch.where(_spread(self.alive, g), g, 0) for n, g in grads.items()}
        for name, p in self.params.items():
            p.grad = grads[name]
        self.optimizer.step()
        return torch.cat([measured, norm[None].to(measured.dtype)])

    def gradients(self, feed: Feed) -> tuple[Params, Tensor]:
        """Gradients [M, ...] and the loss with its terms, [4, M]."""
        try:
            found = [self._chunk(feed, members) for members in self._chunks()]
        except torch.OutOfMemoryError:
            if self.chunk_size == 1:
                raise
            self.chunk_size.fill_((int(self.chunk_size) + 1) // 2)  # nothing has been updated yet
            torch.cuda.empty_cache()
            return self.gradients(feed)
        if len(found) == 1:
            return found[0]
        grads = {n: torch.cat([g[n] for g, _ in found]) for n in self.params}
        return grads, torch.cat([row for _, row in found], dim=1)

    def _chunks(self) -> Iterator[slice]:
        size = int(self.chunk_size)
        for first in range(0, self.members, size):
            yield slice(first, min(first + size, self.members))

    def _chunk(self, feed: Feed, members: slice) -> tuple[Params, Tensor]:
        if members.stop - members.start == 1:
            return self._alone(feed, members.start)
        try:
            return self._together(self.feeder.chunk(feed, members), members)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # A member's matrix has no decomposition, and torch stops all of them: find out whose.
            found = [self._alone(feed, k) for k in range(members.start, members.stop)]
            grads = {n: torch.cat([g[n] for g, _ in found]) for n in self.params}
            return grads, torch.cat([row for _, row in found], dim=1)

    def _together(self, chunk: Chunk, members: slice) -> tuple[Params, Tensor]:
        params = {n: p.detach()[members] for n, p in self.params.items()}
        hypers = {n: h[members] for n, h in self.hypers.items()}
        gradient = vmap(grad_and_value(self.loss, has_aux=True), in_dims=(0, 0, *chunk.dims))
        try:
            with differentiable_attention():  # the fused kernels cannot be vectorized
                grads, (value, parts) = gradient(params, hypers, chunk.batch, chunk.draws)
        except RuntimeError as error:
            if "data-dependent control flow" not in str(error):
                raise
            message = (
                "build, or a term it makes, decides something by the value of a hyper-parameter "
                "(if, float(), .item()), which members of one population cannot do. Train one "
                "population per decision."
            )
            raise InputError(message) from error
        return grads, _row(value, parts)

    def _alone(self, feed: Feed, member: int) -> tuple[Params, Tensor]:
        """A chunk of one: no vmap in the way; nan where there is no decomposition."""
        batch, draws = self.feeder.single(feed, member)
        params = {n: p.detach()[member].requires_grad_() for n, p in self.params.items()}
        hypers = {n: h[member] for n, h in self.hypers.items()}
        try:
            with self.feeder.noise(feed, member):
                value, parts = self.loss(params, hypers, batch, draws)
            found = torch.autograd.grad(value, list(params.values()), materialize_grads=True)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            nan = {n: torch.full_like(p.detach()[None], torch.nan) for n, p in params.items()}
            return nan, torch.full((1 + len(PARTS), 1), torch.nan, device=self.device)
        grads = {n: g[None] for n, g in zip(params, found, strict=True)}
        return grads, _row(value.detach()[None], {n: p.detach()[None] for n, p in parts.items()})


def _row(value: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """[4, c]."""
    return torch.stack([value, *(parts[name].to(value.dtype) for name in PARTS)])


def _spread(flags: Tensor, like: Tensor) -> Tensor:
    return flags.reshape(flags.shape + (1,) * (like.ndim - 1))
