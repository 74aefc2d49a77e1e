"""The log of a run: a row per epoch, as JSON lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsmap import metrics
from fsmap.errors import DivergedError
from fsmap.files import write_whole
from fsmap.images.step import COLUMNS

if TYPE_CHECKING:
    from fsmap.images.run import ImageRun

FILE = "log.jsonl"
LOOK_EVERY = 100  # steps between looks at whether the numbers are finite
WORDS = {"loss": "the cross-entropy", "laplacian": "R", "grad_norm": "the gradient"}


def totals_of(run: ImageRun) -> dict[str, float]:
    """The sums of the epoch so far, by name (:data:`fsmap.images.step.COLUMNS`)."""
    totals = dict(zip(COLUMNS, run.taken.totals.tolist(), strict=True))
    lost = [words for name, words in WORDS.items() if not math.isfinite(totals[name])]
    if lost:
        message = (
            f"training diverged: {lost[0]} is not finite within the {LOOK_EVERY} steps before "
            f"step {run.step} (lr {run.lr:.3g}, λ {run.reg_strength:.3g}). Lower the "
            "learning rate or λ, or clip the gradient."
        )
        raise DivergedError(message)
    return totals


def epoch_row(run: ImageRun, totals: dict[str, float]) -> dict[str, Any]:
    """What is known at the end of an epoch."""
    row: dict[str, Any] = {
        "epoch": run.epoch,
        "step": run.step,
        "lr": run.lr_used,
        "reg_strength": run.reg_strength_used,
        "seconds": run.seconds,
    }
    steps = totals["steps"]
    row["loss"] = totals["loss"] / steps
    row["accuracy"] = totals["correct"] * run.group.size / (steps * run.settings.batch_size)
    row["grad_norm"] = totals["grad_norm"] / steps
    if totals["regularized"]:
        row["laplacian"] = _laplacian(run, totals)
    if run.taken.penalty is not None:
        row["reg_strength"] = run.taken.penalty.reg_strength  # λ that the nats amount to now
        row["skipped"] = run.taken.penalty.skipped
    if len(run.task.valid.x):
        logits, y = run.logits_of(run.task.valid.x, run.taken.half), run.task.valid.y
        if bool(torch.isfinite(logits).all()):
            row["valid_accuracy"] = metrics.accuracy(logits, y)
            row["valid_nll"] = metrics.nll(logits, y)
            row["valid_ece"] = metrics.ece(logits, y)
            row["valid_temperature"] = metrics.temperature(logits, y)
    return row


def _laplacian(run: ImageRun, totals: dict[str, float]) -> float:
    """R itself: on its steps it was counted ``every`` times."""
    return totals["laplacian"] / (totals["regularized"] * run.settings.every)


def in_short(row: dict[str, Any]) -> str:
    """A row in a few words, for the progress bar."""
    parts = [f"epoch {row['epoch']}"]
    parts.append(f"loss {row['loss']:.3f}")
    if "valid_accuracy" in row:
        parts.append(f"held-out {100 * row['valid_accuracy']:.1f} %")
    return ", ".join(parts)


class Log:
    """Writes rows; a resumed run drops those that its checkpoint does not know."""

    def __init__(self, folder: Path, run: ImageRun, about: dict[str, Any]) -> None:
        """Open the log."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        head = {
            "settings": run.settings.describe(),
            "torch": torch.__version__,
            "device": _device_name(run.device),
            "processes": run.group.size,
            "parameters": sum(p.numel() for p in run.module.parameters()),
            **about,
        }
        lines = [json.dumps(head), *(json.dumps(row) for row in run.history)]
        write_whole(self.path, "".join(line + "\n" for line in lines).encode())

    def write(self, row: dict[str, Any]) -> None:
        """Add a row."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _device_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return f"{device} ({name})" if name else str(device)
