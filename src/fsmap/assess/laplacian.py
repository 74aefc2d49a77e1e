"""R(θ) of a trained network at given points: Tr 𝒥, as deployed or as it was in training."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fsmap.functional import functional
from fsmap.linalg.probes import normal
from fsmap.linalg.trace import trace
from fsmap.lmap.batchnorm import unfrozen
from fsmap.types import Params


def laplacian(
    module: nn.Module,
    x: Tensor,
    *,
    probes: int | Params = 4,
    generator: torch.Generator | None = None,
    batch_size: int = 250,
    batch_statistics: bool = False,
) -> tuple[float, float]:
    """R(θ) = E‖J(x)ψ‖², by forward mode, without gradients; in evaluation mode unless told.

    Args:
        module: A network.
        x: Points ``[N, ...]``.
        probes: Draws of ψ, each used at all points, or what :func:`draw_psi` drew.
        generator: Source of randomness; None: seed 0.
        batch_size: Points at a time.
        batch_statistics: BatchNorm normalizes every batch by itself, and ψ moves its statistics
            too, as in training; running statistics stay what they are. Layers in ``eval()`` mode
            within a module in ``train()`` mode keep theirs: somebody froze them.

    Returns:
        The estimate and its standard error over probes (nan for one probe).
    """
    if isinstance(probes, int):
        probes = draw_psi(module, probes, generator or torch.Generator().manual_seed(0))
    number = len(next(iter(probes.values())))
    modes = [(m, m.training) for m in module.modules()]
    live = unfrozen(module) if batch_statistics else []
    module.eval()
    for norm in live:
        norm.training = True
    try:
        with torch.no_grad():
            f, params = functional(module)
            values = [
                sum(
                    len(part) * _one(f, params, part, {n: p[r : r + 1] for n, p in probes.items()})
                    for part in x.split(batch_size)
                )
                / len(x)
                for r in range(number)
            ]
    finally:
        for m, mode in modes:
            m.training = mode
    mean = sum(values) / number
    if number == 1:
        return mean, math.nan
    spread = sum((v - mean) ** 2 for v in values) / (number - 1)
    return mean, math.sqrt(spread / number)


def draw_psi(module: nn.Module, probes: int, generator: torch.Generator) -> Params:
    """ψ ~ N(0, I) for a network, drawn where the generator is and moved to the parameters.

    Args:
        module: A network.
        probes: How many.
        generator: Source of randomness.

    Returns:
        ``{name: [probes, ...]}`` for all trainable parameters.
    """
    _, params = functional(module)
    shapes = {n: torch.empty_like(p, device=generator.device) for n, p in params.items()}
    return {n: p.to(params[n]) for n, p in normal(shapes, probes, generator).items()}


def _one(f: object, params: dict[str, Tensor], x: Tensor, psi: dict[str, Tensor]) -> float:
    return float(trace(f, params, x, method="jvp", probes=psi).value)  # type: ignore[arg-type]
