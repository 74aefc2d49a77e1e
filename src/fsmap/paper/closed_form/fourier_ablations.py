r"""``fourier-points``, ``fourier-pX``, ``fourier-noise`` (Figs. 3, 4): what FS-MAP depends on.

For an invertible $\Phi$ and no jitter the FS-MAP objective of this model does not depend on $p_X$
(appendix B.3). What Fig. 3 shows is therefore an effect of the rank of $\Phi$ and of the jitter,
and every number carries its jitter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.objective.basis import Diagonal, Dual, Form
from fsmap.objective.lattice import fourier_lattice
from fsmap.paper.closed_form.fourier import (
    DEVIATIONS,
    EXACT,
    PAPER,
    Block,
    FourierConfig,
    Problem,
    Variant,
    draw_problem,
    fit,
    uniform_blocks,
    uniform_forms,
)
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import LINES, PAPER_LOOK, epsilon, log_scale, power
from fsmap.paper.rows import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE, NARROW = "U(−1, 1)", "U(−0.1, 0.1)"
FLOOR = 1e-14
"""Singular values of the feature matrix below this share of the largest are rounding errors: the
features themselves carry errors of 3e-14."""


@dataclasses.dataclass(frozen=True)
class AblationConfig(FourierConfig):
    """Sizes."""

    n_train: int = 400  # N

    def problems(self) -> list[Problem]:
        """One data set per seed."""
        return [draw_problem(self, self.n_train, seed) for seed in range(self.seeds)]


@dataclasses.dataclass(frozen=True)
class PXConfig(AblationConfig):
    """Sizes."""

    jitters: tuple[float, ...] = (1e-32, 1e-12, 1e-6)  # ε; the first is the authors'
    num_points: int = 10_000  # samples of U(−0.1, 0.1) that Φ is made of


class FourierPX(Experiment):
    """Test RMSE for two evaluation distributions."""

    id = "fourier-pX"
    label = "Fig. 3 b"
    title = "Which evaluation distribution"
    see = (
        "Uniform(−1, 1), where the test points are, is best. How much worse Uniform(−0.1, 0.1) is "
        "depends on the jitter alone: without jitter the two objectives differ by a constant."
    )
    cost = "90 s"
    protocol = (
        "jittered objective at ε = 1e-32 (authors), 1e-12, 1e-6, log det by QR of the features at "
        "10,000 samples; exact: true objective in log space, the same for both p_X"
    )
    config = PXConfig()
    quick = PXConfig(steps=500, seeds=2, num_points=3_000)

    def run(self, config: PXConfig, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Both distributions at all jitters, and PS-MAP, as one stack."""
        noise = config.noise_std
        factor = narrow_factor(config)
        diagonal = config.model().uniform_gram(-1.0, 1.0).diagonal()
        exact = Variant("fs-map", {"px": WIDE, "jitter": 0.0}, noise, DEVIATIONS[EXACT])
        invertible = uniform_forms(config)[EXACT]
        forms: dict[str, Callable[[Tensor], Form]] = {
            WIDE: lambda jitter: Diagonal(diagonal, jitter),
            NARROW: lambda jitter: Dual(factor, jitter),
        }
        blocks = [
            Block(None, [Variant("ps-map", {"px": "none"}, noise)]),
            Block(lambda _: invertible, [exact]),
        ]
        for px, form in forms.items():
            said = ("log det by QR of the features; the authors' code factorizes Φ in float32",)
            variants = [
                Variant("fs-map", {"px": px, "jitter": jitter}, noise, said, jitter)
                for jitter in config.jitters
            ]
            blocks.append(Block(form, variants))
        fitted = fit(config, config.problems(), blocks, context.advance)
        yield from fitted.rows("test_rmse", fitted.test_rmse())
        yield Measured("rank", len(factor), config={"px": NARROW, "share": FLOOR})

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """RMSE by distribution and jitter."""
        chosen = tables.select(rows, metric="test_rmse")
        return tables.summarize(chosen, "px", "method", "jitter")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Uniform(−1, 1) is best, at every jitter."""
        ps = tables.mean_of(rows, metric="test_rmse", px="none")
        wide, narrow = (
            tables.means_by(rows, "jitter", metric="test_rmse", px=px) for px in (WIDE, NARROW)
        )
        return [
            Claim(
                f"p_X = {WIDE} is better than {NARROW} and than PS-MAP ({epsilon(jitter)})",
                wide[jitter] < min(error, ps),
                f"test RMSE {wide[jitter]:.4f}, {error:.4f}, {ps:.4f}",
                "best",
            )
            for jitter, error in narrow.items()
        ]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Bars, one group per distribution."""
        figure, ax = figures.axes(panel=(4.6, 3.1))
        groups = tables.group(tables.select(rows, metric="test_rmse"), "px", "method", "jitter")
        ticks: dict[str, list[float]] = {}
        for place, ((px, method, jitter), members) in enumerate(groups.items()):
            mean = tables.mean(row.value for row in members)
            color = figures.COLORS[method]
            x = place + len(ticks) * 0.6 + (0.6 if px not in ticks else 0.0)
            ticks.setdefault(px, []).append(x)
            ax.bar(x, mean.mean, yerr=mean.stderr, color=color, width=0.85, alpha=_shade(jitter),
                   error_kw={"ecolor": figures.INK, "elinewidth": 1})  # fmt: skip
            name = "" if jitter is None else "no jitter" if jitter == 0 else power(jitter)
            ax.annotate(
                name, (x, 0.002), rotation=90, ha="center", va="bottom", color=figures.PAPER
            )
        names = {"none": "none (PS-MAP)", WIDE: "Uniform(−1, 1)", NARROW: "Uniform(−0.1, 0.1)"}
        ax.set_xticks([sum(xs) / len(xs) for xs in ticks.values()], [names[px] for px in ticks])
        ax.set(ylabel="test RMSE", xlabel=r"evaluation distribution $p_X$")
        ax.grid(visible=False, axis="x")
        return {"fourier-pX": figure}


def _shade(jitter: float | None) -> float:
    return 1.0 if not jitter else 0.95 if jitter < 1e-20 else 0.8 if jitter < 1e-9 else 0.65


def narrow_factor(config: PXConfig) -> Tensor:
    """F with FᵀF = Φ of samples of U(−0.1, 0.1), less what is rounding error, ``[r, P]``."""
    generator = torch.Generator().manual_seed(0)
    x = 0.2 * torch.rand(config.num_points, generator=generator, dtype=torch.float64) - 0.1
    _, singular, right = torch.linalg.svd(config.model().factor(x))
    rank = int((singular > FLOOR * singular[0]).sum())
    factor: Tensor = singular[:rank, None] * right[:rank]
    return factor


@dataclasses.dataclass(frozen=True)
class NoiseConfig(AblationConfig):
    """Sizes."""

    ratios: tuple[float, ...] = (1 / 3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)  # σ/σ*


class FourierNoise(Experiment):
    """Test RMSE against the noise that the likelihood assumes."""

    id = "fourier-noise"
    label = "Fig. 4"
    title = "A wrong noise level"
    see = (
        "Where the likelihood overestimates the noise tenfold, FS-MAP underfits and its error "
        "explodes; PS-MAP hardly notices. At a third of the true noise the two are alike."
    )
    cost = "60 s"
    protocol = "exact: true objective in log space. paper: 1e-32 inside the logarithm"
    config = NoiseConfig()
    quick = NoiseConfig(ratios=(1 / 3, 1.0, 3.0, 10.0), steps=800)

    def run(
        self, config: NoiseConfig, unit: dict[str, Any], context: Context
    ) -> Iterator[Measured]:
        """All noise levels and methods as one stack."""
        blocks = []
        for block in uniform_blocks(config):
            (plain,) = block.variants
            variants = [
                plain._replace(
                    config={**plain.config, "ratio": round(ratio, 6)},
                    noise_std=ratio * config.noise_std,
                )
                for ratio in config.ratios
            ]
            blocks.append(block._replace(variants=variants))
        fitted = fit(config, config.problems(), blocks, context.advance)
        yield from fitted.rows("test_rmse", fitted.test_rmse())

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """RMSE by noise level."""
        chosen = tables.select(rows, metric="test_rmse")
        return tables.summarize(chosen, "ratio", "method", "objective")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Alike at 1/3, collapse at 10."""
        claims = []
        ps = tables.means_by(rows, "ratio", metric="test_rmse", objective="none")
        for objective, name in ((EXACT, "true objective"), (PAPER, "paper's jitter")):
            fs = tables.means_by(rows, "ratio", metric="test_rmse", objective=objective)
            low, high = min(fs, default=math.nan), max(fs, default=math.nan)
            near = fs.get(low, math.nan) / ps.get(low, math.nan)
            far = fs.get(high, math.nan) / fs.get(1.0, math.nan)
            stable = ps.get(high, math.nan) / ps.get(1.0, math.nan)
            claims += [
                Claim(f"At σ/σ* = {low:.2g} the two are alike ({name})", 0.8 < near < 1.25,
                      f"RMSE ratio {near:.2f}", "similar"),
                Claim(f"At σ/σ* = {high:g} FS-MAP's RMSE explodes ({name})", far > 5,
                      f"{far:.1f} times that at σ = σ*", "high test error"),
                Claim(f"… and PS-MAP's stays ({name})", stable < 0.5 * far,
                      f"{stable:.1f} times that at σ = σ*", "relatively stable"),
            ]  # fmt: skip
        return claims

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """One line per method."""
        figure, ax = figures.axes(panel=(4.6, 3.1))
        groups = tables.group(tables.select(rows, metric="test_rmse"), "method", "objective")
        for (method, objective), members in groups.items():
            look = PAPER_LOOK if objective == PAPER else {}
            figures.plot_mean(ax, *tables.line(members, "ratio"), method, **look)
        ax.axvline(1.0, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
        ax.set(xlabel=r"assumed noise $\sigma/\sigma^*$", ylabel="test RMSE")
        log_scale(ax)
        ax.legend()
        return {"fourier-noise": figure}


CLOSED_FORM = ("log det in closed form; the authors' code factorizes Φ in float32",)


@dataclasses.dataclass(frozen=True)
class PointsConfig(AblationConfig):
    """Sizes."""

    jitters: tuple[float, ...] = (1e-32, 1e-12, 1e-6)  # ε; the first is the authors'
    # numbers M of equidistant evaluation points, both ends of [-1, 1] included
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
    cost = "4 min"
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
        variants = [
            Variant("fs-map", {"points": points, "jitter": jitter}, noise, CLOSED_FORM, jitter)
            for jitter in config.jitters
        ]
        if math.isinf(points):
            diagonal = config.model().uniform_gram(-1.0, 1.0).diagonal()
            reference = Block(None, [Variant("ps-map", {"points": points}, noise)])
            blocks = [reference, Block(lambda jitter: Diagonal(diagonal, jitter), variants)]
        else:
            form = fourier_lattice(config.num_frequencies, points, 0.0)
            yield Measured("rank", form.rank, config={"points": points})
            blocks = [Block(lambda jitter: form._replace(jitter=jitter), variants)]
        fitted = fit(config, config.problems(), blocks, context.advance)
        yield from fitted.rows("test_rmse", fitted.test_rmse())

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """RMSE by number of points and jitter."""
        chosen = tables.select(rows, metric="test_rmse")
        return tables.summarize(chosen, "points", "method", "jitter")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Falls, then flat, at every jitter."""
        ranks = tables.values_by(rows, "points", metric="rank")
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
        reference = tables.mean(tables.values(chosen, method="ps-map"))
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
    return {
        jitter: tables.means_by(members, "points")
        for (jitter,), members in tables.group(chosen, "jitter").items()
    }


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
