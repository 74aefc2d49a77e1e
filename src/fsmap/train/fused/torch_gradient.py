r"""Loss and gradient of all members of a population of ReLU perceptrons, written out in torch.

The objective is that of the paper's Table 1, in our scale:

$$\ell = \frac{1}{2B\sigma^2}\sum_b (f_b - y_b)^2 + \frac{\|\theta\|^2}{2\alpha^2 N} + \lambda R,
  \qquad R = \frac{1}{S\beta^2}\sum_s (f_{\theta+\beta\psi}(x_s) - f_\theta(x_s))^2.$$

The gradient goes through both passes of R: it is the one that ``vmap`` of the pure loss gives. This
is the definition of what the kernels of :mod:`fsmap.train.fused.triton_gradient` compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsmap.train.fused.layout import Layout
from fsmap.types import Params


class TorchGradient:
    """Passes in plain torch, any device and dtype.

    Args:
        layout: Sizes.
        theta: Parameters ``[M, P']``.
        group: Which inputs, targets and ψ a member sees, ``[M]``.
        scales: ``[3, M]``: 1/σ², λ, 1/(α²N).
        beta: β.

    Attributes:
        grad: Gradient ``[M, P']`` after a call.
        sums: Squared errors and R of every member after a call, ``[2, M]``.
    """

    def __init__(
        self, layout: Layout, theta: Tensor, group: Tensor, scales: Tensor, beta: float
    ) -> None:
        self.layout, self.theta, self.group, self.scales = layout, theta, group, scales
        self.beta = beta
        self.grad = torch.zeros_like(theta)
        self.sums = theta.new_zeros(2, layout.members)

    def __call__(self, x: Tensor, y: Tensor, psi: Tensor | None) -> None:
        """Fill ``grad`` and ``sums``.

        Args:
            x: Points of all rows, ``[G, R, inputs]``.
            y: Targets, ``[G, B]``.
            psi: ψ, ``[G, P']``; None where there is no geometry term.
        """
        layout = self.layout
        x = x[self.group][..., : layout.sizes[0]]  # [M, R, d]
        halves = [(self.theta, slice(0, layout.rows_plain))]
        if psi is not None:
            shifted = torch.add(self.theta, psi[self.group], alpha=self.beta)
            halves.append((shifted, slice(layout.rows_plain, layout.rows)))
        passes = [
            (layout.view(theta), *self._forward(layout.view(theta), x[:, rows]))
            for theta, rows in halves
        ]
        slope = self._loss(torch.cat([out for *_, out in passes], 1), y[self.group])
        torch.mul(self.theta, self.scales[2][:, None], out=self.grad)  # the prior's part
        for (params, kept, _), (_, rows) in zip(passes, halves, strict=True):
            self._backward(params, kept, slope[:, rows])

    def _forward(self, params: Params, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """What every layer reads, and the outputs ``[M, R]``."""
        kept = [x]
        for number in range(self.layout.layers):
            weight, bias = params[f"layers.{number}.weight"], params[f"layers.{number}.bias"]
            x = kept[-1] @ weight.mT + bias[:, None]  # [M, R, units]
            kept.append(x.relu())
        return kept[:-1], x[..., 0]

    def _loss(self, out: Tensor, y: Tensor) -> Tensor:
        """Derivative of the loss by every output; zero in rows that fill up tiles."""
        B, S, plain = self.layout.batch, self.layout.points, self.layout.rows_plain
        slope = torch.zeros_like(out)
        error = out[:, :B] - y
        self.sums[0] = error.square().sum(1)
        slope[:, :B] = error * (self.scales[0] / B)[:, None]
        if S:
            shift = out[:, plain : plain + S] - out[:, B : B + S]
            self.sums[1] = shift.square().sum(1) / (S * self.beta**2)
            pull = shift * (2 * self.scales[1] / (S * self.beta**2))[:, None]
            slope[:, plain : plain + S] = pull
            slope[:, B : B + S] = -pull
        return slope

    def _backward(self, params: Params, kept: list[Tensor], slope: Tensor) -> None:
        grads = self.layout.view(self.grad)
        delta = slope[..., None]  # [M, R, 1]  derivative by the argument of the layer's activation
        for number in reversed(range(self.layout.layers)):
            grads[f"layers.{number}.weight"] += delta.mT @ kept[number]
            grads[f"layers.{number}.bias"] += delta.sum(1)
            if number:
                delta = (kept[number] > 0) * (delta @ params[f"layers.{number}.weight"])
