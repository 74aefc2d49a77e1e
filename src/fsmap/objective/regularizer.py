"""R(θ) of ``eq:lmap-loss`` on a live module: the mathematics behind :mod:`fsmap.objective.lmap`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.errors import (
    FallbackWarning,
    IgnoredProbesWarning,
    InputError,
    UnsupportedModuleError,
)
from fsmap.functional import Forward, Functional, State, functional
from fsmap.linalg import points, trace
from fsmap.linalg.metric import Metric, Weights
from fsmap.linalg.probes import Stream, generator, rademacher
from fsmap.linalg.values import HALF, number
from fsmap.objective import batchnorm as bn
from fsmap.objective.compiling import as_written, never_compiled
from fsmap.objective.following import Following, first_pass, following
from fsmap.objective.geometry import sample
from fsmap.objective.px import EvalDistribution, as_px
from fsmap.objective.selection import Layers, Outputs, SomeOutputs, cut, survey, trainable
from fsmap.objective.sharding import refuse_sharded
from fsmap.objective.steps import Steps
from fsmap.types import Inputs, Params

STILL = (
    "R is exactly 0: the output does not change with the parameters that R is about. Either all "
    "its weights are zero, or a wrapper around or inside the model (FSDP, offloading, "
    "quantization) replaces the parameters that it is given."
)


class Regularizer:
    """R(θ) at fresh evaluation points: what :class:`LMAP` and :class:`LaplacianPenalty` share."""

    def __init__(
        self,
        module: nn.Module,
        px: EvalDistribution,
        *,
        num_points: int,
        estimator: str = "jvp",
        beta: float = 1e-3,
        every: int = 1,
        metric: Metric | Tensor | None = None,
        seed: int = 0,
        probes: int = 1,
        last_layer: str | None = None,
        layers: Layers | None = None,
        outputs: int | None = None,
        forward: Forward | None = None,
    ) -> None:
        """Check and keep the settings."""
        trace.check_method(estimator)
        check_numbers(num_points=num_points, every=every, probes=probes, outputs=outputs, beta=beta)
        if any(isinstance(getattr(m, "regularizer", None), Regularizer) for m in module.modules()):
            message = "the module is, or contains, an LMAP already: give the model inside it"
            raise UnsupportedModuleError(message)
        functional(module, last_layer=last_layer)  # raises if there is nothing to train
        self.f = Functional(module, forward, last_layer)
        self.module = module
        self.px = as_px(px)
        self.num_points, self.estimator, self.beta = num_points, estimator, beta
        self.metric, self.probes = metric, probes
        self.layers, self.outputs = layers, outputs
        self.steps = Steps(seed, every)
        self._looked = self._moved = False
        self._made: Outputs | None = None  # what makes the output, once it has been looked at
        self._check_combinations()

    def _check_combinations(self) -> None:
        message = None
        names = trainable(self.module, self.layers)
        if self.f.last_layer is not None:
            if self.metric is not None or self.estimator not in trace.PARAMETER_PROBES:
                message = (
                    "last_layer goes with the Euclidean metric and with "
                    f"{', '.join(trace.PARAMETER_PROBES)}; got estimator={self.estimator!r} and "
                    f"{'a' if self.metric is not None else 'no'} metric"
                )
            elif not all(name in names for name in self.f.last_layer_names()):
                message = (
                    f"last_layer={self.f.last_layer!r} is not among layers={self.layers!r}, so its "
                    "block is no part of R. Add it there, or leave last_layer out."
                )
        if self.outputs and not (self.metric is None or isinstance(self.metric, Weights)):
            message = (
                "outputs=k goes with no metric or with fsmap.metric.Weights: a metric between "
                f"outputs needs all of them; got {type(self.metric).__name__}"
            )
        if message:
            raise InputError(message)

    @property
    def step(self) -> int:
        """Number of the current step; setting it does not change who counts."""
        return self.steps.step

    @step.setter
    def step(self, step: int) -> None:
        self.steps.step = step

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer's steps from now on."""
        self.steps.attach(optimizer)

    def detach(self) -> None:
        """Count passes again: the optimizer's work is done, and another may be attached."""
        self.steps.detach()

    def set_step(self, step: int) -> None:
        """Which optimizer step this is, from a loop that counts them itself."""
        self.steps.set_step(step)

    def passed(self) -> None:
        """A pass is over."""
        self.steps.passed()

    @property
    def every(self) -> int:
        """R is evaluated on every so many steps."""
        return self.steps.every

    @property
    def active(self) -> bool:
        """Whether R is evaluated on this step."""
        return self.steps.active

    def stream(self) -> Stream:
        """This step's random numbers."""
        return self.steps.stream()

    def look(self, *inputs: Inputs) -> None:
        """Refuse NaN and inf in what the first pass sees; always looking would cost a wait."""
        if not self._looked:
            for x in inputs:
                points.check(x)
            self._looked = True

    def params(self) -> Params:
        """The parameters that R is about, as they are now."""
        refuse_sharded(self.module)
        return trainable(self.module, self.layers)

    def sample(self, params: Params) -> Inputs:
        """S evaluation points."""
        return sample(self.px, self.num_points, params, self.stream())

    @never_compiled
    def value(self, params: Params, x: Inputs) -> tuple[Tensor, Tensor, State]:
        """R (times ``every``), and the output and state of a pass that can serve the loss too."""
        chosen = self._chosen(params, x)
        metric = self.metric
        if chosen is not None:
            assert metric is None or isinstance(metric, Weights)
            metric = SomeOutputs(chosen[0], chosen[1].size, metric)
        return self._with_fallback(self.f, params, x, metric)

    @never_compiled
    def separate(self, mode: str, seen: Sequence[Following] = ()) -> Tensor:
        """R on a pass of its own, BatchNorm ``frozen`` or ``batch``; statistics untouched.

        Args:
            mode: Which of them.
            seen: How statistics follow the weights in the pass of the training points, if any.

        Returns:
            R.
        """
        params = self.params()
        x = self.sample(params)
        self.look(x)
        with following(self.module, mode == "frozen", seen) as layers, self.own_noise():
            chosen = self._chosen(params, x)
            f = self.f if chosen is None else cut(self.f, chosen[0], chosen[1].head)
            share = 1.0 if chosen is None else chosen[1].size / len(chosen[0])
            first_pass(layers, f, params, x, self.estimator)
            return share * self._with_fallback(f, params, x, self.metric)[0]

    def _chosen(self, params: Params, x: Inputs) -> tuple[Tensor, Outputs] | None:
        """This step's sample of outputs; None where all of them count."""
        if self.outputs is None:
            return None
        if self._made is None:
            self._made = survey(self.f, params, x)
        if self.outputs >= self._made.size:
            return None
        device = next(iter(params.values())).device
        return self._made.draw(self.outputs, self.stream()).to(device), self._made

    def _with_fallback(
        self, f: Functional, params: Params, x: Inputs, metric: Metric | Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        try:
            return self._value(f, params, x, metric)
        except UnsupportedModuleError as error:
            if self.estimator != "jvp" or "forward-mode" not in str(error):
                raise
            warnings.warn(f"{error} Using it from now on.", FallbackWarning, stacklevel=4)
            self.estimator = "fd_central"
            return self._value(f, params, x, metric)

    def _value(
        self, f: Functional, params: Params, x: Inputs, metric: Metric | Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        method = self.estimator
        if method.startswith("fd"):
            check_full_precision(params, self.beta)
        with bn.differentiable_sync(self.module, method), as_written(method):
            passes = [
                trace.estimate(f, params, x, probe, method=method, beta=self.beta, metric=metric)
                for probe in self._probes(f, params, x, metric)
            ]
            out, state = passes[0].out, passes[0].state
            if out is None or state is None:
                out, state = f.with_state(params, x)
        value = torch.stack([p.value for p in passes]).mean()
        if f.last_layer is not None:
            value = value + trace.last_layer_trace(f, out, state.features[0])
        self._check_moved(value)
        return self.every * value, out, state

    def _check_moved(self, value: Tensor) -> None:
        """Say once that R is zero: some wrapper may hand the model other parameters than ours."""
        if torch.is_grad_enabled() and not self._moved and number(value) == 0:
            message = f"{STILL} fsmap.InPlacePenalty may serve such a model."
            warnings.warn(message, IgnoredProbesWarning, stacklevel=5)
        self._moved |= torch.is_grad_enabled()

    def _probes(
        self, f: Functional, params: Params, x: Inputs, metric: Metric | Tensor | None
    ) -> list[Any]:
        stream = self.stream()
        if self.estimator == "exact":
            return [None]
        if self.estimator == "vjp":
            with torch.no_grad():
                out = f(params, x)
                size = trace.resolve(metric, x, out).size
            signs = generator(stream.seed, stream.step, "signs", stream.rank)
            return list(rademacher(self.probes, size, signs, out))
        psi = stream.psi(params, self.probes)
        for name in f.last_layer_names():
            psi[name] = torch.zeros_like(psi[name])
        return [{n: p[r] for n, p in psi.items()} for r in range(self.probes)]

    @contextmanager
    def own_noise(self) -> Iterator[None]:
        """Random layers draw from this step's own stream, and the loop's stream is left alone."""
        if self.f.pointwise:
            yield
            return
        device = next(self.module.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.stream().noise())
            yield


def check_numbers(*, beta: float, **numbers: int | None) -> None:
    """Refuse numbers out of their domain.

    Raises:
        InputError: With the name and what came.
    """
    for name, given in numbers.items():
        if given is not None and (given < 1 or given != int(given)):
            kind = "at least 1" if given < 1 else "a whole number"
            message = f"{name} must be {kind}, got {given}"
            raise InputError(message)
    if not beta > 0:
        message = f"beta must be > 0, got {beta:g}"
        raise InputError(message)


def check_full_precision(params: Params, beta: float) -> None:
    """Refuse differences where they drown.

    Raises:
        InputError: If a parameter is in half precision.
    """
    half = next((p.dtype for p in params.values() if p.dtype in HALF), None)
    if half is not None:
        message = (
            f"differences of size {beta=:g} drown in {str(half).removeprefix('torch.')} "
            "parameters. Keep them in float32 and use torch.autocast, or use the estimator 'jvp' "
            "or 'vjp'."
        )
        raise InputError(message)
