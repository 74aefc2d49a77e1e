"""L-MAP in Lightning: ``out, R = self.lm(x)`` in ``training_step``, counted and logged.

    class Classifier(LMAPMixin, L.LightningModule):
        def __init__(self):
            super().__init__()
            self.lm = fsmap.LMAP(network, px, num_points=64)       # new

        def training_step(self, batch, batch_idx):
            x, y = batch
            out, R = self.lm(x)                                    # new
            return F.cross_entropy(out, y) + self.reg_strength * R

With a strength in nats, ``self.penalty = fsmap.LogTrace(0.05)`` and ``+ self.penalty(R)``. ψ is a
function of the optimizer step, the same on all ranks and after a resume.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsmap.errors import InputError, require
from fsmap.lmap.module import LMAP, LaplacianPenalty
from fsmap.lmap.options import check_strength
from fsmap.lmap.strength import LogTrace
from fsmap.objective.geometry import SHARE

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = require("lightning.pytorch", extra="lightning")

PENALTIES = "fsmap_penalties"  # key of a checkpoint


class LMAPCallback(pl.Callback):
    """Lets the optimizer's steps count ψ, and logs R, λR and λR's share of the loss.

    It finds every :class:`fsmap.LMAP` and :class:`fsmap.LogTrace` in the module, and every
    :class:`fsmap.LaplacianPenalty` among its attributes; the step of a penalty, which is no module,
    is kept in the checkpoint here, and its values are not logged.

    Args:
        reg_strength: λ, or the name of an attribute or hyper-parameter of the module that holds it.
            If the module calls ``self.lm(x, reg_strength=...)``, that λ is taken. If it is unknown,
            R is logged alone. With a ``LogTrace`` in the module its λ and value are logged.
        prefix: Of the logged names: ``lmap/R``, ``lmap/strength``, ``lmap/term`` (λR) and
            ``lmap/share`` (λR relative to the rest of the loss).
        sync_dist: Average what is logged over the processes.
    """

    def __init__(
        self,
        reg_strength: float | str = "reg_strength",
        *,
        prefix: str = "lmap",
        sync_dist: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(reg_strength, str):
            check_strength(reg_strength)
        self.reg_strength = reg_strength
        self.prefix = prefix
        self.sync_dist = sync_dist
        self._values: dict[str, tuple[Tensor, Any]] = {}  # of LMAPs, and the λ they were given
        self._added: dict[str, Tensor] = {}  # of LogTraces
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach every term to the optimizer that trains it."""
        terms = _terms(pl_module)
        if not terms:
            message = (
                f"{type(pl_module).__name__} holds no fsmap.LMAP and no fsmap.LaplacianPenalty. "
                "Make one in __init__: self.lm = fsmap.LMAP(network, px, num_points=64)."
            )
            raise InputError(message)
        for term in terms:
            term.detach()
            term.attach(_optimizer_of(term, trainer.optimizers))
        for number, (name, trace) in enumerate(_traces(pl_module).items()):
            trace.detach()
            term = terms[min(number, len(terms) - 1)]
            trace.attach(_optimizer_of(term, trainer.optimizers))
            self._hooks.append(trace.register_forward_hook(partial(self._keep_added, name)))
        for name, module in _modules(pl_module).items():
            keep = partial(self._keep_value, name)
            self._hooks.append(module.register_forward_hook(keep, with_kwargs=True))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Detach from the optimizers; another fit has others."""
        for hook in self._hooks:
            hook.remove()
        for kept in (self._hooks, self._values, self._added):
            kept.clear()
        for term in (*_terms(pl_module), *_traces(pl_module).values()):
            term.detach()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """As at the end."""
        self.on_train_end(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Log what this batch's pass gave; nothing on steps that ``every`` leaves out."""
        loss = _loss(trainer, pl_module, outputs)
        modules, traces = _modules(pl_module), _traces(pl_module)
        for name, (value, given) in self._values.items():
            every = modules[name].regularizer.every
            logged = self._describe(value, given, loss, every, pl_module)
            self._log(pl_module, logged, name if len(modules) > 1 else "")
        for name, value in self._added.items():
            trace = traces[name]
            below = torch.add(trace.mean, trace.first, alpha=SHARE)
            logged = {"strength": trace.nats / below, "term": value}
            if loss is not None:
                logged["share"] = value / (loss - value).abs()
            self._log(pl_module, logged, name if len(traces) > 1 else "")
        self._values.clear()
        self._added.clear()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the steps of penalties; those of LMAPs are in the module's own state."""
        steps = {name: term.state_dict() for name, term in _penalties(pl_module).items()}
        if steps:
            checkpoint[PENALTIES] = steps

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the steps of penalties."""
        terms = _penalties(pl_module)
        for name, state in checkpoint.get(PENALTIES, {}).items():
            if name in terms:
                terms[name].load_state_dict(state)

    def _log(self, pl_module: pl.LightningModule, logged: dict[str, Any], name: str) -> None:
        place = f"{self.prefix}/{name}" if name else self.prefix
        named = {f"{place}/{key}": number for key, number in logged.items()}
        pl_module.log_dict(named, on_step=True, on_epoch=False, sync_dist=self.sync_dist)

    def _keep_value(
        self, name: str, module: LMAP, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        if isinstance(result[1], Tensor) and module.regularizer.active:
            self._values[name] = (result[1].detach(), kwargs.get("reg_strength"))

    def _keep_added(self, name: str, module: LogTrace, args: Any, value: Tensor) -> None:
        if value.requires_grad:  # not on steps that ``every`` leaves out
            self._added[name] = value.detach()

    def _describe(
        self, value: Tensor, given: Any, loss: Tensor | None, every: int, pl_module: nn.Module
    ) -> dict[str, Any]:
        """R, λ, λR and its share, as far as they are known; ``value`` is λR if λ was given."""
        strength = self._strength(pl_module) if given is None else given
        if strength is None:
            return {"R": value / every}
        added = value if given is not None else strength * value  # what the loss holds now
        described = {"strength": torch.as_tensor(strength), "term": added / every}
        if given is None:
            described["R"] = value / every
        elif isinstance(given, Tensor) or given != 0:  # with a plain 0 nothing was measured
            described["R"] = value / (every * given)
        if loss is not None:
            described["share"] = (added / every) / (loss - added).abs()
        return described

    def _strength(self, pl_module: Any) -> Any:
        if _traces(pl_module):
            return None
        if not isinstance(self.reg_strength, str):
            return self.reg_strength
        found = getattr(pl_module, self.reg_strength, None)
        return pl_module.hparams.get(self.reg_strength) if found is None else found


class LMAPMixin:
    """Brings :class:`LMAPCallback` along: ``class Net(LMAPMixin, L.LightningModule)``.

    A callback that was given to the Trainer is used instead.
    """

    def configure_callbacks(self) -> Any:
        """The module's callbacks and ours."""
        parent: Any = super()
        own = parent.configure_callbacks()
        own = list(own) if isinstance(own, list | tuple) else [own]
        trainer: Any = getattr(self, "_trainer", None)
        there = [*own, *(trainer.callbacks if trainer is not None else [])]
        return own if any(isinstance(c, LMAPCallback) for c in there) else [*own, LMAPCallback()]


def _modules(pl_module: nn.Module) -> dict[str, LMAP]:
    return {name: m for name, m in pl_module.named_modules() if isinstance(m, LMAP)}


def _traces(pl_module: nn.Module) -> dict[str, LogTrace]:
    return {name: m for name, m in pl_module.named_modules() if isinstance(m, LogTrace)}


def _penalties(pl_module: nn.Module) -> dict[str, LaplacianPenalty]:
    return {name: v for name, v in vars(pl_module).items() if isinstance(v, LaplacianPenalty)}


def _terms(pl_module: nn.Module) -> list[LMAP | LaplacianPenalty]:
    return [*_modules(pl_module).values(), *_penalties(pl_module).values()]


def _optimizer_of(term: LMAP | LaplacianPenalty, optimizers: list[Any]) -> torch.optim.Optimizer:
    own = {id(p) for p in term.regularizer.params().values()}
    for optimizer in optimizers:
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            found: torch.optim.Optimizer = optimizer
            return found
    message = (
        f"none of the {len(optimizers)} optimizers trains a parameter of the regularized network. "
        "Return one from configure_optimizers that does."
    )
    raise InputError(message)


def _loss(trainer: Any, pl_module: Any, outputs: Any) -> Tensor | None:
    """What ``training_step`` returned; the Trainer has divided it by the micro-batches."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor):
        return None
    scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
    return loss.detach() * scale
