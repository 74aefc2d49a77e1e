"""Gradient accumulation: one ψ for all micro-batches of an optimizer step.

After `lm.attach(optimizer)` ψ changes with the optimizer's steps, while every micro-batch draws
evaluation points of its own. Divide λR by the number of micro-batches as you
divide the loss; without BatchNorm the sum is what one large batch would give.
"""

import torch
import torch.nn.functional as F
from torch import nn

import fsmap

MICRO_BATCHES = 4


def main() -> tuple[float, int]:
    """Train on 16 points at a time, 64 a step; returns the last loss and the number of steps."""
    torch.manual_seed(0)
    x = torch.randn(512, 4)
    y = x[:, :1].sin() + x[:, 1:2] * x[:, 2:3]
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(4,)), num_points=16).attach(optimizer)  # new
    for _ in range(10):  # epochs
        for i, rows in enumerate(torch.randperm(512).split(16)):
            out, R = lm(x[rows])  # new
            loss = F.mse_loss(out, y[rows]) + 1e-4 * R  # new: + λR
            (loss / MICRO_BATCHES).backward()
            if (i + 1) % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
    print(f"loss {loss.item():.4f} after {lm.step} optimizer steps")
    return loss.item(), lm.step


if __name__ == "__main__":
    main()
