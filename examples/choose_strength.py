"""How strong should the regularizer be? A suggestion, what it amounts to, and a budget on R.

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


def run(name, strength=0.0, limit=None):
    """Train with a fixed λ, or with the λ that holds R at a limit."""
    model = make()
    penalty = fsmap.LaplacianPenalty(model, px, num_points=64)
    budget = fsmap.Budget(limit, start=strength, rate=0.05) if limit else None
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        lam = budget.strength if budget else strength
        R = penalty()
        loss = F.cross_entropy(model(x[train]), y[train]) + lam * R
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if budget:
            budget.update(R)
    with torch.no_grad():
        fitted = F.cross_entropy(model(x[train]), y[train])
        logits = model(x[test])
    found = fsmap.suggest_strength(penalty, loss=fitted, current=lam)
    accuracy, nll = fsmap.metrics.accuracy(logits, y[test]), fsmap.metrics.nll(logits, y[test])
    print(
        f"{name:22} λ {lam:.1e}  R {found.R:8.1f}  λR/loss {found.current_share:5.2f}  "
        f"test accuracy {accuracy:.3f}  test NLL {nll:.3f}"
    )
    return found.R


untrained = make()
first = F.cross_entropy(untrained(x[train]), y[train]).detach()
found = fsmap.suggest_strength(untrained, px, loss=first, num_data=150)
print(found, end="\n\n")

plain = run("plain")
run("one percent", found.reg_strength)
run("ten percent", 10 * found.reg_strength)
run("R at 1/30 of plain", found.reg_strength, limit=plain / 30)
