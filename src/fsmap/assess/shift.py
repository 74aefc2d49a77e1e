"""Metrics of an image classifier on clean, shifted and out-of-distribution images.

Corruptions are computed here in five severities, bytes in, bytes out, deterministic. The
families are those of CIFAR-10-C (noise, blur, changes of light, digital artefacts);
the implementations and the severities are our own, so numbers can be compared within fsmap and not
with tables measured on CIFAR-10-C.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsmap import metrics
from fsmap.assess.landscape import laplacian
from fsmap.data.images import Images, Normalization
from fsmap.errors import InputError
from fsmap.images.build import logits_of

SCALED = "_scaled"  # ending of metrics after temperature scaling
METRICS = ("accuracy", "selective", "nll", "ece", "brier", f"nll{SCALED}", f"ece{SCALED}")
"""In the order of tables. Accuracy and selective prediction do not change with T."""


class Predictions(NamedTuple):
    """Logits and labels of one part of the data."""

    logits: Tensor  # [N, K]
    y: Tensor  # [N]


def measure(test: Predictions, temperature: float | None) -> dict[str, float]:
    """All metrics of a set by name: fractions in [0, 1], NLL in nats.

    The temperature must come from held-out data: fitted on these points it gives too low an NLL and
    ECE. None scales nothing. Selective prediction ranks by entropy, which temperature changes a
    little; the unscaled value is the paper's.
    """
    calibration = {"nll": metrics.nll, "ece": metrics.ece, "brier": metrics.brier}
    found = {
        "accuracy": metrics.accuracy(*test),
        "selective": metrics.selective_accuracy(*test),
        **{name: metric(*test) for name, metric in calibration.items()},
    }
    if temperature is not None:
        scaled = test.logits.double() / temperature
        found |= {f"{name}{SCALED}": metric(scaled, test.y) for name, metric in calibration.items()}
    return found


class Assessment(NamedTuple):
    """The metrics of a classifier; fractions in [0, 1], NLL in nats."""

    temperature: float | None  # T of the held-out images
    sets: dict[str, dict[str, float]]  # metrics of "clean", "cifar10.1", "NAME SEVERITY"
    ood: dict[str, float]  # AUROC by out-of-distribution set
    laplacian: dict[str, tuple[float, float]]  # R(θ) and its standard error by set of points
    reliability: dict[str, metrics.Reliability]  # clean, before and after scaling
    selective: metrics.SelectiveCurve  # clean

    def describe(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        curves = {name: table._asdict() for name, table in self.reliability.items()}
        return {**self._asdict(), "reliability": curves, "selective": self.selective._asdict()}


class Classifier(NamedTuple):
    """A network and the normalization of its inputs."""

    module: nn.Module
    normalize: Normalization

    def logits(self, images: Tensor) -> Tensor:
        """Logits of bytes, on the CPU."""
        return logits_of(self.module, images, self.normalize).cpu()


def assess_images(
    classifier: Classifier,
    test: Images,
    held_out: Images | None = None,
    *,
    foreign: Mapping[str, Tensor] = {},
    shifted: Mapping[str, Images] = {},
    corruptions: Iterable[tuple[str, int]] = (),
    points: Mapping[str, Tensor] = {},
    advance: Callable[[str], None] = lambda _: None,
) -> Assessment:
    """Measure a classifier.

    The temperature comes from ``held_out``, which nothing else has used; without it nothing is
    scaled. ``foreign`` images are out-of-distribution, ``shifted`` ones labelled images of other
    distributions, ``corruptions`` are names and severities, applied to ``test``. R(θ) is taken at
    ``points``; ``advance`` is called with the name of each measurement before it starts.
    """
    T = None
    if held_out is not None and len(held_out.x):
        T = metrics.temperature(classifier.logits(held_out.x), held_out.y)
    clean = Predictions(classifier.logits(test.x), test.y.cpu())
    sets = {"clean": measure(clean, T)}
    for name, images in shifted.items():
        advance(name)
        sets[name] = measure(Predictions(classifier.logits(images.x), images.y.cpu()), T)
    for name, severity in corruptions:
        advance(f"{name} {severity}")
        changed = corrupt(test.x, name, severity)
        sets[f"{name} {severity}"] = measure(Predictions(classifier.logits(changed), clean.y), T)
    reliability = {"as trained": metrics.reliability(*clean)}
    if T is not None:
        reliability["scaled"] = metrics.reliability(clean.logits.double() / T, clean.y)
    laplacians, device = {}, next(classifier.module.parameters()).device
    for name, x in points.items():
        advance(f"R at {name}")
        laplacians[name] = laplacian(classifier.module, classifier.normalize(x.to(device)))
    ood = {n: metrics.ood_auroc(clean.logits, classifier.logits(x)) for n, x in foreign.items()}
    selective = metrics.selective_curve(*clean)
    return Assessment(T, sets, ood, laplacians, reliability, selective)


Corruption = Callable[[Tensor, float, torch.Generator], Tensor]
"""Images in [0, 1], a strength and a generator → images, which are then clipped to [0, 1]."""

SEVERITIES = (1, 2, 3, 4, 5)


def gaussian_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Independent normal noise of standard deviation ``strength``."""
    return x + strength * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def shot_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Poisson noise: ``strength`` photons at white."""
    return torch.poisson(x * strength, generator=generator) / strength


def impulse_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Set a share ``strength`` of the pixels to black or white."""
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
    generator = torch.Generator().manual_seed(generator.initial_seed())  # one angle for all parts
    angle = float(torch.rand((), generator=generator, dtype=x.dtype)) * math.pi
    radius = math.ceil(strength / 2) + 1
    kernel = torch.zeros(2 * radius + 1, 2 * radius + 1, dtype=x.dtype)
    for i in range(33):
        t = strength * (i / 32 - 0.5)
        row, column = radius + t * math.sin(angle), radius + t * math.cos(angle)
        i, j = math.floor(row), math.floor(column)  # one, shared by the four nearest entries
        down, right = (kernel.new_tensor([1 - part, part]) for part in (row - i, column - j))
        kernel[i : i + 2, j : j + 2] += torch.outer(down, right)
    return _filtered(x, kernel)


def brightness(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Add ``strength`` to all pixels."""
    return x + strength


def contrast(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Multiply deviations from each image's mean by ``strength``."""
    centre = x.mean((1, 2, 3), keepdim=True)
    return centre + strength * (x - centre)


def pixelate(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Reduce each image to a share ``strength`` of its side, and enlarge it again."""
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


def corrupt(images: Tensor, name: str, severity: int) -> Tensor:
    """Corrupt images, bytes ``[N, C, H, W]``, with a severity of 1 (hardly visible) to 5.

    All severities of a corruption use the same random numbers.
    """
    if name not in CORRUPTIONS:
        raise InputError(f"unknown corruption {name!r}; known: {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise InputError(f"severity must be 1, 2, 3, 4 or 5, got {severity}")
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise InputError(
            f"images must be bytes [N, C, H, W], got {images.dtype} of shape {list(images.shape)}"
        )
    change, strengths = CORRUPTIONS[name]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/0".encode()))
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
