"""The only place where probes are drawn.

A probe ψ in parameter space is a dict of stacked draws ``{name: [R, ...]}``. In training it is a
function of the seed, the optimizer step and the model's trainable parameters, and of nothing else:
the same on every rank, over all micro-batches of a step, after a resume and for a member of a
population whatever the other members are. It is drawn as one vector, by one kernel.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import count, unravel
from fsmap.types import Params


class Source(Protocol):
    """Where an estimator's probes come from."""

    def psi(self, params: Params, num: int = 1) -> Params:
        """ψ ~ N(0, I), ``{name: [num, ...]}``."""

    def signs(self, num: int, size: int, like: Tensor) -> Tensor:
        """Random signs ``[num, size]``."""


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

    def flat_psi(
        self, size: int, num: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """ψ as one tensor ``[num, size]``."""
        source = generator(self.seed, self.step, "psi", device=device)
        return torch.randn((num, size), generator=source, device=device, dtype=dtype)

    def psi(self, params: Params, num: int = 1) -> Params:
        """ψ ~ N(0, I), ``{name: [num, ...]}``: the same on every rank."""
        device = next(iter(params.values())).device
        drawn = unravel(self.flat_psi(count(params), num, device), params)
        return {name: t.to(params[name]) for name, t in drawn.items()}

    def psi_of(self, name: str, like: Tensor, num: int = 1) -> Tensor:
        """ψ of one parameter alone, ``[num, ...]``, for parameters that no rank holds whole."""
        name = name.replace("_orig_mod.", "")  # torch.compile's prefix changes no draw
        return _randn(num, like, generator(self.seed, self.step, name, device=like.device))

    def signs(self, num: int, size: int, like: Tensor) -> Tensor:
        """Random signs ``[num, size]``: other ones on every rank."""
        return rademacher(num, size, generator(self.seed, self.step, "signs", self.rank), like)


class FromGenerator(NamedTuple):
    """Probes from one generator (None: torch's own)."""

    generator: torch.Generator | None = None

    def psi(self, params: Params, num: int = 1) -> Params:
        """ψ ~ N(0, I), ``{name: [num, ...]}``."""
        return normal(params, num, self.generator)

    def signs(self, num: int, size: int, like: Tensor) -> Tensor:
        """Random signs ``[num, size]``."""
        return rademacher(num, size, self.generator, like)


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


def basis(params: Params) -> Params:
    """The complete set, √P times every unit vector: the mean over probes is the exact trace."""
    first = next(iter(params.values()))
    total = count(params)
    eye = math.sqrt(total) * torch.eye(total, dtype=first.dtype, device=first.device)
    return unravel(eye, params)


def check(psi: object, params: Params) -> None:
    """Raise InputError if ``psi`` is not ``{name: [R, ...]}`` with the names of ``params``."""
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


def check_signs(probes: object, size: int) -> None:
    """Raise InputError if cotangents are not ``[R, size]``."""
    if not isinstance(probes, Tensor) or probes.ndim != 2 or probes.shape[1] != size:
        got = tuple(probes.shape) if isinstance(probes, Tensor) else type(probes).__name__
        message = f"probes of 'vjp' must be [R, {size}], got {got}"
        raise InputError(message)
