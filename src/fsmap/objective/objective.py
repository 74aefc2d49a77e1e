"""Objectives: likelihood + prior + geometry in nats; the only change of sign, the only 1/N."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import check_points, num_points
from fsmap.linalg import logdet
from fsmap.linalg.estimators import Estimator, by_name
from fsmap.linalg.metric import Metric
from fsmap.linalg.slq import DEFAULT_PROBES
from fsmap.objective.geometry import Geometry, Laplacian, LogDet, NoGeometry, TraceBound
from fsmap.objective.likelihood import Likelihood
from fsmap.objective.prior import Prior
from fsmap.px import EvalDistribution, Stream, as_px
from fsmap.types import Batch, Draws, ModelFn, Params

Parts = dict[str, Tensor]


class Objective(NamedTuple):
    """A log-posterior over parameters or functions: the sum of three log-densities in nats."""

    likelihood: Likelihood
    prior: Prior
    geometry: Geometry
    num_data: int  # N

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """Everything random of one step."""
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
        """−(sum of the terms)/N, and the terms. The only change of sign, the only 1/N."""
        parts = self.parts(f, params, batch, draws)
        return -torch.stack(list(parts.values())).sum() / self.num_data, parts

    def started(self, f: ModelFn, params: Params, stream: Stream) -> Objective:
        """The objective with what it takes from the first parameters: R₀ of ``reg_nats``."""
        if not isinstance(self.geometry, TraceBound):
            return self
        return self._replace(geometry=self.geometry.started(f, params, stream))

    def check(self, f: ModelFn, params: Params, batch: Batch) -> None:
        """Raise InputError if data, model, prior and p_X do not fit each other; looks at values."""
        for name, term in (("likelihood", self.likelihood), ("prior", self.prior)):
            if not hasattr(term, "check"):
                raise InputError(
                    f"the {name} must be an object such as fsmap.Gaussian(0.1), got {term!r}"
                )
        check_points(batch.x)
        if num_points(batch.x) != len(batch.y):
            raise InputError(f"x has {num_points(batch.x)} points and y has {len(batch.y)}")
        self.prior.check(params)
        with torch.no_grad():
            self.likelihood.check(f(params, batch.x), batch.y)
            geometry = self.started(f, params, Stream(0, 0)).geometry
            geometry.value(f, params, geometry.draw(f, params, Stream(0, 0)))


def ps_map(likelihood: Likelihood, prior: Prior, /, *, num_data: int) -> Objective:
    """The most likely parameters (``eq:psmap``): what ordinary regularised training does.

    An objective for :func:`fsmap.fit` of log p(y | f), log p(θ) and N.
    """
    return Objective(likelihood, prior, NoGeometry(), _positive("num_data", num_data))


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
        px: Evaluation distribution: where do we care what the function does?
        num_points: S, fresh points a step.
        jitter: ε > 0; part of the objective. 0 gives the unjittered one where S·K ≥ P.
        num_data: N.
        method: See :func:`fsmap.log_det`.
        metric: g, see :mod:`fsmap.metric`.
        probes: Number of probes of ``slq``.
    """
    if method not in logdet.METHODS:
        raise InputError(f"unknown log_det method {method!r}; known: {', '.join(logdet.METHODS)}")
    geometry = LogDet(
        as_px(px),
        _positive("num_points", num_points),
        _scalar(jitter),
        method=method,
        metric=metric,
        probes=probes,
    )
    return Objective(likelihood, prior, geometry, _positive("num_data", num_data))


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
    r"""Laplacian-regularised MAP (``eq:l-map``), the first-order form for large networks.

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
        r0: R₀ of ``reg_nats``. None: ``fit`` takes 1 % of R at the first parameters. With
            c = d/(2N) and R₀ = dε the term bounds ½ log det(I + 𝒥/ε) for 𝒥 of rank d.
        estimator: See :func:`fsmap.trace`.
        beta: Step of the differences.
        probes: ψ per step.
        metric: g, see :mod:`fsmap.metric`.
        every: Evaluate the term on every k-th step only, k times as strong.
    """
    _check_range("beta", beta)
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
    _check_range(name, value)
    scalar = _scalar(value)
    options: dict[str, Any] = {
        "px": as_px(px),
        "num_points": _positive("num_points", num_points),
        "estimator": by_name(estimator, beta=beta),
        "probes": _positive("probes", probes),
        "metric": metric,
        "every": _positive("every", every),
    }
    geometry: Geometry
    if name == "reg_nats":
        if r0 is not None:
            _check_range("r0", r0)
            r0 = _scalar(r0)
        geometry = TraceBound(nats=scalar * num_data, r0=r0, **options)
    else:
        epsilon = scalar if name == "jitter" else 1 / (2 * scalar * num_data)
        geometry = Laplacian(jitter=epsilon, **options)
    return Objective(likelihood, prior, geometry, _positive("num_data", num_data))


def _scalar(value: float | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _positive(name: str, value: int) -> int:
    if not value >= 1:  # nan, too
        raise InputError(f"{name} must be at least 1, got {value}")
    return value


def _check_range(name: str, value: float | Tensor) -> None:
    if not isinstance(value, Tensor) and not 0 < value < float("inf"):
        raise InputError(f"{name} must be positive and finite, got {value:g}")
