"""λ without a search: plain training beside λ steered by the temperature on held-out data.

Runs in seconds: python examples/temperature_control.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import fsmap

torch.manual_seed(0)
x = torch.randn(1200, 8)
y = (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).long()
y = torch.where(torch.rand(1200) < 0.1, 1 - y, y)  # one label in ten is wrong
train, held_out, test = slice(0, 300), slice(300, 600), slice(600, 1200)
px = fsmap.px.Normal(shape=(8,))
EPOCHS, BATCH = 40, 50


def make():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, 2),
    )  # fmt: skip


def run(name, steered, start=None):
    """Train; with steering, λ is moved after every epoch."""
    model = make()
    lm = fsmap.LMAP(model, px, num_points=50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    control = fsmap.TemperatureControl(
        lm,
        (x[held_out], y[held_out]),  # used for nothing else
        start=start,
        optimizer=optimizer,
        interval=0.25,  # epochs of six steps: a network needs several to follow λ
        warmup=2,
    )
    for _ in range(EPOCHS):
        for rows in torch.randperm(300).split(BATCH):
            out, R = lm(x[train][rows])
            loss = F.cross_entropy(out, y[train][rows])
            if steered:
                loss = loss + control.strength * R
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if steered:
            control.update()
    model.eval()
    with torch.no_grad():
        logits = model(x[test])
    measured = [fsmap.metrics.accuracy, fsmap.metrics.nll, fsmap.metrics.ece]
    accuracy, nll, ece = (f(logits, y[test]) for f in measured)
    T = fsmap.metrics.temperature(logits, y[test])
    lam = f"λ {control.strength:.1e}, {control.status}" if steered else "λ 0"
    print(f"{name:18} accuracy {accuracy:.3f}  NLL {nll:.3f}  ECE {ece:.3f}  T {T:.2f}  {lam}")


run("plain", steered=False)
run("steered", steered=True)
for lam in (1e-8, 1e-3):
    run(f"steered from {lam:.0e}", steered=True, start=lam)
