"""The options of L-MAP, in one place: every way in takes these names, with these meanings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor, nn

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import Forward, functional
from fsmap.linalg.estimators import Estimator, by_name
from fsmap.linalg.metric import Metric, Weights
from fsmap.lmap import batchnorm as bn
from fsmap.lmap.selection import Layers, trainable
from fsmap.px import EvalDistribution, as_px


class MoreOptions(TypedDict, total=False):
    """What :class:`Options` takes besides ``px``, ``num_points`` and ``batchnorm``."""

    estimator: str | Estimator
    beta: float
    every: int
    metric: Metric | Tensor | None
    seed: int
    probes: int
    last_layer: str | None
    layers: Layers | None
    outputs: int | None
    forward: Forward | None


@dataclass(frozen=True)
class Options:
    """How R is measured.

    Attributes:
        px: Evaluation distribution: one of :mod:`fsmap.px`, a tensor of points, or a callable ``(n,
            generator) -> x``.
        num_points: S, fresh points a step.
        batchnorm: ``joint``, ``frozen`` or ``batch``; see :mod:`fsmap.lmap.batchnorm`.
        estimator: A name of :func:`fsmap.trace` or an object. ``jvp`` falls back to ``fd_central``,
            with a warning, if the model has no forward mode.
        beta: Step of the differences (``fd``, ``fd_central``).
        every: Evaluate R on every k-th optimizer step only, k times as strong; 0 otherwise.
        metric: g, see :mod:`fsmap.metric`.
        seed: ψ is a function of the seed, the step and the model's parameters.
        probes: ψ per step.
        last_layer: Name of the linear layer that makes the output: its block of the trace is then
            exact, at no cost.
        layers: R over these parameters only: names of layers or parameters, patterns such as
            ``"block.*"``, or a function of a parameter's name. None: all that are trainable.
        outputs: R over so many entries of the last output dimension, another random sample on each
            step, scaled so that R is unbiased; for large vocabularies.
        forward: ``forward(module, x)`` if the module's signature is unusual.
    """

    px: EvalDistribution
    num_points: int
    batchnorm: str = "joint"
    estimator: Any = "jvp"
    beta: float = 1e-3
    every: int = 1
    metric: Metric | Tensor | None = None
    seed: int = 0
    probes: int = 1
    last_layer: str | None = None
    layers: Layers | None = None
    outputs: int | None = None
    forward: Forward | None = None

    def checked(self, module: nn.Module) -> Options:
        """The same with p_X and the estimator as objects; raises if something does not fit."""
        _check_numbers(self)
        check_module(module)
        if any(getattr(m, "_is_lmap", False) for m in module.modules()):
            message = "the module is, or contains, an LMAP already: give the model inside it"
            raise UnsupportedModuleError(message)
        _, params = functional(module, last_layer=self.last_layer)
        found = [name for name, p in params.items() if p.is_complex()]
        if found:
            message = f"{found[0]!r} is complex; R is defined for real parameters"
            raise UnsupportedModuleError(message)
        if self.batchnorm == "frozen":
            bn.check_running(module)
        estimator = by_name(self.estimator, beta=self.beta)
        made = Options(**{**self.__dict__, "px": as_px(self.px), "estimator": estimator})
        _check_combinations(made, module)
        return made


def check_module(module: object) -> None:
    """Raise UnsupportedModuleError for a class, a function or a penalty."""
    if not isinstance(module, nn.Module):
        kind = getattr(module, "__name__", type(module).__name__)
        message = f"the model must be an nn.Module, got {kind}"
        if isinstance(module, type):
            message += f". Make an object of it: {kind}(...)"
        raise UnsupportedModuleError(message)


def _check_numbers(options: Options) -> None:
    for name in ("num_points", "every", "probes", "outputs"):
        given = getattr(options, name)
        if given is None and name == "outputs":
            continue
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            message = f"{name} must be a whole number of at least 1, got {given!r}"
            raise InputError(message)
    if isinstance(options.seed, bool) or not isinstance(options.seed, int):
        message = f"seed must be a whole number, got {options.seed!r}"
        raise InputError(message)
    if not 0 < options.beta < math.inf:
        message = f"beta must be > 0 and finite, got {options.beta:g}"
        raise InputError(message)


def _check_combinations(options: Options, module: nn.Module) -> None:
    names = trainable(module, options.layers)
    estimator, metric, message = options.estimator, options.metric, None
    if options.last_layer is not None:
        layer = module.get_submodule(options.last_layer)
        own = [n for n, p in layer.named_parameters() if p.requires_grad]
        if metric is not None or not estimator.parameter_probes:
            message = (
                "last_layer goes with the Euclidean metric and with estimators that probe the "
                f"parameters (jvp, fd, fd_central); got estimator={estimator.name!r} and "
                f"{'a' if metric is not None else 'no'} metric"
            )
        elif not all(f"{options.last_layer}.{n}" in names for n in own):
            message = (
                f"last_layer={options.last_layer!r} is not among layers={options.layers!r}, so its "
                "block is no part of R. Add it there, or leave last_layer out."
            )
    if options.outputs and not (metric is None or isinstance(metric, Weights)):
        message = (
            "outputs=k goes with no metric or with fsmap.metric.Weights: a metric between outputs "
            f"needs all of them; got {type(metric).__name__}"
        )
    if message:
        raise InputError(message)


def check_strength(value: Any, *, required: bool = False) -> None:
    """Raise InputError if λ is not a tensor, a finite number ≥ 0, or None where that is allowed."""
    if isinstance(value, Tensor) or (value is None and not required):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        message = f"reg_strength must be finite and at least 0, got {value!r}"
        raise InputError(message)
