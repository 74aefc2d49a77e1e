"""L-MAP and an average of the weights (EMA): R of the trained weights and of the average.

The loop trains one model with λR and keeps a moving average of its weights beside it. R of the
average is R at the average's own parameters. Prints log loss and R of both.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsmap


def main() -> dict[str, dict[str, float]]:
    """Train, average, compare on fresh points."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2_256, 2, generator=generator)
    y = (x[:, 0] * x[:, 1] + 0.3 * torch.randn(2_256, generator=generator) > 0).long()
    train_x, train_y, test_x, test_y = x[:256], y[:256], x[256:], y[256:]

    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 2))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    px = fsmap.px.Normal(shape=(2,))
    penalty = fsmap.LaplacianPenalty(model, px, num_points=64).attach(optimizer)
    for _ in range(300):
        rows = torch.randint(0, 256, (32,), generator=generator)
        loss = F.cross_entropy(model(train_x[rows]), train_y[rows]) + 1e-4 * penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)

    found = {}
    print("weights        NLL        R")
    for name, network in (("last", model), ("average", average.module)):
        look = fsmap.LaplacianPenalty(network, px, num_points=256, probes=8)  # at *its* parameters
        with torch.no_grad():
            nll, R = F.cross_entropy(network(test_x), test_y).item(), look().item()
        found[name] = {"nll": nll, "R": R}
        print(f"{name:8} {nll:9.3f} {R:8.1f}")
    return found


if __name__ == "__main__":
    main()
