r"""``fourier`` (Fig. 2 a-d): FS-MAP finds more probable, flatter, better functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.experiments.experiment import Context, Experiment, Measured
from fsmap.experiments.fourier_fits import (
    DEVIATIONS,
    EXACT,
    PAPER,
    Block,
    Fitted,
    FourierConfig,
    Variant,
    draw_problem,
    fit,
    uniform_forms,
)
from fsmap.experiments.panels import PAPER_LOOK, legend_above, log_scale
from fsmap.objective.closed_form import Form
from fsmap.report import figures, tables
from fsmap.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "log_posterior_gain": ("Log posterior increase", r"$\Delta \log p(f\,|\,\mathcal{D})$ in nats"),
    "curvature": ("Loss curvature", "mean Hessian eigenvalue"),
    "test_rmse": ("Test RMSE", "RMSE"),
    "train_rmse": ("Train RMSE", "RMSE"),
}
METRICS = tuple(PANELS)


@dataclasses.dataclass(frozen=True)
class Config(FourierConfig):
    """Sizes.

    Attributes:
        sizes: Numbers N of training points.
        long_steps: Steps of a longer run at the largest N, one seed: 2,500 do not converge there.
    """

    sizes: tuple[int, ...] = (100, 200, 400, 800, 1_600, 3_200, 6_400)
    long_steps: int = 10_000


class Fourier(Experiment):
    """Seven sizes, a few seeds, PS-MAP and FS-MAP by two protocols: one stack."""

    id = "fourier"
    label = "Fig. 2 a–d"
    title = "FS-MAP on a Fourier model"
    see = (
        "FS-MAP's function is far more probable, lies in a flatter place, predicts better from "
        "N = 200 on, and its training error stays near the noise of 0.1."
    )
    cost = "20 s"
    protocol = (
        "exact: true objective in log space, no jitter. paper: 1e-32 inside the logarithm "
        "(authors' code). Full-batch Adam from θ = 0."
    )
    config = Config()
    quick = Config(sizes=(100, 200, 400, 1_600), steps=1_500, long_steps=3_000)

    def units(self, config: Config) -> list[dict[str, Any]]:
        """Everything at the paper's number of steps in one stack, then the long run."""
        return [{"part": "sizes"}, {"part": "long"}]

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Draw, fit and measure everything at once."""
        if unit["part"] == "long":
            yield from _long(config, context)
            return
        seeds = range(config.seeds)
        problems = [draw_problem(config, n, seed) for n in config.sizes for seed in seeds]
        forms = uniform_forms(config)
        fitted = fit(config, problems, _blocks(config, forms), context.advance)
        for name, values in (
            ("test_rmse", fitted.test_rmse()),
            ("train_rmse", fitted.train_rmse()),
            ("curvature", fitted.curvature()),
            ("largest_parameter", fitted.theta.abs().amax(-1)),
        ):
            yield from fitted.rows(name, values)
        yield from _gains("log_posterior_gain", fitted, forms)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Mean ± standard error over seeds, for every panel."""
        chosen = [row for metric in METRICS for row in tables.select(rows, metric=metric)]
        return tables.summarize(chosen, "metric", "n_train", "method", "objective")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """The four panels."""
        return [claim for objective in (EXACT, PAPER) for claim in _claims(rows, objective)]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Four panels, as in the paper; the paper's protocol is dotted."""
        figure, panels = figures.axes(2, 2)
        for ax, (metric, (title, ylabel)) in zip(panels.flat, PANELS.items(), strict=True):
            _draw_panel(ax, tables.select(rows, metric=metric))
            ax.set(title=title, ylabel=ylabel, xlabel="training points $N$")
            log_scale(ax, "x" if metric == "train_rmse" else "xy")
        train = panels[1, 1]
        train.set_ylim(0, 0.13)
        train.axhline(0.1, color=figures.COLORS["truth"], linewidth=0.8, linestyle=":")
        where = {"xytext": (0, 3), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        edge = ("axes fraction", "data")
        train.annotate(r"true noise $\sigma^*$", (1, 0.1), xycoords=edge, **where)
        legend_above(figure, panels[1, 0])
        return {"fourier": figure}


def _blocks(config: Config, forms: Mapping[str, Form]) -> list[Block]:
    """PS-MAP, then FS-MAP by each form."""
    noise = config.noise_std
    blocks = [Block(None, [Variant("ps-map", {"objective": "none"}, noise)])]
    for objective, form in forms.items():
        said = DEVIATIONS[objective]
        blocks.append(Block(form, [Variant("fs-map", {"objective": objective}, noise, said)]))
    return blocks


def _gains(metric: str, fitted: Fitted, forms: Mapping[str, Form]) -> Iterator[Measured]:
    """By how much FS-MAP's log p(f|D) is above PS-MAP's, each by its own objective."""
    for number, (objective, form) in enumerate(forms.items(), start=1):
        log_posterior = fitted.log_posterior(form)  # [K, Q]
        gain = (log_posterior[number] - log_posterior[0]).tolist()
        for problem, value in zip(fitted.problems, gain, strict=True):
            where = {"n_train": problem.n_train, "objective": objective}
            where["steps"] = fitted.config.steps
            said = DEVIATIONS[objective]
            yield Measured(metric, value, "fs-map", problem.seed, where, said)


def _long(config: Config, context: Context) -> Iterator[Measured]:
    """The largest N, trained until FS-MAP has converged."""
    forms, longer = uniform_forms(config), dataclasses.replace(config, steps=config.long_steps)
    problem = draw_problem(config, max(config.sizes), 0)
    fitted = fit(longer, [problem], _blocks(config, forms), context.advance)
    yield from _gains("log_posterior_gain_long", fitted, forms)


def _draw_panel(ax: Any, rows: Sequence[Row]) -> None:
    for (method, objective), members in tables.group(rows, "method", "objective").items():
        line = tables.line(members, "n_train")
        figures.plot_mean(ax, *line, method, **(PAPER_LOOK if objective == PAPER else {}))


def _means(rows: Sequence[Row], metric: str, method: str, objective: str) -> dict[int, float]:
    chosen = tables.select(rows, metric=metric, method=method, objective=objective)
    line = tables.line(chosen, "n_train")
    return {int(n): value for n, value in zip(line.x, line.mean, strict=True)}


def _claims(rows: Sequence[Row], objective: str) -> Iterator[Claim]:
    suffix = {EXACT: "true objective", PAPER: "paper's jitter of 1e-32"}[objective]
    gains = [
        row.value for row in tables.select(rows, metric="log_posterior_gain", objective=objective)
    ]
    yield Claim(
        f"FS-MAP's log p(f|D) is above PS-MAP's at every N and seed ({suffix})",
        bool(gains) and min(gains) > 0,
        f"by {min(gains, default=float('nan')):,.0f} nats or more",
        "thousands of nats",
    )
    yield from _converged(rows, objective, suffix)
    ps = {m: _means(rows, m, "ps-map", "none") for m in METRICS[1:]}
    fs = {m: _means(rows, m, "fs-map", objective) for m in METRICS[1:]}
    flatter = {n: fs["curvature"][n] / ps["curvature"][n] for n in fs["curvature"]}
    yield Claim(
        f"FS-MAP's minimum is flatter at every N ({suffix})",
        bool(flatter) and max(flatter.values()) < 1,
        _ratios("curvature", flatter),
        "lower at every N",
    )
    better = {n: fs["test_rmse"][n] / ps["test_rmse"][n] for n in fs["test_rmse"] if n >= 200}
    yield Claim(
        f"FS-MAP's test RMSE is lower for N ≥ 200 ({suffix})",
        bool(better) and max(better.values()) < 1,
        _ratios("RMSE", better),
        "lower",
    )
    if 400 in better:
        yield Claim(
            f"FS-MAP's test RMSE at N = 400 is below 0.8 of PS-MAP's ({suffix})",
            better[400] < 0.8,
            round(better[400], 3),
            "0.5 to 0.7",
        )
    noise = {n: value for n, value in fs["train_rmse"].items() if n >= 200}
    yield Claim(
        f"FS-MAP's train RMSE stays within 0.09–0.115 for N ≥ 200 ({suffix})",
        bool(noise) and all(0.09 <= value <= 0.115 for value in noise.values()),
        ", ".join(f"{value:.3f} (N = {n})" for n, value in noise.items()),
        "around 0.1",
    )
    few = min(ps["train_rmse"], default=0)
    yield Claim(
        f"PS-MAP overfits at small N, FS-MAP does not ({suffix})",
        bool(few) and ps["train_rmse"][few] < 0.5 * fs["train_rmse"][few],
        f"train RMSE at N = {few}: {ps['train_rmse'].get(few, float('nan')):.3f} against "
        f"{fs['train_rmse'].get(few, float('nan')):.3f}",
        "near zero against 0.1",
    )


def _converged(rows: Sequence[Row], objective: str, suffix: str) -> Iterator[Claim]:
    """At large N Adam needs more steps: its second moment remembers the first, large gradients."""
    for row in tables.select(rows, metric="log_posterior_gain_long", objective=objective):
        size = row.config["n_train"]
        short = _means(rows, "log_posterior_gain", "fs-map", objective).get(size, float("nan"))
        yield Claim(
            f"… by thousands of nats at the largest N too, once Adam has converged ({suffix})",
            row.value > 1_000,
            f"N = {size}: {row.value:,.0f} nats after {row.config['steps']:,} steps "
            f"({short:,.0f} after those of the figure)",
            "thousands of nats",
        )


def _ratios(name: str, ratios: dict[int, float]) -> str:
    return f"{name} ratio " + ", ".join(f"{r:.2f} (N = {n})" for n, r in ratios.items())
