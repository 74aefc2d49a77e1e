"""torch.compile: compile the model that LMAP wraps.

Ordinary passes (evaluation, steps that `every` leaves out, the loss outside `joint`) run compiled.
The pass that takes R differentiates the model's own operations in forward mode, which compiled
kernels do not support, so it runs as written; `fd` and `fd_central` run compiled throughout.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import fsmap


def main(backend: str = "inductor") -> tuple[float, float]:
    """Train with a compiled model; returns the last loss and R."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    model = nn.Sequential(*model, nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    fast = torch.compile(model, backend=backend)
    lm = fsmap.LMAP(fast, fsmap.px.Normal(shape=(8,)), num_points=64, batchnorm="frozen", every=4)
    for _ in range(60):
        out, R = lm(x)
        loss = F.cross_entropy(out, y) + 1e-4 * R
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        size = fsmap.LaplacianPenalty(model, fsmap.px.Normal(shape=(8,)), num_points=64)().item()
    print(f"loss {loss.item():.3f}, R {size:.1f}")
    return loss.item(), size


if __name__ == "__main__":
    main(*sys.argv[1:])
