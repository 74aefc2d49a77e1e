"""Fig. 1 of the paper by hand: the most likely parameters and the most likely function differ.

f(x) = (e^a φ(x + ½) + e^b φ(x − ½))/√2. Ten points determine the left bump, one point has
little effect on the right one. p(θ | D) and p(f | D) = p(θ | D)/√det 𝒥 have different maxima in b.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import fsmap


class Bumps(nn.Module):
    """Two bumps with positive heights."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.exp(-((x - torch.tensor([-0.5, 0.5]).to(x)) ** 2) / 0.03)
        return (features @ self.theta.exp() / math.sqrt(2))[:, None]


def main(size=81):
    g = torch.Generator().manual_seed(0)
    x = torch.cat([-0.5 + 0.2 * torch.randn(10, generator=g), torch.tensor([0.7])]).double()[
        :, None
    ]
    y = torch.exp(-((x[:10] + 0.5) ** 2) / 0.03) / math.sqrt(2)
    y = torch.cat([y + 0.1 * torch.randn(10, 1, generator=g), torch.tensor([[0.1]])])
    f, _ = fsmap.functional(Bumps())
    points = torch.linspace(-1, 1, 1_000, dtype=torch.float64)[:, None]  # p_X = Uniform(−1, 1)
    likelihood, prior = fsmap.Gaussian(0.1), fsmap.Normal(1.2)

    def densities(theta: Tensor) -> Tensor:
        """Log p(θ | D) and log p(f | D), up to constants."""
        params = {"theta": theta}
        posterior = likelihood.value(f(params, x), y) + prior.value(params)
        return torch.stack(
            [posterior, posterior - 0.5 * fsmap.log_det(f, params, points, jitter=0.0)]
        )

    grid = torch.linspace(-3.5, 1.5, size, dtype=torch.float64)
    thetas = torch.cartesian_prod(grid, grid)
    table = torch.func.vmap(densities)(thetas).reshape(size, size, 2)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    axis = torch.linspace(-1, 1, 300, dtype=torch.float64)[:, None]
    best = {}
    for number, name in enumerate(["PS-MAP", "FS-MAP"]):
        a, b = divmod(int(table[:, :, number].argmax()), size)
        best[name] = float(grid[b])
        along = (table[a, :, number] - table[a, :, number].max()).exp()
        left.plot(grid, along, label="p(θ | D)" if number == 0 else "p(f | D)")
        theta = torch.stack([grid[a], grid[b]])
        right.plot(axis, f({"theta": theta}, axis).detach(), label=name)
    left.set(xlabel="b, log height of the right bump", title="densities, scaled to 1")
    right.scatter(x, y, s=10, color="black")
    right.set(xlabel="x", title="most likely parameters and function")
    left.legend(), right.legend()
    return figure, best


if __name__ == "__main__":
    main()[0].savefig("figure_1.svg")
