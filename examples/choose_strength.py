"""How strong should the regularizer be? λR at 1, 10 and 100 percent of the loss before training.

Runs in seconds: python examples/choose_strength.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import fsmap

torch.manual_seed(0)
x = torch.randn(300, 2)
y = ((x[:, 0] * x[:, 1] > 0) ^ (torch.rand(300) < 0.1)).long()  # one label in ten is wrong
train, test = slice(0, 150), slice(150, 300)
px = fsmap.px.Normal(shape=(2,))
STEPS = 400


def make():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def run(name, strength):
    """Train with a λ."""
    model = make()
    penalty = fsmap.LaplacianPenalty(model, px, num_points=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(x[train]), y[train]) + strength * penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        fitted = F.cross_entropy(model(x[train]), y[train])
        logits = model(x[test])
    R = fsmap.suggest_strength(penalty, loss=fitted).R
    accuracy, nll = fsmap.metrics.accuracy(logits, y[test]), fsmap.metrics.nll(logits, y[test])
    print(
        f"{name:22} λ {strength:.1e}  R {R:8.1f}  λR/loss {strength * R / fitted:5.2f}  "
        f"test accuracy {accuracy:.3f}  test NLL {nll:.3f}"
    )


untrained = make()
first = F.cross_entropy(untrained(x[train]), y[train]).detach()
penalty = fsmap.LaplacianPenalty(untrained, px, num_points=128)
found = fsmap.suggest_strength(penalty, loss=first, num_data=150)
print(found, end="\n\n")

run("plain", 0.0)
for share, strength in found.choices.items():
    run(f"{share:.0%} of the loss", strength)
