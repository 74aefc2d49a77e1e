"""R(θ) of ``eq:lmap-loss`` in any training loop: a wrapper of the model, or a penalty.

:class:`LogTrace` gives R a strength that means the same for every model: nats per training point.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from numbers import Real
from typing import Any, Self, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsmap.errors import CollapseWarning, InputError, MissingEveryWarning, NonFiniteWarning
from fsmap.functional import accumulate, num_points, number, plain_points, tensor_of
from fsmap.lmap.compiling import Compiled
from fsmap.lmap.core import Drawn, Regularizer, call_after_steps, first, uncompiled, write_back
from fsmap.lmap.options import (
    MODES,
    MoreOptions,
    Options,
    check_mode,
    check_module,
    check_strength,
    mode_of,
)
from fsmap.objective.geometry import SHARE
from fsmap.px import EvalDistribution
from fsmap.types import Inputs

NATS = 0.05  # default c, in nats per training point; how it was chosen: docs/guide/strength.md
MEMORY = 20  # steps of the running mean of R: one draw varies by tens of percent

C = TypeVar("C", bound=type)


def _with_all_options(cls: C) -> C:
    """Show every option and its default in ``help`` and ``inspect.signature``."""
    shown = list(inspect.signature(cls).parameters.values())[:-1]
    known = {p.name for p in shown}
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [o for o in fields(Options) if o.name not in known]
    shown += [
        inspect.Parameter(o.name, keyword, default=o.default, annotation=o.type) for o in more
    ]
    cls.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return cls


class Term:
    """Base class of LMAP and the penalties: settings of R and the count of optimizer steps."""

    regularizer: Regularizer

    @property
    def batchnorm(self) -> str:
        """The BatchNorm mode of the evaluation points."""
        return self.regularizer.options.batchnorm

    def attach(self, optimizer: torch.optim.Optimizer) -> Self:
        """Count this optimizer's steps instead of passes."""
        self.regularizer.attach(optimizer)
        return self

    def detach(self) -> None:
        """Count passes again."""
        self.regularizer.detach()

    @property
    def step(self) -> int:
        """The current step. To count steps yourself, set it before each pass."""
        return self.regularizer.step

    @step.setter
    def step(self, step: int) -> None:
        self.regularizer.set_step(step)


@_with_all_options
class LMAP(Term, nn.Module):
    r"""A model that also returns R(θ): ``out, R = lm(x)``; add a multiple of R to any loss.

    Args:
        module: The model.
        px: Evaluation distribution: one of :mod:`fsmap.px`, a tensor of points, or a callable ``(n,
            generator) -> x``.
        num_points: S, fresh points a step.
        batchnorm: ``joint`` (one pass over B+S points serves the loss and R, and R is the mean over
            all of them, as in the authors' code; it is *not* plain training as λ → 0, because the
            statistics differ), ``frozen`` or ``batch`` (R on a pass of its own over S points).
            ``auto`` is ``joint`` for a model with BatchNorm layers, else ``frozen``. In ``joint``
            and ``frozen`` R shares the loss's graph: one ``backward``, of loss + λR.
        **options: See :class:`fsmap.lmap.options.Options`.

    Under ``no_grad``, and if both it and the model are in ``eval()``, it returns the model's output
    and ``None``: after ``lm.eval()``, ``model.train()`` is enough to get R again. Steps are counted
    by forward passes, or, after :meth:`attach`, by the optimizer's steps (gradient accumulation:
    the same ψ over all micro-batches), or by you: ``lm.step = n``.

    Example:
        >>> import torch, fsmap
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(2,)), num_points=16)
        >>> out, R = lm(torch.zeros(4, 2))
        >>> out.shape, bool(R > 0)
        (torch.Size([4, 3]), True)
        >>> lm.eval()(torch.zeros(4, 2))[1] is None
        True
    """

    _is_lmap = True

    def __init__(
        self,
        module: nn.Module,
        px: EvalDistribution,
        *,
        num_points: int,
        batchnorm: str = "auto",
        **options: Unpack[MoreOptions],
    ) -> None:
        """Wrap a model; see the class."""
        super().__init__()
        check_mode(batchnorm, ("auto", *MODES))
        check_module(module)
        made = Options.of(type(self), px, num_points, mode_of(module, batchnorm), options)
        self.regularizer = Regularizer(module, made)
        self.module = module

    def compile(self, **options: Any) -> None:
        """Compile the passes of training, R and its tangent included; options of ``torch.compile``.

        On CUDA ``lm.compile(mode="reduce-overhead")`` is the fastest. The first step compiles, and
        compares R and its gradient with the eager ones; if they differ, or the model cannot be
        traced, a :class:`~fsmap.errors.FallbackWarning` says so and R runs eagerly.
        ``torch.compile(lm)`` does the same with torch's default options.
        """
        options.pop("fullgraph", None)  # R is always one graph, other passes need not be
        self.regularizer.compiled = Compiled(options)

    def forward(
        self,
        x: Inputs = None,
        *_more: Any,
        reg_strength: float | Tensor | None = None,
        drawn: Drawn | None = None,
        **keywords: Any,
    ) -> tuple[Any, Tensor | None]:
        """The model's output at training points and R.

        Args:
            x: Training points: a tensor, or one tuple or mapping of tensors, without labels.
            reg_strength: λ ≥ 0 (a tensor on a GPU is not checked). If it is given, the second
                value is λR; a plain 0 costs nothing and, outside ``joint``, changes nothing.
            drawn: What :meth:`draw` returned, for loops that capture this pass in a CUDA graph.
            **keywords: For the model, at training and at evaluation points. A tensor with an entry
                per training point belongs into ``x`` (a dict), so that p_X draws it too.

        Returns:
            Output, and R (λR); R is None in ``eval()`` and under ``no_grad``. An output object with
            ``.logits`` is returned as it is, and R is that of the logits.
        """
        if x is None or _more:
            raise InputError("lm takes one argument: lm({...}) for a dict, lm((x, y)) for a tuple")
        compiled = torch.compiler.is_dynamo_compiling()
        return self._forward(plain_points(x), reg_strength, drawn, keywords, compiled)

    @uncompiled
    def _forward(
        self,
        x: Inputs,
        reg_strength: float | Tensor | None,
        drawn: Drawn | None,
        keywords: dict[str, Any],
        compiled: bool,
    ) -> tuple[Any, Tensor | None]:
        reg = self.regularizer
        if not reg._points_checked:
            self.children()
        reg.keywords = keywords
        try:
            if not ((self.training or self.module.training) and torch.is_grad_enabled()):
                return reg.plain(x, compiled=compiled), None
            check_strength(reg_strength)
            size = num_points(x)
            if reg.active and not is_zero(reg_strength):
                found = reg(x, drawn=drawn, compiled=compiled)
                out, value = reg.output(found, size), reg.scaled(found.R, reg_strength)
                write_back(reg.module, found.buffers)
            else:
                joint = self.batchnorm == "joint"
                out = reg.plain(reg.joined(x, drawn) if joint else x, compiled=compiled)
                value = _zero(tensor_of(out))
                out = first(out, size, reg.options.num_points) if joint else out
        except InputError as error:
            if not keywords:
                raise
            how = "What has an entry per training point belongs into x, a dict, as p_X draws them."
            if any(name.startswith("label") for name in keywords):
                how = "Leave labels out, and compute the loss from the output (out.logits)."
            raise InputError(
                f"{error} The model gets the same {', '.join(keywords)} at all points. {how}"
            ) from error
        finally:
            reg.keywords = {}
        reg.after_pass()
        return out, _with_every(value, reg.every)

    def draw(self, x: Inputs | None = None) -> Drawn:
        """Evaluation points and probes of the current step, as tensors.

        ``lm(x, drawn=lm.draw(x))`` is ``lm(x)``. Draw outside a CUDA graph, copy into its inputs,
        and call ``lm(x, drawn=...)`` inside (:mod:`fsmap.train.capture`).
        """
        return self.regularizer.draw(plain_points(x))

    def get_extra_state(self) -> Tensor:
        """The step, so that a resumed run draws what an uninterrupted one would."""
        return torch.tensor(self.step)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the step."""
        self.regularizer.step, self.regularizer._micro = int(state), 0

    def children(self) -> Iterator[nn.Module]:
        """The model; raises InputError if it holds this LMAP: an endless loop."""
        if any(part is self for part in self.module.modules()):
            raise InputError("LMAP is around a model that holds it: wrap the network, not self")
        return super().children()

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        o = self.regularizer.options
        return (
            f"{o.px!r}, num_points={o.num_points}, estimator={o.estimator.name!r}, "
            f"batchnorm={o.batchnorm!r}, every={o.every}"
        )


class Penalty(Term):
    """Base class of the penalties. They do not see the training batch: there is no ``joint``."""

    def __init__(
        self,
        module: nn.Module,
        px: EvalDistribution,
        *,
        num_points: int,
        batchnorm: str = "auto",
        **options: Unpack[MoreOptions],
    ) -> None:
        """See :class:`LMAP`."""
        check_mode(batchnorm, ("auto", "frozen", "batch"), "For 'joint' use fsmap.LMAP.")
        made = Options.of(type(self), px, num_points, batchnorm, options)
        self.regularizer = Regularizer(module, made)

    def state_dict(self) -> dict[str, int]:
        """The step; save the model separately."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the step."""
        self.regularizer.step, self.regularizer._micro = int(state["step"]), 0


@_with_all_options
class LaplacianPenalty(Penalty):
    """R(θ) as a term: ``loss = criterion(model(x), y) + lam * penalty()``.

    Takes the options of :class:`LMAP`, except that ``batchnorm`` is ``frozen`` (what ``auto`` means
    if there are running statistics) or ``batch``. Under DDP use :class:`LMAP`: the gradients of a
    pass that bypasses the wrapper may not be synchronized. Under ``no_grad`` it returns R as a
    number for logging.
    """

    def compile(self, **options: Any) -> None:
        """Compile R; see :meth:`LMAP.compile`."""
        self.regularizer.compiled = Compiled(options)

    @uncompiled
    def __call__(self, reg_strength: float | Tensor | None = None) -> Tensor:
        """R, or λR if ``reg_strength`` is given; a plain 0 makes no pass."""
        check_strength(reg_strength)
        reg = self.regularizer
        if reg.active and not is_zero(reg_strength):
            value = reg.scaled(reg().R, reg_strength)
        else:
            value = _zero(next(iter(reg.params().values())))
        if torch.is_grad_enabled():
            reg.after_pass()
        return _with_every(value, reg.every)


class LogTrace(nn.Module):
    r"""The penalty c·log(1 + R/R₀) of R = Tr 𝒥: ``loss = criterion(out, y) + penalty(R)``.

    c is given in nats per training point. If R is multiplied by a constant (other units of the
    output, another metric), training stays the same.

    **Why a logarithm.** The exact objective contains ½ log det(I + 𝒥/ε)/N. For any 𝒥 of rank d it
    is at most c·log(1 + R/R₀) with c = d/(2N) and R₀ = dε (proof:
    :class:`fsmap.objective.geometry.TraceBound`, the same term for ``fit``). The first order of
    both in 1/ε is L-MAP, Tr 𝒥/(2εN) = λR with λ = c/R₀.

    **What is computed.** The value is c·log(1 + R/R₀), the gradient c·∇R/(R̄ + R₀). R̄ is the mean
    of R over all optimizer steps up to ``MEMORY`` of them, this one included, then an exponential
    mean. (∇R/R of one draw would be biased: both have the same noise.) R₀ is ``SHARE`` times the
    mean of R over the first ``MEMORY`` steps and constant afterwards.

    - R = None, which :class:`fsmap.LMAP` returns in ``eval()`` and under ``no_grad``, gives 0 under
      ``no_grad`` and in ``penalty.eval()``; otherwise it is an error.
    - With ``LMAP(every=k)`` call ``penalty(R, every=k)``. With another number the penalty is too
      weak or too strong, and a ``MissingEveryWarning`` is given.
    - Each call is a step, unless :meth:`attach` names the optimizer: then R̄ moves once per
      optimizer step, by the mean over its micro-batches.
    - Under ``torch.distributed`` R is averaged over ranks before it enters R̄.
    - An R that is inf, nan or negative does not enter R̄ and is counted in ``skipped``, with a
      ``NonFiniteWarning``. The value is inf or nan then, so that a ``GradScaler`` skips the step.
    - If R̄ falls below R₀, a ``CollapseWarning`` is given: the network may have become constant.

    Warnings are given once; values are looked at on one call in 5 · ``MEMORY``, and not within
    ``torch.compile`` or a CUDA graph. R̄ and R₀ are float32 buffers: ``state_dict`` resumes to the
    same bits. They move to the device of R on the first call; for ``torch.compile(fullgraph=True)``
    or a CUDA graph move them before.

    Args:
        nats: c ≥ 0; can be changed while training. 0 adds nothing.

    Example:
        >>> import torch, fsmap
        >>> penalty = fsmap.LogTrace(nats=0.05)
        >>> R = torch.tensor(300.0, requires_grad=True)
        >>> value = penalty(R)  # R₀ = 3: 0.05 · log(101)
        >>> value.backward()
        >>> round(value.item(), 4), round(R.grad.item() * 303, 4)
        (0.2308, 0.05)
    """

    mean: Tensor  # R̄ before this step
    first: Tensor  # mean of R over the first MEMORY steps
    steps: Tensor  # optimizer steps that had an R
    sums: Tensor  # sum and number of the R of this step, and how many were left out so far

    def __init__(self, nats: float = NATS) -> None:
        """Check and keep c; see the class."""
        super().__init__()
        self.nats = nats
        self.register_buffer("mean", torch.zeros((), dtype=torch.float32))
        self.register_buffer("first", torch.zeros((), dtype=torch.float32))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(3, dtype=torch.float32))
        self._warned = self._attached = False
        self._hook: RemovableHandle | None = None  # torch.compile cannot read it
        self._calls = self._idle = 0

    @property
    def nats(self) -> float:
        """The strength c, in nats per training point."""
        return self._nats

    @nats.setter
    def nats(self, nats: float) -> None:
        given: object = nats
        number = isinstance(given, Real) and not isinstance(given, bool)
        if not (number and 0 <= float(nats) < math.inf):
            usual = "0.01 to 0.1 is usual"
            raise InputError(f"nats must be a number, at least 0 and finite, got {nats!r}; {usual}")
        self._nats = float(nats)

    @property
    def skipped(self) -> int:
        """Number of R that were negative or not finite, over all ranks; waits for the device."""
        return int(self.sums[2])

    @property
    def reg_strength(self) -> float:
        """The present λ = c/(R̄ + R₀), the factor of ∇R in the gradient; waits for the device."""
        denominator = float(self.mean + SHARE * self.first)
        return self.nats / denominator if denominator > 0 else math.nan

    def forward(self, R: Tensor | None, *, every: int = 1) -> Tensor:
        """The penalty in nats per training point, of what ``LMAP(every=every)`` returned."""
        if R is None and self.training and torch.is_grad_enabled():
            raise InputError(
                "R is None: LMAP returns None in eval() and under no_grad, so this step would be "
                "trained without R. Call lm.train() before, or penalty.eval() to leave R out."
            )
        if R is None:
            return torch.zeros_like(self.mean)
        given: object = R
        if not isinstance(given, Tensor) or R.numel() != 1 or every < 1:
            shape = f"of shape {list(R.shape)}" if isinstance(given, Tensor) else type(R).__name__
            raise InputError(
                f"R must be a tensor with one entry (out, R = lm(x)) and every at least 1, got R "
                f"{shape} and every={every}"
            )
        if R.device != self.mean.device:
            self.to(R.device)
        own = None if torch.compiler.is_compiling() else getattr(R, "lmap_every", None)
        R = accumulate(R.reshape(()))
        now = R.detach() / every
        trains = self.training and torch.is_grad_enabled()
        counts = trains and R.requires_grad  # on steps without R it is a 0 without a graph
        sums = self._add(now) if counts else (now.float(), torch.ones_like(self.mean))
        mean, first = self._means(*sums)
        denominator = torch.add(mean, first, alpha=SHARE)
        strength = torch.where(denominator > 0, self.nats / denominator, 0.0)
        value = self.nats * (now / (SHARE * first).clamp(min=1e-30)).log1p()
        if counts and not self._attached:
            self._step(mean, first)
        if trains and not torch.compiler.is_compiling():
            self._warn(every, own, idle=every == 1 and not counts)
        return torch.addcmul(value, strength, R - R.detach())

    def attach(self, optimizer: torch.optim.Optimizer) -> LogTrace:
        """Count optimizer steps instead of calls; of a fused one also what GradScaler skips."""
        after = lambda: self._step(*self._means(*self.sums[:2]))  # noqa: E731
        self._hook = call_after_steps(optimizer, self._hook, after)
        self._attached = True
        return self

    def detach(self) -> None:
        """Count calls again."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._attached = None, False

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        return f"nats={self.nats:g}"

    def __getstate__(self) -> dict[str, Any]:
        """A copy counts calls: no optimizer is attached to it."""
        return {**self.__dict__, "_hook": None, "_attached": False}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LogTrace:
        """Move to another device; ``half()`` and the like leave the buffers in float32."""
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            setattr(self, name, before.to(getattr(self, name).device))
        return self

    def _add(self, R: Tensor) -> tuple[Tensor, Tensor]:
        """Add a value of R to this step; returns the sum and number of values over all ranks."""
        R = R.float()  # as the buffers: what is too large for them is inf
        valid = R.nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
        found = torch.stack([valid, (valid > 0).to(R.dtype), (valid != R).to(R.dtype)])
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(found)
        self.sums.add_(found)
        return self.sums[0], self.sums[1]

    def _means(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """R̄ and the mean over the first steps, after a step with ``count`` values of R."""
        weight = (count > 0) / (self.steps + 1).clamp(max=MEMORY)
        mean = torch.lerp(self.mean, total / count.clamp(min=1), weight.to(self.mean.dtype))
        return mean, torch.where(self.steps < MEMORY, mean, self.first)

    @torch.no_grad()
    def _step(self, mean: Tensor, first: Tensor) -> None:
        """Store the means of a finished optimizer step."""
        self.mean.copy_(mean)
        self.first.copy_(first)
        self.steps.add_(self.sums[1] > 0)
        self.sums[:2].zero_()

    def _warn(self, every: int, own: int | None, *, idle: bool) -> None:
        """Warn once of a wrong ``every`` and of R that were skipped or fell to almost nothing."""
        self._calls += 1
        self._idle += idle
        wrong = own is not None and own != every
        if self._warned or (self._calls % (5 * MEMORY) and self._idle != 2 and not wrong):
            return
        bad, low = number(self.sums[2]), number(self.mean < SHARE * self.first)
        found: dict[type[Warning], str] = {}
        if bad:
            found[NonFiniteWarning] = (
                f"{bad:g} times R was inf, nan or negative: it did not enter the running mean of "
                "LogTrace. Lower the learning rate or nats, or look for overflow in half precision."
            )
        if wrong:
            found[MissingEveryWarning] = (
                f"R comes from every={own}, and penalty(R, every={every}) was called: the penalty "
                f"is not {self.nats:g} nats. Call penalty(R, every={own})."
            )
        elif self._idle:
            found[MissingEveryWarning] = (
                f"{self._idle} times R had no gradient. If it was detached, give it as returned. "
                "With LMAP(every=k) call penalty(R, every=k), or it is k times too weak."
            )
        if low:
            found[CollapseWarning] = (
                f"R is below {SHARE:.0%} of its first values: the network may have become a "
                "constant. If held-out metrics confirm it, lower nats."
            )
        self._warned = bool(found)
        for kind, message in found.items():
            warnings.warn(message, kind, stacklevel=5)


def is_zero(strength: Any) -> bool:
    """Whether λ is a plain 0; False for a tensor, whose value is not read."""
    return isinstance(strength, Real) and strength == 0


def _with_every(value: Tensor, every: int) -> Tensor:
    """R with its ``every`` as an attribute, for :class:`LogTrace` to check."""
    value.lmap_every = every  # type: ignore[attr-defined]
    return value


def _zero(like: Tensor) -> Tensor:
    dtype = torch.float32 if like.dtype.itemsize < 4 else like.dtype
    return torch.zeros((), device=like.device, dtype=dtype)
