r"""Priors: $\log p(\theta)$ in nats over all P parameters of the dict, with all constants.

A prior is an immutable tuple of its hyper-parameters. ``value`` is pure, differentiable and vmaps
over parameters and hyper-parameters alike; ``check`` tests names, shapes and numbers once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.func import jvp

from fsmap.errors import InputError
from fsmap.functional import accumulate, check_positive
from fsmap.objective.likelihood import LOG_2, LOG_SQRT_2PI, entry, tensor_like
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
        return _sum_density(
            "std", params, self.std, self.mean, lambda z: -0.5 * z.square(), LOG_SQRT_2PI
        )

    def check(self, params: Params) -> None:
        """Raise InputError on missing names, wrong shapes, or scales that are not positive."""
        _check_location_scale("std", self.std, self.mean, params)


class Laplace(NamedTuple):
    r"""Independent Laplace densities, $p(\theta) = \prod_i e^{-|\theta_i - \mu_i| / s_i} / 2 s_i$.

    The L1 penalty as a prior. (The *noise* of that shape is ``likelihood.LaplaceNoise``.)

    Attributes:
        scale: $s$, as ``std`` of ``Normal``; the standard deviation is $\sqrt 2 s$.
        mean: $\mu$, as in ``Normal``.
    """

    scale: Scale
    mean: Scale | None = None

    def value(self, params: Params) -> Tensor:
        """Log-density of the parameters, in nats."""
        return _sum_density("scale", params, self.scale, self.mean, lambda z: -z.abs(), LOG_2)

    def check(self, params: Params) -> None:
        """Raise InputError on missing names, wrong shapes, or scales that are not positive."""
        _check_location_scale("scale", self.scale, self.mean, params)


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
            message = (
                f"the inverse map is not finite at these values: {where}. Start at "
                "theta' = R(theta) for some theta, inside the domain of the inverse."
            )
            raise InputError(message)
        for name, tensor in params.items():  # J v = D v must hold for a v with distinct entries
            function = entry("inverse", self.inverse, name, params)
            v = torch.linspace(1, 2, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            along = jvp(function, (tensor,), (v.view_as(tensor),))[1]
            expected = _slope(function, tensor)[1] * v.view_as(tensor)
            if not torch.allclose(along, expected, rtol=1e-3, atol=1e-6, equal_nan=True):
                message = (
                    f"the inverse map mixes the entries of {name!r}. Give an elementwise map: one "
                    "whose Jacobian is diagonal."
                )
                raise InputError(message)
        self.prior.check(theta)

    def _pull_back(self, params: Params) -> tuple[Params, Tensor]:
        """The old coordinates theta, and log |det d theta / d theta'|."""
        _check_any(params)
        pairs = {n: _slope(entry("inverse", self.inverse, n, params), t) for n, t in params.items()}
        log_slopes = [accumulate(slope).abs().log().sum() for _, slope in pairs.values()]
        return {name: theta for name, (theta, _) in pairs.items()}, torch.stack(log_slopes).sum()


def _slope(inverse: Callable[[Tensor], Tensor], tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Value and elementwise derivative, by one forward-mode pass along (1, ..., 1)."""
    pair = jvp(inverse, (tensor,), (torch.ones_like(tensor),))
    theta, slope = pair[0], pair[1]
    if theta.shape != tensor.shape:
        message = (
            f"the inverse map turned a parameter of shape {list(tensor.shape)} into "
            f"{list(theta.shape)}. An elementwise map keeps the shape."
        )
        raise InputError(message)
    return theta, slope


def _sum_density(
    what: str,
    params: Params,
    scale: Scale,
    mean: Scale | None,
    log_unit: Callable[[Tensor], Tensor],
    log_constant: float,
) -> Tensor:
    """Sum of ``log_unit((theta - mean) / scale) - log(scale) - log_constant`` over all entries."""
    _check_any(params)
    terms = []
    for name, tensor in params.items():
        theta = accumulate(tensor)
        s = _fitting(what, scale, name, theta, params)
        centered = theta if mean is None else theta - _fitting("mean", mean, name, theta, params)
        repeats = theta.numel() // max(s.numel(), 1)  # of each entry of s, by broadcasting
        log_norm = repeats * s.log().sum() + theta.numel() * log_constant
        terms.append(log_unit(centered / s).sum() - log_norm)
    return torch.stack(terms).sum()


def _fitting(what: str, table: Scale, name: str, theta: Tensor, params: Params) -> Tensor:
    """A scale or mean as a tensor that broadcasts to the parameter, never beyond it."""
    given = cast("float | Tensor", entry(what, table, name, params))
    value = tensor_like(given, theta)
    fits = value.dim() <= theta.dim() and all(
        a in (1, b) for a, b in zip(value.shape[::-1], theta.shape[::-1], strict=False)
    )
    if not fits:
        message = (
            f"{what} of {name!r} has shape {list(value.shape)}, which does not broadcast to the "
            f"parameter's {list(theta.shape)}. Give a number or a tensor of that shape."
        )
        raise InputError(message)
    return value


def _check_any(params: Params) -> None:
    """There must be something to have a prior over."""
    if not params:
        message = "there is no trainable parameter. Set requires_grad on at least one."
        raise InputError(message)


def _check_location_scale(what: str, scale: Scale, mean: Scale | None, params: Params) -> None:
    """Names, shapes and numbers of a scale and a mean."""
    _check_any(params)
    for name, theta in params.items():
        given = cast("float | Tensor", entry(what, scale, name, params))
        check_positive(f"{what} of {name!r}", given)
        _fitting(what, scale, name, theta, params)
        if mean is None:
            continue
        if not torch.isfinite(_fitting("mean", mean, name, theta, params)).all():
            message = f"mean of {name!r} holds nan or inf. Give finite weights to stay close to."
            raise InputError(message)
