"""Which optimizer step it is, and which micro-batch of it: what every random draw depends on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fsmap.errors import InputError
from fsmap.px import Stream


class Steps:
    """Counts optimizer steps: by passes, by an optimizer's hook, or as the loop says.

    ψ is a function of (seed, step), evaluation points of (seed, step, rank, micro-batch).
    """

    def __init__(self, seed: int, every: int) -> None:
        """Start at step 0, counting passes."""
        self.seed, self.every = seed, every
        self.step = 0
        self._micro = 0  # passes since the last step, where somebody else counts steps
        self._told = False  # whether somebody else counts steps
        self._attached = False
        self._attachment = 0  # which one counts: hooks of earlier ones are deaf

    def __deepcopy__(self, memo: dict[int, Any]) -> Steps:
        """A copy belongs to another model: no optimizer counts its steps yet."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        made._told = made._attached = False
        return made

    def attach(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Count an optimizer's steps from now on; one that a GradScaler skips does not count.

        Raises:
            InputError: If this is no optimizer of the module, or one is attached already.
        """
        check_optimizer(optimizer)
        own = {id(p) for p in module.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            message = (
                f"this {type(optimizer).__name__} holds no parameter of the model. Attach the "
                "model's own optimizer, or count steps yourself: lm.step = n."
            )
            raise InputError(message)
        if self._attached:
            message = "this is attached to an optimizer already: a second one would count twice"
            raise InputError(message)
        self._told = self._attached = True
        self._attachment = number = self._attachment + 1

        def stepped(*_: Any) -> None:
            if number == self._attachment:
                self.set_step(self.step + 1)

        optimizer.register_step_post_hook(stepped)

    def detach(self) -> None:
        """Count passes again: the optimizer's work is done, and another may be attached."""
        self._told = self._attached = False
        self._attachment += 1
        self._micro = 0

    def set_step(self, step: int) -> None:
        """The loop says which step it is; passes are micro-batches from now on.

        Args:
            step: Number of the step.

        Raises:
            InputError: If it is negative.
        """
        if step < 0:
            message = f"step must be at least 0, got {step}"
            raise InputError(message)
        self._told = True
        if step != self.step:
            self.step, self._micro = int(step), 0

    def passed(self) -> None:
        """A pass is over: the next step, or the next micro-batch of a step that others count."""
        if self._told:
            self._micro += 1
        else:
            self.step += 1

    @property
    def active(self) -> bool:
        """Whether R is evaluated on this step."""
        return self.step % self.every == 0

    def stream(self) -> Stream:
        """This step's random numbers: ψ the same on every rank, evaluation points its own."""
        return Stream(self.seed, self.step, _rank(), self._micro)


def check_optimizer(optimizer: object) -> None:
    """Raise InputError for a scheduler and other things that are no optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        message = f"attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}"
        raise InputError(message)


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
