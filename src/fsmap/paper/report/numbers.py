"""How numbers are written: three or four significant digits, ± with matching places."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fsmap.paper.report.tables import columns

MINUS = "\u2212"
ERRORS = {"stderr": "ours", "paper_stderr": "paper"}
"""Columns that are shown behind the ± of another column."""

SYMBOLS = {
    **{"n_train": "N", "jitter": "ε", "epsilon": "ε", "eps": "ε", "alpha": "α", "prior_std": "α"},
    **{"num_points": "S", "lam": "λ", "noise_std": "σ", "noise_ratio": "σ/σ*", "px": "p_X"},
}
"""Columns that are headed by the paper's letter."""


def number(value: Any, digits: int = 4) -> str:
    """Write a value as a table shows it.

    Args:
        value: A number, a string, a boolean, None or a sequence of these.
        digits: Significant digits.

    Returns:
        Text; an em dash for None.

    Examples:
        >>> number(0.123456), number(1234567.0), number(2e-7), number(None), number(3)
        ('0.1235', '1.235e6', '2e\u22127', '\u2014', '3')
    """
    if value is None:
        return "\u2014"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value).replace("-", MINUS)
    if isinstance(value, list | tuple):
        return ", ".join(number(item, digits) for item in value)
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}".replace("-", MINUS)
    places = 0 if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", MINUS)


def with_error(value: Any, stderr: Any) -> str:
    """Write mean ± standard error, both to the place of the error's second digit.

    Args:
        value: The mean.
        stderr: Its standard error; None or nan where there is none.

    Returns:
        Text such as ``"0.113 ± 0.012"``.

    Examples:
        >>> with_error(0.11312, 0.01234), with_error(12.0, None), with_error(1234.5, 67.8)
        ('0.113 ± 0.012', '12', '1234 ± 68')
        >>> with_error(0.4676981, 2e-9)  # seeds that agree: no error worth a column of zeros
        '0.4677'
    """
    usable = isinstance(value, float | int) and isinstance(stderr, float | int)
    if (
        not usable
        or not math.isfinite(stderr)
        or not math.isfinite(value)
        or stderr <= 1e-6 * abs(value)
    ):
        return number(value)
    if not 1e-4 <= max(abs(value), stderr) < 1e6:
        return f"{number(float(value), 3)} ± {number(float(stderr), 2)}"
    places = min(max(0, 1 - math.floor(math.log10(stderr))), 6)
    return f"{value:.{places}f} ± {stderr:.{places}f}".replace("-", MINUS)


def shown(table: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A table as text, errors joined to what they are errors of.

    Args:
        table: Dicts with ``ours``, ``stderr``, ``paper``, ``paper_stderr`` or any other keys.

    Returns:
        The header, and the cells line by line.
    """
    names = columns(table)
    header = [name for name in names if name not in ERRORS or ERRORS[name] not in names]
    error_of = {base: error for error, base in ERRORS.items() if error in names}
    lines = [[_cell(entry, name, error_of.get(name)) for name in header] for entry in table]
    return [SYMBOLS.get(name, name.replace("_", " ")) for name in header], lines


def _cell(entry: Mapping[str, Any], name: str, error: str | None) -> str:
    if name not in entry:
        return ""
    return with_error(entry[name], entry.get(error)) if error else number(entry[name])
