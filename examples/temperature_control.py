"""λ without a search: plain training beside λ steered by the temperature on held-out data.

Runs in seconds: python examples/temperature_control.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import fsmap

EPOCHS, BATCH = 40, 50


def data():
    """Eight columns, two classes, one label in ten wrong."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 8, generator=generator)
    y = (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).long()
    return x, torch.where(torch.rand(3000, generator=generator) < 0.1, 1 - y, y)


def train(start=None, steered=True):
    """Train; with steering, λ is moved after every epoch. Returns test metrics and the control."""
    x, y = data()
    torch.manual_seed(1)
    model = nn.Sequential(
        *(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU()),
        *(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)),
    )
    lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(8,)), num_points=50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    control = fsmap.TemperatureControl(
        lm,
        (x[300:1000], y[300:1000]),  # held out, and used for nothing else
        start=start,  # None: λR is one percent of the loss
        optimizer=optimizer,
        interval=0.25,  # epochs of six steps: a network needs several to follow λ
        warmup=2,
    )
    for _ in range(EPOCHS):
        seen = []
        for rows in torch.randperm(300).split(BATCH):
            out, R = lm(x[rows])
            seen.append(R.detach())
            loss = F.cross_entropy(out, y[rows])
            if steered:
                loss = loss + control.strength * R
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if steered:
            control.update(laplacian=torch.stack(seen).mean())
    model.eval()
    with torch.no_grad():
        logits, labels = model(x[1000:]), y[1000:]
    wanted = ("accuracy", "nll", "ece", "temperature")
    return {name: getattr(fsmap.metrics, name)(logits, labels) for name in wanted}, control


def main():
    for name, options in (
        ("plain", {"steered": False}),
        ("steered", {}),
        ("steered from 1e-8", {"start": 1e-8}),
        ("steered from 1e-3", {"start": 1e-3}),
    ):
        found, control = train(**options)
        numbers = "  ".join(f"{metric} {value:.3f}" for metric, value in found.items())
        lam = f"λ {control.strength:.1e}, {control.status}" if name != "plain" else "λ 0"
        print(f"{name:18} {numbers}  {lam}")


if __name__ == "__main__":
    main()
