"""Layers that draw random numbers or couple points, and how several passes get the same noise."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.types import ModelFn, Params

# What modules call the probability of dropping something, in torch and in model libraries.
DROP_RATES = ("p", "dropout", "drop_prob", "dropout_p", "attention_dropout", "drop_rate")


class NoiseReplay:
    """Gives several passes the same random layers: call it before each of them but the first."""

    def __init__(self, f: ModelFn, params: Params) -> None:
        """Remember torch's random state, if ``f`` may use it."""
        self._device = next(iter(params.values())).device
        self._active = not getattr(f, "pointwise", True)
        if self._active:
            self._cpu = torch.get_rng_state()
            self._cuda = (
                torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
            )

    def __call__(self) -> None:
        """Go back to the remembered state."""
        if self._active:
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)


def is_random(module: nn.Module) -> bool:
    """Whether a pass draws from torch's generator; by the names that drop rates have."""
    if not module.training:
        return False
    own, shared = vars(module), type(module)
    for name in DROP_RATES:  # looked up so because nn.Module answers a missing attribute slowly
        rate = own[name] if name in own else getattr(shared, name, None)
        if isinstance(rate, int | float) and 0 < rate <= 1:
            return True
    return isinstance(module, nn.RReLU)


def couples_points(module: nn.Module) -> bool:
    """Whether a point's output depends on the other points."""
    return isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
