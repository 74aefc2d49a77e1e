"""The step traced, compiled and captured; the eager step of :mod:`step` is the definition."""

from __future__ import annotations

from torch import nn

from fsmap.train.images.feed import Feeder
from fsmap.train.images.parallel import Group
from fsmap.train.images.settings import ImageSettings
from fsmap.train.images.step import Step


def make_step(module: nn.Module, settings: ImageSettings, feeder: Feeder, group: Group) -> Step:
    """The step that the settings ask for.

    Args:
        module: On its device.
        settings: Of the run.
        feeder: Gives the images.
        group: The processes that share the work.

    Returns:
        The step.
    """
    return Step(module, settings, feeder, group)
