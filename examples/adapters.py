"""Fine-tuning with low-rank adapters: a frozen backbone, and R over the adapters alone.

Parameters with `requires_grad=False` are constants of the function, so R, the ψ that are drawn and
the optimizer's state are those of the adapters: a few percent of the network.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap


class LowRank(nn.Module):
    """W x + B A x: W is frozen, A and B are learned, B starts at zero."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        """Wrap a linear layer."""
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with its correction."""
        return self.frozen(x) + x @ self.A.mT @ self.B.mT


def main() -> tuple[list[str], float]:
    """Adapt a network; returns the names of what was learned and the last loss."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
    model = nn.Sequential(*backbone, nn.Linear(128, 2)).requires_grad_(False)
    for place in (0, 2, 4):
        model[place] = LowRank(model[place], rank=4)
    x = torch.randn(256, 8)
    y = (x[:, 0] > x[:, 1]).long()
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=1e-2)
    lm = fsmap.LMAP(model, fsmap.px.Empirical(x), num_points=64)  # new; R is about A and B
    for _ in range(60):
        out, R = lm(x)  # new
        loss = F.cross_entropy(out, y) + 1e-5 * R  # new: + λR
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    names = sorted(lm.regularizer.params())
    size = sum(p.numel() for p in learned) / sum(p.numel() for p in model.parameters())
    print(f"loss {loss.item():.4f}, R {R.item():.1f} over {size:.0%} of the parameters: {names}")
    return names, loss.item()


if __name__ == "__main__":
    main()
