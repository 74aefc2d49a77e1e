"""Symmetries as families of directions in parameter space, each with the claim J v = 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.assess.wiring.units import Member
from fsmap.types import Params

KINDS = {
    "twin_units": "equal in all that belongs to them, a fixed point of their exchange (Theorem 2)",
    "twin_inputs": "equal incoming weights: what leaves them can be traded",
    "twin_heads": "equal in all that belongs to them, a fixed point of their exchange (Theorem 2)",
    "silent_units": "zero on all points: nothing that enters or leaves them has an effect",
    "constant_units": "constant on all points: what leaves them trades with a bias",
    "unread_units": "zero outgoing weights: nothing that enters them has an effect",
    "scale": "homogeneous activation: factors move freely from layer to layer",
    "batchnorm_scale": "scale of weights before a BatchNorm",
    "batchnorm_bias": "bias before a BatchNorm",
    "layernorm_shift": "common shift of all units before a LayerNorm",
    "layernorm_scale": "common scale of all units before a normalization",
    "layernorm_readers": "weights behind a LayerNorm, whose outputs sum up to zero",
    "layernorm_rotation": "rotation of units before a LayerNorm, undone by what is behind it",
    "narrow_readers": "units read by linear maps with a kernel: what is inside is not seen",
    "linear_units": "ReLU units that are active on all points: linear maps there",
    "bias_shift": "biases that can be traded, with only linear maps in between",
    "linear_maps": "nothing nonlinear in between: any linear map fits in",
    "attention_query_key": "queries and keys of a head: a linear map and its inverse fit between",
    "attention_key_bias": "bias of the keys: softmax does not see it",
    "no_effect": "parameters whose change has no effect on any point",
}
PATHOLOGICAL = (
    *("twin_units", "twin_inputs", "twin_heads"),
    *("silent_units", "constant_units", "unread_units"),
)
"""Kinds that hold at special parameters only, where FS-MAP without jitter has infinite density."""

ON_POINTS = ("silent_units", "constant_units")
"""Kinds that a few points show by chance, and more points would not."""


SWITCHES = {"relu", "leaky_relu", "prelu"}  # the identity where they are positive


class Family(NamedTuple):
    """Directions with the claim J v = 0."""

    kind: str
    where: str
    shape: tuple[int, ...]  # of the coefficients
    build: Callable[[Tensor], Params]  # linear; names that are missing are zero
    units: tuple[int, ...] = ()
    distance: float = 0.0  # to the fixed point, relative

    @property
    def size(self) -> int:
        """How many directions."""
        return math.prod(self.shape)

    def direction(self, coefficients: Tensor, params: Params) -> Params:
        """The direction for coefficients ``[size]``, complete."""
        given = self.build(coefficients.reshape(self.shape))
        return {n: given[n] if n in given else torch.zeros_like(p) for n, p in params.items()}


def unique(members: list[Member]) -> list[Member]:
    """Members without repetitions (a layer that is called twice reads with one weight)."""
    return list({(m.name, m.dim, m.start): m for m in members}.values())


def trainable(members: list[Member], params: Params) -> bool:
    """Whether all of them are among the parameters."""
    return all(m.name in params for m in members)
