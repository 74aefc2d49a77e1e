"""A model in one file: the same predictions after loading, nothing executed, damage noticed."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch

from fsmap.assess.table_fit import TableOptions, fit_table
from fsmap.data.tables import read_table
from fsmap.errors import CheckpointError, InputError
from fsmap.train import checkpoint
from fsmap.train.table_model import load_model
from small_tables import flowers, houses

OPTIONS = TableOptions(hidden=(4,), steps=5, device="cpu", progress=False)


@pytest.fixture(
    scope="module", params=[(houses, "price"), (flowers, "kind")], ids=["price", "kind"]
)
def saved(request, tmp_path_factory):
    make, target = request.param
    folder = tmp_path_factory.mktemp("model")
    table = read_table(make(folder / "table.csv"))
    model = fit_table(table, target, OPTIONS).model
    model.save(folder / "model.pt")
    return folder / "model.pt", model, table


def test_the_same_predictions_after_loading(saved):
    path, model, table = saved
    again = load_model(path)
    assert again.target == model.target
    assert again.results == model.results
    for method in ("linear", "ps-map", "l-map"):
        found, expected = again.predict(table, method), model.predict(table, method)
        assert list(found) == list(expected)
        for name, column in expected.items():
            if column.dtype.kind == "f":
                np.testing.assert_allclose(found[name], column, rtol=1e-5, atol=1e-5)
            else:
                assert (found[name] == column).mean() > 0.95  # saved in float32


def test_intervals_and_probabilities(saved):
    _, model, table = saved
    found = model.predict(table, "l-map")
    if model.target.task == "regression":
        assert list(found) == ["prediction", "low", "high"]
        width = found["high"] - found["low"]
        np.testing.assert_allclose(width, 2 * model.results["l-map"]["margin"])
    else:
        assert list(found) == ["prediction", "p(iris)", "p(lily)", "p(rose)"]
        chance = np.stack([found[f"p({name})"] for name in model.target.classes], axis=1)
        np.testing.assert_allclose(chance.sum(1), 1)
        assert (np.array(model.target.classes)[chance.argmax(1)] == found["prediction"]).all()


def test_the_file_is_safetensors_and_json(saved):
    path, _, _ = saved
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    config = json.loads(header["__metadata__"]["config"])
    assert config["kind"] == "table-model"
    assert {c["name"] for c in config["columns"]} >= set()
    assert all(entry["dtype"] in ("F32", "F64") for n, entry in header.items() if n[0] != "_")


def test_damage_is_noticed(saved, tmp_path):
    data = bytearray(saved[0].read_bytes())
    data[-3] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="altered or damaged: its checksum does not fit"):
        load_model(tmp_path / "bad.pt")
    (tmp_path / "bad.pt").write_bytes(data[:100])
    with pytest.raises(CheckpointError, match="truncated or no checkpoint at all"):
        load_model(tmp_path / "bad.pt")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint at .*absent.pt"):
        load_model(tmp_path / "absent.pt")
    other = checkpoint.Checkpoint({"params/w": torch.zeros(1)}, {"kind": "fit"}, {})
    checkpoint.save(tmp_path / "run.pt", other)
    with pytest.raises(
        CheckpointError, match="a checkpoint of 'fit', not a model from `fsmap fit`"
    ):
        load_model(tmp_path / "run.pt")


def test_an_unknown_method(saved):
    _, model, table = saved
    with pytest.raises(InputError, match="holds linear, ps-map, l-map, not 'fs-map'"):
        model.outputs(table, "fs-map")
