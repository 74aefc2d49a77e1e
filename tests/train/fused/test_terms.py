"""Which objectives and models the fused engine knows, and what it says of the others."""

from __future__ import annotations

import pytest
import torch

import fsmap
from fsmap.errors import InputError
from fsmap.models.mlp import MLP
from fsmap.train.fused.terms import check_model, kernels_fit, read_terms

NOISE, PRIOR, PX = fsmap.Gaussian(0.5), fsmap.Normal(2.0), fsmap.px.Normal(shape=3)


def l_map(noise=NOISE, prior=PRIOR, **changes):
    options = {"num_points": 4, "num_data": 10, "reg_strength": 0.1, "estimator": "fd"} | changes
    return fsmap.l_map(noise, prior, PX, **options)


def test_numbers_of_l_map():
    terms = read_terms([l_map(), l_map(reg_strength=torch.tensor(0.0)), l_map(reg_strength=0.3)])
    assert terms.strength.tolist() == pytest.approx([0.1, 0.0, 0.3])
    assert terms.noise.tolist() == [0.5] * 3
    assert (terms.num_points, terms.num_data, terms.beta) == (4, 10, 1e-3)


def test_numbers_of_ps_map():
    terms = read_terms([fsmap.ps_map(NOISE, PRIOR, num_data=10)])
    assert terms.px is None
    assert terms.num_points == 0


def test_terms_in_nats_are_those_of_the_objective():
    """Squared errors, R and ‖θ‖² of one member, weighted, against the objective itself."""
    f, params = fsmap.functional(MLP([3, 4, 1], "relu", generator=torch.Generator().manual_seed(0)))
    params = {n: p.detach() for n, p in params.items()}
    objective = l_map()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 3, generator=generator), torch.randn(6, 1, generator=generator)
    from fsmap.linalg.probes import Stream

    draws = objective.draw(f, params, Stream(0, 0))
    loss, parts = objective.loss(f, params, fsmap.Batch(x, y), draws)
    shifted = {n: p + 1e-3 * draws.psi[n][0] for n, p in params.items()}
    change = (f(shifted, draws.x) - f(params, draws.x)) / 1e-3
    squares = sum(p.square().sum() for p in params.values())
    numbers = torch.stack([(f(params, x) - y).square().sum(), change.square().sum() / 4, squares])
    numbers = torch.cat([numbers, torch.ones(1)])
    size = sum(p.numel() for p in params.values())
    weights = read_terms([objective]).weights(6, size, numbers)[..., 0]  # [4, 4]
    expected = torch.stack([loss, *parts.values()])
    torch.testing.assert_close(weights @ numbers, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (l_map(noise=fsmap.LaplaceNoise(1.0)), r"likelihood LaplaceNoise.* takes Gaussian\(std\)"),
        (l_map(noise=fsmap.Gaussian(torch.ones(2))), r"takes Gaussian\(std\) with one number"),
        (l_map(prior=fsmap.Laplace(1.0)), r"the prior Laplace.* it takes Normal\(std\)"),
        (l_map(prior=fsmap.Normal(1.0, 0.0)), r"with one number and no mean"),
        (l_map(estimator="jvp"), r"estimator='jvp' with probes=1 .*takes estimator='fd'"),
        (l_map(probes=2), r"estimator='fd' with probes=2"),
        (l_map(every=2), r"one plain probe on every step"),
        (
            fsmap.fs_map(NOISE, PRIOR, PX, num_points=4, jitter=1.0, num_data=10),
            r"LogDet beside other terms; it takes l_map, or ps_map for all. Use engine='vmap'",
        ),
    ],
)
def test_other_terms_are_refused(objective, message):
    with pytest.raises(InputError, match=rf"engine='fused' does not know .*{message}"):
        read_terms([objective])


def test_the_two_methods_do_not_mix_unless_lambda_is_zero():
    with pytest.raises(InputError, match=r"NoGeometry beside other terms"):
        read_terms([l_map(), fsmap.ps_map(NOISE, PRIOR, num_data=10)])


@pytest.mark.parametrize(
    "module",
    [
        MLP([3, 4, 1], "tanh", generator=torch.Generator()),
        MLP([3, 4, 2], "relu", generator=torch.Generator()),
        MLP([3, 1], "relu", generator=torch.Generator()),
        MLP([3, 4, 1], "relu", bias=False, generator=torch.Generator()),
    ],
    ids=["activation", "outputs", "depth", "bias"],
)
def test_other_models_are_refused(module):
    f, _ = fsmap.functional(module)
    with pytest.raises(InputError, match=r"engine='fused' is for fsmap.models.mlp.MLP with ReLU"):
        check_model(f)


def test_a_plain_function_is_refused():
    with pytest.raises(InputError, match=r"got <function .*Use engine='vmap'"):
        check_model(lambda params, x: x)


@pytest.mark.parametrize(
    ("sizes", "fits"), [((13, 256, 256, 1), True), ((4, 100, 1), False), ((4, 8, 1), False)]
)
def test_which_layers_the_kernels_know(sizes, fits):
    assert kernels_fit(sizes) is fits
