r"""R(θ) of a trained network, and its loss along random directions (``fig:loss_landscape``, left).

Directions are normalized filter by filter: d is drawn from N(0, I) and every filter of it is given
the norm of the network's:
$d_i \leftarrow d_i \|w_i\| / \|d_i\|$. Biases and the parameters of normalization layers (tensors
of fewer than two dimensions) stay where they are. The step α then moves each filter by α times its
own size, so that networks of different scales can be compared.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsmap.errors import InputError
from fsmap.functional import evaluation_mode, functional
from fsmap.linalg.estimators import trace
from fsmap.linalg.probes import normal
from fsmap.lmap.batchnorm import unfrozen
from fsmap.types import Params

BATCH = 500  # points of the loss at a time


class Landscape(NamedTuple):
    """Losses along lines through the parameters."""

    steps: Tensor  # [A]  α
    loss: Tensor  # [directions, A]; inf if it overflows

    @property
    def mean(self) -> Tensor:
        """Mean over directions, ``[A]``: what the paper plots."""
        return self.loss.mean(0)


def filter_normalized(params: Params, directions: int, generator: torch.Generator) -> Params:
    """Directions ``{name: [directions, ...]}``; zero for tensors of fewer than two dimensions."""
    found = {}
    for name, d in _drawn(params, directions, generator).items():
        weight = params[name].detach()
        scale = d.new_zeros(())
        if weight.dim() >= 2:
            size = d.flatten(2).norm(dim=2)  # [directions, filters]
            wanted = weight.flatten(1).norm(dim=1)  # [filters]
            scale = wanted / size.clamp_min(torch.finfo(d.dtype).tiny)
            scale = scale.reshape(*scale.shape, *(1,) * (weight.dim() - 1))
        found[name] = d * scale
    return found


def _drawn(params: Params, number: int, generator: torch.Generator) -> Params:
    """N(0, I), drawn where the generator is and moved to the parameters."""
    shapes = {n: torch.empty_like(p, device=generator.device) for n, p in params.items()}
    return {n: d.to(params[n]) for n, d in normal(shapes, number, generator).items()}


def check_walk(steps: int, reach: float, *, dashes: str = "") -> None:
    """Raise InputError unless the steps include 0 and the reach is positive."""
    if steps % 2 == 0 or steps < 3:
        raise InputError(
            f"{dashes}steps must be odd and at least 3, so that 0 is one of them, got {steps}"
        )
    if not 0 < reach < math.inf:
        raise InputError(f"{dashes}reach must be positive and finite, got {reach:g}")


def landscape(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: Tensor,
    directions: int = 20,
    generator: torch.Generator,
) -> Landscape:
    """Mean cross-entropy of a classifier at ``steps`` α along filter-normalized directions.

    The network is taken as it is deployed, in evaluation mode.
    """
    if directions < 1 or not len(x) or steps.dim() != 1 or not len(steps):
        raise InputError(
            f"need at least one direction, one point and a row of steps, got {directions=}, "
            f"{len(x)} points and steps of shape {list(steps.shape)}"
        )
    with torch.no_grad(), evaluation_mode(module):
        f, params = functional(module)
        drawn = filter_normalized(params, directions, generator)

        def loss(direction: int, alpha: Tensor) -> Tensor:
            moved = {n: p + alpha * drawn[n][direction] for n, p in params.items()}
            batches = zip(x.split(BATCH), y.split(BATCH), strict=True)
            sums = [F.cross_entropy(f(moved, i).float(), j, reduction="sum") for i, j in batches]
            return torch.stack(sums).double().sum() / len(x)

        alphas = steps.to(x.device)
        losses = [torch.stack([loss(d, a) for a in alphas]) for d in range(directions)]
    return Landscape(steps.cpu(), torch.stack(losses).nan_to_num(torch.inf, torch.inf).cpu())


def flatness(found: Landscape, within: float = 1.0) -> float:
    """Mean rise of the loss within a distance: lower is flatter.

    Mean of loss(α) − loss(0) over the steps with |α| up to ``within``, by the trapezoidal rule:
    finer steps bring it nearer to the integral and change little else.
    """
    rounding = 1e-6 * float(found.steps.abs().max())
    near = found.steps.abs() <= within + rounding
    at_zero = found.steps.abs() <= rounding
    if not at_zero.any():
        raise InputError(f"the steps must include 0, got {found.steps.tolist()}")
    steps, order = found.steps[near].sort()
    rise = (found.mean[near] - found.mean[at_zero][0])[order]
    span = float(steps[-1] - steps[0])
    return float(torch.trapezoid(rise, steps)) / span if span else float(rise.mean())


def laplacian(
    module: nn.Module,
    x: Tensor,
    *,
    probes: int | Params = 4,
    batch_size: int = 250,
    batch_statistics: bool = False,
) -> tuple[float, float]:
    """R(θ) = E‖J(x)ψ‖² by forward mode, and its standard error over probes (nan for one probe).

    ``probes`` is a number of draws of ψ, each used at all points, or a result of :func:`draw_psi`.
    The network is in evaluation mode. With ``batch_statistics`` BatchNorm normalizes every batch by
    itself, as in training, and ψ changes these statistics too; layers in ``eval()`` mode within a
    module in ``train()`` mode keep theirs. Running statistics do not change.
    """
    if isinstance(probes, int):
        probes = draw_psi(module, probes, torch.Generator().manual_seed(0))
    number, parts = len(next(iter(probes.values()))), x.split(batch_size)
    live = unfrozen(module) if batch_statistics else []
    values = []
    with torch.no_grad(), evaluation_mode(module):
        for norm in live:
            norm.training = True
        f, params = functional(module)
        for r in range(number):
            psi = {n: p[r : r + 1] for n, p in probes.items()}
            found = [trace(f, params, part, method="jvp", probes=psi).value for part in parts]
            total = sum(len(part) * float(R) for part, R in zip(parts, found, strict=True))
            values.append(total / len(x))
    stderr = statistics.stdev(values) / math.sqrt(number) if number > 1 else math.nan
    return sum(values) / number, stderr


def draw_psi(module: nn.Module, probes: int, generator: torch.Generator) -> Params:
    """ψ ~ N(0, I) for a network."""
    return _drawn(functional(module)[1], probes, generator)
