"""Lightning's Trainer equals the plain loop: precision, accumulation, processes, resumed runs."""

from __future__ import annotations

import contextlib

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fsmap
from fsmap.errors import InputError
from fsmap.integrations.lightning import LMAPCallback, LMAPMixin

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.usefixtures("seeded"),
]

LAM = 0.05


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))


def data(n: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 2, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def term(model: nn.Module, **options) -> fsmap.LMAP:
    settings = {"num_points": 5, "batchnorm": "frozen", **options}
    return fsmap.LMAP(model, fsmap.px.Normal(shape=(2,)), **settings)


class Classifier(LMAPMixin, pl.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.reg_strength = LAM
        self.lm = term(network(), **options)
        self.logged = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        out, R = self.lm(x)
        return F.cross_entropy(out, y) + self.reg_strength * R

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_):
        self.logged.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})


def trainer(**options) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"enable_checkpointing": False, "max_epochs": 2, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(**quiet, **{**settings, **options})


def exactly(state: dict, wanted: dict) -> None:
    torch.testing.assert_close(dict(state), dict(wanted), rtol=0, atol=0)


def plain_loop(precision: str, accumulate: int, batch_size: int = 4, epochs: int = 2, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lm = term(model, **options).attach(optimizer)
    casting = precision == "bf16-mixed"
    history = []
    for _ in range(epochs):
        for index, (x, y) in enumerate(DataLoader(data(), batch_size)):
            cast = torch.autocast("cpu", torch.bfloat16) if casting else contextlib.nullcontext()
            with cast:
                out, R = lm(x)
                loss = (F.cross_entropy(out, y) + LAM * R) / accumulate
            loss.backward()
            history.append((R.item(), loss.item() * accumulate))
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model, history, lm.step


@pytest.mark.parametrize(
    ("precision", "accumulate", "every"),
    [("64-true", 1, 1), ("64-true", 3, 2), ("bf16-mixed", 1, 1), ("bf16-mixed", 3, 1)],
)
def test_the_trainer_equals_the_plain_loop(precision, accumulate, every):
    module = Classifier(every=every)
    fit = trainer(precision=precision, accumulate_grad_batches=accumulate)
    fit.fit(module, DataLoader(data(), 4))
    model, history, step = plain_loop(precision, accumulate, every=every)
    exactly(module.lm.module.state_dict(), model.state_dict())
    assert module.lm.step == step == 12 // accumulate
    assert len(module.logged) == len(history)
    for row, (R, loss) in zip(module.logged, history, strict=True):
        if R > 0:  # R and not every·R, λR, and its share of the rest of the loss
            assert row["lmap/R"] == pytest.approx(R / every, rel=1e-6)
            assert row["lmap/strength"] == pytest.approx(LAM)
            assert row["lmap/term"] == pytest.approx(LAM * R / every, rel=1e-6)
            assert row["lmap/share"] == pytest.approx(LAM * R / every / (loss - LAM * R), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch")
def test_a_fit_resumed_within_an_epoch_continues_the_draws(tmp_path):
    path = tmp_path / "four.ckpt"

    class Recording(Classifier):
        def training_step(self, batch, batch_idx):
            self.drawn.append((self.lm.step, self.lm.draw(batch[0]).probes))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            if self.trainer.global_step == 4 and not path.exists():  # of six in an epoch
                self.trainer.save_checkpoint(path)

    whole, second = Recording(), Recording()
    whole.drawn, second.drawn = [], []
    trainer().fit(whole, DataLoader(data(), 4))
    trainer().fit(second, DataLoader(data(), 4), ckpt_path=str(path))
    assert len(second.drawn) >= 6
    for (step, psi), (other, wanted) in zip(second.drawn, whole.drawn[4:], strict=False):
        assert step == other
        assert torch.equal(psi, wanted)


class InNats(Classifier):
    def __init__(self, **options):
        super().__init__(**options)
        self.penalty = fsmap.LogTrace(0.1)

    def training_step(self, batch, batch_idx):
        out, R = self.lm(batch[0])
        return F.cross_entropy(out, batch[1]) + self.penalty(R, every=self.lm.regularizer.every)


def test_nats_equal_the_plain_loop_and_go_on_from_a_checkpoint(tmp_path):
    options = {"accumulate_grad_batches": 3}
    module = InNats(every=2)
    trainer(**options).fit(module, DataLoader(data(), 4))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lm, penalty = term(model, every=2).attach(optimizer), fsmap.LogTrace(0.1).attach(optimizer)
    rows = iter(module.logged)
    for index, (x, y) in enumerate(batch for _ in range(2) for batch in DataLoader(data(), 4)):
        out, R = lm(x)
        value, fitted = penalty(R, every=2), F.cross_entropy(out, y)
        row = next(rows)
        if R > 0:
            assert row["lmap/R"] == pytest.approx(R.item() / 2, rel=1e-6)
            assert row["lmap/term"] == pytest.approx(value.item(), rel=1e-6)
            assert row["lmap/share"] == pytest.approx((value / fitted).item(), rel=1e-5)
        ((fitted + value) / 3).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        if R > 0 and index % 3 == 2:
            assert row["lmap/strength"] == pytest.approx(penalty.reg_strength, rel=1e-6)
    exactly(module.lm.module.state_dict(), model.state_dict())
    first = trainer(**options, max_epochs=1)
    first.fit(InNats(every=2), DataLoader(data(), 4))
    first.save_checkpoint(tmp_path / "one.ckpt")
    again = InNats(every=2)
    trainer(**options).fit(again, DataLoader(data(), 4), ckpt_path=str(tmp_path / "one.ckpt"))
    exactly(again.state_dict(), module.state_dict())
    trainer(**options).fit(again, DataLoader(data(), 4))  # another optimizer
    assert int(again.penalty.steps) == 4


def test_a_strength_given_to_the_pass_is_the_one_that_is_logged():
    class Given(Classifier):
        def training_step(self, batch, batch_idx):
            out, term = self.lm(batch[0], reg_strength=0.5)
            return F.cross_entropy(out, batch[1]) + term

    given, told = Given(), Classifier()
    told.reg_strength = 0.5
    for module in (given, told):
        trainer(max_epochs=1, callbacks=[LMAPCallback()]).fit(module, DataLoader(data(), 4))
    assert len(given.logged) == 6
    for row, other in zip(given.logged, told.logged, strict=True):
        for name in ("R", "share"):
            assert row[f"lmap/{name}"] == pytest.approx(other[f"lmap/{name}"], rel=1e-5)


def test_what_cannot_be_counted_is_refused():
    class Bare(Classifier):
        def on_fit_start(self):
            self.lm = self.lm.module

    class Other(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)

    with pytest.raises(InputError, match="LMAPMixin first"):
        type("Net", (pl.LightningModule, LMAPMixin), {})
    with pytest.raises(InputError, match="holds"):
        trainer().fit(Bare(), DataLoader(data(), 4))
    with pytest.raises(InputError, match="optimizers"):
        trainer().fit(Other(), DataLoader(data(), 4))
