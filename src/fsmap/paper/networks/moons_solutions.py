r"""``moons-solutions`` (Fig. A.5): the L-MAP classifier as $\epsilon$ grows.

The strength of the regularizer is $\lambda = 1/(2\epsilon N)$: from a constant function, which has
no derivative to be punished for, to one that fits as well as PS-MAP.

The way is not smooth everywhere. With all weights of a three-layer network of size u the function
is of order u³ and so is what the data gain, while prior and regularizer cost u² and more: the
constant stays a local optimum for every $\epsilon$. So there is a range of $\epsilon$ with two
optima, where the start decides. To see both, every jitter is trained from random values and, going
downwards, from the solution of the next larger one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.networks import moons_pictures as pictures
from fsmap.paper.networks.moons_fits import Fitted, MoonsConfig, train
from fsmap.paper.networks.scaled_networks import jitter_text
from fsmap.paper.report import tables
from fsmap.paper.report.interactive import Interactive
from fsmap.paper.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_JITTERS = (1e-2, 1e-1, 1.0, 10.0)
"""The four panels of the paper."""

RANDOM, CHAIN = "random", "chain"
"""Where training starts: random first values (the paper's way), or the solution of the next larger
jitter, the first of all from PS-MAP's."""

CHAIN_SHARE = 5
"""A link of the chain takes a fifth of the steps: it has not far to go."""


@dataclasses.dataclass(frozen=True)
class SolutionsConfig(MoonsConfig):
    """Sizes.

    Attributes:
        between: Jitters between two of the paper's, for the slider.
        pixels: Points of the picture along each side.
    """

    seeds: int = 1
    between: int = 3
    pixels: int = 48

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
            nll, *others = (_mean(members, metric=m) for m in scalars)
            about = {"method": method, "start": start, "jitter": jitter}
            line = {**about, "metric": "train NLL, nats", "ours": nll}
            lines.append({**line, **dict(zip(scalars[1:], others, strict=True))})
        return lines

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Near-constant, then as good as PS-MAP, steadily; and whether there is a jump."""
        spread = by_jitter(rows, "spread")
        nll, accuracy = by_jitter(rows, "train_nll"), by_jitter(rows, "train_accuracy")
        low, high = min(spread), max(spread)
        ps_nll = _mean(rows, metric="train_nll", method="ps-map")
        ps_accuracy = _mean(rows, metric="train_accuracy", method="ps-map")
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
        lines = {
            start: {m: by_jitter(rows, m, start) for m in pictures.PATH}
            for start in (RANDOM, CHAIN)
        }
        base = {m: _mean(rows, metric=m, method="ps-map") for m in pictures.PATH}
        return {
            "moons-solutions": pictures.panels(rows, shown),
            "moons-solutions-path": pictures.path(lines, base),
        }

    def interactive(self, rows: Sequence[Row]) -> Interactive:
        """A slider over ε."""
        accuracy, nll = by_jitter(rows, "train_accuracy"), by_jitter(rows, "train_nll")
        notes = {j: f"train accuracy {accuracy[j]:.3f}, NLL {nll[j]:.3f} nats" for j in accuracy}
        return pictures.slider(rows, notes)


def chain(
    config: SolutionsConfig,
    method: str,
    jitters: Sequence[float],
    seed: int,
    advance: Callable[[float], None],
) -> Iterator[Fitted]:
    """Train one jitter after another, from the largest down, each from the one before.

    Args:
        config: Sizes.
        method: ``"l-map"``.
        jitters: ε.
        seed: Decides points and ψ.
        advance: Takes the share that is done.

    Yields:
        The trained members, the largest jitter first.
    """
    (fitted,) = train(config, "ps-map", (), seed, lambda _: None)
    link = dataclasses.replace(config, steps=max(1, config.steps // CHAIN_SHARE))
    for done, jitter in enumerate(sorted(jitters, reverse=True), start=1):
        (fitted,) = train(link, method, [jitter], seed, lambda _: None, start=fitted.params)
        yield fitted
        advance(done / len(jitters))


def _look(config: SolutionsConfig, fitted: Fitted) -> dict[str, Any]:
    x = config.px().all()
    probability = torch.sigmoid(fitted.logit(x))
    picture = torch.sigmoid(fitted.logit(pictures.points(config.pixels)))
    return {
        "train_accuracy": fitted.accuracy(),
        "train_nll": fitted.nll(),
        "eigenvalue_sum": fitted.eigenvalues(x).sum(),
        "spread": probability.max() - probability.min(),
        "probability": [round(p, 4) for p in picture.tolist()],
    }


def largest_jump(rows: Sequence[Row], start: str) -> tuple[float, float]:
    """The largest change of the function between neighbors, and the ε where it ends.

    Args:
        rows: Rows of a run.
        start: Where training started.

    Returns:
        Mean absolute change of the probability on the picture, as a share of the change from the
        constant 0.5 to the last function; and the larger ε of that pair.
    """
    chosen = tables.select(rows, metric="probability", method="l-map", start=start, seed=0)
    ordered = sorted(chosen, key=lambda row: row.config["jitter"])
    fields: Tensor = torch.tensor([row.value for row in ordered], dtype=torch.float64)  # [k, n]
    steps = (fields[1:] - fields[:-1]).abs().mean(1)
    share = steps / (fields[-1] - 0.5).abs().mean()
    place = int(share.argmax())
    return float(share[place]), float(ordered[place + 1].config["jitter"])


def by_jitter(rows: Sequence[Row], metric: str, start: str = RANDOM) -> dict[float, float]:
    """A number of L-MAP, mean over seeds, in the order of ε.

    Args:
        rows: Rows of a run.
        metric: Which number.
        start: Where training started.

    Returns:
        The number by ε.
    """
    chosen = tables.select(rows, metric=metric, method="l-map", start=start)
    line = tables.line(chosen, "jitter")
    return dict(zip(line.x, line.mean, strict=True))


def _mean(rows: Sequence[Row], **where: Any) -> float:
    return tables.mean(row.value for row in tables.select(rows, **where)).mean
