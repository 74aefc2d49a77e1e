"""The command: finds factories, points and weights, and refuses in words."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fsmap.cli import main

SOURCE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

def conv():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1))

class Inside:
    make = staticmethod(make)

def sized(width):
    return nn.Linear(width, 1)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, float32, seeded):
    name = f"patients_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path, name
    sys.modules.pop(name, None)


def examine(capsys, *arguments):
    code = main(["doctor", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def answer(capsys, *arguments):
    code, out, err = examine(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_page(folder, capsys):
    code, out, _ = examine(capsys, f"{folder[1]}:make", "--jitter", "0.1", "--num-data", 10)
    assert code == 0
    assert out.startswith("fsmap doctor: Sequential")
    assert "S = 256 points" in out
    assert "eval mode" in out
    assert max(map(len, out.splitlines())) <= 100


def test_json_and_options(folder, capsys):
    target = f"{folder[1]}:make"
    d = answer(capsys, target, "--px", "uniform", "--range", -2, 2, "--points", 40, "--train-mode")
    assert (d["points"], d["mode"], d["parameters"]) == (40, "train", 13)
    again = answer(capsys, target, "--px", "uniform", "--range", -2, 2, "--points", 40)
    assert again["eigenvalues"]["trace"] == d["eigenvalues"]["trace"]  # the seed is fixed
    other = answer(capsys, target, "--px", "uniform", "--points", 40, "--seed", 1)
    assert other["eigenvalues"]["trace"] != d["eigenvalues"]["trace"]


def test_factories_of_all_kinds(folder, capsys):
    name = folder[1]
    assert answer(capsys, f"{name}:Inside.make")["parameters"] == 13
    assert answer(capsys, f"{name}:sized?width=4")["parameters"] == 5
    assert answer(capsys, f"{name}:conv", "--shape", "1,4,4", "--points", 7)["points"] == 7


WRITERS = {
    "pt": lambda file, x: torch.save(torch.from_numpy(x), file),
    "npy": np.save,
    "csv": lambda file, x: np.savetxt(file, x, delimiter=",", header="a,b", comments=""),
    "safetensors": lambda file, x: save_file({"input": torch.from_numpy(x)}, file),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_points_from_files(folder, capsys, suffix):
    file = folder[0] / f"points.{suffix}"
    WRITERS[suffix](file, np.arange(24, dtype=np.float32).reshape(12, 2) / 24)
    target = f"{folder[1]}:make"
    assert answer(capsys, target, "--px", file)["points"] == 12
    assert answer(capsys, target, "--px", file, "--points", 8)["points"] == 8


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_from_files(folder, capsys, suffix, wrapped):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    with torch.no_grad():
        net[0].weight[2], net[0].bias[2] = net[0].weight[0], net[0].bias[0]
        net[2].weight[:, 2] = net[2].weight[:, 0]
    file = folder[0] / f"weights{suffix}"
    if suffix == ".pt":
        torch.save({"state_dict": net.state_dict()} if wrapped else net.state_dict(), file)
    else:
        save_file(net.state_dict(), file)
    d = answer(capsys, f"{folder[1]}:make", "--weights", file)
    assert d["verdict"] == "pathological"
    assert d["symmetries"][0]["units"] == [0, 2]


def test_pickles_are_not_run(folder, capsys):
    class Trap:
        def __reduce__(self):
            return exec, ("raise SystemExit('it ran')",)

    torch.save(Trap(), folder[0] / "trap.pt")
    code, _, err = examine(capsys, f"{folder[1]}:make", "--weights", "trap.pt")
    assert code == 2
    assert "trap.pt cannot be read as .pt" in err
