"""Predictive uncertainty around a trained network: laplace-torch on its last layer.

The network that was learned stays the mean; the curvature of the loss in the weights of the last
layer says how sure they are. laplace-torch asks for torchvision, which replaces an installed torch
by another build, so that it is no extra of this package; it works without:

    pip install einops linear_operator opt_einsum scipy tqdm torchmetrics
    pip install --no-deps laplace-torch==0.3 asdfghjkl==0.1a4 curvlinops-for-pytorch==3.0.1
    pip install --no-deps backpack-for-pytorch==1.7.1 unfoldnd==0.2.3 einconv==0.1.0
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fsmap.errors import MissingExtraError

BATCH = 4_096  # rows whose curvature is added up at a time


def fit_laplace(
    module: nn.Module, x: Tensor, y: Tensor, *, noise_std: float, weight_decay: float
) -> Any:
    """A Gaussian over the last layer's weights.

    Args:
        module: The trained network; not changed.
        x: Standardized training rows.
        y: Standardized targets ``[N, K]``, or labels ``[N]``.
        noise_std: Of the standardized targets; not used for labels.
        weight_decay: w, whose prior precision is wN in nats for all rows.

    Returns:
        laplace-torch's object.

    Raises:
        MissingExtraError: If laplace-torch is not installed.
    """
    try:
        laplace = importlib.import_module("laplace")
    except ImportError as error:
        message = (
            "uncertainty needs laplace-torch, which is not installed. Install it without its "
            "dependency on torchvision, which would replace torch: see fsmap.integrations.laplace "
            f"for the commands. ({error})"
        )
        raise MissingExtraError(message) from error
    found = laplace.Laplace(
        module,
        "regression" if y.is_floating_point() else "classification",
        subset_of_weights="last_layer",
        hessian_structure="full",
        sigma_noise=noise_std if y.is_floating_point() else 1.0,
        prior_precision=max(weight_decay * len(y), 1e-6),
    )
    own = torch.Generator().manual_seed(0)  # a loader would use up torch's own numbers
    found.fit(DataLoader(TensorDataset(x, y), batch_size=BATCH, generator=own))
    return found


def standard_deviation(found: Any, x: Tensor, noise_std: float) -> Tensor:
    """Of standardized targets: the last layer's uncertainty and the noise, ``[N, K]``."""
    with torch.no_grad():
        _, covariance = found(x)  # [N, K, K]
    variance: Tensor = covariance.diagonal(dim1=-2, dim2=-1)
    return (variance + noise_std**2).sqrt()


def probabilities(found: Any, x: Tensor) -> Tensor:
    """Class probabilities averaged over the Gaussian (MacKay's probit formula), ``[N, K]``."""
    with torch.no_grad():
        averaged: Tensor = found(x, link_approx="probit")
    return averaged
