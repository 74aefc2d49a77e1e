"""Where an estimate of Tr 𝒥 is no number, or rounding: checked after it was computed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import NoiseReplay
from fsmap.linalg.passes import check_finite, outputs
from fsmap.linalg.values import number
from fsmap.types import Inputs, ModelFn, Params

STEP_LOST = 0.1  # share of a step that may be rounding, and of a trace


def check_trace(
    value: Tensor, f: ModelFn, params: Params, x: Inputs, beta: float | None = None
) -> None:
    """Refuse an estimate that is not finite, or a difference that rounding has eaten.

    A step βψ is rounded to the last digit of θ, u·|θ|, and a difference of outputs to u·|f|, u the
    machine epsilon. Nothing is checked inside ``vmap``.

    Args:
        value: The estimate.
        f: Model function.
        params: Parameters.
        x: Evaluation points.
        beta: Step of the differences; None for an estimator without them.

    Raises:
        InputError: If parameters, outputs or the value are not finite, or the step is too small.
    """
    found = number(value)
    if found is None:
        return
    if not math.isfinite(found):
        check_finite(params)
    if math.isfinite(found) and beta is None:
        return
    replay = NoiseReplay(f, params)
    with torch.no_grad():
        out = outputs(f, params, x).double()  # [S, K]
        size = torch.cat([p.detach().double().reshape(-1) for p in params.values()])
    replay()
    if not torch.isfinite(out).all():
        bad = int((~torch.isfinite(out)).any(1).sum())
        message = f"the model returns NaN or inf at {bad} of {len(out)} points"
        raise InputError(message)
    if not math.isfinite(found):
        message = f"the estimate of Tr J is {found}: numbers of this size overflow {value.dtype}"
        raise InputError(message)
    unit = max(torch.finfo(p.dtype).eps for p in params.values())
    step = unit * float(size.square().mean().sqrt()) / float(beta or 1)
    noise = unit**2 * float(out.square().sum(1).mean()) / float(beta or 1) ** 2
    if step > STEP_LOST or noise > STEP_LOST * abs(found):
        what = "parameters" if step > STEP_LOST else "outputs"
        message = (
            f"a step of beta={beta:g} is lost in the rounding of the {what}. Raise beta, compute "
            "in float64 (module.double()), or use 'jvp', which takes no differences."
        )
        raise InputError(message)
