r"""A linear model of a table, trained to the end: what a network has to be better than.

The loss per row is that of the networks, $-\log p(y \mid f) + \tfrac w2 \|\theta\|^2$ with
f(x) = Wx + b and θ = (W, b). It is convex, so its minimum is found, and no early stopping decides:
by one linear system for squared errors, by L-BFGS for classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsmap.models.mlp import MLP
from fsmap.train.search import Config, Trained
from fsmap.train.tabular import held_out_loss

WEIGHT_DECAYS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""More than the networks': nothing else holds a linear model back."""

MOST_ITERATIONS = 500
FLAT = 1e-7  # the largest entry of the gradient at which L-BFGS has arrived


def learn_linear(x: Tensor, y: Tensor, held_out: Tensor, /) -> tuple[MLP, Trained]:
    """Solve for every weight decay, and choose one on held-out rows.

    Args:
        x: Standardized rows, ``[N, D]``.
        y: Standardized targets ``[N, K]`` (floating point), or labels ``[N]`` (integers).
        held_out: Which rows only choose, ``[N]`` booleans.

    Returns:
        The model (float64), and how it was chosen; steps are iterations.
    """
    labels = not y.is_floating_point()
    outputs = int(y.max()) + 1 if labels else y.shape[1]
    rows = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)  # [N, D + 1]
    y = y if labels else y.double()
    theta = torch.zeros(rows.shape[1], outputs, dtype=torch.float64)
    search, found = [], []
    for decay in WEIGHT_DECAYS:  # each starts where the one before it ended
        solve = _classes if labels else _numbers
        theta, steps = solve(rows[~held_out], y[~held_out], decay, theta)
        value = float(held_out_loss(rows[held_out] @ theta, y[held_out], labels))
        line = {"weight_decay": decay, "reg_strength": 0.0, "value": value, "step": steps}
        search.append(line)
        found.append(theta)
    k = min(range(len(search)), key=lambda i: search[i]["value"])
    generator = torch.Generator().manual_seed(0)  # what it draws is overwritten
    network = MLP([x.shape[1], outputs], generator=generator).double().eval()
    params = {"layers.0.weight": found[k][:-1].T.clone(), "layers.0.bias": found[k][-1].clone()}
    network.load_state_dict(params)
    config, value = Config(WEIGHT_DECAYS[k], 0.0), search[k]["value"]
    return network, Trained(params, config, value, int(search[k]["step"]), search, [])


def _numbers(rows: Tensor, y: Tensor, decay: float, start: Tensor) -> tuple[Tensor, int]:
    """Mean of ‖y − Aθ‖² + w/2 ‖θ‖²: (2/N AᵀA + wI) θ = 2/N Aᵀy."""
    scale = 2 / len(rows)
    normal = scale * rows.T @ rows  # [D + 1, D + 1]
    normal.diagonal().add_(decay)
    return torch.linalg.solve(normal, scale * rows.T @ y), 1


def _classes(rows: Tensor, y: Tensor, decay: float, start: Tensor) -> tuple[Tensor, int]:
    """Mean cross-entropy + w/2 ‖θ‖², to a gradient of nearly zero."""
    theta = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [theta],
        max_iter=MOST_ITERATIONS,
        tolerance_grad=FLAT,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = torch.nn.functional.cross_entropy(rows @ theta, y)
        total = total + decay / 2 * theta.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    steps = int(optimizer.state[theta].get("n_iter", 0))
    return theta.detach(), steps
