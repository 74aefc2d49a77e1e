r"""``fourier-pX``, ``fourier-noise`` (Figs. 3 b and 4): what FS-MAP depends on.

For an invertible $\Phi$ and no jitter the FS-MAP objective of this model does not depend on $p_X$
(appendix B.3). What Fig. 3 shows is therefore an effect of the rank of $\Phi$ and of the jitter,
and every number carries its jitter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.experiments.experiment import Context, Experiment, Measured
from fsmap.experiments.fourier_fits import (
    DEVIATIONS,
    EXACT,
    PAPER,
    Block,
    FourierConfig,
    Problem,
    Variant,
    draw_problem,
    fit,
    uniform_forms,
)
from fsmap.experiments.panels import PAPER_LOOK, epsilon, log_scale, power
from fsmap.objective.closed_form import Diagonal, Dual, Form
from fsmap.report import figures, tables
from fsmap.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE, NARROW = "U(−1, 1)", "U(−0.1, 0.1)"
FLOOR = 1e-14
"""Singular values of the feature matrix below this share of the largest are rounding errors: the
features themselves carry errors of 3e-14."""


@dataclasses.dataclass(frozen=True)
class AblationConfig(FourierConfig):
    """Sizes.

    Attributes:
        n_train: N.
    """

    n_train: int = 400

    def problems(self) -> list[Problem]:
        """One data set per seed."""
        return [draw_problem(self, self.n_train, seed) for seed in range(self.seeds)]


@dataclasses.dataclass(frozen=True)
class PXConfig(AblationConfig):
    """Sizes.

    Attributes:
        jitters: ε; the first is the authors'.
        num_points: Samples of U(−0.1, 0.1) that Φ is made of.
    """

    jitters: tuple[float, ...] = (1e-32, 1e-12, 1e-6)
    num_points: int = 10_000


class FourierPX(Experiment):
    """Test RMSE for two evaluation distributions."""

    id = "fourier-pX"
    label = "Fig. 3 b"
    title = "Which evaluation distribution"
    see = (
        "Uniform(−1, 1), where the test points are, is best. How much worse Uniform(−0.1, 0.1) is "
        "depends on the jitter alone: without jitter the two objectives differ by a constant."
    )
    cost = "20 s"
    protocol = (
        "jittered objective at ε = 1e-32 (authors), 1e-12, 1e-6, log det by QR of the features at "
        "10,000 samples; exact: true objective in log space, the same for both p_X"
    )
    config = PXConfig()
    quick = PXConfig(steps=500, seeds=2, num_points=3_000)

    def run(self, config: PXConfig, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Both distributions at all jitters, and PS-MAP, as one stack."""
        noise = config.noise_std
        jitters = torch.tensor(config.jitters, dtype=torch.float64)[:, None]  # [k, 1]
        factor = narrow_factor(config)
        diagonal = config.model().uniform_gram(-1.0, 1.0).diagonal()
        exact = {"px": WIDE, "jitter": 0.0}
        forms: dict[str, Form] = {WIDE: Diagonal(diagonal, jitters), NARROW: Dual(factor, jitters)}
        blocks = [
            Block(None, [Variant("ps-map", {"px": "none"}, noise)]),
            Block(
                uniform_forms(config)[EXACT], [Variant("fs-map", exact, noise, DEVIATIONS[EXACT])]
            ),
        ]
        for px, form in forms.items():
            where = [{"px": px, "jitter": jitter} for jitter in config.jitters]
            said = ("log det by QR of the features; the authors' code factorizes Φ in float32",)
            blocks.append(Block(form, [Variant("fs-map", w, noise, said) for w in where]))
        fitted = fit(config, config.problems(), blocks, context.advance)
        yield from fitted.rows("test_rmse", fitted.test_rmse())
        yield Measured("rank", len(factor), config={"px": NARROW, "share": FLOOR})

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """RMSE by distribution and jitter."""
        chosen = tables.select(rows, metric="test_rmse")
        return tables.summarize(chosen, "px", "method", "jitter")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Uniform(−1, 1) is best, at every jitter."""
        claims = []
        ps = _mean(rows, px="none")
        jitters = sorted(
            {r.config["jitter"] for r in tables.select(rows, px=NARROW) if "jitter" in r.config}
        )
        for jitter in jitters:
            wide, narrow = (
                _mean(rows, px=WIDE, jitter=jitter),
                _mean(rows, px=NARROW, jitter=jitter),
            )
            claims.append(
                Claim(
                    f"p_X = {WIDE} is better than {NARROW} and than PS-MAP ({epsilon(jitter)})",
                    wide < min(narrow, ps),
                    f"test RMSE {wide:.4f}, {narrow:.4f}, {ps:.4f}",
                    "best",
                )
            )
        return claims

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


def _mean(rows: Sequence[Row], **where: Any) -> float:
    return tables.mean(r.value for r in tables.select(rows, metric="test_rmse", **where)).mean


@dataclasses.dataclass(frozen=True)
class NoiseConfig(AblationConfig):
    """Sizes.

    Attributes:
        ratios: σ/σ*.
    """

    ratios: tuple[float, ...] = (1 / 3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)


class FourierNoise(Experiment):
    """Test RMSE against the noise that the likelihood assumes."""

    id = "fourier-noise"
    label = "Fig. 4"
    title = "A wrong noise level"
    see = (
        "Where the likelihood overestimates the noise tenfold, FS-MAP underfits and its error "
        "explodes; PS-MAP hardly notices. At a third of the true noise the two are alike."
    )
    cost = "20 s"
    protocol = "exact: true objective in log space. paper: 1e-32 inside the logarithm"
    config = NoiseConfig()
    quick = NoiseConfig(ratios=(1 / 3, 1.0, 3.0, 10.0), steps=800)

    def run(
        self, config: NoiseConfig, unit: dict[str, Any], context: Context
    ) -> Iterator[Measured]:
        """All noise levels and methods as one stack."""
        forms: dict[str, Form | None] = {"none": None, **uniform_forms(config)}
        blocks = []
        for objective, form in forms.items():
            method = "ps-map" if form is None else "fs-map"
            where = [{"objective": objective, "ratio": round(r, 6)} for r in config.ratios]
            stds = [ratio * config.noise_std for ratio in config.ratios]
            pairs = zip(where, stds, strict=True)
            said = DEVIATIONS.get(objective, ())
            blocks.append(Block(form, [Variant(method, w, std, said) for w, std in pairs]))
        fitted = fit(config, config.problems(), blocks, context.advance)
        yield from fitted.rows("test_rmse", fitted.test_rmse())
        yield from fitted.rows("train_rmse", fitted.train_rmse())

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """RMSE by noise level."""
        chosen = tables.select(rows, metric="test_rmse")
        return tables.summarize(chosen, "ratio", "method", "objective")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Alike at 1/3, collapse at 10."""
        claims = []
        ps = _rmse_by_ratio(rows, "none")
        for objective, name in ((EXACT, "true objective"), (PAPER, "paper's jitter")):
            fs = _rmse_by_ratio(rows, objective)
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


def _rmse_by_ratio(rows: Sequence[Row], objective: str) -> dict[float, float]:
    line = tables.line(tables.select(rows, metric="test_rmse", objective=objective), "ratio")
    return dict(zip(line.x, line.mean, strict=True))
