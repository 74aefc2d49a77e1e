"""A model of a table in one file: encoder, networks, intervals, and nothing that is executed.

The file is a checkpoint (:mod:`fsmap.train.checkpoint`): safetensors and JSON, with a checksum,
written in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fsmap.errors import CheckpointError, DivergedError, InputError
from fsmap.models.mlp import MLP
from fsmap.tables.encoder import REGRESSION, TASKS, Encoder, Target
from fsmap.tables.network import Members, TableNet
from fsmap.tables.reader import Table
from fsmap.train import checkpoint as files

KIND = "table-model-2"
HINT = "A model is a file that `fsmap fit` wrote, as it wrote it."
LEVELS = np.linspace(0.005, 0.995, 199)
COVER = (0.05, 0.95)  # ends of the intervals that are reported

Floats = npt.NDArray[np.float64]


class Spread(NamedTuple):
    """How far targets lie from predictions, by the size of the prediction.

    Errors of rows that were held out are divided by a scale: the mean absolute error of rows with
    similar predictions. An interval is the prediction plus quantiles of the scaled errors times the
    scale (split conformal prediction).

    Attributes:
        knots: Predictions at which the scale is known.
        scale: The scale there; between them it is interpolated.
        table: Quantiles of scaled errors at ``LEVELS``.
        std: Standard deviation of scaled errors.
        floor: No interval goes below: 0 if no target was negative.
    """

    knots: Floats
    scale: Floats
    table: Floats
    std: float
    floor: float

    @classmethod
    def learn(cls, guess: Floats, truth: Floats) -> Spread:
        """From predictions of held-out rows and their targets, ``[n]`` each."""
        error, n = truth - guess, len(truth)
        order = np.argsort(guess, kind="stable")
        overall = float(np.abs(error).mean()) + 1e-12 * (1 + float(np.abs(truth).max()))
        bins = np.array_split(order, min(max(n // 30, 1), 10))
        knots = np.array([guess[rows].mean() for rows in bins])
        near = np.array([np.abs(error[rows]).sum() + 10 * overall for rows in bins])
        scale = np.maximum(near / np.array([len(rows) + 10 for rows in bins]), 0.02 * overall)
        ratio = np.sort(error / np.interp(guess, knots, scale))
        place = np.where(LEVELS < 0.5, np.floor(LEVELS * (n + 1)), np.ceil(LEVELS * (n + 1)))
        table = ratio[np.clip(place.astype(int) - 1, 0, n - 1)]
        floor = 0.0 if truth.min() >= 0 else -math.inf
        return cls(knots, scale, table, float(np.sqrt(np.mean(ratio**2))), floor)

    def quantiles(self, guess: Floats, levels: Sequence[float]) -> Floats:
        """Quantiles of the target, ``[n, len(levels)]``."""
        shift = np.interp(levels, LEVELS, self.table)
        found = guess[:, None] + np.interp(guess, self.knots, self.scale)[:, None] * shift
        return np.maximum(found, self.floor)

    def deviation(self, guess: Floats) -> Floats:
        """Standard deviation of the target, ``[n]``."""
        return self.std * np.interp(guess, self.knots, self.scale)


class TableModel(NamedTuple):
    """Everything that predicting needs.

    Attributes:
        encoder: From cells to numbers.
        target: From numbers to cells.
        networks: An ensemble per method, of encoded rows.
        chosen: The method that is used unless another is asked for.
        spreads: Of regression, by method.
        results: What was measured, by method, in plain values.
    """

    encoder: Encoder
    target: Target
    networks: dict[str, Members]
    chosen: str
    spreads: dict[str, Spread]
    results: dict[str, dict[str, Any]]

    def outputs(self, table: Table, method: str | None = None) -> Tensor:
        """What an ensemble says: standardized targets ``[N, 1]``, or log-probabilities ``[N, K]``.

        Args:
            table: Rows; columns are found by name.
            method: Which ensemble; None: the chosen one.

        Returns:
            float64.

        Raises:
            InputError: If there is no such method.
            DivergedError: If a prediction is not finite.
        """
        method = method or self.chosen
        if method not in self.networks:
            message = f"this model holds {', '.join(self.networks)}, not {method!r}"
            raise InputError(message)
        out = self.networks[method].outputs(torch.from_numpy(self.encoder.encode(table)))
        wrong = torch.isnan(out).any(1) | (out == torch.inf).any(1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0]) + 1
            message = (
                f"the prediction for row {row} is not finite. Are its numbers of a usual size?"
            )
            raise DivergedError(message)
        return out

    def predict(self, table: Table, method: str | None = None) -> dict[str, npt.NDArray[Any]]:
        """Predictions as columns.

        Returns:
            ``prediction`` with ``low`` and ``high`` (a 90 % interval), or with the probability of
            each class, ``p(class)``.
        """
        out = self.outputs(table, method)
        if self.target.task == REGRESSION:
            value = self.target.mean + self.target.std * out[:, 0].numpy()
            ends = self.spreads[method or self.chosen].quantiles(value, COVER)
            return {"prediction": value, "low": ends[:, 0], "high": ends[:, 1]}
        names = np.array(self.target.classes)
        chance = out.exp().numpy()
        columns: dict[str, npt.NDArray[Any]] = {"prediction": names[chance.argmax(1)]}
        return columns | {f"p({name})": chance[:, k] for k, name in enumerate(names.tolist())}

    def save(self, path: Path) -> None:
        """Write the file; the one that was there stays until the new one is complete."""
        encoder = {"mean": self.encoder.mean, "std": self.encoder.std}
        tensors = {f"encoder/{n}": torch.from_numpy(v) for n, v in encoder.items()}
        networks = {}
        for method, ensemble in self.networks.items():
            first: Any = ensemble.members[0]
            tensors |= {f"{method}/{n}": t.float() for n, t in ensemble.state_dict().items()}
            binned = isinstance(first, TableNet)
            networks[method] = {
                "members": len(ensemble.members),
                "sizes": list(first.sizes),
                "activation": first.activation if binned else "",
                "edges": first.edges.shape[1] if binned else 0,
            }
        for method, spread in self.spreads.items():
            arrays = {"knots": spread.knots, "scale": spread.scale, "table": spread.table}
            tensors |= {f"spread {method}/{n}": torch.from_numpy(v) for n, v in arrays.items()}
            lowest = None if math.isinf(spread.floor) else spread.floor
            networks[method] |= {"std": spread.std, "floor": lowest}
        config = {
            "kind": KIND,
            "columns": self.encoder.to_json(),
            "target": self.target.to_json(),
            "networks": networks,
            "chosen": self.chosen,
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
    found = files.load(Path(path), hint=HINT)
    kind = found.config.get("kind")
    if kind != KIND:
        old = " It was made by an older version: fit again." if kind == "table-model" else ""
        message = f"{path} is a checkpoint of {kind!r}, not a model from `fsmap fit`.{old}"
        raise CheckpointError(message)
    with files.readable(Path(path), hint=HINT):
        return _decode(found)


def _decode(found: files.Checkpoint) -> TableModel:
    config = found.config
    scale = found.group("encoder")
    encoder = Encoder.from_json(config["columns"], scale["mean"].numpy(), scale["std"].numpy())
    target = Target.from_json(config["target"])
    networks, spreads = {}, {}
    for method, about in config["networks"].items():
        state = found.group(method)
        networks[method] = _ensemble(about, state, target)
        if target.task == REGRESSION:
            parts = {n: t.double().numpy() for n, t in found.group(f"spread {method}").items()}
            floor = -math.inf if about["floor"] is None else float(about["floor"])
            spreads[method] = Spread(**parts, std=float(about["std"]), floor=floor)
    model = TableModel(
        encoder, target, networks, config["chosen"], spreads, found.progress["results"]
    )
    _check(model)
    return model


def _ensemble(about: dict[str, Any], state: dict[str, Tensor], target: Target) -> Members:
    """The networks; nothing is allocated unless the tensors have the numbers that they need."""
    sizes, edges = [int(n) for n in about["sizes"]], int(about["edges"])
    first = sizes[0] * max(edges, 1)
    units = [first, *sizes[1:]]
    count = sum((a + 1) * b for a, b in zip(units, units[1:], strict=False)) + sizes[0] * edges
    there = sum(map(Tensor.numel, state.values()))
    if min(sizes) < 1 or about["members"] < 1 or count * about["members"] != there:
        message = f"the tensors do not make {about['members']} networks of sizes {sizes}"
        raise ValueError(message)
    members: list[nn.Module] = []
    for _ in range(about["members"]):
        generator = torch.Generator().manual_seed(0)  # what it draws is overwritten
        if edges:
            code = torch.zeros(sizes[0], edges)
            members.append(TableNet(sizes, about["activation"], code, generator))
        else:
            members.append(MLP(sizes, generator=generator))
    ensemble = Members(members, labels=bool(target.classes)).float()
    ensemble.load_state_dict(state)
    return ensemble.double().eval()


def _check(model: TableModel) -> None:
    """Raise if parts do not fit each other, or are no finite numbers."""
    encoder, target = model.encoder, model.target
    width = len(encoder.names())
    texts = [target.name, *target.classes, *(c.name for c in encoder.columns)]
    numbers = [target.mean, target.std, *(c.fill for c in encoder.columns)]
    arrays = [encoder.mean, encoder.std]
    for spread in model.spreads.values():
        numbers.append(spread.std)
        arrays += [spread.knots, spread.scale, spread.table]
        if spread.table.shape != LEVELS.shape or spread.knots.shape != spread.scale.shape:
            message = "the intervals have tables of another size"
            raise ValueError(message)
    tensors = [t for network in model.networks.values() for t in network.state_dict().values()]
    sizes: list[Any] = [m.sizes for network in model.networks.values() for m in network.members]
    fits = (
        model.chosen in model.networks
        and all(s[0] == width and s[-1] == target.outputs for s in sizes)
        and len(encoder.mean) == len(encoder.std) == width
        and target.task in TASKS
        and all(isinstance(text, str) for text in texts)
        and all(map(math.isfinite, numbers))
        and all(np.isfinite(a).all() for a in arrays)
        and all(bool(torch.isfinite(t).all()) for t in tensors)
    )
    if not fits:
        message = "encoder, target, networks and results do not fit each other, or are not finite"
        raise ValueError(message)
