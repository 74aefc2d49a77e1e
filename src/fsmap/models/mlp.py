"""Perceptrons: fully connected layers with an activation between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from fsmap.errors import InputError

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "identity": lambda x: x,
}


class _Linear(nn.Linear):
    """A linear layer that draws its parameters from a generator."""

    init = "torch"

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        bound = 1 / math.sqrt(self.in_features)
        if self.init == "lecun":
            self.weight.normal_(0.0, bound, generator=generator)
            if self.bias is not None:
                self.bias.zero_()
            return
        for parameter in self.parameters():
            parameter.uniform_(-bound, bound, generator=generator)


class MLP(nn.Module):
    r"""$f(x) = W_L\,\sigma(W_{L-1} \cdots \sigma(W_1 x + b_1) \cdots + b_{L-1}) + b_L$.

    Parameters are named ``layers.0.weight``, ``layers.0.bias``, …

    Args:
        sizes: Units of every layer, from inputs to outputs: ``[2, 16, 16, 2]`` has two hidden ones.
        activation: ``"tanh"``, ``"relu"``, ``"gelu"``, ``"silu"``, ``"identity"``, or a function of
            a tensor, such as ``torch.sin``.
        bias: Whether layers have biases.
        init: ``"torch"``: weights and biases uniform within $\pm 1/\sqrt{\text{fan-in}}$, as
            ``nn.Linear`` has them; ``"lecun"``: weights $N(0, 1/\text{fan-in})$ and biases zero,
            as JAX libraries have them.
        generator: Source of the initial values; None is torch's own.

    Examples:
        >>> model = MLP([2, 16, 16, 16, 16, 2], "tanh", generator=torch.Generator().manual_seed(0))
        >>> sum(p.numel() for p in model.parameters())
        898
        >>> model(torch.zeros(5, 2)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str | Activation = "tanh",
        *,
        bias: bool = True,
        init: str = "torch",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.sizes = tuple(int(size) for size in sizes)
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise InputError(f"sizes must be two or more numbers of at least 1, got {list(sizes)}.")
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise InputError(f"activation must be one of {known} or a function, got {activation!r}")
        if init not in ("torch", "lecun"):
            raise InputError(f"init must be 'torch' or 'lecun', got {init!r}.")
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        # nothing is drawn yet: torch's own generator is used only if none is given
        layers = [skip_init(_Linear, a, b, bias=bias) for a, b in pairwise(self.sizes)]
        for layer in layers:
            layer.init = init
        self.layers = nn.ModuleList(layers)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters anew."""
        for layer in self.layers:
            layer.reset_parameters(generator)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))  # [S, units]
        return last(x)  # type: ignore[no-any-return]
