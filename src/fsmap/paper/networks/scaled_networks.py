"""Random networks of all magnitudes, and clouds of points compared with the diagonal.

``logdet-mc`` and ``laplacian-vs-logdet`` look at the same networks: a tanh perceptron with 898
parameters, first values N(0, 1/fan-in) and zero biases (authors' code), all multiplied by
s ~ loguniform(0.1, 10), seen on a 40 × 40 grid of [-5, 5]².
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsmap.functional import functional
from fsmap.linalg.logdet import whitened_rows
from fsmap.models.mlp import MLP
from fsmap.paper.descent import one_thread
from fsmap.paper.report.figures import power
from fsmap.paper.report.tables import number
from fsmap.px import Lattice, generator
from fsmap.types import ModelFn, Params

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALLEST, LARGEST = 0.1, 10.0
"""Ends of the distribution of s."""


@dataclasses.dataclass(frozen=True)
class CloudConfig:
    """Sizes."""

    draws: int = 300  # random networks
    block: int = 25  # networks per resumable unit
    width: int = 16  # units of each of the four hidden layers
    grid: int = 40  # points of p_X along each side

    def units(self) -> list[dict[str, Any]]:
        """Blocks of networks, each with the index of its first one."""
        return [{"first": first} for first in range(0, self.draws, self.block)]

    def points(self) -> Tensor:
        """All points of p_X, ``[grid², 2]``."""
        points: Tensor = square(self.grid).all()
        return points

    def networks(self, unit: dict[str, Any]) -> Iterator[ScaledNetwork]:
        """The networks of one unit; each depends on its own index only."""
        last = min(unit["first"] + self.block, self.draws)
        for index in range(unit["first"], last):
            yield draw_network(index, self.width)


def square(side: int) -> Lattice:
    """The evaluation distribution of appendix B.9: a grid of [-5, 5]², in float64."""
    corner = torch.full((2,), 5.0, dtype=torch.float64)
    return Lattice(-corner, corner, side)


class ScaledNetwork(NamedTuple):
    """One random network."""

    draw: int  # which one
    scale: float  # s
    f: ModelFn
    params: Params

    def eigenvalues(self, x: Tensor) -> Tensor:
        """All eigenvalues of 𝒥 on these points, ``[P]``; what rounding made negative is zero."""
        with torch.no_grad(), one_thread():  # a second thread only waits, and spins while it does
            rows, _ = whitened_rows(self.f, self.params, x)  # [S·K, P]
            eigenvalues: Tensor = torch.linalg.eigvalsh(rows.mT @ rows)
        return eigenvalues.clamp(min=0)


def draw_network(index: int, width: int = 16) -> ScaledNetwork:
    """A random network times s ~ loguniform(0.1, 10)."""
    source = generator("scaled-network", index)
    model = MLP([2, width, width, width, width, 2], "tanh", init="lecun", generator=source)
    f, params = functional(model.double())
    share = float(torch.rand((), generator=source, dtype=torch.float64))
    scale = SMALLEST * (LARGEST / SMALLEST) ** share
    return ScaledNetwork(index, scale, f, {n: scale * p.detach() for n, p in params.items()})


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation ρ: 1 where y grows with x, whatever the shape of the curve.

    Examples:
        >>> spearman([1, 2, 3, 4], [1, 10, 100, 1000]), spearman([1, 2, 3, 4], [4, 3, 2, 1])
        (1.0, -1.0)
    """
    n = len(x)
    if n < 2:
        return math.nan
    ranks = [torch.tensor(v, dtype=torch.float64).argsort().argsort().double() for v in (x, y)]
    squares = (ranks[0] - ranks[1]).square().sum().item()
    return 1 - 6 * squares / (n * (n * n - 1))


def jitter_text(jitter: float) -> str:
    """A jitter in words, such as ``ε = 10`` or ``ε = 1e−6``."""
    return f"ε = {number(float(jitter), 3)}"


def jitter_title(jitter: float) -> str:
    r"""A jitter as a panel's title, such as ``$\epsilon = 10$`` or ``$\epsilon = 10^{-3}$``."""
    if 0.1 <= jitter <= 10:
        return rf"$\epsilon = {jitter:g}$"
    return power(jitter)


def plot_diagonal(ax: Axes, low: float, high: float) -> None:
    """The dashed line x = y."""
    from fsmap.paper.report import figures

    ax.plot([low, high], [low, high], linestyle=(0, (4, 3)), color=figures.MUTED, linewidth=1.0,
            label="$x = y$", zorder=3)  # fmt: skip
