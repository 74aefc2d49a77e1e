"""The last good state of a model and its optimizer, to return to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Snapshot:
    """A copy of the tensors that training changes, put back in place.

    Values are written into the storages that are there, so that a captured CUDA graph or a fused
    optimizer goes on with them.

    Args:
        model: Parameters and buffers are kept.
        optimizer: Its state is kept too.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.tensors: dict[str, Tensor] = {}

    def _live(self) -> dict[str, Tensor]:
        live = {
            f"model/{name}": tensor
            for name, tensor in self.model.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }
        if self.optimizer is not None:
            places = [p for group in self.optimizer.param_groups for p in group["params"]]
            for index, parameter in enumerate(places):
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        live[f"optimizer/{index}/{key}"] = value
        return live

    def take(self) -> None:
        """Remember the tensors as they are now."""
        for name, tensor in self._live().items():
            if name in self.tensors:
                self.tensors[name].copy_(tensor.detach())
            else:
                self.tensors[name] = tensor.detach().clone()

    def restore(self) -> bool:
        """Put the remembered values back; state that did not exist then becomes zero.

        Returns:
            Whether there was something to restore.
        """
        if not self.tensors:
            return False
        for name, tensor in self._live().items():
            kept = self.tensors.get(name)
            if kept is None:
                tensor.detach().zero_()
            else:
                tensor.detach().copy_(kept)
        return True

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint held.

        Args:
            tensors: ``tensors`` of another snapshot of the same model.
        """
        live = self._live()
        device = next(iter(live.values())).device
        self.tensors = {
            name: tensor.clone().to(live[name].device if name in live else device)
            for name, tensor in tensors.items()
        }
