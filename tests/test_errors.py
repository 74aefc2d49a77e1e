"""Errors by type."""

from __future__ import annotations

import inspect

from fsmap import errors


def test_everything_fsmap_raises_has_one_base_and_a_standard_type():
    raised = [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__ and not issubclass(cls, Warning)
    ]
    assert len(raised) >= 9
    for cls in set(raised) - {errors.FsmapError}:
        assert issubclass(cls, errors.FsmapError)
        assert any(base.__module__ == "builtins" for base in cls.__mro__[:-3] if base is not cls)
