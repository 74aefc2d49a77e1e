"""One step of many members: gradients under ``vmap``, clipped one by one, one optimizer for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsmap.errors import InputError, MemoryLimitError
from fsmap.functional import SHARE, count, differentiable_attention, free_bytes
from fsmap.objective.geometry import LogDet, Variational
from fsmap.objective.objective import Objective
from fsmap.train.feed import Chunk, Feed, Feeder
from fsmap.train.optim import clip_factor, global_norm, scale
from fsmap.train.step import PARTS, Hypers, LossFn
from fsmap.types import Batch, Draws, ModelFn, Params

CPU_WORK = 3e7
"""P·B above which a CPU gains nothing by vectorizing: the arithmetic of one member keeps it busy.
Measured by ``python -m benchmarks.population``."""
COPIES = 8  # tensors like the parameters in a step: gradients, moments, ψ, shifted copies
PASSES = 4  # memory of a pass over evaluation points, derivative included, in training passes

Gradient = Callable[..., Any]


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
        compile: bool = False,
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
            compile: Compile the gradient.
        """
        self.loss, self.params, self.hypers, self.feeder = loss, params, hypers, feeder
        self.optimizer, self.clip, self.compile = optimizer, clip, compile
        self._compiled: dict[object, Gradient] = {}
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
        if members.stop - members.start == 1 and not self.compile:
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
        inputs = (params, hypers, chunk.batch, chunk.draws)
        try:
            with differentiable_attention():  # the fused kernels cannot be vectorized
                if self.compile:
                    gradient = self._compile(gradient, inputs)
                grads, (value, parts) = gradient(*inputs)
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

    def _compile(self, gradient: Gradient, inputs: tuple[Any, ...]) -> Gradient:
        """The operators that the gradient runs, recorded and compiled once for each shape.

        ``build`` looks at numbers, which torch.compile cannot follow; a record of the operators
        holds the constants it made.
        """
        key = tuple(None if t is None else t.shape for t in tree_leaves(inputs))
        if key not in self._compiled:
            from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

            recorded = make_fx(gradient)(*inputs)
            self._compiled[key] = torch.compile(recorded, fullgraph=True, dynamic=False)
        return self._compiled[key]

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


def choose_chunk(
    chunk: int | str,
    members: int,
    f: ModelFn,
    params: Params,
    batch: Batch,
    objective: Objective,
    draws: Draws,
) -> int:
    """How many members to vectorize: as many as fit; on a CPU only if it is faster.

    Args:
        chunk: A number, or ``"auto"``.
        members: M.
        f: The model function.
        params: Parameters of one member; so are the batch, the objective and the draws.
        batch: A batch.
        objective: The objective.
        draws: The draws.

    Returns:
        Between 1 and M. 1 means one by one, without ``vmap``.
    """
    if not getattr(f, "pointwise", True):
        return 1  # random layers are seeded member by member
    if chunk != "auto":
        if not isinstance(chunk, int) or chunk < 1:
            message = f"chunk must be a number of members >= 1, or 'auto', got {chunk!r}"
            raise InputError(message)
        return min(chunk, members)
    device = next(iter(params.values())).device
    if device.type == "cpu" and count(params) * len(batch.y) > CPU_WORK:
        return 1
    needed = member_bytes(f, params, batch, objective, draws)
    limit = int(SHARE * free_bytes(device))
    if needed > limit:
        message = (
            f"one member needs about {needed / 1e9:.2f} GB, {limit / 1e9:.2f} GB may be used on "
            f"{device}. Use a smaller batch_size or num_points."
        )
        raise MemoryLimitError(message)
    return even(members, max(1, min(members, limit // needed)))


def even(members: int, most: int) -> int:
    """The chunk size that cuts M into as few chunks as ``most`` allows, of nearly equal size."""
    chunks = -(-members // most)
    return -(-members // chunks)


def member_bytes(
    f: ModelFn, params: Params, batch: Batch, objective: Objective, draws: Draws
) -> int:
    """Roughly the memory that one member needs during a step; makes one forward pass."""
    first = next(iter(params.values()))
    needed = COPIES * count(params) * first.element_size()
    made, _ = _made(f, params, batch.x)
    needed += made
    if draws.x is not None:
        made, outputs = _made(f, params, draws.x)
        needed += PASSES * made
        if isinstance(objective.geometry, LogDet | Variational):
            needed += (
                3 * outputs * count(params) * first.element_size()
            )  # the Jacobian and its gradient
    return needed


def _made(f: ModelFn, params: Params, x: Any) -> tuple[int, int]:
    """Bytes of everything a forward pass makes, and the number of its outputs."""
    with torch.no_grad(), _Counter() as counter:
        out = f({n: p.detach() for n, p in params.items()}, x)
    return counter.bytes, out.numel()


class _Counter(TorchDispatchMode):
    """Adds up the sizes of what operations return, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and _address(t) not in given:
                self.bytes += t.numel() * t.element_size()
        return result


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
