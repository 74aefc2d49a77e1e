"""Rows → table, claims, pictures, slider and ``summary.json``. Trains nothing."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsmap.errors import CheckpointError, InputError
from fsmap.experiments.experiment import Experiment
from fsmap.experiments.run_folder import RunFolder
from fsmap.files import write_whole
from fsmap.report import figures
from fsmap.report.circumstances import machine
from fsmap.report.interactive import Interactive
from fsmap.report.records import Row, encode, key_of, plain
from fsmap.report.summary import COVERS, write_summary

MEASURED = ("seconds", "machine", "date", "command")
"""Entries of ``summary.json`` that belong to the measuring, and stay when a run is drawn again."""


def publish(
    experiment: Experiment, run: RunFolder, header: Mapping[str, Any], keep: Mapping[str, Any]
) -> dict[str, Any]:
    """Draw and judge a run whose rows are complete. ``summary.json`` comes last: it says finished.

    Args:
        experiment: The experiment.
        run: Its folder.
        header: Size and config of the run.
        keep: Entries that are known already, such as the ``command`` that repeats the run.

    Returns:
        What stands in ``summary.json``.
    """
    rows = run.rows()
    missing = [] if COVERS in keep else _missing(experiment, run, header["config"])
    with figures.style():
        pictures = experiment.draw(rows)
        slider = experiment.interactive(rows)
        for name, figure in pictures.items():
            figures.save(figure, run.path, name)
        _save_slider(slider, run)
    summary = {
        **_contract(experiment, run, rows, header["size"]),
        "label": experiment.label,
        "title": experiment.title,
        "see": experiment.see,
        "group": experiment.group,
        "config": header["config"],
        "torch": _joined(row.torch for row in rows),
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": len(rows),
        "deviations": [
            *missing,
            *dict.fromkeys(text for row in rows for text in row.deviations),
        ],
        "figures": list(pictures),
        **keep,
    }
    return write_summary(run.path, summary)


def redraw(experiment: Experiment, run: RunFolder) -> dict[str, Any]:
    """Draw and judge the rows of a finished run again, with the code of today.

    Args:
        experiment: The experiment.
        run: The folder of a finished run.

    Returns:
        What stands in ``summary.json`` now.

    Raises:
        CheckpointError: If no rows of finished units are there, or they cannot be drawn.
    """
    if not run.rows():
        message = (
            f"{run.path} has no rows of finished units, so that there is nothing to draw. Restore "
            f"{run.rows_file.name} and {run.units_file.name}, or run the experiment again."
        )
        raise CheckpointError(message)
    old, units = run.summary(), len(run.done())
    keep = {key: old[key] for key in MEASURED if key in old}
    if covers := old.get(COVERS):
        keep.pop("seconds", None)  # units that were added since took some, too
        if units < covers["of"]:
            keep[COVERS] = {**covers, "units": units}
    try:
        return publish(experiment, run, run.header(), keep)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"the rows of {run.path} cannot be drawn ({error!r}); --debug shows where."
        raise CheckpointError(message) from error


def ask_for_more(run: RunFolder, units: Iterable[Mapping[str, Any]]) -> None:
    """Say in a summary how many units it covers, until :func:`publish` replaces it.

    Args:
        run: The folder of a finished run.
        units: Keys of what it is asked for now; what is done already counts as well.

    Raises:
        CheckpointError: If the folder does not say which units it has.
    """
    old, done = run.summary(), run.done()
    if not done:
        message = (
            f"{run.units_file} is missing or empty, so that nothing can be added to {run.path}. "
            "Choose another --out, or start anew without --resume."
        )
        raise CheckpointError(message)
    here = old[COVERS]["units"] if old.get(COVERS) else len(done)
    covers = {"units": here, "of": len({*done, *map(key_of, units)})}
    write_summary(run.path, {**old, COVERS: covers})


def _contract(
    experiment: Experiment, run: RunFolder, rows: Sequence[Row], size: str
) -> dict[str, Any]:
    claims = [claim._asdict() | {"holds": bool(claim.holds)} for claim in experiment.claims(rows)]
    return {
        "experiment": experiment.id,
        "size": size,
        "protocol": experiment.protocol,
        "seconds": round(sum(run.done().values()), 3),
        "device": _joined(row.device for row in rows),
        "commit": _joined(row.commit for row in rows),
        "claims": claims,
        "table": experiment.table(rows),
    }


def _missing(experiment: Experiment, run: RunFolder, config: Mapping[str, Any]) -> list[str]:
    """That units are missing, as in results that were put together from several runs."""
    known = {field.name for field in dataclasses.fields(experiment.config)}
    asked = {name: _frozen(value) for name, value in config.items() if name in known}
    try:
        units = experiment.units(dataclasses.replace(experiment.config, **asked))
    except InputError:  # a config that was allowed once
        return []
    done = run.done()
    here = sum(key_of(unit) in done for unit in units)
    return (
        [f"{here} of {len(units)} units of this config are here"] if 0 < here < len(units) else []
    )


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _save_slider(slider: Interactive | None, run: RunFolder) -> None:
    target = run.path / "interactive.json"
    if slider is None:
        target.unlink(missing_ok=True)
        return
    described = slider.describe()
    for frame, shown in zip(slider.frames, described["frames"], strict=True):
        if frame.figure is not None:
            shown["svg"] = figures.to_svg(frame.figure)
    write_whole(target, encode(described) + "\n")


def _joined(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value))


def header_of(experiment: Experiment, config: Any, size: str) -> dict[str, Any]:
    """What must agree for a run to be resumed.

    Args:
        experiment: The experiment.
        config: Its config.
        size: ``"quick"`` or ``"full"``.

    Returns:
        Experiment, size and config, as JSON holds them.
    """
    config = plain(dataclasses.asdict(config))
    return {"experiment": experiment.id, "size": size, "config": config}
