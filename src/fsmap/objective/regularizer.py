"""R(θ) of ``eq:lmap-loss`` on a live module: the mathematics behind :mod:`fsmap.objective.lmap`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.errors import FallbackWarning, InputError, UnsupportedModuleError
from fsmap.functional import Forward, Functional, State, functional
from fsmap.linalg import points, trace
from fsmap.linalg.metric import Metric
from fsmap.linalg.probes import Stream, generator, rademacher
from fsmap.objective import batchnorm as bn
from fsmap.objective.geometry import sample
from fsmap.objective.px import EvalDistribution, as_px
from fsmap.types import Inputs, Params


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
        forward: Forward | None = None,
    ) -> None:
        """Check and keep the settings."""
        trace.check_method(estimator)
        for name, number in (("num_points", num_points), ("every", every), ("probes", probes)):
            if number < 1:
                message = f"{name} must be at least 1, got {number}"
                raise InputError(message)
        if last_layer is not None and (
            metric is not None or estimator not in trace.PARAMETER_PROBES
        ):
            message = (
                "last_layer goes with the Euclidean metric and with "
                f"{', '.join(trace.PARAMETER_PROBES)}; "
                f"got {estimator=} and {'a' if metric is not None else 'no'} metric"
            )
            raise InputError(message)
        if not beta > 0:
            message = f"beta must be > 0, got {beta:g}"
            raise InputError(message)
        functional(module, last_layer=last_layer)  # raises if there is nothing to train
        self.f = Functional(module, forward, last_layer)
        self.module = module
        self.px = as_px(px)
        self.num_points, self.estimator, self.beta = num_points, estimator, beta
        self.every, self.metric, self.seed, self.probes = every, metric, seed, probes
        self.step = 0
        self._micro = 0  # forward passes since the optimizer's last step
        self._attached = False
        self._attachment = 0  # which one counts: hooks of earlier ones are deaf
        self._looked = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Regularizer:
        """A copy belongs to another model: no optimizer counts its steps yet."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        made._attached = False
        return made

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer's steps from now on.

        Raises:
            InputError: If steps are counted already.
        """
        if self._attached:
            message = "this is attached to an optimizer already: a second one would count twice"
            raise InputError(message)
        self._attached = True
        self._attachment = number = self._attachment + 1
        optimizer.register_step_post_hook(lambda *_: self._advance(number))

    def detach(self) -> None:
        """Count passes again: the optimizer's work is done, and another may be attached."""
        self._attached = False
        self._attachment += 1
        self._micro = 0

    def set_step(self, step: int) -> None:
        """Which optimizer step this is, from a trainer that counts them itself."""
        self._attached = True
        if step != self.step:
            self.step, self._micro = step, 0

    def passed(self) -> None:
        """A forward pass is over: the next step, or the next micro-batch of an attached one."""
        if self._attached:
            self._micro += 1
        else:
            self.step += 1

    def look(self, *inputs: Inputs) -> None:
        """Refuse NaN and inf in what the first pass sees; always looking would cost a wait."""
        if not self._looked:
            for x in inputs:
                points.check(x)
            self._looked = True

    def _advance(self, attachment: int) -> None:
        if attachment == self._attachment:
            self.step += 1
            self._micro = 0

    @property
    def active(self) -> bool:
        """Whether R is evaluated on this step."""
        return self.step % self.every == 0

    def stream(self) -> Stream:
        """This step's random numbers: ψ the same on every rank, evaluation points its own."""
        return Stream(self.seed, self.step, _rank(), self._micro)

    def params(self) -> Params:
        """The module's trainable parameters as they are now.

        Returns:
            Live tensors, keyed as in ``named_parameters()``.

        Raises:
            UnsupportedModuleError: If they are sharded.
        """
        params: Params = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if any(hasattr(p, "placements") for p in params.values()):
            message = (
                "the parameters are sharded (FSDP2/DTensor): a functional pass would ignore ψ and "
                "return R = 0 without an "
                "error. Use DDP, or apply fully_shard to nothing that this wraps."
            )
            raise UnsupportedModuleError(message)
        return params

    def sample(self, params: Params) -> Inputs:
        """S evaluation points."""
        return sample(self.px, self.num_points, params, self.stream())

    def value(self, params: Params, x: Inputs) -> tuple[Tensor, Tensor, State]:
        """R (times ``every``), the unperturbed output and the state of that pass."""
        try:
            return self._value(params, x)
        except UnsupportedModuleError as error:
            if self.estimator != "jvp" or "forward-mode" not in str(error):
                raise
            warnings.warn(f"{error} Using it from now on.", FallbackWarning, stacklevel=4)
            self.estimator = "fd_central"
            return self._value(params, x)

    def _value(self, params: Params, x: Inputs) -> tuple[Tensor, Tensor, State]:
        passes = [
            trace.estimate(
                self.f, params, x, probe, method=self.estimator, beta=self.beta, metric=self.metric
            )
            for probe in self._probes(params, x)
        ]
        value = torch.stack([p.value for p in passes]).mean()
        out, state = passes[0].out, passes[0].state
        if out is None or state is None:
            out, state = self.f.with_state(params, x)
        if self.f.last_layer is not None:
            value = value + trace.last_layer_trace(self.f, out, state.features[0])
        return self.every * value, out, state

    def _probes(self, params: Params, x: Inputs) -> list[Any]:
        stream = self.stream()
        if self.estimator == "exact":
            return [None]
        if self.estimator == "vjp":
            with torch.no_grad():
                out = self.f(params, x)
                size = trace.resolve(self.metric, x, out).size
            signs = generator(self.seed, self.step, "signs", stream.rank)
            return list(rademacher(self.probes, size, signs, out))
        psi = stream.psi(params, self.probes)
        for name in self.f.last_layer_names():
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

    def separate(self, mode: str) -> Tensor:
        """R on a pass of its own, BatchNorm ``frozen`` or ``batch``; statistics untouched."""
        params = self.params()
        x = self.sample(params)
        self.look(x)
        if mode == "frozen":
            with bn.frozen(self.module), self.own_noise():
                return self.value(params, x)[0]
        with self.own_noise():
            return self.value(params, x)[0]


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
