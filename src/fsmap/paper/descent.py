"""Full-batch Adam on stacked members: one pure loss, one tensor, one optimizer for all of them.

Adam acts element by element, so the members of a stack do not see each other: member k of the
stack ends where the same problem alone would end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fsmap.errors import DivergedError


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread for as long as the context lasts.

    A step on small matrices takes a millisecond. Waking a second thread for each of its operations
    costs more than it saves, and on a busy machine twenty times more.

    Yields:
        Nothing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def descend(
    loss: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    lr: float,
    steps: int,
    warmup: int = 0,
    advance: Callable[[float], None] | None = None,
) -> Tensor:
    """Minimize every member's loss from its start, on one thread.

    Args:
        loss: ``theta [..., P]`` to one loss per member, ``[...]``.
        start: First parameters, ``[..., P]``; not changed.
        lr: Learning rate of Adam.
        steps: How many.
        warmup: Steps over which the rate rises linearly from 0 (the first step does not move).
        advance: Called now and then with the fraction that is done.

    Returns:
        The last parameters, ``[..., P]``.

    Raises:
        DivergedError: If a member's parameters are not finite at the end.
    """
    theta = start.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / warmup, 1.0) if warmup else 1.0
    )
    with one_thread():
        for step in range(steps):
            (theta.grad,) = torch.autograd.grad(loss(theta).sum(), theta)
            optimizer.step()
            schedule.step()
            if advance is not None and step % 50 == 0:
                advance(step / steps)
    result = theta.detach()
    lost = ~result.isfinite().all(-1)
    if lost.any():
        message = (
            f"{int(lost.sum())} of {lost.numel()} members have parameters that are not finite "
            f"after {steps} steps. Lower lr={lr:g}, or look at their loss."
        )
        raise DivergedError(message)
    return result
