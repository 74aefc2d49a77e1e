r"""R(θ) and its gradient from ordinary passes at parameters that are moved in place.

For models that a functional pass cannot serve: parameters sharded by FSDP2, activation
checkpointing, kernels without forward mode. With f₀ = f(θ) and f₁ = f(θ+βψ) the estimate ``fd`` is
R = ‖f₁ − f₀‖²/β² (``eq:mc-laplace``, in the metric g), and its gradient has one term in each pass:

    ∇R = J(θ+βψ)ᵀ ∂R/∂f₁ + J(θ)ᵀ ∂R/∂f₀

The cotangents ∂R/∂f₁ and ∂R/∂f₀ are constants once both outputs are known. So: f₀ without a graph;
move the parameters; f₁ and its backward pass; put them back, bit for bit; f₀ once more, and its
backward pass. No graph ever sees a parameter change: three forward and two backward passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fsmap.errors import IgnoredProbesWarning, InputError, UnsupportedModuleError
from fsmap.functional import HALF, Functional, accumulate, check_points, flat, number
from fsmap.linalg.jacobian import resolve
from fsmap.lmap import batchnorm as bn
from fsmap.lmap import sharding
from fsmap.lmap.core import NO_EFFECT
from fsmap.lmap.options import MoreOptions, Options, check_module, check_strength
from fsmap.lmap.selection import trainable
from fsmap.lmap.steps import Steps
from fsmap.px import EvalDistribution, Stream, sample
from fsmap.types import Inputs, Params

# In bf16 the two terms of ∇R cancel to within rounding. Measured on an MLP with GELU and LayerNorm:
# the gradient is off by 25 % at β = 1e-3, 9 % at 3e-3, 3 % at 1e-2 (where R itself is 3 % low). It
# goes with |θ|/β: 16 % at 1e-2 on a small network with weights of order 0.5.
SMALLEST_IN_HALF = 3e-3


class InPlacePenalty:
    """λ∇R(θ) added to the gradients: ``loss.backward(); penalty.backward(lam)``.

    As ``LaplacianPenalty(estimator="fd")`` with a ψ that is drawn parameter by parameter; with
    ``frozen`` statistics are constants in the gradient (:mod:`fsmap.lmap.batchnorm`). It needs
    nothing from the model but forward and backward passes, so it serves FSDP2 (``fully_shard``),
    FSDP2 with activation checkpointing, DDP, and any other model. ψ is the same on every rank, each
    rank draws evaluation points of its own, and gradients are averaged as those of the loss are.

    Args:
        module: The model as the loop calls it: wrapped, sharded, compiled.
        px: Evaluation distribution; see :class:`fsmap.LMAP`.
        num_points: S, fresh points per rank and call.
        batchnorm: ``frozen`` (what ``auto`` means where there are running statistics) or ``batch``;
            running statistics stay as they are.
        **options: ``beta`` (give 1e-2 if the model computes in half precision), ``every``,
            ``metric``, ``seed``, ``probes`` (each costs three forward and two backward passes),
            ``layers`` and ``forward`` of :class:`fsmap.lmap.options.Options`.

    Example:
        >>> import torch, fsmap
        >>> model = torch.nn.Linear(2, 3)
        >>> penalty = fsmap.InPlacePenalty(model, fsmap.px.Normal(shape=(2,)), num_points=16)
        >>> R = penalty.backward(1e-3)
        >>> bool(R > 0), model.weight.grad.shape
        (True, torch.Size([3, 2]))
    """

    def __init__(
        self,
        module: nn.Module,
        px: EvalDistribution,
        *,
        num_points: int,
        batchnorm: str = "auto",
        **options: Unpack[MoreOptions],
    ) -> None:
        """See the class."""
        other = [name for name in options if name in ("estimator", "last_layer", "outputs")]
        if other:
            message = f"InPlacePenalty has no option {other[0]!r}: its estimator is 'fd'"
            raise InputError(message)
        bn.check_mode(batchnorm, ("auto", "frozen", "batch"), "For 'joint' use fsmap.LMAP.")
        check_module(module)
        mode = bn.deployed(module) if batchnorm == "auto" else batchnorm
        options["estimator"] = "fd"
        made = Options(px, num_points, mode, **options)
        self.options = made.checked(sharding.unwrapped(module))
        self.f = Functional(module, made.forward)
        self.module = module
        self.steps = Steps(made.seed, made.every)
        self._looked = self._judged = False

    @property
    def batchnorm(self) -> str:
        """How BatchNorm sees the evaluation points."""
        return self.options.batchnorm

    def backward(self, reg_strength: float | Tensor = 1.0) -> Tensor:
        """Add λ∇R to every ``.grad``, as ``(lam * R).backward()`` would.

        Args:
            reg_strength: λ; with gradient accumulation over k micro-batches λ/k, with a GradScaler
                λ times its scale. A plain 0 makes no pass.

        Returns:
            R of this rank's points, a number without history; 0 on steps that ``every`` leaves out.
        """
        check_strength(reg_strength)
        params = trainable(sharding.unwrapped(self.module), self.options.layers)
        like = next(iter(params.values()))
        value = torch.zeros((), device=like.device, dtype=like.dtype)
        zero = isinstance(reg_strength, int | float) and reg_strength == 0
        if self.steps.active and not zero:
            stream = self.steps.stream()
            x = sample(self.options.px, self.options.num_points, params, stream)
            if not self._looked:
                check_points(x)
            share = self.options.every / self.options.probes
            with bn.frozen(self.module, self.batchnorm == "frozen"), _kept_buffers(self.module):
                for probe in range(self.options.probes):
                    value += share * self._one(params, x, stream, probe, share * reg_strength)
            if not self._judged and number(value) == 0:
                warnings.warn(NO_EFFECT, IgnoredProbesWarning, stacklevel=2)
            self._judged = True
        self.steps.passed()
        return value

    def _one(
        self, params: Params, x: Inputs, stream: Stream, probe: int, weight: float | Tensor
    ) -> Tensor:
        with torch.no_grad():
            base = self._pass(x, stream)
        with torch.enable_grad():
            with self._moved(params, stream, probe):
                there = self._pass(x, stream)
                value, at_there, at_base = self._cotangents(x, there, base, weight)
                torch.autograd.backward(there, at_there)
            torch.autograd.backward(self._pass(x, stream), at_base)
        return value

    def _cotangents(
        self, x: Inputs, there: Tensor, base: Tensor, weight: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """R, and the derivatives of weight·R with respect to both outputs."""
        ends = [out.detach().requires_grad_() for out in (there, base)]
        difference = (
            flat(accumulate(ends[0]) - accumulate(ends[1]), x) / self.options.beta
        )  # [S, K]
        value = resolve(self.options.metric, x, ends[1]).quadratic(difference)
        at_there, at_base = torch.autograd.grad(weight * value, ends)
        return value.detach(), at_there, at_base

    def _pass(self, x: Inputs, stream: Stream) -> Tensor:
        """An ordinary pass in full precision, with this step's noise in random layers."""
        device = next(self.module.parameters()).device
        with torch.autocast(device.type, enabled=False), self._noise(stream, device):
            if self._looked:
                return self.f.plain(x)
            with _precise(self.module, self.options.beta):
                out = self.f.plain(x)
            self._looked = True
            return out

    @contextmanager
    def _noise(self, stream: Stream, device: torch.device) -> Iterator[None]:
        if self.f.pointwise:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(stream.noise())
            yield

    @contextmanager
    def _moved(self, params: Params, stream: Stream, probe: int) -> Iterator[None]:
        """The parameters at θ + βψ; afterwards at θ, to the last bit."""
        kept = {name: sharding.local(p).detach().clone() for name, p in params.items()}
        whole = None if any(map(sharding.is_cut, params.values())) else self._whole(params, stream)
        try:
            with torch.no_grad():
                for name, p in params.items():
                    if whole is None:  # no rank holds more than one parameter whole
                        drawn = stream.psi_of(name, sharding.whole_like(p), self.options.probes)
                    else:
                        drawn = whole[name]
                    moved = sharding.own_part(drawn[probe], p)
                    sharding.local(p).add_(moved, alpha=self.options.beta)
            sharding.forget_gathered(self.module)
            yield
        finally:
            with torch.no_grad():
                for name, p in params.items():
                    sharding.local(p).copy_(kept[name])
            sharding.forget_gathered(self.module)

    def _whole(self, params: Params, stream: Stream) -> Params:
        """ψ as :class:`fsmap.LaplacianPenalty` draws it."""
        every = trainable(sharding.unwrapped(self.module))
        return {n: p for n, p in stream.psi(every, self.options.probes).items() if n in params}

    def attach(self, optimizer: torch.optim.Optimizer) -> InPlacePenalty:
        """Count this optimizer's steps instead of calls."""
        self.steps.attach(optimizer, self.module)
        return self

    @property
    def step(self) -> int:
        """Number of the current step. Set it before a call to count steps yourself."""
        return self.steps.step

    @step.setter
    def step(self, step: int) -> None:
        self.steps.set_step(step)

    def state_dict(self) -> dict[str, int]:
        """The step; the model's own state is the model's."""
        return {"step": self.steps.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the step."""
        self.steps.step = int(state["step"])


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Running statistics as they were before."""
    kept = {name: b.clone() for name, b in module.named_buffers()}
    try:
        yield
    finally:
        bn.write_back(module, kept)


@contextmanager
def _precise(module: nn.Module, beta: float) -> Iterator[None]:
    """Refuse a pass in half precision (FSDP2's MixedPrecisionPolicy) where beta is too small."""

    def look(layer: nn.Module, *_: Any) -> None:
        half = next((p.dtype for p in layer.parameters(recurse=False) if p.dtype in HALF), None)
        if half is not None and beta < SMALLEST_IN_HALF:
            message = (
                f"{type(layer).__name__} computes in {str(half).removeprefix('torch.')}, in which "
                f"differences of size {beta=:g} drown. Give beta=1e-2, or compute in float32 (no "
                "MixedPrecisionPolicy(param_dtype=...))."
            )
            raise UnsupportedModuleError(message)

    hooks = [m.register_forward_pre_hook(look) for m in module.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
