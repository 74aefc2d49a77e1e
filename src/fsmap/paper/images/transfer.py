"""``transfer`` (Table 3): ResNet-50 from ImageNet weights on CIFAR-10.

Two forms. ``features``: the backbone is frozen and a perceptron with one hidden layer is trained on
its features, every λ and seed as one population. (On a *linear* head L-MAP does nothing: R does not
depend on the parameters of a linear model, appendix B.3.) ``finetune``: all weights, a few epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.paper.experiment import Context, Measured
from fsmap.paper.images.config import SELECTING, ImageExperiment, quick
from fsmap.paper.images.measure import measured
from fsmap.paper.images.pictures import draw_table
from fsmap.paper.images.protocol import Kind, Run, trained
from fsmap.paper.images.table import PERCENT_OF_AREA
from fsmap.paper.images.transfer_heads import FEATURES, FINETUNE, Config, heads
from fsmap.paper.images.verdict import lines, shared
from fsmap.paper.report import tables
from fsmap.paper.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {"ps-map": None, "l-map": "other"}
COMPARED = {"nll": "NLL", "ece": "ECE", "nll_scaled": "NLL after temperature scaling of both"}
MANY = 20_000
"""Methods are compared where there are more training images than that."""

SHORT = "a few epochs in place of the paper's length, which does not fit"

PAPER = {
    (FINETUNE, "ps-map"): {
        "accuracy": (96.3, 0.1),
        "selective": (99.5 * PERCENT_OF_AREA, 0.1),
        "nll": (0.18, 0.01),
        "ece": (2.6, 0.2),
    },
    (FINETUNE, "l-map"): {
        "accuracy": (96.4, 0.1),
        "selective": (99.5 * PERCENT_OF_AREA, 0.1),
        "nll": (0.15, 0.01),
        "ece": (2.1, 0.1),
    },
}
"""Table 3: (mean, standard error); percent, and nats."""


class Transfer(ImageExperiment):
    """The four metrics after transfer, before and after temperature scaling."""

    id = "transfer"
    label = "Table 3"
    title = "Transfer from ImageNet"
    see = "L-MAP's NLL and ECE are slightly below PS-MAP's at about the same accuracy."
    cost = "features: 3 min; finetune: about 5 min a run on an H200"
    protocol = (
        "CIFAR-10 enlarged to 224²; finetune: SGD, lr 1e-3, batch 64, D' = CIFAR-100, 3 epochs; "
        "features: Adam on features of the frozen backbone, λ chosen on held-out images"
    )
    selecting = (*SELECTING, "forms")
    config = Config()
    quick = quick(
        Config, backbone="resnet18", hidden=16, steps=60, strengths=(1e-4, 1e-2), batch=16
    )

    def units(self, config: Config) -> list[dict[str, Any]]:
        """All seeds of the heads at once; one fine-tuning run each."""
        units: list[dict[str, Any]] = [{"form": FEATURES}] if FEATURES in config.forms else []
        if FINETUNE in config.forms:
            units += [
                {"form": FINETUNE, "method": method, "seed": seed}
                for seed in range(config.seeds)
                for method in METHODS
            ]
        return units

    def measure(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Train heads, or all of the network."""
        if unit["form"] == FEATURES:
            yield from heads(config, context)
            return
        kind = tuned(config, unit["method"])
        run = trained(config, Run("cifar10", kind, unit["seed"]), context)
        for row in measured(run, kind, context):
            notes = (*row.deviations, SHORT)
            yield row._replace(config={**row.config, "form": FINETUNE}, deviations=notes)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """One line per form, method and metric."""
        chosen = [row for row in rows if row.config.get("chosen", True)]
        return lines(chosen, PAPER, by=("form", "method"))

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """NLL, also after temperature scaling, and ECE of both forms."""
        return list(_claims(rows))

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """ECE and NLL of both forms."""
        chosen = [row for row in rows if row.config.get("chosen", True)]
        named = [
            row._replace(config={**row.config, "row": f"{row.config['form']} {row.method}"})
            for row in chosen
        ]
        return {self.id: draw_table(named)["image-table"]}


def tuned(config: Config, method: str) -> Kind:
    """Fine-tuning as a kind of run."""
    px = METHODS[method]
    return Kind(f"{FINETUNE}-{method}", method, px, changes={"model": config.backbone})


def _claims(rows: Sequence[Row]) -> Iterator[Claim]:
    chosen = [row for row in rows if row.config.get("chosen", True)]
    finite = [row.value for row in tables.select(rows, metric="nll")]
    yield Claim(
        "every head and network has a finite test NLL",
        bool(finite) and all(value < float("inf") for value in finite),
        f"{len(finite)} trained, at most {max(finite, default=0.0):.3g}",
        None,
    )
    real = [row for row in chosen if not row.config["generated"] and row.config["images"] > MANY]
    for form in (FEATURES, FINETUNE):
        for metric, words in COMPARED.items():
            sides = (tables.select(real, metric=metric, form=form, method=m) for m in METHODS)
            ps, lm = shared(*sides)
            if lm.n:
                cells = [PAPER[FINETUNE, m].get(metric) for m in ("l-map", "ps-map")]
                printed = [cell[0] for cell in cells if cell is not None and form == FINETUNE]
                yield Claim(
                    f"{form}: L-MAP's {words} is below PS-MAP's",
                    lm.mean < ps.mean,
                    f"{lm.mean:.4g} against {ps.mean:.4g}",
                    f"{printed[0]} against {printed[1]}" if printed else None,
                )
