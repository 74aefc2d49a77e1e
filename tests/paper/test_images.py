"""The image experiments: the paper's sizes, resumable units, shared models, claims both ways."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from fsmap.data.images.read import generate
from fsmap.errors import InputError, MissingDataError
from fsmap.paper.experiment import Context
from fsmap.paper.images import protocol, shift, transfer
from fsmap.paper.images.at_scale import METHODS, FSMAPAtScale
from fsmap.paper.images.figures_6_7 import LabelNoise, LaplacianTrace, LossLandscape
from fsmap.paper.images.protocol import BASELINES, ROWS, kind_of
from fsmap.paper.images.shift import NEW, Shift
from fsmap.paper.images.table import ImageSize, ImageTable, ImageTuning
from fsmap.paper.images.transfer import FEATURES, FINETUNE, Transfer, heads
from fsmap.paper.images.verdict import compare, look_of, once_named
from fsmap.paper.rows import Row
from fsmap.paper.run_folder import Place

ALL = (ImageTable, ImageSize, LabelNoise, LossLandscape, LaplacianTrace, Shift)


@pytest.fixture(autouse=True)
def as_users_have_it():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.fixture(autouse=True)
def no_data_of_the_reader_s(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("FSMAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fsmap.data.catalogue.SYSTEM", tmp_path / "system")


def context(folder: Path, size: str = "quick") -> Context:
    empty = folder / "nothing"
    empty.mkdir(parents=True, exist_ok=True)
    return Context(torch.device("cpu"), folder, size=size, data_dir=empty)


def settings(experiment, row: str, dataset: str, tmp_path: Path, size: str = "full"):
    here = context(tmp_path, size)._replace(device=torch.device("cuda"))
    kind = kind_of(row)
    return protocol.settings_of(experiment.config, dataset, kind, 1, here), kind


def test_full_size_is_the_paper_s(tmp_path: Path):
    s, _ = settings(ImageTable(), "other", "fmnist", tmp_path)
    assert (s.px, s.epochs, s.batch_size, s.num_points, s.width) == ("kmnist", 50, 128, 128, 64)
    assert (s.lr, s.momentum, s.decay, s.clip, s.estimator) == (0.1, 0.9, "cosine", 1.0, "fd")
    assert (s.batchnorm, s.beta, s.generated, s.seed) == ("joint", 1e-3, False, 1)
    assert s.valid is None  # the protocol's: 10,000 and 5,000
    s, _ = settings(ImageTable(), "other", "cifar10", tmp_path)
    assert (s.px, s.epochs, s.reg_strength, s.augment) == ("cifar100", 200, 1e-6, None)
    s, _ = settings(ImageTable(), "ps-map", "cifar10", tmp_path)
    assert not s.regularized
    for px in ("train", "white-noise"):
        assert settings(ImageTable(), px, "cifar10", tmp_path)[0].px == px


def test_rows_besides_the_paper_s(tmp_path: Path):
    found = {
        row: settings(ImageTable(), row, "fmnist", tmp_path)[0]
        for row in ("label-smoothing", "sam", "nats", "sam+nats", "ps-map@wd-1e-2")
    }
    assert found["label-smoothing"].label_smoothing == found["sam"].sam == 0.05
    plain = ("label-smoothing", "sam", "ps-map@wd-1e-2")
    assert {row: s.regularized for row, s in found.items()} == {r: r not in plain for r in found}
    assert found["nats"].reg_nats == found["sam+nats"].reg_nats == 0.05
    assert (found["nats"].sam, found["sam+nats"].sam) == (0.0, 0.05)
    assert (found["nats"].px, found["nats"].estimator) == ("kmnist", "jvp")
    assert found["ps-map@wd-1e-2"].weight_decay == 1e-2
    both, _ = settings(ImageTable(), "other@lambda-1e-5@valid-0", "fmnist", tmp_path)
    assert (both.px, both.reg_strength, both.valid) == ("kmnist", 1e-5, 0)


@pytest.mark.parametrize(
    ("experiment", "changes", "word"),
    [
        (LaplacianTrace, {"rows": ("ps-map", "ps-map")}, "twice"),
        (LabelNoise, {"levels": (0.0, 1.5)}, "1.5"),
        (Shift, {"rows": ("othr",)}, "other"),
        (ImageTable, {"rows": ("ps-map@wd-x",)}, "wd-x"),
        (ImageTable, {"rows": ("ps-map@lr-1",)}, "lambda"),
        (ImageTable, {"datasets": ("mnist",)}, "mnist"),
        (Shift, {"corruptions": ("fogg",)}, "fogg"),
        (Shift, {"severities": (1, 9)}, "9"),
        (LossLandscape, {"steps": 4}, "odd"),
        (LossLandscape, {"reach": 0.0}, "positive"),
        (ImageTable, {"precision": "foo"}, "foo"),
    ],
)
def test_bad_configs_are_refused_before_anything_is_trained(experiment, changes, word):
    with pytest.raises(InputError, match=word):
        dataclasses.replace(experiment.config, **changes)


@pytest.mark.parametrize(
    ("experiment", "number", "unit", "changes"),
    [
        (ImageTable, 39, {"row": "sam", "dataset": "fmnist"}, {"sam": 0.05}),
        (ImageTuning, 40, {"row": "other@lambda-1e-7"}, {"reg_strength": 1e-7}),
        (ImageSize, 96, {"row": "other", "S": 512}, {"num_points": 512}),
        (LabelNoise, 45, {"row": "ps-map", "level": 0.8}, {"label_noise": 0.8}),
        (LabelNoise, 45, {"row": "ps-map", "level": 0.0}, {}),
        (LossLandscape, 6, {"row": "ps-map"}, {}),
        (LaplacianTrace, 6, {"row": "other"}, {}),
        (Shift, 18, {"row": "ps-map", "shift": NEW}, {}),
        (Transfer, 10, {"form": FINETUNE, "method": "ps-map", "dataset": None},
         {"model": "resnet50-imagenet"}),
    ],
)  # fmt: skip
def test_units_of_the_protocol_and_their_networks(
    experiment, number, unit, changes, tmp_path, monkeypatch
):
    class Enough(Exception):
        pass

    def stop(config, run, context):
        raise Enough(run)

    for module in (transfer, protocol):
        monkeypatch.setattr(module, "trained", stop)
    monkeypatch.setattr(shift, "read_images", lambda *_: None)
    made = experiment()
    about = {"dataset": "cifar10", "seed": 0, **unit}
    mine = {key: value for key, value in about.items() if value is not None}
    units = made.units(made.config)
    assert len(units) == number
    assert mine in units
    with pytest.raises(Enough) as found:
        list(made.measure(made.config, mine, context(tmp_path)))
    dataset, wanted, seed = found.value.args[0]
    assert (dataset, seed) == (about["dataset"] or "cifar10", 0)
    assert wanted.changes == changes
    assert (wanted.px is None) == (wanted.method != "l-map")


def tiny() -> dict[str, object]:
    return {"limit": 32, "batch": 16, "points": 4, "width": 2, "trace_points": 4}


def measured(experiment, config, unit, here) -> list[Row]:
    return [
        Row(experiment.id, m.metric, m.value, m.method, m.seed, m.config, deviations=m.deviations)
        for m in experiment.run(config, unit, here)
    ]


def test_models_are_shared_and_rows_say_what_they_are(tmp_path: Path):
    table, shift = ImageTable(), Shift()
    config = dataclasses.replace(table.quick, **tiny())
    unit = {"dataset": "cifar10", "row": "ps-map", "seed": 0}
    rows = measured(table, config, unit, context(tmp_path / "image-table"))
    found = {row.metric: row for row in rows}
    assert found["accuracy"].config["generated"] is True
    assert "generated images" in found["accuracy"].deviations[0]
    assert {"nll_scaled", "temperature", "ood_auroc", "laplacian_other"} <= found.keys()
    trace = LaplacianTrace()
    traced = measured(trace, dataclasses.replace(trace.quick, **tiny()), unit,
                      context(tmp_path / "laplacian-trace"))  # fmt: skip
    curves = {row.metric: row.value for row in traced if row.metric.endswith("_curve")}
    assert set(curves) == {"laplacian_other_curve", "laplacian_joint_curve"}
    assert {len(curve) for curve in curves.values()} == {config.cifar10_epochs}
    assert len(list((tmp_path / "image-table" / "models").glob("*/done"))) == 1
    config = dataclasses.replace(shift.quick, **tiny(), corruptions=("contrast",), severities=(5,))
    rows += measured(shift, config, unit, context(tmp_path / "shift"))
    assert not (tmp_path / "shift" / "models").exists()  # taken from image-table
    clean = [
        row.value for row in rows if row.metric == "nll" and row.config.get("severity", 0) == 0
    ]
    assert clean[0] == clean[1]


def test_log_trace_is_a_row(tmp_path: Path):
    config = dataclasses.replace(ImageTable.quick, **tiny())
    unit = {"dataset": "fmnist", "row": "sam+nats", "seed": 0}
    found = {m.metric: m for m in measured(ImageTable(), config, unit, context(tmp_path))}
    assert (found["nll"].method, found["nll"].config["reg_nats"]) == ("l-map", 0.05)
    assert found["nll"].value > 0


def test_a_killed_run_goes_on_from_its_last_epoch(tmp_path: Path):
    config = dataclasses.replace(ImageTable.quick, **tiny())
    wanted = protocol.Run("fmnist", kind_of("ps-map"), 0)
    here = context(tmp_path / "image-table")
    protocol.prepare(config, wanted, here).train(until_epoch=1, progress=False)
    again = protocol.prepare(config, wanted, here)
    assert (again.epoch, again.done) == (1, False)
    assert protocol.trained(config, wanted, here).done
    assert protocol.prepare(config, wanted, here).done


def test_missing_data_at_full_size_say_how_to_get_them(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(ImageTable.quick, **tiny())
    run = protocol.Run("fmnist", kind_of("ps-map"), 0)
    protocol.task_of.cache_clear()
    with pytest.raises(MissingDataError, match="fsmap data get fashion-mnist"):
        protocol.prepare(config, run, context(tmp_path, "full"))


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
    good = verdicts(ImageTable(), rows)
    assert list(good.values()) == [True, True, True]
    bad = verdicts(ImageTable(), made_up({"ps-map": BAD, "other": {**BAD, "ece": 0.06}}, "fmnist"))
    assert list(bad.values()) == [False, True, False]
    ours = {"other": GOOD, "nats": GOOD}
    cifar = verdicts(
        ImageTable(), made_up({"ps-map": {**PLAIN, "accuracy": 0.955}, **ours}, "cifar10")
    )
    assert list(cifar.values()) == [True, False, False, True, True]
    short = made_up({"ps-map": PLAIN, "other": GOOD}, "fmnist", epochs=3)
    assert verdicts(ImageTable(), short) == {}
    missing = ImageTable().claims(short)
    assert {claim.reason for claim in missing} == {
        "no rows", *(f"fsmap run image-table --resume --set datasets={d}"
                     for d in ("fmnist", "cifar10")),
    }  # fmt: skip


def test_differences_are_of_the_seeds_that_both_sides_have_and_need_two_errors():
    rows = made_up({"ps-map": {"ece": 0.04}, "other": {"ece": 0.03}}, "fmnist")
    options = {"one": {"row": "other"}, "other": {"row": "ps-map"}, "command": "run"}
    found = compare("lower", rows, "ece", below=0.0, **options)
    assert (found.holds, found.seeds, found.source) == (True, 2, "ours")
    assert (found.effect, found.ours[:15]) == (pytest.approx(-1.0), "3 against 4, −1")
    lucky = [row._replace(seed=7, value=0.0) for row in rows if row.method == "ps-map"]
    assert compare("lower", [*rows, *lucky], "ece", below=0.0, **options) == found
    noisy_rows = [
        row._replace(value=0.1) if (row.method, row.seed) == ("l-map", 1) else row for row in rows
    ]
    assert compare("lower", noisy_rows, "ece", below=0.0, **options).holds is None
    alone = compare("lower", rows[:1], "ece", below=0.0, paper="2 %", **options)
    assert (alone.holds, alone.seeds, alone.reason, alone.source) == (None, 0, "run", "paper")


def test_rows_are_tuned_on_held_out_images_and_compared_as_tuned():
    values = {
        "ps-map": {"valid_nll": 0.3, "ece": 0.04},
        "ps-map@wd-1e-2": {"valid_nll": 0.2, "ece": 0.02},
        "ps-map@wd-1e-1": {"valid_nll": 0.4, "ece": 0.01},
        "ps-map@valid-0": {"ece": 0.05},
        "other": {"valid_nll": 0.1, "ece": 0.03},
    }
    rows = made_up(values, "fmnist")
    table = {line["row"]: line["ours"] for line in ImageTable().table(rows)}
    assert table == {"ps-map": 4.0, "ps-map@valid-0": 5.0, "other": 3.0, "ps-map@tuned": 2.0}
    assert list(verdicts(ImageTable(), rows).values()) == [False]  # 3 % is not below 2 %
    tried = ImageTuning()
    assert [line["row"] for line in tried.table(rows)][1] == "ps-map@wd-1e-2"
    drawn = [row._replace(config={**row.config, "weight_decay": 1e-2}) for row in rows]
    assert [len(ax.get_lines()) for ax in tried.draw(drawn)["image-tuning"].axes] == [1, 0, 0]


def test_number_of_points():
    values = {"accuracy": 0.955, "ece": 0.02, "nll": 0.16}
    rows = [
        row._replace(value=row.value / size if row.metric == "ece" else row.value)
        for size in (4, 16, 128)
        for row in made_up({"other": values}, "cifar10", num_points=size)
    ]
    assert list(verdicts(ImageSize(), rows).values()) == [True, True]
    same = [row._replace(value=0.02) for row in rows]
    assert list(verdicts(ImageSize(), same).values()) == [True, None]  # no difference
    assert ImageSize().table(rows)[0]["num_points"] == 4
    assert verdicts(ImageSize(), [row for row in rows if row.config["num_points"] == 4]) == {}


def traced_rows(laplacian: float, levels: tuple[float, ...] = (0.0, 0.2)) -> list[Row]:
    values = {
        "ps-map": {**PLAIN, "laplacian_other": 7e4, "laplacian_joint": 6e4},
        "other": {**GOOD, "accuracy": 0.94, "laplacian_other": laplacian, "laplacian_joint": 1e4},
    }
    return [r for level in levels for r in made_up(values, "cifar10", label_noise=level)]


def test_label_noise():
    rows = traced_rows(1e4, levels=(0.0, 0.2, 0.4, 0.6, 0.8))
    assert list(verdicts(LabelNoise(), rows).values()) == [True, True]
    same = [row._replace(value=0.5) for row in rows]
    assert list(verdicts(LabelNoise(), same).values()) == [None, None]  # no difference
    accurate, calibrated, log_trace = LabelNoise().claims(traced_rows(1e4))
    missing = (
        "40 %, 60 %, 80 % are missing: fsmap run label-noise --resume --set levels=0.4,0.6,0.8"
    )
    assert (accurate.holds, accurate.reason, accurate.paper is None) == (None, missing, False)
    assert (calibrated.seeds, calibrated.paper, log_trace.seeds) == (2, None, 0)
    assert log_trace.reason == "fsmap run label-noise --resume --set levels=0.2,0.4,0.6,0.8"
    half = [row for row in rows if row.method == "ps-map"]
    assert verdicts(LabelNoise(), half) == {}  # nothing to compare with yet
    (figure,) = LabelNoise().draw(rows).values()
    assert [len(ax.get_lines()) for ax in figure.axes] == [2, 2, 2]


def test_the_laplacian():
    """One claim for both quantities: in training mode, and of the deployed network."""
    for laplacian, holds in ((1e4, True), (3e4, False)):
        rows = [row for row in traced_rows(laplacian) if row.config["label_noise"] == 0]
        assert list(verdicts(LaplacianTrace(), rows).values()) == [holds]
    logged = [line for line in LaplacianTrace().table(rows) if line["paper"] is not None]
    assert [(line["row"], line["metric"]) for line in logged] == [
        ("ps-map", "laplacian_joint"),
        ("other", "laplacian_joint"),
    ]


def test_the_figure_shows_what_was_traced():
    curve = {"laplacian_other_curve": [3e5, 2e4]}
    rows = [
        *made_up({"ps-map": {**curve, "laplacian_joint_curve": [1e5, 1e4]}}, "cifar10"),
        *made_up({"ps-map": curve}, "fmnist"),
    ]
    assert len(LaplacianTrace().draw(rows)["laplacian-trace"].axes) == 3
    rows += made_up({"train": {**curve, "laplacian_joint_curve": [1e5, 1e4]}}, "cifar10")
    assert len(LaplacianTrace().draw(rows)["laplacian-trace"].axes) == 3
    rows += made_up({"other": curve}, "cifar10")  # its training mode was not traced
    assert len(LaplacianTrace().draw(rows)["laplacian-trace"].axes) == 2
    assert LaplacianTrace().draw(made_up({"ps-map": PLAIN}, "fmnist")) == {}


def test_rows_can_be_told_apart():
    rows = [
        row._replace(method=row.config["row"]) if row.config["row"] in BASELINES else row
        for row in made_up({row: {"nll": 0.1} for row in ROWS}, "fmnist")
    ]
    looks = [look_of(row) for row in rows if row.seed == 0]
    assert len({look["label"] for look in looks}) == len(ROWS)
    assert len({(look["color"], look["linestyle"]) for look in looks}) == len(ROWS)
    labels = [look["label"] for _, look in once_named(rows)]
    assert labels[::2] == [look["label"] for look in looks]
    assert labels[1] == "_PS-MAP, seed 1"


def test_flatness():
    rows = made_up(
        {
            "ps-map": {"rise": 2.0, "loss_along": [9.0, 1.0, 8.0]},
            "other": {"rise": 1.0, "loss_along": [5.0, 1.0, 4.0]},
        },
        "fmnist",
    )
    assert list(verdicts(LossLandscape(), rows).values()) == [True]
    steep = [
        r._replace(value=2.1) if (r.metric, r.method) == ("rise", "l-map") else r for r in rows
    ]
    assert list(verdicts(LossLandscape(), steep).values()) == [False]
    assert verdicts(LossLandscape(), rows[:2]) == {}
    assert [line["row"] for line in LossLandscape().table(rows)] == ["ps-map", "other"]


def test_shift():
    values = {"ps-map": {**PLAIN, "ece": 0.06}, "other": GOOD, "train": {**GOOD, "nll": 0.22}}
    rows = [
        *made_up(values, "cifar10", shift=NEW),
        *made_up(values, "cifar10", shift="corruptions", severity=3),
    ]
    assert list(verdicts(Shift(), rows).values()) == [True] * 4
    printed = [line["paper"] for line in Shift().table(rows) if line["metric"] == "accuracy"]
    assert printed == [89.2, 89.2, None, None, None, None]
    both = [*rows, *made_up({"ps-map": BAD}, "fmnist", shift="corruptions", severity=3)]
    mine = [line for line in Shift().table(both) if line["dataset"] == "fmnist"]
    assert {line["metric"]: line["ours"] for line in mine}["accuracy"] == pytest.approx(92.0)
    (figure,) = Shift().draw(both).values()
    assert [len(ax.get_lines()) for ax in figure.axes] == [3, 3, 3, 1, 1, 1]


def test_standard_errors_are_over_seeds_not_over_corruptions():
    rows = [
        row._replace(value=value)
        for name, value in (("contrast", 0.1), ("pixelate", 0.5))
        for row in made_up(
            {"ps-map": {"ece": 0.0}}, "cifar10", shift="corruptions", severity=3, corruption=name
        )
    ]
    (line,) = Shift().table(rows)
    assert line["ours"] == pytest.approx(30.0)
    assert line["stderr"] == pytest.approx(0.0)
    assert line["runs"] == 2


def test_cifar10_1_is_measured_on_its_own(tmp_path: Path, monkeypatch):
    unit = {"dataset": "cifar10", "row": "ps-map", "seed": 0, "shift": NEW}
    config = dataclasses.replace(Shift.quick, **tiny())
    with pytest.raises(MissingDataError, match="cifar10.1"):
        measured(Shift(), config, unit, context(tmp_path))
    new = generate((3, 32, 32), 6, seed=2)
    monkeypatch.setattr(shift, "read_images", lambda *_: new)
    found = measured(Shift(), config, unit, context(tmp_path))
    assert {row.config["shift"] for row in found} == {NEW}
    assert {row.metric for row in found} >= {"accuracy", "nll", "ece", "nll_scaled"}


def folder_of(out: Path) -> Path:
    return protocol._folder(Context(torch.device("cpu"), out), "fmnist-ps-map-0-digest")


def finish(out: Path) -> Path:
    folder = out / "models" / "fmnist-ps-map-0-digest"
    folder.mkdir(parents=True)
    (folder / protocol.DONE).touch()
    return folder


def test_a_network_that_another_experiment_has_trained_is_taken_from_there(tmp_path: Path):
    there = finish(tmp_path / "image-table")
    assert folder_of(tmp_path / "shift") == there
    assert folder_of(Place.of(tmp_path, "shift").fresh.path) == there
    mine = finish(tmp_path / "shift")
    assert folder_of(tmp_path / "shift") == mine


def test_a_run_that_starts_anew_takes_nothing_from_the_one_it_replaces(tmp_path: Path):
    """That one is kept aside when the new one is finished, and goes with the next replacement."""
    place = Place.of(tmp_path, "image-table")
    finish(place.final.path)
    mine = place.fresh.path / "models" / "fmnist-ps-map-0-digest"
    assert folder_of(place.fresh.path) == mine
    there = finish(tmp_path / "shift")
    assert folder_of(place.fresh.path) == there
    assert folder_of(place.final.path) == place.final.path / "models" / mine.name


SMALL_TRANSFER = dataclasses.replace(Transfer.quick, limit=48, steps=20, width=2, generated=True)


def test_missing_weights_say_how_to_get_them(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(SMALL_TRANSFER, backbone="resnet50-imagenet")
    with pytest.raises(MissingDataError, match="fsmap data get resnet50-imagenet"):
        list(heads(config, transfer_context(tmp_path)))


def transfer_context(tmp_path: Path) -> Context:
    return Context(torch.device("cpu"), tmp_path, size="quick")


def test_heads_are_one_population_and_the_best_is_chosen_on_held_out_images(tmp_path: Path):
    rows = list(heads(SMALL_TRANSFER, transfer_context(tmp_path)))
    nll = [row for row in rows if row.metric == "nll"]
    assert [row.config["reg_strength"] for row in nll] == [0.0, 1e-4, 1e-2]
    assert sum(row.config["chosen"] for row in nll) == 2
    assert nll[0].method == "ps-map"
    assert nll[0].config["chosen"]
    assert any("frozen" in note for note in nll[0].deviations)


def test_claims_and_the_paper_s_values():
    def rows(form: str, method: str, value: float) -> list[Row]:
        about = {"form": form, "generated": False, "dataset": "cifar10", "row": method, "px": None}
        about["images"] = 45_000
        metrics = ("nll", "ece", "nll_scaled", "accuracy")
        return [Row("transfer", m, value, method, seed, about) for m in metrics for seed in (0, 1)]

    made = [
        *rows(FINETUNE, "ps-map", 0.2),
        *rows(FINETUNE, "l-map", 0.1),
        *rows(FEATURES, "ps-map", 0.1),
        *rows(FEATURES, "l-map", 0.2),
    ]
    assert verdicts(Transfer(), made) == {
        f"{words}: L-MAP's {metric} is below PS-MAP's": holds
        for words, holds in (("Fine-tuned", True), ("Frozen features", False))
        for metric in ("NLL", "ECE", "NLL after temperature scaling of both")
    }
    printed = [claim.paper for claim in Transfer().claims(made)]
    assert printed == ["0.15 against 0.18", "2.1 against 2.6", *[None] * 4]
    few = [row._replace(config={**row.config, "images": 256}) for row in made]
    assert verdicts(Transfer(), few) == {}
    printed = {
        (line["form"], line["method"]): line["paper"]
        for line in Transfer().table(made)
        if line["metric"] == "accuracy"
    }
    assert printed[FINETUNE, "l-map"] == 96.4
    assert printed[FEATURES, "l-map"] is None


def test_the_determinant_on_a_network(tmp_path: Path):
    experiment = FSMAPAtScale()
    config = dataclasses.replace(experiment.quick, width=2, limit=32, repeats=1, generated=True)
    units = experiment.units(config)
    rows = [row for unit in units for row in measured(experiment, config, unit, context(tmp_path))]
    found = {row.metric: row.value for row in rows}
    assert found["gradient_cosine"] > 0.5
    assert found["log_det_error"] < 5
    assert {row.config["row"] for row in rows if row.metric == "nll"} == set(METHODS)
    assert len(experiment.table(rows)) == len(config.sizes) * 2 + 2 + 4 * len(METHODS) + 4
    assert [claim.seeds for claim in experiment.claims(rows)] == [1, 0, 0]
    assert list(experiment.draw(rows)) == [experiment.id]
