"""A network for a table: options, sizes, devices, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fsmap
import fsmap.train.tabular
from fsmap.errors import ConstantTargetWarning, EdgeOfGridWarning, InputError
from fsmap.train.search import Config
from fsmap.train.tabular import learn

FAST = {"hidden": (8,), "steps": 20, "weight_decay": 1e-4, "reg_strength": 1e-3}


@pytest.fixture
def rows(generator):
    x = torch.randn(50, 3, generator=generator)
    held = torch.arange(50) >= 40
    return x, x[:, :1] - x[:, 1:2], held


@pytest.mark.filterwarnings("ignore::fsmap.errors.EdgeOfGridWarning")  # five steps choose nothing
def test_what_is_auto_is_chosen_and_what_is_given_is_kept(rows):
    x, y, held = rows
    _, both = learn(x, y, held, hidden=(8,), steps=5)
    assert len(both.search) == 16
    _, one = learn(x, y, held, hidden=(8,), steps=5, weight_decay=0.5)
    assert {line["weight_decay"] for line in one.search} == {0.5}
    assert len(one.search) == 4
    _, none = learn(x, y, None, hidden=(8,), steps=5)  # nothing to choose by: middle values
    assert len(none.search) == 1


def test_the_network_is_as_the_search_left_it(rows):
    x, y, held = rows
    net, found = learn(x, y, held, **FAST)
    assert net.sizes == (3, 8, 1)
    assert not net.training
    for name, p in net.named_parameters():
        assert p.dtype == torch.float64
        assert_close(p.detach(), found.params[name].double())
    error = (net(x[held].double()) - y[held]).square().mean().sqrt()
    assert_close(found.value, float(error.detach()), rtol=1e-5, atol=0)


def test_labels_make_a_classifier(rows):
    x, _, held = rows
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    net, found = learn(x, y, held, **FAST)
    assert net.sizes == (3, 8, 3)
    loss = torch.nn.functional.cross_entropy(net(x[held].double()), y[held])
    assert_close(found.value, float(loss.detach()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("labels", [False, True])
def test_weights_count_in_training_and_on_held_out_rows(rows, labels):
    x, y, held = rows
    y = (x[:, 0] > 0).long() if labels else y
    ones, found = learn(x, y, held, weight=torch.full((50,), 3.0), **FAST)
    plain, expected = learn(x, y, held, **FAST)
    assert_close(ones(x), plain(x), rtol=1e-4, atol=1e-5)  # only their ratios matter
    assert_close(found.value, expected.value, rtol=1e-4, atol=0)
    skewed, _ = learn(x, y, held, weight=1 + 50.0 * (x[:, 2] > 0), **FAST)
    assert (skewed(x) - plain(x)).abs().max() > 1e-2


def test_p_x_can_be_the_rows_or_a_distribution(rows):
    x, y, held = rows
    strong = {**FAST, "reg_strength": 1.0}
    normal, train, own = (
        learn(x, y, held, px=px, **strong)[0](x)
        for px in ("normal", "train", fsmap.px.Normal(shape=(3,)))
    )
    assert_close(normal, own)
    assert (normal - train).abs().max() > 1e-4


def test_a_factory_makes_the_network_from_the_seed(rows):
    x, y, held = rows

    def factory(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 4), nn.Dropout(0.2), nn.Linear(4, outputs))

    first, again, other = (
        learn(x, y, held, module=factory, seed=seed, **FAST)[0](x) for seed in (1, 1, 2)
    )
    assert_close(first, again, rtol=0, atol=0)
    assert (first - other).abs().max() > 1e-4


def test_fs_map_on_a_small_network(rows):
    x, y, held = rows
    _, found = learn(x, y, held, method="fs-map", hidden=(4,), steps=5, num_points=4)
    assert len(found.search) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": -1.0}, "weight_decay must be 'auto' or a finite number >= 0, got -1.0"),
        ({"reg_strength": "strong"}, "reg_strength must be 'auto' or .*, got 'strong'"),
        ({"method": "fs-map", "reg_strength": 0}, "fs-map needs reg_strength > 0"),
        ({"px": "rows"}, "px must be 'normal', 'train' or a distribution of fsmap.px, got 'rows'"),
        ({"method": "map"}, "method must be one of"),
        ({"device": "abacus"}, "device must be 'auto', 'cpu', 'cuda' or .*, got 'abacus'"),
        ({"activation": "step"}, "activation must be one of"),
    ],
)
def test_refusals(rows, options, message):
    with pytest.raises(InputError, match=message):
        learn(*rows, **{**FAST, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(rows):
    with pytest.raises(InputError, match="torch sees no CUDA device here. Use 'cpu'"):
        learn(*rows, **FAST, device="cuda")


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same(rows):
    cpu, gpu = (learn(*rows, **FAST, device=d)[0](rows[0]) for d in ("cpu", "cuda"))
    assert_close(cpu, gpu, rtol=1e-3, atol=1e-3)


def test_the_largest_strength_is_worth_a_warning(rows, monkeypatch):
    """Only that one: the smallest says that hardly any regularization helps."""
    x, y, held = rows
    real = fsmap.train.tabular.train
    for strength, warned in ((3.0, True), (2.0, False), (1.0, False)):
        monkeypatch.setattr(
            fsmap.train.tabular,
            "train",
            lambda *a, s=strength, **k: real(*a, **k)._replace(config=Config(0.5, s)),
        )
        monkeypatch.setattr(fsmap.train.tabular, "strengths", lambda *a, **k: [1.0, 2.0, 3.0])
        options = {"hidden": (8,), "steps": 2, "weight_decay": 0.5}
        if warned:
            with pytest.warns(EdgeOfGridWarning, match=r"λ = 3 is the largest of the 3 tried"):
                learn(x, y, held, **options)
        else:
            learn(x, y, held, **options)  # a warning would be an error here


def test_a_constant_target_is_worth_a_warning(rows):
    x, y, held = rows
    with pytest.warns(ConstantTargetWarning, match="the target is the same in every row"):
        learn(x, torch.zeros_like(y), held, **FAST)
