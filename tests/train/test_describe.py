"""A run in plain values."""

from __future__ import annotations

import json
import math

import torch

import fsmap
from cases import case
from fsmap.train.checkpoint import describe, describe_model


def objective(**changes: float) -> fsmap.Objective:
    knobs = {"std": 0.1, "prior": 1.0, "jitter": 0.5, "high": 1.0} | changes
    terms = (
        fsmap.Gaussian(knobs["std"]),
        fsmap.Normal(knobs["prior"]),
        fsmap.px.Uniform(-1.0, knobs["high"]),
    )
    return fsmap.l_map(*terms, num_points=4, jitter=knobs["jitter"], num_data=10)


def test_equal_objectives_have_equal_descriptions():
    assert describe(objective()) == describe(objective())
    json.dumps(describe(objective()))


def test_every_knob_shows():
    base = json.dumps(describe(objective()))
    for change in ({"std": 0.2}, {"prior": 2.0}, {"jitter": 0.25}, {"high": 2.0}):
        assert json.dumps(describe(objective(**change))) != base, change


def test_no_address_shows():
    class Plain:
        def __init__(self) -> None:
            self.inner = object()
            self.size = 3

    found = describe([Plain(), lambda x: x, torch.float32])
    assert "0x" not in json.dumps(found)
    assert found[0]["size"] == 3
    assert describe(math.inf) == math.inf


def test_tensors_are_told_apart_by_content(generator: torch.Generator):
    a = torch.randn(100, generator=generator)
    b = a.clone()
    assert describe(a) == describe(b)
    b[50] += 1e-12
    assert describe(a) != describe(b)
    assert describe(a) != describe(a.float())
    assert describe(torch.tensor(2.5)) == 2.5


def test_models_differ_by_text_and_shape():
    relu, wide = case("relu"), case("wide")
    assert describe_model(relu.f, relu.params) != describe_model(wide.f, wide.params)
    shapes = describe_model(relu.f, relu.params)["parameters"]
    assert shapes["0.weight"] == "float64 [4, 2]"
    own = describe_model(lambda params, x: x, relu.params)["module"]
    assert "lambda" in own
