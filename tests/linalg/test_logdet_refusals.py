"""What log_det refuses, in words; and which method ``auto`` stands for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cases
import fsmap
from fsmap.errors import (
    InputError,
    MemoryLimitError,
    SingularGeometryError,
    UnsupportedModuleError,
)
from fsmap.linalg import logdet, memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"jitter": 0.0},
            r"jitter must be > 0 when S\*K < P, got jitter=0 with S\*K=15, P=51: J has",
        ),
        (
            {"jitter": 0.0, "method": "slq"},
            "at least 36 zero eigenvalues. Raise num_points or jitt",
        ),
        ({"jitter": -1e-3}, r"jitter must be >= 0, got -0\.001"),
        ({"jitter": torch.nan}, "jitter must be >= 0, got nan"),
        (
            {"jitter": 1.0, "method": "cholesky"},
            "unknown log_det method 'cholesky'; known: auto, dense, dual, slq, svd_clip, pseudo",
        ),
        ({"jitter": 1.0, "metric": torch.ones(4)}, r"shape \(4,\) fits neither \[S\]"),
        ({"jitter": 1.0, "metric": "fisher"}, "metric must be None, a tensor"),
        (
            {"jitter": 1.0, "method": "slq", "probes": 0},
            "probes must be an integer of at least 1.*got 0",
        ),
        ({"jitter": 1.0, "method": "slq", "probes": 2.5}, "must be an integer .*got 2.5"),
        ({"jitter": None}, "jitter must be a number >= 0, got None"),
        ({"jitter": "small"}, "jitter must be a number >= 0, got 'small'"),
        ({"jitter": torch.ones(2)}, r"jitter must be one number, got shape \(2,\)"),
        ({"jitter": 1.0, "chunk": 0}, "chunk must be None or an integer of at least 1, got 0"),
        ({"jitter": 1.0, "metric": fsmap.metric.SoftmaxFisher}, r"make one of it: SoftmaxFisher"),
        (
            {"jitter": 1.0, "method": "slq", "probes": torch.ones(3, 4)},
            r"probes of slq must be \[R, 15\] here, got \(3, 4\)",
        ),
    ],
)
def test_bad_options(options, words):
    case = cases.case("wide")
    with pytest.raises(InputError, match=words):
        fsmap.log_det(case.f, case.params, case.x, **options)


@pytest.mark.parametrize("method", logdet.METHODS)
def test_bad_points(method):
    case = cases.case("wide")
    for bad, words in [
        (torch.tensor([[0.0, torch.inf]]), "NaN or inf in 1 of 1 points"),
        (torch.zeros(0, 2), "x is empty"),
        (torch.zeros(5, 3), r"x of shape \(5, 3\), in '0' \(Linear\): .*shapes cannot be multip"),
        (torch.zeros(5, 2, dtype=torch.float32), "Give points of the shape, dtype and device"),
        ([0.0], "x must be a tensor"),
    ]:
        with pytest.raises(InputError, match=words):
            fsmap.log_det(case.f, case.params, bad, jitter=0.1, method=method)


@pytest.mark.parametrize("method", ["dense", "auto"])
def test_a_singular_geometry_is_named(method):
    """Two parameters that do the same thing, and no jitter."""
    params = {"a": torch.ones(1), "b": torch.ones(1)}
    x = torch.arange(1.0, 5)[:, None]
    with pytest.raises(SingularGeometryError, match=r"\+ 0 I is not positive definite \(method='"):
        fsmap.log_det(
            lambda p, x: (x * (p["a"] + p["b"]))[:, 0], params, x, jitter=0.0, method=method
        )


def test_a_metric_with_negative_eigenvalues_is_not_called_singular():
    case = cases.case("wide")
    g = torch.linspace(-1, 2, len(case.x))
    with pytest.raises(SingularGeometryError, match="negative eigenvalues, and outweighs") as told:
        fsmap.log_det(case.f, case.params, case.x, jitter=1e-6, metric=g)
    assert "pseudo" not in str(told.value)  # which takes no such metric


@pytest.mark.parametrize("method", ["auto", "dense", "slq", "pseudo", "svd_clip"])
def test_parameters_that_are_not_finite_are_named(method):
    case = cases.case("wide")
    name = next(iter(case.params))
    broken = case.params | {name: torch.full_like(case.params[name], torch.nan)}
    with pytest.raises(InputError, match=rf"params\['{name}'\] has NaN or inf"):
        fsmap.log_det(case.f, broken, case.x, jitter=0.1, method=method)


def test_outputs_that_are_not_finite_are_counted():
    with pytest.raises(InputError, match="the model returns NaN or inf at 1 of 2 points"):
        fsmap.log_det(
            lambda p, x: p["a"] / x, {"a": torch.ones(1)}, torch.tensor([[0.0], [1.0]]), jitter=1.0
        )


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "got an empty dict. fsmap.functional makes one"),
        ([torch.ones(1)], r"params must be a dict \{name: tensor\}, got list"),
        ({"a": 1.0}, r"params\['a'\] must be a tensor, got float"),
    ],
)
def test_params_are_a_dict_of_tensors(params, words):
    x = torch.ones(1, 1)
    with pytest.raises(InputError, match=words):
        fsmap.log_det(lambda p, x: x * p["a"], params, x, jitter=1.0)
    with pytest.raises(InputError, match=words):
        fsmap.trace(lambda p, x: x * p["a"], params, x, method="exact")


def test_a_function_is_no_module():
    with pytest.raises(UnsupportedModuleError, match="functional takes an nn.Module, got <lambda>"):
        fsmap.functional(lambda x: x)


def test_nothing_to_train():
    with pytest.raises(UnsupportedModuleError, match="no trainable parameter"):
        fsmap.functional(nn.Flatten())


def test_a_jacobian_larger_than_memory(monkeypatch):
    case = cases.case("sequence")  # S·K = 12, P = 155
    monkeypatch.setattr(memory, "ALWAYS", 0)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**5)
    with pytest.raises(
        MemoryLimitError,
        match=r"the Jacobian \[12, 155\] with method='dense' needs 0\.00 GB, 0\.00 GB may be used "
        r"on cpu\. Use method='dual', whose matrix is \[S\*K, S\*K\], or method='slq'",
    ):
        fsmap.log_det(case.f, case.params, case.x, jitter=0.1, method="dense")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**3)
    with pytest.raises(
        MemoryLimitError, match="'dual' needs .* Use method='slq', which needs prod"
    ):
        fsmap.log_det(case.f, case.params, case.x, jitter=0.1, method="dual")
    with pytest.raises(MemoryLimitError, match="'pseudo' .*fewer evaluation points, or method='sl"):
        fsmap.log_det(case.f, case.params, case.x, jitter=0.1, method="pseudo")
    assert logdet.choose("auto", 12, 155, CPU, gram=logdet.gram_bytes(*case[:3])) == "slq"
    found = fsmap.log_det(case.f, case.params, case.x, jitter=0.1, probes=12)  # auto: slq
    monkeypatch.undo()
    torch.testing.assert_close(found, fsmap.log_det(case.f, case.params, case.x, jitter=0.1))


@pytest.mark.parametrize(
    ("rows", "P", "expected"),
    [
        (10, 5, "dense"),
        (5, 10, "dual"),
        (5, 5, "dense"),
        (10**4, 10**4, "slq"),
        (10, 10**7, "dual"),
    ],
)
def test_auto_chooses_by_shape(rows, P, expected, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**11)
    assert logdet.choose("auto", rows, P, CPU) == expected


def test_a_named_method_is_taken():
    assert logdet.choose("pseudo", 10**6, 10**6, CPU) == "pseudo"


def test_shape():
    assert logdet.shape(*cases.case("sequence")[:3]) == (3, 4, 155)
    assert logdet.shape(*cases.case("batchnorm_train")[:3]) == (6, 2, 30)
    assert logdet.shape(*cases.case("dict_input")[:3]) == (5, 2, 8)


@pytest.mark.parametrize("method", logdet.METHODS)
def test_nothing_of_the_module_changes(method, seeded):
    """Statistics, parameters and modes stay, and torch's generator where it is not asked."""
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    f, params = fsmap.functional(net)
    x, before = torch.randn(8, 2), {n: t.clone() for n, t in net.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    random = torch.get_rng_state()
    fsmap.log_det(f, params, x, jitter=0.1, method=method, generator=generator)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert net.training


@pytest.mark.parametrize("method", ["auto", "dense", "dual", "svd_clip", "slq"])
@pytest.mark.parametrize("scale", [1.0, 1 / 7, 1e3])
def test_points_of_rank_one_have_no_log_det_without_jitter(seeded, method, scale):
    """In float32 the zero eigenvalues are 1e-14 of the largest, and have a finite log."""
    f, params = fsmap.functional(nn.Linear(3, 1).float())
    x = scale * torch.linspace(-1, 1, 20).float()[:, None] * torch.tensor([[1.0, 2.0, 3.0]]).float()
    with pytest.raises(SingularGeometryError):
        fsmap.log_det(f, params, x, jitter=0.0, method=method)
    if method != "slq":
        with pytest.raises(SingularGeometryError):
            fsmap.log_det(f, params, x, jitter=0.0, method=method, return_estimate=True)


@pytest.mark.parametrize("method", ["dense", "dual", "svd_clip", "slq"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("jitter", [1e-12, 1e-9, 1e-6, 1e-3])
def test_the_error_contains_what_rounding_does(seeded, method, dtype, jitter):
    for points in (12, 40):  # fewer and more than parameters
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        x = torch.randn(points, 2).to(dtype)
        f, params = fsmap.functional(net)
        options = {"jitter": jitter, "method": method, "probes": 1000 if method == "slq" else None}
        found = fsmap.log_det(f, params, x, **options, return_estimate=True)
        g, exact = fsmap.functional(net.double())
        rows, _ = logdet.whitened_rows(g, exact, x.double())
        squares = torch.linalg.svdvals(rows).square()
        kept = squares.clamp_min(jitter) if method == "svd_clip" else squares + jitter
        truth = kept.log().sum() + (33 - len(squares)) * torch.tensor(jitter).log()
        assert abs(found.value - truth) <= found.stderr + 1e-6 * abs(truth)


def test_a_value_that_is_rounding_is_refused(seeded):
    """Without its error bar; in float64 it is a number."""
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(torch.bfloat16)
    x = torch.randn(40, 2).to(torch.bfloat16)
    f, params = fsmap.functional(net)
    for method in ("dense", "dual"):
        with pytest.raises(SingularGeometryError, match="bfloat16"):
            fsmap.log_det(f, params, x, jitter=1e-12, method=method)
    f, params = fsmap.functional(net.double())
    estimate = fsmap.log_det(f, params, x.double(), jitter=1e-3, return_estimate=True)
    assert estimate.stderr == 0
