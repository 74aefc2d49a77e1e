"""A population of ReLU perceptrons in one matrix, with the gradient of the paper's objective."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsmap.functional import count
from fsmap.train.fused import triton_gradient
from fsmap.train.fused.feed import BlockFeed, StackedFeed
from fsmap.train.fused.layout import Layout
from fsmap.train.fused.terms import check_model, kernels_fit, read_terms
from fsmap.train.fused.torch_gradient import TorchGradient
from fsmap.train.grid import SEED, SPLIT
from fsmap.train.members import Members
from fsmap.types import Params


class Gradient(Protocol):
    """What both gradients have: see :class:`TorchGradient`."""

    grad: Tensor
    sums: Tensor

    def __call__(self, x: Tensor, y: Tensor, psi: Tensor | None) -> None:
        """Fill ``grad`` and ``sums``."""


class FusedPopulation:
    """Stacked members in one matrix, and how they take a step together.

    Args:
        members: Starts, objectives and data.
        batch_size: B.

    Attributes:
        leaf: Parameters of all members, ``[M, P']``: what the optimizer updates.
    """

    def __init__(self, members: Members, batch_size: int) -> None:
        grid, like = members.grid, members.like
        sizes = check_model(members.f)
        terms = read_terms([members.objective(k) for k in range(len(grid))])
        self.layout = layout = Layout(sizes, len(grid), batch_size, terms.num_points)
        theta = layout.pack({n: p.detach() for n, p in members.params.items()})
        streams = grid.groups(SEED, SPLIT)
        group = torch.empty(len(grid), dtype=torch.long)
        for place, found in enumerate(streams.values()):
            group[found] = place
        group = group.to(like.device)
        names = members.splits.names
        drawn = [(int(seed), names.index(s) if len(names) > 1 else 0) for seed, s in streams]  # type: ignore[call-overload]
        self._feed = BlockFeed(layout, members.splits, drawn, terms.px)
        self._weights = terms.weights(batch_size, count(members.first(0)), theta)  # [4, 4, M]
        self._gradient = _gradient(layout, theta, group, terms.scales(theta), terms.beta)
        self._theta = theta
        self.leaf = theta.detach().requires_grad_()
        self.leaf.grad = self._gradient.grad

    def make(self, step: int) -> StackedFeed:
        """What a step consumes."""
        return self._feed.make(step)

    def step(self, feed: StackedFeed, optimizer: Optimizer) -> Tensor:
        """Differentiate and update; members never meet, so one that is not finite disturbs none.

        Args:
            feed: From :meth:`make`.
            optimizer: Updates ``leaf``.

        Returns:
            Loss, likelihood, prior, geometry and the norm of the gradient, ``[5, M]``.
        """
        y, psi = feed.rest
        self._gradient(feed.x, y, psi)
        squares = torch.linalg.vector_norm(self._theta, dim=1).square()  # [M]
        sums = self._gradient.sums
        numbers = torch.stack([sums[0], sums[1], squares, torch.ones_like(squares)])  # [4, M]
        norm = torch.linalg.vector_norm(self._gradient.grad, dim=1)
        row = torch.cat([(self._weights * numbers).sum(1), norm[None]])
        optimizer.step()
        return row

    def params(self) -> Params:
        """Named parameters ``[M, ...]``, copied."""
        return {n: p.clone() for n, p in self.layout.view(self._theta).items()}


def _gradient(
    layout: Layout, theta: Tensor, group: Tensor, scales: Tensor, beta: float
) -> Gradient:
    use_kernels = (
        theta.is_cuda
        and theta.dtype == torch.float32
        and triton_gradient.available()
        and kernels_fit(layout.sizes)
    )
    made = triton_gradient.TritonGradient if use_kernels else TorchGradient
    return made(layout, theta, group, scales, beta)
