r"""scikit-learn estimators: a network for a table, trained by L-MAP, PS-MAP or FS-MAP.

They standardize inside, hold out a part of the rows to stop early and to choose the strengths, and
work wherever scikit-learn's own do: pipelines, ``GridSearchCV``, ``clone``, pickles, DataFrames,
sample weights. The loss per row, in standardized units, is

    (y − f(x))²  or  cross-entropy,   + w/2 ‖θ‖² + λR(θ; p_X)

with the weight decay w as torch counts it and λ = 1/(2εN); see docs/guide/scale.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from fsmap.errors import InputError
from fsmap.train.tabular import AUTO, Factory, learn

FEW = 10  # rows below which none are held out
PREDICT_ROWS = 65_536  # rows that pass through the network at a time
PASSED_ON = (
    *("method", "hidden", "activation", "module", "weight_decay", "reg_strength", "px"),
    *("num_points", "steps", "batch_size", "learning_rate", "patience", "device"),
)
"""Arguments that :func:`fsmap.train.tabular.learn` takes as they are."""

Array = npt.NDArray[Any]


class _TableEstimator(BaseEstimator):
    """What both estimators share: arguments, standardization, held-out rows."""

    def __init__(
        self,
        *,
        method: str = "l-map",
        hidden: Sequence[int] | str = AUTO,
        activation: str = "relu",
        module: Factory | None = None,
        weight_decay: float | str = AUTO,
        reg_strength: float | str = AUTO,
        px: Any = "normal",
        num_points: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        early_stopping: bool = True,
        validation_fraction: float = 0.15,
        patience: int = 15,
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
        self.px = px
        self.num_points = num_points
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def _learn(self, X: Array, y: Tensor, weight: Array | None) -> None:
        """Standardize the inputs, hold out rows, train, and keep what was found."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.scaler_ = StandardScaler().fit(X, sample_weight=weight)
        self._held_out = self._split(y, seed)
        self.module_, found = learn(
            torch.from_numpy(self.scaler_.transform(X)),
            y,
            self._held_out,
            weight=None if weight is None else torch.from_numpy(weight),
            seed=seed,
            progress=bool(self.verbose),
            **{name: getattr(self, name) for name in PASSED_ON},
        )
        self.weight_decay_, self.reg_strength_ = found.config
        self.search_, self.validation_curve_ = found.search, found.curve
        self.validation_loss_, self.n_iter_ = found.value, found.step

    def _split(self, y: Tensor, seed: int) -> Tensor | None:
        """Which rows are held out; of every class where that can be."""
        if not self.early_stopping and AUTO in (self.weight_decay, self.reg_strength):
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

    def _outputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._forward(validate_data(self, X, reset=False, dtype=np.float64))

    def _forward(self, X: Array) -> Tensor:
        x = torch.from_numpy(self.scaler_.transform(X))
        with torch.no_grad():
            return torch.cat([self.module_(part) for part in x.split(PREDICT_ROWS)])


class LMAPRegressor(RegressorMixin, _TableEstimator):
    """Regression by a network that is the most likely function (or parameters).

    Args:
        method: ``"l-map"``, ``"ps-map"`` (plain training with weight decay), or ``"fs-map"`` (the
            exact log-determinant on few points: small networks).
        hidden: Units of the hidden layers, such as ``(256, 256, 256)``; ``"auto"`` goes by rows.
        activation: Of the hidden layers: ``"relu"``, ``"tanh"``, ``"gelu"``, ``"silu"``.
        module: A function ``(inputs, outputs) -> nn.Module`` for another network.
        weight_decay: w, or ``"auto"``.
        reg_strength: λ, or ``"auto"``: w and λ that are ``"auto"`` are chosen by one population on
            the held-out rows.
        px: The evaluation distribution over standardized inputs: ``"normal"`` is N(0, I),
            ``"train"`` the training rows, or one of ``fsmap.px``.
        num_points: Evaluation points a step; None goes by method.
        steps: Optimizer steps at most; None goes by rows.
        batch_size: None goes by rows.
        learning_rate: Adam's at the start, falling along a cosine; None is 3e-3.
        early_stopping: Hold out rows, keep the parameters that do best on them.
        validation_fraction: The share of rows held out (none of fewer than 10 rows).
        patience: Of 50 validations, how many without a new best end the training.
        device: ``"cpu"``, ``"cuda"``, ``"auto"``.
        random_state: Seed, generator or None, as everywhere in scikit-learn.
        verbose: Show a progress bar with the time left.

    After ``fit``: ``weight_decay_``, ``reg_strength_``, ``search_`` (a dict per configuration),
    ``validation_loss_`` (root mean squared error of standardized targets), ``validation_curve_``,
    ``n_iter_``, ``module_`` (of standardized inputs), ``noise_std_`` (spread of the held-out
    residuals, in the target's unit).

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> model = LMAPRegressor(hidden=(32,), steps=200, random_state=0)
        >>> model.fit(X, X[:, 0] * X[:, 1]).score(X, X[:, 0] * X[:, 1]) > 0.5
        True
        >>> len(model.search_)  # 3 weight decays, 4 strengths
        12
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows ``X [N, D]`` and targets ``y [N]`` or ``[N, K]``."""
        X, y = validate_data(
            self, X, y, multi_output=True, y_numeric=True, dtype=np.float64, ensure_min_samples=2
        )
        X, y, weight = _weighted(X, y, sample_weight)
        columns = y.reshape(len(y), -1).astype(np.float64)  # [N, K]
        self.target_scaler_ = StandardScaler().fit(columns, sample_weight=weight)
        self._single = y.ndim == 1
        target = self.target_scaler_.transform(columns)
        self._learn(X, torch.from_numpy(target), weight)
        held = slice(0) if self._held_out is None else self._held_out.numpy()
        errors = self._unscaled(self._forward(X)) - columns
        self.noise_std_ = np.sqrt(np.mean(errors[held] ** 2, axis=0)) if len(errors[held]) else None
        return self

    def predict(self, X: Any) -> Array:
        """The predicted targets, in their own unit."""
        found = self._unscaled(self._outputs(X))
        return found[:, 0] if self._single else found

    def _unscaled(self, out: Tensor) -> Array:
        found: Array = self.target_scaler_.inverse_transform(out.numpy())
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class LMAPClassifier(ClassifierMixin, _TableEstimator):
    """Classification by a network that is the most likely function (or parameters).

    Arguments and attributes are those of :class:`LMAPRegressor`, besides ``classes_`` and without
    ``noise_std_``. Held-out rows are compared by their log loss, so that the strengths are chosen
    for calibrated probabilities.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
        >>> model = LMAPClassifier(hidden=(32,), steps=200, random_state=0).fit(X, y)
        >>> model.score(X, y) > 0.8, model.predict_proba(X[:3]).shape
        (True, (3, 2))
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows ``X [N, D]`` and classes ``y [N]``.

        Args:
            X: Numbers.
            y: Labels of any kind.
            sample_weight: How much each row counts.

        Returns:
            self.

        Raises:
            InputError: If there is only one class.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        X, y, weight = _weighted(X, column_or_1d(y, warn=True), sample_weight)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            message = f"the target has only one class, {only!r}: nothing to tell apart"
            raise InputError(message)
        self._learn(X, torch.from_numpy(labels.astype(np.int64)), weight)
        return self

    def predict(self, X: Any) -> Array:
        """The most likely class of every row."""
        best = self._outputs(X).argmax(1).numpy()
        found: Array = self.classes_[best]
        return found

    def predict_proba(self, X: Any) -> Array:
        """Probabilities ``[N, K]``, in the order of ``classes_``."""
        found: Array = self._outputs(X).softmax(1).numpy()
        return found


def _weighted(X: Array, y: Array, sample_weight: Any) -> tuple[Array, Array, Array | None]:
    """Rows that count, and how much; rows of weight zero are as good as absent."""
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
