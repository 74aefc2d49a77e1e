"""A tiny experiment: squares of numbers, one unit each, with everything an experiment can have.

As a script it is ``fsmap`` with this experiment as the only one, for tests that stop a process.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsmap.paper import engine
from fsmap.paper.engine import Claim, Experiment, Measured, Options
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import Curve, Frame, Interactive


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    sizes: tuple[int, ...] = (1, 2, 3, 4)
    seeds: int = 2
    scale: float = 1.0
    flip: bool = False
    limit: float | None = None


class Squares(Experiment):
    """Squares with a little seed-dependent offset."""

    id = "squares"
    label = "Fig. 0"
    title = "Squares of small numbers"
    see = "The curve is a parabola."
    cost = "1 s"
    protocol = "exact arithmetic"
    group = "closed-form"
    config = Config()
    quick = Config(sizes=(1, 2), seeds=1)
    trouble = None  # a function of the unit that raises

    def units(self, config):
        return [{"n": n} for n in config.sizes]

    def run(self, config, unit, context):
        context.advance(0.1)
        for seed in range(config.seeds):
            value = config.scale * unit["n"] ** 2 + 0.1 * seed
            yield Measured("square", value, "fs-map", seed, unit, deviations=("made up",))
            if type(self).trouble is not None and seed == config.seeds - 1:
                type(self).trouble(unit)
        context.advance("almost")
        yield Measured("curve", [unit["n"], math.nan, math.inf], "ps-map", 0, unit)

    def table(self, rows):
        squares = tables.select(rows, metric="square")
        return tables.summarize(squares, "n", "method", paper={(1, "fs-map"): (1.0, 0.1)})

    def claims(self, rows):
        line = tables.line(tables.select(rows, metric="square"), "n")
        grows = all(a < b for a, b in zip(line.mean, line.mean[1:], strict=False))
        return [
            Claim("larger numbers have larger squares", grows, line.mean[-1] - line.mean[0], 3),
            Claim("the last square is a million", line.mean[-1] == 1e6, line.mean[-1], 1e6),
        ]

    def draw(self, rows):
        line = tables.line(tables.select(rows, metric="square"), "n")
        figure, ax = figures.axes()
        figures.plot_mean(ax, *line, "fs-map")
        ax.set_xlabel("$n$")
        ax.set_ylabel("square of $n$")
        return {"squares": figure}

    def interactive(self, rows):
        line = tables.line(tables.select(rows, metric="square"), "n")
        frames = []
        for scale in (1, 2, 3):
            curve = Curve("FS-MAP", line.x, [scale * y for y in line.mean], "fs-map")
            frames.append(Frame(f"α = {scale}", curves=[curve], note=f"scaled by {scale}"))
        return Interactive("Move the scale", "α", frames, xlabel="n", ylabel="square", start=1)


class Broken(Squares):
    """Has a bug."""

    id = "broken"

    def run(self, config, unit, context):
        return [1 / 0]


@contextmanager
def only(*classes: type[Experiment]) -> Iterator[None]:
    """Make these the only experiments there are."""
    module = types.ModuleType("fake")
    for cls in classes:
        vars(module)[cls.__name__] = cls
        cls.__module__ = "fake"
    original = engine._modules
    engine._modules = lambda: [module]
    engine.registry.cache_clear()
    try:
        yield
    finally:
        engine._modules = original
        engine.registry.cache_clear()


def run(out: Path, *names: str, notes: list[str] | None = None, **options):
    """Outcomes of a silent run."""
    say = [].append if notes is None else notes.append
    return list(engine.run(names or ("squares",), Options(out=out, silent=True, **options), say))


def command(main: Callable[[int, int], int], about: str, count: int) -> None:
    """Run the ``main`` of a script with its --count and --seed."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with only(Squares):
        sys.exit(bool(main(given.count, given.seed)))


if __name__ == "__main__":
    from fsmap.cli import main

    where, *arguments = sys.argv[1:]
    if where.startswith("wait"):
        import time

        def wait(unit):
            if unit["n"] == int(where.removeprefix("wait")):
                Path(os.environ["FAKE_READY"]).touch()
                time.sleep(60)

        Squares.trouble = staticmethod(wait)
    with only(Squares):
        sys.exit(main(arguments))
