"""Triton kernels of the forward pass: all members at once, the second axis of a grid is the member.

A number x is kept as two bfloat16 numbers, ``high = bf16(x)`` and ``low = bf16(x - high)``: 16 bits
of mantissa in the memory of one float32. A product is three products of halves (high·high,
high·low, low·high, summed in float32): 30 times as accurate as TF32 and faster, because the tensor
cores take 16-bit operands with rows and columns in any order. Activations are written once, by the
product that makes them, with bias, ReLU or its derivative already applied.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, D417
from __future__ import annotations

from typing import Any

triton: Any
try:  # comes with CUDA builds of torch
    import triton
    import triton.language as tl

    jit = triton.jit(do_not_specialize=["members", "features"])
except ImportError:
    triton = None

    def jit(function: object) -> object:
        """Nothing can run without triton; importing can."""
        return function


@jit
def halve(x):
    """A float32 number as a pair of bfloat16 ones."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@jit
def product(a_high, a_low, b_high, b_low, acc):
    """Acc + a b, without the product of the low halves."""
    acc = tl.dot(a_low, b_high, acc)
    acc = tl.dot(a_high, b_low, acc)
    return tl.dot(a_high, b_high, acc)


@jit
def prepare_kernel(
    theta, psi, group, pairs, beta, plane, half, stride, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Pairs of θ and of θ + βψ."""
    member = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = place < stride
    x = tl.load(theta + member * stride + place, here)
    pairs += member * stride + place
    high, low = halve(x)
    tl.store(pairs, high, here)
    tl.store(pairs + plane, low, here)
    if SHIFT:
        x += beta * tl.load(psi + tl.load(group + member) * stride + place, here)
        high, low = halve(x)
        tl.store(pairs + half, high, here)
        tl.store(pairs + half + plane, low, here)


@jit
def first_kernel(
    x,
    pairs,
    group,
    out,
    plane,
    half,
    stride,
    out_plane,
    weight,
    bias,
    plain,
    rows,
    features,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
):
    """The first layer, relu(x Wᵀ + b), from float32 inputs of the member's group."""
    tile = tl.program_id(0)
    member = tl.program_id(1).to(tl.int64)
    row = (tile // (OUT // BO)) * BR
    r = row + tl.arange(0, BR)
    o = (tile % (OUT // BO)) * BO + tl.arange(0, BO)
    k = tl.arange(0, IN)
    pairs += member * stride + tl.where(row >= plain, half, 0)
    a = tl.load(x + (tl.load(group + member) * rows + r)[:, None] * IN + k[None, :])
    a_high, a_low = halve(a)
    place = pairs + weight + o[None, :] * features + k[:, None]
    inside = (k < features)[:, None]
    w_high = tl.load(place, inside, 0.0)
    w_low = tl.load(place + plane, inside, 0.0)
    acc = tl.zeros((BR, BO), tl.float32)
    acc = product(a_high, a_low, w_high, w_low, acc)
    b = tl.load(pairs + bias + o).to(tl.float32) + tl.load(pairs + plane + bias + o).to(tl.float32)
    high, low = halve(tl.maximum(acc + b[None, :], 0.0))
    out += (member * rows + r)[:, None] * OUT + o[None, :]
    tl.store(out, high)
    tl.store(out + out_plane, low)


@jit
def layer_kernel(
    x,
    pairs,
    out,
    plane,
    half,
    stride,
    x_plane,
    out_plane,
    weight,
    bias,
    plain,
    rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
):
    """A hidden layer, relu(x Wᵀ + b): tiles [BR, BO], a loop over inputs."""
    tile = tl.program_id(0)
    member = tl.program_id(1).to(tl.int64)
    row = (tile // (OUT // BO)) * BR
    r = row + tl.arange(0, BR)
    o = (tile % (OUT // BO)) * BO + tl.arange(0, BO)
    k = tl.arange(0, BK)
    pairs += member * stride + tl.where(row >= plain, half, 0)
    a = x + (member * rows + r)[:, None] * IN + k[None, :]
    w = pairs + weight + o[None, :] * IN + k[:, None]
    acc = tl.zeros((BR, BO), tl.float32)
    for first in range(0, IN, BK):
        acc = product(
            tl.load(a + first),
            tl.load(a + x_plane + first),
            tl.load(w + first),
            tl.load(w + plane + first),
            acc,
        )
    b = tl.load(pairs + bias + o).to(tl.float32) + tl.load(pairs + plane + bias + o).to(tl.float32)
    high, low = halve(tl.maximum(acc + b[None, :], 0.0))
    out += (member * rows + r)[:, None] * OUT + o[None, :]
    tl.store(out, high)
    tl.store(out + out_plane, low)


@jit
def head_kernel(
    a,
    pairs,
    out,
    plane,
    half,
    stride,
    a_plane,
    weight,
    bias,
    plain,
    rows,
    IN: tl.constexpr,
    BR: tl.constexpr,
):
    """One output: a·w + b."""
    row = tl.program_id(0) * BR
    member = tl.program_id(1).to(tl.int64)
    r = row + tl.arange(0, BR)
    k = tl.arange(0, IN)
    pairs += member * stride + tl.where(row >= plain, half, 0)
    w = tl.load(pairs + weight + k).to(tl.float32)
    w += tl.load(pairs + plane + weight + k).to(tl.float32)
    a += (member * rows + r)[:, None] * IN + k[None, :]
    values = tl.load(a).to(tl.float32) + tl.load(a + a_plane).to(tl.float32)
    b = tl.load(pairs + bias).to(tl.float32) + tl.load(pairs + plane + bias).to(tl.float32)
    tl.store(out + member * rows + r, tl.sum(values * w[None, :], 1) + b)


@jit
def loss_kernel(
    out,
    y,
    group,
    scales,
    slope,
    sums,
    grad,
    theta,
    beta,
    members,
    rows,
    batch,
    points,
    stride,
    bias,
    PLAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of squares, slopes, and the gradient of the last bias: one program per member."""
    member = tl.program_id(0).to(tl.int64)
    out += member * rows
    slope += member * rows
    y += tl.load(group + member) * batch
    noise = tl.load(scales + member) / batch
    count = tl.maximum(points, 1) * beta * beta
    strength = 2.0 * tl.load(scales + members + member) / count
    errors = tl.zeros((BLOCK,), tl.float32)
    shifts = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, PLAIN, BLOCK):
        r = first + tl.arange(0, BLOCK)
        trained = r < batch
        checked = (r >= batch) & (r < batch + points)
        twin = PLAIN + r - batch
        f = tl.load(out + r, trained | checked, 0.0)
        error = tl.where(trained, f - tl.load(y + r, trained, 0.0), 0.0)
        shift = tl.where(checked, tl.load(out + twin, checked, 0.0) - f, 0.0)
        errors += error * error
        shifts += shift * shift
        pull = strength * shift
        tl.store(slope + r, noise * error - pull, r < PLAIN)
        tl.store(slope + twin, pull, checked)
        total += noise * error  # the two pulls of a point cancel
    tl.store(sums + member, tl.sum(errors, 0))
    tl.store(sums + members + member, tl.sum(shifts, 0) / count)
    pull = tl.load(scales + 2 * members + member) * tl.load(theta + member * stride + bias)
    tl.store(grad + member * stride + bias, tl.sum(total, 0) + pull)
