"""``moons-solutions`` (Fig. A.5): decision functions of L-MAP on the two moons as ε grows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.networks.moons_fits import Fitted, MoonsConfig, train
from fsmap.paper.networks.scaled_networks import jitter_text, jitter_title
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import Frame, Interactive, legend_above
from fsmap.paper.rows import Claim, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH = 144
"""Pixels of a picture along each side."""

LOW, HIGH = (-2.2, -1.7), (3.2, 2.2)
"""Corners of the picture: the data with some room around them."""

PATH = {
    "train_nll": "train NLL, nats",
    "spread": "spread of probabilities",
    "eigenvalue_sum": r"sum of eigenvalues of $\mathcal{J}$",
}
"""What is drawn against ε, and its name."""


def points(pixels: int) -> Tensor:
    """Points of the picture, row by row from below, ``[pixels², 2]``."""
    x, y = (
        torch.linspace(a, b, pixels, dtype=torch.float64) for a, b in zip(LOW, HIGH, strict=True)
    )
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([columns.reshape(-1), rows.reshape(-1)], dim=-1)


def panels(rows: Sequence[Row], jitters: Sequence[float]) -> Figure:
    """One panel per jitter, from rows with ``probability``, ``inputs`` and ``labels``."""
    figure, axes = figures.axes(len(jitters), panel=(2.6, 2.5), squeeze=False, sharey=True)
    for ax, jitter in zip(axes[0], jitters, strict=True):
        image = _draw_function(ax, rows, jitter)
        ax.set_title(jitter_title(jitter))
    axes[0, 0].set_ylabel("$x_2$")
    _color_bar(figure, image, axes)
    return figure


def slider(rows: Sequence[Row], notes: Mapping[float, str]) -> Interactive:
    """A slider over ε that starts near ε = 1."""
    frames = []
    for jitter, note in notes.items():
        figure, ax = figures.axes(panel=(4.6, 3.4))
        image = _draw_function(ax, rows, jitter)
        ax.set_ylabel("$x_2$")
        _color_bar(figure, image, ax)
        frames.append(Frame(f"ε = {jitter:.3g}", figure=figure, note=note))
    away = [abs(math.log10(jitter)) for jitter in notes]
    return Interactive("How much may the function react?", "ε", frames, start=away.index(min(away)))


def path(
    lines: Mapping[str, Mapping[str, Mapping[float, float]]], base: Mapping[str, float]
) -> Figure:
    """Numbers against ε, from several starts."""
    figure, axes = figures.axes(3, panel=(2.9, 2.6))
    looks = {"random": {}, "chain": {"linestyle": (0, (1, 1.2)), "marker": "v"}}
    names = {"random": "L-MAP, from random values", "chain": "L-MAP, from the next larger ε"}
    for ax, (metric, label) in zip(axes, PATH.items(), strict=True):
        for start, values in lines.items():
            look = figures.method_style("l-map", label=names[start], **looks[start])
            ax.plot(list(values[metric]), list(values[metric].values()), **look)
        ends = list(next(iter(lines.values()))[metric])
        look = figures.method_style("ps-map", marker="", linestyle=(0, (4, 2)))
        ax.plot([ends[0], ends[-1]], [base[metric]] * 2, **look)
        ax.set(xscale="log", xlabel=r"$\epsilon$", ylabel=label)
    axes[2].set_yscale("log")
    legend_above(figure, axes[0])
    return figure


def _draw_function(ax: Axes, rows: Sequence[Row], jitter: float) -> Any:
    where = {"metric": "probability", "method": "l-map", "start": "random", "seed": 0}
    (row,) = tables.select(rows, jitter=jitter, **where)
    field = _smooth(row.value)
    look = {"origin": "lower", "aspect": "auto", "interpolation": "none", "vmin": 0, "vmax": 1}
    box = (LOW[0], HIGH[0], LOW[1], HIGH[1])
    image = ax.imshow(field, extent=box, cmap=_color_map(), **look)
    if field.min() < 0.45 and field.max() > 0.55:  # the boundary of a constant is an accident
        x, y = (torch.linspace(a, b, SMOOTH) for a, b in zip(LOW, HIGH, strict=True))
        ax.contour(x, y, field, [0.5], colors=[figures.BLACK], linewidths=1.2)
    inputs = torch.tensor(tables.select(rows, metric="inputs")[0].value)
    labels = torch.tensor(tables.select(rows, metric="labels")[0].value)
    for label, color in ((0, figures.COLORS["fs-map"]), (1, figures.COLORS["ps-map"])):
        chosen = inputs[labels == label]
        ax.scatter(chosen[:, 0], chosen[:, 1], s=9, color=color, edgecolor=figures.WHITE,
                   linewidth=0.4, label=f"class {label}")  # fmt: skip
    ax.set(xlabel="$x_1$", xlim=(LOW[0], HIGH[0]), ylim=(LOW[1], HIGH[1]))
    ax.grid(visible=False)
    return image


def _smooth(values: Sequence[float]) -> Any:
    """The measured points, interpolated to a picture, ``[SMOOTH, SMOOTH]``."""
    pixels = math.isqrt(len(values))
    field = torch.tensor(values, dtype=torch.float64).reshape(1, 1, pixels, pixels)
    size = (SMOOTH, SMOOTH)
    larger = torch.nn.functional.interpolate(field, size=size, mode="bilinear", align_corners=True)
    return larger[0, 0].numpy()


def _color_map() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    # paler than the points that lie on it
    return LinearSegmentedColormap.from_list("moons", ["#86addb", "#f4f2ee", "#e8a88f"])


def _color_bar(figure: Figure, image: Any, axes: Any) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02, ticks=[0, 0.5, 1])
    bar.set_label("probability of class 1")
    bar.outline.set_visible(False)


PAPER_JITTERS = (1e-2, 1e-1, 1.0, 10.0)
"""The four panels of the paper."""

RANDOM, CHAIN = "random", "chain"
"""Where training starts: random first values (the paper's way), or the solution of the next larger
jitter, the first of all from PS-MAP's."""

CHAIN_SHARE = 5
"""A link of the chain takes a fifth of the steps: it has not far to go."""


@dataclasses.dataclass(frozen=True)
class SolutionsConfig(MoonsConfig):
    """Sizes."""

    seeds: int = 1
    between: int = 3  # jitters between two of the paper's, for the slider
    pixels: int = 48  # points of the picture along each side

    def jitters(self) -> list[float]:
        """The paper's four, with others between."""
        first, last = math.log10(PAPER_JITTERS[0]), math.log10(PAPER_JITTERS[-1])
        steps = (len(PAPER_JITTERS) - 1) * (self.between + 1)
        powers = [first + (last - first) * k / steps for k in range(steps + 1)]
        return [float(f"{10**power:.3g}") for power in powers]


class MoonsSolutions(Experiment):
    """Decision functions of L-MAP."""

    id = "moons-solutions"
    label = "Fig. A.5"
    title = "L-MAP on two moons as ε grows"
    see = (
        "From a constant function to one that fits as well as PS-MAP: ε is a dial for how much the "
        "function may react to its parameters. Near ε = 0.04 the dial clicks: the constant stays a "
        "local optimum, and coming down from larger ε the function holds on for much longer."
    )
    cost = "5 min"
    protocol = (
        "L-MAP by forward differences (β = 1e-3), one ψ and lap_points fresh points of p_X a step; "
        "prior N(0, I). Panels and slider start from random values, as the paper does"
    )
    group = "networks"
    config = SolutionsConfig()
    quick = SolutionsConfig(steps=400, lr=1e-2, lap_points=100, between=1)

    def units(self, config: SolutionsConfig) -> list[dict[str, Any]]:
        """Per seed: PS-MAP, and L-MAP with all jitters from each start."""
        kinds = [("ps-map", RANDOM), ("l-map", RANDOM), ("l-map", CHAIN)]
        return [
            {"method": method, "start": start, "seed": seed}
            for seed in range(config.seeds)
            for method, start in kinds
        ]

    def run(
        self, config: SolutionsConfig, unit: dict[str, Any], context: Context
    ) -> Iterator[Measured]:
        """Train, and look at the function on the picture and on p_X."""
        method, seed = unit["method"], unit["seed"]
        way = chain if unit["start"] == CHAIN else train
        for fitted in way(config, method, config.jitters(), seed, context.advance):
            where = {k: v for k, v in fitted.member.items() if k == "jitter"}
            where["start"] = unit["start"]
            for metric, value in _look(config, fitted).items():
                yield Measured(metric, value, method, seed, where, config.deviations(method))
        if method == "ps-map" and seed == 0:
            yield Measured("inputs", fitted.data.x)
            yield Measured("labels", fitted.data.y)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Accuracy, NLL and spread by start and jitter."""
        lines = []
        scalars = ("train_nll", "train_accuracy", "spread", "eigenvalue_sum")
        chosen = tables.select(rows, metric=scalars)
        for (method, start, jitter), members in tables.group(
            chosen, "method", "start", "jitter"
        ).items():
            nll, *others = (tables.mean_of(members, metric=m) for m in scalars)
            about = {"method": method, "start": start, "jitter": jitter}
            line = {**about, "metric": "train NLL, nats", "ours": nll}
            lines.append({**line, **dict(zip(scalars[1:], others, strict=True))})
        return lines

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Near-constant, then as good as PS-MAP, steadily; and whether there is a jump."""
        spread = by_jitter(rows, "spread")
        nll, accuracy = by_jitter(rows, "train_nll"), by_jitter(rows, "train_accuracy")
        low, high = min(spread), max(spread)
        ps_nll = tables.mean_of(rows, metric="train_nll", method="ps-map")
        ps_accuracy = tables.mean_of(rows, metric="train_accuracy", method="ps-map")
        rise = max(b - a for a, b in zip(list(nll.values()), list(nll.values())[1:], strict=False))
        jump, where = largest_jump(rows, RANDOM)
        smooth, there = largest_jump(rows, CHAIN)
        held = by_jitter(rows, "spread", CHAIN)
        both = [j for j in spread if spread[j] < 0.05 and held.get(j, 0.0) > 0.3]
        return [
            Claim(
                f"near-constant at {jitter_text(low)}: probabilities differ by less than 0.05",
                spread[low] < 0.05,
                spread[low],
                "near-zero function, severe underfit",
            ),
            Claim(
                f"as good as PS-MAP at {jitter_text(high)}: accuracy within 1 %, NLL within 0.02",
                accuracy[high] > ps_accuracy - 0.01 and nll[high] < ps_nll + 0.02,
                f"{accuracy[high]:.3f}, {nll[high]:.3f} (PS-MAP {ps_accuracy:.3f}, {ps_nll:.3f})",
                "fits the data perfectly",
            ),
            Claim(
                "the fit gets better all the way: from one ε to the next NLL never rises by 0.01",
                rise < 0.01,
                rise,
                "evolves from one to the other",
            ),
            Claim(
                "no jump, each ε from random values: no step to the next ε is half of the way",
                jump < 0.5,
                f"{jump:.2f} of the way, at ε = {where:.3g}",
                "varies smoothly",
            ),
            Claim(
                "no jump, each ε from the next larger one: no step is half of the way",
                smooth < 0.5,
                f"{smooth:.2f} of the way, at ε = {there:.3g}",
                "varies smoothly",
            ),
            Claim(
                "why there is a jump: some ε has two optima (constant from random values, spread "
                "above 0.3 from the next larger ε)",
                bool(both),
                ", ".join(f"{j:.3g}" for j in both) or "none",
                None,
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """The paper's four panels, and the way between them from both starts."""
        found = by_jitter(rows, "spread")
        shown = [j for j in found if any(math.isclose(j, p, rel_tol=1e-6) for p in PAPER_JITTERS)]
        lines = {start: {m: by_jitter(rows, m, start) for m in PATH} for start in (RANDOM, CHAIN)}
        base = {m: tables.mean_of(rows, metric=m, method="ps-map") for m in PATH}
        return {
            "moons-solutions": panels(rows, shown),
            "moons-solutions-path": path(lines, base),
        }

    def interactive(self, rows: Sequence[Row]) -> Interactive:
        """A slider over ε."""
        accuracy, nll = by_jitter(rows, "train_accuracy"), by_jitter(rows, "train_nll")
        notes = {j: f"train accuracy {accuracy[j]:.3f}, NLL {nll[j]:.3f} nats" for j in accuracy}
        return slider(rows, notes)


def chain(
    config: SolutionsConfig,
    method: str,
    jitters: Sequence[float],
    seed: int,
    advance: Callable[[float], None],
) -> Iterator[Fitted]:
    """Train one jitter after another, from the largest down, each from the one before."""
    (fitted,) = train(config, "ps-map", (), seed, lambda _: None)
    link = dataclasses.replace(config, steps=max(1, config.steps // CHAIN_SHARE))
    for done, jitter in enumerate(sorted(jitters, reverse=True), start=1):
        (fitted,) = train(link, method, [jitter], seed, lambda _: None, start=fitted.params)
        yield fitted
        advance(done / len(jitters))


def _look(config: SolutionsConfig, fitted: Fitted) -> dict[str, Any]:
    x = config.px().all()
    probability = torch.sigmoid(fitted.logit(x))
    picture = torch.sigmoid(fitted.logit(points(config.pixels)))
    return {
        "train_accuracy": fitted.accuracy(),
        "train_nll": fitted.nll(),
        "eigenvalue_sum": fitted.eigenvalues(x).sum(),
        "spread": probability.max() - probability.min(),
        "probability": [round(p, 4) for p in picture.tolist()],
    }


def largest_jump(rows: Sequence[Row], start: str) -> tuple[float, float]:
    """The largest change of the function between neighbors, and the ε where it ends."""
    chosen = tables.select(rows, metric="probability", method="l-map", start=start, seed=0)
    ordered = sorted(chosen, key=lambda row: row.config["jitter"])
    fields: Tensor = torch.tensor([row.value for row in ordered], dtype=torch.float64)  # [k, n]
    steps = (fields[1:] - fields[:-1]).abs().mean(1)
    share = steps / (fields[-1] - 0.5).abs().mean()
    place = int(share.argmax())
    return float(share[place]), float(ordered[place + 1].config["jitter"])


def by_jitter(rows: Sequence[Row], metric: str, start: str = RANDOM) -> dict[float, float]:
    """A number of L-MAP, mean over seeds, in the order of ε."""
    return tables.means_by(rows, "jitter", metric=metric, method="l-map", start=start)
