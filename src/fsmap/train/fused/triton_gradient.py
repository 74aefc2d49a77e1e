"""The gradient of :mod:`fsmap.train.fused.torch_gradient` by Triton kernels, on CUDA."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.train.fused import triton_backward, triton_forward
from fsmap.train.fused.layout import Layout


class Tiles(NamedTuple):
    """Shape of a product's tiles, steps of its loop, warps and stages."""

    first: int
    second: int
    loop: int
    warps: int
    stages: int


# The fastest of some twenty on an H200.
FORWARD = Tiles(128, 128, 32, 8, 3)
BACKWARD = Tiles(128, 128, 32, 8, 3)
WEIGHTS = Tiles(128, 128, 32, 8, 4)
FEW_WEIGHTS = Tiles(64, 128, 64, 4, 3)  # more, smaller tiles, where there are few members
FEW = 20
ROWS = 32  # rows of a tile in kernels without a product


class TritonGradient:
    """Passes by kernels; arguments and attributes are those of ``TorchGradient``.

    Args:
        layout: Sizes; hidden layers must have a power of two of units, at least 16.
        theta: Parameters ``[M, P']``, float32.
        group: Which inputs, targets and ψ a member sees, ``[M]``.
        scales: ``[3, M]``: 1/σ², λ, 1/(α²N).
        beta: β.
        forward: Tiles of the layers.
        backward: Tiles of the derivatives by activations.
        weights: Tiles of the derivatives by weights.
    """

    def __init__(
        self,
        layout: Layout,
        theta: Tensor,
        group: Tensor,
        scales: Tensor,
        beta: float,
        *,
        forward: Tiles = FORWARD,
        backward: Tiles = BACKWARD,
        weights: Tiles | None = None,
    ) -> None:
        self.layout, self.theta, self.group, self.scales = layout, theta, group, scales
        weights = weights or (FEW_WEIGHTS if layout.members < FEW else WEIGHTS)
        self.beta, self.tiles = beta, (forward, backward, weights)
        M, R = layout.members, layout.rows
        self.grad = torch.zeros_like(theta)
        self.sums = theta.new_zeros(2, M)
        halves = 2 if layout.points else 1
        self._pairs = torch.zeros(halves, 2, M, layout.stride, dtype=torch.bfloat16).to(
            theta.device
        )
        self._activations = [self._pair(units) for units in layout.hidden]
        self._deltas = [self._pair(units) for units in layout.hidden]
        self._out, self._slope = theta.new_zeros(M, R), theta.new_zeros(M, R)
        self._by_bias = [theta.new_zeros(M, R // ROWS, units) for units in layout.hidden]
        self._by_head = torch.zeros_like(self._by_bias[-1])

    def _pair(self, units: int) -> Tensor:
        shape = (2, self.layout.members, self.layout.rows, units)
        return torch.empty(shape, dtype=torch.bfloat16, device=self.theta.device)

    def __call__(self, x: Tensor, y: Tensor, psi: Tensor | None) -> None:
        """Fill ``grad`` and ``sums``."""
        self._prepare(psi)
        self._first(x)
        for number in range(1, len(self._activations)):
            self._layer(number)
        self._loss(y)
        for number in reversed(range(1, len(self._activations))):
            self._weight(number)
            self._below(number)
        self._first_weight(x)

    def _prepare(self, psi: Tensor | None) -> None:
        block, layout = 1024, self.layout
        triton_forward.prepare_kernel[(-(-layout.stride // block), layout.members)](
            self.theta,
            self.theta if psi is None else psi,
            self.group,
            self._pairs,
            self.beta,
            self._pairs.stride(1),
            self._pairs.stride(0),
            layout.stride,
            SHIFT=psi is not None,
            BLOCK=block,
        )

    def _places(self) -> tuple[int, int, int]:
        """Distances between the two halves of a number, between θ and θ + βψ, between members."""
        return self._pairs.stride(1), self._pairs.stride(0), self.layout.stride

    def _first(self, x: Tensor) -> None:
        layout, out = self.layout, self._activations[0]
        tall, wide = 64, min(128, layout.sizes[1])
        triton_forward.first_kernel[
            (layout.rows // tall * (layout.sizes[1] // wide), layout.members)
        ](
            x,
            self._pairs,
            self.group,
            out,
            *self._places(),
            out.stride(0),
            layout.weight(0).offset,
            layout.bias(0).offset,
            layout.rows_plain,
            layout.rows,
            layout.sizes[0],
            IN=layout.inputs,
            OUT=layout.sizes[1],
            BR=tall,
            BO=wide,
        )

    def _layer(self, number: int) -> None:
        layout, x, out = self.layout, self._activations[number - 1], self._activations[number]
        tiles = _fitting(self.tiles[0], out, x)
        triton_forward.layer_kernel[_grid(layout, tiles, out)](
            x,
            self._pairs,
            out,
            *self._places(),
            x.stride(0),
            out.stride(0),
            layout.weight(number).offset,
            layout.bias(number).offset,
            layout.rows_plain,
            layout.rows,
            IN=x.shape[-1],
            OUT=out.shape[-1],
            BR=tiles.first,
            BO=tiles.second,
            BK=tiles.loop,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _loss(self, y: Tensor) -> None:
        """Outputs, slopes, and the derivative by the last hidden layer's argument."""
        layout, a, top = self.layout, self._activations[-1], layout_top(self.layout)
        weight, bias = layout.weight(top + 1).offset, layout.bias(top + 1).offset
        grid = (layout.rows // ROWS, layout.members)
        shape = (a.stride(0), weight)
        common = (layout.rows_plain, layout.rows)
        triton_forward.head_kernel[grid](
            a, self._pairs, self._out, *self._places(), *shape, bias, *common,
            IN=a.shape[-1], BR=ROWS,
        )  # fmt: skip
        triton_forward.loss_kernel[(layout.members,)](
            self._out, y, self.group, self.scales, self._slope, self.sums, self.grad, self.theta,
            self.beta, layout.members, layout.rows, layout.batch, layout.points, layout.stride,
            bias, PLAIN=layout.rows_plain, BLOCK=512,
        )  # fmt: skip
        triton_backward.top_kernel[grid](
            a, self._slope, self._pairs, self._deltas[-1], self._by_bias[-1], self._by_head,
            *self._places(), *shape, *common, UNITS=a.shape[-1], BR=ROWS,
        )  # fmt: skip
        self._vector(self._by_bias[-1], layout.bias(top).offset)
        self._vector(self._by_head, weight)

    def _below(self, number: int) -> None:
        """From the argument of one hidden layer to that of the layer below."""
        layout, delta = self.layout, self._deltas[number]
        a, out = self._activations[number - 1], self._deltas[number - 1]
        tiles = _fitting(self.tiles[1], out, delta)
        parts = self._by_bias[number - 1].view(-1)
        triton_backward.backward_kernel[_grid(layout, tiles, out)](
            delta,
            a,
            self._pairs,
            out,
            parts,
            *self._places(),
            delta.stride(0),
            out.stride(0),
            layout.weight(number).offset,
            layout.rows_plain,
            layout.rows,
            OUT=delta.shape[-1],
            IN=out.shape[-1],
            BR=tiles.first,
            BI=tiles.second,
            BK=tiles.loop,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        rows, units = layout.rows // tiles.first, out.shape[-1]
        summed = parts[: layout.members * rows * units].view(layout.members, rows, units)
        self._vector(summed, layout.bias(number - 1).offset)

    def _weight(self, number: int) -> None:
        layout, delta, x = self.layout, self._deltas[number], self._activations[number - 1]
        tiles = self.tiles[2]
        tall, wide = min(tiles.first, delta.shape[-1]), min(tiles.second, x.shape[-1])
        grid = (delta.shape[-1] // tall * (x.shape[-1] // wide), layout.members)
        triton_backward.weight_kernel[grid](
            delta,
            x,
            self.theta,
            self.scales,
            self.grad,
            delta.stride(0),
            x.stride(0),
            layout.stride,
            layout.weight(number).offset,
            layout.members,
            ROWS=layout.rows,
            OUT=delta.shape[-1],
            IN=x.shape[-1],
            BO=tall,
            BI=wide,
            BR=tiles.loop,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _first_weight(self, x: Tensor) -> None:
        layout, delta = self.layout, self._deltas[0]
        tall = min(64, layout.sizes[1])
        triton_backward.first_weight_kernel[(layout.sizes[1] // tall, layout.members)](
            delta,
            x,
            self.theta,
            self.group,
            self.scales,
            self.grad,
            delta.stride(0),
            layout.stride,
            layout.weight(0).offset,
            layout.members,
            layout.sizes[0],
            ROWS=layout.rows,
            OUT=layout.sizes[1],
            IN=layout.inputs,
            BO=tall,
            BR=64,
        )

    def _vector(self, parts: Tensor, offset: int) -> None:
        triton_backward.sum_kernel[(self.layout.members,)](
            parts, self.theta, self.scales, self.grad, self.layout.stride, offset,
            self.layout.members, TILES=parts.shape[1], UNITS=parts.shape[2],
        )  # fmt: skip


def layout_top(layout: Layout) -> int:
    """Number of the last hidden layer."""
    return layout.layers - 2


def available() -> bool:
    """Whether the kernels can run: Triton and a CUDA device are there."""
    return triton_forward.triton is not None and torch.cuda.is_available()


def _fitting(tiles: Tiles, out: Tensor, loop: Tensor) -> Tiles:
    second, steps = min(tiles.second, out.shape[-1]), min(tiles.loop, loop.shape[-1])
    return tiles._replace(second=second, loop=steps)


def _grid(layout: Layout, tiles: Tiles, out: Tensor) -> tuple[int, int]:
    return layout.rows // tiles.first * (out.shape[-1] // tiles.second), layout.members
