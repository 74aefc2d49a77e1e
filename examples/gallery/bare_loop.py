"""A bare loop: 100 noisy points on two half circles, plain and with LogTrace."""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import fsmap


def half_circles(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    angle = torch.pi * (torch.rand(n, generator=g) + y)
    x = torch.stack([angle.cos() + y, angle.sin() + 0.5 * y], dim=1)
    return x + 0.3 * torch.randn(n, 2, generator=g), y


def train(x, y, nats, steps=400):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    px = fsmap.px.Uniform([-2.0, -1.5], [3.0, 2.0])  # where the picture is
    lm = fsmap.LMAP(model, px, num_points=64)
    penalty = fsmap.LogTrace(nats)
    for _ in range(steps):
        out, R = lm(x)
        loss = F.cross_entropy(out, y) + penalty(R)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main():
    x, y = half_circles(100, seed=1)
    test_x, test_y = half_circles(5_000, seed=2)
    across, up = torch.linspace(-2, 3, 60), torch.linspace(-1.5, 2, 45)
    grid = torch.cartesian_prod(across, up)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    found = {}
    for ax, (name, nats) in zip(axes, {"plain": 0.0, "LogTrace(0.1)": 0.1}.items(), strict=True):
        with torch.no_grad():
            model = train_without_graph(x, y, nats)
            p = model(grid).softmax(1)[:, 1].reshape(60, 45)
            found[name] = fsmap.metrics.nll(model(test_x), test_y)
        picture = ax.contourf(across, up, p.T, levels=11, cmap="RdBu", vmin=0, vmax=1)
        ax.scatter(*x.T, c=y, cmap="RdBu", edgecolor="white", linewidth=0.7, s=18)
        ax.set_title(f"{name}: test log loss {found[name]:.2f}")
    figure.colorbar(picture, ax=axes, label="p(class 1)")
    return figure, found


def train_without_graph(x, y, nats):
    with torch.enable_grad():
        return train(x, y, nats).eval()


if __name__ == "__main__":
    main()[0].savefig("bare_loop.svg")
