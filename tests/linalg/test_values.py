"""Values can be looked at outside vmap, and inside grad, but not inside vmap."""

from __future__ import annotations

import torch
from torch.func import grad, vmap

from fsmap.linalg.points import holds, number


def test_outside_vmap():
    assert number(torch.tensor(1.5)) == 1.5
    assert holds(torch.tensor(True), otherwise=False)
    assert not holds(torch.tensor(False), otherwise=True)


def test_inside_grad_and_vmap():
    seen = []

    def look(x):
        seen.append((number(x), holds(x > 0, otherwise=True), holds(x > 0, otherwise=False)))
        return x

    grad(look)(torch.tensor(-2.0))
    vmap(look)(torch.tensor([1.0, -1.0]))
    assert seen == [(-2.0, False, False), (None, True, False)]
