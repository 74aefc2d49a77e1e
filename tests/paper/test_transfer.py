"""``transfer``: backbones for small images, heads on frozen features, claims."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fsmap
from fsmap.errors import MissingDataError, UnsupportedModuleError
from fsmap.paper.experiment import Context
from fsmap.paper.images.transfer import FEATURES, FINETUNE, Transfer, features, heads, without_head
from fsmap.paper.rows import Row
from fsmap.train.images import ImageSettings
from fsmap.train.images.build import build_model

SMALL = dataclasses.replace(Transfer.quick, limit=48, steps=20, width=2, generated=True)


@pytest.fixture(autouse=True)
def as_users_have_it():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def test_the_head_comes_off(seeded: None):
    settings = ImageSettings(data="cifar10", width=2)
    bare = without_head(build_model(settings))
    assert bare(torch.zeros(2, 3, 32, 32)).shape == (2, 16)
    with pytest.raises(UnsupportedModuleError, match="Conv2d has no linear layer"):
        without_head(nn.Conv2d(1, 1, 1))


def test_missing_weights_say_how_to_get_them(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(SMALL, backbone="resnet50-imagenet")
    with pytest.raises(MissingDataError, match="fsmap data get resnet50-imagenet"):
        list(heads(config, context(tmp_path)))


def test_on_a_linear_head_the_regularizer_is_constant(seeded: None):
    """Why the head has a hidden layer: appendix B.3."""
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    f, params = fsmap.functional(nn.Linear(4, 3))
    moved = {name: 5 * p + 1 for name, p in params.items()}
    values = [fsmap.trace(f, p, x, method="exact").value for p in (params, moved)]
    assert_close(*values)


def context(tmp_path: Path) -> Context:
    return Context(torch.device("cpu"), tmp_path, size="quick")


def test_features_are_standardized_by_the_training_images(tmp_path: Path):
    parts = features(SMALL, context(tmp_path), made=True)
    assert_close(parts["train"].x.mean(0), torch.zeros(16), atol=1e-5, rtol=0)
    assert parts["test"].x.shape == (48, 16)
    assert len(parts["other"].x) > 0


def test_heads_are_one_population_and_the_best_is_chosen_on_held_out_images(tmp_path: Path):
    rows = list(heads(SMALL, context(tmp_path)))
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
