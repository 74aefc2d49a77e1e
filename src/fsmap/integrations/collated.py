"""p_X from a data set of tokenized texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from fsmap.errors import InputError
from fsmap.linalg.probes import integer
from fsmap.px import check_draw, choose
from fsmap.types import Inputs

LABELS = ("label", "labels", "label_ids")


class Collated:
    """Items of a data set, drawn and then padded to one batch by a collator.

    The collator is handed its own random stream, so that one which masks or augments draws the same
    in every run and leaves torch's stream alone.

    Args:
        dataset: Items ``dict[str, ...]`` by number.
        collate: Makes a batch of a list of items, such as ``DataCollatorWithPadding(tokenizer)``.
        columns: Entries of an item that the collator gets to see; None: all.
        labels: Entries of the batch that are left out: labels need not be there.

    Raises:
        InputError: If the data set has no length, or none of its items.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        columns: Collection[str] | None = None,
        labels: Collection[str] = LABELS,
    ) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset)):
            message = (
                "evaluation points are drawn by their number, and this "
                f"{type(dataset).__name__} has none to draw. Give px: a Dataset with a length, or "
                "one of fsmap.px."
            )
            raise InputError(message)
        self.dataset, self.collate = dataset, collate
        self.columns, self.labels = columns, labels

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Draw ``n`` items.

        Args:
            n: How many.
            generator: Source of randomness, on the CPU.

        Returns:
            Tensors ``[n, ...]`` by name.

        Raises:
            InputError: If nothing but labels is left.
        """
        check_draw(n, generator)
        rows = choose(len(self.dataset), n, None, generator).tolist()
        items = [self._seen(self.dataset[row]) for row in rows]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(integer(generator.initial_seed(), *rows))
            batch = self.collate(items)
        kept = {k: torch.as_tensor(v) for k, v in batch.items() if k not in self.labels}
        if not kept:
            message = (
                f"the items have {sorted(self.dataset[rows[0]])}, and the model takes none of that "
                f"but labels; it takes {sorted(self.columns or [])}."
            )
            raise InputError(message)
        return kept

    def _seen(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in item.items() if self.columns is None or k in self.columns}

    def to(self, *_: Any, **__: Any) -> Collated:
        """Itself: what is drawn is moved afterwards."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Collated:
        return self  # never changed, so a copy of a model need not carry a copy of the data

    def __repr__(self) -> str:
        return f"Collated({len(self.dataset)} items of {type(self.dataset).__name__})"
