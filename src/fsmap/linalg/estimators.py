r"""Estimators of Tr 𝒥, the Laplacian R(θ) of L-MAP (``eq:mc-laplace``), as objects.

==============  =================================  ============================================
``jvp``         ‖Jψ‖², ψ ~ N(0, I)                 exact in β, safe in bf16; no ReLU kinks
``fd``          ‖f(θ+βψ) − f(θ)‖²/β²               the paper's; full precision inside autocast
``fd_central``  ‖f(θ+βψ/2) − f(θ−βψ/2)‖²/β²        as ``fd``, even in ψ
``vjp``         ‖Jᵀv‖², v random signs             few outputs, models without forward mode
``exact``       Σ_k ‖∇f_k‖²                        K reverse passes; cheap for linear layers
==============  =================================  ============================================

All are means over evaluation points and sums over outputs, in the metric g. A new estimator is a
subclass of :class:`Estimator` under :func:`register`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fsmap.errors import FsmapError, InputError
from fsmap.functional import (
    HALF,
    NoiseReplay,
    State,
    accumulate,
    check_differences,
    check_finite,
    check_params,
    check_points,
    count,
    detached,
    differentiable_attention,
    finite,
    flat,
    is_pointwise,
    num_points,
    number,
    ravel,
    run,
    without_row,
)
from fsmap.linalg.jacobian import Metric, Site, chunks, jvp, linearize, vjp
from fsmap.linalg.probes import FromGenerator, Source, check_number, check_signs
from fsmap.linalg.probes import check as check_psi
from fsmap.types import Estimate, Inputs, ModelFn, Params

PROBE_BYTES = 2**30  # of probes in parameter space that are evaluated together

Probes = Params | Tensor | None
"""Stacked draws: ``{name: [R, ...]}``, cotangents ``[R, Q]``, or None if nothing is random."""


class Pass(NamedTuple):
    """An estimate from one probe, and the unperturbed pass if it made one."""

    value: Tensor  # []; [R] from all probes
    out: Tensor | None
    state: State | None
    squares: Tensor | None = None  # ‖f‖² summed over points, of differences


class Estimator:
    """An estimator of Tr 𝒥; a subclass defines :meth:`at`."""

    name: ClassVar[str]  # as the API and the command line spell it
    parameter_probes: ClassVar[bool] = False  # its probes are ψ in parameter space
    full_precision: ClassVar[bool] = False  # needs full precision, inside torch.autocast too
    forward_mode: ClassVar[bool] = False  # needs forward-mode derivatives
    reverse_mode: ClassVar[bool] = False  # differentiates the unperturbed pass in reverse mode
    adaptive: ClassVar[bool] = False  # its draws depend on the values of the parameters

    def check(self, params: Params) -> None:
        """Raise InputError if the estimator cannot be used with these parameters."""

    def draw(self, source: Source, site: Site, num: int) -> Probes:
        """``num`` probes: ψ in parameter space, or None."""
        return source.psi(site.params, num) if self.parameter_probes else None

    def check_probes(self, probes: object, site: Site) -> None:
        """Raise InputError if these are not probes of this estimator."""
        if self.parameter_probes:
            check_psi(probes, site.params)

    def at(self, site: Site, probe: Any) -> Pass:
        """The estimate from one probe: pure, without a branch on values."""
        raise NotImplementedError

    def combine(self, values: Tensor) -> Estimate:
        """The estimate from all probes: the mean, and its standard error (nan for one probe)."""
        if len(values) < 2:
            return Estimate(values.mean(), torch.full_like(values[0], torch.nan))
        return Estimate(values.mean(), values.detach().std() / math.sqrt(len(values)))


ESTIMATORS: dict[str, Callable[..., Estimator]] = {}
"""Estimators by name, in the order of messages."""

Kind = TypeVar("Kind", bound=type[Estimator])


def register(kind: Kind) -> Kind:
    """Add an estimator to :data:`ESTIMATORS` under its name."""
    ESTIMATORS[kind.name] = kind
    return kind


@register
@dataclass(frozen=True)
class Jvp(Estimator):
    """‖Jψ‖² by one pass in forward mode."""

    name: ClassVar[str] = "jvp"
    parameter_probes: ClassVar[bool] = True
    forward_mode: ClassVar[bool] = True

    def at(self, site: Site, probe: Any) -> Pass:
        """The pass also gives f(θ)."""
        out, tangent, state = jvp(site.f, site.params, site.x, probe)
        return Pass(site.resolve(out).quadratic(accumulate(tangent)), out, state)


@register
@dataclass(frozen=True)
class Forward(Estimator):
    """The paper's ‖f(θ+βψ) − f(θ)‖²/β², in full precision."""

    beta: float = 1e-3
    name: ClassVar[str] = "fd"
    parameter_probes: ClassVar[bool] = True
    full_precision: ClassVar[bool] = True
    ends: ClassVar[tuple[float, float]] = (1.0, 0.0)  # in βψ

    def check(self, params: Params) -> None:
        """Raise if β is out of range, or lost in the rounding of half-precision parameters."""
        if not 0 < self.beta < math.inf:
            raise InputError(f"beta must be > 0 and finite, got {self.beta:g}")
        half = next((p.dtype for p in params.values() if p.dtype in HALF), None)
        if half is not None:
            raise InputError(
                f"a difference of size beta={self.beta:g} is lost in the rounding of "
                f"{str(half).removeprefix('torch.')} parameters. Keep them in float32 and use "
                "torch.autocast, or use the estimator 'jvp' or 'vjp'."
            )

    def at(self, site: Site, probe: Any) -> Pass:
        """The unperturbed pass comes first; all passes share their random layers."""
        f, params, x, _ = site
        check_differences(f)
        with torch.autocast(next(iter(params.values())).device.type, enabled=False):
            replay = NoiseReplay(f, params)
            out, state = run(f, params, x)
            padding = getattr(f, "padding", {})
            psi = {n: without_row(t, padding.get(n)) for n, t in probe.items()}

            def moved(scale: float) -> Tensor:
                if scale == 0:
                    return out
                replay()
                return f({name: p + scale * psi[name] for name, p in params.items()}, x)

            high, low = (end * self.beta for end in self.ends)
            value = site.resolve(out).quadratic(flat(moved(high) - moved(low), x) / (high - low))
            return Pass(value, out, state, accumulate(out.detach()).square().sum())


@register
@dataclass(frozen=True)
class Central(Forward):
    """‖f(θ+βψ/2) − f(θ−βψ/2)‖²/β², even in ψ."""

    name: ClassVar[str] = "fd_central"
    ends: ClassVar[tuple[float, float]] = (0.5, -0.5)


@register
@dataclass(frozen=True)
class Vjp(Estimator):
    """‖Jᵀv‖² with random signs v in output space."""

    name: ClassVar[str] = "vjp"
    reverse_mode: ClassVar[bool] = True

    def draw(self, source: Source, site: Site, num: int) -> Probes:
        """``[num, Q]``."""
        out = site.output()
        return source.signs(num, site.resolve(out).size, out)

    def check_probes(self, probes: object, site: Site) -> None:
        """Cotangents of the whitened outputs."""
        check_signs(probes, site.resolve(site.output()).size)

    def at(self, site: Site, probe: Any) -> Pass:
        """The pass also gives f(θ)."""
        out, transpose, state = vjp(site.f, site.params, site.x)
        grads = transpose(site.resolve(out).adjoint(probe))
        terms = [accumulate(g).square().sum() for g in grads.values()]
        return Pass(torch.stack(terms).sum(), out, state)


@register
@dataclass(frozen=True)
class Exact(Estimator):
    """Σ_k ‖∇f_k‖² over all outputs."""

    name: ClassVar[str] = "exact"
    reverse_mode: ClassVar[bool] = True

    def at(self, site: Site, probe: Any) -> Pass:
        """Without the output of an unperturbed pass."""
        return Pass(exact(site), None, None)


def draws_normal(estimator: Estimator) -> bool:
    """Whether its probes are the ψ ~ N(0, I) of the source, which can be drawn as one vector."""
    return estimator.parameter_probes and getattr(type(estimator), "draw", None) is Estimator.draw


def by_name(name: str | Estimator, **options: Any) -> Estimator:
    """An estimator from its name, with those ``options`` that it has; an object as it is."""
    if not isinstance(name, str) and hasattr(name, "draw"):
        return name
    if not isinstance(name, str) or name not in ESTIMATORS:
        raise InputError(f"unknown trace estimator {name!r}; known: {', '.join(ESTIMATORS)}")
    kind = ESTIMATORS[name]
    known = getattr(kind, "__dataclass_fields__", {})
    return kind(**{key: value for key, value in options.items() if key in known})


def exact(site: Site) -> Tensor:
    """Σ ‖row‖² over rows of the whitened Jacobian, some points at a time if g allows."""
    S = num_points(site.x)
    if site.metric is None:
        parts = (linearize(*site[:2], part) for part in chunks(*site[:3]))
        return torch.stack([part.squares().sum() for part in parts]).sum() / S
    factors = linearize(*site[:3])
    whiten = site.resolve(factors.out)
    if not whiten.local:
        return whiten.gram(factors.gram(), S).diagonal().sum()
    return factors.mixed(lambda u: whiten.rows(u).reshape(S, -1, *u.shape[2:])).squares().sum()


def trace(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    method: str | Estimator,
    probes: int | Params | Tensor = 1,
    beta: float = 1e-3,
    generator: torch.Generator | None = None,
    metric: Metric | Tensor | None = None,
) -> Estimate:
    r"""Tr 𝒥 with 𝒥 = E[JᵀgJ] over the points ``x``, differentiable in ``params``.

    Args:
        f: Model function.
        params: Parameters.
        x: Evaluation points, [S, ...].
        method: A name of the table above, or an :class:`~fsmap.linalg.estimators.Estimator`.
        probes: How many, or the probes themselves: ``{name: [R, ...]}``, for ``vjp`` ``[R, S·K]``.
        beta: Step of the differences (``fd``, ``fd_central``).
        generator: Where probes are drawn from; None is torch's own generator.
        metric: g; see :mod:`fsmap.metric`.

    Returns:
        Estimate: mean and standard error over probes; nan for one probe, zero for ``exact``.

    Example:
        >>> import torch, fsmap
        >>> f, params = fsmap.functional(torch.nn.Linear(3, 1))
        >>> x = torch.eye(3)
        >>> round(fsmap.trace(f, params, x, method="exact").value.item(), 6)  # mean of ‖x‖² + 1
        2.0
    """
    estimator = by_name(method, beta=beta)
    site = Site(f, params, x, metric)
    check_points(x)
    check_params(params)
    estimator.check(params)
    if not isinstance(generator, torch.Generator | None):
        message = f"generator must be a torch.Generator, got {generator!r}"  # type: ignore[unreachable]
        raise InputError(message)
    drawn: Any = probes
    if isinstance(probes, int | float):
        drawn = estimator.draw(FromGenerator(generator), site, check_number(probes))
    else:
        estimator.check_probes(probes, site)
    made = evaluate(estimator, site, drawn, with_output=False)
    if drawn is None:
        found = Estimate(made.value[0], torch.zeros_like(made.value[0]))
    else:
        found = estimator.combine(made.value)
    check_trace(found.value, site, made.squares, getattr(estimator, "beta", None))
    return found


def evaluate(estimator: Estimator, site: Site, probes: Probes, *, with_output: bool = True) -> Pass:
    """The estimate from each probe, ``[R]``; all at once if the output of a pass is not needed."""

    def one(probe: Any) -> Tensor:
        found = estimator.at(site, probe)
        value, squares = found.value, found.squares
        return value if squares is None else torch.stack([value, squares.to(value.dtype)])

    def each(some: Params | Tensor) -> tuple[Tensor, Tensor | None]:
        size = max(1, PROBE_BYTES // (8 * count(site.params)))
        made = over_probes(site.f, one, some, chunk=size)  # [R] or [R, 2]
        return (made, None) if made.ndim == 1 else (made[:, 0], made[0, 1].detach())

    if probes is None:
        found = estimator.at(site, None)
        return found._replace(value=found.value[None])
    several = len(tree_leaves(probes)[0]) > 1
    if several and not with_output:
        values, squares = each(probes)
        return Pass(values, None, None, squares)
    found = estimator.at(site, tree_map(lambda t: t[0], probes))
    value = found.value[None]
    if several:
        value = torch.cat([value, each(tree_map(lambda t: t[1:], probes))[0]])
    return found._replace(value=value)


def over_probes(
    f: ModelFn, one: Callable[..., Tensor], probes: Params | Tensor, chunk: int | None = None
) -> Tensor:
    """``one(probe)`` of all probes, stacked: by vmap, ``chunk`` at a time, or else in turn."""
    R = len(tree_leaves(probes)[0])
    if R > 1 and is_pointwise(f):
        chunk = None if chunk is None or chunk >= R else chunk
        try:
            with differentiable_attention():  # the fused kernels cannot be vmapped
                values: Tensor = vmap(one, chunk_size=chunk)(probes)
            return values
        except (RuntimeError, FsmapError):
            pass  # if vmap is not the reason it fails again below
    return torch.stack([one(tree_map(lambda t, r=r: t[r], probes)) for r in range(R)])


ROUNDING_SHARE = 0.1  # of a step, and of a trace, that may be rounding


def check_trace(value: Tensor, site: Site, squares: Tensor | None, beta: float | None) -> None:
    """Raise InputError if an estimate is not finite, or a difference is lost; not inside vmap."""
    found, params = number(value), site.params
    if found is None or (math.isfinite(found) and beta is None):
        return
    if not math.isfinite(found) or beta is None or squares is None:
        check_finite(params)
        finite(site.output())
        raise InputError(f"the estimate of Tr J is {found}: it overflows {value.dtype}")
    # a step βψ is rounded to u·|θ|, u the machine epsilon, a difference to u·|f|
    unit = max(torch.finfo(p.dtype).eps for p in params.values())
    size = ravel(detached(params)).double().square().mean().sqrt()
    noise = unit**2 * float(squares) / num_points(site.x) / beta**2
    if unit * float(size) > ROUNDING_SHARE * beta or noise > ROUNDING_SHARE * abs(found):
        raise InputError(
            f"a step of beta={beta:g} is lost in the rounding of the parameters or outputs. Raise "
            "beta, compute in float64 (module.double()), or use 'jvp', which takes no differences."
        )
