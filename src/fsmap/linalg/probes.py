"""The only place where probes are drawn.

A probe ψ in parameter space is a dict of stacked draws ``{name: [R, ...]}``. In training it is a
function of (seed, optimizer step, parameter name) and of nothing else: the same on every rank, over
all micro-batches of a step and after a resume.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import count, unravel
from fsmap.types import Params


class Stream(NamedTuple):
    """The random numbers of one optimiser step."""

    seed: int
    step: int
    rank: int = 0
    micro: int = 0  # which micro-batch of the step

    def points(self) -> torch.Generator:
        """Generator of the evaluation points: another one on every rank and micro-batch."""
        return generator(
            self.seed, self.step, "points", self.rank, *[self.micro] * (self.micro > 0)
        )

    def noise(self) -> int:
        """Seed of the random layers (dropout) of the evaluation pass: another one each time."""
        return integer(self.seed, self.step, "noise", self.rank, *[self.micro] * (self.micro > 0))

    def psi(self, params: Params, num: int = 1) -> Params:
        """ψ ~ N(0, I), ``{name: [num, ...]}``: the same on every rank."""
        return {
            name: _randn(num, p, generator(self.seed, self.step, _plain(name), device=p.device))
            for name, p in params.items()
        }


def _plain(name: str) -> str:
    """The name without what ``torch.compile`` puts before it: compiling changes no draw."""
    return name.replace("_orig_mod.", "")


def integer(*parts: object) -> int:
    """A 63-bit number that depends on all parts and on nothing else."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded by :func:`integer` of the parts."""
    return torch.Generator(device).manual_seed(integer(*parts))


def normal(params: Params, num: int, generator: torch.Generator | None) -> Params:
    """``num`` probes N(0, I) from one generator (None: torch's own)."""
    return {name: _randn(num, p, generator) for name, p in params.items()}


def _randn(num: int, p: Tensor, generator: torch.Generator | None) -> Tensor:
    """``[num, ...]``; a double is drawn as a float: quicker, and the same for both precisions."""
    dtype = torch.float32 if p.dtype == torch.float64 else p.dtype
    draw = torch.randn((num, *p.shape), dtype=dtype, device=p.device, generator=generator)
    return draw.to(p.dtype)


def antithetic(psi: Params) -> Params:
    """Each probe together with its negative, ``[2R, ...]``: odd orders in ψ cancel."""
    return {name: torch.cat([p, -p]) for name, p in psi.items()}


def basis(params: Params) -> Params:
    """The complete set, √P times every unit vector: the mean over probes is the exact trace."""
    first = next(iter(params.values()))
    total = count(params)
    eye = math.sqrt(total) * torch.eye(total, dtype=first.dtype, device=first.device)
    return unravel(eye, params)


def check(psi: object, params: Params) -> None:
    """Refuse probes that are not stacked parameters.

    Args:
        psi: What came.
        params: Parameters.

    Raises:
        InputError: If it is not ``{name: [R, ...]}`` with the names and shapes of ``params``.
    """
    message = None
    if not isinstance(psi, dict):
        message = f"must be a dict of stacked draws {{name: [R, ...]}}, got {type(psi).__name__}"
    elif params.keys() - psi.keys():
        message = f"misses {sorted(params.keys() - psi.keys())}"
    else:
        for name, p in params.items():
            if psi[name].shape[1:] != p.shape or psi[name].ndim != p.ndim + 1:
                wanted = ", ".join(map(str, ("R", *p.shape)))
                message = f"{name!r} must be [{wanted}], got {tuple(psi[name].shape)}"
        numbers = sorted({len(psi[name]) for name in params})
        if message is None and len(numbers) > 1:
            message = f"all names need the same number of probes, got {numbers}"
    if message:
        message = f"probes: {message}. fsmap.linalg.probes.normal(params, R, generator) makes them."
        raise InputError(message)


def rademacher(num: int, size: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """``[num, size]`` random signs: of all probes with unit covariance, those of least variance."""
    device = like.device if generator is None else generator.device
    signs = torch.randint(0, 2, (num, size), generator=generator, device=device)
    return (2 * signs - 1).to(like)
