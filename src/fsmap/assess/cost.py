"""What one evaluation of the geometry would cost: from shapes and a few timed passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.assess.clock import now
from fsmap.errors import UnsupportedModuleError
from fsmap.functional import count
from fsmap.linalg import logdet, memory, operators, points
from fsmap.linalg.jacobian import jvp, vjp
from fsmap.linalg.slq import DEFAULT_PROBES
from fsmap.types import Inputs, ModelFn, Params

LANCZOS_STEPS = 24  # of slq, typically
FEW, MANY = 4, 256  # points of the timed passes: few first, more where these are quick
QUICK, PATIENCE = (
    0.01,
    0.3,
)  # seconds of a pass: quick enough for more points; too slow to be repeated


class Cost(NamedTuple):
    """One value, without its gradient (with it about three times that)."""

    method: str
    seconds: float
    bytes: int
    fits: bool


class Timing(NamedTuple):
    """Seconds over all points, and operations per second of a matrix product in float64."""

    forward: float
    jvp: float
    vjp: float
    rows: float  # the Jacobian
    gram: float  # AAᵀ
    rate: float


def costs(
    f: ModelFn, params: Params, x: Inputs, outputs: int, activation_bytes: float
) -> tuple[list[Cost], str]:
    """Predict the cost of every method.

    Args:
        f: Model function, in the precision it will be used in.
        params: Parameters.
        x: Points, all of them.
        outputs: K.
        activation_bytes: Of one pass over all points.

    Returns:
        Costs, and the method that ``auto`` would pick for the log-determinant.
    """
    params = {name: p.detach() for name, p in params.items()}
    like = next(iter(params.values()))
    P, Q = count(params), points.count(x) * outputs
    kept, weights = int(activation_bytes), P * like.element_size()
    gram = logdet.gram_bytes(f, params, x)
    t = measure(f, params, x, outputs)
    predicted = {
        "dense": (t.rows + (2.0 * Q * P**2 + P**3 / 3) / t.rate, 8 * (3 * Q * P + 2 * P * P)),
        "dual": (t.gram + Q**3 / 3 / t.rate, gram),
        "slq": _slq(t, min(Q, P), gram, weights + kept),
        "jvp": (t.jvp, 2 * (weights + kept)),
        "fd": (2 * t.forward, 2 * weights + kept),
    }
    free = memory.SHARE * memory.free_bytes(like.device)
    rows = [Cost(m, seconds, size, size < free) for m, (seconds, size) in predicted.items()]
    return rows, logdet.choose("auto", Q, P, like.device, gram=gram)


def _slq(t: Timing, side: int, gram: int, one_pass: int) -> tuple[float, int]:
    """By the matrix where it is small, by passes otherwise."""
    vectors = DEFAULT_PROBES * LANCZOS_STEPS
    if side <= operators.LARGEST_EXPLICIT and gram <= 3 * operators.FACTOR_BYTES:
        return t.gram + 2.0 * vectors * side**2 / t.rate, gram + 8 * vectors * side
    return vectors * (t.vjp + t.jvp), 8 * vectors * side + 2 * DEFAULT_PROBES * one_pass


def measure(f: ModelFn, params: Params, x: Inputs, outputs: int) -> Timing:
    """Time passes over some points and scale them to all of them.

    Args:
        f: Model function.
        params: Parameters, detached.
        x: Points.
        outputs: K.

    Returns:
        The times. What would need too much memory or time is predicted from reverse passes.
    """
    S, like = points.count(x), next(iter(params.values()))
    some = points.take(x, slice(0, FEW))
    if _time(lambda: f(params, some), like.device) < QUICK:
        some = points.take(x, slice(0, MANY))
    factor = S / points.count(some)

    def reverse() -> None:
        out, pull, _ = vjp(f, params, some)
        pull(torch.ones_like(out))

    with torch.no_grad():
        forward = factor * _time(lambda: f(params, some), like.device)
    backward = factor * _time(reverse, like.device)
    torch.func.jvp(torch.sin, (like,), (like,))  # the first one in a process loads its rules
    try:
        tangent = factor * _time(lambda: jvp(f, params, some, params), like.device)
    except UnsupportedModuleError:  # two reverse passes stand for it
        tangent = 2 * backward
    rows = gram = outputs * backward
    if rows < PATIENCE and 8 * points.count(some) * outputs * count(params) < 2**28:
        rows = factor * _time(lambda: logdet.whitened_rows(f, params, some), like.device)
        gram = factor * _time(lambda: logdet.whitened_gram(f, params, some), like.device)
    return Timing(forward, tangent, max(backward, forward), rows, gram, _rate(like))


def _rate(like: Tensor) -> float:
    n = 256
    matrix = torch.ones(n, n, dtype=torch.float64, device=like.device)
    return 2 * n**3 / _time(lambda: matrix @ matrix, like.device)


def _time(run: Callable[[], object], device: torch.device) -> float:
    """Seconds, the better of two after a first one, unless that takes long."""
    best = float("inf")
    for attempt in range(3):
        start = now(device)
        run()
        seconds = now(device) - start
        best = min(best, seconds) if attempt else seconds
        if attempt == 0 and seconds > PATIENCE:
            break
    return max(best, 1e-9)
