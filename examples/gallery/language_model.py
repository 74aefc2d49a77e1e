"""A language model: characters of a short text, a small transformer, loss on the rest."""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import fsmap

LENGTH, WIDTH = 32, 48
TEXT = Path(__file__).parents[2] / "LICENSE"  # any text


class LanguageModel(nn.Module):
    """One block of causal attention."""

    def __init__(self, characters):
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, tokens):
        h = self.embed(tokens) + self.place
        q, k, v = self.qkv(self.norms[0](h)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(self.norms[2](h + self.mlp(self.norms[1](h))))


def windows(text):
    """Sequences of LENGTH + 1 tokens that overlap by half."""
    return text.unfold(0, LENGTH + 1, LENGTH // 2)


def train(pieces, held_out, characters, nats, steps):
    torch.manual_seed(0)
    model = LanguageModel(characters)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    px = fsmap.px.Empirical(pieces[:, :-1])  # p_X: sequences like those of the data
    lm = fsmap.LMAP(model, px, num_points=8, every=2)
    penalty = fsmap.LogTrace(nats * LENGTH)  # nats a character; a point is a sequence
    curve = []
    for step in range(steps):
        batch = pieces[torch.randint(len(pieces), (16,))]
        out, R = lm(batch[:, :-1])
        loss = LENGTH * F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten())
        loss = loss + penalty(R, every=2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            with torch.no_grad():
                out = model(held_out[:, :-1]).flatten(0, 1)
            curve.append((step + 1, fsmap.metrics.nll(out, held_out[:, 1:].flatten())))
    return curve


def main(steps=500):
    raw = TEXT.read_text()
    known = {c: i for i, c in enumerate(sorted(set(raw)))}
    text = torch.tensor([known[c] for c in raw])
    pieces, held_out = windows(text[:8_000]), windows(text[8_000:])
    figure, ax = plt.subplots(figsize=(5.5, 3.3), layout="constrained")
    found = {}
    for name, nats in {"plain": 0.0, "LogTrace(0.05)": 0.05}.items():
        curve = train(pieces, held_out, len(known), nats, steps)
        ax.plot(*zip(*curve, strict=True), label=name)
        found[name] = curve[-1][1]
    ax.set(xlabel="step", ylabel="held-out loss, nats a character")
    ax.legend()
    return figure, found


if __name__ == "__main__":
    main()[0].savefig("language_model.svg")
