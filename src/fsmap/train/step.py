"""One step: the gradient of the pure loss, clipped, then the optimizer's update in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsmap.errors import UnsupportedModuleError
from fsmap.functional import Functional
from fsmap.linalg.probes import Stream
from fsmap.objective.objective import Objective, Parts
from fsmap.train.optim import clip_factor, global_norm, scale
from fsmap.types import Batch, Draws, Inputs, ModelFn, Params

Hypers = dict[str, Tensor]
LossFn = Callable[[Params, Hypers, Batch, Draws], tuple[Tensor, Parts]]
PARTS = ("likelihood", "prior", "geometry")
COLUMNS = ("loss", *PARTS, "grad_norm")
"""What a step measures; the three terms are in nats for the whole data set."""


def make_loss(f: ModelFn, build: Callable[..., Objective]) -> LossFn:
    """The one loss of both loops, as a pure function of everything that varies."""

    def loss(params: Params, hypers: Hypers, batch: Batch, draws: Draws) -> tuple[Tensor, Parts]:
        return build(**hypers).loss(f, params, batch, draws)

    return loss


def update(
    loss: LossFn,
    params: Params,
    hypers: Hypers,
    batch: Batch,
    draws: Draws,
    *,
    optimizer: Optimizer,
    clip: float | None,
) -> Tensor:
    """Differentiate, clip, and move the parameters in place.

    Args:
        loss: The pure loss.
        params: Leaves that require gradients; what ``optimizer`` updates.
        hypers: What the loss's objective is built from.
        batch: Training points.
        draws: Evaluation points and probes.
        optimizer: Takes the step.
        clip: Largest norm of the gradient; None leaves it alone.

    Returns:
        The numbers of ``COLUMNS`` before the step, ``[5]``, still on the device.
    """
    value, parts = loss(params, hypers, batch, draws)
    found = torch.autograd.grad(value, list(params.values()), materialize_grads=True)
    grads = dict(zip(params, found, strict=True))
    norm = global_norm(grads)
    if clip is not None:
        grads = scale(grads, clip_factor(norm, clip))
    for name, p in params.items():
        p.grad = grads[name]
    optimizer.step()
    measured = [value, *(parts[name] for name in PARTS), norm]
    return torch.stack([m.detach().to(value.dtype) for m in measured])


@contextmanager
def layer_noise(f: ModelFn, stream: Stream, device: torch.device) -> Iterator[None]:
    """Random layers (dropout) drawn from (seed, step); torch's own generator is left as it was."""
    if getattr(f, "pointwise", True):
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(stream.noise())
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(stream.noise())
        yield


def check_pure(f: ModelFn, params: Params, x: Inputs) -> None:
    """Refuse a model that wants to change its own buffers while it trains.

    Args:
        f: The model function.
        params: Parameters.
        x: Some points.

    Raises:
        UnsupportedModuleError: If a pass changes a buffer, such as BatchNorm's running statistics.
    """
    if not isinstance(f, Functional):
        return
    device = next(iter(params.values())).device
    with torch.no_grad(), layer_noise(f, Stream(0, 0), device):
        after = f.with_state(params, x)[1].buffers
    before = dict(f.module.named_buffers())
    changed = [n for n in after if not torch.equal(after[n].to(before[n]), before[n])]
    if changed:
        message = (
            f"{_owners(f.module, changed)} would update buffers while training "
            f"({', '.join(changed[:3])}), but fit treats the model as a pure function of its "
            "parameters and would lose them. Call .eval() on the module to train with fixed "
            "statistics, or use fsmap.LMAP in your own loop."
        )
        raise UnsupportedModuleError(message)


def _owners(module: nn.Module, buffers: list[str]) -> str:
    """The modules that own these buffers, such as ``'1' (BatchNorm1d)``."""
    names = dict.fromkeys(name.rpartition(".")[0] for name in buffers)
    shown = [f"{n!r} ({type(module.get_submodule(n)).__name__})" for n in names]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
