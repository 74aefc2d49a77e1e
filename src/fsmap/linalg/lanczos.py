"""Lanczos for several starting vectors at once: quadrature of log(I + M/ε), roots of M + εI."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHECK_EVERY = 4  # steps between two looks at the truncation error
OF_SPREAD = 0.05  # truncation that no longer matters: this part of the standard error over probes
OF_VALUE = 1e-4  # where one probe has no spread: this part of the value
ROUNDING = 1e-10  # relative; below it nothing changes any more


class Quadrature(NamedTuple):
    """What Lanczos knows after k steps, for R probes."""

    values: Tensor  # [R]  zᵀ log(I + M/ε) z
    truncation: Tensor  # [R]  change over the last steps
    roots: Tensor  # [R, n]  (M + εI)^(−½) z
    rounding: Tensor  # [R]  what an error of M in its last digit does to the value


def lanczos(
    matvec: Callable[[Tensor], Tensor], z: Tensor, eps: Tensor, *, complete: bool = False
) -> Quadrature:
    """Lanczos with full reorthogonalization, for all probes, until truncation no longer matters.

    Args:
        matvec: V ``[R, n]`` → VM.
        z: Probes, ``[R, n]``.
        eps: ε.
        complete: Whether the probes are no sample, so that only rounding ends it.

    Returns:
        Quadrature values, their truncation and the roots.
    """
    R, n = z.shape
    norms = z.norm(dim=1)  # [R]
    basis = z.new_empty(R, min(n, 2 * CHECK_EVERY), n)
    T = z.new_zeros(R, n if n < 64 else 64, n if n < 64 else 64)
    basis[:, 0] = z / norms[:, None]
    previous = None
    k = 0
    while True:
        held = basis[:, : k + 1]  # [R, k+1, n]
        w = matvec(basis[:, k])
        T[:, k, k] = (w * basis[:, k]).sum(1)
        for _ in range(2):  # twice is enough
            w = w - ((held @ w[:, :, None]).mT @ held)[:, 0]
        beta = w.norm(dim=1)
        exhausted = beta <= 1e-12 * T[:, : k + 1].diagonal(dim1=1, dim2=2).abs().amax(1).clamp_min(
            eps
        )
        k += 1
        done = k == n or bool(exhausted.all())
        if done or k % CHECK_EVERY == 0:
            values, weights = _gauss(T[:, :k, :k], eps)
            values = values * norms.square()
            change = torch.zeros_like(values)
            if not done and previous is not None:
                change = (values - previous).abs()
            if done or (previous is not None and _settled(values, change, complete)):
                roots = norms[:, None] * (weights[:, None] @ held)[:, 0]
                digit = torch.finfo(T.dtype).eps * T[:, :k, :k].abs().sum(1).amax(1)  # ≥ eps·λ_max
                return Quadrature(values, change, roots, digit * roots.square().sum(1))
            previous = values
        basis, T = _grown(basis, T, k, n)
        T[:, k, k - 1] = T[:, k - 1, k] = torch.where(exhausted, 0.0, beta)
        basis[:, k] = torch.where(exhausted[:, None], 0.0, w / beta.clamp_min(1e-300)[:, None])


def _settled(values: Tensor, change: Tensor, complete: bool) -> bool:
    if complete or bool((change <= ROUNDING * values.abs()).all()):
        return bool((change <= ROUNDING * values.abs()).all())
    if len(values) == 1:
        return bool(change[0] < OF_VALUE * values[0].abs())
    return bool(change.mean() < OF_SPREAD * values.std() / len(values) ** 0.5)


def _grown(basis: Tensor, T: Tensor, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Room for vector k, doubled when it is used up."""
    if k == basis.shape[1]:
        more = basis.new_empty(len(basis), min(n, 2 * k) - k, n)
        basis = torch.cat([basis, more], dim=1)
    if k == T.shape[1]:
        T = torch.nn.functional.pad(T, (0, min(n, 2 * k) - k, 0, min(n, 2 * k) - k))
    return basis, T


def _gauss(T: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """e₁ᵀ log(I + T/ε) e₁ and (T + εI)^(−½) e₁ of the tridiagonal matrices: [R], [R, k]."""
    eigenvalues, vectors = torch.linalg.eigh(T)
    first = vectors[:, 0]  # [R, k]
    # A signed metric can push an eigenvalue below -ε: then the logarithm is nan, as it should be.
    values = (first.square() * torch.log1p(eigenvalues / eps)).sum(1)
    return values, (vectors @ (first * (eigenvalues + eps).rsqrt())[:, :, None])[..., 0]
