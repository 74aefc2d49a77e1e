r"""Objectives: likelihood + prior + geometry in nats; the loss is minus their sum over N.

A likelihood is $\log p(y \mid f_\theta(x))$, summed over the batch; a prior is $\log p(\theta)$
over all P parameters of the dict; both with all constants. Each is an immutable tuple of its
hyper-parameters. ``value`` is pure, differentiable (in the hyper-parameters too) and vmaps over
stacked ones; it branches on shapes, never on numbers. ``check`` tests names, shapes and numbers
once, before training, outside of ``vmap``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp

from fsmap.errors import InputError
from fsmap.functional import accumulate, aligned, check_points, check_positive, num_points
from fsmap.linalg import logdet
from fsmap.linalg.estimators import Estimator, by_name
from fsmap.linalg.jacobian import Metric
from fsmap.linalg.slq import DEFAULT_PROBES
from fsmap.objective.geometry import Geometry, Laplacian, LogDet, TraceBound
from fsmap.px import EvalDistribution, Stream, as_px
from fsmap.types import Batch, Draws, ModelFn, Params

Parts = dict[str, Tensor]

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


# --- likelihoods


class Likelihood(Protocol):
    """Interface of a likelihood."""

    def value(self, out: Tensor, y: Tensor) -> Tensor:
        """Sum of ``log p(y | out)`` over the batch, in nats."""

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError if the outputs and targets do not fit this likelihood."""


class Gaussian(NamedTuple):
    r"""Gaussian noise, $y = f(x) + \mathcal{N}(0, \sigma^2)$, independent over points and outputs.

    $\log p = -\sum_{b,k} [(y_{bk} - f_{bk})^2 / 2\sigma_k^2 + \log\sigma_k + \log\sqrt{2\pi}]$

    Attributes:
        std: $\sigma$: one number for all outputs, or a tensor ``[K]`` with one per output.
    """

    std: float | Tensor

    def value(self, out: Tensor, y: Tensor) -> Tensor:
        """Log-likelihood of outputs and targets ``[B]``, ``[B, K]`` or ``[B, ..., K]``."""
        out, y = aligned(out, y)  # [B, ..., K]
        std = self._per_output(out)  # [] or [K]
        return (-0.5 * ((y - out) / std).square() - std.log() - LOG_SQRT_2PI).sum()

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes, y that is not finite, or ``std <= 0``."""
        check_batch(out, y)
        check_positive("std", self.std)
        self._per_output(aligned(out, y)[0])

    def _per_output(self, out: Tensor) -> Tensor:
        """The scale as ``[]`` or ``[K]`` that fits the last dimension of ``out``."""
        std = tensor_like(self.std, out)
        if std.dim() > 1 or (std.dim() == 1 and std.shape[0] != out.shape[-1]):
            raise InputError(
                f"std has shape {list(std.shape)}, but the model has {out.shape[-1]} output(s). "
                f"Give one number, or a tensor [{out.shape[-1]}]."
            )
        return std


class Categorical(NamedTuple):
    r"""One of K classes, $p(y = k) = \mathrm{softmax}(f)_k$: cross-entropy as a likelihood."""

    def value(self, out: Tensor, y: Tensor) -> Tensor:
        r"""Log-likelihood of a batch.

        ``out`` are logits ``[B, K]`` or ``[B, T, K]``, ``y`` integer labels ``[B]`` or ``[B, T]``,
        or probabilities (floating dtype) of the logits' shape: then $\sum_k y_k \log p_k$.
        """
        check_classes(out, y)
        log_p = accumulate(out).log_softmax(-1)  # [B, ..., K]
        if y.is_floating_point():
            return (y.to(log_p.dtype) * log_p).sum()
        return log_p.gather(-1, y.long().unsqueeze(-1)).sum()

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes, labels outside 0..K-1, or improper probabilities."""
        check_classes(out, y)
        check_batch(out, y)
        classes = out.shape[-1]
        if y.is_floating_point():
            total = y.sum(-1)
            if (y < 0).any() or (total - 1).abs().max() > 1e-3:
                raise InputError(
                    "probability targets must be >= 0 and sum to one over the classes, got a "
                    f"minimum of {y.min().item():g} and sums from {total.min().item():g} to "
                    f"{total.max().item():g}. Normalize them, or give integer labels."
                )
        elif y.min() < 0 or y.max() >= classes:
            raise InputError(
                f"labels must lie in 0..{classes - 1} for {classes} logits, got labels from "
                f"{y.min().item()} to {y.max().item()}. Renumber them, widen the last layer, or "
                "drop points with a label that means 'ignore'."
            )


class Bernoulli(NamedTuple):
    r"""Yes or no, $p(y = 1) = \mathrm{sigmoid}(f)$, independent over points and outputs."""

    def value(self, out: Tensor, y: Tensor) -> Tensor:
        r"""Log-likelihood of a batch, $y \log\sigma(f) + (1 - y) \log\sigma(-f)$, y in [0, 1]."""
        out, y = aligned(out, y)
        return (y * F.logsigmoid(out) + (1 - y) * F.logsigmoid(-out)).sum()

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes or targets outside [0, 1]."""
        check_batch(out, y)
        aligned(out, y)
        if y.min() < 0 or y.max() > 1:
            raise InputError(
                f"Bernoulli targets must lie in [0, 1], got values from {y.min().item():g} to "
                f"{y.max().item():g}. Map the two classes to 0 and 1."
            )


def check_classes(out: Tensor, y: Tensor) -> None:
    """Raise InputError on wrong shapes or dtypes; values are not looked at."""
    if out.dim() < 2 or out.shape[-1] < 2:
        raise InputError(
            f"Categorical needs logits [B, K] or [B, T, K] with K >= 2, got {list(out.shape)}. "
            "For one logit per point use Bernoulli()."
        )
    if y.dtype == torch.bool or y.is_complex():
        allowed = "integers (class numbers) or floats (probabilities). Convert with y.long()."
        raise InputError(f"labels have dtype {y.dtype}; allowed are {allowed}")
    expected = out.shape if y.is_floating_point() else out.shape[:-1]
    if y.shape != expected:
        what = "float targets are probabilities" if y.is_floating_point() else "integer targets"
        raise InputError(
            f"{what} of shape {list(y.shape)} do not fit logits {list(out.shape)}: expected "
            f"{list(expected)}. Integer class numbers are [B] or [B, T] (use y.long()), "
            "probabilities have the shape of the logits."
        )


def check_batch(out: Tensor, y: Tensor) -> None:
    """Raise InputError unless there are points, floating-point outputs and finite targets."""
    if out.numel() == 0 or y.numel() == 0:
        found = f"outputs {list(out.shape)}, targets {list(y.shape)}"
        raise InputError(f"the batch is empty: {found}. Give at least one point.")
    if not out.is_floating_point():
        raise InputError(f"outputs have dtype {out.dtype}; they must be floating-point numbers.")
    bad = int((~torch.isfinite(y)).sum())
    if bad:
        found = f"{bad} values that are nan or infinite (of {y.numel()})"
        raise InputError(f"targets hold {found}. Remove or impute those points.")


def tensor_like(value: float | Tensor, like: Tensor) -> Tensor:
    """A hyper-parameter, with its graph, in the dtype and on the device of ``like``."""
    if isinstance(value, Tensor):
        return value.to(dtype=like.dtype, device=like.device)
    return like.new_full((), float(value))  # a fill: a CUDA graph cannot hold a copy from the host


# --- priors

Scale = float | Tensor | Mapping[str, float | Tensor]
"""One number for all parameters, or one per name: a number or a tensor that broadcasts to it."""

Elementwise = Callable[[Tensor], Tensor] | Mapping[str, Callable[[Tensor], Tensor]]
"""A map that acts on every entry of a tensor alone, or one for each parameter."""


class Prior(Protocol):
    """Interface of a prior."""

    def value(self, params: Params) -> Tensor:
        """Log-density of the parameters, in nats."""

    def check(self, params: Params) -> None:
        """Raise InputError if this prior does not fit these parameters."""


class Normal(NamedTuple):
    r"""Independent Gaussians, $p(\theta) = \prod_i \mathcal{N}(\theta_i; \mu_i, \alpha_i^2)$.

    $\log p = -\sum_i [(\theta_i - \mu_i)^2 / 2\alpha_i^2 + \log\alpha_i + \log\sqrt{2\pi}]$.
    With one std it is weight decay, $\|\theta\|^2 / 2\alpha^2$ for the whole data set.

    Attributes:
        std: $\alpha$: one number, or a dict with a number or a tensor for each parameter.
        mean: $\mu$: None for zero, a number, or a dict of tensors: copies of pretrained weights,
            for transfer. Names that are no parameters are ignored, so a ``state_dict`` will do;
            copy it, because training in place would change the mean.
    """

    std: Scale
    mean: Scale | None = None

    def value(self, params: Params) -> Tensor:
        """Log-density of the parameters, in nats."""
        _check_not_empty(params)
        terms = []
        for name, tensor in params.items():
            theta = accumulate(tensor)
            std = _fitting("std", self.std, name, theta)
            mean = None if self.mean is None else _fitting("mean", self.mean, name, theta)
            centered = theta if mean is None else theta - mean
            repeats = theta.numel() // max(std.numel(), 1)  # of each entry of std, by broadcasting
            log_norm = repeats * std.log().sum() + theta.numel() * LOG_SQRT_2PI
            terms.append((-0.5 * (centered / std).square()).sum() - log_norm)
        return torch.stack(terms).sum()

    def check(self, params: Params) -> None:
        """Raise InputError on missing names, wrong shapes, or scales that are not positive."""
        _check_not_empty(params)
        for name, theta in params.items():
            check_positive(f"std of {name!r}", _entry("std", self.std, name))
            _fitting("std", self.std, name, theta)
            mean = 0.0 if self.mean is None else self.mean
            if not torch.isfinite(_fitting("mean", mean, name, theta)).all():
                raise InputError(f"mean of {name!r} holds nan or inf; it must be finite")


class Flat(NamedTuple):
    """The improper prior p(theta) = 1: maximum likelihood."""

    def value(self, params: Params) -> Tensor:
        """Zero."""
        _check_not_empty(params)
        return accumulate(next(iter(params.values()))).new_zeros(())

    def check(self, params: Params) -> None:
        """Raise InputError if there is no parameter."""
        _check_not_empty(params)


class Reparametrized(NamedTuple):
    r"""A prior over $\theta$ in other coordinates $\theta' = \mathcal{R}(\theta)$.

    $\log p'(\theta') = \log p(\theta) + \log|\det \mathrm{d}\theta/\mathrm{d}\theta'|$ at
    $\theta = \mathcal{R}^{-1}(\theta')$ (``appsec:psmap_reparam``). DEVIATION: the paper's display
    subtracts the new term where its text, and a density that integrates to one, need a plus.

    Attributes:
        prior: The prior over $\theta$.
        inverse: $\mathcal{R}^{-1}$, from $\theta'$ to $\theta$: a function of a tensor that acts on
            each entry alone (``torch.asinh``), or a dict with one for each parameter.
    """

    prior: Prior
    inverse: Elementwise

    def value(self, params: Params) -> Tensor:
        """Log-density at the new coordinates theta', in nats."""
        theta, log_det = self._pull_back(params)
        return self.prior.value(theta) + log_det

    def check(self, params: Params) -> None:
        """Check the map at these parameters, then the prior at what they map to."""
        theta, log_det = self._pull_back(params)
        bad = [name for name, t in theta.items() if not torch.isfinite(t).all()]
        if bad or torch.isnan(log_det):
            where = f"parameters {bad}" if bad else "its log-Jacobian"
            raise InputError(
                f"the inverse map is not finite at these values: {where}. Start at "
                "theta' = R(theta) for some theta, inside the domain of the inverse."
            )
        for name, tensor in params.items():  # J v = D v must hold for a v with distinct entries
            function = _entry("inverse", self.inverse, name)
            v = torch.linspace(1, 2, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            along = jvp(function, (tensor,), (v.view_as(tensor),))[1]
            expected = _slope(function, tensor)[1] * v.view_as(tensor)
            if not torch.allclose(along, expected, rtol=1e-3, atol=1e-6, equal_nan=True):
                how = "Give an elementwise map: one whose Jacobian is diagonal."
                raise InputError(f"the inverse map mixes the entries of {name!r}. {how}")
        self.prior.check(theta)

    def _pull_back(self, params: Params) -> tuple[Params, Tensor]:
        """The old coordinates theta, and log |det d theta / d theta'|."""
        _check_not_empty(params)
        pairs = {n: _slope(_entry("inverse", self.inverse, n), t) for n, t in params.items()}
        log_slopes = [accumulate(slope).abs().log().sum() for _, slope in pairs.values()]
        return {name: theta for name, (theta, _) in pairs.items()}, torch.stack(log_slopes).sum()


def _slope(inverse: Callable[[Tensor], Tensor], tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Value and elementwise derivative, by one forward-mode pass along (1, ..., 1)."""
    theta, slope = jvp(inverse, (tensor,), (torch.ones_like(tensor),))[:2]
    if theta.shape != tensor.shape:
        raise InputError(
            f"the inverse map turned a parameter of shape {list(tensor.shape)} into "
            f"{list(theta.shape)}. An elementwise map keeps the shape."
        )
    return theta, slope


def _entry(what: str, table: Any, name: str) -> Any:
    """The entry of one parameter; a value that is not a dict holds for all parameters."""
    if not isinstance(table, Mapping):
        return table
    if name not in table:
        raise InputError(
            f"{what} has no entry for {name!r}; it has {sorted(table)}. Give one entry for each "
            "trainable parameter, named as in named_parameters(), or one value for all."
        )
    return table[name]


def _fitting(what: str, table: Scale, name: str, theta: Tensor) -> Tensor:
    """A scale or mean as a tensor that broadcasts to the parameter, never beyond it."""
    value = tensor_like(_entry(what, table, name), theta)
    try:
        value.expand_as(theta)
    except RuntimeError as error:
        raise InputError(
            f"{what} of {name!r} has shape {list(value.shape)}, which does not broadcast to the "
            f"parameter's {list(theta.shape)}. Give a number or a tensor of that shape."
        ) from error
    return value


def _check_not_empty(params: Params) -> None:
    if not params:
        raise InputError("there is no trainable parameter. Set requires_grad on at least one.")


# --- objectives


class Objective(NamedTuple):
    """A log-posterior over parameters or functions: the sum of three log-densities in nats."""

    likelihood: Likelihood
    prior: Prior
    geometry: Geometry
    num_data: int  # N

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """The random numbers of one step."""
        return self.geometry.draw(f, params, stream)

    @property
    def adaptive(self) -> bool:
        """Whether draws depend on the values of the parameters."""
        return bool(getattr(getattr(self.geometry, "estimator", None), "adaptive", False))

    def parts(self, f: ModelFn, params: Params, batch: Batch, draws: Draws) -> Parts:
        """The terms in nats for the whole data set; a batch stands for all N points."""
        share = self.num_data / len(batch.y)
        return {
            "likelihood": share * self.likelihood.value(f(params, batch.x), batch.y),
            "prior": self.prior.value(params),
            "geometry": self.geometry.value(f, params, draws),
        }

    def loss(self, f: ModelFn, params: Params, batch: Batch, draws: Draws) -> tuple[Tensor, Parts]:
        """The negative sum of the terms divided by N, and the terms."""
        parts = self.parts(f, params, batch, draws)
        return -torch.stack(list(parts.values())).sum() / self.num_data, parts

    def started(self, f: ModelFn, params: Params, stream: Stream) -> Objective:
        """The objective with R₀ of ``reg_nats`` set at the initial parameters, unless given."""
        if not isinstance(self.geometry, TraceBound):
            return self
        return self._replace(geometry=self.geometry.started(f, params, stream))

    def check(self, f: ModelFn, params: Params, batch: Batch) -> None:
        """Raise InputError if data, model, prior and p_X do not fit each other; looks at values."""
        for name, term, example, count in (
            ("likelihood", self.likelihood, "Gaussian(0.1)", 2),
            ("prior", self.prior, "Normal(1.0)", 1),
        ):
            try:  # a prior has check(params), a likelihood check(out, y)
                inspect.signature(term.check).bind(*range(count))
            except (AttributeError, TypeError):
                message = f"the {name} must be an object such as fsmap.{example}, got {term!r}"
                raise InputError(message) from None
        check_points(batch.x)
        if num_points(batch.x) != len(batch.y):
            raise InputError(f"x has {num_points(batch.x)} points and y has {len(batch.y)}")
        self.prior.check(params)
        with torch.no_grad():
            self.likelihood.check(f(params, batch.x), batch.y)
            geometry = self.started(f, params, Stream(0, 0)).geometry
            geometry.value(f, params, geometry.draw(f, params, Stream(0, 0)))


class NoGeometry(NamedTuple):
    """PS-MAP: no term."""

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """Nothing."""
        return Draws()

    def value(self, f: ModelFn, params: Params, draws: Draws) -> Tensor:
        """Zero."""
        return next(iter(params.values())).new_zeros(())


def ps_map(likelihood: Likelihood, prior: Prior, /, *, num_data: int) -> Objective:
    """The most likely parameters (``eq:psmap``): ordinary regularized training.

    An objective for :func:`fsmap.fit` of log p(y | f), log p(θ) and N.
    """
    return Objective(likelihood, prior, NoGeometry(), _at_least_one("num_data", num_data))


def fs_map(
    likelihood: Likelihood,
    prior: Prior,
    px: EvalDistribution,
    /,
    *,
    num_points: int,
    jitter: float | Tensor,
    num_data: int,
    method: str = "auto",
    metric: Metric | Tensor | None = None,
    probes: int = DEFAULT_PROBES,
) -> Objective:
    r"""The most likely function (``eq:jitter-fs-map``).

    Args:
        likelihood: log p(y | f).
        prior: log p(θ).
        px: Evaluation distribution: the inputs at which the function matters.
        num_points: S, fresh points a step.
        jitter: ε > 0; part of the objective. 0 gives the unjittered one where S·K ≥ P.
        num_data: N.
        method: See :func:`fsmap.log_det`.
        metric: g, see :mod:`fsmap.metric`.
        probes: Number of probes of ``slq``.
    """
    if method not in logdet.METHODS:
        raise InputError(f"unknown log_det method {method!r}; known: {', '.join(logdet.METHODS)}")
    points = _at_least_one("num_points", num_points)
    if not isinstance(jitter, Tensor) and not 0 <= jitter < math.inf:
        raise InputError(f"jitter must be one number >= 0, got {jitter!r}")
    epsilon = jitter if isinstance(jitter, Tensor) else torch.tensor(jitter, dtype=torch.float64)
    geometry = LogDet(as_px(px), points, epsilon, method, metric, probes)
    return Objective(likelihood, prior, geometry, _at_least_one("num_data", num_data))


def l_map(
    likelihood: Likelihood,
    prior: Prior,
    px: EvalDistribution,
    /,
    *,
    num_points: int,
    num_data: int,
    jitter: float | Tensor | None = None,
    reg_strength: float | Tensor | None = None,
    reg_nats: float | Tensor | None = None,
    r0: float | Tensor | None = None,
    estimator: str | Estimator = "jvp",
    beta: float = 1e-3,
    probes: int = 1,
    metric: Metric | Tensor | None = None,
    every: int = 1,
) -> Objective:
    r"""Laplacian-regularized MAP (``eq:l-map``), the first-order form for large networks.

    Give exactly one of ``jitter``, ``reg_strength`` and ``reg_nats``.

    Args:
        likelihood: log p(y | f).
        prior: log p(θ).
        px: Evaluation distribution.
        num_points: S, fresh points a step.
        num_data: N.
        jitter: ε.
        reg_strength: λ = 1/(2εN), the weight of R in the loss per data point; 0 is PS-MAP, at no
            cost.
        reg_nats: c, nats per data point: c·log(1 + R/R₀) instead of λR, whose strength does not
            depend on the size of R; see :class:`fsmap.objective.geometry.TraceBound`. 0 is PS-MAP.
        r0: R₀ of ``reg_nats``. None: ``fit`` takes 1 % of R at the initial parameters. With
            c = d/(2N) and R₀ = dε the term bounds ½ log det(I + 𝒥/ε) for 𝒥 of rank d.
        estimator: See :func:`fsmap.trace`.
        beta: Step of the differences.
        probes: ψ per step.
        metric: g, see :mod:`fsmap.metric`.
        every: Evaluate the term on every k-th step only, k times as strong.
    """
    check_positive("beta", beta)
    named = {"jitter": jitter, "reg_strength": reg_strength, "reg_nats": reg_nats}
    given = [(name, value) for name, value in named.items() if value is not None]
    if len(given) != 1 or (r0 is not None and reg_nats is None):
        raise InputError(
            "give jitter, reg_strength (λ = 1/(2εN)) or reg_nats (c; r0 belongs to it), exactly "
            f"one of them; got {dict(given) or 'none'}, {r0=}"
        )
    ((name, value),) = given
    if name != "jitter" and not isinstance(value, Tensor) and value == 0:
        return ps_map(likelihood, prior, num_data=num_data)
    scalar = _positive_scalar(name, value)
    options: dict[str, Any] = {
        "px": as_px(px),
        "num_points": _at_least_one("num_points", num_points),
        "estimator": by_name(estimator, beta=beta),
        "probes": _at_least_one("probes", probes),
        "metric": metric,
        "every": _at_least_one("every", every),
    }
    geometry: Geometry
    if name == "reg_nats":
        start = None if r0 is None else _positive_scalar("r0", r0)
        geometry = TraceBound(nats=scalar * num_data, r0=start, **options)
    else:
        epsilon = scalar if name == "jitter" else 1 / (2 * scalar * num_data)
        geometry = Laplacian(jitter=epsilon, **options)
    return Objective(likelihood, prior, geometry, _at_least_one("num_data", num_data))


def _at_least_one(name: str, value: int) -> int:
    given: Any = value
    if not (isinstance(given, Real) and value >= 1 and value % 1 == 0):
        raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def _positive_scalar(name: str, value: float | Tensor) -> Tensor:
    """A number > 0 as a tensor; a tensor is returned as it is, without a check."""
    if isinstance(value, Tensor):
        return value
    given: object = value
    if isinstance(given, bool) or not isinstance(given, Real):
        raise InputError(f"{name} must be a number > 0, got {value!r}")
    scalar = torch.tensor(value, dtype=torch.float64)
    check_positive(name, scalar)
    return scalar
