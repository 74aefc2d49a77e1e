"""An integration whose package is not installed says which command installs it."""

from __future__ import annotations

import importlib
import sys

import pytest

from fsmap.cli import main
from fsmap.errors import MissingExtraError

EXTRAS = {"lightning": "lightning.pytorch", "transformers": "transformers", "ray": "ray"}


@pytest.fixture
def without(monkeypatch):
    """Hide a package, as if it were not installed."""

    def hide(extra: str) -> None:
        monkeypatch.setitem(sys.modules, EXTRAS[extra], None)
        monkeypatch.delitem(sys.modules, f"fsmap.integrations.{extra}", raising=False)

    return hide


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(extra, without):
    without(extra)
    with pytest.raises(MissingExtraError) as missing:
        importlib.import_module(f"fsmap.integrations.{extra}")
    assert f"this needs '{extra}', which is not installed" in str(missing.value)
    assert f"pip install 'fsmap[{extra}]'" in str(missing.value)


def test_the_command_line_names_it_too(without, capsys, tmp_path):
    without("ray")
    command = ["run", "mixture-posterior", "--quick", "--out", str(tmp_path), "--ray"]
    assert main(command) == 2
    assert "pip install 'fsmap[ray]'" in capsys.readouterr().err
