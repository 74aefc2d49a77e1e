"""What LMAP and its kin refuse, and what they pass on: keyword arguments and output objects."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import fsmap
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.tables.network import Options, learn

pytestmark = pytest.mark.usefixtures("seeded")
MODES = ("joint", "frozen", "batch")


def wrap(module: Any, px: Any = None, **options: Any) -> Any:
    px = fsmap.px.Normal(shape=(2,)) if px is None else px
    return fsmap.LMAP(module, px, num_points=5, **options)


@dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: Tensor
    points: int
    cache: SimpleNamespace  # in which nobody sees a tensor


class Net(nn.Module):
    """Returns a tensor, or an object around it; ``scale`` is a keyword argument."""

    def __init__(self, wraps: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.wraps = nn.Linear(2, 4), nn.Linear(4, 3), wraps

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Any:
        hidden = self.first(x).tanh()
        out = scale * self.last(hidden)
        cache = SimpleNamespace(hidden=hidden)
        return Result(out, (hidden,), out.mean().detach(), len(x), cache) if self.wraps else out


def test_points_that_become_nan_are_named() -> None:
    points = torch.randn(8, 2)
    lm = wrap(Net(), lambda n, g: points[:n].clone())
    lm(torch.zeros(4, 2))
    points[1, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        lm(torch.zeros(4, 2))


def test_numbers_of_numpy_are_numbers() -> None:
    lm = wrap(Net(), beta=np.float32(0.01), every=np.int64(1))
    assert lm(torch.zeros(3, 2), reg_strength=np.float32(0.1))[1] > 0


@pytest.mark.parametrize("mode", MODES)
def test_keyword_arguments_reach_the_model(mode: str) -> None:
    module, x = Net(), torch.randn(4, 2)
    lm = wrap(module, batchnorm=mode)
    out, R = lm(x, scale=3.0)
    lm.step = 0
    scaled = wrap(module, forward=lambda m, x: m(x, scale=3.0), batchnorm=mode)
    torch.testing.assert_close(out, module(x, scale=3.0))
    torch.testing.assert_close(R, scaled(x)[1])
    for size in (3, 1):  # as many points as outputs, and one: an entry for each output
        torch.testing.assert_close(lm(x[:size], scale=torch.ones(3))[0], module(x[:size]))
    with pytest.raises(InputError, match="the same scale"):
        lm(x, scale=torch.zeros(4, 1))
    assert lm.eval()(x, scale=torch.zeros(4, 1))[0].eq(0).all()
    torch.testing.assert_close(lm(x)[0], module(x))
    lm = wrap(module, {"x": torch.randn(9, 2)}, batchnorm=mode)
    torch.testing.assert_close(lm(UserDict(x=x))[0], module(x))  # as of a tokenizer
    lm = wrap(module, (torch.randn(9, 2),), batchnorm=mode)
    torch.testing.assert_close(lm([x])[0], module(x))  # as of a DataLoader
    torch.testing.assert_close(lm(Row(x))[0], module(x))


class Row(NamedTuple):
    x: Tensor


@pytest.mark.parametrize("kind", [dict, UserDict, lambda x: (x["x"],), lambda x: [x["x"]]])
def test_every_measurement_takes_the_batch_that_lmap_takes(kind: Any) -> None:
    px, x = torch.randn(9, 2), torch.randn(4, 2)
    px = {"x": px} if issubclass(type(kind({"x": x})), dict | UserDict) else (px,)
    lm, batch = wrap(Net(wraps=True), px, estimator="vjp"), kind({"x": x})
    assert fsmap.estimate_cost(lm, batch, repeats=1).active > 0
    assert fsmap.suggest_strength(lm, loss=torch.ones(4), x=batch).R > 0
    assert lm(batch, drawn=lm.draw(batch))[1] > 0


def test_a_loss_over_both_kinds_of_points_is_refused() -> None:
    forward = lambda net, x: SimpleNamespace(logits=net(x), loss=net(x).mean())  # noqa: E731
    module, x = Net(), torch.randn(4, 2)
    frozen, joint = (wrap(module, forward=forward, batchnorm=m) for m in MODES[1::-1])
    torch.testing.assert_close(frozen(x)[0].loss, module(x).mean())
    for strength in (0, 1):
        with pytest.raises(InputError, match="compute the loss from"):
            joint(x, reg_strength=strength)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("estimator", ["jvp", "fd_central", "vjp", "exact"])
def test_output_objects_are_kept(mode: str, estimator: str) -> None:
    module, x = Net(wraps=True), torch.randn(4, 2)
    plain = copy.deepcopy(module)
    plain.wraps = False
    lm = wrap(module, batchnorm=mode, estimator=estimator, every=2)
    twin = wrap(plain, batchnorm=mode, estimator=estimator, every=2)
    for _ in range(2):  # with R and without
        (out, R), (logits, S) = lm(x), twin(x)
        assert isinstance(out, Result)
        assert out.points == len(out.cache.hidden) == (9 if mode == "joint" else 4)
        assert out.hidden[0].shape == (4, 4)
        torch.testing.assert_close(out.logits, logits)
        torch.testing.assert_close(R, S)
        (out.logits.square().sum() + out.hidden[0].sum() + R).backward()
        (logits.square().sum() + plain.first(x).tanh().sum() + S).backward()
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert isinstance(lm.eval()(x)[0], Result)
    assert isinstance(copy.deepcopy(lm)(x)[0], Result)
    assert isinstance(pickle.loads(pickle.dumps(lm))(x)[0], Result)


def trained() -> None:
    f, params = fsmap.functional(nn.Linear(2, 1))
    objective = fsmap.ps_map(fsmap.Gaussian(0.1), fsmap.Normal(1.0), num_data=5)
    fsmap.fit(objective, f, params, (torch.ones(5, 2), torch.ones(5)), steps=1, progress=False)


DERIVATIVES = {
    "a penalty": lambda: fsmap.LaplacianPenalty(Net(), torch.ones(5, 2), num_points=3)(),
    "in place": lambda: fsmap.InPlacePenalty(Net(), torch.ones(5, 2), num_points=3).backward(),
    "its cost": lambda: fsmap.estimate_cost(wrap(Net()), torch.ones(5, 2), repeats=1),
    "fit": trained,
    "a table": lambda: learn(
        torch.randn(30, 2), torch.randn(30, 1), Options(hidden=4, steps=2), seed=0, progress=False
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_inference_mode_is_refused(name: str) -> None:
    with torch.no_grad():
        DERIVATIVES[name]()
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode"):
        DERIVATIVES[name]()


@pytest.mark.parametrize("how", ["householder", "matrix_exp"])
def test_differences_of_rounded_parameters_are_refused(how: str) -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    orthogonal(net[0], orthogonal_map=how)
    jvp, fd = (wrap(net, estimator=name, probes=300, batchnorm="frozen") for name in ("jvp", "fd"))
    R = jvp(torch.ones(4, 2))[1]
    if how == "matrix_exp":
        torch.testing.assert_close(fd(torch.ones(4, 2))[1], R, rtol=0.05, atol=0.0)
        fsmap.InPlacePenalty(net, torch.ones(4, 2), num_points=2)
        return
    with pytest.raises(UnsupportedModuleError, match="matrix_exp"):
        fd(torch.ones(4, 2))
    with pytest.raises(UnsupportedModuleError, match="matrix_exp"):
        fsmap.InPlacePenalty(net, torch.ones(4, 2), num_points=2)
