r"""Changes of variables: $\theta = \mathcal{R}^{-1}(\theta')$ and its log-determinant.

The log-determinant is $\log|\det \mathrm{d}\theta/\mathrm{d}\theta'|$ (``appsec:psmap_reparam``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.func import jacfwd, jvp

from fsmap.errors import InputError, MemoryLimitError
from fsmap.functional import ravel, unravel
from fsmap.objective.hyper import entry, working
from fsmap.types import Params

Elementwise = Callable[[Tensor], Tensor] | Mapping[str, Callable[[Tensor], Tensor]]
"""A map that acts on every entry of a tensor alone, or one for each parameter."""

WholeMap = Callable[[Params], Params]
"""A smooth map of all parameters at once, to as many numbers."""

# A P x P Jacobian above this is refused: 2 GiB is P = 16,384 in float64.
MAX_JACOBIAN_BYTES = 2**31


def pull_back_elementwise(inverse: Elementwise, params: Params) -> tuple[Params, Tensor]:
    """Old coordinates and log-determinant, where the Jacobian is diagonal.

    Args:
        inverse: From the new coordinates to the old ones, entry by entry.
        params: The new coordinates.

    Returns:
        The old coordinates, and the sum of log |slope| over all entries, a 0-dim tensor.
    """
    pairs = {n: _slope(entry("inverse", inverse, n, params), t) for n, t in params.items()}
    log_slopes = [working(slope).abs().log().sum() for _, slope in pairs.values()]
    return {name: theta for name, (theta, _) in pairs.items()}, torch.stack(log_slopes).sum()


def pull_back(inverse: WholeMap, params: Params) -> tuple[Params, Tensor]:
    """Old coordinates and log-determinant of any map, by its full P x P Jacobian.

    Args:
        inverse: From the dict of the new coordinates to a dict of the old ones.
        params: The new coordinates.

    Returns:
        The old coordinates, and log |det|, a 0-dim tensor.

    Raises:
        MemoryLimitError: If the Jacobian would not fit.
        InputError: If the map changes the number of parameters.
    """
    flat = ravel(params)  # [P]
    needed = flat.numel() ** 2 * flat.element_size()
    if needed > MAX_JACOBIAN_BYTES:
        message = (
            f"the Jacobian of the map needs {needed / 2**30:.1f} GiB for {flat.numel()} "
            f"parameters, the limit is {MAX_JACOBIAN_BYTES / 2**30:g} GiB. Use an elementwise map."
        )
        raise MemoryLimitError(message)

    def theta_of(flat: Tensor) -> tuple[Tensor, Params]:
        theta = inverse(unravel(flat, params))
        return ravel(theta), theta

    jacobian, theta = jacfwd(theta_of, has_aux=True)(flat)  # [P, P]
    if jacobian.shape[0] != jacobian.shape[1]:
        message = (
            f"the inverse map makes {jacobian.shape[0]} numbers of {jacobian.shape[1]}. "
            "A change of variables keeps their number."
        )
        raise InputError(message)
    return theta, torch.linalg.slogdet(jacobian).logabsdet


def check_elementwise(inverse: Elementwise, params: Params) -> None:
    """A diagonal Jacobian D gives J v = D v for every v: try one v with distinct entries.

    Args:
        inverse: The map that claims to act entry by entry.
        params: Where to try it.

    Raises:
        InputError: If it mixes the entries of a parameter.
    """
    for name, tensor in params.items():
        function = entry("inverse", inverse, name, params)
        v = torch.linspace(1, 2, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        along = jvp(function, (tensor,), (v.view_as(tensor),))[1]
        expected = _slope(function, tensor)[1] * v.view_as(tensor)
        if not torch.allclose(along, expected, rtol=1e-3, atol=1e-6, equal_nan=True):
            message = (
                f"the inverse map mixes the entries of {name!r}, so its Jacobian is not diagonal. "
                "Give a map from the dict of all parameters to a dict, with elementwise=False."
            )
            raise InputError(message)


def _slope(inverse: Callable[[Tensor], Tensor], tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Value and elementwise derivative, by one forward-mode pass along (1, ..., 1)."""
    pair = jvp(inverse, (tensor,), (torch.ones_like(tensor),))
    theta, slope = pair[0], pair[1]
    if theta.shape != tensor.shape:
        message = (
            f"the inverse map turned a parameter of shape {list(tensor.shape)} into "
            f"{list(theta.shape)}. An elementwise map keeps the shape; else use elementwise=False."
        )
        raise InputError(message)
    return theta, slope
