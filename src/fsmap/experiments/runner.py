"""Run experiments: unit by unit, each written when it is done, so that a kill loses one unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from fsmap.experiments.jobs import Job, Outcome, Plan, Say, begin, failure
from fsmap.experiments.measure import Task, measure
from fsmap.experiments.options import Options, check_settings, configure
from fsmap.experiments.registry import get, registry
from fsmap.progress import Progress, progress


class Pool(Protocol):
    """Calls a function with many items, somewhere: :class:`fsmap.integrations.ray.RayPool`."""

    def map(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        num_gpus: Callable[[Any], float],
        name: Callable[[Any], str],
    ) -> Iterator[tuple[int, Any, BaseException | None, int]]:
        """Place of the item, value, error and number of attempts, as each one ends."""


def plan(names: Sequence[str], options: Options) -> list[Plan]:
    """What is to be run.

    Args:
        names: Ids, or ``["all"]``.
        options: What was asked for.

    Returns:
        A plan for each experiment.
    """
    everything = list(names) == ["all"]
    experiments = list(registry().values()) if everything else [get(name) for name in names]
    if everything:
        check_settings(experiments, options)
    return [
        Plan(e, configure(e, options, lenient=everything), options, everything) for e in experiments
    ]


def run(
    names: Sequence[str], options: Options, say: Say = lambda _: None, pool: Pool | None = None
) -> Iterator[Outcome]:
    """Run experiments: one after another, or all their units at once on a pool.

    Args:
        names: Ids, or ``["all"]``.
        options: What was asked for.
        say: Takes notes for the user, one line each.
        pool: Where to measure; None: here.

    Returns:
        An outcome as each one ends. With ``all``, one that lacks its data or its device is skipped,
        and a failure does not keep the others from running.
    """
    return run_plans(plan(names, options), say, pool)


def run_plans(plans: Sequence[Plan], say: Say, pool: Pool | None = None) -> Iterator[Outcome]:
    """As :func:`run`, for plans."""
    if pool is None:
        return (attempt(one, say) for one in plans)
    return _pooled(plans, say, pool)


def attempt(plan: Plan, say: Say) -> Outcome:
    """Run one experiment; whatever it fails with becomes an outcome.

    Args:
        plan: The experiment.
        say: Takes notes for the user.

    Returns:
        The outcome.
    """
    with ExitStack() as stack:
        try:
            job = begin(plan, say, stack)
            if isinstance(job, Outcome):
                return job
            _measure(job)
            return job.finish()
        except Exception as error:  # a bug in one experiment must not take the others with it
            return failure(plan, error)


def _pooled(plans: Sequence[Plan], say: Say, pool: Pool) -> Iterator[Outcome]:
    """All units of all runs at once; this process writes each as it ends."""
    with ExitStack() as stack:
        runs: list[_Run] = []
        for one in plans:
            try:
                job = begin(one, say, stack, remote=True)
            except Exception as error:
                job = failure(one, error)
            if isinstance(job, Outcome):
                yield job
            else:
                runs.append(_Run(job))
        yield from (run.outcome() for run in runs if run.complete)
        yield from _collect([run for run in runs if not run.complete], pool)


def _collect(runs: Sequence[_Run], pool: Pool) -> Iterator[Outcome]:
    owners = [(run, task.anywhere()) for run in runs for task in run.job.tasks]
    if not owners:
        return
    tasks = [task for _, task in owners]
    silent = runs[0].job.plan.options.silent
    with progress(len(tasks), "units", silent=silent) as bar:
        for index, result, error, _ in pool.map(measure, tasks, num_gpus=_num_gpus, name=str):
            run, task = owners[index]
            run.take(task, result, error)
            bar.advance()
            if run.complete:
                yield run.outcome()


class _Run:
    """A job on a pool: what has come back so far."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = 0
        self.errors: dict[str, Exception] = {}

    @property
    def complete(self) -> bool:
        return self.done == len(self.job.tasks)

    def take(self, task: Task, result: Any, error: BaseException | None) -> None:
        self.done += 1
        try:
            if error is not None:
                raise error
            self.job.add(task, result)
        except Exception as failed:
            self.errors[str(task)] = failed

    def outcome(self) -> Outcome:
        if not self.errors:
            try:
                return self.job.finish()
            except Exception as error:
                return failure(self.job.plan, error)
        outcome = failure(self.job.plan, next(iter(self.errors.values())))
        if outcome.status == "skipped":
            return outcome
        which = "; ".join(self.errors)
        counted = f"{len(self.errors)} of {len(self.job.tasks)} units failed ({which})"
        return outcome._replace(reason=f"{counted}. The first: {outcome.reason}")


def _num_gpus(task: Task) -> float:
    """One for what is made for a GPU, unless another device was asked for."""
    wanted = task.options.device
    return float(
        wanted.startswith("cuda") or (task.experiment.device == "gpu" and wanted == "auto")
    )


def _measure(job: Job) -> None:
    if not job.tasks:
        return
    name, silent = job.plan.experiment.id, job.plan.options.silent
    with progress(len(job.tasks), name, silent=silent) as bar:
        for index, task in enumerate(job.tasks):
            bar.update(text=" ".join(f"{key}={value}" for key, value in task.unit.items()))
            job.add(task, measure(task, _advance(bar, index)))
            bar.update(index + 1)


def _advance(bar: Progress, index: int) -> Callable[[float | str], None]:
    def advance(news: float | str) -> None:
        if isinstance(news, str):
            bar.update(text=news)
        else:
            bar.update(index + min(max(float(news), 0.0), 1.0))

    return advance
