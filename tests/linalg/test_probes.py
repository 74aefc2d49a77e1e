"""Probes: what they depend on, and that their covariance is the identity."""

from __future__ import annotations

import math

import torch

from fsmap import px
from fsmap.linalg import probes
from fsmap.px import Stream

PARAMS = {"a": torch.zeros(3, 2), "b": torch.zeros(5)}


def test_psi_depends_on_seed_step_and_model_alone():
    psi = Stream(1, 2).psi(PARAMS, 3)
    assert psi["a"].shape == (3, 3, 2)
    again = Stream(1, 2, rank=7, micro=3).psi(PARAMS, 3)  # another rank and micro-batch
    assert torch.equal(psi["b"], again["b"])
    for other in (Stream(2, 2), Stream(1, 3)):
        assert not torch.equal(psi["b"], other.psi(PARAMS, 3)["b"])
    twins = Stream(1, 2).psi({"b": PARAMS["b"], "c": PARAMS["b"]}, 3)
    assert not torch.equal(twins["b"], twins["c"])
    one, same, other = (Stream(1, 2).psi_of(n, PARAMS["b"]) for n in ("b", "_orig_mod.b", "c"))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_points_depend_on_the_rank():
    draws = [torch.rand(4, generator=Stream(1, 2, rank).points()) for rank in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert Stream(1, 2, 0).noise() != Stream(1, 2, 1).noise()


def test_integers_are_63_bit_and_tell_their_parts_apart():
    values = {px.integer(*parts) for parts in [(1, 23), (12, 3), ("1", 23, ""), (1, "2", 3)]}
    assert len(values) == 4
    assert all(0 <= value < 2**63 for value in values)
    assert px.integer(1, 23) == px.integer("1", "23")  # stable across runs: a hash, not hash()
    assert px.integer(0, 0, "points", 0) == 6033697971243281473


def test_normal_probes_come_from_the_generator(generator):
    psi = probes.normal(PARAMS, 4000, generator)
    vectors = torch.cat([p.flatten(1) for p in psi.values()], dim=1)  # [R, P]
    covariance = vectors.mT @ vectors / 4000
    assert (covariance - torch.eye(11)).abs().max() < 6 * math.sqrt(2 / 4000)


def test_a_model_in_double_precision_gets_the_same_probes():
    single = {name: p.float() for name, p in PARAMS.items()}
    double = {name: p.double() for name, p in PARAMS.items()}
    for draw in (Stream(1, 2).psi, lambda p, num: probes.normal(p, num, px.generator(3))):
        ours, theirs = draw(double, 20), draw(single, 20)
        assert ours["a"].dtype == torch.float64
        assert all(torch.equal(ours[name], theirs[name].double()) for name in PARAMS)


def test_rademacher_probes_are_signs(generator):
    signs = probes.rademacher(5, 7, generator, torch.zeros(1, dtype=torch.float32))
    assert (signs.shape, signs.dtype) == ((5, 7), torch.float32)
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
