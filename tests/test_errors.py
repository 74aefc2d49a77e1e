"""Errors by type, and the message of a missing extra."""

from __future__ import annotations

import inspect

import pytest

from fsmap import errors


def test_require_names_the_install_command():
    wanted = r"this needs 'no_such_package', .* pip install 'fsmap\[report\]'"
    with pytest.raises(errors.MissingExtraError, match=wanted):
        errors.require("no_such_package.part", extra="report")


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
