"""The image experiments: the paper's sizes, resumable units, shared models, claims both ways."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fsmap
from fsmap.data.images.read import generate
from fsmap.errors import InputError, MissingDataError, UnsupportedModuleError
from fsmap.images import ImageSettings
from fsmap.images.build import build_model
from fsmap.paper.experiment import Context
from fsmap.paper.images import landscape, measure, protocol, shift
from fsmap.paper.images.label_noise import LabelNoise, LaplacianTrace, noisy
from fsmap.paper.images.landscape import LossLandscape
from fsmap.paper.images.protocol import BASELINES, SMALL, kind_of
from fsmap.paper.images.shift import NEW, Shift
from fsmap.paper.images.table import PAPER, SIZES_PAPER, ImageSize, ImageTable
from fsmap.paper.images.transfer import FEATURES, FINETUNE, Transfer, features, heads, without_head
from fsmap.paper.images.verdict import WORDS, against_plain, look_of, once_named, ran, table_claims
from fsmap.paper.report import tables
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


def test_baselines(tmp_path: Path):
    s, _ = settings(ImageTable(), "label-smoothing", "fmnist", tmp_path)
    assert (s.method, s.label_smoothing) == ("ps-map", 0.05)
    s, _ = settings(ImageTable(), "sam", "fmnist", tmp_path)
    assert (s.method, s.sam) == ("ps-map", 0.05)


def test_figures_compare_rows_of_the_table():
    config = LabelNoise.config
    for row in ("ps-map", "other"):
        assert row in config.rows
        assert noisy(row, 0.0) == kind_of(row)
        assert noisy(row, 0.2).changes["label_noise"] == 0.2
    for figure in (LaplacianTrace, LossLandscape, Shift):
        assert figure.config.rows == config.rows
        assert "rows" in figure.selecting  # a row can be added to a run later
    assert {"rows", "levels", "seeds"} <= set(LabelNoise.selecting)
    assert {"rows", "chunk"} <= set(LossLandscape.selecting)


def test_unknown_rows_are_refused():
    with pytest.raises(InputError, match="kmnist"):
        kind_of("kmnist")
    for changes in ({"rows": ("ps-map", "l-map")}, {"datasets": ("fmnist", "mnist")}):
        with pytest.raises(InputError, match="l-map|mnist"):
            dataclasses.replace(ImageTable.config, **changes)


@pytest.mark.parametrize(
    ("experiment", "changes", "message"),
    [
        (LaplacianTrace, {"rows": ("ps-map", "ps-map")}, "rows names something twice: ps-map, ps-"),
        (LabelNoise, {"levels": (0.0, 0.2, 0.0)}, "levels names something twice: 0.0, 0.2, 0.0"),
        (LabelNoise, {"levels": (0.0, 1.5)}, "levels are fractions of the labels.*, got 1.5"),
        (Shift, {"rows": ("othr",)}, "rows: no 'othr'; .* Did you mean 'other'?"),
        (Shift, {"corruptions": ("fogg",)}, "corruptions: no 'fogg'; there are .*"),
        (Shift, {"severities": (1, 9)}, "severities: no 9; there are 1, 2, 3, 4, 5."),
        (LossLandscape, {"steps": 4}, "steps must be odd and at least 3"),
        (LossLandscape, {"reach": 0.0}, "^reach must be positive"),
        (LossLandscape, {"directions": 0}, "directions and images must be at least 1"),
        (ImageTable, {"precision": "foo"}, "precision: no 'foo'; there are fp32"),
    ],
)
def test_bad_configs_are_refused_before_anything_is_trained(experiment, changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(experiment.config, **changes)


def test_a_unit_is_measured_on_its_own_network(tmp_path: Path, monkeypatch):
    class Enough(Exception):
        pass

    def stop(config, run, context):
        raise Enough(run)

    for module in (landscape, shift, measure):
        monkeypatch.setattr(module, "trained", stop)
    for kind in (ImageTable, LaplacianTrace, LossLandscape, Shift, LabelNoise):
        experiment = kind()
        for row in ("ps-map", "other"):
            unit = {"dataset": "cifar10", "row": row, "seed": 3, "level": 0.2}
            with pytest.raises(Enough) as found:
                list(experiment.measure(experiment.config, unit, context(tmp_path)))
            dataset, wanted, seed = found.value.args[0]
            assert (dataset, wanted.name, seed) == ("cifar10", row, 3)
            assert wanted.changes.get("label_noise", 0.0) == (0.2 if kind is LabelNoise else 0.0)


def test_units_are_single_runs():
    units = ImageTable().units(ImageTable.config)
    assert len(units) == 3 * 6 + 3 * 4
    assert {u["row"] for u in units if u["dataset"] == "cifar10"}.isdisjoint(BASELINES)
    assert [u["seed"] for u in units[:6]] == [0] * 6  # seeds outermost
    assert len(ImageSize().units(ImageSize.config)) == 2 * 3 * 8
    noise = LabelNoise().units(LabelNoise.config)
    assert len(noise) == 3 * 5 * 2
    assert {(u["seed"], u["level"]) for u in noise[:4]} == {(0, 0.0), (0, 0.2)}  # whole levels


@pytest.mark.parametrize("kind", ALL)
def test_quick_runs_are_of_one_size(kind):
    """So that experiments can share models."""
    for name, value in SMALL.items():
        if name != "reg_strength":
            assert getattr(kind.quick, name) == value
    assert kind.group == "images"
    assert kind.device == "gpu"


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
    assert len(found["laplacian_other_curve"].value) == config.cifar10_epochs
    assert len(found["laplacian_joint_curve"].value) == config.cifar10_epochs
    assert len(list((tmp_path / "image-table" / "models").glob("*/done"))) == 1
    config = dataclasses.replace(shift.quick, **tiny(), corruptions=("contrast",), severities=(5,))
    rows += measured(shift, config, unit, context(tmp_path / "shift"))
    assert not (tmp_path / "shift" / "models").exists()  # taken from image-table
    clean = [
        row.value for row in rows if row.metric == "nll" and row.config.get("severity", 0) == 0
    ]
    assert clean[0] == clean[1]
    assert any("CIFAR-10.1 is not here" in note for note in rows[-1].deviations)


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


def judged(rows: list[Row], claims=table_claims) -> dict[str, bool]:
    return {claim.claim: claim.holds for claim in claims(rows)}


def test_claims_of_the_table_come_out_both_ways():
    rows = made_up({"ps-map": PLAIN, "other": GOOD, "sam": BAD}, "fmnist")
    good = judged(rows)
    assert all(good.values())
    assert "fmnist: PS-MAP's accuracy is the paper's within 0.3" in good
    bad = judged(made_up({"ps-map": PLAIN, "other": BAD}, "fmnist"))
    assert sum(bad.values()) == 2  # nothing diverged, PS-MAP is the paper's
    cifar = {**GOOD, "accuracy": 0.953}
    good = judged(made_up({"ps-map": {**PLAIN, "accuracy": 0.954}, "other": cifar}, "cifar10"))
    assert all(good.values())
    near = "cifar10: PS-MAP's accuracy is at least 95.0 %"
    for accuracy, holds in ((0.95, True), (0.9499, False)):
        rows = made_up({"ps-map": {**PLAIN, "accuracy": accuracy}}, "cifar10")
        assert judged(rows)[near] == holds


LUCKY = {"accuracy": 0.999, "ece": 0.0, "nll": 1e-3, "nll_scaled": 1e-3}


def alone(names: tuple[str, ...], dataset: str, **config: object) -> list[Row]:
    """A seed, better than all others, that only these rows have."""
    rows = made_up(dict.fromkeys(names, LUCKY), dataset, **config)
    return [row._replace(seed=7) for row in rows if row.seed == 0]


@pytest.mark.parametrize("dataset", ["fmnist", "cifar10"])
def test_the_table_compares_the_seeds_that_both_sides_have(dataset: str):
    ours = {**GOOD, "accuracy": 0.938}
    kinds = {"ps-map": PLAIN, "other": ours, "train": ours, "sam": BAD, "label-smoothing": BAD}
    rows = made_up(kinds, dataset)
    expected = list(table_claims(rows))
    found = list(table_claims([*rows, *alone(("ps-map", "sam", "label-smoothing"), dataset)]))
    of_all = (0, *(n for n, claim in enumerate(expected) if "PS-MAP's accuracy" in claim.claim))
    for number, (claim, before) in enumerate(zip(found, expected, strict=True)):
        assert (claim == before) == (number not in of_all), claim
    assert sum("against" in claim.ours for claim in found) == 2
    for metric in ("accuracy", "ece"):
        some = [row for row in rows if row.metric != metric]
        assert not any("nan" in claim.ours for claim in table_claims(some))
    lucky = list(table_claims([*rows, *alone(("other", "train"), dataset)]))
    kept = [c for c in found if "against" in c.ours]
    assert [c for c in lucky if "against" in c.ours] == kept
    nothing = table_claims([*made_up({"ps-map": PLAIN}, dataset), *alone(("other",), dataset)])
    assert not any("against" in claim.ours for claim in nothing)


def test_short_runs_are_not_judged_by_thresholds():
    rows = made_up({"ps-map": BAD, "other": BAD}, "fmnist", epochs=3)
    assert list(judged(rows)) == ["no run diverged, and none is left collapsed"]
    constant = [*rows, *made_up({"ps-map": {"laplacian_train": 0.0}}, "fmnist")]
    assert not judged(constant)["no run diverged, and none is left collapsed"]


def test_the_table_has_the_contract_s_columns():
    rows = made_up({"ps-map": PLAIN, "other": GOOD}, "fmnist")
    lines = ImageTable().table(rows)
    contract = {"dataset", "method", "px", "metric", "ours", "stderr", "paper", "paper_stderr"}
    assert all(contract <= line.keys() for line in lines)
    first = next(line for line in lines if line["metric"] == "accuracy")
    assert first["ours"] == pytest.approx(93.9)
    assert (first["paper"], first["paper_stderr"]) == (93.9, 0.1)
    assert PAPER["fmnist", "ps-map"]["selective"][0] == pytest.approx(98.6 / 0.999)


def test_the_tables_agree_where_the_paper_prints_a_row_twice():
    """S = 128 of Table 4 is the last row of Table 2."""
    for dataset in ("fmnist", "cifar10"):
        for metric in ("accuracy", "ece", "nll"):
            assert SIZES_PAPER[dataset, 128][metric][0] == PAPER[dataset, "other"][metric][0]


def test_number_of_points():
    values = {"accuracy": 0.955, "ece": 0.02, "nll": 0.16}
    rows = [
        row._replace(value=row.value / size if row.metric == "ece" else row.value)
        for size in (4, 16, 128)
        for row in made_up({"other": values}, "cifar10", num_points=size)
    ]
    claims = {claim.claim: claim.holds for claim in ImageSize().claims(rows)}
    assert claims["cifar10: ECE falls as S grows"]
    assert claims["cifar10: accuracy is not sensitive to S (within 0.5 %)"]
    ece = next(c.ours for c in ImageSize().claims(rows) if "ECE" in c.claim)
    assert ece == "0.50 % at S = 4, 0.02 % at S = 128"
    assert ImageSize().table(rows)[0]["num_points"] == 4
    more = alone(("other",), "cifar10", num_points=4)
    assert ImageSize().claims([*rows, *more])[1:] == ImageSize().claims(rows)[1:]  # shared seeds
    apart = [*more, *tables.select(rows, num_points=128)]
    assert len(ImageSize().claims(apart)) == 1


def test_label_noise_and_the_laplacian():
    def rows(laplacian: float) -> list[Row]:
        values = {
            "ps-map": {**PLAIN, "laplacian_other": 7e4, "laplacian_joint": 6e4},
            "other": {
                **GOOD,
                "accuracy": 0.94,
                "laplacian_other": laplacian,
                "laplacian_joint": 1e4,
            },
            "train": {**BAD, "laplacian_other": 7e4, "laplacian_joint": 1e4},
        }
        return [r for level in (0.0, 0.2) for r in made_up(values, "cifar10", label_noise=level)]

    claims = {claim.claim: claim.holds for claim in LabelNoise().claims(rows(1e4))}
    assert len(claims) == 1 + 2 * (2 + 2 * 2)
    assert all(holds for claim, holds in claims.items() if "training images" not in claim)
    printed = [claim.claim for claim in LabelNoise().claims(rows(1e4)) if claim.paper]
    assert printed == [
        "cifar10: with 20 % random labels L-MAP with D' is more accurate than PS-MAP",
        "cifar10, 0 % random labels: the final Laplacian in training mode of L-MAP with D' is at "
        "least 4 times lower than PS-MAP's",
    ]
    train = {claim: holds for claim, holds in claims.items() if "training images" in claim}
    assert {claim for claim, holds in train.items() if holds} == {
        f"cifar10, {noise} % random labels: the final Laplacian in training mode of L-MAP with "
        "training images is at least 4 times lower than PS-MAP's"
        for noise in (0, 20)
    }
    half = [row for row in rows(1e4) if row.method == "ps-map"]
    assert len(LabelNoise().claims(half)) == 1  # nothing to compare with yet
    (figure,) = LabelNoise().draw(rows(1e4)).values()
    assert [len(ax.get_lines()) for ax in figure.axes] == [3, 3, 3]
    assert {line["row"] for line in LaplacianTrace().table(rows(1e4))} == {
        *("ps-map", "other", "train")
    }
    logged = [line for line in LaplacianTrace().table(rows(1e4)) if line["paper"] is not None]
    assert [(line["row"], line["metric"]) for line in logged] == [
        ("ps-map", "laplacian_joint"),
        ("other", "laplacian_joint"),
    ]
    exactly = [c.holds for c in LaplacianTrace().claims(rows(7e4 / 4)) if "with D'" in c.claim]
    assert exactly == [True, True]
    fell = [c.holds for c in LaplacianTrace().claims(rows(3e4)) if "Laplacian" in c.claim]
    assert fell == [True, True, False, False]  # in training mode, and of the deployed network


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


def test_comparisons_are_of_the_same_seeds_and_of_l_map_alone():
    rows = made_up({"ps-map": {"ece": 0.04}, "sam": {"ece": 0.01}}, "fmnist", label_noise=0.2)
    assert list(against_plain(rows, "ece")) == []
    rows += made_up({"ps-map": {"ece": 0.02}, "train": {"ece": 0.03}}, "fmnist", label_noise=0.4)
    (found,) = against_plain(rows, "ece", label_noise=0.4)
    assert found[:2] == ("train", "L-MAP with training images")
    assert (found.mine.mean, found.plain.mean, found.mine.n) == (pytest.approx(3.0), 2.0, 2)
    assert list(against_plain(rows, "ece", label_noise=0.2)) == []
    assert list(against_plain(rows, "nll", label_noise=0.4)) == []
    uneven = [
        r._replace(value=r.value + r.seed) for r in rows if (r.method, r.seed) != ("l-map", 1)
    ]
    (found,) = against_plain(uneven, "ece", label_noise=0.4)
    assert (found.plain.mean, found.plain.n) == (pytest.approx(2.0), 1)  # of seed 0 alone
    nobody = [row._replace(seed=7) if row.method == "l-map" else row for row in rows]
    assert list(against_plain(nobody, "ece")) == []


def test_rows_can_be_told_apart():
    rows = [
        row._replace(method=row.config["row"]) if row.config["row"] in BASELINES else row
        for row in made_up({row: {"nll": 0.1} for row in WORDS}, "fmnist")
    ]
    looks = [look_of(row) for row in rows if row.seed == 0]
    assert [look["label"] for look in looks] == list(WORDS.values())
    assert len({(look["color"], look["linestyle"], look["marker"]) for look in looks}) == len(WORDS)
    assert len({(look["color"], look["linestyle"]) for look in looks}) == len(WORDS)
    labels = [look["label"] for _, look in once_named(rows)]
    assert sorted(set(labels) - {"_"}) == sorted(WORDS.values())
    assert labels.count("_") == len(WORDS)


def test_flatness():
    rows = made_up(
        {
            "ps-map": {"rise": 2.0, "loss_along": [9.0, 1.0, 8.0]},
            "other": {"rise": 1.0, "loss_along": [5.0, 1.0, 4.0]},
        },
        "fmnist",
    )
    assert [claim.holds for claim in LossLandscape().claims(rows)] == [True, True]
    assert [claim.paper for claim in LossLandscape().claims(rows)] == [None, "visibly flatter"]
    worse = [row._replace(value=2.1) if row.metric == "rise" else row for row in rows]
    worse = [row if row.method == "l-map" else old for row, old in zip(worse, rows, strict=True)]
    train = [row._replace(config={**row.config, "row": "train"}) for row in worse[4:]]
    claims = LossLandscape().claims([*worse, *train])
    assert [claim.holds for claim in claims] == [True, False, False]
    assert [claim.paper for claim in claims] == [None, None, "visibly flatter"]
    assert [claim.holds for claim in LossLandscape().claims(rows[:2])] == [False]
    assert [line["row"] for line in LossLandscape().table(rows)] == ["ps-map", "other"]


def test_shift():
    values = {"ps-map": {**PLAIN, "ece": 0.06}, "other": GOOD, "train": {**GOOD, "nll": 0.22}}
    rows = [
        *made_up(values, "cifar10", shift=NEW),
        *made_up(values, "cifar10", shift="corruptions", severity=3),
    ]
    claims = [claim.holds for claim in Shift().claims(rows)]
    assert claims == [True] * 5
    printed = [line["paper"] for line in Shift().table(rows) if line["metric"] == "accuracy"]
    assert printed == [89.2, 89.2, None, None, None, None]
    more = [r for shift in (NEW, "corruptions") for r in alone(("ps-map",), "cifar10", shift=shift)]
    assert Shift().claims([*rows, *more])[1:] == Shift().claims(rows)[1:]  # [0] is of all runs
    both = [*rows, *made_up({"ps-map": BAD}, "fmnist", shift="corruptions", severity=3)]
    mine = [line for line in Shift().table(both) if line["dataset"] == "fmnist"]
    assert {line["metric"]: line["ours"] for line in mine}["accuracy"] == pytest.approx(92.0)
    assert len(Shift().claims(both)) == len(claims)
    (figure,) = Shift().draw(both).values()
    assert [len(ax.get_lines()) for ax in figure.axes] == [3, 3, 3, 1, 1, 1]


def test_a_network_on_many_test_sets_is_one_run():
    rows = [
        row._replace(unit={"row": "ps-map", "seed": row.seed})
        for severity in (1, 2)
        for row in made_up({"ps-map": PLAIN}, "cifar10", shift="contrast", severity=severity)
    ]
    seeds = len({row.seed for row in rows})
    assert next(ran(rows)).ours.startswith(f"{seeds} runs, ")


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


def test_cifar10_1_is_measured_where_it_is(tmp_path: Path, monkeypatch):
    test, new = (generate((3, 32, 32), 6, seed=seed) for seed in (1, 2))
    run = SimpleNamespace(
        settings=SimpleNamespace(data="cifar10", generated=False),
        task=SimpleNamespace(test=test),
        device="cpu",
    )
    monkeypatch.setattr(shift, "read_images", lambda *_: new)
    found = list(shift._shifted(Shift.quick, run, context(tmp_path)))
    assert [about.get("severity") for about, *_ in found] == [0, 2, 2, 5, 5, None]
    about, images, y = found[-1]
    assert about == {"shift": NEW}
    assert torch.equal(images, new.x)
    assert torch.equal(y, new.y)


def test_every_number_of_a_row_is_written_once():
    config = ImageTable.config
    pairs = itertools.product(config.datasets, ("ps-map", "white-noise", "train", "other"))
    assert set(PAPER) == set(pairs)


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


def test_the_head_comes_off(seeded: None):
    settings = ImageSettings(data="cifar10", width=2)
    bare = without_head(build_model(settings))
    assert bare(torch.zeros(2, 3, 32, 32)).shape == (2, 16)
    with pytest.raises(UnsupportedModuleError, match="Conv2d"):
        without_head(nn.Conv2d(1, 1, 1))


def test_missing_weights_say_how_to_get_them(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(SMALL_TRANSFER, backbone="resnet50-imagenet")
    with pytest.raises(MissingDataError, match="fsmap data get resnet50-imagenet"):
        list(heads(config, transfer_context(tmp_path)))


def test_on_a_linear_head_the_regularizer_is_constant(seeded: None):
    """Why the head has a hidden layer: appendix B.3."""
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    f, params = fsmap.functional(nn.Linear(4, 3))
    moved = {name: 5 * p + 1 for name, p in params.items()}
    values = [fsmap.trace(f, p, x, method="exact").value for p in (params, moved)]
    assert_close(*values)


def transfer_context(tmp_path: Path) -> Context:
    return Context(torch.device("cpu"), tmp_path, size="quick")


def test_features_are_standardized_by_the_training_images(tmp_path: Path):
    parts = features(SMALL_TRANSFER, transfer_context(tmp_path), made=True)
    assert_close(parts["train"].x.mean(0), torch.zeros(16), atol=1e-5, rtol=0)
    assert parts["test"].x.shape == (48, 16)
    assert len(parts["other"].x) > 0


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
        return [Row("transfer", m, value, method, 0, about) for m in metrics]

    made = [
        *rows(FINETUNE, "ps-map", 0.2),
        *rows(FINETUNE, "l-map", 0.1),
        *rows(FEATURES, "ps-map", 0.1),
        *rows(FEATURES, "l-map", 0.2),
    ]
    holds = {claim.claim: claim.holds for claim in Transfer().claims(made)}
    assert holds["finetune: L-MAP's NLL is below PS-MAP's"]
    assert not holds["features: L-MAP's ECE is below PS-MAP's"]
    assert not holds["features: L-MAP's NLL after temperature scaling of both is below PS-MAP's"]
    printed = {claim.claim: claim.paper for claim in Transfer().claims(made)}
    assert printed["finetune: L-MAP's NLL is below PS-MAP's"] == "0.15 against 0.18"
    assert list(printed.values()).count(None) == 5  # the paper has no scaled ones, and no features
    few = [row._replace(config={**row.config, "images": 256}) for row in made]
    assert len(Transfer().claims(few)) == 1
    more = [row._replace(seed=1) for row in rows(FINETUNE, "ps-map", 1e-3)]
    assert Transfer().claims([*made, *more])[1:] == Transfer().claims(made)[1:]  # shared seeds
    printed = {
        (line["form"], line["method"]): line["paper"]
        for line in Transfer().table(made)
        if line["metric"] == "accuracy"
    }
    assert printed[FINETUNE, "l-map"] == 96.4
    assert printed[FEATURES, "l-map"] is None


def test_units_and_full_size():
    config = Transfer.config
    assert (config.backbone, config.lr, config.batch) == ("resnet50-imagenet", 1e-3, 64)
    units = Transfer().units(config)
    assert units[0] == {"form": FEATURES}
    assert len(units) == 1 + 2 * config.seeds
