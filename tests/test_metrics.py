"""Metrics against scikit-learn and torchmetrics where they have them, else against brute force."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torchmetrics.functional.classification import multiclass_calibration_error

from fsmap import metrics
from fsmap.errors import InputError

SEEDS = st.integers(0, 10_000)
CLASSIFIED = "accuracy nll brier ece selective_accuracy temperature".split()


def table(seed: int = 0, n: int = 300, k: int = 5, scale: float = 2.0):
    """Logits that know something of the labels, and the labels."""
    rng = np.random.default_rng(seed)
    y = rng.integers(k, size=n)
    return scale * rng.standard_normal((n, k)) + 2.0 * np.eye(k)[y], y


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@given(seed=SEEDS)
def test_against_scikit_learn(seed):
    z, y = table(seed)
    p, classes = softmax(z), np.arange(5)
    assert metrics.accuracy(z, y) == pytest.approx(sk.accuracy_score(y, p.argmax(1)), abs=1e-15)
    assert metrics.nll(z, y) == pytest.approx(sk.log_loss(y, p, labels=classes), rel=1e-12)
    theirs = sk.brier_score_loss(y, p, labels=classes, scale_by_half=False)
    assert metrics.brier(z, y) == pytest.approx(theirs, rel=1e-12)


@given(seed=SEEDS)
def test_rmse_against_scikit_learn(seed):
    a, b = np.random.default_rng(seed).standard_normal((2, 40, 3))
    assert metrics.rmse(a, b) == pytest.approx(math.sqrt(sk.mean_squared_error(b, a)), rel=1e-12)
    column = metrics.rmse(a[:, :1], b[:, 0])
    assert column == pytest.approx(sk.root_mean_squared_error(b[:, 0], a[:, 0]), rel=1e-12)


@pytest.mark.parametrize("bins", [1, 10, 15])
@given(seed=SEEDS)
def test_ece_against_torchmetrics(bins, seed):
    z, y = table(seed)
    theirs = multiclass_calibration_error(
        torch.from_numpy(softmax(z)), torch.from_numpy(y), num_classes=5, n_bins=bins
    )
    # torchmetrics works in float32 inside
    assert metrics.ece(z, y, bins) == pytest.approx(float(theirs), abs=2e-6)


@given(seed=SEEDS, bins=st.integers(1, 20))
def test_reliability_by_brute_force(seed, bins):
    z, y = table(seed, n=80)
    p = softmax(z)
    got = metrics.reliability(z, y, bins)
    total = 0.0
    for i in range(bins):
        inside = (p.max(1) > i / bins) & (p.max(1) <= (i + 1) / bins)
        assert got.count[i] == inside.sum()
        if not inside.any():
            assert math.isnan(got.confidence[i])
            assert math.isnan(got.accuracy[i])
            continue
        hit, sure = (p.argmax(1) == y)[inside].mean(), p.max(1)[inside].mean()
        assert got.accuracy[i] == pytest.approx(hit, abs=1e-12)
        assert got.confidence[i] == pytest.approx(sure, abs=1e-12)
        total += inside.mean() * abs(hit - sure)
    assert metrics.ece(z, y, bins) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("k", [2, 4, 8])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(k):
    """Bins are closed on the right; on the other side the two bins below would be one."""
    z = np.zeros((2, k))  # the confidence of the first point is exactly 1/k, the first edge
    z[1, 0] = math.log(1.5 * (k - 1) / (k - 1.5))  # and 1.5/k of the second, in the second bin
    assert metrics.reliability(z, [0, 1], bins=k).count.tolist() == [1, 1, *[0] * (k - 2)]
    apart = ((1 - 1 / k) + 1.5 / k) / 2
    together = abs(1 / 2 - 1.25 / k)
    assert metrics.ece(z, [0, 1], bins=k) == pytest.approx(apart, abs=1e-12)
    assert abs(apart - together) > 0.1


def percentile(values, q):
    """Linear interpolation at position (N - 1) q, which numpy rounds: 100 * 0.29 < 29."""
    position = (len(values) - 1) * q
    below = math.floor(position)
    share = float(position - below)
    low, high = np.sort(values)[[below, min(below + 1, len(values) - 1)]]
    return low + share * (high - low)


def selective_slow(z, y):
    """The definition: a percentile and a mask for each coverage, the trapezoid rule."""
    p = softmax(z)
    entropy = -(p * np.log(p)).sum(1)
    right = p.argmax(1) == y
    q = [Fraction(k, 100) for k in range(100, 0, -1)] + [Fraction(1, 1000)]
    curve = [right[entropy <= percentile(entropy, t)].mean() for t in q]
    return -np.trapezoid(curve, [float(t) for t in q]) / 0.999


@given(seed=SEEDS, n=st.sampled_from([1, 2, 57, 100, 101, 1001, 1500]))
def test_selective_accuracy_by_its_definition(seed, n):
    z, y = table(seed, n=n)
    assert metrics.selective_accuracy(z, y) == pytest.approx(selective_slow(z, y), abs=1e-12)


@given(seed=SEEDS)
def test_ood_auroc_against_scikit_learn(seed):
    inside, outside = table(seed)[0], table(seed + 1, n=170, scale=1.0)[0]
    p = softmax(np.concatenate([inside, outside]))
    theirs = sk.roc_auc_score(np.repeat([0, 1], [300, 170]), -(p * np.log(p)).sum(1))
    assert metrics.ood_auroc(inside, outside) == pytest.approx(theirs, abs=1e-12)


def test_ood_auroc_at_its_ends():
    sure, unsure = 9 * np.eye(4), np.eye(4)
    assert (metrics.ood_auroc(sure, unsure), metrics.ood_auroc(unsure, sure)) == (1, 0)
    assert metrics.ood_auroc(sure, sure) == 0.5
    # The largest probabilities of both round to one; entropies do not.
    assert metrics.ood_auroc(60 * np.eye(4), 50 * np.eye(4)) == 1


@given(seed=SEEDS, scale=st.floats(0.1, 10))
def test_temperature_minimizes_the_nll(seed, scale):
    z, y = table(seed, n=200)
    z = scale * z
    best = metrics.temperature(z, y)
    theirs = minimize_scalar(lambda u: metrics.nll(z / math.exp(u), y), bracket=(-1, 1), tol=1e-10)
    assert metrics.nll(z / best, y) <= theirs.fun + 1e-12
    assert math.log(best) == pytest.approx(theirs.x, abs=1e-5)
    for factor in (1 - 1e-4, 1 + 1e-4):
        assert metrics.nll(z / best, y) < metrics.nll(z / (best * factor), y)


def test_temperature_at_its_bounds():
    z, y = table()
    assert metrics.temperature(10 * np.eye(5)[y], y) == 1e-2  # no errors: sharper is better
    assert metrics.temperature(-z - 9 * np.eye(5)[y], y) == 1e2  # worse than nothing
    assert metrics.temperature(np.ones((300, 5)), y) == 1  # any T gives the same


@given(seed=SEEDS, spread=st.floats(0, 3))
def test_temperature_of_logits_over_many_orders_of_magnitude(seed, spread):
    z, y = table(seed, n=50)
    z = z * 10 ** np.random.default_rng(seed).uniform(-spread, spread, size=(50, 1))
    best = metrics.temperature(z, y)
    assume(1e-2 < best < 1e2)  # else the logits are no better than none
    margin = z - z[np.arange(50), y][:, None]
    cold, hot = ((softmax(margin / (best * t)) * margin).sum() for t in (1 - 1e-8, 1 + 1e-8))
    assert cold > 0 > hot


@pytest.mark.parametrize("name", CLASSIFIED)
def test_arrays_tensors_and_lists_are_the_same(name):
    metric, (z, y) = getattr(metrics, name), table(n=40)
    expected = metric(z, y)
    assert type(expected) is float
    assert metric(torch.from_numpy(z).requires_grad_(), torch.from_numpy(y)) == expected
    assert metric(z.tolist(), y.astype(np.uint8)) == expected
    assert metric(z.reshape(8, 5, 5), y.reshape(8, 5)) == expected  # [N, T, K]
    half = torch.from_numpy(z).bfloat16()
    assert metric(half, y) == metric(half.double(), y)


@pytest.mark.parametrize("name", CLASSIFIED)
@pytest.mark.parametrize(
    ("z", "y", "message"),
    [
        (np.zeros(3), [0, 1, 1], r"logits must be \[N, K\]"),
        (np.zeros((3, 1)), [0, 0, 0], r"the pair \(0, z\)"),
        (np.zeros((3, 2)), [0, 1], r"one integer label"),
        (np.zeros((3, 2)), [0.0, 1.0, 1.0], r"one integer label .* got torch.float64"),
        (np.zeros((3, 2)), [True, False, True], r"one integer label .* got torch.bool"),
        (np.zeros((3, 2)), [0, 1, 2], r"labels must lie in 0\.\.1 for 2 logits, got 0 to 2"),
        (np.zeros((3, 2)), [0, 1, -1], r"got -1 to 1"),
        (np.zeros((0, 2)), [], r"logits holds 0 values"),
        (np.array([[0, np.nan]]), [0], r"logits holds 2 values, 1 of them nan"),
        (np.array([[-np.inf, 0]]), [0], r"1 of them nan or infinite"),
        ("abc", [0], r"logits must be an array or tensor of numbers, got str"),
    ],
)
def test_bad_input_is_refused(name, z, y, message):
    with pytest.raises(InputError, match=message):
        getattr(metrics, name)(z, y)
