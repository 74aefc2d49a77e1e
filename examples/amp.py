"""Mixed precision: bf16 autocast, or fp16 with a GradScaler. Four lines, the same as without R.

R is summed in float32 inside autocast, and `jvp`, the default estimator, is as safe there as the
loss. `attach` counts optimizer steps, so that a step which the scaler skips is not counted.
"""

import torch
import torch.nn.functional as F
from torch import nn

import fsmap

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(dtype: torch.dtype, steps: int = 60) -> tuple[float, float]:
    """An autocast loop; returns the last loss and R."""
    torch.manual_seed(0)
    x = torch.randn(256, 8, device=DEVICE)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 2))
    model.to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)  # bf16 needs none
    lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(8,)), num_points=64).attach(optimizer)  # new
    for _ in range(steps):
        with torch.autocast(DEVICE, dtype):
            out, R = lm(x)  # new, instead of out = model(x)
            loss = F.cross_entropy(out, y) + 1e-4 * R  # new: + λR
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return loss.item(), R.item()


def main() -> dict[str, tuple[float, float]]:
    """Train in both half precisions."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        found[name] = train(dtype)
        print(f"{name:<9} loss {found[name][0]:.3f}  R {found[name][1]:.1f}")
    return found


if __name__ == "__main__":
    main()
