"""Dict batches and padding: a tagger that gives an output for every token of a sentence.

Batches are dicts, `model(**batch)`; so are the evaluation points, here unlabelled sentences. A
masked position must not count: `Weights(lambda x: x["mask"])` makes it weigh nothing in R.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap

VOCABULARY, TAGS, LENGTH = 50, 5, 12


class Tagger(nn.Module):
    """Attention over the tokens of a sentence; one of five tags for each of them."""

    def __init__(self) -> None:
        """A small transformer."""
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, TAGS)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits, [B, T, K]."""
        h = self.encoder(self.embed(tokens), src_key_padding_mask=~mask)
        return self.head(h)


def sentences(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random sentences of random length, padded with zeros."""
    tokens = torch.randint(1, VOCABULARY, (n, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (n, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    return {"tokens": tokens * mask, "mask": mask}


def main() -> tuple[float, float]:
    """Learn each token's tag, its number modulo five; returns the last loss and R."""
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    lm = fsmap.LMAP(  # new
        model,
        sentences,  # p_X: a function (n, generator) -> x
        num_points=16,
        metric=fsmap.metric.Weights(lambda x: x["mask"]),
    )
    for step in range(40):
        batch = sentences(32, torch.Generator().manual_seed(step))
        out, R = lm(batch)  # new
        kept = batch["mask"]
        loss = F.cross_entropy(out[kept], batch["tokens"][kept] % TAGS) + 1e-5 * R  # new: + λR
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}, R {R.item():.1f}")
    return loss.item(), R.item()


if __name__ == "__main__":
    main()
