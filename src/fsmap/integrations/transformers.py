"""L-MAP in the Hugging Face Trainer: another class, and λ.

    trainer = LMAPTrainer(model, args, train_dataset=..., reg_strength=1e-4, num_points=16)
    trainer.train()

The loss of a step is the Trainer's + λR. R is taken at fresh evaluation points in every micro-batch
and scaled as the Trainer scales its own loss, in whichever of its ways. ψ changes with the
optimizer's steps and goes on where a checkpoint left it. ``evaluate`` and ``predict`` see the plain
model and the plain loss.

For another Trainer put the mixin before it: ``class Mine(LMAPTrainerMixin, Seq2SeqTrainer)``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.errors import InputError, require
from fsmap.integrations.collated import LABELS, Collated
from fsmap.lmap.module import LaplacianPenalty
from fsmap.lmap.options import check_strength

if TYPE_CHECKING:
    import transformers as hf
else:
    require("accelerate", extra="transformers")
    hf = require("transformers", extra="transformers")


LOGGER = logging.getLogger(__name__)
INFLATED = (
    "%s takes num_items_in_batch and ignores it, so that the Trainer's loss of a step is the sum, "
    "not the mean, of %d micro-batches (transformers issue 47688). R is scaled alike. Set "
    "model.accepts_loss_kwargs = False before the Trainer is made for the mean of both."
)


class LMAPTrainerMixin:
    """Adds λR to the loss of a ``transformers.Trainer``.

    Logs ``lmap_R`` and ``lmap_share``, λR relative to the loss, beside the Trainer's own numbers.

    Args:
        *args: The Trainer's.
        reg_strength: λ; the attribute of the same name may be changed while training runs.
        num_points: S, evaluation points of a micro-batch.
        px: Where the function is held still: a data set of tokenized items, with or without labels
            (collated as training items are), one of ``fsmap.px``, or a function ``(n, generator)``;
            by default the training set.
        lmap: Further options of :class:`fsmap.LaplacianPenalty`: ``every``, ``estimator``,
            ``seed``, ``forward`` …
        **kwargs: The Trainer's.
    """

    def __init__(
        self,
        *args: Any,
        reg_strength: float,
        num_points: int = 16,
        px: Any = None,
        lmap: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        check_strength(reg_strength, required=True)
        super().__init__(*args, **kwargs)
        self.reg_strength, self.num_points = reg_strength, num_points
        self.px, self.lmap = px, dict(lmap)
        self._penalty: LaplacianPenalty | None = None
        self._counts: bool | None = None  # whether the loss was divided by num_items_in_batch
        self._seen: list[Tensor] = []  # [2] each: every·R and the loss, since the last log
        trainer: Any = self
        trainer.add_callback(_Steps(self))
        if trainer.model is not None:
            _ = self.penalty  # what is wrong with its options shows now, not in training

    @property
    def penalty(self) -> LaplacianPenalty:
        """R of the model that is trained now (``model_init`` makes a new one for every run)."""
        trainer: Any = self
        if self._penalty is None or self._penalty.regularizer.module is not trainer.model:
            self._penalty = LaplacianPenalty(
                trainer.model, _distribution(trainer), num_points=self.num_points, **self.lmap
            )
        return self._penalty

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The Trainer's loss + λR while training; the Trainer's alone in evaluation.

        Args:
            model: The model as the Trainer wraps it.
            inputs: A batch.
            return_outputs: Whether the model's output is wanted too.
            num_items_in_batch: Labels in all micro-batches of the step, if the loss is a sum over
                them divided by this number.
            **kwargs: What other Trainers add.

        Returns:
            The loss, or the loss and the output.
        """
        parent: Any = super()
        training = model.training and torch.is_grad_enabled()
        parts = (
            self._parts(parent.compute_loss, model, inputs, num_items_in_batch) if training else 1
        )
        loss, outputs = parent.compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch, **kwargs
        )
        if training:
            loss = self._with_term(loss, parts)
        return (loss, outputs) if return_outputs else loss

    def _with_term(self, loss: Tensor, parts: int) -> Tensor:
        """Loss + λR, where the step's loss is the sum of ``parts`` such losses."""
        active, term = self.penalty.regularizer.active, self.penalty(self.reg_strength)
        if active and self.reg_strength:
            both = torch.stack([term.detach() / self.reg_strength, parts * loss.detach()])
            self._seen.append(both)
        return loss + term / parts

    def _parts(self, compute_loss: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> int:
        """How many losses like this one make up a step's: what λR is divided by here."""
        # A mean over a micro-batch is divided by their number afterwards, and what we add to it is
        # too. What was divided by num_items_in_batch is a part of the whole already.
        trainer: Any = self
        number = int(trainer.current_gradient_accumulation_steps)
        if number == 1 or not _complete(trainer, num_items_in_batch):
            return 1
        if self._counts is None:
            told = getattr(trainer, "loss_is_scaled_for_ga", None) or num_items_in_batch is None
            self._counts = bool(told) or _counts(compute_loss, model, inputs, num_items_in_batch)
            if not self._counts:
                LOGGER.warning(INFLATED, type(trainer.model).__name__, number)
        return number if self._counts else 1

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add R and λR's share of the loss, means since the last log, to the training's log."""
        if self._seen and "loss" in logs:
            R, loss = torch.stack(self._seen).mean(0).tolist()
            R /= self.penalty.regularizer.every
            logs["lmap_R"] = R
            logs["lmap_share"] = self.reg_strength * R / loss if loss else float("inf")
            self._seen.clear()
        parent: Any = super()
        parent.log(logs, *args, **kwargs)


class LMAPTrainer(LMAPTrainerMixin, hf.Trainer):
    """``transformers.Trainer`` with λR in its loss; see :class:`LMAPTrainerMixin`."""


class _Steps(hf.TrainerCallback):
    """The Trainer counts its steps: ψ follows, also after a resume."""

    def __init__(self, trainer: LMAPTrainerMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start where the Trainer starts."""
        self.trainer.penalty.regularizer.steps.detach()
        self.trainer.penalty.regularizer.steps.set_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The next ψ."""
        self.trainer.penalty.regularizer.steps.set_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nobody counts any more."""
        self.trainer.penalty.regularizer.steps.detach()


def _complete(trainer: Any, num_items_in_batch: Any) -> bool:
    """Whether the Trainer will leave the loss of a micro-batch as it is."""
    told = getattr(trainer, "loss_is_scaled_for_ga", None)
    if told is not None:
        return bool(told)
    counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return counted or trainer.compute_loss_func is not None


def _counts(compute_loss: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> bool:
    """Whether the loss is divided by the number of items: many a head takes it and ignores it."""
    model.eval()  # neither dropout nor running statistics see these two passes
    with torch.no_grad():
        once, twice = (
            compute_loss(model, dict(inputs), num_items_in_batch=times * num_items_in_batch)
            for times in (1, 2)
        )
    model.train()
    return not torch.allclose(once, twice, rtol=1e-3)


def _distribution(trainer: Any) -> Any:
    data = trainer.train_dataset if trainer.px is None else trainer.px
    if data is None:
        message = "neither px nor train_dataset is given: there is nothing to evaluate R at."
        raise InputError(message)
    if isinstance(data, Tensor | Mapping) or hasattr(data, "sample") or callable(data):
        return data
    columns = None
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        columns = trainer._signature_columns
    return Collated(data, trainer.data_collator, columns, {*trainer.label_names, *LABELS})
