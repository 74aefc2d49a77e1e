"""A network for a table: from standardized rows and a few options to a trained module.

The loss per row is the squared error of standardized targets (summed over outputs) or the
cross-entropy, plus w/2 ‖θ‖² + λR; see :mod:`fsmap.train.search`.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.errors import ConstantTargetWarning, EdgeOfGridWarning, InputError
from fsmap.functional import functional
from fsmap.linalg import points
from fsmap.linalg.estimators import trace
from fsmap.models.mlp import MLP
from fsmap.objective.geometry import SHARE
from fsmap.objective.likelihood import Categorical, Gaussian, Likelihood
from fsmap.objective.weighted import Weighted, packed, unpacked
from fsmap.px import Empirical, EvalDistribution, Normal, as_px
from fsmap.train.plan import plan
from fsmap.train.search import WEIGHT_DECAYS, Trained, at_edges, strengths, train
from fsmap.types import Batch

AUTO = "auto"
SQUARED_ERROR = Gaussian(math.sqrt(0.5))
"""The noise at which nats are squared errors, up to a constant: (y − f)²/2σ² with σ² = 1/2."""

Factory = Callable[[int, int], nn.Module]


def learn(
    x: Tensor,
    y: Tensor,
    held_out: Tensor | None,
    /,
    *,
    weight: Tensor | None = None,
    method: str = "l-map",
    hidden: Sequence[int] | str = AUTO,
    activation: str = "relu",
    module: Factory | None = None,
    weight_decay: float | str = AUTO,
    reg_strength: float | str = AUTO,
    reg_nats: float | None = None,
    px: Any = "normal",
    num_points: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    patience: int | None = 15,
    device: str = "cpu",
    seed: int = 0,
    progress: bool = False,
) -> tuple[nn.Module, Trained]:
    """Train a network; strengths that are ``"auto"`` are chosen by one population.

    Args:
        x: Standardized rows, ``[N, D]``.
        y: Standardized targets ``[N, K]`` (floating point), or labels ``[N]`` (integers).
        held_out: Which rows only decide when to stop and what to choose, ``[N]`` booleans. None:
            training runs to the end, and what is ``"auto"`` takes a middle value.
        weight: How much each row counts, ``[N]``.
        method: ``"l-map"``, ``"ps-map"`` or ``"fs-map"``.
        hidden: Units of the hidden layers; ``"auto"`` goes by N.
        activation: Of the hidden layers, see :class:`fsmap.models.mlp.MLP`.
        module: A function of the numbers of inputs and outputs that makes another network.
        weight_decay: w, or ``"auto"``.
        reg_strength: λ, or ``"auto"``. FS-MAP takes the jitter ε = 1/(2λN).
        reg_nats: c of L-MAP instead of λ, see :func:`fsmap.l_map`. The λ of the result is then what
            c amounts to at the end, c/(R + R₀).
        px: ``"normal"``: N(0, I), that is, standardized inputs as if independent; ``"train"``: the
            training rows; or a distribution of :mod:`fsmap.px` over standardized rows.
        num_points: S.
        steps: Of Adam.
        batch_size: B.
        learning_rate: Adam's at the start; it falls to zero along a cosine.
        patience: Validations (there are 50) without a new best before a run ends.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``.
        seed: Seed of the first parameters, of batches and of draws.
        progress: Show a progress bar.

    Returns:
        The trained network (float64, in ``eval()``, on the CPU), and how it came about.
    """
    _check(weight_decay, reg_strength, reg_nats, method)
    labels = not y.is_floating_point()
    if not labels and bool((y == y[:1]).all()):
        message = "the target is the same in every row: the model will be that constant"
        warnings.warn(message, ConstantTargetWarning, stacklevel=4)
    likelihood: Likelihood = Categorical() if labels else SQUARED_ERROR
    outputs = int(y.max()) + 1 if labels else y.shape[1]
    constant = math.log(max(outputs, 2)) if labels else float(outputs)  # loss of a constant
    held = torch.zeros(len(y), dtype=torch.bool) if held_out is None else held_out.bool()
    if weight is not None:
        likelihood = Weighted(likelihood, labels=labels)
        y = packed(y, weight / weight[~held].mean())
    where = _device(device)
    x, y = x.float().to(where), (y.float() if y.is_floating_point() else y).to(where)
    data = Batch(x[~held], y[~held])
    sizes = plan(
        len(data.y),
        method,
        hidden=None if isinstance(hidden, str) else hidden,
        steps=steps,
        batch_size=batch_size,
        num_points=num_points,
        lr=learning_rate,
        patience=patience,
    )
    net = _network(module, x.shape[1], outputs, sizes.hidden, activation, seed).to(where)
    evaluation = _evaluation(px, data.x)
    decays, lambdas = _given(weight_decay), _given(reg_strength)
    if lambdas is None and method != "ps-map" and reg_nats is None:
        lambdas = strengths(net, evaluation, constant, seed=seed)
        lambdas = lambdas if held_out is not None else lambdas[len(lambdas) // 2 :][:1]
    if decays is None:
        decays = [*WEIGHT_DECAYS] if held_out is not None else [WEIGHT_DECAYS[1]]
    first = 0.0 if reg_nats is None else _mean_trace(net, evaluation, seed)
    found = train(
        net,
        method,
        data,
        Batch(x[held], y[held]) if held_out is not None else None,
        likelihood=likelihood,
        by=lambda out, target: held_out_loss(out, target, labels, weight is not None),
        px=evaluation,
        weight_decays=decays,
        reg_strengths=lambdas or [],
        reg_nats=reg_nats,
        plan=sizes,
        seed=seed,
        progress=progress,
    )
    _warn_at_edge(found)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(found.params.get(name, p))
    if reg_nats is not None:
        found = _in_nats(found, reg_nats, first, _mean_trace(net, evaluation, seed))
    # float64, so that the prediction for a row does not depend on the rows beside it
    return net.cpu().double().eval(), found


def _in_nats(found: Trained, nats: float, first: float, last: float) -> Trained:
    """The result with c in the lines of the search, and the λ that c amounts to at the end."""
    config = found.config._replace(reg_strength=nats / (last + SHARE * first))
    search = [{**line, "reg_nats": nats} for line in found.search]
    for line in search:
        del line["reg_strength"]
    return found._replace(config=config, search=search)


def _mean_trace(net: nn.Module, px: EvalDistribution, seed: int) -> float:
    f, params = functional(copy.deepcopy(net).eval())
    like, generator = next(iter(params.values())), torch.Generator().manual_seed(seed)
    x = points.to(px.sample(128, generator), device=like.device, dtype=like.dtype)
    generator = torch.Generator(like.device).manual_seed(seed)
    with torch.no_grad():
        return float(trace(f, params, x, method="jvp", probes=16, generator=generator).value)


def _check(
    weight_decay: float | str, reg_strength: float | str, reg_nats: float | None, method: str
) -> None:
    if reg_nats is not None:
        if reg_strength != AUTO or method != "l-map":
            message = (
                "reg_nats takes the place of reg_strength in method='l-map'; got "
                f"{reg_nats=}, {reg_strength=}, {method=}"
            )
            raise InputError(message)
        if not (isinstance(reg_nats, float | int) and 0 <= reg_nats < math.inf):
            message = f"reg_nats must be a finite number >= 0, got {reg_nats!r}"
            raise InputError(message)
    for name, value in (("weight_decay", weight_decay), ("reg_strength", reg_strength)):
        number = isinstance(value, float | int) and 0 <= value < math.inf
        if value != AUTO and not number:
            message = f"{name} must be 'auto' or a finite number >= 0, got {value!r}"
            raise InputError(message)
    if method == "fs-map" and reg_strength == 0:
        message = "fs-map needs reg_strength > 0: its jitter is ε = 1/(2λN)"
        raise InputError(message)


def _warn_at_edge(found: Trained) -> None:
    """Only the upper edge: below the lower one there is nothing to gain."""
    told = [text for text in at_edges(found) if "largest" in text]
    if told:
        message = f"{'; '.join(told)}. Give a number instead of 'auto' to try one."
        warnings.warn(message, EdgeOfGridWarning, stacklevel=3)


def held_out_loss(out: Tensor, y: Tensor, labels: bool, weighted: bool = False) -> Tensor:
    """Root mean squared error over rows and outputs, standardized; or mean log loss in nats.

    Args:
        out: What a network says, ``[N, K]``.
        y: Targets, or labels; with weights behind them where ``weighted``.
        labels: Whether the targets are labels.
        weighted: Whether rows have weights.

    Returns:
        One number.
    """
    weight = torch.ones_like(out[:, 0])
    if weighted:
        y, weight = unpacked(y, labels=labels)
    if labels:
        loss = torch.nn.functional.cross_entropy(out, y, reduction="none")
        return (weight * loss).sum() / weight.sum()
    return ((weight * (out - y).square().mean(1)).sum() / weight.sum()).sqrt()


def _given(value: float | str) -> list[float] | None:
    return None if value == AUTO else [float(value)]


def _device(name: str) -> torch.device:
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError as error:
        message = f"device must be 'auto', 'cpu', 'cuda' or 'cuda:1' …, got {name!r}"
        raise InputError(message) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        message = f"device {name!r} was asked for, and torch sees no CUDA device here. Use 'cpu'."
        raise InputError(message)
    return found


def _network(
    factory: Factory | None,
    inputs: int,
    outputs: int,
    hidden: Sequence[int],
    activation: str,
    seed: int,
) -> nn.Module:
    if factory is None:
        generator = torch.Generator().manual_seed(seed)
        return MLP([inputs, *hidden, outputs], activation, generator=generator).float()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return factory(inputs, outputs).float()


def _evaluation(px: Any, x: Tensor) -> EvalDistribution:
    if not isinstance(px, str):
        return as_px(px)
    if px == "normal":
        return Normal(shape=(x.shape[1],))
    if px == "train":
        return Empirical(x.cpu())
    message = f"px must be 'normal', 'train' or a distribution of fsmap.px, got {px!r}"
    raise InputError(message)
