"""Heads on features of a frozen backbone, and the sizes of ``transfer``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fsmap
from fsmap import metrics
from fsmap.assess.calibration import Predictions, measure
from fsmap.errors import UnsupportedModuleError
from fsmap.models.mlp import MLP
from fsmap.paper.experiment import Context, Measured
from fsmap.paper.images.config import ImageConfig
from fsmap.paper.images.measure import GENERATED
from fsmap.paper.images.protocol import generated, other_images, task_of
from fsmap.train.images import ImageSettings
from fsmap.train.images.build import build_model
from fsmap.train.optim import adam

FEATURES, FINETUNE = "features", "finetune"
FROZEN = "the backbone is frozen; a perceptron with one hidden layer is trained on its features"


@dataclasses.dataclass(frozen=True)
class Config(ImageConfig):
    """Sizes; see :class:`ImageConfig`.

    Attributes:
        forms: ``features``, ``finetune``.
        backbone: A model of an image run that comes with its weights, and resizes by itself.
        hidden: Units of the head on frozen features.
        steps: Adam steps of that head.
        strengths: λ of that head; the best on held-out images is kept.
    """

    datasets: tuple[str, ...] = ("cifar10",)
    cifar10_epochs: int = 3
    batch: int = 64
    points: int = 64
    lr: float = 1e-3
    forms: tuple[str, ...] = (FEATURES, FINETUNE)
    backbone: str = "resnet50-imagenet"
    hidden: int = 256
    steps: int = 4_000
    strengths: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def heads(config: Config, context: Context) -> Iterator[Measured]:
    """Train heads on frozen features, every λ and seed as one population.

    Args:
        config: Sizes.
        context: Device and data.

    Yields:
        Metrics of every head; ``chosen`` marks PS-MAP and the λ that is best on held-out images.
    """
    made = generated(config, "cifar10", context)
    parts = features(config, context, made)
    width = parts["train"].x.shape[1]
    px = fsmap.px.Empirical(parts["other"].x)
    f, _ = fsmap.functional(_head(config, width, 0, context))

    def build(strength: Tensor) -> fsmap.Objective:
        return fsmap.l_map(
            fsmap.Categorical(),
            fsmap.Normal((1 / (config.cifar10_weight_decay * len(parts["train"].y))) ** 0.5),
            px,
            num_points=config.points,
            num_data=len(parts["train"].y),
            reg_strength=strength,
            estimator="jvp",
        )

    grid = fsmap.Grid(strength=[0.0, *config.strengths], seed=range(config.seeds))
    states, _ = fsmap.fit_population(
        build,
        grid,
        f,
        parts["train"],
        steps=config.steps,
        init=functools.partial(_head, config, width, context=context),
        optimizer=adam(config.lr),
        batch_size=config.batch,
        log_every=100,
        progress=False,
    )
    yield from _rows_of_heads(config, states, parts, made)


def _head(config: Config, width: int, seed: int, context: Context) -> MLP:
    draws = torch.Generator().manual_seed(seed)
    sizes = [width, config.hidden, 10]
    return MLP(sizes, "relu", generator=draws).to(context.device, torch.float32)


def _rows_of_heads(
    config: Config, states: Any, parts: dict[str, fsmap.Batch], made: bool
) -> Iterator[Measured]:
    found = []
    for k, member in enumerate(states.grid):
        params = states.member(k).params
        with torch.no_grad():
            valid, test, other = (states.f(params, parts[p].x) for p in ("valid", "test", "other"))
        T = metrics.temperature(valid, parts["valid"].y)
        values = measure(Predictions(test, parts["test"].y), T)
        values |= {"temperature": T, "ood_auroc": metrics.ood_auroc(test, other)}
        found.append((member, metrics.nll(valid, parts["valid"].y), values))
    mean = {
        s: sum(nll for m, nll, _ in found if m["strength"] == s) / config.seeds
        for s in config.strengths
    }
    best = min(mean, key=lambda s: mean[s])
    notes = (FROZEN, GENERATED) if made else (FROZEN,)
    for member, _, values in found:
        strength = member["strength"]
        about = {"dataset": "cifar10", "form": FEATURES, "row": FEATURES, "generated": made}
        about |= {"reg_strength": strength, "chosen": strength in (0.0, best)}
        about |= {"px": "D' = cifar100" if strength else None, "epochs": 0}
        about["images"] = len(parts["train"].y)
        method = "l-map" if strength else "ps-map"
        for name, value in values.items():
            yield Measured(name, value, method, int(member["seed"]), about, notes)


def features(config: Config, context: Context, made: bool) -> dict[str, fsmap.Batch]:
    """Features of the frozen backbone, standardized by those of the training images.

    Args:
        config: Sizes.
        context: Device and data.
        made: Whether images are generated.

    Returns:
        ``train``, ``valid``, ``test`` and ``other`` (D', labels without meaning).
    """
    task = task_of("cifar10", None, 0.0, config.limit, made, context.data_dir)
    settings = ImageSettings(data="cifar10", model=config.backbone, width=config.width)
    module = without_head(build_model(settings, data_dir=context.data_dir))
    module = module.to(context.device).eval()
    foreign = other_images(task, "cifar10", 10_000, made, context.data_dir)
    sets = {"train": task.train, "valid": task.valid, "test": task.test}
    found = {name: fsmap.Batch(images.x, images.y) for name, images in sets.items()}
    found["other"] = fsmap.Batch(foreign, torch.zeros(len(foreign)).long())
    out = {}
    for name, batch in found.items():
        context.advance(f"features: {name}")
        with torch.no_grad():
            x = torch.cat(
                [
                    module(task.normalize(part.to(context.device))).flatten(1)
                    for part in batch.x.split(250)
                ]
            )
        out[name] = fsmap.Batch(x, batch.y.to(context.device))
    centre, spread = out["train"].x.mean(0), out["train"].x.std(0).clamp_min(1e-6)
    return {name: b._replace(x=(b.x - centre) / spread) for name, b in out.items()}


def without_head(network: nn.Module) -> nn.Module:
    """Take the last linear layer off, so that features come out instead of logits.

    Args:
        network: A classifier; changed.

    Returns:
        The same module.

    Raises:
        UnsupportedModuleError: If it has no linear layer.
    """
    linear = [name for name, m in network.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        message = f"{type(network).__name__} has no linear layer that could be its head"
        raise UnsupportedModuleError(message)
    network.set_submodule(linear[-1], nn.Identity())
    return network
