r"""The metric g of function space (``eq:JgJ``, appendix B.2): $\mathcal J = E[J^\top g J]$.

A metric is resolved at the evaluation points into linear maps (``Whitening``). With g = LLᵀ and
rows A = LᵀJ/√S, $\mathcal J = A^\top A$. No metric means g = I: the squared distance of two
functions is the sum over outputs of the mean over points.

Caveat for a metric that depends on θ (softmax-Fisher): the normalizer Z of appendix B.2 then
depends on θ as well and is *not* part of the objective; what is maximized is no longer a density up
to a constant. ``detach=True`` holds g fixed within a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import holds
from fsmap.linalg.jacobian import Metric, Whitening
from fsmap.types import Inputs

__all__ = ["General", "Metric", "Output", "SoftmaxFisher", "Weights", "Whitening", "as_metric"]


class Weights(NamedTuple):
    """Weights g(x) ≥ 0 per point ``[S]`` or per output position ``[S, T]``.

    A tensor, or a function of the points. T is the leading output dimension where a point has many
    outputs, ``[S, T, K]``: a padding mask ``Weights(lambda x: x["mask"])`` makes the masked
    positions weigh nothing. 1/S stays as it is.
    """

    weights: Tensor | Callable[[Inputs], Tensor]

    def at(self, x: Inputs, out: Tensor) -> Whitening:
        """Rows of point s are scaled by √g(x_s)."""
        root = (self.spread(x, out) / len(out)).sqrt()  # [S, 1] or [S, K]
        return Whitening(
            lambda u: (u * root.reshape(*root.shape, *[1] * (u.ndim - 2))).flatten(0, 1),
            lambda v: v.reshape(out.shape) * root,
            out.numel(),
        )

    def spread(self, x: Inputs, out: Tensor) -> Tensor:
        """The weights over the outputs ``[S, K]`` of a pass: ``[S, 1]`` or ``[S, K]``."""
        w = (self.weights(x) if callable(self.weights) else self.weights).to(out)
        S, K = out.shape
        T = w.shape[1] if w.ndim == 2 and w.shape[1] and K % w.shape[1] == 0 else K
        _check("Weights", w, [(S,), (S, T)])
        if not holds((w >= 0).all(), otherwise=True):
            raise InputError("Weights has negative entries")
        return w[:, None] if w.ndim == 1 else w.repeat_interleave(K // w.shape[1], dim=1)


class Output(NamedTuple):
    """A metric between outputs of one point: ``[K, K]`` for all points or ``[S, K, K]``.

    The matrix is a constant of the objective. For one that depends on θ give its factor, g = L Lᵀ
    (``[K, Q]`` or ``[S, K, Q]``), which is differentiated.
    """

    matrix: Tensor | None = None
    factor: Tensor | None = None

    def at(self, x: Inputs, out: Tensor) -> Whitening:
        """Rows of point s are Lₛᵀ times its outputs."""
        S, K = out.shape
        if (self.matrix is None) == (self.factor is None):
            raise InputError("Output takes a matrix or a factor, exactly one of them")
        if self.matrix is not None:
            _check("Output", self.matrix, [(K, K), (S, K, K)])
            factor = _root(self.matrix, out)
        else:
            assert self.factor is not None
            Q = self.factor.shape[-1:]
            _check("the factor of Output", self.factor, [(K, *Q), (S, K, *Q)])
            factor = self.factor.to(out)
        return _whitening((factor / math.sqrt(S)).expand(S, *factor.shape[-2:]), S, K)


class SoftmaxFisher(NamedTuple):
    r"""The Fisher metric of a softmax classifier, $g = \mathrm{diag}(p) - pp^\top$ at the logits.

    $\mathcal J$ is then the Fisher matrix. It depends on θ: see the caveat in :mod:`fsmap.metric`.
    With $L = \mathrm{diag}(\sqrt p) - p\sqrt p^\top$, $LL^\top = g$.
    """

    detach: bool = False

    def at(self, x: Inputs, out: Tensor) -> Whitening:
        """The metric at ``softmax(out)``."""
        logits = out.detach() if self.detach else out
        p = logits.softmax(-1)  # [S, K]
        root = (0.5 * logits.log_softmax(-1)).exp()  # √p, with a derivative at p = 0
        factor = torch.diag_embed(root) - p[:, :, None] * root[:, None, :]  # [S, K, K]
        return Output(factor=factor).at(x, out)


class General(NamedTuple):
    """Any metric over points and outputs, ``[S·K, S·K]``.

    Entries may have either sign, eigenvalues not. The matrix is a constant of the objective.
    """

    matrix: Tensor

    def at(self, x: Inputs, out: Tensor) -> Whitening:
        """Rows are √eigenvalue times eigenvectors."""
        S, K = out.shape
        _check("General", self.matrix, [(S * K, S * K)])
        return _whitening(_root(self.matrix / S, out)[None], S, K)


def _whitening(factor: Tensor, S: int, K: int) -> Whitening:
    """By roots L/√S, ``[S, K, Q/S]`` of each point alone or ``[1, SK, Q]`` of all together."""
    size = len(factor) * factor.shape[-1]

    def rows(u: Tensor) -> Tensor:
        parts = u.reshape(*factor.shape[:2], -1)
        return (factor.mT.to(u) @ parts).reshape(size, *u.shape[2:])

    def adjoint(v: Tensor) -> Tensor:
        return (factor.to(v) @ v.reshape(len(factor), -1, 1)).reshape(S, K)

    return Whitening(rows, adjoint, size, local=len(factor) == S)


def as_metric(metric: Metric | Tensor, S: int, K: int) -> Metric:
    """A metric as it is, or the metric that a tensor stands for by its shape."""
    if not isinstance(metric, Tensor):
        if isinstance(metric, type) or not hasattr(metric, "at"):
            raise InputError(
                "metric must be None, a tensor, or a metric such as fsmap.metric.SoftmaxFisher(), "
                f"got {metric!r:.60}"
            )
        return metric
    shape = tuple(metric.shape)
    kinds: dict[tuple[int, ...], Callable[[Tensor], Metric]]
    kinds = {(S * K, S * K): General, (K, K): Output, (S, K, K): Output, (S,): Weights}
    if shape in kinds:
        return kinds[shape](metric)
    text = f"a metric of shape {shape} fits neither [S], [K, K], [S, K, K] nor [S*K, S*K]"
    raise InputError(f"{text} with {S=}, {K=}")


def _root(matrix: Tensor, out: Tensor) -> Tensor:
    """VΛ^½ of a symmetric matrix; a constant: eigenvectors have no stable derivative."""
    rounding = max(torch.finfo(t.dtype).eps for t in (matrix, out) if t.is_floating_point())
    matrix = matrix.to(out).detach().double()
    difference = (matrix - matrix.mT).abs().max()
    if not holds(difference <= 1e-6 * matrix.abs().max(), otherwise=True):
        raise InputError(f"a metric must be symmetric; its transpose differs by {difference:.3g}")
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    # Rounding makes zero eigenvalues slightly negative: up to this they are zero.
    size = matrix.shape[-1] * eigenvalues.abs().amax(-1, keepdim=True)
    if not holds((eigenvalues >= -rounding * size).all(), otherwise=True):
        least = f"{float(eigenvalues.min()):.3g}. Leave its negative part out."
        raise InputError(f"a metric must not have negative eigenvalues, got {least}")
    zero = eigenvalues <= torch.finfo(torch.float64).eps * size
    factor: Tensor = vectors * torch.where(zero, 0.0, eigenvalues).sqrt()[..., None, :]
    return factor


def _check(name: str, tensor: Tensor, allowed: list[tuple[int, ...]]) -> None:
    if tuple(tensor.shape) not in allowed:
        shown = " or ".join(map(str, allowed[:3]))
        raise InputError(f"{name} must have shape {shown} here, got {tuple(tensor.shape)}")
    if not holds(torch.isfinite(tensor).all(), otherwise=True):
        raise InputError(f"{name} has NaN or inf")
