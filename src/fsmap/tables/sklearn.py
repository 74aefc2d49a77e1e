r"""scikit-learn estimators: an ensemble of networks for a table, or a linear model if it is better.

They standardize inside, hold out each row from one member of the ensemble, and work wherever
scikit-learn's own do: pipelines, ``GridSearchCV``, ``clone``, pickles, DataFrames, sample weights,
sparse matrices. The loss per row, in standardized units, is

    (y − f(x))²  or  cross-entropy,   + w/2 ‖θ‖² + λR(θ; p_X)

with the weight decay w as torch counts it and λ = 1/(2εN); see docs/guide/scale.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsmap.errors import InputError, require

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state, compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        _check_sample_weight,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError:
    require("sklearn", extra="data")
    raise

from fsmap.tables.model import Spread
from fsmap.tables.network import AUTO, Options, best, deal, learn

FEW = 10  # rows below which none are held out
SPARSE = ("csr", "csc", "coo")
Array = npt.NDArray[Any]


@dataclass(kw_only=True, eq=False, repr=False)
class TableEstimator(Options, BaseEstimator):
    """Stores its arguments, and trains when a subclass hands it standardized targets."""

    early_stopping: bool = True
    validation_fraction: float = 0.15
    random_state: Any = None
    verbose: bool = False

    def _validated(self, X: Any, y: Any, **options: Any) -> Any:
        X, y = validate_data(
            self, X, y, accept_sparse=SPARSE, dtype=np.float64, ensure_min_samples=2, **options
        )
        return _dense(X), y

    def _learn(self, X: Array, y: Tensor, weight: Array | None) -> Tensor:
        """Standardize the inputs, train, and keep the best; returns held-out outputs."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.scaler_ = StandardScaler().fit(X, sample_weight=weight)
        found = learn(
            torch.from_numpy(self.scaler_.transform(X)),
            y,
            self._folds(y, seed),
            self,
            weight=None if weight is None else torch.from_numpy(weight),
            seed=seed,
            progress=bool(self.verbose),
        )
        self.method_ = best(found)
        self.losses_ = {method: learned.loss for method, learned in found.items()}
        chosen = found[self.method_]
        self.module_, self.n_iter_ = chosen.module, chosen.step
        _, self.weight_decay_, self.reg_strength_, _ = chosen.config
        self.search_ = [line for learned in found.values() for line in learned.search]
        self.validation_curve_, self.validation_loss_ = chosen.curve, chosen.loss
        return chosen.out

    def _folds(self, y: Tensor, seed: int) -> Tensor:
        """By which member each row is held out."""
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
            return torch.full((len(y),), -1)
        labels = None if y.is_floating_point() else y
        return deal(len(y), self.ensemble, self.validation_fraction, seed, labels)

    def _forward(self, X: Any) -> Tensor:
        """Outputs for new rows, which are checked and standardized."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse=SPARSE, dtype=np.float64)
        return self.module_.outputs(torch.from_numpy(self.scaler_.transform(_dense(X))))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class LMAPRegressor(RegressorMixin, TableEstimator):
    """Regression by an ensemble of networks that are most likely functions (or parameters).

    Args:
        method: ``"auto"``: the best of L-MAP, PS-MAP and a linear model on held-out rows. Or one of
            ``"l-map"``, ``"ps-map"`` (plain training with weight decay), ``"linear"``, and
            ``"fs-map"`` (the exact log-determinant on few points: small networks).
        ensemble: Members that are averaged. Each holds out a part of the rows, together all of
            them. 1: a single function, which holds out ``validation_fraction``.
        hidden: Units of the hidden layers, such as 64 or ``(256, 256)``; ``"auto"`` goes by rows.
        activation: Of the hidden layers: ``"relu"``, ``"tanh"``, ``"gelu"``, ``"silu"``.
        module: A function ``(inputs, outputs) -> nn.Module`` for another network.
        weight_decay: w, or ``"auto"``.
        reg_strength: λ, or ``"auto"``: chosen on held-out rows.
        reg_nats: c, nats per row, instead of λ: c·log(1 + R/R₀) instead of λR, see
            :class:`fsmap.LogTrace`. Leave ``reg_strength`` at ``"auto"``.
        px: The evaluation distribution over standardized inputs: ``"normal"`` is N(0, I),
            ``"train"`` the training rows, or one of ``fsmap.px``.
        num_points: Evaluation points a step; None is 32.
        steps: Optimizer steps at most; None goes by rows.
        batch_size: None goes by rows.
        learning_rate: Adam's at the start, falling along a cosine; None is 1e-2.
        early_stopping: Hold out rows, keep the parameters that do best on them.
        validation_fraction: The share of rows held out if ``ensemble`` is 1.
        patience: Of 50 validations, how many without a new best end the training.
        device: ``"cpu"``, ``"cuda"``, ``"auto"``.
        random_state: Seed, generator or None, as everywhere in scikit-learn.
        verbose: Show a progress bar with the time left.

    After ``fit``: ``method_``, ``losses_`` (by method), ``weight_decay_``, ``reg_strength_``,
    ``search_`` (a dict per configuration), ``validation_loss_`` (root mean squared error of
    standardized targets), ``validation_curve_``, ``n_iter_``, ``module_`` (of standardized
    inputs), ``noise_std_`` (spread of the held-out residuals, in the target's unit).

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> model = LMAPRegressor(hidden=32, steps=200, random_state=0)
        >>> model.fit(X, X[:, 0] * X[:, 1]).score(X, X[:, 0] * X[:, 1]) > 0.5
        True
        >>> low, high = model.predict_interval(X[:5])  # 90 %
        >>> bool((low < high).all())
        True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows ``X [N, D]`` and targets ``y [N]`` or ``[N, K]``."""
        X, y = self._validated(X, y, multi_output=True, y_numeric=True)
        X, y, weight = _weighted(X, y, sample_weight)
        columns = y.reshape(len(y), -1).astype(np.float64)  # [N, K]
        self.target_scaler_ = StandardScaler().fit(columns, sample_weight=weight)
        self._single = y.ndim == 1
        out = self._learn(X, torch.from_numpy(self.target_scaler_.transform(columns)), weight)
        held = torch.isfinite(out).all(1).numpy()
        self.spreads_, self.noise_std_ = [], None
        if held.any():
            guess = self._unscaled(out[held])
            pairs = zip(guess.T, columns[held].T, strict=True)
            self.spreads_ = [Spread.learn(g, t) for g, t in pairs]
            self.noise_std_ = np.sqrt(np.mean((guess - columns[held]) ** 2, axis=0))
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """The predicted targets, in their own unit; with ``return_std`` also how sure they are.

        The standard deviation is that of errors on held-out rows with similar predictions.
        """
        mean = self._unscaled(self._forward(X))
        if not return_std:
            return mean[:, 0] if self._single else mean
        std = np.stack([s.deviation(m) for s, m in self._pairs(mean)], axis=1)
        return (mean[:, 0], std[:, 0]) if self._single else (mean, std)

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Array:
        """Quantiles of new targets, ``[N, Q]`` or ``[N, K, Q]``."""
        mean = self._unscaled(self._forward(X))
        found = np.stack([s.quantiles(m, quantiles) for s, m in self._pairs(mean)], axis=1)
        return found[:, 0] if self._single else found

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Array, Array]:
        """The ends of intervals that hold a share ``coverage`` of new targets.

        They do not go below 0 if no training target was negative.
        """
        ends = self.predict_quantiles(X, (0.5 - coverage / 2, 0.5 + coverage / 2))
        return ends[..., 0], ends[..., 1]

    def _pairs(self, mean: Array) -> Iterator[tuple[Spread, Array]]:
        """The spread of each target with its predictions."""
        if not self.spreads_:
            message = "the uncertainty comes from held-out rows: fit with early_stopping=True"
            raise InputError(message)
        return zip(self.spreads_, mean.T, strict=True)

    def _unscaled(self, out: Tensor) -> Array:
        return self.target_scaler_.inverse_transform(out.numpy())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


@dataclass(kw_only=True, eq=False, repr=False)
class LMAPClassifier(ClassifierMixin, TableEstimator):
    """Classification by an ensemble of networks that are most likely functions (or parameters).

    Arguments and attributes are those of :class:`LMAPRegressor`, besides ``classes_`` and
    ``class_weight`` (``"balanced"`` or a dict), and without ``noise_std_``. Held-out rows are
    compared by their log loss, so that the strengths are chosen for calibrated probabilities.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
        >>> model = LMAPClassifier(hidden=32, steps=200, random_state=0).fit(X, y)
        >>> model.score(X, y) > 0.8, model.predict_proba(X[:3]).shape
        (True, (3, 2))
    """

    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows ``X [N, D]`` and classes ``y [N]`` of any kind."""
        X, y = self._validated(X, y)
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        if self.class_weight is not None:
            classes = compute_sample_weight(self.class_weight, y)
            sample_weight = classes if sample_weight is None else classes * sample_weight
        X, y, weight = _weighted(X, y, sample_weight)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            message = f"the target has only one class, {only!r}: nothing to tell apart"
            raise InputError(message)
        self._learn(X, torch.from_numpy(labels.astype(np.int64)), weight)
        return self

    def predict(self, X: Any) -> Array:
        """The most likely class of every row."""
        best = self.predict_log_proba(X).argmax(1)  # first: it says so if this is not fitted
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Array:
        """Probabilities ``[N, K]`` in the order of ``classes_``."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the probabilities."""
        return self._forward(X).log_softmax(1).numpy()


def _dense(X: Any) -> Array:
    return X.toarray() if hasattr(X, "toarray") else X


def _weighted(X: Array, y: Array, sample_weight: Any) -> tuple[Array, Array, Array | None]:
    """The rows that count, their targets and weights; rows of weight zero are left out."""
    if sample_weight is None:
        return X, y, None
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    kept = weight > 0
    if kept.sum() < 2:
        message = f"sample_weight is positive for {int(kept.sum())} rows; at least 2 are needed"
        raise InputError(message)
    return X[kept], y[kept], weight[kept]
