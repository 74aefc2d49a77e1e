"""Calibration of an image classifier: handwritten digits, one label in five drawn anew."""

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import fsmap


def data():
    """Images, labels with noise (for training and calibration), and true labels."""
    images, labels = load_digits(return_X_y=True)
    g = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(labels), generator=g)
    x = torch.tensor(images).float().reshape(-1, 1, 8, 8)[rows] / 16
    true = torch.tensor(labels).long()[rows]
    anew = torch.randint(0, 10, true.shape, generator=g)
    return x, torch.where(torch.rand(len(x), generator=g) < 0.2, anew, true), true


def train(x, y, nats, epochs):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    lm = fsmap.LMAP(model, x, num_points=50, every=2)  # p_X: the training images
    penalty = fsmap.LogTrace(nats)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(100):
            out, R = lm(x[rows])
            loss = F.cross_entropy(out, y[rows]) + penalty(R, every=2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def main(epochs=60):
    x, y, true = data()
    test = slice(1000, None)
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.5), sharey=True, layout="constrained")
    found = {}
    for ax, (name, nats) in zip(axes, {"plain": 0.0, "LogTrace(0.2)": 0.2}.items(), strict=True):
        logits = train(x[:1000], y[:1000], nats, epochs)(x[test]).detach()
        nll = fsmap.metrics.nll(logits, y[test])
        accuracy = fsmap.metrics.accuracy(logits, true[test])
        found[name] = {"nll": nll, "accuracy": accuracy}
        bins = fsmap.metrics.reliability(logits, y[test])
        left, hits = np.arange(10) / 10, np.nan_to_num(bins.accuracy)
        gap = np.nan_to_num(bins.confidence - bins.accuracy)
        ax.bar(left, hits, 0.1, align="edge", color="tab:blue", edgecolor="white")
        ax.bar(left, gap, 0.1, bottom=hits, align="edge", color="tab:red", alpha=0.4)
        ax.plot([0, 1], [0, 1], "--", color="0.4", lw=1)
        ax.set_title(f"{name}\nlog loss {nll:.2f}, {accuracy:.0%} of true labels", fontsize=10)
        ax.set_xlabel("confidence")
    axes[0].set_ylabel("accuracy")
    return figure, found


if __name__ == "__main__":
    main()[0].savefig("image_calibration.svg")
