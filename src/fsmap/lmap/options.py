"""The options of LMAP and of all penalties, and the parameters and outputs that R is about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.errors import InputError, UnsupportedModuleError, did_you_mean
from fsmap.functional import (
    Forward,
    Functional,
    NoiseReplay,
    Replacing,
    State,
    Wrapped,
    functional,
    number,
    run,
)
from fsmap.linalg.estimators import Estimator, by_name
from fsmap.linalg.jacobian import Metric
from fsmap.linalg.metric import Weights, Whitening
from fsmap.px import EvalDistribution, Stream, as_px, generator
from fsmap.types import Inputs, Params

MODES = ("joint", "batch", "frozen")  # of BatchNorm: fsmap.lmap.batchnorm


class MoreOptions(TypedDict, total=False):
    """Options besides ``px``, ``num_points`` and ``batchnorm``."""

    estimator: str | Estimator
    beta: float
    every: int
    metric: Metric | Tensor | None
    seed: int
    probes: int
    outputs: int | None
    forward: Forward | None


@dataclass(frozen=True)
class Options:
    """How R is measured.

    Attributes:
        px: Evaluation distribution: one of :mod:`fsmap.px`, a tensor of points, or a callable ``(n,
            generator) -> x``.
        num_points: S, fresh points a step.
        batchnorm: ``joint``, ``frozen`` or ``batch``, see :mod:`fsmap.lmap.batchnorm`. ``auto`` is
            ``frozen`` if all BatchNorm layers have running statistics, else ``batch``; for LMAP it
            is ``joint`` if there is a BatchNorm layer.
        estimator: A name of :func:`fsmap.trace` or an object. ``jvp`` falls back to ``fd_central``,
            with a warning, if the model has no forward mode.
        beta: Step of the differences (``fd``, ``fd_central``).
        every: Evaluate R on every k-th optimizer step only, k times as strong; 0 otherwise.
        metric: g, see :mod:`fsmap.metric`.
        seed: ψ is a function of the seed, the step and the model's parameters.
        probes: ψ per step.
        outputs: Number of entries of the last output dimension that R is computed for: a random
            sample on each step, scaled so that R is unbiased; for large vocabularies.
        forward: ``forward(module, x)`` if the module's signature is unusual.
    """

    px: EvalDistribution
    num_points: int
    batchnorm: str = "auto"
    estimator: Any = "jvp"
    beta: float = 1e-3
    every: int = 1
    metric: Metric | Tensor | None = None
    seed: int = 0
    probes: int = 1
    outputs: int | None = None
    forward: Forward | None = None

    @classmethod
    def of(
        cls, kind: type, px: Any, num_points: int, batchnorm: str, options: Mapping[str, Any]
    ) -> Options:
        """The options of an LMAP or a penalty; raises InputError for an unknown name."""
        known = [o.name for o in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            hint = did_you_mean(unknown[0], known)
            raise InputError(
                f"{kind.__name__} has no option {unknown[0]!r}; it has {', '.join(known)}.{hint}"
            )
        return cls(px, num_points, batchnorm, **options)

    def checked(self, module: nn.Module) -> Options:
        """The same with p_X and the estimator as objects; raises if something does not fit."""
        self._check_numbers()
        check_module(module)
        if any(getattr(m, "_is_lmap", False) for m in module.modules()):
            message = "the module is, or contains, an LMAP already: give the model inside it"
            raise UnsupportedModuleError(message)
        _, params = functional(module, forward=self.forward)
        found = [name for name, p in params.items() if p.is_complex()]
        if found:
            raise UnsupportedModuleError(f"{found[0]!r} is complex; R needs real parameters")
        bare = [name for name, m in batchnorm_layers(module) if m.running_mean is None]
        if self.batchnorm == "frozen" and bare:
            raise InputError(
                f"batchnorm='frozen' needs running statistics, and {bare} keep none "
                "(track_running_stats=False). Use 'batch' or 'joint'."
            )
        if self.outputs and not isinstance(self.metric, Weights | None):
            raise InputError(
                "outputs=k goes with no metric or with fsmap.metric.Weights: a metric between "
                f"outputs needs all of them; got {type(self.metric).__name__}"
            )
        mode, beta = self.batchnorm, float(self.beta)
        if mode == "auto":
            mode = "batch" if bare else "frozen"
        estimator = by_name(self.estimator, beta=beta)
        return replace(self, px=as_px(self.px), estimator=estimator, batchnorm=mode, beta=beta)

    def _check_numbers(self) -> None:
        names = ("num_points", "every", "probes", *["outputs"] * (self.outputs is not None))
        for name in (*names, "seed"):
            given = getattr(self, name)
            whole = isinstance(given, Integral) and not isinstance(given, bool)
            if not whole or (given < 1 and name != "seed"):
                least = "" if name == "seed" else " of at least 1"
                raise InputError(f"{name} must be a whole number{least}, got {given!r}")
        beta: Any = self.beta
        if not (isinstance(beta, Real) and 0 < float(beta) < math.inf):
            raise InputError(f"beta must be a number > 0 and finite, got {self.beta!r}")


def check_mode(mode: str, allowed: tuple[str, ...] = MODES, instead: str = "") -> None:
    """Raise InputError if a mode is not among the allowed ones."""
    if mode not in allowed:
        raise InputError(
            f"batchnorm must be one of {', '.join(allowed)}, got {mode!r}. {instead}".strip()
        )


def batchnorm_layers(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The BatchNorm layers of a module, by name."""
    return [(name, m) for name, m in module.named_modules() if isinstance(m, _BatchNorm)]


def mode_of(module: nn.Module, mode: str) -> str:
    """The BatchNorm mode of LMAP: ``auto`` is ``joint`` if there is a BatchNorm layer."""
    auto = "joint" if batchnorm_layers(module) else "frozen"
    return auto if mode == "auto" else mode


def check_module(module: object) -> None:
    """Raise UnsupportedModuleError for a class, a function or a penalty."""
    if not isinstance(module, nn.Module):
        kind = getattr(module, "__name__", type(module).__name__)
        message = f"the model must be an nn.Module, got {kind}"
        if isinstance(module, type):
            message += f". Make an object of it: {kind}(...)"
        raise UnsupportedModuleError(message)


def check_strength(value: Any) -> None:
    """Raise InputError if λ is not None or one number ≥ 0; a tensor on a GPU is not read."""
    if isinstance(value, Tensor) and value.numel() == 1:
        fits = value.device.type != "cpu" or not (number(value) or 0.0) < 0
    else:
        real = isinstance(value, Real) and not isinstance(value, bool)
        fits = value is None or (real and 0 <= value < math.inf)
    if not fits:
        shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise InputError(f"reg_strength must be one number, finite and at least 0, got {shown}")


def trainable(module: nn.Module) -> Params:
    """The trainable parameters, not copied; raises UnsupportedModuleError if there is none."""
    found: Params = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise UnsupportedModuleError(
            f"no parameter of {type(module).__name__} is trainable, so there is no R. Set "
            "requires_grad on some of them, or call the model alone."
        )
    return found


class Outputs(NamedTuple):
    """The size V of the last output dimension, and the linear layer that computes it."""

    size: int
    head: str | None  # None if there is no such layer, or it is compiled

    @classmethod
    def of(cls, f: Functional, params: Params, x: Inputs) -> Outputs:
        """From one pass; the random state is restored."""
        layers = {n: m for n, m in f.module.named_modules() if type(m) is nn.Linear}
        made: dict[str, list[Tensor]] = {name: [] for name in layers}
        with ExitStack() as stack, torch.no_grad():
            stack.callback(NoiseReplay(f, params))
            for n, m in layers.items():
                if "_orig_mod" not in n:
                    keep = m.register_forward_hook(lambda _, __, out, n=n: made[n].append(out))
                    stack.enter_context(keep)
            out = run(f, params, x)[0]
        heads = [n for n, outs in made.items() if len(outs) == 1 and outs[0] is out]
        weights = [m.weight for m in layers.values()]
        heads = [n for n in heads if sum(w is layers[n].weight for w in weights) == 1]
        return cls(int(out.shape[-1]), heads[0] if heads else None)

    def draw(self, num: int, stream: Stream) -> Tensor:
        """``[num]`` entries without replacement, the same on every rank and micro-batch."""
        source = generator(stream.seed, stream.step, "outputs")
        return torch.randperm(self.size, generator=source, device=source.device)[:num].sort().values


class OnlyRows(Wrapped):
    """A model with only some outputs, ``[S, ..., k]``: rows of its last layer, if known."""

    def __init__(self, f: Functional, head: str | None, rows: Tensor) -> None:
        super().__init__(f)
        self._layer = None if head is None else f.module.get_submodule(head)
        self._rows = rows

    def with_state(
        self, params: Params, x: Inputs, buffers: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, State]:
        """As :meth:`Functional.with_state`."""
        layer, rows = self._layer, self._rows
        if layer is None:
            out, state = self.inner.with_state(params, x, buffers)
            return out[..., rows], state

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if weight is layer.weight:
                weight, bias = weight[rows], None if bias is None else bias[rows]
            return F.linear(input, weight, bias)

        with Replacing({F.linear: linear}):  # torch.compile traces no exchanged forward method
            return self.inner.with_state(params, x, buffers)


class SomeOutputs(NamedTuple):
    """A metric in which only some outputs count, each V/k times: for a pass that returns all."""

    rows: Tensor  # [k]
    size: int  # V
    metric: Metric | None = None  # None or per-point weights

    def at(self, x: Inputs, out: Tensor) -> Whitening:
        """Weights that are zero on the other outputs."""
        mask = out.new_zeros(self.size)
        mask[self.rows] = self.size / len(self.rows)
        weights = mask.repeat(out.shape[1] // self.size)  # [K]
        if isinstance(self.metric, Weights):
            weights = weights * self.metric.spread(x, out)
        return Weights(weights.expand(out.shape)).at(x, out)
