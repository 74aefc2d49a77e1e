r"""Tr 𝒥, the Laplacian regulariser R(θ) of L-MAP (``eq:mc-laplace``), by five estimators with one signature.

=============  =============================================  ===================================================
``fd``         ‖f(θ+βψ) − f(θ)‖²/β², ψ ~ N(0, I)              the paper's; full precision even inside autocast
``fd_central``  ‖f(θ+βψ/2) − f(θ−βψ/2)‖²/β²                    as ``fd``, even in ψ
``jvp``        ‖Jψ‖²                                          exact in β, safe in bf16; no ReLU kink terms
``vjp``        ‖Jᵀv‖², v a random output cotangent            few outputs, models without forward mode
``exact``      Σ_k ‖∇f_k‖²                                     small models, tests
=============  =============================================  ===================================================

All are means over evaluation points and sums over outputs, in the metric g.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fsmap.errors import InputError
from fsmap.functional import Functional, NoiseReplay, State, differentiable_attention
from fsmap.linalg import points
from fsmap.linalg import probes as draw
from fsmap.linalg.jacobian import add, jvp, vjp
from fsmap.linalg.linearize import linearize, look
from fsmap.linalg.metric import Metric, Whitening, as_metric
from fsmap.linalg.passes import flat, is_pointwise, outputs, run
from fsmap.types import Estimate, Inputs, ModelFn, Params

METHODS = ("fd", "fd_central", "jvp", "vjp", "exact")
PARAMETER_PROBES = ("fd", "fd_central", "jvp")  # the ones whose probe is a ψ
HALF = (torch.bfloat16, torch.float16)
EXACT_CHUNK_BYTES = 256 * 2**20  # Jacobian rows held at a time by "exact"


class Pass(NamedTuple):
    """One probe: the estimate, and the unperturbed pass it shares with the loss (None where there is none)."""

    value: Tensor  # []
    out: Tensor | None
    state: State | None


def trace(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    method: str,
    probes: int | Params | Tensor = 1,
    beta: float = 1e-3,
    generator: torch.Generator | None = None,
    metric: Metric | Tensor | None = None,
    antithetic: bool = False,
    last_layer: str | None = None,
    chunk: int | None = None,
) -> Estimate:
    r"""Tr 𝒥 with 𝒥 = E[JᵀgJ] over the points ``x``, differentiable in ``params``.

    Args:
        f: Model function.
        params: Parameters.
        x: Evaluation points, [S, ...].
        method: One of fd, fd_central, jvp, vjp, exact; see the table at the top of this module.
        probes: How many, or the probes themselves: ``{name: [R, ...]}``, for ``vjp`` ``[R, S·K]``.
        beta: Step of the differences (``fd``, ``fd_central``).
        generator: Where probes are drawn from; None is torch's own generator.
        metric: g; see :mod:`fsmap.metric`.
        antithetic: Use each ψ with −ψ (``fd`` only: the others are even in ψ).
        last_layer: ``"exact"`` takes the last linear layer's block in closed form, K·(‖h‖² + 1); the probes then
            leave that layer alone. Needs ``functional(module, last_layer=NAME)``.
        chunk: Points (``exact``) or probes (others) at a time.

    Returns:
        Estimate: mean and standard error over probes; nan for one probe, zero for ``exact``.

    Example:
        >>> import torch, fsmap
        >>> f, params = fsmap.functional(torch.nn.Linear(3, 1))
        >>> x = torch.eye(3)
        >>> round(fsmap.trace(f, params, x, method="exact").value.item(), 6)  # mean of ‖x‖² + 1
        2.0
    """
    check_method(method)
    points.check(x)
    _check_options(f, method, beta, antithetic, last_layer, metric)
    drawn = None if method == "exact" else _draw(f, params, x, method, probes, generator, metric)
    return evaluate(
        f,
        params,
        x,
        drawn,
        method=method,
        beta=beta,
        metric=metric,
        antithetic=antithetic,
        last_layer=last_layer,
        chunk=chunk,
    )


def evaluate(
    f: ModelFn,
    params: Params,
    x: Inputs,
    drawn: Params | Tensor | None,
    *,
    method: str,
    beta: float = 1e-3,
    metric: Metric | Tensor | None = None,
    antithetic: bool = False,
    last_layer: str | None = None,
    chunk: int | None = None,
) -> Estimate:
    """:func:`trace` with the probes given and without the checks that look at values, so that it can be vmapped."""
    if drawn is None:
        value = exact(f, params, x, metric=metric, chunk=chunk)
        return Estimate(value, torch.zeros_like(value))
    if antithetic:
        assert isinstance(drawn, dict)
        drawn = draw.antithetic(drawn)
    probes, block = _last_layer_block(f, params, x, drawn, last_layer)

    def one(probe: Params | Tensor) -> Tensor:
        return estimate(f, params, x, probe, method=method, beta=beta, metric=metric).value

    values = _over_probes(one, probes, batched=is_pointwise(f), chunk=chunk) + block  # [R]
    if antithetic:
        values = values.reshape(2, -1).mean(0)
    return Estimate(values.mean(), _standard_error(values))


def estimate(
    f: ModelFn,
    params: Params,
    x: Inputs,
    probe: Params | Tensor,
    *,
    method: str,
    beta: float = 1e-3,
    metric: Metric | Tensor | None = None,
) -> Pass:
    """One probe of one estimator, together with the unperturbed pass that it made on the way."""
    if method == "exact":
        return Pass(exact(f, params, x, metric=metric), None, None)
    if method == "vjp":
        out, transpose, state = vjp(f, params, x)
        whiten = resolve(metric, x, out)
        return Pass(_vjp_value(transpose, whiten, probe), out, state)  # type: ignore[arg-type]
    assert isinstance(probe, dict)
    if method == "jvp":
        out, tangent, state = jvp(f, params, x, probe)
        return Pass(resolve(metric, x, out).quadratic(_accumulate(tangent)), out, state)
    with _full_precision(params):
        replay = NoiseReplay(f, params)
        out, state = run(f, params, x)
        base, high = (out, beta) if method == "fd" else (None, beta / 2)
        if base is None:
            replay()
            base = f(add(params, -beta / 2, probe), x)
        replay()
        difference = flat(f(add(params, high, probe), x) - base, x) / beta
        return Pass(resolve(metric, x, out).quadratic(difference), out, state)


def exact(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    metric: Metric | Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Σ over rows of the whitened Jacobian of ‖row‖²; never holds more of J than a chunk of points when g allows."""
    S = points.count(x)
    if metric is not None or not is_pointwise(f):
        factors = linearize(f, params, x, chunk=chunk)
        whiten = resolve(metric, x, factors.out)
        if not whiten.local:
            squares = whiten.gram(factors.gram(), S).diagonal()  # [Q]
        else:
            mixed = factors.mixed(lambda u: whiten.rows(u).reshape(S, -1, *u.shape[2:]))
            squares = mixed.to(_wide(factors.out.dtype)).squares().flatten()  # [Q]
        return squares.sum() if whiten.signs is None else (whiten.signs * squares).sum()
    if chunk is None:
        width = look(f, params, x).numbers_per_point(params)
        chunk = max(1, EXACT_CHUNK_BYTES // (8 * width))
    parts = []
    for i in range(0, S, chunk):
        factors = linearize(f, params, points.take(x, slice(i, i + chunk)))
        parts.append(factors.to(_wide(factors.out.dtype)).squares().sum())
    return torch.stack(parts).sum() / S


def resolve(metric: Metric | Tensor | None, x: Inputs, out: Tensor) -> Whitening:
    """The metric at the points."""
    rows = flat(out, x)
    return as_metric(metric, *rows.shape).at(x, _accumulate(rows))


def check_method(method: str) -> None:
    """Refuse an unknown estimator.

    Raises:
        InputError: With the list of the known ones.
    """
    if method not in METHODS:
        message = f"unknown trace estimator {method!r}; known: {', '.join(METHODS)}"
        raise InputError(message)


def _check_options(
    f: ModelFn,
    method: str,
    beta: float,
    antithetic: bool,
    last_layer: str | None,
    metric: Metric | Tensor | None,
) -> None:
    message = None
    if method.startswith("fd") and not beta > 0:
        message = f"beta must be > 0, got {beta:g}"
    elif antithetic and method != "fd":
        message = f"antithetic probes change nothing for {method!r}, which is even in ψ; use them with 'fd'"
    elif last_layer not in (None, "exact"):
        message = f"last_layer must be None or 'exact', got {last_layer!r}"
    elif last_layer and method not in PARAMETER_PROBES:
        message = f"last_layer='exact' goes with {', '.join(PARAMETER_PROBES)}, not with {method!r}"
    elif last_layer and metric is not None:
        message = "last_layer='exact' is for the Euclidean metric; leave metric out"
    elif last_layer and not (isinstance(f, Functional) and f.last_layer):
        message = "last_layer='exact' needs f from functional(module, last_layer=NAME)"
    if message:
        raise InputError(message)


def _draw(
    f: ModelFn,
    params: Params,
    x: Inputs,
    method: str,
    given: int | Params | Tensor,
    generator: torch.Generator | None,
    metric: Metric | Tensor | None,
) -> Params | Tensor:
    if not isinstance(given, int):
        return given
    if given < 1:
        message = f"probes must be at least 1, got {given}"
        raise InputError(message)
    if method in PARAMETER_PROBES:
        return draw.normal(params, given, generator)
    with torch.no_grad():
        out = outputs(f, params, x)
        size = resolve(metric, x, out).size
    return draw.rademacher(given, size, generator, out)


def _vjp_value(transpose: object, whiten: Whitening, v: Tensor) -> Tensor:
    grads = transpose(whiten.adjoint(v))  # type: ignore[operator]
    if whiten.signs is None:
        return torch.stack([_accumulate(g).square().sum() for g in grads.values()]).sum()
    signed = transpose(whiten.adjoint(whiten.signs * v))  # type: ignore[operator]
    return torch.stack([(_accumulate(g) * signed[n]).sum() for n, g in grads.items()]).sum()


def _last_layer_block(
    f: ModelFn, params: Params, x: Inputs, drawn: Params | Tensor, last_layer: str | None
) -> tuple[Params | Tensor, Tensor | float]:
    """Probes with the last layer's entries at zero, and that layer's own trace in closed form."""
    if last_layer is None:
        return drawn, 0.0
    assert isinstance(f, Functional)
    assert isinstance(drawn, dict)
    names = f.last_layer_names()
    masked = {n: torch.zeros_like(p) if n in names else p for n, p in drawn.items()}
    out, state = f.with_state(params, x)
    return masked, last_layer_trace(f, out, state.features[0])


def last_layer_trace(f: Functional, out: Tensor, features: Tensor) -> Tensor:
    """Trace of the last linear layer's block: K·‖h‖² for the weight, K for the bias, per application, meaned over points."""
    names = f.last_layer_names()
    S, K = out.shape[0], out.shape[-1]
    value = out.new_zeros((), dtype=_accumulate(out[:0]).dtype)
    if any(n.endswith("weight") for n in names):
        value = value + K * _accumulate(features).square().sum() / S
    if any(n.endswith("bias") for n in names):
        value = value + out[0].numel()
    return value


def _over_probes(
    one: object, drawn: Params | Tensor, *, batched: bool, chunk: int | None
) -> Tensor:
    """Values of all probes: vectorised, or one after another where the pass has state of its own."""
    num = len(next(iter(drawn.values()))) if isinstance(drawn, dict) else len(drawn)
    pick = (
        (lambda r: {n: p[r] for n, p in drawn.items()})
        if isinstance(drawn, dict)
        else (lambda r: drawn[r])
    )
    if batched and num > 1:
        with differentiable_attention():  # the fused kernels cannot be vmapped
            return vmap(one, chunk_size=chunk)(drawn)  # type: ignore
    return torch.stack([one(pick(r)) for r in range(num)])  # type: ignore[operator]


def _standard_error(values: Tensor) -> Tensor:
    if len(values) < 2:
        return torch.full_like(values[0], torch.nan)
    return values.detach().std() / len(values) ** 0.5


def _accumulate(t: Tensor) -> Tensor:
    """Sums of squares in at least single precision."""
    return t.to(_wide(t.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def _full_precision(params: Params) -> torch.autocast:
    """Differences of size β drown in half precision: leave autocast."""
    return torch.autocast(next(iter(params.values())).device.type, enabled=False)
