"""R(θ) of a trained network at given points: Tr 𝒥 as the deployed function has it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fsmap.functional import functional
from fsmap.linalg.probes import normal
from fsmap.linalg.trace import trace


def laplacian(
    module: nn.Module,
    x: Tensor,
    *,
    probes: int = 4,
    generator: torch.Generator,
    batch_size: int = 250,
) -> tuple[float, float]:
    """R(θ) = E‖J(x)ψ‖², by forward mode, in evaluation mode, without gradients.

    Args:
        module: A network.
        x: Points ``[N, ...]``.
        probes: Draws of ψ, each used at all points.
        generator: Source of randomness.
        batch_size: Points at a time.

    Returns:
        The estimate and its standard error over probes (nan for one probe).
    """
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            f, params = functional(module)
            shapes = {n: torch.empty_like(p, device=generator.device) for n, p in params.items()}
            psi = {n: p.to(params[n]) for n, p in normal(shapes, probes, generator).items()}
            values = [
                sum(
                    len(part) * _one(f, params, part, {n: p[r : r + 1] for n, p in psi.items()})
                    for part in x.split(batch_size)
                )
                / len(x)
                for r in range(probes)
            ]
    finally:
        for m, mode in modes:
            m.training = mode
    mean = sum(values) / probes
    if probes == 1:
        return mean, math.nan
    spread = sum((v - mean) ** 2 for v in values) / (probes - 1)
    return mean, math.sqrt(spread / probes)


def _one(f: object, params: dict[str, Tensor], x: Tensor, psi: dict[str, Tensor]) -> float:
    return float(trace(f, params, x, method="jvp", probes=psi).value)  # type: ignore[arg-type]
