"""The image experiments: the paper's sizes, resumable units, shared models, claims both ways."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from fsmap.data.images import generate
from fsmap.errors import MissingDataError
from fsmap.paper.engine import Context
from fsmap.paper.images import experiments, protocol
from fsmap.paper.images.at_scale import METHODS, FSMAPAtScale
from fsmap.paper.images.experiments import NEW, ImageSize, ImageTable, LabelNoise, Shift
from fsmap.paper.images.protocol import ROWS, kind_of
from fsmap.paper.images.reliability import ReliabilityByStrength
from fsmap.paper.images.transfer import FEATURES, FINETUNE, Transfer, heads
from fsmap.paper.images.verdict import claim_about, look_of, once_named
from fsmap.paper.report import tables
from fsmap.paper.rows import Row

pytestmark = pytest.mark.usefixtures("float32", "no_data")


def context(folder: Path, size: str = "quick") -> Context:
    empty = folder / "nothing"
    empty.mkdir(parents=True, exist_ok=True)
    return Context(torch.device("cpu"), folder, size=size, data_dir=empty)


def settings(row: str, dataset: str, tmp_path: Path):
    here = context(tmp_path, "full")._replace(device=torch.device("cuda"))
    return protocol.settings_of(ImageTable.config, dataset, kind_of(row), 1, here)


def test_a_row_changes_settings(tmp_path: Path):
    for dataset, px in (("fmnist", "kmnist"), ("cifar10", "cifar100")):
        assert settings("other", dataset, tmp_path).px == px
    assert settings("white-noise", "cifar10", tmp_path).px == "white-noise"
    s = settings("other@lambda-1e-5@valid-0", "fmnist", tmp_path)
    assert (s.px, s.reg_strength, s.valid, s.seed) == ("kmnist", 1e-5, 0, 1)
    s = settings("sam+nats", "fmnist", tmp_path)
    assert (s.px, s.estimator, s.reg_nats, s.sam) == ("train", "jvp", 0.05, 0.05)
    short, long = (settings(row, "fmnist", tmp_path) for row in ("wd-1e-2", "ps-map@wd-1e-2"))
    assert short.weight_decay == long.weight_decay == 1e-2
    for row in ("ps-map@wd-1e-2", "label-smoothing", "sam"):
        assert not settings(row, "cifar10", tmp_path).regularized


@pytest.mark.parametrize(
    ("experiment", "unit", "changes"),
    [
        (ImageTable, {"row": "sam", "dataset": "fmnist"}, {"sam": 0.05}),
        (ImageSize, {"row": "other", "S": 512}, {"num_points": 512}),
        (LabelNoise, {"row": "ps-map", "level": 0.8}, {"label_noise": 0.8}),
        (LabelNoise, {"row": "ps-map", "level": 0.0}, {}),
        (experiments.LossLandscape, {"row": "ps-map"}, {}),
        (experiments.LaplacianTrace, {"row": "other"}, {}),
        (Shift, {"row": "ps-map", "shift": NEW}, {}),
        (Transfer, {"form": FINETUNE, "method": "ps-map", "dataset": None}, {}),
    ],
)
def test_units_of_the_protocol_and_their_networks(experiment, unit, changes, tmp_path, monkeypatch):
    def stop(config, *run):
        raise RuntimeError(*run)

    monkeypatch.setattr(protocol, "trained", stop)
    monkeypatch.setattr(experiments, "read_images", lambda *_: None)
    made = experiment()
    about = {"dataset": "cifar10", "seed": 0, **unit}
    mine = {key: value for key, value in about.items() if value is not None}
    assert mine in made.units(made.config)
    assert not hasattr(made.config, "trace_points")  # shared models did not depend on it
    with pytest.raises(RuntimeError) as found:
        list(made.run(made.config, mine, context(tmp_path)))
    dataset, wanted, seed, _ = found.value.args
    assert (dataset, seed) == (about["dataset"] or "cifar10", 0)
    assert wanted.changes == changes
    assert (wanted.px is None) == (wanted.method != "l-map")


def tiny() -> dict[str, object]:
    return {"limit": 32, "batch": 16, "points": 4, "width": 2}


def measured(experiment, config, unit, here) -> list[Row]:
    return [Row(experiment.id, **m._asdict()) for m in experiment.run(config, unit, here)]


def test_models_are_shared_and_rows_say_what_they_are(tmp_path: Path):
    table, shift = ImageTable(), Shift()
    config = dataclasses.replace(table.quick, **tiny())
    unit = {"dataset": "cifar10", "row": "ps-map", "seed": 0}
    rows = measured(table, config, unit, context(tmp_path / "image-table"))
    found = {row.metric: row for row in rows}
    assert found["accuracy"].config["generated"] is True
    assert "generated images" in found["accuracy"].deviations[0]
    assert {"nll_scaled", "temperature", "ood_auroc", "laplacian_other"} <= found.keys()
    trace = experiments.LaplacianTrace()
    traced = measured(trace, dataclasses.replace(trace.quick, **tiny()), unit,
                      context(tmp_path / "laplacian-trace"))  # fmt: skip
    curves = {row.metric: row.value for row in traced if row.metric.endswith("_curve")}
    assert set(curves) == {"laplacian_other_curve", "laplacian_joint_curve"}
    assert {len(curve) for curve in curves.values()} == {config.cifar10_epochs}
    assert len(list((tmp_path / "image-table" / "models").glob("*/done"))) == 1
    config = dataclasses.replace(shift.quick, **tiny(), corruptions=("contrast",), severities=(5,))
    rows += measured(shift, config, unit, context(tmp_path / "shift"))
    assert not (tmp_path / "shift" / "models").exists()  # taken from image-table
    clean = tables.values(rows, metric="nll", severity=(None, 0))
    assert clean[0] == clean[1]


def test_a_killed_run_goes_on_from_its_last_epoch(tmp_path: Path):
    config = dataclasses.replace(ImageTable.quick, **tiny())
    run = (config, "fmnist", kind_of("ps-map"), 0, context(tmp_path / "image-table"))
    protocol.prepare(*run).train(until_epoch=1, progress=False)
    again = protocol.prepare(*run)
    assert (again.epoch, again.done) == (1, False)
    assert protocol.trained(*run).done
    assert protocol.prepare(*run).done


def test_missing_data_and_weights_say_how_to_get_them(tmp_path: Path):
    config = dataclasses.replace(ImageTable.quick, **tiny())
    protocol.task_of.cache_clear()
    with pytest.raises(MissingDataError, match="fsmap data get fashion-mnist"):
        protocol.prepare(config, "fmnist", kind_of("ps-map"), 0, context(tmp_path, "full"))
    config = dataclasses.replace(SMALL_TRANSFER, backbone="resnet50-imagenet")
    with pytest.raises(MissingDataError, match="fsmap data get resnet50-imagenet"):
        list(heads(config, context(tmp_path)))


def made_up(values: dict[str, dict[str, float]], dataset: str, **config: object) -> list[Row]:
    """Rows of full-length runs: metrics by row of the table."""
    about = {"dataset": dataset, "generated": False, "images": 45_000}
    about["epochs"] = {"fmnist": 50, "cifar10": 200}[dataset]
    return [
        Row("x", metric, value, "ps-map" if name == "ps-map" else "l-map", seed,
            {**about, "row": name, "px": None, **config})
        for name, metrics in values.items()
        for metric, value in metrics.items()
        for seed in (0, 1)
    ]  # fmt: skip


GOOD = {"accuracy": 0.939, "ece": 0.01, "nll": 0.20, "nll_scaled": 0.19}
PLAIN = {"accuracy": 0.939, "ece": 0.04, "nll": 0.26, "nll_scaled": 0.2}
BAD = {"accuracy": 0.92, "ece": 0.05, "nll": 0.3, "nll_scaled": 0.25}


def verdicts(experiment, rows: list[Row]) -> dict[str, bool | None]:
    """Verdicts of claims that were tested."""
    return {claim.claim: claim.holds for claim in experiment.claims(rows) if claim.seeds}


def test_claims_of_the_table_come_out_both_ways():
    rows = made_up({"ps-map": PLAIN, "other": GOOD, "sam": BAD}, "fmnist")
    contract = {"dataset", "method", "px", "metric", "ours", "stderr", "paper", "paper_stderr"}
    first = ImageTable().table(rows)[0]
    assert contract <= first.keys()
    assert (first["ours"], first["paper"]) == (pytest.approx(93.9), 93.9)
    assert list(verdicts(ImageTable(), rows).values()) == [True, True, True, True]
    bad = verdicts(ImageTable(), made_up({"ps-map": BAD, "other": {**BAD, "ece": 0.06}}, "fmnist"))
    assert list(bad.values()) == [False, True, False, None]
    ours = {"other": GOOD, "nats": {**GOOD, "nll": 0.1}}
    plain = {**PLAIN, "accuracy": 0.955, "nll_scaled": 0.2}
    cifar = verdicts(ImageTable(), made_up({"ps-map": plain, **ours}, "cifar10"))
    assert list(cifar.values()) == [True, False, False, True, True, True, True]
    short = made_up({"ps-map": PLAIN, "other": GOOD}, "fmnist", epochs=3)
    assert verdicts(ImageTable(), short) == {}
    commands = [f"fsmap run image-table --resume --set datasets={d}" for d in ("fmnist", "cifar10")]
    assert {claim.reason for claim in ImageTable().claims(short)} == {"no rows", *commands}


def test_differences_are_of_the_seeds_that_both_sides_have_and_need_two_errors():
    rows = made_up({"ps-map": {"ece": 0.04}, "other": {"ece": 0.03}}, "fmnist")
    options = {"one": {"row": "other"}, "other": {"row": "ps-map"}, "command": "run"}
    found = claim_about("lower", rows, "ece", below=0.0, **options)
    assert (found.holds, found.seeds, found.source) == (True, 2, "ours")
    assert (found.effect, found.ours[:15]) == (pytest.approx(-1.0), "3 against 4, −1")
    lucky = [row._replace(seed=7, value=0.0) for row in rows if row.method == "ps-map"]
    assert claim_about("lower", [*rows, *lucky], "ece", below=0.0, **options) == found
    noisy_rows = [
        row._replace(value=0.1) if (row.method, row.seed) == ("l-map", 1) else row for row in rows
    ]
    assert claim_about("lower", noisy_rows, "ece", below=0.0, **options).holds is None
    alone = claim_about("lower", rows[:1], "ece", below=0.0, paper="2 %", **options)
    assert (alone.holds, alone.seeds, alone.reason, alone.source) == (None, 0, "run", "paper")


def test_rows_are_tuned_on_held_out_images_and_compared_as_tuned():
    values = {
        "ps-map": {"valid_nll": 0.3, "ece": 0.04},
        "ps-map@wd-1e-2": {"valid_nll": 0.2, "ece": 0.02},
        "ps-map@wd-1e-1": {"valid_nll": 0.4, "ece": 0.01},
        "ps-map@valid-0": {"ece": 0.05, "valid_nll": 0.1},
        "other": {"valid_nll": 0.1, "ece": 0.03},
    }
    rows = made_up(values, "fmnist")
    table = {line["row"]: line["ours"] for line in ImageTable().table(rows)}
    assert table == {"ps-map": 4.0, "ps-map@valid-0": 5.0, "other": 3.0, "ps-map@tuned": 2.0}
    lucky = [row._replace(seed=7, value=0.0) for row in rows if row.metric == "valid_nll"][:2]
    assert ImageTable().table(rows + lucky)[-1]["ours"] == 2.0  # a seed that only ps-map has
    # PS-MAP is compared as tuned only with an L-MAP that is tuned, too
    assert list(verdicts(ImageTable(), rows).values()) == [True]  # 3 % is below 4 %
    also = made_up({**values, "other@lambda-1e-5": {"valid_nll": 0.05, "ece": 0.025}}, "fmnist")
    found = verdicts(ImageTable(), also)
    assert list(found.values()) == [False]  # 2.5 % is not below 2 %
    assert "tuned weight decay" in next(iter(found))
    # changed rows alone: the only one by its own name, and the best of several
    alone = [row for row in rows if row.config["row"] == "ps-map@wd-1e-2"]
    assert [line["row"] for line in ImageTable().table(alone)] == ["ps-map@wd-1e-2"]
    assert len(ImageTable().draw(alone)["image-table"].axes) == 2
    assert ImageTable().draw([row for row in alone if row.metric != "valid_nll"]) == {}
    tried = experiments.ImageTuning()
    assert [line["row"] for line in tried.table(rows)][1] == "ps-map@wd-1e-2"
    drawn = [row._replace(config={**row.config, "weight_decay": 1e-2}) for row in rows]
    assert [len(ax.get_lines()) for ax in tried.draw(drawn)["image-tuning"].axes] == [1]


def test_number_of_points():
    values = {n: {"accuracy": 0.955, "ece": 0.02 / n, "nll": 0.16} for n in (4, 16, 128)}
    made = [made_up({"other": some}, "cifar10", num_points=n) for n, some in values.items()]
    rows = [row for part in made for row in part]
    assert list(verdicts(ImageSize(), rows).values()) == [True, True]
    same = [row._replace(value=0.02) for row in rows]
    assert list(verdicts(ImageSize(), same).values()) == [True, None]  # no difference
    assert ImageSize().table(rows)[0]["num_points"] == 4
    assert verdicts(ImageSize(), [row for row in rows if row.config["num_points"] == 4]) == {}
    (figure,) = ImageSize().draw(rows).values()
    assert [len(ax.get_lines()) for ax in figure.axes] == [2, 2, 2]  # and the paper's


def test_label_noise():
    values = {"ps-map": PLAIN, "other": {**GOOD, "accuracy": 0.94}}
    levels = {n: made_up(values, "cifar10", label_noise=n) for n in (0.0, 0.2, 0.4, 0.6, 0.8)}
    rows = [row for level in (0.2, 0.4, 0.6, 0.8) for row in levels[level]]
    assert list(verdicts(LabelNoise(), rows).values()) == [True, True]
    same = [row._replace(value=0.5) for row in rows]
    assert list(verdicts(LabelNoise(), same).values()) == [None, None]  # no difference
    accurate, calibrated, log_trace = LabelNoise().claims(levels[0.0] + levels[0.2])
    command = "fsmap run label-noise --resume --set levels="
    missing = f"0.4,0.6,0.8 missing: {command}0.4,0.6,0.8"
    assert (accurate.holds, accurate.reason, accurate.paper is None) == (None, missing, False)
    assert (calibrated.seeds, calibrated.paper, log_trace.seeds) == (2, None, 0)
    assert log_trace.reason.endswith(f"{command}0.2,0.4,0.6,0.8")
    assert verdicts(LabelNoise(), [row for row in rows if row.method == "ps-map"]) == {}


@pytest.mark.parametrize(("laplacian", "holds"), [(1e4, True), (3e4, False)])
def test_the_laplacian(laplacian, holds):
    """One claim for both quantities: in training mode, and of the deployed network."""
    values = {
        "ps-map": {**PLAIN, "laplacian_other": 7e4, "laplacian_joint": 6e4},
        "other": {**GOOD, "laplacian_other": laplacian, "laplacian_joint": 1e4},
    }
    rows = made_up(values, "cifar10")
    assert list(verdicts(experiments.LaplacianTrace(), rows).values()) == [holds, True]
    logged = [
        line for line in experiments.LaplacianTrace().table(rows) if line["paper"] is not None
    ]
    assert [line["row"] for line in logged] == ["ps-map", "other"]
    assert {line["metric"] for line in logged} == {"laplacian_joint"}
    assert experiments.LaplacianTrace().draw(rows) == {}  # no curves
    curves = made_up({"ps-map": {"laplacian_other_curve": [3e5, 2e4]}}, "cifar10")
    assert len(experiments.LaplacianTrace().draw(curves)["laplacian-trace"].axes) == 1


def test_rows_can_be_told_apart():
    made = made_up({row: {"nll": 0.1} for row in ROWS}, "fmnist")
    rows = [row._replace(method=kind_of(row.config["row"]).method) for row in made]
    looks = [look_of(row) for row in rows if row.seed == 0]
    assert len({look["label"] for look in looks}) == len(ROWS)
    assert len({(look["color"], look["linestyle"]) for look in looks}) == len(ROWS)
    labels = [look["label"] for _, look in once_named(rows)]
    assert labels[::2] == [look["label"] for look in looks]
    assert labels[1] == "_PS-MAP, seed 1"


def test_flatness():
    assert (
        experiments.LossLandscape.config.seeds
        == experiments.LaplacianTrace.config.seeds
        == ImageTable.config.seeds
    )
    for rise in (1.0, 2.1):
        values = {"ps-map": {"rise": 2.0, "loss_along": [9.0, 1.0]}, "other": {"rise": rise}}
        rows = made_up(values, "fmnist")
        assert list(verdicts(experiments.LossLandscape(), rows).values()) == [rise < 2]
    assert verdicts(experiments.LossLandscape(), rows[:2]) == {}
    assert [line["row"] for line in experiments.LossLandscape().table(rows)] == ["ps-map", "other"]


def test_shift():
    values = {"ps-map": {**PLAIN, "ece": 0.06}, "other": GOOD, "train": {**GOOD, "nll": 0.22}}
    rows = made_up(values, "cifar10", shift=NEW)
    rows += made_up(values, "cifar10", shift="corruptions", severity=3)
    assert list(verdicts(Shift(), rows).values()) == [True] * 6
    printed = [line["paper"] for line in Shift().table(rows) if line["metric"] == "accuracy"]
    assert printed == [89.2, 89.2, None, None, None, None]
    both = [*rows, *made_up({"ps-map": BAD}, "fmnist", shift="corruptions", severity=3)]
    mine = [line for line in Shift().table(both) if line["dataset"] == "fmnist"]
    assert {line["metric"]: line["ours"] for line in mine}["accuracy"] == pytest.approx(92.0)
    (figure,) = Shift().draw(both).values()
    assert [len(ax.get_lines()) for ax in figure.axes] == [3, 3, 3, 1, 1, 1]


def test_standard_errors_are_over_seeds_not_over_corruptions():
    rows = [
        row
        for name, value in (("contrast", 0.1), ("pixelate", 0.5))
        for row in made_up({"ps-map": {"ece": value}}, "cifar10", shift="corruptions",
                           severity=3, corruption=name)
    ]  # fmt: skip
    (line,) = Shift().table(rows)
    assert [line[key] for key in ("ours", "stderr", "runs")] == pytest.approx([30.0, 0.0, 2])


def test_cifar10_1_is_measured_on_its_own(tmp_path: Path, monkeypatch):
    unit = {"dataset": "cifar10", "row": "ps-map", "seed": 0, "shift": NEW}
    config = dataclasses.replace(Shift.quick, **tiny())
    with pytest.raises(MissingDataError, match="cifar10.1"):
        measured(Shift(), config, unit, context(tmp_path))
    new = generate((3, 32, 32), 6, seed=2)
    monkeypatch.setattr(experiments, "read_images", lambda *_: new)
    found = measured(Shift(), config, unit, context(tmp_path))
    assert {row.config["shift"] for row in found} == {NEW}
    assert {row.metric for row in found} >= {"accuracy", "nll", "ece", "nll_scaled"}


SMALL_TRANSFER = dataclasses.replace(Transfer.quick, limit=48, steps=20, width=2, generated=True)


def test_heads_are_one_population_and_the_best_is_chosen_on_held_out_images(tmp_path: Path):
    rows = list(heads(SMALL_TRANSFER, context(tmp_path)))
    nll = [row for row in rows if row.metric == "nll"]
    assert [row.config["reg_strength"] for row in nll] == [0.0, 1e-4, 1e-2]
    assert sum(row.config["chosen"] for row in nll) == 2
    assert nll[0].method == "ps-map"
    assert nll[0].config["chosen"]
    assert any("frozen" in note for note in nll[0].deviations)


def test_transfer():
    def rows(form: str, row: str, value: float) -> list[Row]:
        values = dict.fromkeys(("nll", "ece", "nll_scaled", "accuracy"), value)
        return [r._replace(method=row) for r in made_up({row: values}, "cifar10", form=form)]

    made = [
        *(*rows(FINETUNE, "ps-map", 0.2), *rows(FINETUNE, "l-map", 0.1)),
        *(*rows(FEATURES, "ps-map", 0.1), *rows(FEATURES, "l-map", 0.2)),
    ]
    assert list(verdicts(Transfer(), made).values()) == [True] * 3 + [False] * 3
    printed = [claim.paper for claim in Transfer().claims(made)]
    assert printed == ["0.15 against 0.18", "2.1 against 2.6", *[None] * 4]
    few = [row._replace(config={**row.config, "images": 256}) for row in made]
    assert verdicts(Transfer(), few) == {}
    accuracy = [line["paper"] for line in Transfer().table(made) if line["metric"] == "accuracy"]
    assert accuracy == [96.3, 96.4, None, None]


def test_reliability_by_strength(tmp_path: Path):
    """Small and with generated images; the bins give the ECE."""
    experiment = ReliabilityByStrength()
    config = dataclasses.replace(experiment.quick, images=100, epochs=1)
    here, before = context(tmp_path), torch.get_rng_state()
    units = experiment.units(config)
    rows = [row for unit in units for row in measured(experiment, config, unit, here)]
    assert torch.equal(torch.get_rng_state(), before)
    assert {row.deviations for row in rows} == {(protocol.GENERATED,)}
    for mine in tables.group(rows, "nats", "state").values():
        found = {row.metric: row.value for row in mine}
        gaps = zip(*(found[f"bin_{n}"] for n in ("count", "confidence", "accuracy")), strict=True)
        count = sum(found["bin_count"])
        assert found["ece"] == pytest.approx(sum(n * abs(c - a) for n, c, a in gaps) / count)
    assert [claim.seeds for claim in experiment.claims(rows)] == [0] * 4  # not the data
    slider = experiment.interactive(rows)
    assert [frame.label for frame in slider.frames] == ["0 nats", "0.05 nats"]
    assert slider.start == 1
    assert experiment.interactive([]) is None


def test_the_determinant_on_a_network(tmp_path: Path):
    experiment = FSMAPAtScale()
    config = dataclasses.replace(experiment.quick, width=2, limit=32, repeats=1, generated=True)
    assert not hasattr(config, "trace_points")
    units = experiment.units(config)
    rows = [row for unit in units for row in measured(experiment, config, unit, context(tmp_path))]
    found = {row.metric: row.value for row in rows}
    assert found["gradient_cosine"] > 0.5
    assert found["log_det_error"] < 5
    assert {row.config["row"] for row in rows if row.metric == "nll"} == set(METHODS)
    assert len(experiment.table(rows)) == len(config.sizes) * 2 + 2 + 4 * len(METHODS) + 4
    assert [claim.seeds for claim in experiment.claims(rows)] == [1, 0, 0]
    assert list(experiment.draw(rows)) == [experiment.id]
