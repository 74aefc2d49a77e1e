"""All that ``fsmap assess`` says about an image classifier: clean, shifted and foreign images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsmap import metrics
from fsmap.assess.calibration import Predictions, measure
from fsmap.assess.corruptions import corrupt
from fsmap.assess.laplacian import laplacian
from fsmap.data.images.augment import Normalization
from fsmap.data.images.read import Images
from fsmap.train.images.predict import logits_of

Advance = Callable[[str], None]


class Assessment(NamedTuple):
    """What was measured; fractions in [0, 1], NLL in nats.

    Attributes:
        temperature: T of the held-out images, None where there are none.
        sets: Metrics by set: ``clean``, ``cifar10.1``, ``NAME SEVERITY`` of corruptions.
        ood: AUROC by foreign set.
        laplacian: R(θ) and its standard error by set of points.
        reliability: Confidence, accuracy and count per bin, clean, before and after scaling.
        selective: Coverage and accuracy, clean.
    """

    temperature: float | None
    sets: dict[str, dict[str, float]]
    ood: dict[str, float]
    laplacian: dict[str, tuple[float, float]]
    reliability: dict[str, metrics.Reliability]
    selective: metrics.SelectiveCurve

    def describe(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        curves = {name: table._asdict() for name, table in self.reliability.items()}
        return {**self._asdict(), "reliability": curves, "selective": self.selective._asdict()}


class Classifier(NamedTuple):
    """A network and what makes its inputs of bytes."""

    module: nn.Module
    normalize: Normalization

    def logits(self, images: Tensor) -> Tensor:
        """Logits of bytes, on the CPU."""
        return logits_of(self.module, images, self.normalize).cpu()

    def inputs(self, images: Tensor) -> Tensor:
        """Normalized images on the network's device."""
        return self.normalize(images.to(next(self.module.parameters()).device))


def assess_images(
    classifier: Classifier,
    test: Images,
    held_out: Images | None = None,
    *,
    foreign: Mapping[str, Tensor] = {},
    shifted: Mapping[str, Images] = {},
    corruptions: Iterable[tuple[str, int]] = (),
    points: Mapping[str, Tensor] = {},
    advance: Advance = lambda _: None,
) -> Assessment:
    """Measure a classifier.

    Args:
        classifier: The network.
        test: Clean test images.
        held_out: Images for the temperature, which nothing else has seen; None: nothing is scaled.
        foreign: Images of other sets, for OOD detection.
        shifted: Labelled images of other distributions.
        corruptions: Names and severities, applied to ``test``.
        points: Where R(θ) is taken.
        advance: Takes notes on what is going on.

    Returns:
        The numbers.
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
    return Assessment(
        T,
        sets,
        {n: metrics.ood_auroc(clean.logits, classifier.logits(x)) for n, x in foreign.items()},
        _laplacians(classifier, points, advance),
        _reliability(clean, T),
        metrics.selective_curve(*clean),
    )


def _reliability(clean: Predictions, T: float | None) -> dict[str, metrics.Reliability]:
    found = {"as trained": metrics.reliability(*clean)}
    if T is not None:
        found["scaled"] = metrics.reliability(clean.logits.double() / T, clean.y)
    return found


def _laplacians(
    classifier: Classifier, points: Mapping[str, Tensor], advance: Advance
) -> dict[str, tuple[float, float]]:
    found = {}
    for name, images in points.items():
        advance(f"R at {name}")
        generator = torch.Generator().manual_seed(0)
        inputs = classifier.inputs(images)
        found[name] = laplacian(classifier.module, inputs, generator=generator)
    return found
