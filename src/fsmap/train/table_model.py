"""A model of a table in one file: encoder, networks and results, and nothing that is executed.

The file is a checkpoint (:mod:`fsmap.train.checkpoint`): safetensors and JSON, with a checksum,
written in one piece.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fsmap.data.encoder import Encoder
from fsmap.data.tables import Table
from fsmap.data.target import REGRESSION, TASKS, Target
from fsmap.errors import CheckpointError, InputError
from fsmap.models.mlp import MLP
from fsmap.train import checkpoint as files

KIND = "table-model"


class TableModel(NamedTuple):
    """Everything that predicting needs.

    Attributes:
        encoder: From cells to numbers.
        target: From numbers to cells.
        networks: A network per method, of encoded rows.
        activation: Of the hidden layers of all networks.
        results: What was measured when they were trained, by method, in plain values;
            ``noise_std`` and ``margin`` (half the width of a 90 % interval) for numbers.
    """

    encoder: Encoder
    target: Target
    networks: dict[str, MLP]
    activation: str
    results: dict[str, dict[str, Any]]

    def outputs(self, table: Table, method: str) -> Tensor:
        """What a network says: standardized targets ``[N, 1]``, or logits ``[N, K]``.

        Args:
            table: Rows; columns are found by name.
            method: Which network.

        Returns:
            float64.

        Raises:
            InputError: If there is no such network.
        """
        if method not in self.networks:
            message = f"this model holds {', '.join(self.networks)}, not {method!r}"
            raise InputError(message)
        return forward(self.networks[method], self.encoder.encode(table))

    def predict(self, table: Table, method: str) -> dict[str, npt.NDArray[Any]]:
        """Predictions as columns.

        Args:
            table: Rows.
            method: Which network.

        Returns:
            ``prediction`` with ``low`` and ``high`` (a 90 % interval), or with the probability of
            each class, ``p(class)``.
        """
        out = self.outputs(table, method)
        if self.target.task == REGRESSION:
            value = self.target.mean + self.target.std * out[:, 0].numpy()
            margin = self.results[method]["margin"]
            return {"prediction": value, "low": value - margin, "high": value + margin}
        names = np.array(self.target.classes)
        chance = out.softmax(1).numpy()
        columns: dict[str, npt.NDArray[Any]] = {"prediction": names[chance.argmax(1)]}
        return columns | {f"p({name})": chance[:, k] for k, name in enumerate(names.tolist())}

    def save(self, path: Path) -> None:
        """Write the file; the one that was there stays until the new one is complete."""
        tensors = {
            "encoder/mean": torch.from_numpy(self.encoder.mean),
            "encoder/std": torch.from_numpy(self.encoder.std),
        }
        for method, network in self.networks.items():
            tensors |= {f"{method}/{n}": t.float() for n, t in network.state_dict().items()}
        config = {
            "kind": KIND,
            "columns": self.encoder.to_json(),
            "target": self.target.to_json(),
            "networks": {method: list(n.sizes) for method, n in self.networks.items()},
            "activation": self.activation,
        }
        files.save(path, files.Checkpoint(tensors, config, {"results": self.results}))


def load_model(path: str | Path) -> TableModel:
    """Read a model that ``fsmap fit`` saved.

    Args:
        path: The file.

    Returns:
        The model.

    Raises:
        CheckpointError: If it is missing, damaged, or something else.
    """
    found = files.load(Path(path), hint="A model is a file that `fsmap fit` wrote, as it wrote it.")
    config = found.config
    if config.get("kind") != KIND:
        message = f"{path} is a checkpoint of {config.get('kind')!r}, not a model from `fsmap fit`"
        raise CheckpointError(message)
    hint = "A model is a file that `fsmap fit` wrote, as it wrote it."
    with files.readable(Path(path), hint=hint):
        return _decode(found)


def _decode(found: files.Checkpoint) -> TableModel:
    config = found.config
    scale = found.group("encoder")
    encoder = Encoder.from_json(config["columns"], scale["mean"].numpy(), scale["std"].numpy())
    networks = {}
    for method, sizes in config["networks"].items():
        generator = torch.Generator().manual_seed(0)  # what it draws is overwritten
        state = found.group(method)
        if sum((a + 1) * b for a, b in pairwise(sizes)) != sum(map(Tensor.numel, state.values())):
            message = f"the tensors of {method!r} do not make a network of sizes {sizes}"
            raise ValueError(message)
        network = MLP(sizes, config["activation"], generator=generator).float()
        network.load_state_dict(state)
        networks[method] = network.double().eval()
    target = Target.from_json(config["target"])
    results = found.progress["results"]
    _check(encoder, target, networks, results)
    return TableModel(encoder, target, networks, config["activation"], results)


def _check(encoder: Encoder, target: Target, networks: dict[str, MLP], results: Any) -> None:
    """Raise if parts do not fit each other, or are no finite numbers."""
    width = len(encoder.names())
    texts = [target.name, *target.classes, *(c.name for c in encoder.columns)]
    numbers = [target.mean, target.std, *(c.fill for c in encoder.columns)]
    if target.task == REGRESSION:
        numbers += [results[method]["margin"] for method in networks]
    tensors = [*map(torch.from_numpy, (encoder.mean, encoder.std))]
    tensors += [p for network in networks.values() for p in network.parameters()]
    fits = (
        networks
        and all(n.sizes[0] == width and n.sizes[-1] == target.outputs for n in networks.values())
        and len(encoder.mean) == len(encoder.std) == width
        and target.task in TASKS
        and all(isinstance(text, str) for text in texts)
        and all(map(math.isfinite, numbers))
        and all(bool(torch.isfinite(t).all()) for t in tensors)
    )
    if not fits:
        message = "encoder, target, networks and results do not fit each other, or are not finite"
        raise ValueError(message)


def forward(network: nn.Module, x: npt.NDArray[Any], size: int = 65_536) -> Tensor:
    """A network's output, some rows at a time, in float64."""
    rows = torch.from_numpy(x).double()
    with torch.no_grad():
        return torch.cat([network(part) for part in rows.split(size)])
