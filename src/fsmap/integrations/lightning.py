"""L-MAP in Lightning: ``out, R = self.lm(x)`` in ``training_step``, counted and logged.

The class is ``Classifier(LMAPMixin, L.LightningModule)``; ``docs/tutorials/lightning.md`` has a
whole one. ψ is a function of the optimizer step, the same on all ranks and after a resume.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fsmap.errors import InputError, require
from fsmap.lmap.module import LMAP, LogTrace
from fsmap.objective.geometry import SHARE

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = require("lightning.pytorch", extra="lightning")

Part = TypeVar("Part", LMAP, LogTrace)


class LMAPCallback(pl.Callback):
    """Counts steps by the optimizer, and logs R, λR and λR's share of the loss.

    It finds every :class:`fsmap.LMAP` and :class:`fsmap.LogTrace` in the module. Logged are
    ``lmap/R``, ``lmap/strength`` (λ), ``lmap/term`` (λR) and ``lmap/share`` (λR relative to the
    rest of the loss). λ is that of the ``LogTrace``, that of ``self.lm(x, reg_strength=...)``, or
    the module's attribute or hyper-parameter ``reg_strength``; if it is unknown, R is logged alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, dict[str, Any]] = {}  # values of this batch, by prefix of their names
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach every term to the optimizer that trains it."""
        terms, traces = _parts(pl_module, LMAP), _parts(pl_module, LogTrace)
        if not terms:
            how = "Make one in __init__: self.lm = fsmap.LMAP(network, px, num_points=64)."
            raise InputError(f"{type(pl_module).__name__} holds no fsmap.LMAP. {how}")
        optimizers = [_optimizer_of(term, trainer.optimizers) for term in terms.values()]
        for (prefix, term), optimizer in zip(terms.items(), optimizers, strict=True):
            term.detach()
            term.attach(optimizer)
            keep = partial(self._keep_R, prefix, pl_module)
            self._hooks.append(term.register_forward_hook(keep, with_kwargs=True))
        for number, (prefix, trace) in enumerate(traces.items()):
            trace.detach()
            trace.attach(optimizers[min(number, len(optimizers) - 1)])
            self._hooks.append(trace.register_forward_hook(partial(self._keep_term, prefix)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Detach from the optimizers; another fit has others."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._rows.clear()
        for part in pl_module.modules():
            if isinstance(part, LMAP | LogTrace):
                part.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach, as at the end of training."""
        self.on_train_end(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Log the values of this batch; nothing on steps that ``every`` leaves out."""
        loss = _loss(trainer, pl_module, outputs)
        for prefix, row in self._rows.items():
            added, trace = row.pop("added", None), row.pop("trace", None)
            if trace is not None:
                row["strength"] = trace.nats / torch.add(trace.mean, trace.first, alpha=SHARE)
            if added is not None and loss is not None:
                row["share"] = row["term"] / (loss - added).abs()
            named = {f"{prefix}/{key}": value for key, value in row.items()}
            pl_module.log_dict(named, on_step=True, on_epoch=False)
        self._rows.clear()

    def _keep_R(
        self, prefix: str, net: Any, module: LMAP, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Keep R, and λ and λR if λ is known; the result is λR if λ was given to the pass."""
        value, every = result[1], module.regularizer.every
        if not (isinstance(value, Tensor) and module.regularizer.active):
            return
        value, given = value.detach(), kwargs.get("reg_strength")
        row = self._rows.setdefault(prefix, {})
        if given is None:
            row["R"] = value / every
        elif isinstance(given, Tensor) or given != 0:  # with a plain 0 nothing was measured
            row["R"] = value / (every * given)
        strength = _strength(net) if given is None else given
        if strength is not None:
            row["strength"] = torch.as_tensor(strength)
            row["added"] = strength * value if given is None else value  # part of the loss
            row["term"] = row["added"] / every

    def _keep_term(self, prefix: str, module: LogTrace, args: Any, value: Tensor) -> None:
        if value.requires_grad:  # not on steps that ``every`` leaves out
            row = self._rows.setdefault(prefix, {})
            row["trace"], row["term"], row["added"] = module, value.detach(), value.detach()


class LMAPMixin:
    """Adds :class:`LMAPCallback` to a module: ``class Net(LMAPMixin, L.LightningModule)``.

    A callback that was given to the Trainer is used instead.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise InputError if the mixin comes last: Lightning would not call its method."""
        super().__init_subclass__(**options)
        after = cls.__mro__[cls.__mro__.index(LMAPMixin) :]
        if issubclass(cls, pl.LightningModule) and pl.LightningModule not in after:
            raise InputError(f"LMAPMixin first: class {cls.__name__}(LMAPMixin, LightningModule)")

    def configure_callbacks(self) -> Any:
        """The module's callbacks and ours."""
        parent: Any = super()
        own = parent.configure_callbacks()
        own = list(own) if isinstance(own, list | tuple) else [own]
        trainer: Any = getattr(self, "_trainer", None)
        there = [*own, *(trainer.callbacks if trainer is not None else [])]
        return own if any(isinstance(c, LMAPCallback) for c in there) else [*own, LMAPCallback()]


def _strength(pl_module: Any) -> Any:
    """λ of the module; None if it is unknown, or if a LogTrace has its own."""
    if _parts(pl_module, LogTrace):
        return None
    found = getattr(pl_module, "reg_strength", None)
    return pl_module.hparams.get("reg_strength") if found is None else found


def _parts(pl_module: nn.Module, kind: type[Part]) -> dict[str, Part]:
    """Modules of a kind, by the prefix of the names under which their numbers are logged."""
    found = [(name, m) for name, m in pl_module.named_modules() if isinstance(m, kind)]
    return {"lmap" if len(found) == 1 else f"lmap/{name}": m for name, m in found}


def _optimizer_of(term: LMAP, optimizers: list[Any]) -> Any:
    own = {id(p) for p in term.regularizer.params().values()}
    for optimizer in optimizers:
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return optimizer
    what = f"none of the {len(optimizers)} optimizers trains a parameter of the regularized network"
    raise InputError(f"{what}. Return one from configure_optimizers that does.")


def _loss(trainer: Any, pl_module: Any, outputs: Any) -> Tensor | None:
    """The loss of ``training_step``, times the micro-batches that the Trainer divided it by."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor):
        return None
    scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
    return loss.detach() * scale
