"""L-MAP in Lightning: a LightningModule with two new lines, under bf16 and accumulated gradients.

Prints accuracy and log loss on fresh points without and with the term, and how large λR was beside
the loss at the end.
"""

import logging
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fsmap
from fsmap.integrations.lightning import LMAPMixin


class Classifier(LMAPMixin, pl.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self, reg_strength: float) -> None:
        super().__init__()
        self.reg_strength = reg_strength
        network = nn.Sequential(
            nn.Linear(2, 64),
            nn.BatchNorm1d(64),
            nn.GELU(),
            nn.Linear(64, 64),
            nn.GELU(),
            nn.Linear(64, 3),
        )
        px = fsmap.px.Normal(std=2.0, shape=(2,))  # evaluation points
        self.lm = fsmap.LMAP(network, px, num_points=64, batchnorm="frozen")  # new

    def forward(self, x):
        """The network alone."""
        return self.lm.module(x)

    def training_step(self, batch, batch_idx):
        """Loss + λR."""
        x, y = batch
        out, term = self.lm(x, reg_strength=self.reg_strength)  # new: λR comes with the output
        return F.cross_entropy(out, y) + term

    def configure_optimizers(self):
        """As ever."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def blobs(n: int, seed: int) -> TensorDataset:
    """Three overlapping clouds."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=generator)
    angle = 2 * torch.pi * y / 3
    center = torch.stack([angle.cos(), angle.sin()], 1)
    return TensorDataset(center + 0.7 * torch.randn(n, 2, generator=generator), y)


def main(epochs: int = 30) -> dict[str, float]:
    """Train without and with the term and compare."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*(LeafSpec|does not have many workers).*")  # its own
    test = blobs(4_000, seed=1)
    print("lambda   accuracy      NLL  share of the loss")
    for reg_strength in (0.0, 1e-4):
        torch.manual_seed(0)
        module = Classifier(reg_strength)
        trainer = pl.Trainer(
            accelerator="cpu",
            precision="bf16-mixed",
            accumulate_grad_batches=2,
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(blobs(192, seed=0), batch_size=32, shuffle=True))
        with torch.no_grad():
            logits = module.eval()(test.tensors[0])
        accuracy = float(fsmap.metrics.accuracy(logits, test.tensors[1]))
        nll = float(fsmap.metrics.nll(logits, test.tensors[1]))
        share = float(trainer.callback_metrics.get("lmap/share", 0.0))
        print(f"{reg_strength:<8g} {accuracy:8.3f} {nll:8.3f} {share:18.1%}")
    return {"accuracy": accuracy, "nll": nll, "share": share}


if __name__ == "__main__":
    main()
