"""``fourier-points`` (Fig. 3 a): the error against the number of equidistant evaluation points."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fsmap.experiments.experiment import Context, Experiment, Measured
from fsmap.experiments.fourier_ablations import AblationConfig
from fsmap.experiments.fourier_fits import Block, Variant, fit
from fsmap.experiments.panels import LINES, epsilon, log_scale, power
from fsmap.objective.closed_form import Diagonal, fourier_lattice
from fsmap.report import figures, tables
from fsmap.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DEVIATIONS = ("log det in closed form; the authors' code factorizes Φ in float32",)


@dataclasses.dataclass(frozen=True)
class PointsConfig(AblationConfig):
    """Sizes.

    Attributes:
        jitters: ε; the first is the authors'.
        points: Numbers M of equidistant evaluation points, both ends of [-1, 1] included.
    """

    jitters: tuple[float, ...] = (1e-32, 1e-12, 1e-6)
    points: tuple[int, ...] = (
        *(10, 20, 40, 60, 80, 100, 120, 140, 160, 180),
        *(200, 201, 202, 204, 250, 300, 500, 1_000),
    )


class FourierPoints(Experiment):
    """Test RMSE against the number of equidistant evaluation points."""

    id = "fourier-points"
    label = "Fig. 3 a"
    title = "How many evaluation points"
    see = (
        "The error falls from near PS-MAP's until Φ has full rank, at M = 202 points (201 still "
        "leave sin(100πx) unseen), and stays there."
    )
    cost = "90 s"
    protocol = (
        "jittered objective at ε = 1e-32 (authors), 1e-12, 1e-6; log det by the alias classes of "
        "the lattice, exact at any rank. M = ∞ is Uniform(−1, 1) at the same ε"
    )
    config = PointsConfig()
    quick = PointsConfig(points=(10, 40, 100, 160, 202, 300), steps=800, seeds=2)

    def units(self, config: PointsConfig) -> list[dict[str, Any]]:
        """One unit per number of points; infinity is the continuous p_X, with PS-MAP beside it."""
        return [{"points": m} for m in (math.inf, *config.points)]

    def run(
        self, config: PointsConfig, unit: dict[str, Any], context: Context
    ) -> Iterator[Measured]:
        """All jitters and seeds of one number of points as a stack."""
        points, noise = unit["points"], config.noise_std
        jitters = torch.tensor(config.jitters, dtype=torch.float64)[:, None]  # [k, 1]
        where = [{"points": points, "jitter": jitter} for jitter in config.jitters]
        variants = [Variant("fs-map", w, noise, DEVIATIONS) for w in where]
        if math.isinf(points):
            diagonal = config.model().uniform_gram(-1.0, 1.0).diagonal()
            reference = Block(None, [Variant("ps-map", {"points": points}, noise)])
            blocks = [reference, Block(Diagonal(diagonal, jitters), variants)]
        else:
            form = fourier_lattice(config.num_frequencies, points, jitters)
            yield Measured("rank", form.rank, config={"points": points})
            blocks = [Block(form, variants)]
        fitted = fit(config, config.problems(), blocks, context.advance)
        yield from fitted.rows("test_rmse", fitted.test_rmse())

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """RMSE by number of points and jitter."""
        chosen = tables.select(rows, metric="test_rmse")
        return tables.summarize(chosen, "points", "method", "jitter")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Falls, then flat, at every jitter."""
        ranks = {row.config["points"]: row.value for row in tables.select(rows, metric="rank")}
        return [c for jitter, rmse in _curves(rows).items() for c in _claims(jitter, rmse, ranks)]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """One line per jitter, and PS-MAP for reference."""
        figure, ax = figures.axes(panel=(4.6, 3.1))
        chosen = tables.select(rows, metric="test_rmse")
        for look, jitter in zip(LINES, _curves(rows), strict=False):
            members = tables.select(chosen, jitter=jitter)
            line = tables.line([r for r in members if math.isfinite(r.config["points"])], "points")
            stderr = line.stderr if look is LINES[0] else [math.nan] * len(line.x)
            label = f"FS-MAP, {power(jitter)}"
            figures.plot_mean(ax, line.x, line.mean, stderr, "fs-map", label=label, **look)
        reference = tables.mean(row.value for row in tables.select(chosen, method="ps-map"))
        ends = [min(line.x), max(line.x)]
        figures.plot_mean(
            ax, ends, [reference.mean] * 2, [reference.stderr] * 2, "ps-map", marker=""
        )
        ax.axvline(201.5, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
        ax.annotate("full rank", (201.5, 1), xycoords=("data", "axes fraction"), ha="left",
                    va="top", xytext=(3, -2), textcoords="offset points", fontsize=9)  # fmt: skip
        ax.set(xlabel="evaluation points $M$", ylabel="test RMSE")
        log_scale(ax, "x")
        ax.legend()
        return {"fourier-points": figure}


def _curves(rows: Sequence[Row]) -> dict[float, dict[float, float]]:
    """Mean RMSE by number of points, by jitter."""
    chosen = tables.select(rows, metric="test_rmse", method="fs-map")
    curves = {}
    for (jitter,), members in tables.group(chosen, "jitter").items():
        line = tables.line(members, "points")
        curves[jitter] = dict(zip(line.x, line.mean, strict=True))
    return curves


def _claims(jitter: float, rmse: dict[float, float], ranks: dict[float, int]) -> Iterator[Claim]:
    full = max(ranks.values(), default=0)
    below = [rmse[m] for m in sorted(ranks) if ranks[m] < full]
    above = [rmse[m] for m in sorted(ranks) if ranks[m] == full]
    path = [*below, *above[:1]]
    fall = path[0] / path[-1] if path else math.nan
    rises = [after / before - 1 for before, after in zip(path, path[1:], strict=False)]
    rise = max(rises, default=math.nan)
    yield Claim(
        f"Test RMSE falls with the number of evaluation points ({epsilon(jitter)})",
        all(map(math.isfinite, path)) and fall > 1.2 and rise < 0.1,
        f"by a factor {fall:.2f}; largest rise between neighbors {max(rise, 0):.1%}",
        "decreases monotonically until 200",
    )
    spread = max(above, default=math.nan) / min(above, default=math.nan) - 1
    limit = abs(above[-1] / rmse.get(math.inf, math.nan) - 1) if above else math.nan
    yield Claim(
        f"… and is flat once Φ has full rank, at the value of Uniform(−1, 1) ({epsilon(jitter)})",
        spread < 0.02 and limit < 0.02,
        f"varies by {spread:.1%}; {limit:.1%} from M = ∞",
        "saturates at 200",
    )
