"""Where everything lies: parameters of all members in one matrix, points of all passes in one.

Parameters are ``[M, P']``, where P' is P rounded up so that every tensor of every member starts at
an aligned address. The points of one step are rows

    0 … B           training batch, seen by θ
    B … B + S       evaluation points, seen by θ
    R_θ … R_θ + S   the same evaluation points, seen by θ + βψ

where R_θ is B + S rounded up to whole tiles. A row that fills a tile up has no weight in the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.types import Params

TILE = 128  # rows; every tile belongs to θ or to θ + βψ
ALIGNED = 64  # parameters; 256 bytes in float32


class Piece(NamedTuple):
    """Where one parameter lies within a member."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers."""
        return int(torch.Size(self.shape).numel())


class Layout:
    """Sizes and places for M members of one perceptron.

    Args:
        sizes: Units of every layer, inputs and the one output included.
        members: M.
        batch: B.
        points: S; 0 where there is no geometry term.
    """

    def __init__(self, sizes: tuple[int, ...], members: int, batch: int, points: int) -> None:
        self.sizes, self.members, self.batch, self.points = sizes, members, batch, points
        self.pieces: dict[str, Piece] = {}
        place = 0
        for layer, (units_in, units_out) in enumerate(zip(sizes, sizes[1:], strict=False)):
            for name, shape in (("weight", (units_out, units_in)), ("bias", (units_out,))):
                piece = Piece(place, shape)
                self.pieces[f"layers.{layer}.{name}"] = piece
                place = _rounded(place + piece.size, ALIGNED)
        self.stride = place  # P'
        self.rows_plain = _rounded(batch + points, TILE)  # R_θ
        self.rows = self.rows_plain + _rounded(points, TILE)
        self.inputs = max(16, _rounded(sizes[0], 16))  # features, filled up with zeros

    @property
    def layers(self) -> int:
        """Weight matrices."""
        return len(self.sizes) - 1

    @property
    def hidden(self) -> tuple[int, ...]:
        """Units of the hidden layers."""
        return self.sizes[1:-1]

    def weight(self, layer: int) -> Piece:
        """Place of a weight matrix ``[out, in]``."""
        return self.pieces[f"layers.{layer}.weight"]

    def bias(self, layer: int) -> Piece:
        """Place of a bias."""
        return self.pieces[f"layers.{layer}.bias"]

    def view(self, flat: Tensor) -> Params:
        """A matrix ``[..., P']`` as named parameters that share its memory."""
        lead = flat.shape[:-1]
        return {
            name: flat[..., p.offset : p.offset + p.size].view(*lead, *p.shape)
            for name, p in self.pieces.items()
        }

    def pack(self, params: Params) -> Tensor:
        """Named parameters ``[..., *shape]`` as a matrix ``[..., P']``, zeros in between."""
        first = next(iter(params.values()))
        lead = first.shape[: first.ndim - len(next(iter(self.pieces.values())).shape)]
        flat = first.new_zeros(*lead, self.stride)
        for name, view in self.view(flat).items():
            view.copy_(params[name])
        return flat


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
