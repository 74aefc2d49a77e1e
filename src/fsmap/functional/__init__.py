"""From an ``nn.Module`` to a pure function ``f(params, x)``; parameters as dicts and as vectors."""

from fsmap.functional.kernels import Replacing, differentiable_attention
from fsmap.functional.module import (
    Forward,
    Functional,
    State,
    Wrapped,
    call_module,
    functional,
    take_apart,
    tensor_of,
)
from fsmap.functional.noise import DROP_RATES, NoiseReplay
from fsmap.functional.vectors import count, ravel, unravel

__all__ = [
    "DROP_RATES",
    "Forward",
    "Functional",
    "NoiseReplay",
    "Replacing",
    "State",
    "Wrapped",
    "call_module",
    "count",
    "differentiable_attention",
    "functional",
    "ravel",
    "take_apart",
    "tensor_of",
    "unravel",
]
