"""Triton kernels of the backward pass; see :mod:`fsmap.train.fused.triton_forward`."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, D417
from __future__ import annotations

from fsmap.train.fused.triton_forward import halve, jit, product, triton

if triton is not None:
    import triton.language as tl


@jit
def top_kernel(
    a,
    slope,
    pairs,
    delta,
    by_bias,
    by_head,
    plane,
    half,
    stride,
    a_plane,
    weight,
    plain,
    rows,
    UNITS: tl.constexpr,
    BR: tl.constexpr,
):
    """Derivative by the last hidden layer's argument, relu'(a) · slope · w, and sums over rows."""
    tile = tl.program_id(0)
    member = tl.program_id(1).to(tl.int64)
    row = tile * BR
    r = row + tl.arange(0, BR)
    k = tl.arange(0, UNITS)
    pairs += member * stride + tl.where(row >= plain, half, 0)
    w = tl.load(pairs + weight + k).to(tl.float32)
    w += tl.load(pairs + plane + weight + k).to(tl.float32)
    place = (member * rows + r)[:, None] * UNITS + k[None, :]
    values = tl.load(a + place).to(tl.float32) + tl.load(a + a_plane + place).to(tl.float32)
    s = tl.load(slope + member * rows + r)[:, None]
    d = tl.where(values > 0, s * w[None, :], 0.0)
    high, low = halve(d)
    tl.store(delta + place, high)
    tl.store(delta + a_plane + place, low)
    line = (member * (rows // BR) + tile) * UNITS + k
    tl.store(by_bias + line, tl.sum(d, 0))
    tl.store(by_head + line, tl.sum(s * values, 0))


@jit
def backward_kernel(
    delta,
    a,
    pairs,
    out,
    by_bias,
    plane,
    half,
    stride,
    delta_plane,
    out_plane,
    weight,
    plain,
    rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BK: tl.constexpr,
):
    """relu'(a) · (delta W), and its sums over rows: tiles [BR, BI], a loop over outputs."""
    tile = tl.program_id(0)
    member = tl.program_id(1).to(tl.int64)
    row = (tile // (IN // BI)) * BR
    r = row + tl.arange(0, BR)
    i = (tile % (IN // BI)) * BI + tl.arange(0, BI)
    k = tl.arange(0, BK)
    pairs += member * stride + tl.where(row >= plain, half, 0)
    d = delta + (member * rows + r)[:, None] * OUT + k[None, :]
    w = pairs + weight + k[:, None] * IN + i[None, :]
    acc = tl.zeros((BR, BI), tl.float32)
    for first in range(0, OUT, BK):
        acc = product(
            tl.load(d + first),
            tl.load(d + delta_plane + first),
            tl.load(w + first * IN),
            tl.load(w + plane + first * IN),
            acc,
        )
    place = (member * rows + r)[:, None] * IN + i[None, :]
    # a factor, not tl.where: triton 3.6 turns a choice between a product and zero into zero
    acc *= (tl.load(a + place) > 0).to(tl.float32)
    high, low = halve(acc)
    tl.store(out + place, high)
    tl.store(out + out_plane + place, low)
    line = (member * (rows // BR) + row // BR) * IN + i
    tl.store(by_bias + line, tl.sum(acc, 0))


@jit
def weight_kernel(
    delta,
    x,
    theta,
    scales,
    grad,
    delta_plane,
    x_plane,
    stride,
    weight,
    members,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    BR: tl.constexpr,
):
    """Gradient of a hidden layer's weight, prior included: tiles [BO, BI], a loop over rows."""
    tile = tl.program_id(0)
    member = tl.program_id(1).to(tl.int64)
    o = (tile // (IN // BI)) * BO + tl.arange(0, BO)
    i = (tile % (IN // BI)) * BI + tl.arange(0, BI)
    r = tl.arange(0, BR)
    d = delta + (member * ROWS + r)[None, :] * OUT + o[:, None]
    p = x + (member * ROWS + r)[:, None] * IN + i[None, :]
    acc = tl.zeros((BO, BI), tl.float32)
    left = tl.zeros((BO, BI), tl.float32)  # three sums, so that no product waits for another
    right = tl.zeros((BO, BI), tl.float32)
    for row in range(0, ROWS, BR):
        d_high = tl.load(d + row * OUT)
        p_high = tl.load(p + row * IN)
        acc = tl.dot(d_high, p_high, acc)
        left = tl.dot(tl.load(d + delta_plane + row * OUT), p_high, left)
        right = tl.dot(d_high, tl.load(p + x_plane + row * IN), right)
    acc += left + right
    prior = tl.load(scales + 2 * members + member)
    place = member * stride + weight + o[:, None] * IN + i[None, :]
    tl.store(grad + place, acc + prior * tl.load(theta + place))


@jit
def first_weight_kernel(
    delta,
    x,
    theta,
    group,
    scales,
    grad,
    delta_plane,
    stride,
    weight,
    members,
    features,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BO: tl.constexpr,
    BR: tl.constexpr,
):
    """Gradient of the first layer's weight, prior included."""
    member = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    i = tl.arange(0, IN)
    r = tl.arange(0, BR)
    d = delta + (member * ROWS + r)[None, :] * OUT + o[:, None]
    p = x + (tl.load(group + member) * ROWS + r)[:, None] * IN + i[None, :]
    acc = tl.zeros((BO, IN), tl.float32)
    for row in range(0, ROWS, BR):
        high, low = halve(tl.load(p + row * IN))
        acc = product(tl.load(d + row * OUT), tl.load(d + delta_plane + row * OUT), high, low, acc)
    prior = tl.load(scales + 2 * members + member)
    place = member * stride + weight + o[:, None] * features + i[None, :]
    here = (i < features)[None, :] & (o < OUT)[:, None]
    tl.store(grad + place, acc + prior * tl.load(theta + place, here), here)


@jit
def sum_kernel(
    parts, theta, scales, grad, stride, piece, members, TILES: tl.constexpr, UNITS: tl.constexpr
):
    """Gradient of a vector of parameters from its sums over tiles of rows, prior included."""
    member = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, UNITS)
    total = tl.zeros((UNITS,), tl.float32)
    for tile in range(TILES):
        total += tl.load(parts + (member * TILES + tile) * UNITS + k)
    prior = tl.load(scales + 2 * members + member)
    place = member * stride + piece + k
    tl.store(grad + place, total + prior * tl.load(theta + place))
