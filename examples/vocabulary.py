"""A large vocabulary: R over 64 of 2,000 outputs, another random sample on every step.

R over all logits of a language model would need three tensors of V numbers for every token.
`outputs=64` multiplies only the sampled rows of the last linear layer (which is found, tied to
the embedding or not) and scales the result, so that R keeps its expectation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap

VOCABULARY, LENGTH = 2_000, 8


class LanguageModel(nn.Module):
    """Predicts the next token from the last two; embedding and output layer share their weight."""

    def __init__(self) -> None:
        """Small."""
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.mix = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [B, T, V]."""
        h = self.embed(tokens)
        before = F.pad(h, (0, 0, 1, 0))[:, :-1]
        return self.head(self.mix(torch.cat([h, before], dim=-1)))


def sentences(n: int, generator: torch.Generator) -> Tensor:
    """Counting upwards from a random start: [n, T + 1]."""
    start = torch.randint(0, VOCABULARY, (n, 1), generator=generator)
    return (start + torch.arange(LENGTH + 1)) % VOCABULARY


def main() -> tuple[float, float]:
    """Train; returns the last loss and R."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    penalty = fsmap.LaplacianPenalty(  # new
        model, lambda n, g: sentences(n, g)[:, :-1], num_points=8, outputs=64
    )
    for step in range(50):
        batch = sentences(32, torch.Generator().manual_seed(step))
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss = loss + penalty(1e-8)  # new: + λR
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        R = penalty().item()
    print(f"loss {loss.item():.3f}, R {R:.3g} from 64 of {VOCABULARY} outputs")
    return loss.item(), R


if __name__ == "__main__":
    main()
