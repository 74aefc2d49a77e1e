r"""scikit-learn estimators: an ensemble of networks for a table, or a linear model if it is better.

They standardize inside, hold out each row from one member of the ensemble, and work wherever
scikit-learn's own do: pipelines, ``GridSearchCV``, ``clone``, pickles, DataFrames. The loss per
row, in standardized units, is

    (y − f(x))²  or  cross-entropy,   + w/2 ‖θ‖² + λR(θ; p_X)

with the weight decay w as torch counts it and λ = 1/(2εN); see docs/guide/scale.md.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError:
    require("sklearn", extra="data")
    raise

from fsmap.tables.model import Spread
from fsmap.tables.network import Options, best, learn

Array = npt.NDArray[Any]


@dataclass(kw_only=True, eq=False, repr=False)
class TableEstimator(Options, BaseEstimator):
    """Base class of the estimators: keeps the options, standardizes inputs and trains."""

    random_state: Any = None
    verbose: bool = False

    def _learn(self, X: Array, y: Tensor) -> Tensor:
        """Standardize the inputs, train, and keep the best; returns held-out outputs."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.scaler_ = StandardScaler().fit(X)
        rows = torch.from_numpy(self.scaler_.transform(X))
        found = learn(rows, y, self, seed=seed, progress=bool(self.verbose))
        self.method_ = best(found)
        self.losses_ = {method: learned.loss for method, learned in found.items()}
        chosen = found[self.method_]
        self.module_, self.n_iter_ = chosen.module, chosen.step
        _, self.weight_decay_, self.reg_strength_ = chosen.config
        self.search_ = [line for learned in found.values() for line in learned.search]
        return chosen.out

    def _forward(self, X: Any) -> Tensor:
        """Outputs for new rows, which are checked and standardized."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return self.module_.outputs(torch.from_numpy(self.scaler_.transform(X)))


class LMAPRegressor(RegressorMixin, TableEstimator):
    """Regression by an ensemble of networks that are most likely functions (or parameters).

    Args:
        method: ``"auto"``: the best of L-MAP, PS-MAP and a linear model on held-out rows. Or one of
            ``"l-map"``, ``"ps-map"`` (plain training with weight decay) and ``"linear"``.
        ensemble: Members that are averaged. Each holds out a part of the rows, together all of
            them. 1: a single function, which holds out 15 %.
        hidden: Units of the hidden layers, such as 64 or ``(256, 256)``; ``"auto"`` depends on N.
        weight_decay: w, or ``"auto"``.
        reg_strength: λ, or ``"auto"``: chosen on held-out rows.
        reg_nats: c, nats per row, instead of λ: c·log(1 + R/R₀) instead of λR, see
            :class:`fsmap.LogTrace`. Leave ``reg_strength`` at ``"auto"``.
        px: The evaluation distribution over standardized inputs: ``"normal"`` is N(0, I),
            ``"train"`` the training rows, or one of ``fsmap.px``.
        steps: Most optimizer steps; None depends on N. The best on held-out rows are kept.
        device: ``"cpu"``, ``"cuda"``, ``"auto"``.
        random_state: Seed, generator or None, as everywhere in scikit-learn.
        verbose: Show a progress bar with the time left.

    After ``fit``: ``method_``, ``losses_`` (on held-out rows by method: root mean squared error of
    standardized targets, or log loss), ``weight_decay_``, ``reg_strength_``, ``search_`` (a dict
    per configuration), ``n_iter_``, ``module_`` (of standardized inputs).

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

    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows ``X [N, D]`` and targets ``y [N]``."""
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2, y_numeric=True)
        target = y.reshape(-1, 1).astype(np.float64)
        self.target_scaler_ = StandardScaler().fit(target)
        out = self._learn(X, torch.from_numpy(self.target_scaler_.transform(target)))
        held = torch.isfinite(out[:, 0]).numpy()
        self.spread_ = Spread.learn(self._unscaled(out)[held], target[held, 0])
        return self

    def predict(self, X: Any) -> Array:
        """The predicted targets, in their own unit; none below 0 if no training target was."""
        return np.maximum(self._unscaled(self._forward(X)), self.spread_.floor)

    def predict_quantiles(
        self, X: Any, quantiles: Sequence[float] | float = (0.05, 0.5, 0.95)
    ) -> Array:
        """Quantiles of new targets, ``[N, Q]``, from errors on rows with similar predictions.

        Those below 0.005 and above 0.995 are taken as 0.005 and 0.995.
        """
        levels = np.atleast_1d(quantiles).tolist()
        if not all(0 <= q <= 1 for q in levels):
            raise InputError(f"quantiles must lie between 0 and 1, got {levels}")
        return self.spread_.quantiles(self.predict(X), levels)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Array, Array]:
        """The ends of intervals that hold a share ``coverage`` of new targets.

        They do not go below 0 if no training target was negative.
        """
        if not 0 <= coverage <= 1:
            raise InputError(f"coverage must lie between 0 and 1, got {coverage}")
        ends = self.predict_quantiles(X, (0.5 - coverage / 2, 0.5 + coverage / 2))
        return ends[:, 0], ends[:, 1]

    def _unscaled(self, out: Tensor) -> Array:
        return self.target_scaler_.inverse_transform(out.numpy())[:, 0]


class LMAPClassifier(ClassifierMixin, TableEstimator):
    """Classification by an ensemble of networks that are most likely functions (or parameters).

    Arguments and attributes are those of :class:`LMAPRegressor`, besides ``classes_``. Held-out
    rows are compared by their log loss, so that the strengths are chosen for calibrated
    probabilities.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
        >>> model = LMAPClassifier(hidden=32, steps=200, random_state=0).fit(X, y)
        >>> model.score(X, y) > 0.8, model.predict_proba(X[:3]).shape
        (True, (3, 2))
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows ``X [N, D]`` and classes ``y [N]`` of any kind."""
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            raise InputError(f"the target has only one class, {only!r}; at least two are needed")
        self._learn(X, torch.from_numpy(labels.astype(np.int64)))
        return self

    def predict(self, X: Any) -> Array:
        """The most likely class of every row."""
        best = self.predict_log_proba(X).argmax(1)  # first: raises NotFittedError
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Array:
        """Probabilities ``[N, K]`` in the order of ``classes_``."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the probabilities."""
        return self._forward(X).log_softmax(1).numpy()
