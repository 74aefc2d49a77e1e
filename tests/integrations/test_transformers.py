"""The Hugging Face Trainer with λR: scale under accumulation, evaluation, resume, padding."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    Trainer,
    TrainingArguments,
)

import fsmap
from fsmap.errors import InputError
from fsmap.integrations.transformers import Collated, LMAPTrainer, LMAPTrainerMixin

pytestmark = pytest.mark.usefixtures("seeded")

LAM = 0.01


class Texts(Dataset):
    """Token sequences of different lengths; the label says whether 5 comes more often than 6."""

    def __init__(self, n: int = 16) -> None:
        generator = torch.Generator().manual_seed(3)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(3, 9, (), generator=generator))
            ids = torch.randint(4, 9, (length,), generator=generator).tolist()
            self.items.append({"input_ids": ids, "labels": int(ids.count(5) > ids.count(6))})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def pad(items, length=None):
    length = length or max(len(item["input_ids"]) for item in items)
    padded = [item["input_ids"] + [0] * (length - len(item["input_ids"])) for item in items]
    masks = [[1] * len(i["input_ids"]) + [0] * (length - len(i["input_ids"])) for i in items]
    batch = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(masks)}
    if "labels" in items[0]:
        batch["labels"] = torch.tensor([item["labels"] for item in items])
    return batch


def bert(cls=BertForSequenceClassification, dropout=0.0, **options):
    config = BertConfig(
        **{"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 16, "max_position_embeddings": 16, "num_labels": 2},
        **{"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, **options},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(config).to(torch.float64)


def everything(n, generator):
    """p_X whose every draw is the same points, so that micro-batches and one batch agree."""
    batch = pad(Texts(6).items)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def trainer(
    folder, model, *, cls=LMAPTrainer, size=8, accumulate=1, epochs=2, lr=0.1, seen=None, **options
):
    def collate(items):
        if seen is not None:
            seen.append(items)
        return pad(items)

    arguments = TrainingArguments(
        str(folder),
        **{"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate},
        **{"num_train_epochs": epochs, "learning_rate": lr, "lr_scheduler_type": "constant"},
        **{"max_grad_norm": 0.0, "optim": "sgd", "use_cpu": True, "report_to": "none"},
        **{"disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "seed": 0},
        **options.pop("arguments", {}),
    )
    options.setdefault("train_dataset", Texts())
    return cls(model, arguments, data_collator=collate, **options)


def same(a, b, rtol=1e-9):
    a, b = dict(a.named_parameters()), dict(b.named_parameters())
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)


def plain_loop(seen, term):
    model = bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = fsmap.LaplacianPenalty(model, everything, num_points=6).attach(optimizer)
    for items in seen:
        loss = model(**pad(items)).loss + term(penalty())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


class Counting(BertForSequenceClassification):
    """A head that divides by the items of the whole step, as the Trainer expects it."""

    def forward(self, input_ids, attention_mask, labels=None, num_items_in_batch=None, **_):
        out = super().forward(input_ids, attention_mask)
        if labels is not None:
            items = len(labels) if num_items_in_batch is None else num_items_in_batch
            out.loss = F.cross_entropy(out.logits, labels, reduction="sum") / items
        return out


def mean_of_means():
    model = bert()
    model.accepts_loss_kwargs = False
    return model


@pytest.mark.parametrize(
    ("make", "inflated"),
    [(lambda: bert(Counting), 1), (mean_of_means, 1), (bert, 4)],
    ids=["items are counted", "mean of micro-batches", "items are ignored"],
)
def test_four_micro_batches_equal_one_batch_and_the_plain_loop(tmp_path, caplog, make, inflated):
    """In whichever way the loss is scaled; a loss that is a sum of four means takes R along."""
    options = {"reg_strength": LAM, "px": everything, "num_points": 6}
    seen: list[list[int]] = []
    whole = make()
    trainer(tmp_path, whole, seen=seen, **options).train()
    parts = make()
    run = trainer(tmp_path, parts, size=2, accumulate=4, lr=0.1 / inflated, **options)
    run.train()
    assert run.state.global_step == run.penalty.state_dict()["step"] == 4
    same(whole, parts)
    assert ("ignores it" in caplog.text) == (inflated > 1)
    same(whole, plain_loop(seen, lambda R: LAM * R))


def test_layers_that_are_held_in_eval_stay_there(tmp_path):
    run = trainer(tmp_path, bert().train(), accumulate=4, reg_strength=LAM)
    run.current_gradient_accumulation_steps = 4
    run.model.dropout.eval()
    run.compute_loss(run.model, pad(Texts(4).items), num_items_in_batch=torch.tensor(16))
    assert run.model.training
    assert not run.model.dropout.training


def test_what_is_logged_is_r_and_its_share(tmp_path):
    model = mean_of_means()
    options = {"reg_strength": LAM, "px": everything, "num_points": 6}
    run = trainer(tmp_path, model, size=2, accumulate=4, lmap={"every": 2}, **options)
    run.train()
    rows = [row for row in run.state.log_history if "loss" in row]
    assert ["lmap_R" in row for row in rows] == [True, False, True, False]
    R = fsmap.LaplacianPenalty(bert().train(), everything, num_points=6)().item()
    plain = rows[0]["loss"] - 2 * LAM * R  # every = 2: twice as strong on each second step
    assert rows[0]["lmap_R"] == pytest.approx(R, rel=1e-6)
    assert rows[0]["lmap_share"] == pytest.approx(LAM * R / plain, rel=1e-3)


def test_nats_equal_the_plain_loop_under_accumulation(tmp_path):
    options = {"px": everything, "num_points": 6}
    seen: list[list[int]] = []
    whole = mean_of_means()
    trainer(tmp_path, whole, seen=seen, reg_nats=0.1, **options).train()
    parts, trace = mean_of_means(), fsmap.LogTrace(0.1)
    run = trainer(tmp_path, parts, size=2, accumulate=4, reg_nats=trace, **options)
    run.train()
    same(whole, parts, rtol=1e-6)  # buffers are float32
    assert int(trace.steps) == 4
    plain = fsmap.LogTrace(0.1)
    same(whole, plain_loop(seen, plain), rtol=1e-6)
    last = [row for row in run.state.log_history if "loss" in row][-1]
    assert last["lmap_strength"] == pytest.approx(plain.reg_strength, rel=1e-5)
    value = plain.eval()(torch.tensor(last["lmap_R"])).item()
    assert last["lmap_share"] == pytest.approx(value / (last["loss"] - value), rel=1e-2)


@pytest.mark.parametrize("strength", [{"reg_nats": 0.1}, {"reg_strength": LAM}], ids=str)
def test_a_run_resumed_within_an_epoch_has_the_same_bits(tmp_path, strength):
    options = {"arguments": {"save_steps": 3}, "lmap": {"every": 2}, "size": 4, **strength}
    whole, again = bert(), bert()
    run, second = (trainer(tmp_path, model, **options) for model in (whole, again))
    run.args.save_strategy = "steps"
    run.train()  # two epochs of four steps
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert second.penalty.step == 8
    same(whole, again, rtol=0)
    if run.log_trace is not None:
        assert int(second.log_trace.steps) == 4
        state, other = run.log_trace.state_dict(), second.log_trace.state_dict()
        assert all(torch.equal(t, other[name]) for name, t in state.items())
        second.train()  # from step 0: the running mean starts anew
        assert int(second.log_trace.steps) == 4


WRONG = [{}, {"reg_strength": LAM, "reg_nats": 0.1}, {"reg_nats": -1.0}]
WRONG += [{"reg_nats": 0.1, "lmap": lmap} for lmap in (4, {"num_points": 3})]


@pytest.mark.parametrize("given", WRONG)
def test_wrong_options_are_refused(tmp_path, given):
    with pytest.raises(InputError, match="lmap" if "lmap" in given else "nats"):
        trainer(tmp_path, bert(), **given)


def test_evaluation_is_that_of_the_plain_trainer(tmp_path):
    model = bert(dropout=0.3)
    options = {"eval_dataset": Texts(8)}
    plain = trainer(tmp_path, copy.deepcopy(model), cls=Trainer, **options).evaluate()
    ours = trainer(tmp_path, model, reg_strength=LAM, **options)
    assert ours.evaluate()["eval_loss"] == plain["eval_loss"]
    assert torch.equal(
        torch.as_tensor(ours.predict(Texts(8)).predictions), model(**pad(Texts(8).items)).logits
    )
    assert ours.penalty.state_dict() == {"step": 0}
    assert not any("lmap_R" in row for row in ours.state.log_history)


@pytest.mark.parametrize("cls", [BertForSequenceClassification, BertForTokenClassification])
def test_padding_changes_nothing(cls):
    """For one output per token with weights that leave padded positions out."""
    model, options = bert(cls).train(), {}
    if cls is BertForTokenClassification:
        options = {"metric": fsmap.metric.Weights(lambda x: x["attention_mask"])}
    values = []
    for length in (8, 13):
        px = Collated(Texts(6), lambda items, length=length: pad(items, length))
        values.append(fsmap.LaplacianPenalty(model, px, num_points=6, **options)())
    assert values[0] > 0
    torch.testing.assert_close(*values)


def test_other_trainers_and_models_that_are_made_later(tmp_path):
    class Mine(LMAPTrainerMixin, Trainer):
        pass

    run = trainer(tmp_path, None, cls=Mine, reg_strength=0.0, model_init=lambda: bert(), epochs=1)
    run.train()
    assert run.penalty.regularizer.module is run.model
    assert run.penalty.state_dict() == {"step": 2}


def test_points_are_drawn_from_the_training_set_or_what_is_given(tmp_path):
    run = trainer(tmp_path, bert(), reg_strength=LAM)
    x = run.penalty.regularizer.options.px.sample(5, torch.Generator().manual_seed(0))
    assert set(x) == {"input_ids", "attention_mask"}
    assert len(x["input_ids"]) == 5
    points = everything(6, None)
    run = trainer(tmp_path, bert(), reg_strength=LAM, px=points)
    assert torch.equal(run.penalty.regularizer.options.px.all()["input_ids"], points["input_ids"])


def test_what_cannot_be_drawn_from_is_refused(tmp_path):
    class Endless(IterableDataset):
        def __iter__(self):
            yield from Texts()

    with pytest.raises(InputError, match="train_dataset"):
        trainer(tmp_path, bert(), reg_strength=LAM, train_dataset=None)
    with pytest.raises(InputError, match="Endless"):
        trainer(tmp_path, bert(), reg_strength=LAM, px=Endless())
    with pytest.raises(InputError, match="dicts"):
        trainer(tmp_path, bert(), reg_strength=LAM, px=["hello"]).train()
    labels_only = Collated(Texts(), pad, columns={"labels", "tokens"}, labels=["labels"])
    labels_only.collate = lambda items: {"labels": torch.zeros(len(items))}
    with pytest.raises(
        InputError, match=r"\['input_ids', 'labels'\].*it takes \['labels', 'tokens'\]"
    ):
        labels_only.sample(2, torch.Generator())


def test_what_accelerate_returns_can_be_attached():
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    optimizer = Accelerator(cpu=True).prepare_optimizer(optimizer)
    lm = fsmap.LMAP(module, torch.ones(4, 2), num_points=2).attach(optimizer)
    penalty = fsmap.LogTrace().attach(optimizer)
    penalty(lm(torch.ones(4, 2))[1]).backward()
    optimizer.step()
    assert (lm.step, int(penalty.steps)) == (1, 1)
