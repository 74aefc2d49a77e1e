"""``--set key=value``: change fields of an experiment's config, typed by its dataclass."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

from fsmap.errors import InputError, did_you_mean
from fsmap.paper.ranges import check_range

TRUE, FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


def fields(config: Any) -> dict[str, Any]:
    """Names and types of what can be set.

    Args:
        config: An instance of a dataclass.

    Returns:
        Types by name.
    """
    hints = typing.get_type_hints(type(config))
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def override(config: Any, assignments: Iterable[str]) -> Any:
    """Change fields of a config.

    Args:
        config: An instance of a frozen dataclass.
        assignments: Texts of the form ``key=value``; a tuple is written ``1,2,3``.

    Returns:
        A changed copy.

    Raises:
        InputError: If a text is no assignment, or the key or the value is not allowed.
    """
    known = fields(config)
    declared = {field.name: field for field in dataclasses.fields(config)}
    changes = {}
    for text in assignments:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            message = f"--set takes key=value, got {text!r}. {_listing(config)}"
            raise InputError(message)
        if key not in known:
            hint = did_you_mean(key, known)
            message = f"--set {text}: there is no field {key!r}.{hint} {_listing(config)}"
            raise InputError(message)
        try:
            changes[key] = parse(value, known[key])
            check_range(declared[key], changes[key])
        except (ValueError, TypeError) as error:
            message = f"--set {text}: {key} is {spell(known[key])}, got {value!r}. {error}"
            raise InputError(message) from error
    return dataclasses.replace(config, **changes)


def parse(text: str, kind: Any) -> Any:
    """Read a value of a given type.

    Args:
        text: What the user wrote.
        kind: ``int``, ``float``, ``str``, ``bool``, a ``Literal``, a tuple of these, or one of
            these or None.

    Returns:
        The value.

    Raises:
        ValueError: If the text does not spell such a value.
        TypeError: If values of this type cannot be written as text.

    Examples:
        >>> parse("1e4", int), parse("100, 200", tuple[int, ...]), parse("none", float | None)
        (10000, (100, 200), None)
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        if text.lower() == "none" and len(rest) < len(args):
            return None
        return parse(text, rest[0])
    if origin is Literal:
        return _choice(text, args)
    if origin is tuple:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return tuple(parse(part, args[0]) for part in parts)
    if kind is bool:
        return _boolean(text)
    if kind is int:
        return _integer(text)
    if kind is float:
        return _number(text)
    if kind is str:
        return text
    message = f"A field of type {spell(kind)} cannot be set on the command line."
    raise TypeError(message)


def _choice(text: str, allowed: tuple[Any, ...]) -> Any:
    for value in allowed:
        if str(value) == text:
            return value
    message = f"Allowed: {', '.join(map(str, allowed))}."
    raise ValueError(message)


def _boolean(text: str) -> bool:
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    message = "Write true or false."
    raise ValueError(message)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = "Write a number."
        raise ValueError(message) from None


def _integer(text: str) -> int:
    try:
        number = float(text)  # 1e4 is a fine way to write ten thousand
    except ValueError:
        number = math.nan
    if not number.is_integer():
        message = "Write a whole number."
        raise ValueError(message)
    return int(number)


def spell(kind: Any) -> str:
    """A type as a user reads it.

    Args:
        kind: A type.

    Returns:
        Such as ``"int"`` or ``"tuple[int, ...]"``.
    """
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _listing(config: Any) -> str:
    known = ", ".join(f"{name} ({spell(kind)})" for name, kind in fields(config).items())
    return f"Known: {known}."
