"""``transfer`` (Table 3): ResNet-50 from ImageNet weights on CIFAR-10.

Two forms. ``features``: the backbone is frozen and a perceptron with one hidden layer is trained on
its features, every λ and seed as one population. (On a *linear* head L-MAP does nothing: R does not
depend on the parameters of a linear model, appendix B.3.) ``finetune``: all weights, a few epochs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import fsmap
from fsmap import metrics
from fsmap.assess.shift import Predictions, measure
from fsmap.data.images import Images
from fsmap.images import ImageSettings
from fsmap.images.build import build_model
from fsmap.models.mlp import MLP
from fsmap.paper.engine import Context, Measured, Plots
from fsmap.paper.images import protocol
from fsmap.paper.images.experiments import printed
from fsmap.paper.images.protocol import COMPUTED, ImageConfig, ImageExperiment, Kind, task_of
from fsmap.paper.images.verdict import claim_about, command, draw_table, lines
from fsmap.paper.report import tables
from fsmap.paper.rows import Claim, Row, Rows, Unit
from fsmap.train.loop import adam

FEATURES, FINETUNE = "features", "finetune"
FROZEN = "the backbone is frozen; a perceptron with one hidden layer is trained on its features"


@dataclasses.dataclass(frozen=True)
class Config(ImageConfig):
    datasets: tuple[str, ...] = ("cifar10",)
    cifar10_epochs: int = 3
    batch: int = 64
    points: int = 64
    lr: float = 1e-3
    forms: tuple[str, ...] = (FEATURES, FINETUNE)  # features, finetune
    # A model of an image run that comes with its weights, and resizes by itself
    backbone: str = "resnet50-imagenet"
    hidden: int = 256  # units of the head on frozen features
    steps: int = 4_000  # adam steps of that head
    # λ of that head; the best on held-out images is kept
    strengths: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def heads(config: Config, context: Context) -> Iterator[Measured]:
    """Train heads on frozen features, every λ and seed as one population."""
    made = protocol.generated(config, "cifar10", context)
    parts = features(config, context, made)
    train = parts["train"]
    num_data, width = train.x.shape
    px = fsmap.px.Empirical(parts["other"].x)
    prior = fsmap.Normal((1 / (config.cifar10_weight_decay * num_data)) ** 0.5)
    points = {"num_points": config.points, "num_data": num_data}

    def head(seed: int) -> MLP:
        draws = torch.Generator().manual_seed(seed)
        made = MLP([width, config.hidden, 10], "relu", generator=draws)
        return made.to(context.device, torch.float32)

    def build(strength: Tensor) -> fsmap.Objective:
        return fsmap.l_map(
            fsmap.Categorical(), prior, px, reg_strength=strength, estimator="jvp", **points
        )

    states, _ = fsmap.fit_population(
        build,
        fsmap.Grid(strength=[0.0, *config.strengths], seed=range(config.seeds)),
        fsmap.functional(head(0))[0],
        train,
        steps=config.steps,
        init=head,
        optimizer=adam(config.lr),
        batch_size=config.batch,
        log_every=100,
        progress=False,
    )
    found = []
    for k, member in enumerate(states.grid):
        params = states.member(k).params
        with torch.no_grad():
            valid, test, other = (states.f(params, parts[p].x) for p in ("valid", "test", "other"))
        T = metrics.temperature(valid, parts["valid"].y)
        values = measure(Predictions(test, parts["test"].y), T)
        values |= {"temperature": T, "ood_auroc": metrics.ood_auroc(test, other)}
        found.append((member, metrics.nll(valid, parts["valid"].y), values))

    def held_out_nll(strength: float) -> float:
        return sum(nll for m, nll, _ in found if m["strength"] == strength) / config.seeds

    best = min(config.strengths, key=held_out_nll)
    notes = (FROZEN, protocol.GENERATED) if made else (FROZEN,)
    for member, _, values in found:
        strength = member["strength"]
        about = {"dataset": "cifar10", "form": FEATURES, "row": FEATURES, "generated": made}
        about |= {"reg_strength": strength, "chosen": strength in (0.0, best), "epochs": 0}
        about |= {"px": "D' = cifar100" if strength else None, "images": num_data}
        method = "l-map" if strength else "ps-map"
        for name, value in values.items():
            yield Measured(name, value, method, int(member["seed"]), about, notes)


def features(config: Config, context: Context, made: bool) -> dict[str, fsmap.Batch]:
    """Features of the frozen backbone, standardized by those of the training images."""
    task = task_of("cifar10", limit=config.limit, generated=made, data_dir=context.data_dir)
    settings = ImageSettings(data="cifar10", model=config.backbone, width=config.width)
    module = build_model(settings, data_dir=context.data_dir).to(context.device).eval()
    *_, head = (name for name, layer in module.named_modules() if isinstance(layer, nn.Linear))
    module.set_submodule(head, nn.Identity())  # features come out instead of logits
    foreign = protocol.other_images("cifar10", made, context.data_dir)
    sets = {"train": task.train, "valid": task.valid, "test": task.test}
    found = {**sets, "other": Images(foreign, torch.zeros(len(foreign)).long())}
    out = {}
    for name, images in found.items():
        context.advance(f"features: {name}")
        batches = (task.normalize(part.to(context.device)) for part in images.x.split(250))
        with torch.no_grad():
            x = torch.cat([module(batch).flatten(1) for batch in batches])
        out[name] = fsmap.Batch(x, images.y.to(context.device))
    centre, spread = out["train"].x.mean(0), out["train"].x.std(0).clamp_min(1e-6)
    return {name: b._replace(x=(b.x - centre) / spread) for name, b in out.items()}


METHODS = {"ps-map": "ps-map", "l-map": "other", "log-trace": "nats"}  # rows to fine-tune
COMPARED = {"nll": "NLL", "ece": "ECE", "nll_scaled": "NLL after temperature scaling of both"}
WORDS = {FINETUNE: "fine-tuned", FEATURES: "frozen features"}
MANY = 20_000  # methods are compared where there are more training images than that
SHORT = "a few epochs in place of the paper's length, which does not fit"

PAPER = {
    (FINETUNE, "ps-map"): printed(96.3, 0.1, 99.5, 0.1, 0.18, 0.01, 2.6, 0.2),
    (FINETUNE, "l-map"): printed(96.4, 0.1, 99.5, 0.1, 0.15, 0.01, 2.1, 0.1),
}
"""Table 3: (mean, standard error); percent, and nats."""


class Transfer(ImageExperiment):
    id = "transfer"
    label = "Table 3"
    title = "Transfer from ImageNet"
    see = "NLL, ECE and accuracy of both methods, fine-tuned and on frozen features."
    cost = "features: 3 min; finetune: about 5 min a run on an H200"
    protocol = (
        "CIFAR-10 enlarged to 224²; finetune: SGD, lr 1e-3, batch 64, D' = CIFAR-100, 3 epochs; "
        "features: Adam on features of the frozen backbone, λ chosen on held-out images"
    )
    selecting = ("forms", *COMPUTED)  # a unit of features has all seeds
    departures = ImageExperiment.departures[1:]
    config = Config()
    quick = Config.small(backbone="resnet18", hidden=16, steps=60, strengths=(1e-4, 1e-2), batch=16)

    def units(self, config: Config) -> list[Unit]:
        # all seeds of the heads at once; one fine-tuning run each
        runs = itertools.product(range(config.seeds), METHODS)
        units: list[Unit] = [{"form": FEATURES}]
        units += [{"form": FINETUNE, "method": method, "seed": seed} for seed, method in runs]
        return [unit for unit in units if unit["form"] in config.forms]

    def run(self, config: Config, unit: Unit, context: Context) -> Iterator[Measured]:
        if unit["form"] == FEATURES:
            yield from heads(config, context)
            return
        for row in super().run(config, unit, context):
            notes = (*row.deviations, SHORT)
            yield row._replace(config={**row.config, "form": FINETUNE}, deviations=notes)

    def kind(self, unit: Unit) -> Kind:
        return protocol.KINDS[METHODS[unit["method"]]]._replace(name=unit["method"])

    def table(self, rows: Rows) -> tables.Table:
        return lines(_chosen(rows), PAPER, by=("form", "row"))

    def claims(self, rows: Rows) -> list[Claim]:
        real = [r for r in _chosen(rows) if not r.config["generated"] and r.config["images"] > MANY]
        claims = []
        for form, metric in itertools.product((FINETUNE, FEATURES), COMPARED):
            cells = [PAPER.get((form, row), {}).get(metric) for row in ("l-map", "ps-map")]
            paper = f"{cells[0][0]} against {cells[1][0]}" if cells[0] and cells[1] else None
            text = f"{WORDS[form].capitalize()}: L-MAP's {COMPARED[metric]} is below PS-MAP's"
            claims.append(
                claim_about(text, real, metric, one={"form": form, "row": "l-map"},
                            other={"form": form, "row": "ps-map"}, below=0.0, paper=paper,
                            command=command(self.id, forms=form))
            )  # fmt: skip
        return claims

    def draw(self, rows: Rows) -> Plots:
        named = [
            r._replace(config={**r.config, "row": f"{r.config['row']}@{WORDS[r.config['form']]}"})
            for r in _chosen(rows)
        ]
        paper = {("cifar10", f"{row}@{WORDS[form]}"): cells for (form, row), cells in PAPER.items()}
        return draw_table(named, paper, self.id)


def _chosen(rows: Rows) -> list[Row]:
    """Rows by method, without heads whose λ is not the best on held-out images."""
    kept = [row for row in rows if row.config.get("chosen", True)]
    names = [row.config["row"] if row.config["form"] == FINETUNE else row.method for row in kept]
    pairs = zip(kept, names, strict=True)
    return [row._replace(config={**row.config, "row": name}) for row, name in pairs]
