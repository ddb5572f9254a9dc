"""peft: LoRA adapters in a small transformer, whose other parameters are frozen."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.projects.compared import STRATEGIES, TRAINER, Told, assert_as_good_as_ddp, marks, tell, watch

pytestmark = marks("peft", "transformers")


def sentences(number: int, seed: int) -> TensorDataset:
    """Return sequences of 12 tokens; the label says whether the first one is of the upper half of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (number, 12), generator=generator)
    return TensorDataset(tokens, (tokens[:, 0] >= 16).long())


def train(strategy: str) -> Told:
    peft = importlib.import_module("peft")
    transformers = importlib.import_module("transformers")
    pl = importlib.import_module("lightning.pytorch")
    importlib.import_module("lightning_async")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(
                vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
                initializer_range=0.2,
            )  # fmt: skip
            lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=["query", "value"])
            self.model = peft.get_peft_model(transformers.BertForSequenceClassification(config), lora)

        def loss(self, batch: Any) -> torch.Tensor:
            tokens, labels = batch
            return self.model(input_ids=tokens, labels=labels).loss

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 2e-3)

    pl.seed_everything(1)
    validation = sentences(256, 2)
    callback, seen = watch(lambda module: module.loss(validation.tensors), lambda batch: len(batch[0]))
    trainer = pl.Trainer(**TRAINER, strategy=strategy, callbacks=[callback], max_epochs=4)
    data = DataLoader(sentences(768, 1), 16, shuffle=True)
    trainer.fit(Module(), data, DataLoader(validation, 64))
    return tell(seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_learns_as_with_ddp(strategy: str, trainings: dict[str, Told]) -> None:
    assert_as_good_as_ddp(trainings, strategy)
