"""What values a field may take: by type, name and default; every config keeps to its own rule."""

from __future__ import annotations

import dataclasses

import pytest

from fsmap.paper.engine import ZERO_IS_NONE, check_range
from fsmap.paper.experiment import registry


@dataclasses.dataclass(frozen=True)
class Config:
    """One field for each rule."""

    steps: int = 100
    warmup: int = 10
    lr: float = 0.1
    strengths: tuple[float, ...] = (1e-3, 1e-2)
    levels: tuple[float, ...] = (0.0, 0.5)
    shift: float = -1.0
    limit: int | None = None
    offset: float | None = None
    name: str = "a"
    flag: bool = True


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("steps", 1), ("warmup", 0), ("lr", 1e-9), ("strengths", (0.0, 1.0)), ("shift", -7.0)),
        *(("levels", (0.0, 1.0)), ("limit", None), ("offset", -2.0), ("name", "b")),
    ],
)
def test_what_means_something_passes(name, value):
    check_range(FIELDS[name], value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "at least 1"),
        ("warmup", -1, "at least 0"),
        ("lr", 0.0, "positive"),
        ("strengths", (1.0, -1.0), "at least 0"),
        ("limit", 0, "at least 1"),
        ("shift", float("inf"), "finite"),
    ],
)
def test_what_means_nothing_does_not(name, value, message):
    with pytest.raises(ValueError, match=message):
        check_range(FIELDS[name], value)


def test_every_config_keeps_to_the_rule_and_every_name_is_used():
    names = set()
    for experiment in registry().values():
        for config in (experiment.config, experiment.quick):
            for field in dataclasses.fields(config):
                value = getattr(config, field.name)
                if value != ():  # a quick size may leave out all values, a user may not
                    check_range(field, value)
                names.add(field.name)
    assert names >= ZERO_IS_NONE
