"""A module with an unusual signature: `forward=lambda module, x: ...` calls it.

The recurrent network here takes time as the first dimension and a state, and returns three values.
Points of p_X and of the loop have the batch as the first dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap


class Recurrent(nn.Module):
    """A gated recurrent network: (sequence [T, B, 3], state) -> (all outputs, last one, state)."""

    def __init__(self) -> None:
        """One layer."""
        super().__init__()
        self.cell = nn.GRUCell(3, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, sequence: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of every time, the last one, and the state."""
        outputs = []
        for x in sequence:
            state = self.cell(x, state)
            outputs.append(self.head(state))
        return torch.stack(outputs), outputs[-1], state


def last_output(module: nn.Module, x: Tensor) -> Tensor:
    """The tensor that is compared with the target, first dimension the point: [B, 1]."""
    return module(x.transpose(0, 1), x.new_zeros(len(x), 32))[1]


def main() -> tuple[float, float]:
    """Learn to add up the first channel; returns the last loss and R."""
    torch.manual_seed(0)
    model = Recurrent()
    x = torch.randn(128, 6, 3)
    y = x[:, :, 0].sum(1, keepdim=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    lm = fsmap.LMAP(model, fsmap.px.Empirical(x), num_points=32, forward=last_output)  # new
    for _ in range(60):
        out, R = lm(x)  # new
        loss = F.mse_loss(out, y) + 1e-4 * R  # new: + λR
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}, R {R.item():.1f}")
    return loss.item(), R.item()


if __name__ == "__main__":
    main()
