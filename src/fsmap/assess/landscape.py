r"""The loss along random directions, normalized filter by filter (``fig:loss_landscape``, left).

A direction d is drawn from N(0, I) and every filter of it is given the norm of the network's:
$d_i \leftarrow d_i \|w_i\| / \|d_i\|$. Biases and the parameters of normalization layers (tensors
of fewer than two dimensions) stay where they are. The step α then moves each filter by α times its
own size, so that networks of different scales can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.errors import InputError
from fsmap.functional import functional
from fsmap.linalg.probes import normal
from fsmap.types import Params


class Landscape(NamedTuple):
    """Losses along lines through the parameters.

    Attributes:
        steps: α, ``[A]``.
        loss: ``[directions, A]``; inf where it overflows.
    """

    steps: Tensor
    loss: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean over directions, ``[A]``: what the paper plots."""
        return self.loss.mean(0)


def filter_normalized(params: Params, directions: int, generator: torch.Generator) -> Params:
    """Random directions.

    Args:
        params: Parameters of the network.
        directions: How many.
        generator: Source of randomness.

    Returns:
        ``{name: [directions, ...]}``; zeros for tensors of fewer than two dimensions.
    """
    shapes = {name: torch.empty_like(p, device=generator.device) for name, p in params.items()}
    drawn = normal(shapes, directions, generator)
    return {name: _normalized(d.to(params[name]), params[name]) for name, d in drawn.items()}


def _normalized(d: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() < 2:
        return torch.zeros_like(d)
    size = d.flatten(2).norm(dim=2)  # [directions, filters]
    wanted = weight.detach().flatten(1).norm(dim=1)  # [filters]
    scale: Tensor = wanted / size.clamp_min(torch.finfo(d.dtype).tiny)
    return d * scale.reshape(*scale.shape, *(1,) * (weight.dim() - 1))


def check_walk(steps: int, reach: float, chunk: int | None, *, dashes: str = "") -> None:
    """Refuse a walk that has no middle, no length or no directions at a time.

    Args:
        steps: Points between −reach and reach.
        reach: Largest step.
        chunk: Directions at a time; None: all.
        dashes: What stands before the names in messages, as of options.

    Raises:
        InputError: If a number is out of range.
    """
    if steps % 2 == 0 or steps < 3:
        message = f"{dashes}steps must be odd and at least 3, so that 0 is one of them, got {steps}"
        raise InputError(message)
    if chunk is not None and chunk < 1:
        message = f"{dashes}chunk must be at least 1, got {chunk}"
        raise InputError(message)
    if not 0 < reach < math.inf:
        message = f"{dashes}reach must be positive and finite, got {reach:g}"
        raise InputError(message)


def landscape(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: Tensor,
    directions: int = 20,
    generator: torch.Generator,
    batch_size: int = 500,
    chunk: int | None = None,
) -> Landscape:
    """Mean cross-entropy along filter-normalized directions, all of them as one batch.

    The network is taken as it is deployed, in evaluation mode.

    Args:
        module: A classifier.
        x: Training points ``[N, ...]``.
        y: Their labels.
        steps: α.
        directions: How many.
        generator: Source of randomness.
        batch_size: Points at a time.
        chunk: Directions at a time; None: all.

    Returns:
        Losses.

    Raises:
        InputError: If there is nothing to look at.
    """
    if directions < 1 or not len(x) or steps.dim() != 1 or not len(steps):
        message = (
            f"need at least one direction, one point and a row of steps, got {directions=}, "
            f"{len(x)} points and steps of shape {list(steps.shape)}"
        )
        raise InputError(message)
    with torch.no_grad(), _deployed(module):
        f, params = functional(module)
        line = filter_normalized(params, directions, generator)

        def one(direction: Params, alpha: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
            moved = {n: p.detach() + alpha * direction[n] for n, p in params.items()}
            return F.cross_entropy(f(moved, inputs).float(), labels, reduction="sum")

        every = torch.func.vmap(one, in_dims=(0, None, None, None), chunk_size=chunk)
        columns = [_along(every, line, a, x, y, batch_size) for a in steps.to(x.device)]
    return Landscape(steps.cpu(), torch.stack(columns, 1).cpu())


@contextmanager
def _deployed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, with BatchNorm written out.

    cuDNN's kernel asks for the memory format of its input, which vmap does not answer.
    """
    modes = [(m, m.training) for m in module.modules()]
    norms = [m for m, _ in modes if isinstance(m, _BatchNorm) and m.running_mean is not None]
    module.eval()
    for norm in norms:
        norm.forward = partial(_normalize, norm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward
        for m, mode in modes:
            m.training = mode


def _normalize(layer: _BatchNorm, x: Tensor) -> Tensor:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    scale = (layer.running_var + layer.eps).rsqrt()
    shift = -layer.running_mean * scale
    if layer.affine:
        scale, shift = scale * layer.weight, shift * layer.weight + layer.bias
    shape = (-1, *(1,) * (x.dim() - 2))  # of x, but for its points
    return x * scale.view(shape) + shift.view(shape)


def _along(every: object, line: Params, a: Tensor, x: Tensor, y: Tensor, size: int) -> Tensor:
    """Losses of all directions at one step, ``[directions]``."""
    assert callable(every)
    sums = [every(line, a, i, j) for i, j in zip(x.split(size), y.split(size), strict=True)]
    total = torch.stack(sums).double().sum(0) / len(x)
    return torch.nan_to_num(total, nan=torch.inf, posinf=torch.inf)


def flatness(found: Landscape, within: float = 1.0) -> float:
    """How much the mean loss rises within a distance: lower is flatter.

    Args:
        found: Losses.
        within: Steps with |α| up to this count.

    Returns:
        Mean over these steps of loss(α) − loss(0).

    Raises:
        InputError: If the steps do not include zero.
    """
    rounding = 1e-6 * float(found.steps.abs().max())
    near = found.steps.abs() <= within + rounding
    at_zero = found.steps.abs() <= rounding
    if not at_zero.any():
        message = f"the steps must include 0, got {found.steps.tolist()}"
        raise InputError(message)
    mean = found.mean
    return float((mean[near] - mean[at_zero][0]).mean())
