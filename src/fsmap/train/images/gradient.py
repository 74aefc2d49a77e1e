r"""The gradient of one step as a pure function: cross-entropy + λR (``eq:lmap-loss``).

Everything comes in (parameters, buffers, images, ψ, λ) and everything goes out (gradients, new
running statistics, numbers to log), so it can be traced, compiled and captured. The mathematics of
R is :func:`fsmap.linalg.trace.estimate`, as in :class:`fsmap.LMAP`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fsmap.errors import InputError
from fsmap.functional import State
from fsmap.functional.noise import couples_points, is_random
from fsmap.linalg import trace
from fsmap.objective.following import first_pass, following, watched
from fsmap.train.images.settings import ImageSettings
from fsmap.types import Params

PLAIN, JOINED, REGULARIZED = "plain", "joined", "regularized"


class Feed(NamedTuple):
    """What one step reads."""

    x: Tensor  # [B, C, H, W]
    y: Tensor  # [B]
    points: Tensor  # [S, C, H, W], or none of them
    psi: Params  # {name: [...]}; for vjp the signs, under the name "signs"; empty where not used
    reg_strength: Tensor  # []  λ
    scale: Tensor  # []  of the loss, against underflow in fp16


class Gradient(NamedTuple):
    """What one step makes."""

    grads: list[Tensor]  # as params.values()
    buffers: dict[str, Tensor]
    measured: Tensor  # [3]  cross-entropy, R, number of right answers


GradientFn = Callable[[Params, dict[str, Tensor], Feed], Gradient]


class ImageModel:
    """A module as ``f(params, x)`` with given buffers, in a given precision; float32 logits."""

    last_layer = None

    def __init__(
        self, module: nn.Module, buffers: dict[str, Tensor], half: torch.dtype | None
    ) -> None:
        """Keep them.

        Args:
            module: The module, in training mode.
            buffers: Cloned in every pass.
            half: The precision of matrix products, or None for the parameters'.
        """
        self.module, self.buffers, self.half = module, buffers, half

    @property
    def pointwise(self) -> bool:
        """Whether a point's output depends on that point alone."""
        return not any(is_random(m) or couples_points(m) for m in self.module.modules())

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Logits."""
        return self.with_state(params, x)[0]

    def with_state(self, params: Params, x: Tensor) -> tuple[Tensor, State]:
        """Logits, and the buffers as the pass left them."""
        buffers = {name: b.clone() for name, b in self.buffers.items()}
        how = (
            nullcontext()
            if self.half is None
            else torch.autocast(x.device.type, self.half, cache_enabled=False)
        )
        with how:
            out: Tensor = functional_call(self.module, {**params, **buffers}, (x,))
        return (out if self.half is None else out.float()), State(buffers)


def make_gradient(
    module: nn.Module, settings: ImageSettings, kind: str, half: torch.dtype | None
) -> GradientFn:
    """The gradient of one kind of step.

    Args:
        module: The module, in training mode; its own parameters and buffers are not used.
        settings: Of the run.
        kind: ``plain`` (no evaluation points), ``joined`` (one batch with them, but no R: steps
            of ``joint`` between two evaluations of R) or ``regularized``.
        half: Precision of matrix products, see :func:`half_precision`.

    Returns:
        The function.
    """

    def objective(
        params: Params, buffers: dict[str, Tensor], feed: Feed
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Logits, cross-entropy, R and new buffers."""
        f, size = ImageModel(module, buffers, half), len(feed.x)
        value = feed.reg_strength.new_zeros(())
        if kind != PLAIN and settings.batchnorm == "joint":
            both = torch.cat([feed.x, feed.points])
            if kind == REGULARIZED:
                value, out, state = _laplacian(f, params, both, feed, settings)
            else:
                out, state = f.with_state(params, both)
        else:
            frozen = kind == REGULARIZED and settings.batchnorm == "frozen"
            with watched(module, frozen) as seen:
                out, state = f.with_state(params, feed.x)
            if kind == REGULARIZED:
                deployed = ImageModel(module, state.buffers, half)
                with following(module, frozen, seen) as layers:
                    first_pass(layers, deployed, params, feed.points, settings.estimator)
                    value = _laplacian(deployed, params, feed.points, feed, settings)[0]
        logits = out[:size]
        loss = F.cross_entropy(logits, feed.y, label_smoothing=settings.label_smoothing)
        return logits, loss, value, state.buffers

    def gradient(params: Params, buffers: dict[str, Tensor], feed: Feed) -> Gradient:
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        logits, loss, value, after = objective(leaves, buffers, feed)
        total = loss if kind != REGULARIZED else loss + feed.reg_strength * value
        total = total * feed.scale if half == torch.float16 else total
        grads = torch.autograd.grad(total, list(leaves.values()))
        if settings.sam:
            there = _ascended(leaves, grads, settings.sam)
            total = objective(there, buffers, feed)[1]
            total = total * feed.scale if half == torch.float16 else total
            grads = torch.autograd.grad(total, list(there.values()))
        right = (logits.argmax(1) == feed.y).sum()
        measured = torch.stack([t.detach().float() for t in (loss, value, right)])
        found = [g / feed.scale for g in grads] if half == torch.float16 else grads
        return Gradient(
            [laid_out_as(p, g) for g, p in zip(found, params.values(), strict=True)],
            {n: b.detach() for n, b in after.items()},
            measured,
        )

    return gradient


def half_precision(settings: ImageSettings, device: torch.device) -> torch.dtype | None:
    """The precision of matrix products; differences of size β need more bits than bf16 has.

    Args:
        settings: Of the run.
        device: Where it runs.

    Returns:
        float16, bfloat16, or None for float32 (TF32 or not).

    Raises:
        InputError: If fp16 is asked for on a CPU.
    """
    precision = settings.precision
    if precision == "bf16" and settings.regularized and settings.estimator.startswith("fd"):
        precision = "fp16" if device.type == "cuda" else "fp32"
    if precision == "fp16" and device.type != "cuda":
        message = f"precision='fp16' needs a CUDA device, got {device}. Use 'fp32' or 'bf16'."
        raise InputError(message)
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)


def _laplacian(
    f: ImageModel, params: Params, x: Tensor, feed: Feed, settings: ImageSettings
) -> tuple[Tensor, Tensor, State]:
    """R at the points (k times, for ``every=k``), the unperturbed output and its state."""
    probe: Params | Tensor
    if settings.estimator == "vjp":
        probe = feed.psi["signs"]
    else:
        probe = {name: psi.to(params[name].dtype) for name, psi in feed.psi.items()}
    found = trace.estimate(f, params, x, probe, method=settings.estimator, beta=settings.beta)
    out, state = found.out, found.state
    if out is None or state is None:
        out, state = f.with_state(params, x)
    return settings.every * found.value, out, state


def _ascended(params: Params, grads: tuple[Tensor, ...], radius: float) -> Params:
    """θ + ρ·g/‖g‖, from where sharpness-aware minimization takes its gradient."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    factor = radius / (norm + 1e-12)
    return {
        n: (p + factor * g).detach().requires_grad_()
        for (n, p), g in zip(params.items(), grads, strict=True)
    }


def laid_out_as(p: Tensor, grad: Tensor) -> Tensor:
    """A gradient in the memory layout of its parameter: fused SGD reads both by place.

    Args:
        p: The parameter.
        grad: Its gradient.

    Returns:
        The gradient itself where it fits, else a copy.
    """
    fits = grad.stride() == p.stride() and grad.dtype == p.dtype
    return grad if fits else torch.empty_like(p).copy_(grad)
