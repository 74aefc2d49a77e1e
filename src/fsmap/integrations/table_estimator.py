"""What the scikit-learn estimators share: arguments, standardization, held-out rows, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsmap.errors import InputError, require

try:
    from sklearn.base import BaseEstimator
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError:
    require("sklearn", extra="data")
    raise

from fsmap.integrations.laplace import fit_laplace
from fsmap.train.tabular import AUTO, Factory, learn

FEW = 10  # rows below which none are held out
PREDICT_ROWS = 65_536  # rows that pass through the network at a time
PASSED_ON = (
    *("method", "hidden", "activation", "module", "weight_decay", "reg_strength", "reg_nats"),
    *("px", "num_points", "steps", "batch_size", "learning_rate", "patience", "device"),
)
"""Arguments that :func:`fsmap.train.tabular.learn` takes as they are."""

Array = npt.NDArray[Any]


class TableEstimator(BaseEstimator):
    """Stores its arguments, and trains when a subclass hands it standardized targets."""

    def __init__(
        self,
        *,
        method: str = "l-map",
        hidden: Sequence[int] | str = AUTO,
        activation: str = "relu",
        module: Factory | None = None,
        weight_decay: float | str = AUTO,
        reg_strength: float | str = AUTO,
        reg_nats: float | None = None,
        px: Any = "normal",
        num_points: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        early_stopping: bool = True,
        validation_fraction: float = 0.15,
        patience: int = 15,
        laplace: bool = False,
        device: str = "cpu",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.hidden = hidden
        self.activation = activation
        self.module = module
        self.weight_decay = weight_decay
        self.reg_strength = reg_strength
        self.reg_nats = reg_nats
        self.px = px
        self.num_points = num_points
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.laplace = laplace
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def _learn(self, X: Array, y: Tensor, weight: Array | None) -> None:
        """Standardize the inputs, hold out rows, train, and keep what was found."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.scaler_ = StandardScaler().fit(X, sample_weight=weight)
        self._held_out = self._split(y, seed)
        x = self._standardized(X)
        self.module_, found = learn(
            x,
            y,
            self._held_out,
            weight=None if weight is None else torch.from_numpy(weight),
            seed=seed,
            progress=bool(self.verbose),
            **{name: getattr(self, name) for name in PASSED_ON},
        )
        self.weight_decay_, self.reg_strength_ = found.config
        self.laplace_: Any = None
        if self.laplace:
            self._add_uncertainty(x, y, weight)
        self.search_, self.validation_curve_ = found.search, found.curve
        self.validation_loss_, self.n_iter_ = found.value, found.step

    def _split(self, y: Tensor, seed: int) -> Tensor | None:
        """Which rows are held out; of every class where that can be."""
        strength = self.reg_strength if self.reg_nats is None else self.reg_nats
        if not self.early_stopping and AUTO in (self.weight_decay, strength):
            message = (
                "weight_decay='auto' and reg_strength='auto' choose on held-out rows, so they need "
                "early_stopping=True. Or give numbers for both."
            )
            raise InputError(message)
        if not 0 < self.validation_fraction < 1:
            message = f"validation_fraction must lie in (0, 1), got {self.validation_fraction}"
            raise InputError(message)
        if not self.early_stopping or len(y) < FEW:
            return None
        size = max(1, round(self.validation_fraction * len(y)))
        counts = torch.zeros(1) if y.is_floating_point() else y.bincount()
        classes = y.numpy() if counts.min() >= 2 and size >= len(counts) else None
        _, rows = train_test_split(
            np.arange(len(y)), test_size=size, stratify=classes, random_state=seed
        )
        held = torch.zeros(len(y), dtype=torch.bool)
        held[rows] = True
        return held

    def _add_uncertainty(self, x: Tensor, y: Tensor, weight: Array | None) -> None:
        if weight is not None:
            message = "laplace=True knows no sample weights. Leave one of them out."
            raise InputError(message)
        kept = slice(None) if self._held_out is None else ~self._held_out
        held = kept if self._held_out is None else self._held_out
        error = self._forward(x[held]) - y[held] if y.is_floating_point() else torch.ones(1)
        self._noise = float(error.square().mean().sqrt())  # of standardized targets
        self.laplace_ = fit_laplace(
            self.module_,
            x[kept],
            y[kept],
            noise_std=self._noise,
            weight_decay=self.weight_decay_,
        )

    def _read(self, X: Any) -> Tensor:
        """New rows, checked and standardized."""
        check_is_fitted(self)
        return self._standardized(validate_data(self, X, reset=False, dtype=np.float64))

    def _standardized(self, X: Array) -> Tensor:
        return torch.from_numpy(self.scaler_.transform(X))

    def _forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.module_(part) for part in x.split(PREDICT_ROWS)])


def weighted(X: Array, y: Array, sample_weight: Any) -> tuple[Array, Array, Array | None]:
    """Rows that count, and how much; rows of weight zero are as good as absent.

    Args:
        X: Rows.
        y: Targets.
        sample_weight: What ``fit`` was given; may be None.

    Returns:
        The rows with positive weight, their targets and weights (None where there are none).

    Raises:
        InputError: If fewer than two rows count.
    """
    if sample_weight is None:
        return X, y, None
    weight: Array = _check_sample_weight(
        sample_weight, X, dtype=np.float64, ensure_non_negative=True
    )
    kept = weight > 0
    if kept.sum() < 2:
        message = f"sample_weight is positive for {int(kept.sum())} rows; at least 2 are needed"
        raise InputError(message)
    return X[kept], y[kept], weight[kept]
