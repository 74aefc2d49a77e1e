r"""R(θ) and its gradient from ordinary passes at parameters that are moved in place.

For models without functional passes: parameters sharded by FSDP2, activation
checkpointing, kernels without forward mode. With f₀ = f(θ) and f₁ = f(θ+βψ) the estimate ``fd`` is
R = ‖f₁ − f₀‖²/β² (``eq:mc-laplace``, in the metric g), and its gradient has one term in each pass:

    ∇R = J(θ+βψ)ᵀ ∂R/∂f₁ + J(θ)ᵀ ∂R/∂f₀

The cotangents ∂R/∂f₁ and ∂R/∂f₀ are constants once both outputs are known. So: f₀ without a graph;
move the parameters; f₁ and its backward pass; put them back, bit for bit; f₀ once more, and its
backward pass: three forward and two backward passes, at parameters that do not change in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor, nn

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import (
    HALF,
    Functional,
    accumulate,
    check_derivatives,
    check_differences,
    check_points,
    flat,
    without_row,
)
from fsmap.linalg.jacobian import resolve
from fsmap.lmap.batchnorm import unchanged, unfrozen
from fsmap.lmap.module import Penalty, is_zero
from fsmap.lmap.options import MoreOptions, check_module, check_strength, trainable
from fsmap.px import EvalDistribution, Stream, sample
from fsmap.types import Inputs, Params

# In bf16 the two terms of ∇R cancel to within rounding. Measured on an MLP with GELU and LayerNorm:
# the gradient is off by 25 % at β = 1e-3, 9 % at 3e-3, 3 % at 1e-2 (where R itself is 3 % low). It
# grows with |θ|/β: 16 % at 1e-2 on a small network with weights of order 0.5.
SMALLEST_IN_HALF = 3e-3


class InPlacePenalty(Penalty):
    """λ∇R(θ) added to the gradients: ``loss.backward(); penalty.backward(lam)``.

    As ``LaplacianPenalty(estimator="fd")``; with ``frozen`` statistics are constants in the
    gradient. It needs only forward and backward passes, so it works with FSDP2
    (``fully_shard``), activation checkpointing, DDP, and any other model but a tensor-parallel one,
    given as the loop calls it: wrapped, sharded, compiled. ψ is the same on every rank, each rank
    draws evaluation points of its own, and gradients are averaged as those of the loss are. Options
    are those of :class:`fsmap.LaplacianPenalty` but ``estimator`` and ``outputs``. Give
    ``beta=1e-2`` if the model computes in half precision.

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
        other = [name for name in options if name in ("estimator", "outputs")]
        if other:
            raise InputError(f"InPlacePenalty has no option {other[0]!r}: its estimator is 'fd'")
        check_module(module)
        options["estimator"] = "fd"
        inner = _unwrapped(module)
        super().__init__(inner, px, num_points=num_points, batchnorm=batchnorm, **options)
        self.options = self.regularizer.options
        check_differences(self.regularizer.f)
        self.module = module
        self.f = Functional(module, self.options.forward)
        self._precision_checked = False

    def __call__(self, *_: Any) -> NoReturn:
        """Raise: R has no graph here."""
        raise InputError("InPlacePenalty has no call: penalty.backward(lam) after loss.backward()")

    def backward(self, reg_strength: float | Tensor = 1.0) -> Tensor:
        """Add λ∇R to every ``.grad``, as ``(lam * R).backward()`` would.

        Args:
            reg_strength: λ; with gradient accumulation over k micro-batches λ/k, with a GradScaler
                λ times its scale. A plain 0 makes no pass.

        Returns:
            R of this rank's points, a number without history; 0 on steps that ``every`` leaves out.
        """
        check_strength(reg_strength)
        check_derivatives("penalty.backward")
        reg, options = self.regularizer, self.options
        params = trainable(reg.module)
        like = next(iter(params.values()))
        value = torch.zeros((), device=like.device, dtype=like.dtype)
        if reg.active and not is_zero(reg_strength):
            stream = reg.stream()
            x = sample(options.px, options.num_points, params, stream)
            if not self._precision_checked:
                check_points(x)
            share = options.every / options.probes
            with unchanged(self.module):
                if options.batchnorm == "frozen":
                    for layer in unfrozen(self.module):
                        layer.training = False
                for probe in range(options.probes):
                    value += share * self._one(params, x, stream, probe, share * reg_strength)
            reg.scaled(value, reg_strength)
        reg.after_pass()
        return value

    def _one(
        self, params: Params, x: Inputs, stream: Stream, probe: int, weight: float | Tensor
    ) -> Tensor:
        with torch.no_grad():
            base = self._pass(x)
        with torch.enable_grad():
            with self._perturbed(params, stream, probe):
                there = self._pass(x)
                ends = [out.detach().requires_grad_() for out in (there, base)]
                moved = flat(accumulate(ends[0]) - accumulate(ends[1]), x) / self.options.beta
                value = resolve(self.options.metric, x, ends[1]).quadratic(moved)
                at_there, at_base = torch.autograd.grad(weight * value, ends)
                torch.autograd.backward(there, at_there)
            torch.autograd.backward(self._pass(x), at_base)
        return value.detach()

    def _pass(self, x: Inputs) -> Tensor:
        """An ordinary pass in full precision, with this step's noise in random layers."""
        full = torch.autocast(next(self.module.parameters()).device.type, enabled=False)
        checked = self._precision_checked
        with full, self.regularizer.own_noise():
            with nullcontext() if checked else _precise(self.module, self.options.beta):
                out = self.f.plain(x)
        self._precision_checked = True
        return out

    @contextmanager
    def _perturbed(self, params: Params, stream: Stream, probe: int) -> Iterator[None]:
        """The parameters at θ + βψ; afterwards at θ, to the last bit."""
        probes = self.options.probes
        kept = {name: _local(p).detach().clone() for name, p in params.items()}
        psi: Params = {}
        padding = self.regularizer.f.padding
        if not any(map(_is_sharded, params.values())):  # as LaplacianPenalty draws it
            psi = stream.psi(trainable(self.regularizer.module), probes)
        try:
            with torch.no_grad():
                for name, p in params.items():
                    # a rank never holds more than one sharded parameter whole
                    whole = torch.empty((), dtype=p.dtype, device=p.device).expand(p.shape)
                    drawn = psi[name] if psi else stream.psi_of(name, whole, probes)
                    one = without_row(drawn[probe], padding.get(name))
                    _local(p).add_(_own_part(one, p), alpha=self.options.beta)
            _drop_gathered(self.module)
            yield
        finally:
            with torch.no_grad():
                for name, p in params.items():
                    _local(p).copy_(kept[name])
            _drop_gathered(self.module)


@contextmanager
def _precise(module: nn.Module, beta: float) -> Iterator[None]:
    """Raise if a pass is in half precision (FSDP2's MixedPrecisionPolicy) and beta too small."""

    def check(layer: nn.Module, *_: Any) -> None:
        half = next((p.dtype for p in layer.parameters(recurse=False) if p.dtype in HALF), None)
        if half is not None and beta < SMALLEST_IN_HALF:
            raise UnsupportedModuleError(
                f"{type(layer).__name__} computes in {str(half).removeprefix('torch.')}, in which "
                f"a step of {beta=:g} is lost in rounding. Give beta=1e-2, or compute in float32 "
                "(no MixedPrecisionPolicy(param_dtype=...))."
            )

    with ExitStack() as hooks:
        for m in module.modules():
            hooks.enter_context(m.register_forward_pre_hook(check))
        yield


def _unwrapped(module: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose names are those of an undistributed run."""
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
        raise UnsupportedModuleError(
            "FullyShardedDataParallel (FSDP1) keeps flat parameters that cannot be moved by name. "
            "Use torch.distributed.fsdp.fully_shard (FSDP2)."
        )
    managed = {id(p) for part in _fsdp_modules(module) for p in part.parameters()}
    for p in module.parameters():
        shards = [place for place in getattr(p, "placements", ()) if not place.is_replicate()]
        if len(shards) > int(id(p) in managed):  # FSDP2's own is one
            raise UnsupportedModuleError(
                "the model has tensor-parallel parameters: their ranks compute one pass together "
                "and need the same points, but each rank draws its own. Use FSDP2 alone."
            )
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _is_sharded(p: Tensor) -> bool:
    return hasattr(p, "placements")


def _local(p: Tensor) -> Tensor:
    """This rank's shard of a parameter: shared memory, not a copy."""
    return p.to_local() if _is_sharded(p) else p  # type: ignore[attr-defined]


def _own_part(whole: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has in full; nothing is sent."""
    if not _is_sharded(p):
        return whole
    from torch.distributed.tensor import distribute_tensor

    like: Any = p
    placed = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to_local()


def _fsdp_modules(module: nn.Module) -> list[Any]:
    """The parts that ``fully_shard`` was called on."""
    return [m for m in module.modules() if hasattr(m, "reshard") and hasattr(m, "unshard")]


def _drop_gathered(module: nn.Module) -> None:
    """Drop full parameters that FSDP2 still holds, so that the next pass sees the shards."""
    for part in _fsdp_modules(module):
        part.reshard()
