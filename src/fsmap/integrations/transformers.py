"""L-MAP in the Hugging Face Trainer: ``LMAPTrainer(..., reg_nats=0.05, num_points=16)``.

The loss of a step is the Trainer's + λR, or + c·log(1 + R/R₀) with ``reg_nats=c``
(:class:`fsmap.LogTrace`). R is taken at fresh evaluation points in every micro-batch and scaled as
the Trainer scales its own loss. ψ changes with the optimizer's steps and continues where a
checkpoint left it. ``evaluate`` and ``predict`` use the plain model and the plain loss.

For another Trainer put the mixin before it: ``class Mine(LMAPTrainerMixin, Seq2SeqTrainer)``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.errors import InputError, require
from fsmap.functional import evaluation_mode
from fsmap.lmap.module import LaplacianPenalty, LogTrace
from fsmap.lmap.options import check_strength
from fsmap.px import check_draw, choose, integer
from fsmap.types import Inputs

if TYPE_CHECKING:
    import transformers as hf
else:
    require("accelerate", extra="transformers")
    hf = require("transformers", extra="transformers")


Base: Any = object  # a Trainer, which carries no types
LABELS = ("label", "labels", "label_ids")
STATE = "fsmap_log_trace.pt"  # file of a checkpoint
LOGGER = logging.getLogger(__name__)
INFLATED = (
    "%s takes num_items_in_batch and ignores it, so that the Trainer's loss of a step is the sum, "
    "not the mean, of %d micro-batches (transformers issue 47688). R is scaled alike. Set "
    "model.accepts_loss_kwargs = False before the Trainer is made for the mean of both."
)


class Collated:
    """Items ``dict[str, ...]`` of a data set, drawn and then padded to one batch by a collator.

    The collator (``DataCollatorWithPadding(tokenizer)``) has a random stream of its own, so that
    masks and augmentation are the same in every run and torch's generator is left alone. It gets
    ``columns`` of an item (None: all), and ``labels`` of the batch are left out.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        columns: Collection[str] | None = None,
        labels: Collection[str] = LABELS,
    ) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset)):
            raise InputError(
                "evaluation points are drawn by index, and this "
                f"{type(dataset).__name__} has no length. Give px: a Dataset with a length, or "
                "one of fsmap.px."
            )
        self.dataset, self.collate = dataset, collate
        self.columns, self.labels = columns, labels

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Draw ``n`` items."""
        check_draw(n, generator)
        rows = choose(len(self.dataset), n, generator).tolist()
        items = [self.dataset[row] for row in rows]
        if self.columns is not None:
            if not isinstance(items[0], Mapping):
                raise InputError(f"px must have dicts as items, got {type(items[0]).__name__}")
            items = [{k: v for k, v in item.items() if k in self.columns} for item in items]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(integer(generator.initial_seed(), *rows))
            batch = self.collate(items)
        kept = {k: torch.as_tensor(v) for k, v in batch.items() if k not in self.labels}
        if not kept:
            raise InputError(
                f"the items have {sorted(self.dataset[rows[0]])}, and the model takes none of that "
                f"but labels; it takes {sorted(self.columns or [])}."
            )
        return kept

    def to(self, *_: Any, **__: Any) -> Collated:
        """Return itself: points are moved after they are drawn."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Collated:
        return self  # never changed, so a copy of a model need not carry a copy of the data


class LMAPTrainerMixin(Base):
    """Adds λR to the loss of a ``transformers.Trainer``.

    Logs ``lmap_R``, ``lmap_share`` (λR relative to the loss) and ``lmap_strength`` (λ) beside the
    Trainer's own numbers.

    Args:
        *args: The Trainer's.
        reg_strength: λ; the attribute of the same name may be changed while training runs.
        reg_nats: c, or a :class:`fsmap.LogTrace`: c·log(1 + R/R₀) instead of λR. Its running mean
            is kept in checkpoints and starts anew with a run that starts at step 0.
        num_points: S, evaluation points of a micro-batch.
        px: Evaluation distribution: a data set of tokenized items, with or without labels (collated
            as training items are), one of ``fsmap.px``, or a function ``(n, generator)``; by
            default the training set.
        lmap: Further options of :class:`fsmap.LaplacianPenalty`: ``every``, ``estimator``,
            ``seed``, ``forward`` …
        **kwargs: The Trainer's.
    """

    def __init__(
        self,
        *args: Any,
        reg_strength: float | None = None,
        reg_nats: float | LogTrace | None = None,
        num_points: int = 16,
        px: Any = None,
        lmap: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if (reg_strength is None) == (reg_nats is None):
            raise InputError(
                "give reg_strength (λ) or reg_nats (c), exactly one of them; got "
                f"{reg_strength=}, {reg_nats=}"
            )
        check_strength(reg_strength)
        if not isinstance(lmap, Mapping | None) or {"num_points", "px"} & set(lmap or {}):
            raise InputError(f"lmap must be a dict of options, without px and num_points: {lmap!r}")
        self.log_trace: LogTrace | None = None
        if reg_nats is not None:
            self.log_trace = reg_nats if isinstance(reg_nats, LogTrace) else LogTrace(reg_nats)
        super().__init__(*args, **kwargs)
        self.reg_strength, self.num_points = reg_strength or 0.0, num_points
        self.px, self.lmap = px, dict(lmap or {})
        self._penalty: LaplacianPenalty | None = None
        self._divided: bool | None = None  # whether the loss was divided by num_items_in_batch
        self._values: list[Tensor] = []  # [3] each: R, term and loss, since the last log
        self.add_callback(_Steps(self))
        if self.model is not None:
            _ = self.penalty  # raises for wrong options now, not in training

    @property
    def penalty(self) -> LaplacianPenalty:
        """R of the model that is trained now (``model_init`` makes a new one for every run)."""
        if self._penalty is None or self._penalty.regularizer.module is not self.model:
            options = {"num_points": self.num_points, **self.lmap}
            self._penalty = LaplacianPenalty(self.model, _distribution(self), **options)
        return self._penalty

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The Trainer's loss + λR while training; the Trainer's alone in evaluation."""
        training = model.training and torch.is_grad_enabled()
        plain, items = super().compute_loss, num_items_in_batch
        parts = self._parts(plain, model, inputs, items) if training else 1
        loss, out = plain(model, inputs, return_outputs=True, num_items_in_batch=items, **kwargs)
        if training:
            loss = self._with_term(loss, parts)
        return (loss, out) if return_outputs else loss

    def _with_term(self, loss: Tensor, parts: int) -> Tensor:
        """Loss + λR, where the step's loss is the sum of ``parts`` such losses."""
        reg, strength = self.penalty.regularizer, self.reg_strength
        active, every = reg.active, reg.every
        if self.log_trace is not None:
            R = self.penalty()
            term: Tensor = self.log_trace(R, every=every)
            values = [R / every, term, parts * loss]
        else:
            term = self.penalty(strength)
            active = active and bool(strength)
            values = [term / (strength * every), term / every, parts * loss] if active else []
        if active:
            self._values.append(torch.stack(values).detach())
        return loss + term / parts

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; R̄ of ``reg_nats`` goes on where the checkpoint left it."""
        if self.log_trace is not None and resume_from_checkpoint:
            folder = resume_from_checkpoint
            if folder is True:
                folder = hf.trainer_utils.get_last_checkpoint(self.args.output_dir)
            path = Path(folder or "") / STATE
            if path.is_file():
                self.log_trace.load_state_dict(torch.load(path, map_location="cpu"))
            else:
                LOGGER.warning("%s is missing: the running mean of R starts anew", path)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        """The Trainer's; a checkpoint also holds R̄ of ``reg_nats``."""
        super().save_model(output_dir, _internal_call)
        if self.log_trace is not None and _internal_call and output_dir and self.args.should_save:
            torch.save(self.log_trace.state_dict(), Path(output_dir) / STATE)

    def _parts(self, compute_loss: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> int:
        """The number of micro-batch losses that are summed in a step: λR is divided by it."""
        # The Trainer divides a mean over a micro-batch by their number later, λR with it. A loss
        # that was divided by num_items_in_batch is a part of the step's loss already.
        number = int(self.current_gradient_accumulation_steps)
        if number == 1 or not _loss_is_final(self, num_items_in_batch):
            return 1
        if self._divided is None:
            final = getattr(self, "loss_is_scaled_for_ga", None) or num_items_in_batch is None
            self._divided = bool(final) or _divides(compute_loss, model, inputs, num_items_in_batch)
            if not self._divided:
                LOGGER.warning(INFLATED, type(self.model).__name__, number)
        return number if self._divided else 1

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add R and λR's share of the loss, means since the last log, to the training's log."""
        if self._values and "loss" in logs:
            R, term, loss = torch.stack(self._values).mean(0).tolist()
            logs["lmap_R"] = R
            logs["lmap_share"] = term / loss if loss else float("inf")
            known = self.reg_strength if self.log_trace is None else self.log_trace.reg_strength
            logs["lmap_strength"] = float(known)
            self._values.clear()
        super().log(logs, *args, **kwargs)


class LMAPTrainer(LMAPTrainerMixin, hf.Trainer):
    """``transformers.Trainer`` with λR in its loss; see :class:`LMAPTrainerMixin`."""


class _Steps(hf.TrainerCallback):
    """Sets the step of ψ to the Trainer's, also after a resume."""

    def __init__(self, trainer: LMAPTrainerMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start where the Trainer starts."""
        self.trainer.penalty.detach()
        self.trainer.penalty.step = state.global_step
        trace, optimizer = self.trainer.log_trace, given["optimizer"]
        if trace is not None:
            if state.global_step == 0:
                for buffer in trace.buffers():
                    buffer.zero_()
            trace.detach()
            if isinstance(optimizer, torch.optim.Optimizer):  # else each micro-batch is a step
                trace.attach(optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go to the next step."""
        self.trainer.penalty.step = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count passes again."""
        self.trainer.penalty.detach()
        if self.trainer.log_trace is not None:
            self.trainer.log_trace.detach()


def _loss_is_final(trainer: Any, num_items_in_batch: Any) -> bool:
    """Whether the Trainer will leave the loss of a micro-batch as it is."""
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    if declared is not None:
        return bool(declared)
    counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return counted or trainer.compute_loss_func is not None


def _divides(compute_loss: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> bool:
    """Whether the loss is divided by the number of items: many models ignore the argument."""
    counts = num_items_in_batch, 2 * num_items_in_batch
    with evaluation_mode(model), torch.no_grad():  # neither dropout nor running statistics
        once, twice = (compute_loss(model, dict(inputs), num_items_in_batch=n) for n in counts)
    return not torch.allclose(once, twice, rtol=1e-3)


def _distribution(trainer: Any) -> Any:
    data = trainer.train_dataset if trainer.px is None else trainer.px
    if data is None:
        raise InputError("neither px nor train_dataset is given: no points to evaluate R at.")
    if isinstance(data, Tensor | Mapping) or hasattr(data, "sample") or callable(data):
        return data
    columns = None
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        columns = trainer._signature_columns
    return Collated(data, trainer.data_collator, columns, {*trainer.label_names, *LABELS})
