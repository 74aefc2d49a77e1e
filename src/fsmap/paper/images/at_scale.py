r"""``fsmap-at-scale``: FS-MAP itself on a ResNet, which the paper leaves to L-MAP.

$\log\det(\mathcal J + \epsilon I)$ with its gradient by stochastic Lanczos quadrature (``slq``):
its cost, its error against the exact one on a narrow network, and whether training with the
determinant is better than with its first order (L-MAP) or with the bound by the trace (LogTrace).
BatchNorm uses its running statistics where geometry is measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap.assess.shift import Predictions, measure
from fsmap.data.images import ImageTask
from fsmap.images.build import logits_of
from fsmap.models.resnet import resnet18
from fsmap.paper.engine import Context, Measured, Plots, exact
from fsmap.paper.images import protocol
from fsmap.paper.images.protocol import GENERATED, ImageConfig, ImageExperiment, generated, task_of
from fsmap.paper.images.verdict import claim_about, command, lines
from fsmap.paper.report import figures, tables
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.types import Estimate, ModelFn, Params

METHODS = ("ps-map", "fs-map", "l-map", "nats")
T_999 = {2: 636.6, 4: 12.92, 8: 5.41, 16: 4.07}  # by number of probes, in standard errors
MARKERS = {**figures.MARKERS, "nats": "v"}


@dataclasses.dataclass(frozen=True)
class Config(ImageConfig):
    datasets: tuple[str, ...] = ("fmnist",)
    seeds: int = 2
    fmnist_epochs: int = 5
    every: int = 10  # geometry on every k-th step, k times as strong
    points: int = 32  # S while training
    jitter: float = 1e4  # ε of log det and of L-MAP while training
    probes: int = 4  # of slq while training
    sizes: tuple[int, ...] = (16, 64, 128)  # S of the costs
    probe_counts: tuple[int, ...] = (1, 4, 16)  # numbers of probes of the costs
    jitters: tuple[float, ...] = (1.0, 1e2, 1e4)  # ε: a smaller one needs more Lanczos steps
    twin: int = 4  # width of the network whose exact value is known
    repeats: int = 5  # measurements of each cost and error

    def __post_init__(self) -> None:
        super().__post_init__()
        protocol.check_choice("probes", (self.probes,), tuple(T_999))


class FSMAPAtScale(ImageExperiment):
    id = "fsmap-at-scale"
    label = "FS-MAP"
    title = "FS-MAP itself on a ResNet"
    see = "Cost and error of log det by Lanczos, and training with it beside its approximations."
    cost = "8 short runs; not yet timed on a GPU"
    protocol = (
        "ResNet-18, log det(𝒥 + εI) and its gradient by slq at images of D' = KMNIST; running "
        "statistics; error against the dual on a narrow twin; FashionMNIST, SGD, cosine, a few "
        "epochs, geometry on every k-th step; L-MAP at the same ε, LogTrace at its default"
    )
    selecting = ("seeds", "trace_points")  # older rows have the latter
    departures = ()
    config = Config()
    quick = Config.small(fmnist_epochs=1, limit=64, every=2, points=4, probes=8, sizes=(2, 4),
                         probe_counts=(1, 2), jitters=(1e2,), twin=2, repeats=5)  # fmt: skip

    def units(self, config: Config) -> list[Unit]:
        runs = [{"seed": seed, "method": m} for seed in range(config.seeds) for m in METHODS]
        return [
            *({"part": "cost", "S": size} for size in config.sizes),
            *({"part": "error", "jitter": jitter} for jitter in config.jitters),
            *({"part": "train", **run} for run in runs),
        ]

    def run(self, config: Config, unit: Unit, context: Context) -> Iterator[Measured]:
        made = generated(config, "fmnist", context)
        where = {"generated": made, "data_dir": context.data_dir}
        task = task_of("fmnist", px="kmnist", limit=config.limit, **where).to(context.device)
        part = {"cost": _costs, "error": _errors, "train": _train}[unit["part"]]
        notes = (GENERATED,) if made else ()
        for row in part(config, unit, task, context):
            yield row._replace(deviations=notes, config={**row.config, "generated": made})

    def table(self, rows: Rows) -> tables.Table:
        names = ("milliseconds", "gigabytes", "log_det_error", "gradient_cosine")
        costs = tables.in_order(rows, *names)
        metrics = ("accuracy", "nll", "ece", "nll_scaled", "seconds_per_step")
        return [
            *tables.summarize(costs, "metric", "S", "probes", "jitter"),
            *lines(rows, {}, by=("row",), metrics=metrics),
        ]

    def claims(self, rows: Rows) -> list[Claim]:
        cosines = tables.values(rows, metric="gradient_cosine")
        errors = tables.select(rows, metric="log_det_z")
        within = [row.value <= T_999[row.config["probes"]] for row in errors]
        real = [r for r in rows if not r.config["generated"] and r.config.get("images", 0) > 2e4]
        return [
            exact("On a narrow network slq's 99.9 % interval (Student's t) contains the exact "
                  "value (dual), in all draws", all(within),
                  f"{sum(within)} of {len(within)}; mean cosine of the gradients "
                  f"{tables.mean(cosines).mean:.3f}", source="ours", seeds=len(within)),
            *(claim_about(f"FashionMNIST: FS-MAP has a lower NLL than {tables.word(row)}", real,
                          "nll", one={"row": "fs-map"}, other={"row": row}, below=0.0,
                          command=command(self.id)) for row in ("l-map", "nats")),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, (left, right) = figures.axes(2, panel=(3.9, 2.9))
        costs = tables.group(rows, "S", "jitter", metric="milliseconds")
        jitters = dict.fromkeys(jitter for _, jitter in costs)
        looks = dict(zip(jitters, itertools.cycle(("-", "--", ":")), strict=False))
        for (size, jitter), members in costs.items():
            line = tables.line(members, "probes")
            look = {"color": figures.COLORS["fs-map"], "linestyle": looks[jitter], "marker": "o"}
            left.plot(line.x, line.mean, **look, label=f"S = {size}, ε = {jitter:g}")
        left.set(xlabel="probes", ylabel="ms for log det and gradient")
        left.legend(fontsize=7)
        for place, name in enumerate(METHODS):
            mean, stderr, _ = tables.mean(tables.values(rows, metric="nll", row=name))
            color = figures.COLORS.get(name, figures.COLORS["l-map"])  # LogTrace: as in Table 2
            right.errorbar(place, mean, yerr=stderr, color=color, marker=MARKERS[name])
        right.set(xlim=(-0.5, len(METHODS) - 0.5))
        right.set_xticks(range(len(METHODS)), map(tables.word, METHODS))
        right.set_ylabel("test NLL")
        return {self.id: figure}


def _network(width: int, seed: int, context: Context) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    return resnet18(channels=1, width=width, generator=generator).to(context.device, torch.float32)


def _points(task: ImageTask, number: int, generator: torch.Generator) -> Tensor:
    assert task.px is not None
    images = task.px.sources[0].images
    rows = torch.randint(len(images), (number,), generator=generator, device=images.device)
    return task.normalize(images[rows])


def _costs(config: Config, unit: Unit, task: ImageTask, context: Context) -> Iterator[Measured]:
    """Time and memory of log det and its gradient, by probes and jitter."""
    f, params = fsmap.functional(_network(config.width, 0, context).eval())
    cuda = context.device.type == "cuda"
    for probes, jitter in itertools.product(config.probe_counts, config.jitters):
        where = {"S": unit["S"], "probes": probes, "jitter": jitter}
        for repeat in range(config.repeats + 1):
            generator = torch.Generator(context.device).manual_seed(repeat)
            x = _points(task, unit["S"], generator)
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            value = _slq(f, params, x, jitter, probes, generator).value
            _gradient(value, params)
            if cuda:
                torch.cuda.synchronize()
            if repeat:  # the first one warms up
                taken = 1e3 * (time.perf_counter() - begin)
                yield Measured("milliseconds", taken, "fs-map", repeat - 1, where)
        if cuda:
            peak = torch.cuda.max_memory_allocated() / 1e9
            yield Measured("gigabytes", peak, "fs-map", 0, where)


def _slq(f: ModelFn, params: Params, x: Tensor, jitter: float, probes: int, draws: Any) -> Estimate:
    options: dict[str, Any] = {"method": "slq", "probes": probes, "generator": draws}
    found = fsmap.log_det(f, params, x, jitter=jitter, return_estimate=True, **options)
    assert not isinstance(found, Tensor)
    return found


def _gradient(value: Tensor, params: Params) -> Tensor:
    leaves = list(params.values())
    found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def _errors(config: Config, unit: Unit, task: ImageTask, context: Context) -> Iterator[Measured]:
    """Slq against the dual on a narrow network: error in nats, in its own errors, and of ∇."""
    f, params = fsmap.functional(_network(config.twin, 0, context).eval())
    jitter = unit["jitter"]
    where = {"S": config.points, "probes": config.probes, "jitter": jitter}
    for seed in range(config.repeats):
        generator = torch.Generator(context.device).manual_seed(seed)
        x = _points(task, config.points, generator)
        dual = fsmap.log_det(f, params, x, jitter=jitter, method="dual")
        assert isinstance(dual, Tensor)
        value, stderr = _slq(f, params, x, jitter, config.probes, generator)
        ours, right = _gradient(value, params), _gradient(dual, params)
        gap = (value - dual).abs().detach()
        yield Measured("log_det_error", gap, "fs-map", seed, where)
        yield Measured("log_det_z", gap / stderr.clamp(min=1e-9), "fs-map", seed, where)
        cosine = torch.cosine_similarity(ours, right, dim=0)
        yield Measured("gradient_cosine", cosine, "fs-map", seed, where)


def _train(config: Config, unit: Unit, task: ImageTask, context: Context) -> Iterator[Measured]:
    """A short run with one of the methods, then the metrics of the test images."""
    seed, method = unit["seed"], unit["method"]
    module = _network(config.width, seed, context)
    num_data = len(task.train.x)
    steps = config.fmnist_epochs * (num_data // config.batch)
    options = {"lr": config.lr, "momentum": 0.9, "weight_decay": config.fmnist_weight_decay}
    optimizer = torch.optim.SGD(module.parameters(), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draws = torch.Generator(context.device).manual_seed(seed)
    geometry = _geometry(config, method, module, task, draws)
    begin = time.perf_counter()
    for step in range(steps):
        rows = torch.randint(num_data, (config.batch,), generator=draws, device=context.device)
        module.train()
        loss = F.cross_entropy(module(task.normalize(task.train.x[rows])), task.train.y[rows])
        if geometry is not None and step % config.every == 0:
            loss = loss + config.every * geometry()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        context.advance((step + 1) / steps)
    where = {"row": method, "epochs": config.fmnist_epochs, "images": num_data}
    kind = "l-map" if method == "nats" else method
    pace = (time.perf_counter() - begin) / max(steps, 1)
    yield Measured("seconds_per_step", pace, kind, seed, where)
    valid, test = (
        Predictions(logits_of(module.eval(), part.x, task.normalize), part.y)
        for part in (task.valid, task.test)
    )
    for name, value in measure(test, fsmap.metrics.temperature(*valid)).items():
        yield Measured(name, value, kind, seed, where)


def _geometry(
    config: Config, method: str, module: nn.Module, task: ImageTask, draws: torch.Generator
) -> Callable[[], Tensor] | None:
    """The term of one step, in nats per training image; None for PS-MAP."""
    if method == "ps-map":
        return None
    f, params = fsmap.functional(module)
    num_data = len(task.train.x)
    penalty = fsmap.LogTrace()

    def term() -> Tensor:
        module.eval()  # running statistics
        x = _points(task, config.points, draws)
        if method == "fs-map":
            return _slq(f, params, x, config.jitter, config.probes, draws).value / (2 * num_data)
        R = fsmap.trace(f, params, x, method="jvp", generator=draws).value
        return penalty(R) if method == "nats" else R / (2 * config.jitter * num_data)

    return term
