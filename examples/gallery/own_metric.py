"""A metric of your own: several yes/no outputs, measured by their probabilities."""

import math
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap import Whitening


class BernoulliFisher(NamedTuple):
    """g = diag(p(1 − p)), p = σ(f(x)): how far apart two functions' probabilities are."""

    def at(self, x: object, out: Tensor) -> Whitening:
        """A root of g at these points, as two linear maps."""
        S, K = out.shape
        p = out.sigmoid()
        root = (p * (1 - p)).sqrt() / math.sqrt(S)  # [S, K]
        return Whitening(
            rows=lambda u: (u * root.reshape(S, K, *[1] * (u.ndim - 2))).flatten(0, 1),
            adjoint=lambda v: v.reshape(S, K) * root,
            size=S * K,
        )


def train(x, y, metric, nats, steps=400):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    px = fsmap.px.Uniform([-3.0, -3.0], [3.0, 3.0])
    lm = fsmap.LMAP(model, px, num_points=64, metric=metric)
    penalty = fsmap.LogTrace(nats)
    for _ in range(steps):
        out, R = lm(x)
        loss = F.binary_cross_entropy_with_logits(out, y) + penalty(R)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def tagged(n, seed):
    """Points with three noisy tags each."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=g)
    turns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    return x, (x @ turns.T + torch.randn(n, 3, generator=g) > 0).float()


def main():
    x, y = tagged(60, seed=0)
    test_x, test_y = tagged(5_000, seed=1)
    line = torch.linspace(-3, 3, 100)
    grid = torch.stack([line, 0.5 * torch.ones(100)], dim=1)
    figure, ax = plt.subplots(figsize=(5.5, 3.3), layout="constrained")
    found = {}
    ways = {
        "plain": (None, 0.0),
        "Euclidean": (None, 0.05),
        "BernoulliFisher": (BernoulliFisher(), 0.05),
    }
    for name, (metric, nats) in ways.items():
        model = train(x, y, metric, nats)
        with torch.no_grad():
            p = model(grid).sigmoid()[:, 0]
            found[name] = float(F.binary_cross_entropy_with_logits(model(test_x), test_y))
        ax.plot(line, p, label=f"{name}: test log loss {found[name]:.2f}")
    ax.set(xlabel="x₀ at x₁ = ½", ylabel="p(tag 0)")
    ax.legend(fontsize=8)
    return figure, found


if __name__ == "__main__":
    main()[0].savefig("own_metric.svg")
