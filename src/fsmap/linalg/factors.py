r"""The Jacobian of a model in factored form.

For a weight that enters through linear layers alone, row (s, k) of its block is
$\sum_t \delta_{skt} h_{st}^\top$ (see :mod:`fsmap.linalg.uses`). Where a layer is applied once per
point (T = 1) the block's share of the Gram matrix is a product of two small ones,

    (JJᵀ)[sk, s'k'] = (δ_sk·δ_s'k') (h_s·h_s' + 1),      ‖J_sk‖² = ‖δ_sk‖² (‖h_s‖² + 1),

(the 1 is the bias) and nothing of size S·K·P is ever made: for an MLP with layers of width d a Gram
matrix costs (SK)²·d per layer instead of (SK)²·d². Everything is differentiable in the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.linalg.inner import inner

NARROW = 4096  # columns; fewer are multiplied together with others


class Outer(NamedTuple):
    """Block of a linear layer: row (s, k) of its weight is Σ_t δ hᵀ, of its bias Σ_t δ."""

    names: tuple[str, ...]  # weight, or weight and bias
    inputs: Tensor  # [S, T, i]  h
    grads: Tensor  # [S, K, T, o]  δ

    def columns(self) -> list[Tensor]:
        """The block written out: [S, K, o·i], and [S, K, o] for a bias."""
        S, K, T, o = self.grads.shape
        if T == 1:
            weight = (self.grads[:, :, 0, :, None] * self.inputs[:, :, None]).flatten(2)
        else:
            weight = (self.grads.mT.reshape(S, K * o, T) @ self.inputs).reshape(S, K, -1)
        return [weight, self.grads.sum(2)][: len(self.names)]

    def gram(self) -> Tensor:
        """Inner products of all pairs of rows: [SK, SK]."""
        S, K, T, _ = self.grads.shape
        if T > 1:
            return _total(inner(rows.flatten(0, 1)) for rows in self.columns())
        of_grads = inner(self.grads.reshape(S * K, -1)).reshape(S, K, S, K)
        of_inputs = inner(self.inputs[:, 0]) + (len(self.names) - 1)
        return (of_grads * of_inputs[:, None, :, None]).reshape(S * K, S * K)

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        if self.inputs.shape[1] > 1:
            return _total(rows.square().sum(-1) for rows in self.columns())
        of_inputs = self.inputs.square().sum((1, 2)) + (len(self.names) - 1)
        return self.grads.square().sum((2, 3)) * of_inputs[:, None]

    def gram_product(self, v: Tensor) -> Tensor:
        """JJᵀv, [R, S, K] → [R, S, K]."""
        R, (S, T, i), bias = len(v), self.inputs.shape, len(self.names) - 1
        pulled = torch.einsum("rsk,skto->rsto", v, self.grads).flatten(1, 2)  # [R, ST, o]
        h = self.inputs.flatten(0, 1)  # [ST, i]
        if S * T <= 2 * i:
            pushed = (inner(h) + bias) @ pulled
        else:
            pushed = h @ (pulled.mT @ h).mT + bias * pulled.sum(1, keepdim=True)
        return torch.einsum("rsto,skto->rsk", pushed.reshape(R, S, T, -1), self.grads)

    def compact(self) -> list[Block]:
        """Written out where that takes less room."""
        S, K, T, o = self.grads.shape
        if self.inputs.numel() + self.grads.numel() <= S * K * o * self.inputs.shape[2]:
            return [self]
        return [Dense((n,), c) for n, c in zip(self.names, self.columns(), strict=True)]

    def to(self, dtype: torch.dtype) -> Outer:
        """In another precision."""
        return Outer(self.names, self.inputs.to(dtype), self.grads.to(dtype))

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Outer:
        """With a linear map applied to each point's outputs."""
        return self._replace(grads=mix(self.grads))


class Dense(NamedTuple):
    """Block of any other parameter."""

    names: tuple[str]
    values: Tensor  # [S, K, p]

    def columns(self) -> list[Tensor]:
        """The block: [S, K, p]."""
        return [self.values]

    def gram(self) -> Tensor:
        """Inner products of all pairs of rows: [SK, SK]."""
        return inner(self.values.flatten(0, 1))

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        return self.values.square().sum(-1)

    def compact(self) -> list[Block]:
        """As it is."""
        return [self]

    def gram_product(self, v: Tensor) -> Tensor:
        """JJᵀv, [R, S, K] → [R, S, K]."""
        rows = self.values.flatten(0, 1)
        return ((v.flatten(1) @ rows) @ rows.mT).reshape(v.shape)

    def to(self, dtype: torch.dtype) -> Dense:
        """In another precision."""
        return Dense(self.names, self.values.to(dtype))

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Dense:
        """With a linear map applied to each point's outputs."""
        return self._replace(values=mix(self.values))


Block = Outer | Dense


class Factors(NamedTuple):
    """J at S points, block by block, and the outputs of the same pass."""

    names: tuple[str, ...]  # the parameters, in their order
    blocks: list[Block]
    out: Tensor  # [S, K]

    def rows(self) -> Tensor:
        """J written out: [S, K, P]."""
        columns = {
            name: column
            for block in self.blocks
            for name, column in zip(block.names, block.columns(), strict=True)
        }
        return torch.cat([columns[name] for name in self.names], dim=-1)

    def gram(self) -> Tensor:
        """JJᵀ in float64: [SK, SK]."""
        products: list[Outer] = []
        written: list[Tensor] = []
        for block in self.blocks:
            if isinstance(block, Outer) and block.inputs.shape[1] == 1:
                products.append(block)
            else:
                written += block.columns()
        narrow = [c for c in written if c.shape[-1] < NARROW]
        wide = [c for c in written if c.shape[-1] >= NARROW]
        if narrow:
            wide.append(torch.cat(narrow, dim=-1))
        terms = [block.to(torch.float64).gram() for block in products]
        return _total([*terms, *(inner(c.double().flatten(0, 1)) for c in wide)])

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        return _total(block.squares() for block in self.blocks)

    def compact(self) -> Factors:
        """Each block in the form that takes less room."""
        return self._replace(blocks=[small for block in self.blocks for small in block.compact()])

    def gram_product(self, v: Tensor) -> Tensor:
        """JJᵀv of several vectors, [R, S, K] → [R, S, K]; no matrix of size [SK, SK] is made."""
        return _total(block.gram_product(v) for block in self.blocks)

    def to(self, dtype: torch.dtype) -> Factors:
        """In another precision."""
        return self._replace(blocks=[block.to(dtype) for block in self.blocks])

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Factors:
        """With a linear map [S, K, *] → [S, Q, *] applied to each point's outputs."""
        return self._replace(blocks=[block.mixed(mix) for block in self.blocks])


def joined(parts: list[Factors]) -> Factors:
    """The factors of several groups of points, as one."""
    blocks = [
        type(same[0])(
            same[0].names, *(torch.cat(t) for t in zip(*(b[1:] for b in same), strict=True))
        )
        for same in zip(*(part.blocks for part in parts), strict=True)
    ]
    return Factors(parts[0].names, blocks, torch.cat([part.out for part in parts]))


def _total(terms: Iterable[Tensor]) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
