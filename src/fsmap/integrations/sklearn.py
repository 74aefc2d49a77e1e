r"""scikit-learn estimators: a network for a table, trained by L-MAP, PS-MAP or FS-MAP.

They standardize inside, hold out a part of the rows to stop early and to choose the strengths, and
work wherever scikit-learn's own do: pipelines, ``GridSearchCV``, ``clone``, pickles, DataFrames,
sample weights. The loss per row, in standardized units, is

    (y − f(x))²  or  cross-entropy,   + w/2 ‖θ‖² + λR(θ; p_X)

with the weight decay w as torch counts it and λ = 1/(2εN); see docs/guide/scale.md.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fsmap.errors import InputError, require

try:
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import column_or_1d, validate_data
except ImportError:
    require("sklearn", extra="data")
    raise

from fsmap.integrations.laplace import probabilities, standard_deviation
from fsmap.integrations.table_estimator import Array, TableEstimator, weighted


class LMAPRegressor(RegressorMixin, TableEstimator):
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
        reg_nats: c, nats per row, instead of λ: c·log(1 + R/R₀) instead of λR, see
            :func:`fsmap.l_map`. Leave ``reg_strength`` at ``"auto"``; ``reg_strength_`` is then the
            λ that c amounts to at the end.
        px: The evaluation distribution over standardized inputs: ``"normal"`` is N(0, I),
            ``"train"`` the training rows, or one of ``fsmap.px``.
        num_points: Evaluation points a step; None goes by method.
        steps: Optimizer steps at most; None goes by rows.
        batch_size: None goes by rows.
        learning_rate: Adam's at the start, falling along a cosine; None is 3e-3.
        early_stopping: Hold out rows, keep the parameters that do best on them.
        validation_fraction: The share of rows held out (none of fewer than 10 rows).
        patience: Of 50 validations, how many without a new best end the training.
        laplace: Learn how uncertain the last layer is, for ``predict(X, return_std=True)``. Needs
            laplace-torch, see :mod:`fsmap.integrations.laplace`.
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
        >>> len(model.search_)  # 4 weight decays, 4 strengths
        16
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows ``X [N, D]`` and targets ``y [N]`` or ``[N, K]``."""
        X, y = validate_data(
            self, X, y, multi_output=True, y_numeric=True, dtype=np.float64, ensure_min_samples=2
        )
        X, y, weight = weighted(X, y, sample_weight)
        columns = y.reshape(len(y), -1).astype(np.float64)  # [N, K]
        self.target_scaler_ = StandardScaler().fit(columns, sample_weight=weight)
        self._single = y.ndim == 1
        target = self.target_scaler_.transform(columns)
        self._learn(X, torch.from_numpy(target), weight)
        held = slice(0) if self._held_out is None else self._held_out.numpy()
        errors = self._unscaled(self._forward(self._standardized(X))) - columns
        self.noise_std_ = np.sqrt(np.mean(errors[held] ** 2, axis=0)) if len(errors[held]) else None
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """The predicted targets, in their own unit.

        Args:
            X: Rows ``[N, D]``.
            return_std: Also the standard deviation of new targets: noise, and how uncertain the
                last layer is (``laplace=True``).

        Returns:
            ``[N]`` or ``[N, K]``; or a pair of these.

        Raises:
            InputError: If there is no Laplace approximation.
        """
        x = self._read(X)
        mean = self._unscaled(self._forward(x))
        mean = mean[:, 0] if self._single else mean
        if not return_std:
            return mean
        if self.laplace_ is None:
            message = "return_std=True needs an estimator that was fitted with laplace=True"
            raise InputError(message)
        std = standard_deviation(self.laplace_, x, self._noise).numpy() * self.target_scaler_.scale_
        return mean, std[:, 0] if self._single else std

    def _unscaled(self, out: Tensor) -> Array:
        found: Array = self.target_scaler_.inverse_transform(out.numpy())
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class LMAPClassifier(ClassifierMixin, TableEstimator):
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
        X, y, weight = weighted(X, column_or_1d(y, warn=True), sample_weight)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            message = f"the target has only one class, {only!r}: nothing to tell apart"
            raise InputError(message)
        self._learn(X, torch.from_numpy(labels.astype(np.int64)), weight)
        return self

    def predict(self, X: Any) -> Array:
        """The most likely class of every row."""
        best = self.predict_proba(X).argmax(1)
        found: Array = self.classes_[best]
        return found

    def predict_proba(self, X: Any) -> Array:
        """Probabilities ``[N, K]`` in the order of ``classes_``; ``laplace=True`` averages them."""
        x = self._read(X)
        averaged = self.laplace_ is not None
        found = probabilities(self.laplace_, x) if averaged else self._forward(x).softmax(1)
        chances: Array = found.numpy()
        return chances
