"""What ``fsmap run`` was asked for, and what that means for one experiment."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import InputError
from fsmap.paper.experiment import Experiment
from fsmap.paper.overrides import fields, override


class Options(NamedTuple):
    """Options of a run, as on the command line.

    Attributes:
        out: Folder of all runs.
        quick: Quick size.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"`` …
        seeds: How many seeds, or None for the experiment's own number.
        assignments: ``key=value`` texts.
        resume: Continue an unfinished run.
        force: Start anew although an unfinished run is there, or a full-size one with more units.
        data_dir: Where to look for data first.
        silent: No progress bar.
    """

    out: Path = Path("runs")
    quick: bool = False
    device: str = "auto"
    seeds: int | None = None
    assignments: tuple[str, ...] = ()
    resume: bool = False
    force: bool = False
    data_dir: Path | None = None
    silent: bool = False

    @property
    def size(self) -> str:
        """``"quick"`` or ``"full"``."""
        return "quick" if self.quick else "full"

    def command(self, *names: str, resume: bool = False) -> str:
        """The command line that means the same.

        Args:
            *names: Ids of experiments.
            resume: Whether it continues a run.

        Returns:
            Text for a shell.
        """
        words = ["fsmap", "run", *names]
        words += ["--quick"] if self.quick else []
        words += [] if self.out == Path("runs") else ["--out", str(self.out)]
        words += [] if self.device == "auto" else ["--device", self.device]
        words += [] if self.seeds is None else ["--seeds", str(self.seeds)]
        words += [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        for text in self.assignments:
            words += ["--set", text]
        words += ["--resume"] if resume else []
        return shlex.join(words)


def configure(experiment: Experiment, options: Options, *, lenient: bool = False) -> Any:
    """The config of a run.

    Args:
        experiment: The experiment.
        options: What was asked for.
        lenient: Leave out settings the experiment does not have (``run all``).

    Returns:
        The experiment's config, full or quick, with changes.

    Raises:
        InputError: If a setting is unknown or has the wrong type.
    """
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
    """For ``run all``: every setting must mean something to some experiment.

    Args:
        experiments: All that will run.
        options: What was asked for.

    Raises:
        InputError: If no experiment has such a field.
    """
    known = {name for experiment in experiments for name in fields(experiment.config)}
    for text in options.assignments:
        key = text.partition("=")[0].strip()
        if key not in known:
            message = f"--set {text}: no experiment has a field {key!r}. Known: {sorted(known)}."
            raise InputError(message)


def choose_device(experiment: Experiment, wanted: str) -> str:
    """Where to compute.

    Args:
        experiment: Its ``device`` says what it is made for.
        wanted: ``"auto"``: a GPU for what is made for one, if there is one; else what is named.

    Returns:
        A name torch understands.

    Raises:
        InputError: If torch does not have that device.
    """
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
