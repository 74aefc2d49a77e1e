r"""Priors: $\log p(\theta)$ in nats over all P parameters of the dict, with all constants.

A prior is an immutable tuple of its hyper-parameters. ``value`` is pure, differentiable and vmaps
over parameters and hyper-parameters alike; ``check`` tests names, shapes and numbers once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import jvp

from fsmap.errors import InputError
from fsmap.functional import accumulate, check_positive
from fsmap.objective.likelihood import LOG_SQRT_2PI, tensor_like
from fsmap.types import Params

Scale = float | Tensor | Mapping[str, float | Tensor]
"""One number for all parameters, or one per name: a number or a tensor that broadcasts to it."""

Elementwise = Callable[[Tensor], Tensor] | Mapping[str, Callable[[Tensor], Tensor]]
"""A map that acts on every entry of a tensor alone, or one for each parameter."""


class Prior(Protocol):
    """What the objective needs of a prior."""

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
            copy it, for training in place would move the mean along.
    """

    std: Scale
    mean: Scale | None = None

    def value(self, params: Params) -> Tensor:
        """Log-density of the parameters, in nats."""
        _check_any(params)
        terms = []
        for name, tensor in params.items():
            theta = accumulate(tensor)
            std = _fitting("std", self.std, name, theta)
            centered = theta
            if self.mean is not None:
                centered = theta - _fitting("mean", self.mean, name, theta)
            repeats = theta.numel() // max(std.numel(), 1)  # of each entry of std, by broadcasting
            log_norm = repeats * std.log().sum() + theta.numel() * LOG_SQRT_2PI
            terms.append((-0.5 * (centered / std).square()).sum() - log_norm)
        return torch.stack(terms).sum()

    def check(self, params: Params) -> None:
        """Raise InputError on missing names, wrong shapes, or scales that are not positive."""
        _check_any(params)
        for name, theta in params.items():
            check_positive(f"std of {name!r}", _entry("std", self.std, name))
            _fitting("std", self.std, name, theta)
            mean = 0.0 if self.mean is None else self.mean
            if not torch.isfinite(_fitting("mean", mean, name, theta)).all():
                raise InputError(
                    f"mean of {name!r} holds nan or inf. Give finite weights to stay close to"
                )


class Flat(NamedTuple):
    """The improper prior p(theta) = 1: maximum likelihood."""

    def value(self, params: Params) -> Tensor:
        """Zero."""
        _check_any(params)
        return accumulate(next(iter(params.values()))).new_zeros(())

    def check(self, params: Params) -> None:
        """Raise InputError if there is no parameter."""
        _check_any(params)


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
                raise InputError(
                    f"the inverse map mixes the entries of {name!r}. Give an elementwise map: one "
                    "whose Jacobian is diagonal."
                )
        self.prior.check(theta)

    def _pull_back(self, params: Params) -> tuple[Params, Tensor]:
        """The old coordinates theta, and log |det d theta / d theta'|."""
        _check_any(params)
        pairs = {n: _slope(_entry("inverse", self.inverse, n), t) for n, t in params.items()}
        log_slopes = [accumulate(slope).abs().log().sum() for _, slope in pairs.values()]
        return {name: theta for name, (theta, _) in pairs.items()}, torch.stack(log_slopes).sum()


def _slope(inverse: Callable[[Tensor], Tensor], tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Value and elementwise derivative, by one forward-mode pass along (1, ..., 1)."""
    pair = jvp(inverse, (tensor,), (torch.ones_like(tensor),))
    theta, slope = pair[0], pair[1]
    if theta.shape != tensor.shape:
        raise InputError(
            f"the inverse map turned a parameter of shape {list(tensor.shape)} into "
            f"{list(theta.shape)}. An elementwise map keeps the shape."
        )
    return theta, slope


def _entry(what: str, table: Any, name: str) -> Any:
    """What a table says about one parameter; a value that is no table is for all of them."""
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
    fits = value.dim() <= theta.dim() and all(
        a in (1, b) for a, b in zip(value.shape[::-1], theta.shape[::-1], strict=False)
    )
    if not fits:
        raise InputError(
            f"{what} of {name!r} has shape {list(value.shape)}, which does not broadcast to the "
            f"parameter's {list(theta.shape)}. Give a number or a tensor of that shape."
        )
    return value


def _check_any(params: Params) -> None:
    if not params:
        raise InputError("there is no trainable parameter. Set requires_grad on at least one.")
