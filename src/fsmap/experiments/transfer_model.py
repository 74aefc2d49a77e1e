"""Networks for ``transfer``: a trained backbone that takes small images, whole or without head."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsmap.data.images.task import SETS
from fsmap.errors import InputError, MissingDataError, UnsupportedModuleError
from fsmap.models.by_name import make_model

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation that torchvision's networks expect."""


class Enlarged(nn.Module):
    """Images of CIFAR-10 as its trainer normalizes them → enlarged, renormalized → backbone.

    Args:
        backbone: The network.
        size: Side of the enlarged images.
        mean: Of the backbone's normalization, in [0, 1].
        std: Of the backbone's normalization.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        size: int,
        mean: tuple[float, ...] = IMAGENET[0],
        std: tuple[float, ...] = IMAGENET[1],
    ) -> None:
        super().__init__()
        self.backbone, self.size = backbone, size
        ours = SETS["cifar10"].normalize
        scale = [a / b for a, b in zip(ours.std, std, strict=True)]
        shift = [(a - b) / c for a, b, c in zip(ours.mean, mean, std, strict=True)]
        self.register_buffer("scale", torch.tensor(scale)[:, None, None], persistent=False)
        self.register_buffer("shift", torch.tensor(shift)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 3, 32, 32]`` to what the backbone returns."""
        x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=False)
        out: Tensor = self.backbone(x * self.scale + self.shift)
        return out


def enlarged(
    backbone: str = "resnet50", size: int = 224, classes: int = 10, width: int = 64
) -> nn.Module:
    """A backbone with a new head, for ``model=`` of an image run.

    Args:
        backbone: Name or import path; see :mod:`fsmap.models.by_name`.
        size: Side of the enlarged images.
        classes: K.
        width: Offered to the backbone.

    Returns:
        The module.
    """
    network = trained_backbone(backbone, width)
    name, head = last_linear(network)
    parent = network.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], nn.Linear(head.in_features, classes))
    return Enlarged(network, size, *normalization_of(network))


def trained_backbone(name: str, width: int = 64) -> nn.Module:
    """A network with its weights.

    Args:
        name: Name or import path; see :mod:`fsmap.models.by_name`.
        width: Offered to it.

    Returns:
        The module.

    Raises:
        MissingDataError: If there is none of that name: then there are no weights either.
    """
    try:
        return make_model(name, {"channels": 3, "width": width}, seed=0)
    except InputError as error:
        message = f"transfer needs a trained backbone, and {error}"
        raise MissingDataError(message) from error


def headless(network: nn.Module) -> tuple[nn.Module, int]:
    """A copy that returns features instead of logits.

    Args:
        network: A classifier whose last linear layer is its head.

    Returns:
        The copy, and how many features there are.
    """
    bare = copy.deepcopy(network)
    name, head = last_linear(bare)
    setattr(bare.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], nn.Identity())
    return bare, head.in_features


def last_linear(network: nn.Module) -> tuple[str, nn.Linear]:
    """The name and the module of the last linear layer.

    Args:
        network: A classifier.

    Returns:
        Both.

    Raises:
        UnsupportedModuleError: If there is none.
    """
    found = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    if not found:
        message = f"{type(network).__name__} has no linear layer that could be its head"
        raise UnsupportedModuleError(message)
    return found[-1]


def normalization_of(network: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """``mean`` and ``std`` that the network says it expects, or torchvision's."""
    mean, std = getattr(network, "mean", IMAGENET[0]), getattr(network, "std", IMAGENET[1])
    return tuple(map(float, mean)), tuple(map(float, std))
