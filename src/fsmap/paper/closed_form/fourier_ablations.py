r"""``fourier-points``, ``fourier-pX``, ``fourier-noise`` (Figs. 3, 4): what FS-MAP depends on.

For an invertible $\Phi$ and no jitter the FS-MAP objective of this model does not depend on $p_X$
(appendix B.3). What Fig. 3 shows is therefore an effect of the rank of $\Phi$ and of the jitter,
and every number carries its jitter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.objective.closed_form import Diagonal, Dual, Form, fourier_lattice
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
from fsmap.paper.effects import judge_all, log_ratio
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
    n_train: int = 400  # N

    def problems(self) -> list[Problem]:
        """One data set per seed."""
        return [draw_problem(self, self.n_train, seed) for seed in range(self.seeds)]


@dataclasses.dataclass(frozen=True)
class PXConfig(AblationConfig):
    jitters: tuple[float, ...] = (1e-32, 1e-12, 1e-6)  # ε; the first is the authors'
    num_points: int = 10_000  # samples of U(−0.1, 0.1) that Φ is made of


class FourierPX(Experiment):
    """Test RMSE for two evaluation distributions."""

    id = "fourier-pX"
    label = "Fig. 3 b"
    title = "Which evaluation distribution"
    see = (
        "The test error with p_X where the test points are, and with a narrower one. How far apart "
        "they are depends on the jitter alone: without it the objectives differ by a constant."
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
        yield from fitted.measure("test_rmse")
        yield Measured("rank", len(factor), config={"px": NARROW, "share": FLOOR})

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        chosen = tables.select(rows, metric="test_rmse")
        return tables.summarize(chosen, "px", "method", "jitter")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        errors = tables.select(rows, metric="test_rmse")
        wide, plain = (tables.select(errors, px=px) for px in (WIDE, "none"))
        effects = {}
        for (jitter,), members in tables.group(tables.select(errors, px=NARROW), "jitter").items():
            mine = tables.select(wide, jitter=jitter)
            effects[f"{NARROW}, {epsilon(jitter)}"] = tables.paired(mine, members)
            effects[f"PS-MAP, {epsilon(jitter)}"] = tables.paired(mine, plain)
        text = f"Test RMSE with p_X = {WIDE} is below that with {NARROW} and PS-MAP's, at every ε"
        return [judge_all(text, effects, below=0, paper="best")]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        figure, ax = figures.axes(panel=(4.6, 3.1))
        groups = tables.group(tables.select(rows, metric="test_rmse"), "px", "method", "jitter")
        ticks: dict[str, list[float]] = {}
        for place, ((px, method, jitter), members) in enumerate(groups.items()):
            mean = tables.mean(row.value for row in members)
            color = figures.COLORS[method]
            x = place + len(ticks) * 0.6 + (0.6 if px not in ticks else 0.0)
            ticks.setdefault(px, []).append(x)
            shade = (
                1.0 if not jitter else 0.95 if jitter < 1e-20 else 0.8 if jitter < 1e-9 else 0.65
            )
            ax.bar(x, mean.mean, yerr=mean.stderr, color=color, width=0.85, alpha=shade,
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
    ratios: tuple[float, ...] = (1 / 3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)  # σ/σ*


class FourierNoise(Experiment):
    """Test RMSE against the noise that the likelihood assumes."""

    id = "fourier-noise"
    label = "Fig. 4"
    title = "A wrong noise level"
    see = (
        "Test error of both methods if the likelihood's noise is not that of the data, from a "
        "third of it to ten times as much."
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
        yield from fitted.measure("test_rmse")

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        chosen = tables.select(rows, metric="test_rmse")
        return tables.summarize(chosen, "ratio", "method", "objective")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        errors = tables.select(rows, metric="test_rmse")
        ratios = [row.config["ratio"] for row in errors] or [math.nan]
        low, high = min(ratios), max(ratios)

        def rmse(ratio: float, objective: str) -> dict[int, float]:
            return tables.values_by(errors, "seed", ratio=ratio, objective=objective)

        forms = (EXACT, PAPER) if errors else ()
        near = {form: log_ratio(rmse(low, form), rmse(low, "none")) for form in forms}
        far = {form: log_ratio(rmse(high, form), rmse(1.0, form)) for form in forms}
        apart = {form: log_ratio(rmse(high, form), rmse(high, "none")) for form in forms}
        return [
            judge_all(f"At σ/σ* = {low:.2g} FS-MAP's test RMSE is PS-MAP's, to a factor of 1.25",
                      near, ratio=True, within=1.25, paper="similar"),
            judge_all(f"At σ/σ* = {high:g} FS-MAP's is more than 5 times that at σ = σ*", far,
                      ratio=True, above=5, paper="high test error"),
            judge_all("… and more than twice PS-MAP's", apart, ratio=True, above=2,
                      paper="PS-MAP relatively stable"),
        ]  # fmt: skip

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
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
        "Test error against the number M of evaluation points. Φ has full rank from M = 202 on: "
        "sin(100πx) is zero on 201 points."
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
        yield from fitted.measure("test_rmse")

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        chosen = tables.select(rows, metric="test_rmse")
        return tables.summarize(chosen, "points", "method", "jitter")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        ranks = tables.values_by(rows, "points", metric="rank")
        full = max(ranks.values(), default=0)
        fewer = sorted(m for m in ranks if ranks[m] < full)
        enough = sorted(m for m in ranks if ranks[m] == full)
        fall, rise, flat = {}, {}, {}
        for (jitter,), members in tables.group(
            tables.select(rows, metric="test_rmse", method="fs-map"), "jitter"
        ).items():
            rmse = {m: tables.values_by(members, "seed", points=m) for m in (*ranks, math.inf)}
            at = epsilon(jitter)
            fall[at] = log_ratio(rmse[enough[0]], rmse[fewer[0]])
            for a, b in itertools.pairwise([*fewer, enough[0]]):
                rise[f"M = {b}, {at}"] = log_ratio(rmse[b], rmse[a])
            for m in enough:
                flat[f"M = {m}, {at}"] = log_ratio(rmse[m], rmse[math.inf])
        path = f"from M = {fewer[0]} to {enough[0]}" if ranks else "until Φ has full rank"
        return [
            judge_all(f"Test RMSE falls by more than 10 % {path}, at every ε", fall, ratio=True,
                      below=0.9, paper="decreases"),
            judge_all("… and rises by no more than 10 % from one M to the next", rise, ratio=True,
                      below=1.1, paper="monotonically until 200"),
            judge_all("… and is that of Uniform(−1, 1) to 2 % once Φ has full rank", flat,
                      ratio=True, within=1.02, paper="saturates at 200"),
        ]  # fmt: skip

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        figure, ax = figures.axes(panel=(4.6, 3.1))
        chosen = tables.select(rows, metric="test_rmse")
        curves = tables.group(tables.select(chosen, method="fs-map"), "jitter")
        for look, ((jitter,), members) in zip(LINES, curves.items(), strict=False):
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
