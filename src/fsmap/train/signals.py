r"""What held-out data say about λ: over-confident (positive, raise λ) or under-confident.

Outputs and targets in, a number out. Each of these is zero where the model is calibrated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fsmap import metrics
from fsmap.errors import InputError

Signal = Callable[[Tensor, Tensor], float]

BOUNDS = (1 / 16, 16.0)
"""Temperatures beyond these say no more than their sign."""


def log_temperature(logits: Tensor, y: Tensor) -> float:
    """The log of the temperature that minimizes the negative log-likelihood.

    Args:
        logits: ``[N, K]``.
        y: Labels ``[N]``.

    Returns:
        log T.
    """
    return math.log(metrics.temperature(logits, y, bounds=BOUNDS))


def temperature_slope(logits: Tensor, y: Tensor) -> float:
    r"""Minus the derivative of the negative log-likelihood in log T, at T = 1.

    $-\partial\,\mathrm{NLL} / \partial \log T = \frac1N \sum_n (\sum_k p_{nk} z_{nk} - z_{n y_n})$
    in nats. It averages exactly over batches and ranks, needs no search, and is small where the
    NLL is insensitive to T.

    Args:
        logits: ``[N, K]``.
        y: Labels ``[N]``.

    Returns:
        The slope; positive for an over-confident model.
    """
    z = logits.detach().double()
    chosen = z.gather(1, y.long()[:, None])[:, 0]  # [N]
    return float(((z.softmax(1) * z).sum(1) - chosen).mean())


@dataclasses.dataclass(frozen=True)
class ResidualRatio:
    r"""log of the residual variance over the noise variance, for Gaussian regression.

    $\log(\frac1N \sum_n \|y_n - f(x_n)\|^2 / K\sigma^2)$: positive where held-out errors are larger
    than the noise the likelihood assumes, that is, where the model fits noise.

    An under-fitted model has large residuals too: the guard has to notice that one.
    """

    noise_std: float

    def __call__(self, pred: Tensor, y: Tensor, /) -> float:
        """Residual against noise."""
        return 2 * math.log(max(metrics.rmse(pred, y), 1e-150) / self.noise_std)


SIGNALS: dict[str, Signal] = {"temperature": log_temperature, "slope": temperature_slope}


def find_signal(signal: str | Signal, noise_std: float | None = None) -> Signal:
    """Look a signal up.

    Args:
        signal: ``"temperature"``, ``"slope"``, ``"residual"``, or a function of outputs and
            targets.
        noise_std: σ of the likelihood, for ``"residual"``.

    Returns:
        The function.

    Raises:
        InputError: If there is none of that name, or σ is missing.
    """
    if callable(signal):
        return signal
    if signal == "residual":
        if noise_std is None or not 0 < noise_std < math.inf:
            message = (
                "signal='residual' compares residuals with the noise of the likelihood: give "
                f"noise_std > 0, got {noise_std}"
            )
            raise InputError(message)
        return ResidualRatio(noise_std)
    if signal not in SIGNALS:
        message = (
            f"unknown signal {signal!r}; allowed are {', '.join([*SIGNALS, 'residual'])}, or a "
            "function of outputs and targets"
        )
        raise InputError(message)
    return SIGNALS[signal]


def even_strength(out: Tensor, y: Tensor, laplacian: float | Tensor | None) -> float:
    """The λ at which λR equals the held-out loss of a classifier.

    Where λR is much more than that, it is not even felt if gradients are clipped: the step is then
    all of R, and no longer.

    Args:
        out: Logits ``[N, K]``.
        y: Labels ``[N]``.
        laplacian: R, where it is known.

    Returns:
        λ > 0; infinite where R is unknown or zero, where the loss is zero, and in regression.

    Raises:
        InputError: If R is not one number.
    """
    given = torch.as_tensor(0.0 if laplacian is None else laplacian).detach().double()
    if given.numel() != 1:
        message = f"laplacian is one number, R; got shape {list(given.shape)}"
        raise InputError(message)
    R = float(given)
    if not 0 < R < math.inf or y.is_floating_point() or out.dim() != 2:
        return math.inf
    return metrics.nll(out, y) / R or math.inf
