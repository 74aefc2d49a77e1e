"""Probes of estimators: draws and checks.

A probe ψ in parameter space is a dict of stacked draws ``{name: [R, ...]}``. In training it comes
from a :class:`fsmap.Stream`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import move_points
from fsmap.types import Params


class Source(Protocol):
    """Interface of a source of probes."""

    def psi(self, params: Params, num: int = 1) -> Params:
        """ψ ~ N(0, I), ``{name: [num, ...]}``."""

    def signs(self, num: int, size: int, like: Tensor) -> Tensor:
        """Random signs ``[num, size]``."""


class FromGenerator(NamedTuple):
    """Probes from one generator (None: torch's own)."""

    generator: torch.Generator | None = None

    def psi(self, params: Params, num: int = 1) -> Params:
        """ψ ~ N(0, I), ``{name: [num, ...]}``."""
        return normal(params, num, self.generator)

    def signs(self, num: int, size: int, like: Tensor) -> Tensor:
        """Random signs ``[num, size]``."""
        return rademacher(num, size, self.generator, like)


def normal(params: Params, num: int, generator: torch.Generator | None) -> Params:
    """``num`` probes N(0, I)."""
    return {name: randn_like(num, p, generator) for name, p in params.items()}


def randn_like(num: int, p: Tensor, generator: torch.Generator | None) -> Tensor:
    """``[num, ...]``; a double is drawn as a float: quicker, and the same for both precisions."""
    dtype = torch.float32 if p.dtype == torch.float64 else p.dtype
    draw = torch.randn((num, *p.shape), dtype=dtype, device=p.device, generator=generator)
    return draw.to(p.dtype)


def check(psi: object, params: Params) -> None:
    """Raise InputError if ``psi`` is not ``{name: [R, ...]}`` with the names of ``params``."""
    how = "fsmap.linalg.probes.normal(params, R, generator) makes them."
    if not isinstance(psi, dict) or not psi:
        raise InputError(f"probes must be {{name: [R, ...]}}, got {type(psi).__name__}; {how}")
    stacked = next(iter(psi.values())).shape[:1]  # [R]
    for name, p in params.items():
        expected = [*stacked, *p.shape]
        got = [*psi[name].shape] if name in psi else None
        if got != expected:
            raise InputError(f"probes of {name!r} must be {expected}, got {got}; {how}")


def rademacher(num: int, size: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """``[num, size]`` random signs: of all probes with unit covariance, those of least variance."""
    device = like.device if generator is None else generator.device
    signs = torch.randint(0, 2, (num, size), generator=generator, device=device)
    there: Tensor = move_points(2 * signs - 1, like.device)  # without waiting for a GPU
    return there.to(like)


def check_signs(probes: object, size: int) -> None:
    """Raise InputError if probes are not ``[R, size]``."""
    if not isinstance(probes, Tensor) or probes.ndim != 2 or probes.shape[1] != size:
        got = tuple(probes.shape) if isinstance(probes, Tensor) else type(probes).__name__
        raise InputError(f"probes must be [R, {size}] here, got {got}")


def check_number(num: float) -> int:
    """The number of probes; raises InputError unless it is an integer of at least 1."""
    if not isinstance(num, int | float) or num < 1 or num != int(num):
        raise InputError(f"probes must be an integer of at least 1, got {num}")
    return int(num)
