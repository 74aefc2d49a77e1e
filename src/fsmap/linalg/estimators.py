r"""Estimators of Tr 𝒥, the Laplacian R(θ) of L-MAP (``eq:mc-laplace``), as objects.

==============  =================================  ============================================
``jvp``         ‖Jψ‖², ψ ~ N(0, I)                 exact in β, safe in bf16; no ReLU kinks
``fd``          ‖f(θ+βψ) − f(θ)‖²/β²               the paper's; full precision inside autocast
``fd_central``  ‖f(θ+βψ/2) − f(θ−βψ/2)‖²/β²        as ``fd``, even in ψ
``vjp``         ‖Jᵀv‖², v random signs             few outputs, models without forward mode
``exact``       Σ_k ‖∇f_k‖²                        K reverse passes; cheap for linear layers
==============  =================================  ============================================

All are means over evaluation points and sums over outputs, in the metric g. A new estimator is a
class with the attributes and methods of :class:`Estimator` and one line in :data:`ESTIMATORS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import NoiseReplay, State
from fsmap.linalg import points
from fsmap.linalg.jacobian import add, jvp, vjp
from fsmap.linalg.linearize import CHUNK_BYTES, linearize, look
from fsmap.linalg.metric import Metric, Whitening, resolve
from fsmap.linalg.passes import flat, is_pointwise, outputs, run
from fsmap.linalg.probes import Source, check_signs
from fsmap.linalg.probes import check as check_psi
from fsmap.linalg.values import HALF, accumulate, wide
from fsmap.types import Inputs, ModelFn, Params

Probes = Params | Tensor | None
"""Stacked draws: ``{name: [R, ...]}``, cotangents ``[R, Q]``, or None if nothing is random."""


class Pass(NamedTuple):
    """An estimate from one probe, and the unperturbed pass if it made one."""

    value: Tensor  # []
    out: Tensor | None
    state: State | None


class Estimator(Protocol):
    """What an estimator of Tr 𝒥 has."""

    @property
    def name(self) -> str:
        """As the API and the command line spell it."""

    @property
    def parameter_probes(self) -> bool:
        """Whether its probes are ψ in parameter space."""

    @property
    def full_precision(self) -> bool:
        """Whether it needs full precision, inside ``torch.autocast`` too."""

    @property
    def forward_mode(self) -> bool:
        """Whether it needs forward-mode derivatives."""

    @property
    def reverse_mode(self) -> bool:
        """Whether it differentiates the unperturbed pass in reverse mode."""

    @property
    def adaptive(self) -> bool:
        """Whether its draws depend on the values of the parameters."""

    def check(self, params: Params) -> None:
        """Raise InputError if it cannot be used with these parameters."""

    def draw(
        self,
        source: Source,
        f: ModelFn,
        params: Params,
        x: Inputs,
        num: int,
        metric: Metric | Tensor | None,
    ) -> Probes:
        """``num`` probes."""

    def check_probes(
        self,
        probes: object,
        f: ModelFn,
        params: Params,
        x: Inputs,
        metric: Metric | Tensor | None,
    ) -> None:
        """Raise InputError if these are not probes of this estimator."""

    def at(
        self, f: ModelFn, params: Params, x: Inputs, probe: Any, metric: Metric | Tensor | None
    ) -> Pass:
        """The estimate from one probe."""


class _Plain:
    """Defaults."""

    parameter_probes: ClassVar[bool] = False
    full_precision: ClassVar[bool] = False
    forward_mode: ClassVar[bool] = False
    reverse_mode: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False

    def check(self, params: Params) -> None:
        """Nothing to check."""


class _WithPsi(_Plain):
    """Probes in parameter space."""

    parameter_probes: ClassVar[bool] = True

    def draw(
        self,
        source: Source,
        f: ModelFn,
        params: Params,
        x: Inputs,
        num: int,
        metric: Metric | Tensor | None,
    ) -> Probes:
        """``{name: [num, ...]}``."""
        return source.psi(params, num)

    def check_probes(
        self,
        probes: object,
        f: ModelFn,
        params: Params,
        x: Inputs,
        metric: Metric | Tensor | None,
    ) -> None:
        """Stacked parameters."""
        check_psi(probes, params)


@dataclass(frozen=True)
class Jvp(_WithPsi):
    """‖Jψ‖² by one pass in forward mode."""

    name: ClassVar[str] = "jvp"
    forward_mode: ClassVar[bool] = True

    def at(
        self, f: ModelFn, params: Params, x: Inputs, probe: Any, metric: Metric | Tensor | None
    ) -> Pass:
        """The pass also gives f(θ)."""
        out, tangent, state = jvp(f, params, x, probe)
        return Pass(resolve(metric, x, out).quadratic(accumulate(tangent)), out, state)


@dataclass(frozen=True)
class _Differences(_WithPsi):
    """Differences of size β, in full precision."""

    beta: float = 1e-3
    full_precision: ClassVar[bool] = True

    def check(self, params: Params) -> None:
        """Raise if β is out of range, or lost in the rounding of half-precision parameters."""
        if not 0 < self.beta < math.inf:
            message = f"beta must be > 0 and finite, got {self.beta:g}"
            raise InputError(message)
        half = next((p.dtype for p in params.values() if p.dtype in HALF), None)
        if half is not None:
            message = (
                f"a difference of size beta={self.beta:g} is lost in the rounding of "
                f"{str(half).removeprefix('torch.')} parameters. Keep them in float32 and use "
                "torch.autocast, or use the estimator 'jvp' or 'vjp'."
            )
            raise InputError(message)

    def _ends(self) -> tuple[tuple[float, float], ...]:
        """Pairs of multiples of ψ between which f is compared."""
        raise NotImplementedError

    def at(
        self, f: ModelFn, params: Params, x: Inputs, probe: Any, metric: Metric | Tensor | None
    ) -> Pass:
        """The unperturbed pass comes first; all passes share their random layers."""
        device = next(iter(params.values())).device
        with torch.autocast(device.type, enabled=False):
            replay = NoiseReplay(f, params)
            out, state = run(f, params, x)

            def moved(scale: float) -> Tensor:
                if scale == 0:
                    return out
                replay()
                return f(add(params, scale, probe), x)

            whiten = resolve(metric, x, out)
            values = []
            for high, low in self._ends():
                step = high - low
                values.append(whiten.quadratic(flat(moved(high) - moved(low), x) / step))
            value = values[0] if len(values) == 1 else torch.stack(values).mean()
            return Pass(value, out, state)


@dataclass(frozen=True)
class Forward(_Differences):
    """The paper's ‖f(θ+βψ) − f(θ)‖²/β²; ``antithetic`` uses each ψ with −ψ."""

    name: ClassVar[str] = "fd"
    antithetic: bool = False

    def _ends(self) -> tuple[tuple[float, float], ...]:
        ends = ((self.beta, 0.0), (0.0, -self.beta))
        return ends if self.antithetic else ends[:1]


@dataclass(frozen=True)
class Central(_Differences):
    """‖f(θ+βψ/2) − f(θ−βψ/2)‖²/β², even in ψ."""

    name: ClassVar[str] = "fd_central"

    def _ends(self) -> tuple[tuple[float, float], ...]:
        return ((self.beta / 2, -self.beta / 2),)


@dataclass(frozen=True)
class Vjp(_Plain):
    """‖Jᵀv‖² with random signs v in output space."""

    name: ClassVar[str] = "vjp"
    reverse_mode: ClassVar[bool] = True

    def draw(
        self,
        source: Source,
        f: ModelFn,
        params: Params,
        x: Inputs,
        num: int,
        metric: Metric | Tensor | None,
    ) -> Probes:
        """``[num, Q]``."""
        out, size = self._output(f, params, x, metric)
        return source.signs(num, size, out)

    def check_probes(
        self,
        probes: object,
        f: ModelFn,
        params: Params,
        x: Inputs,
        metric: Metric | Tensor | None,
    ) -> None:
        """Cotangents of the whitened outputs."""
        check_signs(probes, self._output(f, params, x, metric)[1])

    def at(
        self, f: ModelFn, params: Params, x: Inputs, probe: Any, metric: Metric | Tensor | None
    ) -> Pass:
        """The pass also gives f(θ)."""
        out, transpose, state = vjp(f, params, x)
        return Pass(_vjp_value(transpose, resolve(metric, x, out), probe), out, state)

    def _output(
        self, f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None
    ) -> tuple[Tensor, int]:
        replay = NoiseReplay(f, params)
        with torch.no_grad():
            out = outputs(f, params, x)
            size = resolve(metric, x, out).size
        replay()
        return out, size


@dataclass(frozen=True)
class Exact(_Plain):
    """Σ_k ‖∇f_k‖² over all outputs; ``chunk`` points at a time."""

    name: ClassVar[str] = "exact"
    reverse_mode: ClassVar[bool] = True
    chunk: int | None = None

    def draw(
        self,
        source: Source,
        f: ModelFn,
        params: Params,
        x: Inputs,
        num: int,
        metric: Metric | Tensor | None,
    ) -> Probes:
        """Nothing."""
        return None

    def check_probes(
        self,
        probes: object,
        f: ModelFn,
        params: Params,
        x: Inputs,
        metric: Metric | Tensor | None,
    ) -> None:
        """There are none."""

    def at(
        self, f: ModelFn, params: Params, x: Inputs, probe: Any, metric: Metric | Tensor | None
    ) -> Pass:
        """No unperturbed pass is left over."""
        return Pass(exact(f, params, x, metric=metric, chunk=self.chunk), None, None)


KINDS: tuple[Any, ...] = (Forward, Central, Jvp, Vjp, Exact)
ESTIMATORS: dict[str, Callable[..., Estimator]] = {kind.name: kind for kind in KINDS}
"""By name, in the order in which messages list them."""


def draws_normal(estimator: Estimator) -> bool:
    """Whether its probes are the ψ ~ N(0, I) of the source, which can be drawn as one vector."""
    return getattr(type(estimator), "draw", None) is _WithPsi.draw


def by_name(name: str | Estimator, **options: Any) -> Estimator:
    """An estimator from its name; an object is returned as it is.

    Args:
        name: One of :data:`ESTIMATORS`, or an estimator of your own.
        options: ``beta`` and others; those that the estimator does not have are left out.

    Returns:
        The estimator.

    Raises:
        InputError: If the name is unknown.
    """
    if not isinstance(name, str):
        return name
    if name not in ESTIMATORS:
        message = f"unknown trace estimator {name!r}; known: {', '.join(ESTIMATORS)}"
        raise InputError(message)
    kind = ESTIMATORS[name]
    known = getattr(kind, "__dataclass_fields__", {})
    return kind(**{key: value for key, value in options.items() if key in known})


def exact(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    metric: Metric | Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Σ over rows of the whitened Jacobian of ‖row‖², a chunk of points at a time if g allows."""
    S = points.count(x)
    if metric is not None or not is_pointwise(f):
        factors = linearize(f, params, x, chunk=chunk)
        whiten = resolve(metric, x, factors.out)
        if not whiten.local:
            squares = whiten.gram(factors.gram(), S).diagonal()  # [Q]
        else:
            mixed = factors.mixed(lambda u: whiten.rows(u).reshape(S, -1, *u.shape[2:]))
            squares = mixed.to(wide(factors.out.dtype)).squares().flatten()  # [Q]
        return squares.sum() if whiten.signs is None else (whiten.signs * squares).sum()
    if chunk is None:
        width = look(f, params, x).numbers_per_point(params)
        chunk = max(1, CHUNK_BYTES // (8 * width))
    parts = []
    for i in range(0, S, chunk):
        factors = linearize(f, params, points.take(x, slice(i, i + chunk)))
        parts.append(factors.to(wide(factors.out.dtype)).squares().sum())
    return torch.stack(parts).sum() / S


def _vjp_value(transpose: Callable[[Tensor], Params], whiten: Whitening, v: Tensor) -> Tensor:
    grads = transpose(whiten.adjoint(v))
    if whiten.signs is None:
        return torch.stack([accumulate(g).square().sum() for g in grads.values()]).sum()
    signed = transpose(whiten.adjoint(whiten.signs * v))
    return torch.stack([(accumulate(g) * signed[n]).sum() for n, g in grads.items()]).sum()
