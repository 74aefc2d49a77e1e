"""Shifted test sets: corruptions of images, computed here, in five severities.

Bytes in, bytes out; deterministic by seed. The families are those that CIFAR-10-C made usual
(noise, blur, changes of light, digital artefacts); the implementations and the severities are our
own, so numbers can be compared within fsmap and not with tables measured on CIFAR-10-C.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fsmap.errors import InputError

Corruption = Callable[[Tensor, float, torch.Generator], Tensor]
"""Images in [0, 1], a strength and a source of randomness → images, which are clipped after."""

SEVERITIES = (1, 2, 3, 4, 5)


def gaussian_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Independent normal noise of standard deviation ``strength``."""
    return x + strength * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def shot_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Poisson noise: ``strength`` photons at white."""
    return torch.poisson(x * strength, generator=generator) / strength


def impulse_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """A share ``strength`` of the pixels becomes black or white."""
    hit = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    return torch.where(hit < strength / 2, 0.0, torch.where(hit < strength, 1.0, x))


def gaussian_blur(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Convolution with a normal density of standard deviation ``strength`` pixels."""
    radius = math.ceil(3 * strength)
    place = torch.arange(-radius, radius + 1, dtype=x.dtype)
    line = (-0.5 * (place / strength).square()).exp()
    return _filtered(x, torch.outer(line, line))


def defocus_blur(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Convolution with a disk of radius ``strength`` pixels, its rim softened."""
    radius = math.ceil(strength) + 1
    place = torch.arange(-radius, radius + 1, dtype=x.dtype)
    distance = (place[:, None].square() + place.square()).sqrt()
    return _filtered(x, (strength + 0.5 - distance).clamp(0, 1))


def motion_blur(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """The mean along a line of ``strength`` pixels, its direction the same for all images."""
    angle = float(torch.rand((), generator=generator, dtype=x.dtype)) * math.pi
    radius = math.ceil(strength / 2) + 1
    kernel = torch.zeros(2 * radius + 1, 2 * radius + 1, dtype=x.dtype)
    for i in range(33):
        t = strength * (i / 32 - 0.5)
        _dab(kernel, radius + t * math.sin(angle), radius + t * math.cos(angle))
    return _filtered(x, kernel)


def _dab(kernel: Tensor, row: float, column: float) -> None:
    """Add one to a place between four entries."""
    i, j = math.floor(row), math.floor(column)
    down, right = row - i, column - j
    kernel[i : i + 2, j : j + 2] += torch.outer(
        kernel.new_tensor([1 - down, down]), kernel.new_tensor([1 - right, right])
    )


def brightness(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Everything lighter by ``strength``."""
    return x + strength


def contrast(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Deviations from each image's mean shrink to a share ``strength``."""
    centre = x.mean((1, 2, 3), keepdim=True)
    return centre + strength * (x - centre)


def pixelate(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Each image is reduced to a share ``strength`` of its side and enlarged again."""
    side = max(1, round(x.shape[-1] * strength))
    small = F.interpolate(x, size=(side, side), mode="area")
    return F.interpolate(small, size=x.shape[-2:], mode="nearest")


def block_quantization(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Cosine coefficients of blocks of 4 × 4 rounded to multiples: what strong compression does."""
    size = 4
    k, n = torch.arange(size, dtype=x.dtype)[:, None], torch.arange(size, dtype=x.dtype)
    basis = torch.cos(math.pi * (2 * n + 1) * k / (2 * size)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)  # rows are orthonormal
    height, width = x.shape[-2:]
    padded = F.pad(x, (0, -width % size, 0, -height % size), mode="replicate")
    blocks = padded.unfold(2, size, size).unfold(3, size, size)  # [N, C, h, w, 4, 4]
    coefficients = basis @ blocks @ basis.mT
    coarse = strength * (1 + k + n)  # high frequencies lose more
    rounded = basis.mT @ ((coefficients / coarse).round() * coarse) @ basis
    back = rounded.permute(0, 1, 2, 4, 3, 5).reshape(padded.shape)
    return back[..., :height, :width]


CORRUPTIONS: dict[str, tuple[Corruption, tuple[float, ...]]] = {
    "gaussian-noise": (gaussian_noise, (0.04, 0.06, 0.08, 0.11, 0.15)),
    "shot-noise": (shot_noise, (400.0, 200.0, 100.0, 60.0, 35.0)),
    "impulse-noise": (impulse_noise, (0.01, 0.02, 0.04, 0.07, 0.11)),
    "gaussian-blur": (gaussian_blur, (0.5, 0.75, 1.0, 1.3, 1.7)),
    "defocus-blur": (defocus_blur, (0.7, 1.0, 1.4, 1.8, 2.4)),
    "motion-blur": (motion_blur, (2.0, 3.0, 4.0, 5.5, 7.0)),
    "brightness": (brightness, (0.05, 0.1, 0.17, 0.25, 0.35)),
    "contrast": (contrast, (0.75, 0.55, 0.4, 0.27, 0.16)),
    "pixelate": (pixelate, (0.85, 0.7, 0.55, 0.45, 0.35)),
    "compression": (block_quantization, (0.04, 0.07, 0.11, 0.16, 0.23)),
}
"""Each corruption with its strength at severities 1 to 5."""


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupt a set of images.

    Args:
        images: Bytes ``[N, C, H, W]``.
        name: A key of ``CORRUPTIONS``.
        severity: 1 (hardly visible) to 5.
        seed: Of what is random; severities of one corruption share it, corruptions do not.

    Returns:
        Bytes of the same shape, on the same device.

    Raises:
        InputError: If there is no such corruption or severity, or the images are not bytes.
    """
    if name not in CORRUPTIONS:
        message = f"unknown corruption {name!r}; known: {', '.join(CORRUPTIONS)}"
        raise InputError(message)
    if severity not in SEVERITIES:
        message = f"severity must be 1, 2, 3, 4 or 5, got {severity}"
        raise InputError(message)
    if images.dtype != torch.uint8 or images.dim() != 4:
        message = (
            f"images must be bytes [N, C, H, W], got {images.dtype} of shape {list(images.shape)}"
        )
        raise InputError(message)
    change, strengths = CORRUPTIONS[name]
    stream = zlib.crc32(f"{name}/{seed}".encode())
    generator = torch.Generator().manual_seed(stream)
    parts = [
        change(part.to("cpu", torch.float32) / 255, strengths[severity - 1], generator)
        for part in images.split(2_000)
    ]
    return (torch.cat(parts).clamp(0, 1) * 255).round().to(torch.uint8).to(images.device)


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """Each channel convolved with a kernel that sums to one; edges repeat."""
    kernel = kernel / kernel.sum()
    radius = kernel.shape[-1] // 2
    padded = F.pad(x, (radius,) * 4, mode="replicate")
    weight = kernel.expand(x.shape[1], 1, *kernel.shape)
    return F.conv2d(padded, weight, groups=x.shape[1])
