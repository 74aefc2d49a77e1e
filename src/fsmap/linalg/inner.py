"""AAᵀ at half the price: it is symmetric, and so is the gradient that comes back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

BLOCK = 256  # rows of a block; smaller ones do not keep a matrix product busy
LEAST = 2**17  # numbers in A from which it pays


def inner(rows: Tensor) -> Tensor:
    """Inner products of all pairs of rows, ``[n, p]`` → ``[n, n]``."""
    if rows.numel() < LEAST or not rows.requires_grad:
        return _lower_and_mirrored(rows)
    product: Tensor = _Inner.apply(rows)  # type: ignore[no-untyped-call]
    return product


def _lower_and_mirrored(rows: Tensor) -> Tensor:
    n, p = rows.shape
    if n < 2 * BLOCK or p < BLOCK:
        return rows @ rows.mT
    bands = []
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        bands.append(F.pad(rows[start:end] @ rows[:end].mT, (0, n - end)))
    lower = torch.cat(bands)
    return lower.tril() + lower.tril(-1).mT


class _Inner(torch.autograd.Function):
    """The gradient (C + Cᵀ)A is one product; autograd would make two, CA and CᵀA."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor) -> Tensor:
        return _lower_and_mirrored(rows)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        product: Tensor = (grad + grad.mT) @ rows
        return product

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        half: Tensor = tangent @ rows.mT
        return half + half.mT
