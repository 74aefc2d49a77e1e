r"""The Jacobian of a model whose points do not see each other, in factored form.

For a weight that enters through linear layers alone, row (s, k) of its block is $\sum_t \delta_{skt} h_{st}^\top$ (see :mod:`fsmap.linalg.uses`). Where a layer is
applied once per point (T = 1) the block's share of the Gram matrix is a product of two small ones,

    (JJᵀ)[sk, s'k'] = (δ_sk·δ_s'k') (h_s·h_s'),          ‖J_sk‖² = ‖δ_sk‖² ‖h_s‖²,

and nothing of size S·K·P is ever made: for an MLP with layers of width d a Gram matrix costs (SK)²·d per layer instead of (SK)²·d². The cotangents of all layers
come from one forward pass and K reverse passes over the batch. Everything is differentiable in ``params``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Outer(NamedTuple):
    """Block of a weight: row (s, k) is Σ_t δ hᵀ."""

    inputs: Tensor  # [S, T, i]  h
    grads: Tensor  # [S, K, T, o]  δ

    def rows(self) -> Tensor:
        """The block written out: [S, K, o·i]."""
        if self.inputs.shape[1] == 1:
            return (self.grads[:, :, 0, :, None] * self.inputs[:, :, None]).flatten(2)
        return (self.grads.mT @ self.inputs[:, None]).flatten(2)

    def gram(self) -> Tensor:
        """Inner products of all pairs of rows: [SK, SK]."""
        S, K, T, _ = self.grads.shape
        if T > 1:
            return _inner(self.rows().flatten(0, 1))
        cotangents = _inner(self.grads.reshape(S * K, -1)).reshape(S, K, S, K)
        return (cotangents * _inner(self.inputs[:, 0])[:, None, :, None]).reshape(S * K, S * K)

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        if self.inputs.shape[1] > 1:
            return self.rows().square().sum(-1)
        return self.grads.square().sum((2, 3)) * self.inputs.square().sum((1, 2))[:, None]

    def to(self, dtype: torch.dtype) -> Outer:
        """In another precision."""
        return Outer(self.inputs.to(dtype), self.grads.to(dtype))

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Outer:
        """With a linear map applied to each point's outputs."""
        return Outer(self.inputs, mix(self.grads))


class Dense(NamedTuple):
    """Block of any other parameter."""

    values: Tensor  # [S, K, p]

    def rows(self) -> Tensor:
        """The block: [S, K, p]."""
        return self.values

    def gram(self) -> Tensor:
        """Inner products of all pairs of rows: [SK, SK]."""
        return _inner(self.values.flatten(0, 1))

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        return self.values.square().sum(-1)

    def to(self, dtype: torch.dtype) -> Dense:
        """In another precision."""
        return Dense(self.values.to(dtype))

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Dense:
        """With a linear map applied to each point's outputs."""
        return Dense(mix(self.values))


Block = Outer | Dense


class Factors(NamedTuple):
    """J at S points, block by block, and the outputs of the same pass."""

    blocks: dict[str, Block]  # in the order of the parameters
    out: Tensor  # [S, K]

    def rows(self) -> Tensor:
        """J written out: [S, K, P]."""
        return torch.cat([block.rows() for block in self.blocks.values()], dim=-1)

    def gram(self) -> Tensor:
        """JJᵀ in float64: [SK, SK]."""
        return _total(block.to(torch.float64).gram() for block in self._grouped())

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        return _total(block.squares() for block in self.blocks.values())

    def to(self, dtype: torch.dtype) -> Factors:
        """In another precision."""
        return Factors({n: b.to(dtype) for n, b in self.blocks.items()}, self.out)

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Factors:
        """With a linear map [S, K, *] → [S, Q, *] applied to each point's outputs."""
        return Factors({n: b.mixed(mix) for n, b in self.blocks.items()}, self.out)

    def _grouped(self) -> list[Block]:
        """The blocks, small dense ones joined into one matrix."""
        dense = [b.values for b in self.blocks.values() if isinstance(b, Dense)]
        outer: list[Block] = [b for b in self.blocks.values() if isinstance(b, Outer)]
        return [*outer, Dense(torch.cat(dense, dim=-1))] if dense else outer


def joined(parts: list[Factors]) -> Factors:
    """The factors of several groups of points, as one."""
    if len(parts) == 1:
        return parts[0]
    blocks = {
        name: type(block)(*map(torch.cat, zip(*(part.blocks[name] for part in parts), strict=True)))
        for name, block in parts[0].blocks.items()
    }
    return Factors(blocks, torch.cat([part.out for part in parts]))


def _inner(rows: Tensor) -> Tensor:
    return rows @ rows.mT


def _total(terms: Iterable[Tensor]) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
