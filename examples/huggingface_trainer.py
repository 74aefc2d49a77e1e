"""L-MAP in the Hugging Face Trainer: a small transformer that tells which word comes more often.

Weights and texts are random, so nothing is downloaded. Plain training memorizes the noisy labels.
Prints the held-out accuracy and log loss without and with the term.
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import fsmap
from fsmap.integrations.transformers import LMAPTrainer

PADDING, FIRST, WORDS = 0, 1, 8


class Texts(Dataset):
    """Sequences of 4 to 12 words; the label says whether word 1 comes more often than word 2."""

    def __init__(self, n: int, seed: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(4, 13, (), generator=generator))
            words = torch.randint(FIRST, FIRST + WORDS, (length,), generator=generator).tolist()
            wrong = bool(torch.rand((), generator=generator) < noise)
            label = (words.count(1) > words.count(2)) != wrong
            self.items.append({"input_ids": words, "labels": int(label)})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def pad(items):
    """One batch; a tokenizer's DataCollatorWithPadding does the same."""
    longest = max(len(item["input_ids"]) for item in items)
    rows = [item["input_ids"] + [PADDING] * (longest - len(item["input_ids"])) for item in items]
    batch = {"input_ids": torch.tensor(rows)}
    batch["attention_mask"] = (batch["input_ids"] != PADDING).long()
    if "labels" in items[0]:
        batch["labels"] = torch.tensor([item["labels"] for item in items])
    return batch


def train(reg_strength: float, folder: str, epochs: int):
    """Fine-tune; ``reg_strength=0`` is exactly what the Trainer does without fsmap."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=FIRST + WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    model.accepts_loss_kwargs = False  # a mean over micro-batches; else transformers adds them up
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        learning_rate=3e-3,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = LMAPTrainer(
        model,
        arguments,
        data_collator=pad,
        train_dataset=Texts(96, seed=0, noise=0.15),
        reg_strength=reg_strength,  # new: λ ...
        px=Texts(500, seed=1),  # new: p_X, texts that need no labels
        num_points=16,  # new: texts of p_X in each micro-batch
        lmap={"every": 4},  # new: R on every fourth step, four times as strong
    )
    trainer.train()
    return trainer


def main(epochs: int = 40) -> dict[str, list[float]]:
    """Train without and with the term and compare on fresh texts."""
    test = Texts(1_000, seed=2)
    history = {}
    print("lambda   accuracy      NLL")
    with tempfile.TemporaryDirectory() as folder:
        for reg_strength in (0.0, 1e-3):
            trainer = train(reg_strength, folder, epochs)
            logits, labels = trainer.predict(test)[:2]
            logits, labels = torch.as_tensor(logits), torch.as_tensor(labels)
            accuracy = fsmap.metrics.accuracy(logits, labels)
            nll = fsmap.metrics.nll(logits, labels)
            print(f"{reg_strength:<8g} {accuracy:8.3f} {nll:8.3f}")
            rows = [row for row in trainer.state.log_history if "loss" in row]
            history = {
                "loss": [row["loss"] for row in rows],
                "R": [row["lmap_R"] for row in rows if "lmap_R" in row],
            }
    return history


if __name__ == "__main__":
    main()
