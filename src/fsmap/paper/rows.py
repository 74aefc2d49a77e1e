"""Rows: one measured number a line, with its configuration, in a folder that is valid after a kill.

A run folder holds

- ``rows.jsonl``: one :class:`Row` a line;
- ``units.jsonl``: a header (experiment, size, config), then one line per finished unit, written
  after its rows are on disk, with their number and the SHA-256 of the line and its rows;
- ``summary.json``: claims and table, computed from the rows.

A unit is finished if, and only if, its line stands in ``units.jsonl`` and its rows match the
checksum. A resumed run drops all other rows. JSON has no nan and no infinities, so they are
written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which every parser accepts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fsmap.files import exclusive, plain, remove_partial, revive, write_whole

Value = float | Sequence[Any]  # a number, or a (nested) list of numbers: a curve, an image
SEAL = "sha256"  # entry of a record that holds its checksum
DAMAGED = "rows.damaged.jsonl"  # a copy of rows that do not match their checksums
Source = Literal["paper", "ours", "check"]  # who states a claim; check: a test of the run itself


class Row(NamedTuple):
    """One measured value and where it comes from."""

    experiment: str  # the experiment's id, such as "fourier"
    metric: str  # what was measured, such as "test_rmse"
    value: Any  # a number, or a list of numbers for a curve
    method: str | None = None  # "ps-map", "fs-map", "l-map", or None
    seed: int | None = None
    config: Mapping[str, Any] = MappingProxyType({})  # what varies (n_train, jitter, dataset, …)
    commit: str = ""  # the code that measured it
    torch: str = ""  # the version of torch
    device: str = ""  # where it was measured
    seconds: float = 0.0  # what the unit took
    unit: Mapping[str, Any] = MappingProxyType({})  # key of the resumable unit that made it
    deviations: tuple[str, ...] = ()  # where this number's protocol departs from the paper's


Rows = Sequence[Row]
Unit = dict[str, Any]  # key of a part that a killed run does not repeat: JSON values


def origins(rows: Rows, name: str) -> str:
    """The devices, commits or versions of torch of some rows."""
    return ", ".join(dict.fromkeys(filter(None, (getattr(row, name) for row in rows))))


class Claim(NamedTuple):
    """A statement, and its verdict by the rows of this run."""

    claim: str  # the statement, in words
    holds: bool | None  # what the rows say; None: undecided, or not tested
    ours: Any = None  # the number (or short text) that decides it
    paper: Any = None  # what the paper prints, or None
    effect: float | None = None  # the measured difference that decides it
    stderr: float | None = None  # standard error of the effect
    seeds: int | None = None  # how many seeds (or splits) the effect is a mean of; 0: not tested
    source: Source = "paper"
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


def judged(claims: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Claims that the verdict on an item counts: the paper's; ours if there is none."""
    stated = [claim for claim in claims if claim["source"] != "check"]
    return [claim for claim in stated if claim["source"] == "paper"] or stated


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
    ours: Any = None,
    paper: Any = None,
    source: Source = "paper",
    **bound: float,
) -> Claim:
    """A claim about a measured effect: decided if its bound is outside the 95 % interval.

    The interval is that of Student's t: :func:`t95` standard errors on either side.
    ``effect`` is a difference, such as the mean over seeds of L-MAP's ECE minus PS-MAP's, or ours
    minus the paper's value; with one seed its error is nan, and the claim undecided. Without seeds
    (or splits) it is not tested. One bound says what is claimed: the effect is ``below`` or
    ``above`` it, or its absolute value ``within`` it.

    Examples:
        >>> judge("ECE falls", -0.4, 0.1, 5, below=0).holds
        True
        >>> judge("ECE falls", -0.1, 0.1, 5, below=0).reason
        'the bound is within the 95 % interval'
    """
    ahead = margin(effect, **bound)
    ours = effect if ours is None else ours
    made = Claim(claim, None, ours, paper, effect, stderr, seeds, source)
    if seeds == 0:
        return made._replace(ours=None, effect=None, stderr=None, reason="no rows")
    if not ahead > -math.inf:  # or nan
        return made._replace(holds=False)
    if math.isnan(stderr):
        return made._replace(reason="one seed: " * (seeds == 1) + "the error is not known")
    if abs(ahead) <= t95(seeds) * stderr:
        return made._replace(reason="the bound is within the 95 % interval")
    return made._replace(holds=ahead > 0)


def t95(n: int) -> float:
    """Half the 95 % interval of a mean of ``n`` values, in standard errors (Student's t)."""
    df = n - 1
    table = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return table[df] if df < len(table) else 1.96 + 2.372 / df + 2.823 / df**2


def margin(effect: float, **bound: float) -> float:
    """Distance of an effect from its bound on the claimed side; negative on the other side."""
    match [*bound.items()]:
        case [("below", most)]:
            return most - effect
        case [("above", least)]:
            return effect - least
        case [("within", most)]:
            return most - abs(effect)
    raise TypeError(f"give one of below, above and within, got {', '.join(bound) or 'none'}")


def not_tested(claim: str, reason: str, paper: Any = None, source: Source = "paper") -> Claim:
    """A claim without rows; ``reason`` is the command that would measure them."""
    return Claim(claim, None, None, paper, seeds=0, source=source, reason=reason)


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

    header: dict[str, Any]  # experiment, size and config; empty if missing or damaged
    units: dict[str, dict[str, Any]]  # lines of finished units with intact rows, by key
    lines: list[Line]  # rows of these units
    damaged: list[str]  # units that do not match their checksum
    dropped: int  # rows of no finished unit, and lines that are no rows

    @property
    def rows(self) -> list[Row]:
        """Rows of finished units."""
        return [line.row for line in self.lines]


def read_rows(path: Path) -> tuple[list[Line], int]:
    """Read a ``rows.jsonl`` without a check against its units; a missing one reads as empty."""
    (texts, cut), lines = _whole_lines(path), []
    for text in texts:
        with contextlib.suppress(TypeError):  # no row
            row = Row(**parse(text))
            lines.append(Line(row._replace(deviations=tuple(row.deviations)), text))
    return lines, len(texts) - len(lines) + cut


def parse(text: bytes) -> dict[str, Any]:
    """Parse a JSON object from a file that may be damaged; empty where there is none."""
    try:
        found = revive(json.loads(text))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def sealed(record: Mapping[str, Any], lines: Iterable[bytes] = ()) -> dict[str, Any]:
    """A record with the SHA-256 of itself and of its lines."""
    about = {key: value for key, value in record.items() if key != SEAL}
    text = b"\n".join([encode(about).encode(), *lines])
    return {**about, SEAL: hashlib.sha256(text).hexdigest()}


def intact(record: Mapping[str, Any], lines: Iterable[bytes] = ()) -> bool:
    """Whether the checksum of a record and its lines is right."""
    return bool(record.get(SEAL) == sealed(record, lines)[SEAL])


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """Lines of a file, and whether (0 or 1) a last one without an end was left out."""
    if not path.is_file():
        return [], 0
    *whole, rest = path.read_bytes().split(b"\n")
    return whole, int(bool(rest.strip()))


class RunFolder:
    """Rows and units of one run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows_file = path / "rows.jsonl"
        self.units_file = path / "units.jsonl"
        self.summary_file = path / "summary.json"
        self.files = (self.rows_file, self.units_file, self.summary_file)
        self.beside = path.absolute().parent / ".fsmap" / path.name

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes out of this folder."""
        return exclusive(Path(f"{self.beside}.lock"), self.path)

    @property
    def finished(self) -> bool:
        """Whether there is a summary, of these rows or of fewer."""
        return self.summary_file.exists()

    def state_of(self, content: Content) -> str:
        """``"empty"``, ``"damaged"`` (a checksum), ``"unfinished"`` or ``"complete"``."""
        if not any(file.exists() for file in self.files):
            return "empty"
        if not content.header or content.damaged:
            return "damaged"
        whole = self.finished and content.header.get("units", 0) <= len(content.units)
        return "complete" if whole else "unfinished"

    @property
    def foreign(self) -> bool:
        """Whether something else is here; hidden files, which a kill may leave, do not count."""
        if any(file.exists() for file in self.files):
            return False
        if not self.path.is_dir():
            return self.path.exists()
        return any(not file.name.startswith(".") for file in self.path.iterdir())

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start an empty run. The header is the first file: a folder with it can be resumed."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_units(header, [])

    def content(self) -> Content:
        """Rows and units, checked against each other."""
        lines, dropped = read_rows(self.rows_file)
        by_unit: dict[str, list[bytes]] = {}
        for line in lines:
            by_unit.setdefault(key_of(line.row.unit), []).append(line.text)
        first, *texts = _whole_lines(self.units_file)[0] or [b""]
        head, units, damaged = parse(first), {}, []
        for record in map(parse, texts):
            key = key_of(record["unit"]) if "unit" in record else "a line that cannot be read"
            if "unit" in record and intact(record, by_unit.get(key, [])):
                units[key] = record
            else:
                damaged.append(key)
        kept = [line for line in lines if key_of(line.row.unit) in units]
        header = head if "config" in head and intact(head) else {}
        return Content(header, units, kept, damaged, dropped + len(lines) - len(kept))

    def summarized(self, summary: Mapping[str, Any]) -> bool:
        """Whether ``summary.json`` has these entries."""
        found = parse(self.summary_file.read_bytes()) if self.summary_file.is_file() else {}
        return all(encode(found.get(key)) == encode(value) for key, value in summary.items())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        text = json.dumps(plain(summary), indent=1, allow_nan=False, ensure_ascii=False)
        write_whole(self.summary_file, text + "\n")

    def tidy(
        self, units: Sequence[Mapping[str, Any]], header: Mapping[str, Any] | None = None
    ) -> Content:
        """Keep intact finished units only, in the order of ``units``; those not in it are first."""
        for file in self.files:
            remove_partial(file)
        content = self.content()
        lost = content.damaged or (content.dropped and self.finished)
        if lost and self.rows_file.exists():
            write_whole(self.path / DAMAGED, self.rows_file.read_bytes())
        place = {key_of(unit): number for number, unit in enumerate(units)}
        keys = sorted(content.units, key=lambda key: place.get(key, -1))
        order = {key: number for number, key in enumerate(keys)}
        lines = sorted(content.lines, key=lambda line: order[key_of(line.row.unit)])
        self._write_units(header or content.header, [content.units[key] for key in keys])
        write_whole(self.rows_file, b"".join(line.text + b"\n" for line in lines))
        return content

    def add(self, unit: Mapping[str, Any], rows: Sequence[Row], seconds: float) -> None:
        """Write a finished unit: its rows, then its line in ``units.jsonl``."""
        lines = [encode(row._asdict()) for row in rows]
        append_lines(self.rows_file, lines)
        about = {"unit": unit, "rows": len(rows), "seconds": seconds}
        append_lines(self.units_file, [encode(sealed(about, [line.encode() for line in lines]))])

    def clear(self) -> None:
        """Move a finished run aside, remove an unfinished one; atomic, by one rename."""
        aside = Path(f"{self.beside}.{'previous' if self.finished else 'dropped'}")
        if self.path.exists():
            shutil.rmtree(aside, ignore_errors=True)
            self.path.rename(aside)
        shutil.rmtree(f"{self.beside}.dropped", ignore_errors=True)

    def _write_units(self, header: Mapping[str, Any], units: Iterable[Mapping[str, Any]]) -> None:
        lines = [sealed(plain(header)), *units]
        write_whole(self.units_file, "".join(encode(line) + "\n" for line in lines))
