"""The −½ log det term, by which the most likely *function* and parameters differ.

Every term has two methods: ``draw`` makes all random numbers, and ``value`` is a pure function of
them, in nats for the whole data set.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.linalg import logdet
from fsmap.linalg.estimators import Estimator, Jvp, evaluate
from fsmap.linalg.jacobian import Metric, Site
from fsmap.linalg.slq import DEFAULT_PROBES
from fsmap.px import EvalDistribution, Stream, sample
from fsmap.types import Draws, ModelFn, Params

SHARE = 0.01
"""R₀ over R at the start: c·log(1 + R/R₀) is linear in R below R₀, a logarithm above."""


class Geometry(Protocol):
    """A term of the objective that depends on the function's Jacobian."""

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """The random numbers that :meth:`value` takes, for one optimizer step."""

    def value(self, f: ModelFn, params: Params, draws: Draws) -> Tensor:
        """Nats."""


class LogDet(NamedTuple):
    r"""FS-MAP (``eq:jitter-fs-map``), on S fresh points a step.

    $-\tfrac12 \log\det(\mathcal J(\theta; p_X) + \epsilon I)$
    """

    px: EvalDistribution
    num_points: int
    jitter: Tensor  # []  ε
    method: str = "auto"
    metric: Metric | Tensor | None = None
    probes: int = DEFAULT_PROBES  # used by "slq"

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """S points, and random signs for ``slq``."""
        x = sample(self.px, self.num_points, params, stream)
        size, like = logdet.sizes(f, params, x), next(iter(params.values())).detach()
        if logdet.choose(self.method, size, like.device) != "slq":
            return Draws(x)
        site = Site(f, params, x, self.metric)
        side = min(site.resolve(site.output()).size, size.P)  # n of slq
        return Draws(x, stream.signs(self.probes, side, like))

    def value(self, f: ModelFn, params: Params, draws: Draws) -> Tensor:
        """Nats."""
        given = draws.psi
        assert given is None or isinstance(given, Tensor)
        jitter = self.jitter.to(next(iter(params.values())).device)
        method = self.method
        if method == "auto":  # as in draw: the free memory may have changed since
            size = logdet.sizes(f, params, draws.x)
            method = "slq" if given is not None else ("dense" if size.P <= size.rows else "dual")
        site = Site(f, params, draws.x, self.metric)
        return -0.5 * logdet.evaluate(site, jitter, method, probes=given).value


class Laplacian(NamedTuple):
    r"""L-MAP (``eq:l-map``): $-R(\theta)/(2\epsilon)$ with R an estimate of Tr 𝒥.

    Equals $-\tfrac12(\log\det(\mathcal J + \epsilon I) - P\log\epsilon)$ to first order in $\max_i
    \lambda_i/\epsilon$: faithful for *large* ε.
    """

    px: EvalDistribution
    num_points: int
    jitter: Tensor  # []  ε = 1/(2λN)
    estimator: Estimator = Jvp()
    probes: int = 1
    metric: Metric | Tensor | None = None
    every: int = 1

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """S points and probes; nothing on the steps that ``every`` leaves out."""
        return _trace_draws(self, f, params, stream)

    def value(self, f: ModelFn, params: Params, draws: Draws) -> Tensor:
        """Nats, ``every`` times as much on the steps that count: unbiased over time."""
        if draws.x is None:
            return next(iter(params.values())).new_zeros(())
        return -self.every * _trace(self, f, params, draws) / (2 * self.jitter)


class TraceBound(NamedTuple):
    r"""L-MAP with a strength in nats: $-cN\log(1 + R(\theta)/R_0)$, R an estimate of Tr 𝒥.

    With $cN = d/2$ and $R_0 = d\epsilon$ this is a bound of the exact term: for 𝒥 of rank d

    .. math:: \tfrac12 \log\det(I + \mathcal J/\epsilon)
        = \tfrac d2 \cdot \tfrac1d \sum_{i \le d} \log(1 + \lambda_i/\epsilon)
        \le \tfrac d2 \log\Bigl(1 + \frac{\operatorname{Tr} \mathcal J}{d \epsilon}\Bigr)
        \le \frac{\operatorname{Tr} \mathcal J}{2 \epsilon}.

    First step: the logarithm is concave, so the mean of logarithms is at most the logarithm of the
    mean (Jensen), with equality if all $\lambda_i$ are equal. Second step: log(1 + t) ≤ t; its
    right side is :class:`Laplacian`, the first order.

    If R₀ is ``SHARE`` times R at the start, a factor of R (units of the output, metric) drops out.
    ``fit`` and ``fit_population`` set R₀ so, from the draws of step 0.

    If R̂ varies between draws, training minimizes E log(1 + R̂/R₀), which is below log(1 + E R̂/R₀)
    by about Var R̂/(2 R²); more ``probes`` and ``num_points`` shrink this. :class:`fsmap.LogTrace`
    divides by a running mean of R instead, which needs state.
    """

    px: EvalDistribution
    num_points: int
    nats: Tensor  # []  c·N
    r0: Tensor | None = None  # []  R₀; None: from the start, see started
    estimator: Estimator = Jvp()
    probes: int = 1
    metric: Metric | Tensor | None = None
    every: int = 1

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """As :class:`Laplacian`."""
        return _trace_draws(self, f, params, stream)

    def started(self, f: ModelFn, params: Params, stream: Stream) -> TraceBound:
        """This term with R₀ = ``SHARE`` · R at these parameters, unless R₀ is given."""
        if self.r0 is not None:
            return self
        with torch.no_grad():
            R = _trace(self, f, params, self.draw(f, params, stream))
        if not 0 < R < torch.inf:
            raise InputError(
                f"R is {float(R):g} at the initial parameters: {SHARE:.0%} of it cannot be R₀. "
                "Give r0, or check p_X and the network: its output must depend on its "
                "parameters and be finite."
            )
        return self._replace(r0=SHARE * R)

    def value(self, f: ModelFn, params: Params, draws: Draws) -> Tensor:
        """Nats, ``every`` times as much on the steps that count."""
        if draws.x is None:
            return next(iter(params.values())).new_zeros(())
        if self.r0 is None:
            raise InputError(
                "R₀ is not known yet: fit and fit_population take it from the initial ones. "
                "Elsewhere give l_map(..., r0=...), or call objective.started(f, params, stream)."
            )
        return -self.every * self.nats * torch.log1p(_trace(self, f, params, draws) / self.r0)


def _trace_draws(term: Laplacian | TraceBound, f: ModelFn, params: Params, stream: Stream) -> Draws:
    if stream.step % term.every:
        return Draws()
    x = sample(term.px, term.num_points, params, stream)
    return Draws(x, term.estimator.draw(stream, Site(f, params, x, term.metric), term.probes))


def _trace(term: Laplacian | TraceBound, f: ModelFn, params: Params, draws: Draws) -> Tensor:
    return evaluate(term.estimator, Site(f, params, draws.x, term.metric), draws.psi).value.mean()
