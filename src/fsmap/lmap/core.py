"""R(θ) of ``eq:lmap-loss`` as one pure function, and for a module that is being trained.

:func:`evaluate` is the pure function: (params, buffers, x, drawn) → (output, R, buffers). It holds
no random draw, no counter and no check that looks at values, so that it can be differentiated,
compiled whole and captured. :class:`Regularizer` draws, counts steps, compiles, and calls it for
:class:`fsmap.LMAP` and :class:`fsmap.LaplacianPenalty`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from numbers import Integral
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from fsmap.errors import (
    FallbackWarning,
    ForwardModeError,
    IgnoredProbesWarning,
    InputError,
    NonFiniteWarning,
    UnsupportedModuleError,
)
from fsmap.functional import (
    FAILURES,
    Functional,
    NoiseReplay,
    State,
    Wrapped,
    call_module,
    capturing,
    check_points,
    concat_points,
    count,
    explain,
    is_random,
    move_points,
    num_points,
    number,
    seeded,
    take_apart,
)
from fsmap.linalg.estimators import Central, Probes, draws_normal
from fsmap.linalg.estimators import evaluate as evaluate_trace
from fsmap.linalg.jacobian import Metric, Site
from fsmap.linalg.metric import Weights
from fsmap.lmap import batchnorm as bn
from fsmap.lmap.compiling import Compiled
from fsmap.lmap.options import OnlyRows, Options, Outputs, SomeOutputs, trainable
from fsmap.px import Stream, sample
from fsmap.types import Inputs, Params

P = ParamSpec("P")
T = TypeVar("T")
Buffers = dict[str, Tensor]
Noise = Callable[[], AbstractContextManager[Any]]

NO_EFFECT = (
    "R is exactly 0: the output does not depend on the trainable parameters. Either all its "
    "weights are zero, or a wrapper around or inside the model (FSDP, offloading, quantization) "
    "replaces the parameters that it is given: then use fsmap.InPlacePenalty."
)

CHECK_EVERY = 100  # evaluations between checks of values on a GPU: each waits for the device


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function eagerly if it is called from code that is being compiled."""
    # torch.compiler.disable imports the compiler at once (seconds); this one at the first call.
    disabled: Callable[P, T] = torch._disable_dynamo(function, True)  # type: ignore[attr-defined]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class Drawn(NamedTuple):
    """All random numbers of one evaluation of R, as tensors."""

    points: Inputs  # [S, ...]
    probes: Probes  # ψ [R, P] over all trainable parameters, else as the estimator draws them
    rows: Tensor | None = None  # [k]  sampled outputs


class Evaluation(NamedTuple):
    """The result of :func:`evaluate`."""

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
    """The output at training points, R, and the buffers after that pass; the module is unchanged.

    ``x`` is None if only R is needed. A separate evaluation pass draws its masks within ``noise``.
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
    frozen = options.batchnorm == "frozen" and bool(buffers)  # else there are no statistics
    out: Tensor | None = None
    changes: list[bn.Change] = []
    parts: tuple[Tensor, ...] = ()
    made_by, rebuild = f, None
    if x is not None:
        with bn.recording(changes) if frozen else nullcontext():
            try:
                out, state = f.with_state(params, x, buffers)
            except FAILURES as error:
                explain(error, f, x)
        buffers, parts = state.buffers, state.parts
        rebuild = None if torch.compiler.is_compiling() else f.output
    share = 1.0
    if drawn.rows is not None:
        assert outputs is not None
        f, share = OnlyRows(f, outputs.head, drawn.rows), outputs.size / len(drawn.rows)
    if frozen:
        f = bn.FrozenStatistics(f, None if x is None else changes)
    with noise():
        if isinstance(f, bn.FrozenStatistics) and (
            options.estimator.reverse_mode or torch.compiler.is_compiling()
        ):
            f.prepare(params, drawn.points, buffers)
        value, _, _ = _laplacian(f, params, buffers, drawn.points, drawn, options, options.metric)
    if not torch.compiler.is_compiling():
        made_by.output = rebuild  # of the training pass, not of the evaluation points'
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
    if draws_normal(options.estimator):
        probes = _shaped(probes, params)
    found = evaluate_trace(options.estimator, Site(at, params, x, metric), probes)
    out, state = found.out, found.state
    if out is None or state is None:
        out, state = at.with_state(params, x)
    return options.every * found.value.mean(), out, state


class _At(Wrapped):
    """A model function at given buffers."""

    def __init__(self, f: Functional, buffers: Buffers) -> None:
        super().__init__(f)
        self._buffers = buffers

    def with_state(
        self, params: Params, x: Inputs, buffers: Buffers | None = None
    ) -> tuple[Tensor, State]:
        return self.inner.with_state(params, x, self._buffers if buffers is None else buffers)


def _shaped(flat: Tensor, params: Params) -> Params:
    """ψ as one vector cut into ``{name: [R, ...]}``, in the memory layout of each parameter."""
    found: Params = {}
    start = 0
    for name, p in params.items():
        piece = flat[:, start : start + p.numel()]
        start += p.numel()
        if p.is_contiguous():
            piece = piece.reshape(len(flat), *p.shape)
        else:  # channels last: the same order in memory, so that no pass has to reorder it
            order = sorted(range(p.ndim), key=p.stride, reverse=True)
            shape = [p.shape[d] for d in order]
            back = [0, *(1 + order.index(d) for d in range(p.ndim))]
            piece = piece.reshape(len(flat), *shape).permute(back)
        found[name] = piece.to(device=p.device, dtype=p.dtype)
    return found


def call_after_steps(
    optimizer: torch.optim.Optimizer, attached: RemovableHandle | None, call: Callable[[], None]
) -> RemovableHandle:
    """Call a function after every step; a fused optimizer also after those GradScaler skips."""
    given: object = optimizer
    if not isinstance(given, torch.optim.Optimizer):
        raise InputError(f"attach takes a torch.optim.Optimizer, got {type(given).__name__}")
    if attached is not None:
        raise InputError("attached to an optimizer already. Call detach() first")
    inner = getattr(optimizer, "optimizer", optimizer)  # as accelerate wraps it
    return inner.register_step_post_hook(lambda *_: call())


class Regularizer:
    """R(θ) of a module in training: draws, steps, fallback, compilation around :func:`evaluate`.

    Steps are counted by passes or by an optimizer's hook, or set by the training loop. ψ is a
    function of (seed, step), evaluation points of (seed, step, rank, micro-batch).
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        """Check the options and start at step 0, counting passes."""
        self.module, self.options = module, options.checked(module)
        self.every = options.every
        self.step = 0
        self._micro = 0  # passes since the last step, if passes are not steps
        self._counts_passes = True
        self._hook: RemovableHandle | None = None
        self.f = Functional(module, self._call_module)
        self.keywords: dict[str, Any] = {}  # for the model, in this pass
        self.compiled: Compiled | None = None  # made by LMAP.compile, or if torch compiles
        self._evaluations = 0  # with gradients
        self._points_checked = self._warned = False
        self._outputs: Outputs | None = None
        self._names: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to another model: it counts passes."""
        return {**self.__dict__, "_hook": None, "_counts_passes": True}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer's steps from now on."""
        hook = call_after_steps(optimizer, self._hook, lambda: self.set_step(self.step + 1))
        own = {id(p) for p in self.module.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            hook.remove()
            raise InputError(
                f"this {type(optimizer).__name__} holds no parameter of the model. Attach the "
                "model's own optimizer, or count steps yourself: lm.step = n."
            )
        self._hook, self._counts_passes = hook, False

    def detach(self) -> None:
        """Count passes again; another optimizer may be attached."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._counts_passes, self._micro = None, True, 0

    def set_step(self, step: Any) -> None:
        """Set the step; passes are micro-batches from now on."""
        if not isinstance(step, Integral) or step < 0:
            raise InputError(f"step must be a whole number of at least 0, got {step!r}")
        self._counts_passes = False
        if step != self.step:
            self.step, self._micro = int(step), 0

    def after_pass(self) -> None:
        """Go to the next step, or to the next micro-batch if passes are not steps."""
        if self._counts_passes:
            self.step += 1
        else:
            self._micro += 1

    @property
    def active(self) -> bool:
        """Whether R is evaluated on this step."""
        return self.step % self.every == 0

    def stream(self) -> Stream:
        """The step's random numbers: ψ is the same on every rank, evaluation points differ."""
        dist = torch.distributed
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return Stream(self.options.seed, self.step, rank, self._micro)

    def params(self) -> Params:
        """The trainable parameters themselves, not copies."""
        if self.f.find_parts():
            self._outputs = None  # the layer that computes them may be another one
        _check_not_sharded(self.f)
        return trainable(self.module)

    def _call_module(self, module: nn.Module, x: Inputs) -> Any:
        return (self.options.forward or call_module)(module, x, **self.keywords)

    def output(self, found: Evaluation, size: int) -> Any:
        """The output of the training points as the model returned it, an object if it is one."""
        if not found.parts:
            return found.out
        assert self.f.output is not None
        out = self.f.output(found.parts)
        if self.compiled is None:  # it holds what is no tensor, such as a cache of keys
            self.f.output = None
        joint = self.options.batchnorm == "joint"
        return first(out, size, self.options.num_points) if joint else out

    @uncompiled
    def draw(self, x: Inputs | None = None, params: Params | None = None) -> Drawn:
        """Evaluation points, sampled outputs and, on a step with R, probes of the current step."""
        options, stream = self.options, self.stream()
        params = self.params() if params is None else params
        evaluation = sample(options.px, options.num_points, params, stream)
        device = next(iter(params.values())).device
        if not self._points_checked or device.type == "cpu" or stream.step % CHECK_EVERY == 0:
            check_points(evaluation)
        if not self._points_checked and x is not None:
            check_points(x)
            _check_alike(x, evaluation, joint=options.batchnorm == "joint")
        self._points_checked = True
        if not self.active:
            return Drawn(evaluation, None)
        rows = None
        if options.outputs is not None:
            if self._outputs is None:
                self._outputs = Outputs.of(self.f, params, evaluation)
            if options.outputs < self._outputs.size:
                rows = move_points(self._outputs.draw(options.outputs, stream), device)
        return Drawn(evaluation, self.probes(x, evaluation, params, rows), rows)

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
    ) -> Probes:
        """The probes of the current step at given points."""
        options, stream = self.options, self.stream()
        params = self.params() if params is None else params
        if draws_normal(options.estimator):
            device = next(iter(params.values())).device
            return stream.flat_psi(count(params), options.probes, device, self.psi_dtype(device))
        f = self.f
        if x is not None and options.batchnorm == "joint":
            evaluation = _joined(x, evaluation)
        elif rows is not None:
            assert self._outputs is not None
            f = OnlyRows(f, self._outputs.head, rows)
        site = Site(f, params, evaluation, options.metric)
        found: Probes = options.estimator.draw(stream, site, options.probes)
        return found

    def __call__(
        self, x: Inputs | None = None, *, drawn: Drawn | None = None, compiled: bool = False
    ) -> Evaluation:
        """R of the current step, and the output at ``x`` if given; the module is unchanged."""
        params = self.params()
        self._names = tuple(params)
        drawn = self.draw(x, params) if drawn is None else drawn
        device = next(iter(params.values())).device  # if it captures, R has been evaluated before
        replay = nullcontext if capturing(device) else NoiseReplay(self.f, params)
        try:
            return self._evaluate(x, drawn, params, compiled)
        except ForwardModeError as error:
            if not self.options.estimator.forward_mode:
                raise
            warnings.warn(f"{error} Using 'fd_central' from now on.", FallbackWarning, stacklevel=4)
            self.options = replace(self.options, estimator=Central(self.options.beta))
            replay()
            return self._evaluate(x, drawn, params, compiled)

    def scaled(self, R: Tensor, reg_strength: float | Tensor | None) -> Tensor:
        """R, or λR; warns once each if R is zero at first, and if the value is not finite."""
        value = R if reg_strength is None else reg_strength * R
        if not torch.is_grad_enabled():
            return value
        new, self._evaluations = self._evaluations == 0, self._evaluations + 1
        due = new or R.device.type == "cpu" or self._evaluations % CHECK_EVERY == 0
        if not due or self._warned:
            return value
        found = number(value)
        if found is not None and not math.isfinite(found):
            self._warned = True
            message = (
                f"{'R' if reg_strength is None else 'λR'} is {found} at step {self.step}. "
                "Lower the learning rate or the strength, or look for overflow in half precision "
                "and for evaluation points far from the data."
            )
            warnings.warn(message, NonFiniteWarning, stacklevel=5)
        elif new and number(R) == 0:
            warnings.warn(NO_EFFECT, IgnoredProbesWarning, stacklevel=5)
        return value

    @uncompiled
    def joined(self, x: Inputs, drawn: Drawn | None = None) -> Inputs:
        """Training points followed by this step's evaluation points."""
        if drawn is not None:
            return concat_points(x, drawn.points)
        params = self.params()
        return _joined(x, sample(self.options.px, self.options.num_points, params, self.stream()))

    def plain(self, x: Inputs, *, compiled: bool = False) -> Any:
        """An ordinary pass through the module, hooks and running statistics included."""
        compiler = self._compiler(compiled)
        return self.f.raw(x) if compiler is None else compiler.plain(self.f.raw, x)

    def _compiler(self, asked: bool) -> Compiled | None:
        """The compiler, if the caller compiles (``asked``) or :attr:`compiled` has options."""
        if asked and self.compiled is None:
            self.compiled = Compiled()
        given = self.compiled is not None and self.compiled.options is not None
        return self.compiled if asked or given else None

    @property
    def _synchronizes(self) -> bool:
        """Whether BatchNorm layers exchange statistics between ranks."""
        return any(isinstance(part, nn.SyncBatchNorm) for part in self.f.parts)

    def _evaluate(self, x: Inputs | None, drawn: Drawn, params: Params, asked: bool) -> Evaluation:
        eager = partial(self._eager, x, drawn, params)
        eagerly = self._synchronizes or not torch.is_grad_enabled()
        compiler = None if eagerly else self._compiler(asked)
        if compiler is None:
            return eager()
        found: Evaluation = compiler.checked(self._pure, eager, (x, drawn), self.module)
        return found._replace(R=found.R.clone())  # a CUDA graph would overwrite it on the next step

    def _eager(self, x: Inputs | None, drawn: Drawn, params: Params) -> Evaluation:
        options = self.options
        options.estimator.check(params)
        joint = options.batchnorm == "joint" and x is not None
        sync: AbstractContextManager[None] = nullcontext()
        if self._synchronizes:
            sync = bn.differentiable_sync(self.module, options.estimator, options.batchnorm)
        tangents = not options.estimator.full_precision
        with sync, _compiled_parts_eager(self.f) if tangents else nullcontext():
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

    def own_noise(self) -> AbstractContextManager[None]:
        """Random layers draw from this step's seed; the random state is restored at the end."""
        device = next(self.module.parameters()).device
        draws = not capturing(device) or any(map(is_random, self.f.parts))
        return seeded(self.stream().noise(), device) if draws else nullcontext()


def _compiled_parts_eager(f: Functional) -> AbstractContextManager[Any]:
    """Context manager: compiled submodules run eagerly, so that tangents are not lost in them."""
    compiled = "torch._dynamo" in sys.modules and any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None
        for m in f.parts
    )
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _check_not_sharded(f: Functional) -> None:
    """Raise if FSDP manages a part: a functional pass would ignore the parameters it is given."""
    sharded = any(hasattr(p, "placements") for p in f.module.parameters() if p.requires_grad)
    # FSDP marks its modules for the compiler; a wrapper around the model leaves no other mark
    if sharded or any(getattr(m, "_is_fsdp_managed_module", False) for m in f.parts):
        raise UnsupportedModuleError(
            "the parameters are sharded (FSDP): a functional pass would ignore ψ and return R = 0 "
            "without an error. Under FSDP2 (fully_shard) use fsmap.InPlacePenalty, which moves the "
            "shards themselves (docs/guide/distributed.md); move from FSDP1 "
            "(FullyShardedDataParallel) to FSDP2 first, or use DDP."
        )


def write_back(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Copy the running statistics of a functional pass to the module."""
    own = dict(module.named_buffers())
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for name, new in buffers.items():
        targets, sources = kinds.setdefault(own[name].dtype, ([], []))
        targets.append(own[name])
        sources.append(new)
    with torch.no_grad():
        for targets, sources in kinds.values():
            torch._foreach_copy_(targets, sources)


def first(out: Any, size: int, rest: int) -> Any:
    """The first ``size`` points of an output over ``size + rest`` points."""
    if isinstance(out, Tensor):
        return out[:size]
    tensors, rebuild = take_apart(out)
    if any(t.ndim == 0 and t.requires_grad for t in tensors):
        raise InputError(
            "in 'joint' the loss in the output is over training and evaluation points. Leave out "
            "labels and compute the loss from .logits, or use batchnorm='frozen'."
        )
    return rebuild([t[:size] if t.ndim and len(t) == size + rest else t for t in tensors])


def _check_alike(x: Inputs, evaluation: Inputs, *, joint: bool) -> None:
    """Raise if points differ in kind from training points; in ``joint`` they form one batch."""

    def kinds(points: Inputs) -> Any:
        return tree_map(lambda t: (t.is_floating_point(), joint and t.shape[1:]), points)

    def shown(points: Inputs) -> str:
        found = ", ".join(f"{t.dtype} {list(t.shape)}" for t in tree_leaves(points))
        return found if isinstance(points, Tensor) else f"a {type(points).__name__} of {found}"

    if (joint or isinstance(x, Tensor)) and kinds(x) != kinds(evaluation):
        one = " They cannot form one joint batch." if joint else ""
        raise InputError(
            f"p_X draws {shown(evaluation)} and the training batch is {shown(x)}.{one} Points must "
            "have the shape and keys of training points, and both be floating-point or neither. "
            "Labels do not belong into p_X."
        )


def _joined(x: Inputs, evaluation: Inputs) -> Inputs:
    _check_alike(x, evaluation, joint=True)
    return concat_points(x, evaluation)
