r"""``moons-eigs`` (Fig. A.4): what FS-MAP and L-MAP do to the eigenvalues of $\mathcal J$.

$\mathrm{Tr}\,\mathcal J = \sum_i \lambda_i$ on all points of $p_X$ after training, against
$\epsilon$. L-MAP penalizes this very sum. FS-MAP penalizes $\sum_i \log(\lambda_i + \epsilon)$,
which a few large eigenvalues hardly change: its sum falls late, and far below only where the
whole function collapses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.networks.moons_fits import METHODS, MoonsConfig, train
from fsmap.paper.networks.scaled_networks import jitter_text
from fsmap.paper.report import figures, tables
from fsmap.paper.rows import Claim, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class EigsConfig(MoonsConfig):
    """Sizes."""

    jitters: tuple[float, ...] = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e2)  # ε


class MoonsEigs(Experiment):
    """Sums of eigenvalues after training, for three methods."""

    id = "moons-eigs"
    label = "Fig. A.4"
    title = "Eigenvalues after training on two moons"
    see = (
        "For small ε both methods push the eigenvalues of 𝒥 far below those of PS-MAP. L-MAP, "
        "which penalizes their sum, does so for every ε up to 0.01; FS-MAP, which penalizes their "
        "logarithms, first keeps an almost linear classifier with few large eigenvalues."
    )
    cost = "15 min"
    protocol = (
        "jittered objective, prior N(0, I), first values as nn.Linear draws them; FS-MAP: "
        "log det(𝒥 + εI) of det_points fresh points a step; L-MAP: forward differences (β = 1e-3), "
        "one ψ and lap_points fresh points a step; eigenvalues on all 1600 points"
    )
    group = "networks"
    config = EigsConfig()
    quick = EigsConfig(
        steps=500, lr=1e-2, lap_points=100, det_points=48, seeds=1, jitters=(1e-10, 1e-4, 1.0, 1e2)
    )

    def units(self, config: EigsConfig) -> list[dict[str, Any]]:
        """One unit per method and seed; its jitters are one population."""
        seeds = range(config.seeds)
        return [{"method": method, "seed": seed} for method in METHODS for seed in seeds]

    def run(self, config: EigsConfig, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Train all jitters of one method and seed, and look at 𝒥."""
        method, seed = unit["method"], unit["seed"]
        x = config.px().all()
        deviations = config.deviations(method)
        for fitted in train(config, method, config.jitters, seed, context.advance):
            where = {k: v for k, v in fitted.member.items() if k == "jitter"}
            eigenvalues = fitted.eigenvalues(x)
            found = {
                "eigenvalue_sum": eigenvalues.sum(),
                "largest_eigenvalue": eigenvalues.max(),
                "train_accuracy": fitted.accuracy(),
                "train_nll": fitted.nll(),
            }
            for metric, value in found.items():
                yield Measured(metric, value, method, seed, where, deviations)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Sums, largest eigenvalues and accuracy by method and jitter."""
        lines = []
        for (method, jitter), members in tables.group(rows, "method", "jitter").items():
            mean = tables.mean(tables.values(members, metric="eigenvalue_sum"))
            line = {"method": method, "jitter": jitter, "metric": "sum of eigenvalues"}
            line |= {"ours": mean.mean, "stderr": mean.stderr, "runs": mean.n}
            for metric in ("largest_eigenvalue", "train_accuracy", "train_nll"):
                line[metric] = tables.mean_of(members, metric=metric)
            lines.append(line)
        return lines

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Far below PS-MAP's for small ε, back to it for large ε."""
        sums = tables.select(rows, metric="eigenvalue_sum")
        base = tables.mean_of(sums, method="ps-map")
        claims = []
        for method in ("fs-map", "l-map"):
            line = tables.line(tables.select(sums, method=method), "jitter")
            low, high = base / line.mean[0], base / line.mean[-1]
            name = figures.NAMES[method]
            claims += [
                Claim(f"{name}: sum more than 10 times below PS-MAP's at {jitter_text(line.x[0])}",
                      low > 10, f"{low:.3g} times below", "significantly reduced"),
                Claim(f"{name}: back to PS-MAP's at {jitter_text(line.x[-1])}, to a factor of 2",
                      0.5 < high < 2, f"{high:.3g} times below", None),
            ]  # fmt: skip
        return claims

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Sum of eigenvalues and fit against ε."""
        figure, (left, right) = figures.axes(2, panel=(3.6, 2.9))
        _draw_lines(left, tables.select(rows, metric="eigenvalue_sum"))
        left.set(xscale="log", yscale="log", xlabel=r"jitter $\epsilon$")
        left.set(ylabel=r"sum of eigenvalues of $\mathcal{J}$")
        left.legend(loc="lower right")
        _draw_lines(right, tables.select(rows, metric="train_nll"))
        right.set(xscale="log", xlabel=r"jitter $\epsilon$", ylabel="train NLL, nats")
        return {"moons-eigs": figure}


def _draw_lines(ax: Axes, rows: Sequence[Row]) -> None:
    base = tables.mean_of(rows, method="ps-map")
    jitters = sorted({row.config["jitter"] for row in rows if "jitter" in row.config})
    look = figures.method_style("ps-map", marker="", linestyle=(0, (4, 2)))
    ax.plot([jitters[0], jitters[-1]], [base, base], **look)
    for method in ("fs-map", "l-map"):
        figures.plot_mean(ax, *tables.line(tables.select(rows, method=method), "jitter"), method)
