"""Small tables for tests: written once, learned in a second."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from fsmap.tables.model import TableOptions, fit_table
from fsmap.tables.reader import read_table

FAST = ("--hidden", "8", "--steps", "40", "--silent")


def houses(path: Path, rows: int = 120, seed: int = 0) -> Path:
    """Prices: numbers with gaps, a category, a constant, an identifier."""
    rng = np.random.default_rng(seed)
    size, age = rng.uniform(30, 200, rows), rng.uniform(0, 90, rows)
    town = rng.choice(["Bern", "Basel", "Chur"], rows)
    price = 3 * size - age + 80 * (town == "Bern") + rng.normal(0, 10, rows)
    gap = rng.uniform(size=rows) < 0.1
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "size", "age", "town", "country", "price"])
        for k in range(rows):
            old = "" if gap[k] else f"{age[k]:.1f}"
            writer.writerow([f"house {k}", f"{size[k]:.1f}", old, town[k], "CH", f"{price[k]:.2f}"])
    return path


def save_model(folder: Path, **options: object) -> Path:
    """The model of a small table of houses."""
    options |= {"hidden": (4,), "steps": 5, "device": "cpu", "progress": False}
    table = read_table(houses(folder / "table.csv"))
    fit_table(table, "price", TableOptions(**options)).model.save(folder / "model.pt")
    return folder / "model.pt"


def flowers(path: Path, rows: int = 120, seed: int = 0) -> Path:
    """Three classes of two numbers."""
    rng = np.random.default_rng(seed)
    kind = np.arange(rows) % 3
    a, b = rng.normal(kind, 0.5), rng.normal(-kind, 0.7)
    names = np.array(["iris", "lily", "rose"])[kind]
    lines = [f"{u:.3f};{v:.3f};{n}" for u, v, n in zip(a, b, names, strict=True)]
    path.write_text("\n".join(["a;b;kind", *lines]) + "\n")
    return path
