"""Slow definitions in float64, with no tricks: what every fast path is held to."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.types import ModelFn, Params


def _rows(f: ModelFn, params: Params, x: object, *, again: bool) -> Tensor:
    out = f(params, x)
    rows = []
    for value in out.reshape(-1):
        grads = torch.autograd.grad(
            value, params.values(), retain_graph=True, create_graph=again, materialize_grads=True
        )
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows).reshape(out.shape[0], -1, rows[0].numel())


def jacobian_slow(f: ModelFn, params: Params, x: object) -> Tensor:
    """One backward pass per output number: [S, K, P]."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    return _rows(f, leaves, x, again=False)


def gram_slow(f: ModelFn, params: Params, x: object, metric: Tensor | None = None) -> Tensor:
    """𝒥_ab = (1/S) Σ J_ika g_ikjl J_jlb by loops over points; metric [S, K, S, K] or None."""
    jac = jacobian_slow(f, params, x)
    S = len(jac)
    total = torch.zeros(jac.shape[-1], jac.shape[-1], dtype=jac.dtype)
    for i in range(S):
        for j in range(S):
            if metric is None and i != j:
                continue
            g = torch.eye(jac.shape[1], dtype=jac.dtype) if metric is None else metric[i, :, j, :]
            total += jac[i].mT @ g @ jac[j]
    return total / S


def eigenvalues_slow(f: ModelFn, params: Params, x: object, metric: Tensor | None = None) -> Tensor:
    """Eigenvalues of the P×P matrix, ascending: [P]."""
    gram = gram_slow(f, params, x, metric)
    return torch.linalg.eigvalsh((gram + gram.mT) / 2)


def logdet_slow(
    f: ModelFn, params: Params, x: object, jitter: float, metric: Tensor | None = None
) -> Tensor:
    """Eigenvalues of the P×P matrix, logs added up."""
    return (eigenvalues_slow(f, params, x, metric) + jitter).log().sum()


def svd_clip_slow(
    f: ModelFn, params: Params, x: object, jitter: float, metric: Tensor | None = None
) -> Tensor:
    """Eigenvalues below ε counted as ε (appendix B.9)."""
    return eigenvalues_slow(f, params, x, metric).clamp_min(jitter).log().sum()


def pseudo_slow(
    f: ModelFn, params: Params, x: object, jitter: float, metric: Tensor | None = None
) -> Tensor:
    """Eigenvalues below ε left out."""
    values = eigenvalues_slow(f, params, x, metric)
    return values[values > jitter].log().sum()


def trace_slow(f: ModelFn, params: Params, x: object, metric: Tensor | None = None) -> Tensor:
    """The diagonal, added up."""
    return gram_slow(f, params, x, metric).diagonal().sum()


def gradient_slow(value: Callable[[Params], Tensor], params: Params, step: float = 1e-4) -> Tensor:
    """Fourth-order central differences of a function of params, entry by entry: [P]."""
    out = []
    for name, p in params.items():
        for i in range(p.numel()):
            unit = {n: torch.zeros_like(q) for n, q in params.items()}
            unit[name].reshape(-1)[i] = 1
            out.append(directional_slow(value, params, unit, step))
    return torch.tensor(out)


def directional_slow(
    value: Callable[[Params], Tensor], params: Params, direction: Params, step: float = 1e-4
) -> float:
    """Derivative of a function of params along a direction, by fourth-order central differences."""

    def shifted(h: float) -> float:
        return float(value({n: p.detach() + h * direction[n] for n, p in params.items()}))

    near, far = shifted(step) - shifted(-step), shifted(2 * step) - shifted(-2 * step)
    return (8 * near - far) / (12 * step)


def complete_probes(params: Params) -> Params:
    """√P times every unit vector: the mean over these probes is the exact trace."""
    total = sum(p.numel() for p in params.values())
    pieces = (math.sqrt(total) * torch.eye(total)).split([p.numel() for p in params.values()], 1)
    return {n: v.reshape(-1, *p.shape) for (n, p), v in zip(params.items(), pieces, strict=True)}


def full_metric(metric: Tensor, S: int, K: int) -> Tensor:
    """Weights [S], output metrics [K, K] and [S, K, K] written out as [S, K, S, K]."""
    full = torch.zeros(S, K, S, K)
    for s in range(S):
        if metric.ndim == 1:
            full[s, :, s, :] = metric[s] * torch.eye(K)
        else:
            full[s, :, s, :] = metric[s] if metric.ndim == 3 else metric
    return full


def softmax_fisher_slow(logits: Tensor) -> Tensor:
    """diag(p) − ppᵀ point by point: [S, K, K]."""
    return torch.stack([torch.diag(p) - torch.outer(p, p) for p in logits.softmax(-1)])


def mean_and_sem(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    t = torch.tensor(values)
    return float(t.mean()), float(t.std() / math.sqrt(len(t)))


def laplacian_slow(f: ModelFn, params: Params, x: object, psi: Params) -> Tensor:
    """‖Jψ‖²/S, one backward pass per output number; differentiable if f is twice so."""
    rows = _rows(f, params, x, again=True)
    return (rows @ torch.cat([p.reshape(-1) for p in psi.values()])).square().sum() / len(rows)


Statistics = dict[str, tuple[Tensor, Tensor]]  # mean and deviation of the input, by layer


def follow_slow(
    module: nn.Module, x: Tensor, reference: Statistics | None = None, *, training: bool = False
) -> Statistics:
    """Move running statistics as the points' have moved, layer by layer in one pass.

    Scaled by how the deviation of a layer's input differs from that of the reference, then shifted
    by how its mean does. The pass is one in ``eval()``, where a layer's input depends on the moved
    statistics of those before it, or one in training, by the points' own statistics. Returns mean
    and deviation of every layer's input; with no reference that is all.
    """
    layers = {n: m for n, m in module.named_modules() if isinstance(m, _BatchNorm)}
    passing = copy.deepcopy(module).train() if training else module
    seen: Statistics = {}

    def look(name: str, z: Tensor) -> None:
        channels = z.transpose(0, 1).reshape(z.shape[1], -1)  # [C, points]
        mean = torch.stack([c.sum() / len(c) for c in channels])
        centered = channels - mean[:, None]
        square = torch.stack([(c**2).sum() / len(c) for c in centered])
        seen[name] = mean, (square + layers[name].eps).sqrt()
        if reference is not None:
            before, deviation = reference[name]
            ratio = seen[name][1] / deviation
            layers[name].running_mean.mul_(ratio).add_(mean - ratio * before)
            layers[name].running_var.add_(layers[name].eps).mul_(ratio**2).sub_(layers[name].eps)

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: look(name, args[0]))
        for name, layer in passing.named_modules()
        if name in layers
    ]
    mode = module.training
    with torch.no_grad():
        (passing if training else passing.eval())(x)
    module.train(mode)
    for hook in hooks:
        hook.remove()
    return seen
