"""Run experiments: unit by unit, each written when it is done, so that a kill loses one unit.

What happens to a folder that is there already:

- a finished run is replaced when, and only when, the new one is finished (the old one is kept in
  ``OUT/.fsmap/ID.previous``); with ``--resume`` it is left as it is, and a full-size run also
  serves who asks for the quick size;
- an unfinished run is continued with ``--resume``, dropped with ``--force``, else refused.
"""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import FsmapError, InputError, MissingDataError
from fsmap.experiments.experiment import Context, Experiment, Measured
from fsmap.experiments.options import Options, check_settings, choose_device, configure
from fsmap.experiments.publish import header_of, publish
from fsmap.experiments.registry import get, registry
from fsmap.experiments.run_folder import Place, RunFolder, locked
from fsmap.report.circumstances import Circumstances, circumstances
from fsmap.report.records import Row, key_of, plain
from fsmap.train.progress import Progress, progress

Say = Callable[[str], None]


class Outcome(NamedTuple):
    """How one experiment went.

    Attributes:
        id: The experiment.
        status: ``"finished"``, ``"kept"`` (was finished before), ``"skipped"`` or ``"failed"``.
        folder: Where its files are.
        reason: Why it was skipped or failed.
        summary: What stands in ``summary.json``; empty if it was skipped or failed.
        error: What it failed with.
    """

    id: str
    status: str
    folder: Path
    reason: str = ""
    summary: Mapping[str, Any] = {}
    error: BaseException | None = None


def run(names: Sequence[str], options: Options, say: Say = lambda _: None) -> Iterator[Outcome]:
    """Run experiments one after another.

    Args:
        names: Ids, or ``["all"]``.
        options: What was asked for.
        say: Takes notes for the user, one line each.

    Yields:
        An outcome as each one ends. With ``all``, one that lacks its data or its device is skipped,
        and a failure does not keep the others from running.
    """
    everything = list(names) == ["all"]
    experiments = list(registry().values()) if everything else [get(name) for name in names]
    if everything:
        check_settings(experiments, options)
    plans = [(e, configure(e, options, lenient=everything)) for e in experiments]
    for experiment, config in plans:
        yield _attempt(experiment, config, options, say, everything=everything)


def _attempt(
    experiment: Experiment, config: Any, options: Options, say: Say, *, everything: bool
) -> Outcome:
    folder = options.out / experiment.id
    try:
        device = choose_device(experiment, options.device)
        if everything and experiment.device == "gpu" and device == "cpu" and not options.quick:
            reason = f"needs a GPU at full size. Try: {options.command(experiment.id)} --quick"
            return Outcome(experiment.id, "skipped", folder, reason)
        return run_one(experiment, config, options, device, say)
    except MissingDataError as error:
        status = "skipped" if everything else "failed"
        return Outcome(experiment.id, status, folder, str(error), error=error)
    except FsmapError as error:
        return Outcome(experiment.id, "failed", folder, str(error), error=error)
    except Exception as error:  # a bug in one experiment must not take the others with it
        reason = "".join(traceback.format_exception(error)).rstrip()
        again = options.command(experiment.id, resume=True)
        reason += f"\nFinished units are kept. When this is mended, continue with: {again}"
        return Outcome(experiment.id, "failed", folder, reason, error=error)


def run_one(
    experiment: Experiment, config: Any, options: Options, device: str, say: Say
) -> Outcome:
    """Run one experiment to its end.

    Args:
        experiment: The experiment.
        config: Its config.
        options: What was asked for.
        device: Where to compute.
        say: Takes notes for the user.

    Returns:
        The outcome.

    Raises:
        InputError: If the config asks for nothing, or the folder holds something else.
    """
    header = header_of(experiment, config, options.size)
    units = experiment.units(config)
    if not units:
        message = f"{experiment.id} has nothing to do with this config: {header['config']}."
        raise InputError(message)
    place = Place.of(options.out, experiment.id)
    with locked(place):
        place.settle()
        folder = _open(place, header, options, say)
        if folder is None:
            return Outcome(experiment.id, "kept", place.final.path, "finished before")
        _measure(experiment, config, units, folder, options, device)
        command = options.command(experiment.id)
        summary = publish(experiment, folder, header, {"command": command})
        return Outcome(experiment.id, "finished", place.settle().path, summary=summary)


def _open(place: Place, header: Mapping[str, Any], options: Options, say: Say) -> RunFolder | None:
    """The folder to write to, ready for the next unit; None if there is nothing left to do."""
    pending = place.pending()
    if options.resume and not options.force:
        found = pending or (place.final if place.final.finished else None)
        if found is not None:
            if found.finished and found.header()["size"] == "full" and options.quick:
                return None  # who asks for the quick size is served by the full one
            _check_same(found, header)
            if found.finished:
                return None
            dropped = found.repair()
            note = f", {dropped} rows of an unfinished unit dropped" if dropped else ""
            say(f"{header['experiment']}: resuming, {len(found.done())} units are done{note}")
            return found
    if pending is not None and pending.done() and not options.force:
        message = (
            f"{pending.path} holds an unfinished run ({len(pending.done())} units done). "
            "Continue it with --resume, or start anew with --force."
        )
        raise InputError(message)
    if place.final.foreign:
        message = f"{place.final.path} exists and holds no run of fsmap. Choose another --out."
        raise InputError(message)
    for run in (place.fresh, place.final):
        if not run.finished:
            shutil.rmtree(run.path, ignore_errors=True)
    folder = place.fresh if place.final.finished else place.final
    folder.begin(header)
    return folder


def _check_same(found: RunFolder, header: Mapping[str, Any]) -> None:
    there = plain(found.header())
    if there == dict(header):
        return
    before, now = ({"size": h["size"], **(h["config"] or {})} for h in (there, header))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    changed = ", ".join(f"{key}: {before.get(key)} there, {now.get(key)} now" for key in keys)
    message = (
        f"{found.path} holds a run with another config ({changed}). Resume it with its own "
        "settings, choose another --out, or start anew with --force."
    )
    raise InputError(message)


def _measure(
    experiment: Experiment,
    config: Any,
    units: Sequence[dict[str, Any]],
    folder: RunFolder,
    options: Options,
    device: str,
) -> None:
    import torch

    around = circumstances(device)
    done = folder.done()
    todo = [unit for unit in units if key_of(unit) not in done]
    if not todo:
        return
    with progress(len(todo), experiment.id, silent=options.silent) as bar:
        for index, unit in enumerate(todo):
            context = Context(
                device=torch.device(device),
                out=folder.path,
                advance=_advance(bar, index),
                size=options.size,
                data_dir=options.data_dir,
            )
            bar.update(text=" ".join(f"{key}={value}" for key, value in unit.items()))
            start = time.perf_counter()
            measured = list(experiment.run(config, dict(unit), context))
            seconds = time.perf_counter() - start
            folder.add(unit, list(_rows(experiment, unit, measured, around, seconds)), seconds)
            bar.update(index + 1)


def _advance(bar: Progress, index: int) -> Callable[[float | str], None]:
    def advance(news: float | str) -> None:
        if isinstance(news, str):
            bar.update(text=news)
        else:
            bar.update(index + min(max(float(news), 0.0), 1.0))

    return advance


def _rows(
    experiment: Experiment,
    unit: Mapping[str, Any],
    measured: Iterable[Measured],
    around: Circumstances,
    seconds: float,
) -> Iterator[Row]:
    for item in measured:
        yield Row(
            experiment=experiment.id,
            metric=item.metric,
            value=plain(item.value),
            method=item.method,
            seed=item.seed,
            config=dict(item.config),
            **around._asdict(),
            seconds=round(seconds if item.seconds is None else item.seconds, 4),
            unit=unit,
            deviations=tuple(item.deviations),
        )
