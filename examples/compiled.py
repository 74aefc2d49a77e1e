"""torch.compile: compile the LMAP, not the model inside it.

`lm.compile()` compiles the pass that serves the loss and R, its tangent included, as one graph, and
the passes without R. On CUDA `lm.compile(mode="reduce-overhead")` is the fastest.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import fsmap


def main(backend: str = "inductor") -> tuple[float, float]:
    """Train with a compiled LMAP; returns the last loss and R."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    model = nn.Sequential(*model, nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(8,)), num_points=64, every=4)
    lm.compile(backend=backend)
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
