"""R(θ) of ``eq:lmap-loss`` as one pure function, and the live module that it is measured on.

:func:`evaluate` is the pure function: (params, buffers, x, drawn) → (output, R, buffers). It holds
no random draw, no counter and no check that looks at values, so that it can be differentiated,
compiled whole and captured. :class:`Regularizer` draws, counts steps, compiles, and calls it for
:class:`fsmap.LMAP` and :class:`fsmap.LaplacianPenalty`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsmap.errors import FallbackWarning, ForwardModeError, IgnoredProbesWarning, InputError
from fsmap.functional import (
    Functional,
    State,
    Wrapped,
    call_module,
    check_points,
    concat_points,
    is_random,
    num_points,
    number,
    take_apart,
)
from fsmap.linalg.estimators import Central, draws_normal
from fsmap.linalg.estimators import evaluate as evaluate_trace
from fsmap.linalg.jacobian import Site
from fsmap.linalg.metric import Metric, Weights
from fsmap.lmap import batchnorm as bn
from fsmap.lmap.compiling import Compiled, as_written, uncompiled
from fsmap.lmap.options import Options
from fsmap.lmap.selection import Outputs, SomeOutputs, cut, survey, trainable
from fsmap.lmap.sharding import refuse_sharded
from fsmap.lmap.steps import Steps
from fsmap.px import Stream, sample
from fsmap.types import Inputs, Params

Buffers = dict[str, Tensor]
Noise = Callable[[], AbstractContextManager[Any]]

NO_EFFECT = (
    "R is exactly 0: the output does not change with the parameters that R is about. Either all "
    "its weights are zero, or a wrapper around or inside the model (FSDP, offloading, "
    "quantization) replaces the parameters that it is given."
)


LOOK_EVERY = 100
"""Steps between looks at whether evaluation points on a GPU are finite: each waits for it."""


class Drawn(NamedTuple):
    """Everything random that one evaluation of R consumes: tensors only."""

    points: Inputs  # [S, ...]
    probes: Tensor | None  # ψ [R, P] over all trainable parameters, or cotangents [R, Q]
    rows: Tensor | None = None  # [k]  sampled outputs


class Evaluation(NamedTuple):
    """What one step gets."""

    out: Tensor | None  # [B, ...]  None without training points
    R: Tensor  # []  ``every`` times R
    buffers: Buffers  # after the pass of the training points
    parts: tuple[Tensor, ...] = ()  # tensors of the output, if it is an object: of all points


def evaluate(
    f: Functional,
    params: Params,
    buffers: Buffers,
    x: Inputs | None,
    drawn: Drawn,
    options: Options,
    outputs: Outputs | None = None,
    noise: Noise = nullcontext,
) -> Evaluation:
    """The output at training points, R, and the buffers that training leaves.

    Args:
        f: The model as a function.
        params: The parameters that R is about; others are the module's own.
        buffers: Running statistics.
        x: Training points; None if only R is wanted.
        drawn: Evaluation points and probes.
        options: How R is measured.
        outputs: What makes the output, if a sample of outputs was drawn.
        noise: Context in which random layers of a separate evaluation pass draw.

    Returns:
        Tensors; the module is unchanged.
    """
    if options.batchnorm == "joint" and x is not None:
        size = num_points(x)
        both = concat_points(x, drawn.points)
        metric = options.metric
        if drawn.rows is not None:
            assert outputs is not None
            assert metric is None or isinstance(metric, Weights)
            metric = SomeOutputs(drawn.rows, outputs.size, metric)
        value, whole, state = _laplacian(f, params, buffers, both, drawn, options, metric)
        return Evaluation(whole[:size], value, state.buffers, state.parts)
    frozen = options.batchnorm == "frozen"
    out: Tensor | None = None
    recorder = bn.Recorder()
    parts: tuple[Tensor, ...] = ()
    if x is not None:
        recording = frozen and any(m.training for m in bn.unfrozen(f.module))
        with recorder.mode() if recording else nullcontext():
            out, state = f.with_state(params, x, buffers)
        buffers, parts = state.buffers, state.parts
    share = 1.0
    if drawn.rows is not None:
        assert outputs is not None
        f, share = cut(f, drawn.rows, outputs.head), outputs.size / len(drawn.rows)
    if frozen:
        f = bn.Deployed(f, None if x is None else recorder.changes)
    with noise():
        if isinstance(f, bn.Deployed) and (
            options.estimator.reverse_mode or torch.compiler.is_compiling()
        ):
            f.settle(params, drawn.points, buffers)
        value, _, _ = _laplacian(f, params, buffers, drawn.points, drawn, options, options.metric)
    return Evaluation(out, share * value, buffers, parts)


def _laplacian(
    f: Functional,
    params: Params,
    buffers: Buffers,
    x: Inputs,
    drawn: Drawn,
    options: Options,
    metric: Metric | Tensor | None,
) -> tuple[Tensor, Tensor, State]:
    """R at the points (times ``every``), and the output and state of an unperturbed pass."""
    at = _At(f, buffers)
    probes: Any = drawn.probes
    if options.estimator.parameter_probes and probes is not None:
        probes = _shaped(probes, f.module, params)
    found = evaluate_trace(options.estimator, Site(at, params, x, metric), probes)
    out, state = found.out, found.state
    if out is None or state is None:
        out, state = at.with_state(params, x)
    return options.every * found.values.mean(), out, state


class _At(Wrapped):
    """A model function at given buffers."""

    def __init__(self, f: Functional, buffers: Buffers) -> None:
        super().__init__(f)
        self._buffers = buffers

    def with_state(
        self, params: Params, x: Inputs, buffers: Buffers | None = None
    ) -> tuple[Tensor, State]:
        return self.inner.with_state(params, x, self._buffers if buffers is None else buffers)


def _shaped(flat: Tensor, module: nn.Module, params: Params) -> Params:
    """ψ as one vector cut into ``{name: [R, ...]}``, in the memory layout of each parameter."""
    found: Params = {}
    start = 0
    total = sum(p.numel() for p in params.values())
    every = params if total == flat.shape[1] else trainable(module)
    for name, p in every.items():
        if name in params:
            piece = flat[:, start : start + p.numel()]
            if p.is_contiguous():
                piece = piece.reshape(len(flat), *p.shape)
            else:  # channels last: the same order in memory, so that no pass has to reorder it
                order = sorted(range(p.ndim), key=p.stride, reverse=True)
                shape = [p.shape[d] for d in order]
                back = [0, *(1 + order.index(d) for d in range(p.ndim))]
                piece = piece.reshape(len(flat), *shape).permute(back)
            found[name] = piece.to(device=p.device, dtype=p.dtype)
        start += p.numel()
    return found


def _in_memory_order(drawn: Tensor, p: Tensor) -> Tensor:
    """Draws ``[R, ...]`` of a parameter as ``[R, n]``: the inverse of :func:`_shaped`."""
    order = sorted(range(p.ndim), key=p.stride, reverse=True)
    moved = drawn if p.is_contiguous() else drawn.permute(0, *(1 + d for d in order))
    return moved.reshape(len(drawn), -1).float()


class Regularizer:
    """R(θ) of a live module: draws, steps, fallback and compilation around :func:`evaluate`."""

    def __init__(self, module: nn.Module, options: Options) -> None:
        """Check the options and start at step 0."""
        self.options = options.checked(module)
        self.module = module
        self.f = Functional(module, self._call_module, options.last_layer)
        self.keywords: dict[str, Any] = {}  # for the model, in this pass
        self.steps = Steps(options.seed, options.every)
        self.compiled = Compiled()
        self._looked = self._moved = False
        self._outputs: Outputs | None = None
        self._names: tuple[str, ...] = ()
        self._synchronizes = any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())

    @property
    def step(self) -> int:
        """Number of the current step; setting it does not change who counts."""
        return self.steps.step

    @step.setter
    def step(self, step: int) -> None:
        self.steps.step = step

    @property
    def every(self) -> int:
        """R is evaluated on every so many steps."""
        return self.options.every

    @property
    def active(self) -> bool:
        """Whether R is evaluated on this step."""
        return self.steps.active

    @property
    def px(self) -> Any:
        """Evaluation distribution."""
        return self.options.px

    @property
    def num_points(self) -> int:
        """S."""
        return self.options.num_points

    def stream(self) -> Stream:
        """This step's random numbers."""
        return self.steps.stream()

    def params(self) -> Params:
        """The parameters that R is about, as they are now."""
        refuse_sharded(self.module)
        return trainable(self.module, self.options.layers)

    def _call_module(self, module: nn.Module, x: Inputs) -> Any:
        return (self.options.forward or call_module)(module, x, **self.keywords)

    @contextmanager
    def given(self, keywords: dict[str, Any]) -> Iterator[None]:
        """Within, the model is called with these keyword arguments."""
        self.keywords = keywords
        try:
            yield
        finally:
            self.keywords = {}

    def output(self, found: Evaluation, size: int) -> Any:
        """The output of the training points as the model returned it, an object if it is one."""
        if not found.parts:
            return found.out
        assert self.f.output is not None
        out = self.f.output(found.parts)
        return first(out, size, self.num_points) if self.options.batchnorm == "joint" else out

    @uncompiled
    def draw(self, x: Inputs | None = None, params: Params | None = None) -> Drawn:
        """Evaluation points, probes and sampled outputs of the current step.

        Args:
            x: Training points; their number decides the size of a cotangent in ``joint``.
            params: What :meth:`params` returns.

        Returns:
            Tensors on the device of the parameters; no probes on a step without R.
        """
        options, stream = self.options, self.stream()
        params = self.params() if params is None else params
        drawn = sample(options.px, options.num_points, params, stream)
        on_cpu = next(iter(params.values())).device.type == "cpu"
        if not self._looked or on_cpu or stream.step % LOOK_EVERY == 0:
            check_points(drawn)
        if not self._looked:
            if x is not None:
                check_points(x)
                if options.batchnorm == "joint":
                    _joined(x, drawn)
            self._looked = True
        if not self.active:
            return Drawn(drawn, None)
        rows = self._draw_rows(params, drawn, stream)
        return Drawn(drawn, self.probes(x, drawn, params, rows), rows)

    def psi_dtype(self, device: torch.device) -> torch.dtype:
        """Half precision on CUDA under autocast, where tangents are rounded to it anyway."""
        full = self.options.estimator.full_precision or device.type != "cuda"
        if full or not torch.is_autocast_enabled("cuda"):
            return torch.float32
        return torch.get_autocast_dtype("cuda")

    def probes(
        self,
        x: Inputs | None,
        evaluation: Inputs,
        params: Params | None = None,
        rows: Tensor | None = None,
    ) -> Tensor | None:
        """The probes of the current step at given points."""
        options, stream = self.options, self.stream()
        params = self.params() if params is None else params
        if options.estimator.parameter_probes:
            every = params if options.layers is None else trainable(self.module)
            if draws_normal(options.estimator):
                device = next(iter(params.values())).device
                size = sum(p.numel() for p in every.values())
                return stream.flat_psi(size, options.probes, device, self.psi_dtype(device))
            site = Site(self.f, every, evaluation, options.metric)
            own: Any = options.estimator.draw(stream, site, options.probes)
            return torch.cat([_in_memory_order(own[n], p) for n, p in every.items()], 1)
        joint = x is not None and options.batchnorm == "joint"
        at: Any = _joined(x, evaluation) if joint else evaluation
        f = self.f
        if rows is not None and not joint:
            assert self._outputs is not None
            f = cut(self.f, rows, self._outputs.head)
        site = Site(f, params, at, options.metric)
        found: Any = options.estimator.draw(stream, site, options.probes)
        return found  # type: ignore[no-any-return]

    def _draw_rows(self, params: Params, x: Inputs, stream: Stream) -> Tensor | None:
        """This step's sample of outputs; None if all of them count."""
        wanted = self.options.outputs
        if wanted is None:
            return None
        if self._outputs is None:
            self._outputs = survey(self.f, params, x)
        if wanted >= self._outputs.size:
            return None
        return self._outputs.draw(wanted, stream).to(next(iter(params.values())).device)

    def __call__(
        self, x: Inputs | None = None, *, drawn: Drawn | None = None, compiled: bool = False
    ) -> Evaluation:
        """R of the current step, and the output at ``x`` if training points are given.

        Args:
            x: Training points.
            drawn: What :meth:`draw` returned; by default it is drawn here.
            compiled: Whether to compile, if :attr:`compiled` has no options of its own.

        Returns:
            Output, R and buffers; nothing of the module is changed.
        """
        params = self.params()
        self._names = tuple(params)
        drawn = self.draw(x, params) if drawn is None else drawn
        try:
            found = self._evaluate(x, drawn, params, compiled)
        except ForwardModeError as error:
            if not self.options.estimator.forward_mode:
                raise
            warnings.warn(f"{error} Using 'fd_central' from now on.", FallbackWarning, stacklevel=4)
            self.options = replace(self.options, estimator=Central(self.options.beta))
            found = self._evaluate(x, drawn, params, compiled)
        self._check_moved(found.R)
        return found

    @uncompiled
    def joined(self, x: Inputs, drawn: Drawn | None = None) -> Inputs:
        """Training points followed by this step's evaluation points."""
        if drawn is not None:
            return concat_points(x, drawn.points)
        params = self.params()
        return _joined(x, sample(self.options.px, self.options.num_points, params, self.stream()))

    def plain(self, x: Inputs, *, compiled: bool = False) -> Any:
        """An ordinary pass through the module, hooks and running statistics included."""
        if compiled or self.compiled.options is not None:
            return self.compiled.plain(self.f.raw, x)
        return self.f.raw(x)

    def _evaluate(
        self, x: Inputs | None, drawn: Drawn, params: Params, compiled: bool
    ) -> Evaluation:
        def eager() -> Evaluation:
            return self._eager(x, drawn, params)

        compiled = compiled or self.compiled.options is not None
        if not compiled or self._synchronizes or not torch.is_grad_enabled():
            return eager()
        found = self.compiled.checked(self._pure, eager, (x, drawn), self.module, lambda e: e.R)
        return found._replace(R=found.R.clone())  # a CUDA graph would overwrite it on the next step

    def _eager(self, x: Inputs | None, drawn: Drawn, params: Params) -> Evaluation:
        options = self.options
        options.estimator.check(params)
        joint = options.batchnorm == "joint" and x is not None
        sync = (
            bn.differentiable_sync(self.module, options.estimator, options.batchnorm)
            if self._synchronizes
            else nullcontext()
        )
        with sync, as_written(self.module, forward_mode=not options.estimator.full_precision):
            return self._pure(x, drawn, params, nullcontext if joint else self.own_noise)

    def _pure(
        self,
        x: Inputs | None,
        drawn: Drawn,
        params: Params | None = None,
        noise: Noise = nullcontext,
    ) -> Evaluation:
        """:func:`evaluate` at the module's own parameters and buffers."""
        if params is None:  # in a compiled graph
            own = dict(self.module.named_parameters())
            params = {name: own[name] for name in self._names}
        buffers = dict(self.module.named_buffers()) if any(self.f.modes) else {}
        return evaluate(self.f, params, buffers, x, drawn, self.options, self._outputs, noise)

    @contextmanager
    def own_noise(self) -> Iterator[None]:
        """Random layers draw from this step's own stream, and the loop's stream is left alone."""
        if not any(map(is_random, self.module.modules())):
            yield
            return
        device = next(self.module.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.stream().noise())
            yield

    def _check_moved(self, value: Tensor) -> None:
        """Warn once if R is zero: some wrapper may give the model other parameters than ours."""
        if torch.is_grad_enabled() and not self._moved and number(value) == 0:
            message = f"{NO_EFFECT} fsmap.InPlacePenalty may serve such a model."
            warnings.warn(message, IgnoredProbesWarning, stacklevel=5)
        self._moved |= torch.is_grad_enabled()


def first(out: Any, size: int, rest: int) -> Any:
    """The output of the first ``size`` points, of one over ``size + rest`` of them."""
    if isinstance(out, Tensor):
        return out[:size]
    tensors, shell = take_apart(out)
    both = size + rest
    return shell([t[:size] if t.ndim and len(t) == both else t for t in tensors])


def _joined(x: Inputs, evaluation: Inputs) -> Inputs:
    for ours, theirs in zip(tree_leaves(x), tree_leaves(evaluation), strict=False):
        if ours.is_floating_point() != theirs.is_floating_point():
            message = (
                f"p_X draws {theirs.dtype} and the training batch is {ours.dtype}: one joint batch "
                "would cast them. Convert the one to the other's kind."
            )
            raise InputError(message)
    try:
        return concat_points(x, evaluation)
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        message = (
            "p_X draws points that do not fit the training batch, so they cannot form one joint "
            f"batch: {first}"
        )
        raise InputError(message) from error
