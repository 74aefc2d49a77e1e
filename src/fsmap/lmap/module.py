"""R(θ) of ``eq:lmap-loss`` in any training loop: a module around the model, or a penalty."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, Self, TypeVar, Unpack

import torch
from torch import Tensor, nn

from fsmap.errors import InputError, did_you_mean
from fsmap.functional import num_points, tensor_of
from fsmap.lmap.compiling import Compiled
from fsmap.lmap.core import Drawn, Regularizer, first, uncompiled, write_back
from fsmap.lmap.options import (
    MODES,
    MoreOptions,
    Options,
    check_mode,
    check_module,
    check_strength,
    without_statistics,
)
from fsmap.px import EvalDistribution
from fsmap.types import Inputs

C = TypeVar("C", bound=type)


def _with_all_options(cls: C) -> C:
    """Show every option and its default in ``help`` and ``inspect.signature``."""
    shown = list(inspect.signature(cls).parameters.values())[:-1]
    known = {p.name for p in shown}
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown += [
        inspect.Parameter(o.name, keyword, default=o.default, annotation=o.type)
        for o in fields(Options)
        if o.name not in known
    ]
    cls.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return cls


def _regularizer(
    kind: type, module: nn.Module, px: Any, num_points: int, batchnorm: str, options: Any
) -> Regularizer:
    """R of a module; raises InputError for an option that there is not."""
    known = [o.name for o in fields(Options)]
    unknown = [name for name in options if name not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise InputError(
            f"{kind.__name__} has no option {unknown[0]!r}; it has {', '.join(known)}.{hint}"
        )
    return Regularizer(module, Options(px, num_points, batchnorm, **options))


class Term:
    """What LMAP and the penalties share: how R is measured, and which optimizer step it is."""

    regularizer: Regularizer

    @property
    def batchnorm(self) -> str:
        """How BatchNorm sees the evaluation points."""
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
        """Number of the current step. Set it before a pass to count steps yourself."""
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
            statistics differ), ``frozen`` or ``batch`` (R on a pass of its own: cheaper for a model
            without BatchNorm). In ``joint`` and ``frozen`` R shares the loss's graph: one
            ``backward``, of loss + λR.
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
        batchnorm: str = "joint",
        **options: Unpack[MoreOptions],
    ) -> None:
        """Wrap a model; see the class."""
        super().__init__()
        check_mode(batchnorm, MODES)
        self.regularizer = _regularizer(type(self), module, px, num_points, batchnorm, options)
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
        x: Inputs,
        *,
        reg_strength: float | Tensor | None = None,
        drawn: Drawn | None = None,
        **keywords: Any,
    ) -> tuple[Any, Tensor | None]:
        """The model's output at training points and R.

        Args:
            x: Training points.
            reg_strength: λ. If it is given, the second value is λR; a plain 0 costs nothing and,
                outside ``joint``, changes nothing.
            drawn: What :meth:`draw` returned, for loops that capture this pass in a CUDA graph.
            **keywords: For the model, at training and at evaluation points. A tensor with an entry
                per training point belongs into ``x`` (a dict), so that p_X draws it too.

        Returns:
            Output, and R (λR); R is None in ``eval()`` and under ``no_grad``. An output object with
            ``.logits`` is returned as it is, and R is that of the logits.
        """
        compiled = torch.compiler.is_dynamo_compiling()
        return self._forward(x, reg_strength, drawn, keywords, compiled)

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
        reg.keywords = keywords
        try:
            if not ((self.training or self.module.training) and torch.is_grad_enabled()):
                return reg.plain(x, compiled=compiled), None
            check_strength(reg_strength)
            size = num_points(x)
            _check_keywords(keywords, size)
            if reg.active and not is_zero(reg_strength):
                found = reg(x, drawn=drawn, compiled=compiled)
                out, value = reg.output(found, size), reg.scaled(found.R, reg_strength)
                write_back(reg.module, found.buffers)
            else:
                joint = self.batchnorm == "joint"
                out = reg.plain(reg.joined(x, drawn) if joint else x, compiled=compiled)
                value = _zero(tensor_of(out))
                out = first(out, size, reg.options.num_points) if joint else out
        finally:
            reg.keywords = {}
        reg.after_pass()
        return out, value

    def draw(self, x: Inputs | None = None) -> Drawn:
        """Evaluation points and probes of the current step, as tensors.

        ``lm(x, drawn=lm.draw(x))`` is ``lm(x)``. Draw outside a CUDA graph, copy into its inputs,
        and call ``lm(x, drawn=...)`` inside (:mod:`fsmap.train.capture`).
        """
        return self.regularizer.draw(x)

    def get_extra_state(self) -> Tensor:
        """The step, so that a resumed run draws what an uninterrupted one would."""
        return torch.tensor(self.step)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the step."""
        self.regularizer.step = int(state)

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        o = self.regularizer.options
        return (
            f"{o.px!r}, num_points={o.num_points}, estimator={o.estimator.name!r}, "
            f"batchnorm={o.batchnorm!r}, every={o.every}"
        )


class Penalty(Term):
    """A term that does not see the training batch, so that it cannot normalize with it."""

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
        check_module(module)
        if batchnorm == "auto":
            batchnorm = "batch" if without_statistics(module) else "frozen"
        self.regularizer = _regularizer(type(self), module, px, num_points, batchnorm, options)

    def state_dict(self) -> dict[str, int]:
        """The step; the model's own state is the model's."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the step."""
        self.regularizer.step = int(state["step"])


@_with_all_options
class LaplacianPenalty(Penalty):
    """R(θ) as a term: ``loss = criterion(model(x), y) + lam * penalty()``.

    Takes the options of :class:`LMAP`, except that ``batchnorm`` is ``frozen`` (what ``auto`` means
    if there are running statistics) or ``batch``. Under DDP use :class:`LMAP`: a pass that bypasses
    the wrapper is not synchronized unless it is in the same ``backward`` as one through it. Under
    ``no_grad`` it returns R as a number to look at.
    """

    def compile(self, **options: Any) -> None:
        """Compile R; see :meth:`LMAP.compile`."""
        self.regularizer.compiled = Compiled(options)

    def __call__(self, reg_strength: float | Tensor | None = None) -> Tensor:
        """R, or λR if ``reg_strength`` is given; a plain 0 makes no pass."""
        check_strength(reg_strength)
        return self._value(reg_strength)

    @uncompiled
    def _value(self, reg_strength: float | Tensor | None) -> Tensor:
        reg = self.regularizer
        if reg.active and not is_zero(reg_strength):
            value = reg.scaled(reg().R, reg_strength)
        else:
            value = _zero(next(iter(reg.params().values())))
        if torch.is_grad_enabled():
            reg.after_pass()
        return value


def _check_keywords(keywords: dict[str, Any], size: int) -> None:
    for name, value in keywords.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == size:
            raise InputError(
                f"{name} has an entry for each of the {size} training points, and the evaluation "
                "points have none. Give x as a dict with it, and a p_X that draws such dicts."
            )


def is_zero(strength: float | Tensor | None) -> bool:
    """Whether λ is a plain 0; a tensor is not looked at."""
    return isinstance(strength, int | float) and strength == 0


def _zero(like: Tensor) -> Tensor:
    dtype = torch.float32 if like.dtype.itemsize < 4 else like.dtype
    return torch.zeros((), device=like.device, dtype=dtype)
