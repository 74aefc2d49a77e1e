"""Evaluation points that are not finite are noticed on any step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsmap
from fsmap.errors import InputError


def test_points_that_become_nan_are_noticed(seeded):
    points = torch.randn(8, 2)
    lm = fsmap.LMAP(nn.Linear(2, 3), lambda n, g: points[:n].clone(), num_points=4)
    lm(torch.zeros(4, 2))
    points[1, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        lm(torch.zeros(4, 2))
