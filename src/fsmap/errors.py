"""Errors and warnings. Each message says what was given, what is allowed, and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class FsmapError(Exception):
    """Base of everything fsmap raises on purpose."""

    exit_code = 2  # of the command line


class InputError(FsmapError, ValueError):
    """An argument is out of its domain."""


class UnsupportedModuleError(FsmapError, TypeError):
    """A module, or a part of one, cannot be used this way."""


class ForwardModeError(UnsupportedModuleError):
    """A model, or a part of it, has no forward-mode derivative here; ``fd_central`` needs none."""


class SingularGeometryError(FsmapError, ArithmeticError):
    """J(theta; p_X) + eps*I is not positive definite (Theorems 1 and 2 say when)."""


class MemoryLimitError(FsmapError, MemoryError):
    """Something would not fit into memory; raised before it is allocated."""


class DivergedError(FsmapError, ArithmeticError):
    """Training produced a value that is not finite."""


class CheckpointError(FsmapError, OSError):
    """A checkpoint is missing, truncated, altered, or belongs to another run."""


class MissingDataError(FsmapError, FileNotFoundError):
    """A data set was not found."""


class MissingExtraError(FsmapError, ImportError):
    """An optional dependency is not installed."""


class DivergedWarning(UserWarning):
    """Some members of a population stopped being finite."""


class EdgeOfGridWarning(UserWarning):
    """The best value of a search lies at the edge of the searched grid."""


class FallbackWarning(UserWarning):
    """An estimator was replaced by another one, or a compiled function by the eager one."""


class NonFiniteWarning(UserWarning):
    """R or λR was inf, nan or negative; running means leave such values out."""


class CollapseWarning(UserWarning):
    """R fell to almost nothing: the network may have become a constant."""


class MissingEveryWarning(UserWarning):
    """R was left out on some steps, and the penalty was called without ``every``."""


class UnseenStatisticsWarning(UserWarning):
    """R was measured with BatchNorm statistics that no data have updated yet."""


class IgnoredProbesWarning(UserWarning):
    """R is exactly zero: the output does not depend on the trainable parameters."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known one, if one is close.

    Examples:
        >>> did_you_mean("lable-noise", ["shift", "label-noise"]), did_you_mean("x", ["shift"])
        (" Did you mean 'label-noise'?", '')
    """
    names = {one.casefold(): one for one in known}
    close = difflib.get_close_matches(name.casefold(), names, n=1)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


def require(module: str, *, extra: str) -> ModuleType:
    """Import a module of an ``extra``; MissingExtraError has the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        how = f"Install it with: pip install 'fsmap[{extra}]'"
        raise MissingExtraError(f"this needs {package!r}, which is not installed. {how}") from error
