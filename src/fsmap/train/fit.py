"""``fit``: train one model."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from fsmap.errors import DivergedError, InputError
from fsmap.functional import Functional, check_params, detached, evaluation_mode, is_pointwise
from fsmap.objective.objective import Objective
from fsmap.px import Stream
from fsmap.train import loop
from fsmap.train.checkpoint import describe, describe_model
from fsmap.types import Batch, ModelFn, Params


class TrainState(NamedTuple):
    """The result of training."""

    params: Params
    step: int  # steps taken
    best: loop.Best | None = None  # if there was a validation


def fit(
    objective: Objective,
    f: ModelFn,
    params: Params,
    data: Any,
    /,
    *,
    steps: int,
    seed: int = 0,
    **options: Unpack[loop.Options],
) -> tuple[TrainState, loop.History]:
    """Minimize ``objective.loss``: minus the log-posterior of parameters or functions, over N.

    Batches, evaluation points, ψ and dropout masks are functions of (seed, step), so a run can be
    repeated, and a resumed run takes the same steps as one that was never interrupted. The model is
    a pure function of its parameters: its buffers do not change.

    Args:
        objective: From ``ps_map``, ``fs_map``, ``l_map``.
        f: Model function, from ``functional``.
        params: Where to start; never modified.
        data: Training points: ``Batch(x, y)``, a pair, or anything with ``x`` and ``y``.
        steps: Length of the whole run.
        seed: Seed of everything random.
        **options: All optional:

            - ``optimizer``: ``fsmap.adam(lr)`` (1e-3) or ``fsmap.sgd(lr)``.
            - ``schedule``: ``fsmap.cosine()``; by default the learning rate is constant.
            - ``batch_size``: B; None is all data on every step.
            - ``replace``: draw batches with replacement.
            - ``clip``: largest norm of the gradient; None leaves it alone.
            - ``on``, ``by``: held-out data and a metric ``(outputs, y) -> number``, smaller is
              better, such as ``fsmap.metrics.nll``. ``state.best`` keeps the best parameters.
            - ``validate_every`` (100): steps between validations; the last step is always one.
            - ``callback``: called as ``callback(steps_taken, params)`` after every step; copy what
              you keep. A true answer ends training.
            - ``checkpoint``: a file to write every ``checkpoint_every`` (1,000) steps and at the
              end.
            - ``resume``: go on from ``checkpoint`` if it exists.
            - ``log_every`` (1): record every so many steps in the history, and the last one.
            - ``progress`` (True): show a progress bar.

    Returns:
        The state (``state.params``, ``state.best``) and the history of each term in nats.

    Example:
        >>> import torch, fsmap
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> f, params = fsmap.functional(torch.nn.Linear(1, 1))
        >>> objective = fsmap.ps_map(fsmap.Gaussian(0.1), fsmap.Normal(1.0), num_data=20)
        >>> state, history = fsmap.fit(objective, f, params, (x, 2 * x), steps=3, progress=False)
        >>> sorted(history.parts[-1])
        ['geometry', 'likelihood', 'prior']
    """
    settings = loop.settings_of(f, steps, options)
    check_params(params)
    train = loop.as_batch(data, params)
    given: object = objective
    if not isinstance(given, Objective):
        makers = "ps_map, fs_map or l_map of fsmap"
        raise InputError(f"the objective must come from {makers}, got {objective!r}")
    rows, size = len(train.y), settings.batch_size
    if objective.num_data != rows:
        message = (
            f"the objective was made for num_data={objective.num_data}, the data have {rows} rows: "
            f"prior and geometry weigh as for {objective.num_data}. Give num_data={rows}, unless "
            "that is meant."
        )
        warnings.warn(message, UserWarning, stacklevel=2)
    batches = loop.Batches(rows, size, seed=seed, replace=settings.replace)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    device = train.y.device
    sample = loop.sample_batch(train, size)
    loop.check_pure(f, leaves, sample.x)
    with loop.layer_noise(f, Stream(seed, 0), device):
        objective.check(f, leaves, sample)
        started = objective.started(f, leaves, Stream(seed, 0))
    config: dict[str, Any] = {}
    if settings.checkpoint is not None:
        about = {"objective": objective, "data": train, "seed": seed}
        config = {"kind": "fit", "model": describe_model(f, leaves)}
        config |= describe(about | settings.describe())
    validation = None
    if settings.by is not None:
        validation = partial(measure, f, data=loop.as_batch(settings.on, params), by=settings.by)
    optimizer = settings.optimizer.build(leaves.values())
    extra = {} if started is objective else {"r0": started.geometry.r0}  # type: ignore[attr-defined]
    training = loop.Loop(settings, leaves, optimizer, stop_if_diverged, config, validation, extra)
    noisy = not is_pointwise(f)  # computed once: it visits all submodules

    def take_step(step: int) -> Tensor:
        stream = Stream(seed, step)
        draws = objective.draw(f, leaves, stream)
        batch = loop.take(train, batches.rows(step))
        with loop.layer_noise(f, stream, device) if noisy else nullcontext():
            grads, row = loop.gradient(started, f, leaves, batch, draws)
        return loop.update(leaves, grads, row, optimizer, settings.clip)

    training.run(take_step, "fit")
    best = training.best
    if best is not None:
        kept = loop.Best(best.params, int(best.step), float(best.value))
        best = kept if kept.step > 0 else None
    final = {n: p.detach().clone() for n, p in leaves.items()}
    return TrainState(final, training.step, best), training.recorder.history()


def measure(f: ModelFn, params: Params, data: Batch, by: loop.Metric) -> Tensor:
    """A metric on held-out data, random layers off; nan if an output is not finite: [], float64."""
    eval_mode: AbstractContextManager[None] = nullcontext()
    if isinstance(f, Functional) and not f.pointwise:
        eval_mode = evaluation_mode(f.module)
    with torch.no_grad(), eval_mode:
        out = f(detached(params), data.x)
        found = torch.as_tensor(by(out, data.y) if torch.isfinite(out).all() else torch.nan)
    if found.numel() != 1:
        raise InputError(f"by must return one number, got a tensor of shape {list(found.shape)}")
    return found.detach().cpu().double().reshape(())


ADVICE = {
    "geometry": "J(theta; p_X) + eps*I is singular or overflows here: raise jitter or num_points, "
    "lower the learning rate, or see fsmap.doctor.",
    "grad_norm": "A term has no derivative here, or an infinite one: lower the learning rate, "
    "raise jitter, or move the starting point.",
}
GENERAL = "Lower the learning rate, clip the gradient (clip=1.0), or look for outliers in the data."


def stop_if_diverged(recorder: loop.Recorder, values: Tensor) -> None:
    """Raise DivergedError, with step and terms, if a number of the last flush is not finite."""
    bad = ~torch.isfinite(values)
    if not bad.any():
        return
    at = int(bad.any(1).nonzero()[0])
    names = [name for name, is_bad in zip(loop.COLUMNS, bad[at].tolist(), strict=True) if is_bad]
    terms = [name for name in names if name in loop.PARTS]
    where = f"the {', '.join(terms)} term" if terms else f"{names[0]}, but no term,"
    columns = recorder.history().columns
    finite = torch.stack([torch.isfinite(columns[name]) for name in loop.COLUMNS]).all(0)
    step = recorder.block_start + at
    rows = (finite & (columns["step"] < step)).nonzero().flatten().tolist()
    last = ", ".join(f"{name} {columns[name][rows[-1]]:.6g}" for name in loop.COLUMNS if rows)
    raise DivergedError(
        f"training diverged at step {step}: {where} is not finite; last finite values: "
        f"{last or 'none'}. {ADVICE.get((terms or names)[0], GENERAL)}"
    )
