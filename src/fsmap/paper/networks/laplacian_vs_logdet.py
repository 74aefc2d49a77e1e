r"""``laplacian-vs-logdet`` (Fig. A.3): the log-determinant against its first order in 1/ε.

$$\log\det(\mathcal J + \epsilon I) - P\log\epsilon = \sum_i \log(1 + \lambda_i/\epsilon)
  = \mathrm{Tr}\,\mathcal J/\epsilon + O((\max_i\lambda_i/\epsilon)^2)$$

(``eq:first-order``).

Both axes show the same quantity, so that the diagonal is the truth. (The caption of the paper's
figure prints $1/(2\epsilon\beta^2)$; the ½ belongs to the objective, not to the approximation.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fsmap.functional import count
from fsmap.linalg.estimators import trace
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.networks.scaled_networks import (
    CloudConfig,
    jitter_text,
    jitter_title,
    plot_diagonal,
    spearman,
)
from fsmap.paper.report import figures, tables
from fsmap.paper.rows import Claim, Row
from fsmap.px import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class LaplacianConfig(CloudConfig):
    """Sizes."""

    jitters: tuple[float, ...] = (1e-3, 1.0, 10.0, 1e3)  # ε
    probes: int = 10  # draws of ψ per network
    beta: float = 1e-3  # β, the standard deviation of a perturbation


class Cloud(NamedTuple):
    """First order against the log-determinant, one point per network."""

    log_det: list[float]  # log det(𝒥 + εI) − P log ε
    estimate: list[float]  # Tr 𝒥/ε, the trace from a few draws of ψ
    first_order: list[float]  # Tr 𝒥/ε, the trace exact
    color: list[float]  # mean eigenvalue/ε

    def ratio(self) -> float:
        """Median of estimate/log det."""
        return _median([y / x for x, y in zip(self.log_det, self.estimate, strict=True)])

    def exact_ratio(self) -> float:
        """Median of first order/log det, without the noise of ψ."""
        return _median([y / x for x, y in zip(self.log_det, self.first_order, strict=True)])

    @property
    def rho(self) -> float:
        """Spearman's ρ."""
        return spearman(self.log_det, self.estimate)


def cloud(rows: Sequence[Row], jitter: float) -> Cloud:
    """The points of one panel."""
    values = {
        metric: tables.values_by(rows, "draw", metric=metric)
        for metric in ("trace", "trace_estimate", "parameters")
    }
    chosen = tables.select(rows, metric="log_det", jitter=jitter)
    draws = [r.config["draw"] for r in chosen]
    exact = [values["trace"][d] / jitter for d in draws]
    return Cloud(
        [r.value for r in chosen],
        [values["trace_estimate"][d] / jitter for d in draws],
        exact,
        [t / values["parameters"][d] for t, d in zip(exact, draws, strict=True)],
    )


class LaplacianVsLogDet(Experiment):
    """The Laplacian estimate against the log-determinant."""

    id = "laplacian-vs-logdet"
    label = "Fig. A.3"
    title = "First-order form of the log-determinant"
    see = (
        "For an ε far above the eigenvalues the two are the same number. For a small ε the "
        "Laplacian is far too large, but it still grows with the log-determinant."
    )
    cost = "2 min"
    protocol = (
        "x: log det(𝒥 + εI) − P log ε from all eigenvalues, float64; y: Tr 𝒥/ε by forward "
        "differences (β = 1e-3) with 10 draws of ψ. No ½ on either axis"
    )
    group = "networks"
    config = LaplacianConfig()
    quick = LaplacianConfig(draws=16, block=8)

    def units(self, config: LaplacianConfig) -> list[dict[str, Any]]:
        """Blocks of networks."""
        return config.units()

    def run(
        self, config: LaplacianConfig, unit: dict[str, Any], context: Context
    ) -> Iterator[Measured]:
        """Eigenvalues once per network; every ε from them."""
        x = config.points()
        jitters = torch.tensor(config.jitters, dtype=torch.float64)
        for done, network in enumerate(config.networks(unit), start=1):
            eigenvalues = network.eigenvalues(x)  # [P]
            about = {"draw": network.draw, "scale": network.scale}
            values = torch.log1p(eigenvalues / jitters[:, None]).sum(1)  # [k]
            for jitter, value in zip(config.jitters, values, strict=True):
                yield Measured("log_det", value, config={**about, "jitter": jitter})
            with torch.no_grad():
                estimate = trace(
                    network.f,
                    network.params,
                    x,
                    method="fd",
                    probes=config.probes,
                    beta=config.beta,
                    generator=generator("laplacian-vs-logdet", network.draw),
                )
            yield Measured("trace", eigenvalues.sum(), config=about)
            yield Measured("trace_estimate", estimate.value, config=about)
            yield Measured("parameters", count(network.params), config=about)
            context.advance(done / config.block)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Ratio and rank correlation for each ε."""
        lines = []
        for jitter in _jitters(rows):
            found = cloud(rows, jitter)
            lines.append(
                {
                    "jitter": jitter,
                    "metric": "median of estimate / log det",
                    "ours": found.ratio(),
                    "… with the exact trace": found.exact_ratio(),
                    "Spearman ρ": found.rho,
                    "median of mean eigenvalue / ε": _median(found.color),
                    "networks": len(found.log_det),
                }
            )
        return lines

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """The truth at the largest ε, monotone at the smallest, better and better between."""
        jitters = _jitters(rows)
        clouds = {jitter: cloud(rows, jitter) for jitter in jitters}
        large, small = clouds[jitters[-1]], clouds[jitters[0]]
        ratios = [clouds[jitter].exact_ratio() for jitter in jitters]
        falling = all(a > b for a, b in zip(ratios, ratios[1:], strict=False))
        return [
            Claim(
                f"on the diagonal at {jitter_text(jitters[-1])}: median ratio within 10 % of 1",
                abs(large.ratio() - 1) < 0.1,
                large.ratio(),
                "accurate",
            ),
            Claim(
                f"monotone at {jitter_text(jitters[0])}, far from the diagonal: ρ above 0.95",
                small.rho > 0.95 and small.ratio() > 2,
                f"ρ = {small.rho:.3f}, median ratio {small.ratio():.0f}",
                "monotonic relation",
            ),
            Claim(
                "the approximation gets better as ε grows (median ratio, exact trace)",
                falling and ratios[-1] >= 1,
                ", ".join(f"{ratio:.3g}" for ratio in ratios),
                "more accurate",
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """One panel per ε."""
        from matplotlib.colors import LogNorm

        jitters = _jitters(rows)
        clouds = {jitter: cloud(rows, jitter) for jitter in jitters}
        colors = [c for found in clouds.values() for c in found.color]
        norm = LogNorm(min(colors), max(colors))
        figure, axes = figures.axes(len(jitters), panel=(2.5, 2.9), squeeze=False)
        for ax, (jitter, found) in zip(axes[0], clouds.items(), strict=True):
            both = found.log_det + found.estimate
            plot_diagonal(ax, min(both) * 0.7, max(both) * 1.4)
            dots = ax.scatter(found.log_det, found.estimate, s=11, linewidth=0, c=found.color,
                              norm=norm, cmap="cividis", label=jitter_text(jitter))  # fmt: skip
            ax.set(xscale="log", yscale="log", title=jitter_title(jitter))
            ax.annotate(f"$\\rho = {found.rho:.3f}$", (0.95, 0.05), xycoords="axes fraction",
                        ha="right", va="bottom", fontsize=9)  # fmt: skip
        figure.supxlabel(r"$\log\det(\mathcal{J} + \epsilon I) - P\log\epsilon$", fontsize=11)
        axes[0, 0].set_ylabel(r"Laplacian estimate of $\mathrm{Tr}\,\mathcal{J}/\epsilon$")
        bar = figure.colorbar(dots, ax=axes, shrink=0.85, pad=0.015)
        bar.set_label(r"$\bar\lambda/\epsilon$")
        bar.outline.set_visible(False)
        return {"laplacian-vs-logdet": figure}


def _jitters(rows: Sequence[Row]) -> list[float]:
    return sorted({r.config["jitter"] for r in tables.select(rows, metric="log_det")})


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).median())
