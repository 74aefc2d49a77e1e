"""Rows: one measured number a line, with its circumstances, in a file that survives a kill.

A run folder holds

- ``rows.jsonl``: one :class:`Row` a line;
- ``units.jsonl``: a header (experiment, size, config), then one line per finished unit, written
  after its rows are on disk, with their number and the SHA-256 of the line and its rows.

A unit is finished if, and only if, its line stands in ``units.jsonl`` and its rows match the
checksum. A resumed run drops all other rows. JSON has no nan and no infinities, so they are
written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which every parser accepts.

Claims are computed from rows. Their verdict is one of

- ``agrees`` / ``differs`` (``holds`` is true / false): the rows decide;
- ``undecided`` (``holds`` is null): measured, but within two standard errors, or with one seed;
- ``not tested`` (``holds`` is null): there are no rows for it. ``reason`` is the command that
  would measure them.

A claim about a measured effect is made by :func:`judge`, which applies the rule of two standard
errors. A claim about an exact quantity (a theorem, a deterministic optimum) is
``Claim(text, holds, ours, paper)``. A claim without rows is ``not_tested(text, command)``.
``source`` is ``"paper"``, ``"ours"`` (the paper does not state it) or ``"check"`` (the run is sane:
no run diverged): the page counts the three apart.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Value = float | Sequence[Any]
"""A number, or a (nested) list of numbers: a curve, a histogram, an image."""

DEEPEST = 50
"""Lists and objects within each other; no file of ours comes near."""

SEAL = "sha256"
"""Entry of a record that holds its checksum."""

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Row(NamedTuple):
    """One measured value and where it comes from."""

    experiment: str  # the experiment's id, such as "fourier"
    metric: str  # what was measured, such as "test_rmse"
    value: Any  # A number, or a list of numbers for a curve
    # "ps-map", "fs-map", "l-map", or None where no method is involved
    method: str | None = None
    seed: int | None = None  # the seed, or None
    # what varies within the experiment (n_train, jitter, dataset, …)
    config: Mapping[str, Any] = MappingProxyType({})
    commit: str = ""  # the code that measured it
    torch: str = ""  # the version of torch
    device: str = ""  # where it was measured
    seconds: float = 0.0  # what the unit took, or what the experiment says this value took
    unit: Mapping[str, Any] = MappingProxyType({})  # key of the resumable unit that made it
    deviations: tuple[str, ...] = ()  # where this number's protocol departs from the paper's


class Claim(NamedTuple):
    """A statement and what the rows of this run say about it."""

    claim: str  # the statement, in words
    holds: bool | None  # what the rows say; None: undecided, or not tested
    ours: Any = None  # the number (or short text) that decides it
    paper: Any = None  # what the paper prints, or None
    effect: float | None = None  # the measured difference that decides it
    stderr: float | None = None  # standard error of the effect
    seeds: int | None = None  # how many seeds (or splits) the effect is a mean of; 0: not tested
    source: Literal["paper", "ours", "check"] = "paper"  # who states it
    reason: str = ""  # why it is undecided, or the command that would test it


AGREES, DIFFERS, UNDECIDED, NOT_TESTED = VERDICTS = ("agrees", "differs", "undecided", "not tested")


def verdict(claim: Mapping[str, Any]) -> str:
    """One of ``VERDICTS``, for a claim as ``summary.json`` holds it."""
    if claim["holds"] is None:
        return UNDECIDED if claim.get("seeds") else NOT_TESTED
    return AGREES if claim["holds"] else DIFFERS


def claim_entry(claim: Claim) -> dict[str, Any]:
    """A claim as ``summary.json`` holds it."""
    holds = None if claim.holds is None else bool(claim.holds)  # a numpy or torch bool is not JSON
    return {**claim._asdict(), "holds": holds}


def tally(claims: Iterable[Mapping[str, Any]]) -> str:
    """Verdicts in words; checks are not counted.

    Examples:
        >>> tally([{"holds": True}, {"holds": False}, {"holds": None, "seeds": 3}])
        '1 of 3 claims agree, 1 differs, 1 undecided'
    """
    counted = [c for c in claims if c.get("source") != "check"]
    found = Counter(map(verdict, counted))
    parts = [f"{found[AGREES]} of {len(counted)} claims agree"]
    words = {DIFFERS: "differs" if found[DIFFERS] == 1 else "differ"}
    parts += [f"{found[v]} {words.get(v, v)}" for v in VERDICTS[1:] if found[v]]
    return ", ".join(parts)


def judge(
    claim: str,
    effect: float,
    stderr: float,
    seeds: int,
    *,
    below: float | None = None,
    above: float | None = None,
    within: float | None = None,
    ours: Any = None,
    paper: Any = None,
    source: Literal["paper", "ours", "check"] = "paper",
) -> Claim:
    """A claim about a measured effect: decided if it is two standard errors from its bound.

    ``effect`` is the measured difference, such as the mean over seeds of L-MAP's ECE minus PS-MAP's
    (:func:`fsmap.paper.report.tables.paired`) or ours minus the paper's value. ``stderr`` is its
    standard error; with one seed it is nan, and the claim undecided. ``seeds`` counts seeds or
    splits; 0: not tested. One bound says what is claimed: the effect is ``below`` or ``above`` it,
    or its absolute value ``within`` it.

    Examples:
        >>> judge("ECE falls", -0.4, 0.1, 5, below=0).holds
        True
        >>> judge("ECE falls", -0.1, 0.1, 5, below=0).reason
        'within two standard errors'
    """
    bounds = {"below": below, "above": above, "within": within}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if len(given) != 1:
        message = f"give one of below, above and within, got {given}"
        raise TypeError(message)
    ((name, bound),) = given.items()
    lead = {"below": bound - effect, "above": effect - bound, "within": bound - abs(effect)}[name]
    shown = effect if ours is None else ours
    made = Claim(claim, None, shown, paper, effect, stderr, seeds, source)
    if seeds == 0:
        return made._replace(ours=None, effect=None, stderr=None, reason="no rows")
    if not math.isfinite(lead):
        return made._replace(holds=False)
    if math.isnan(stderr):
        return made._replace(reason="one seed: the error is not known")
    if abs(lead) <= 2 * stderr:
        return made._replace(reason="within two standard errors")
    return made._replace(holds=lead > 0)


def not_tested(
    claim: str, reason: str, paper: Any = None, source: Literal["paper", "ours"] = "paper"
) -> Claim:
    """A claim without rows; ``reason`` is the command that would measure them."""
    return Claim(claim, None, None, paper, seeds=0, source=source, reason=reason)


def plain(value: Any) -> Any:
    """Turn tensors, arrays, tuples and non-finite floats into what JSON can hold."""
    if hasattr(value, "tolist"):  # torch tensors, numpy arrays and numpy scalars
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def revive(value: Any, deep: int = DEEPEST) -> Any:
    """Floats in place of the ``"nan"``, ``"inf"`` and ``"-inf"`` of :func:`plain`."""
    if deep < 0:
        message = f"nested deeper than {DEEPEST} levels"
        raise ValueError(message)
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: revive(item, deep - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [revive(item, deep - 1) for item in value]
    return value


def encode(record: Any) -> str:
    """One line of strict JSON."""
    return json.dumps(plain(record), allow_nan=False, ensure_ascii=False)


def key_of(unit: Mapping[str, Any]) -> str:
    """The canonical spelling of a unit's key, the same before and after a trip through a file."""
    return json.dumps(plain(unit), sort_keys=True, ensure_ascii=False)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines in one write, and return once they are on disk."""
    text = "".join(line + "\n" for line in lines)
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


class Line(NamedTuple):
    """A row, and the bytes of its line."""

    row: Row
    text: bytes


class Content(NamedTuple):
    """``rows.jsonl`` and ``units.jsonl`` of a run, checked against each other."""

    header: dict[str, Any]  # what the run was asked for; empty if it is missing or damaged
    # lines of finished units whose rows are as they were written, by key
    units: dict[str, dict[str, Any]]
    lines: list[Line]  # rows of these units
    damaged: list[str]  # units that do not match their checksum
    dropped: int  # rows of no finished unit, and lines that are no rows

    @property
    def sha256(self) -> str:
        """Checksum of the rows, in any order."""
        return digest({}, sorted(line.text for line in self.lines))


def read_content(folder: Path) -> Content:
    """Read and check the rows and units of a run."""
    lines, dropped = read_rows(folder / "rows.jsonl")
    by_unit: dict[str, list[Line]] = {}
    for line in lines:
        by_unit.setdefault(key_of(line.row.unit), []).append(line)
    first, *texts = _whole_lines(folder / "units.jsonl")[0] or [b""]
    head, units, damaged = parse(first), {}, []
    for record in map(parse, texts):
        key = key_of(record["unit"]) if _is_unit(record) else "a line that cannot be read"
        mine = [line.text for line in by_unit.get(key, [])]
        if _is_unit(record) and record["rows"] == len(mine) and intact(record, mine):
            units[key] = record
        else:
            damaged.append(key)
    kept = [line for line in lines if key_of(line.row.unit) in units]
    header = unsealed(head) if _is_header(head) and intact(head) else {}
    return Content(header, units, kept, damaged, dropped + len(lines) - len(kept))


def read_rows(path: Path) -> tuple[list[Line], int]:
    """Read a ``rows.jsonl`` without a check against its units; a missing one reads as empty."""
    texts, cut = _whole_lines(path)
    lines = [Line(row, text) for text in texts if (row := _row(parse(text))) is not None]
    return lines, len(texts) - len(lines) + cut


def parse(text: str | bytes) -> Any:
    """Parse JSON from a file that may be damaged; None where it is no JSON, or nested too deep."""
    try:
        return revive(json.loads(text))
    except (ValueError, RecursionError):
        return None


def digest(record: Mapping[str, Any], lines: Iterable[bytes] = ()) -> str:
    """SHA-256 of a record and of the lines it answers for."""
    found = hashlib.sha256(encode(record).encode())
    for line in lines:
        found.update(b"\n" + line)
    return found.hexdigest()


def sealed(record: Mapping[str, Any], lines: Iterable[bytes] = ()) -> dict[str, Any]:
    """A record with the checksum of itself and of the lines it answers for."""
    return {**record, SEAL: digest(record, lines)}


def unsealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without its checksum."""
    return {key: value for key, value in record.items() if key != SEAL}


def intact(record: Mapping[str, Any], lines: Iterable[bytes] = ()) -> bool:
    """Whether a record and the lines it answers for are as they were sealed."""
    return record.get(SEAL) == digest(unsealed(record), lines)


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """Lines of a file, and whether (0 or 1) a last one without an end was left out."""
    if not path.is_file():
        return [], 0
    *whole, rest = path.read_bytes().split(b"\n")
    return whole, int(bool(rest.strip()))


def _is_header(record: Any) -> bool:
    named = isinstance(record, dict) and all(
        isinstance(record.get(key), str) for key in ("experiment", "size")
    )
    return named and isinstance(record.get("config"), dict)


def _is_unit(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and isinstance(record.get("unit"), dict)
        and isinstance(record.get("rows"), int)
        and isinstance(record.get("seconds"), int | float)
    )


def _row(record: Any) -> Row | None:
    try:
        row = Row(**{**record, "deviations": tuple(record["deviations"])})
    except (TypeError, KeyError):
        return None
    texts = (row.experiment, row.metric, row.commit, row.torch, row.device, *row.deviations)
    right = (
        all(isinstance(text, str) for text in texts)
        and isinstance(row.method, str | None)
        and isinstance(row.seed, int | None)
        and isinstance(row.seconds, int | float)
        and isinstance(row.config, dict)
        and isinstance(row.unit, dict)
        and _is_value(row.value)
    )
    return row if right else None


def _is_value(value: Any) -> bool:
    return all(map(_is_value, value)) if isinstance(value, list) else isinstance(value, int | float)


PACKAGE = Path(__file__).resolve().parents[1]


class Circumstances(NamedTuple):
    """What a row says about its origin."""

    commit: str
    torch: str
    device: str


def _git(*arguments: str, folder: Path) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def commit(package: Path = PACKAGE) -> str:
    """The commit of the code that runs (``+dirty`` if files differ), else the version."""
    # A package installed below somebody else's checkout is not part of it: it is not tracked.
    if _git("ls-files", "--error-unmatch", "errors.py", folder=package) is not None:
        head = _git("rev-parse", "--short", "HEAD", folder=package)
        if head:
            changed = _git("status", "--porcelain", "--", ".", folder=package)
            return f"{head}+dirty" if changed else head
    try:
        return f"v{metadata.version('fsmap')}"
    except metadata.PackageNotFoundError:
        return "unknown"


def circumstances(device: str) -> Circumstances:
    """Collect what every row carries."""
    import torch

    name = device
    if device.startswith("cuda"):
        name = f"{device} ({torch.cuda.get_device_name(device)})"
    return Circumstances(commit(), torch.__version__, name)
