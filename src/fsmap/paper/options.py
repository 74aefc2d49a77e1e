"""Options of ``fsmap run``, and what they change in the config of an experiment."""

from __future__ import annotations

import dataclasses
import shlex
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from fsmap.errors import InputError, did_you_mean
from fsmap.paper.experiment import Experiment

ZERO_IS_NONE = frozenset(
    ("warmup", "chain_warmup", "decays", "reg_strength", "strengths")
    + ("fmnist_weight_decay", "cifar10_weight_decay")
)
"""Names, in any config, whose zero switches something off."""

LARGEST = 1e12


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a number, or one in a tuple, that a field cannot mean: by its name and its default.

    A whole number is at least 1, another one positive; zero is allowed if the default has one or
    the name is in ``ZERO_IS_NONE``; anything, if a default is negative.
    """
    if value == () and field.default != ():
        message = "It needs at least one value."
        raise ValueError(message)
    default = field.default if isinstance(field.default, tuple) else (field.default,)
    usual = [number for number in default if _is_number(number)]
    zero = 0 in usual or field.name in ZERO_IS_NONE
    for number in value if isinstance(value, tuple) else (value,):
        if not _is_number(number):
            continue
        if not abs(number) <= LARGEST:
            message = f"Write a finite number. At most {LARGEST:g} is allowed."
            raise ValueError(message)
        counts = isinstance(number, int)
        free = min(usual, default=0) < 0 or not (usual or counts)
        if free or number > 0 or (number == 0 and zero):
            continue
        bound = "at least 0" if zero else "at least 1" if counts else "positive"
        message = f"It must be {bound}."
        raise ValueError(message)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


BOOLEANS = {
    **dict.fromkeys(("true", "yes", "1", "on"), True),
    **dict.fromkeys(("false", "no", "0", "off"), False),
}


def fields(config: Any) -> dict[str, Any]:
    """Names and types of what can be set."""
    hints = typing.get_type_hints(type(config))
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def override(config: Any, assignments: Iterable[str]) -> Any:
    """Change fields of a frozen dataclass by ``key=value`` texts; a tuple is written ``1,2,3``."""
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
    """Read an int, float, str, bool, ``Literal``, a tuple of these, or one of these or None.

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
    if origin is tuple:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return tuple(parse(part, args[0]) for part in parts)
    if origin is Literal:
        return _choose({str(v): v for v in args}, text, f"Allowed: {', '.join(map(str, args))}.")
    if kind is bool:
        return _choose(BOOLEANS, text.lower(), "Write true or false.")
    if kind is str:
        return text
    if kind not in (int, float):
        message = f"A field of type {spell(kind)} cannot be set on the command line."
        raise TypeError(message)
    try:
        number = float(text)  # 1e4 is a fine way to write ten thousand
    except ValueError:
        number = None
    if number is None or (kind is int and not number.is_integer()):
        message = "Write a whole number." if kind is int else "Write a number."
        raise ValueError(message)
    return kind(number)


def _choose(known: Mapping[str, Any], text: str, message: str) -> Any:
    if text not in known:
        raise ValueError(message)
    return known[text]


def spell(kind: Any) -> str:
    """A type as a user reads it, such as ``"int"`` or ``"tuple[int, ...]"``."""
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _listing(config: Any) -> str:
    known = ", ".join(f"{name} ({spell(kind)})" for name, kind in fields(config).items())
    return f"Known: {known}."


class Options(NamedTuple):
    """Options of a run, as on the command line."""

    out: Path = Path("runs")  # folder of all runs
    quick: bool = False  # quick size
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1" …
    seeds: int | None = None  # how many seeds, or None for the experiment's own number
    assignments: tuple[str, ...] = ()  # key=value texts
    resume: bool = False  # continue an unfinished run
    # start anew although an unfinished run is there, or a full-size one with more units
    force: bool = False
    data_dir: Path | None = None  # where to look for data first
    silent: bool = False  # no progress bar

    @property
    def size(self) -> str:
        """``"quick"`` or ``"full"``."""
        return "quick" if self.quick else "full"

    def command(self, *names: str, verb: str = "run", resume: bool = False) -> str:
        """The command line (``fsmap run`` or ``fsmap sweep``) that means the same."""
        words = ["fsmap", verb, *names]
        words += ["--quick"] if self.quick else []
        words += [] if self.out == Path(f"{verb}s") else ["--out", str(self.out)]
        words += [] if self.device == "auto" else ["--device", self.device]
        words += [] if self.seeds is None else ["--seeds", str(self.seeds)]
        words += [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        for text in self.assignments:
            words += ["--set", text]
        words += ["--resume"] if resume else []
        return shlex.join(words)


def configure(experiment: Experiment, options: Options, *, lenient: bool = False) -> Any:
    """The config of a run; ``lenient`` leaves out settings the experiment does not have."""
    config = experiment.quick if options.quick else experiment.config
    wanted = list(options.assignments)
    if options.seeds is not None:
        if options.seeds < 1:
            message = f"--seeds must be at least 1, got {options.seeds}."
            raise InputError(message)
        wanted.append(f"seeds={options.seeds}")
    if lenient:
        known = fields(config)
        wanted = [text for text in wanted if text.partition("=")[0].strip() in known]
    return override(config, wanted)


def check_settings(experiments: Sequence[Experiment], options: Options) -> None:
    """For ``run all``: every setting must mean something to some experiment."""
    known = {name for experiment in experiments for name in fields(experiment.config)}
    for text in options.assignments:
        key = text.partition("=")[0].strip()
        if key not in known:
            message = f"--set {text}: no experiment has a field {key!r}. Known: {sorted(known)}."
            raise InputError(message)


def choose_device(experiment: Experiment, wanted: str) -> str:
    """Where to compute; ``"auto"``: a GPU for what is made for one, if there is one."""
    import torch

    if wanted == "auto":
        return "cuda" if experiment.device == "gpu" and torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        message = f"--device {wanted} cannot be used here: {reason} Use cpu, cuda or auto."
        raise InputError(message) from error
    return wanted
