"""Held-out data, and what a model in training says about them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import Functional
from fsmap.linalg import points
from fsmap.lmap.module import LMAP, LaplacianPenalty
from fsmap.types import Inputs

HeldOut = tuple[Inputs, Tensor] | Callable[[], tuple[Tensor, Tensor]]


class HeldOutData:
    """A model and data it is not trained on.

    Args:
        model: What is trained, wrapped or not; None: only a function can give outputs.
        data: Pair of inputs and targets, or a function that returns outputs and targets.
        batch_size: Points per pass.

    Raises:
        InputError: If the data are neither.
    """

    def __init__(
        self, model: nn.Module | LaplacianPenalty | None, data: HeldOut | None, batch_size: int
    ) -> None:
        pair = isinstance(data, tuple | list) and len(data) == 2
        if not (data is None or pair or callable(data)):
            message = (
                "held_out must be a pair of inputs and targets, or a function that returns outputs "
                f"and targets, got {type(data).__name__}. From a loader of pairs: "
                "tuple(map(torch.cat, zip(*loader)))"
            )
            raise InputError(message)
        self.module = model.regularizer.module if isinstance(model, LaplacianPenalty) else model
        self.call = _call(model)
        self.data, self.batch_size = data, batch_size

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Outputs of the model in evaluation mode, and targets.

        Returns:
            Both, on the device of the outputs.

        Raises:
            InputError: If there is nothing to look at.
            UnsupportedModuleError: If it is not known how the model is called.
        """
        if callable(self.data):
            return self.data()
        if self.data is None or self.module is None or self.call is None:
            message = (
                "without a model and held-out data there is nothing to look at: give both, or call "
                "observe(outputs, targets)"
            )
            raise InputError(message)
        x, y = self.data
        mode = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                parts = torch.arange(points.count(x)).split(self.batch_size)
                outs = [self.call(points.take(x, rows)) for rows in parts]
        except UnsupportedModuleError as error:
            message = (
                f"{error} Or give TemperatureControl a function as held_out, which returns outputs "
                "and targets."
            )
            raise UnsupportedModuleError(message) from error
        finally:
            self.module.train(mode)
        return torch.cat(outs), y.to(outs[0].device)

    def few(self, number: int) -> Inputs | None:
        """The first inputs; None where they are not known."""
        if callable(self.data) or self.data is None:
            return None
        x = self.data[0]
        return points.take(x, torch.arange(min(points.count(x), number)))


def _call(model: nn.Module | LaplacianPenalty | None) -> Callable[[Inputs], Tensor] | None:
    """How the model is called: as in training where that is known, with ``forward`` and all."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if isinstance(inner, LMAP | LaplacianPenalty):
        return inner.regularizer.f.plain
    return None if inner is None else Functional(inner).plain
