"""torch-geometric: a graph network by its `LightningDataset`, whose batches are graphs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.projects.compared import STRATEGIES, TRAINER, Told, assert_as_good_as_ddp, marks, tell, watch

pytestmark = marks("torch_geometric")


def graphs(number: int, seed: int) -> list[Any]:
    """Return rings of 12 nodes; the target is how much neighbours have in common."""
    data = importlib.import_module("torch_geometric.data")
    generator = torch.Generator().manual_seed(seed)
    forth = torch.arange(12)
    edges = torch.stack([torch.cat([forth, (forth + 1) % 12]), torch.cat([(forth + 1) % 12, forth])])
    made = []
    for _ in range(number):
        x = torch.randn(12, 4, generator=generator)
        y = (x * x.roll(-1, 0)).sum(1).mean() + x[:, 0].mean()
        made.append(data.Data(x=x, edge_index=edges, y=y.reshape(1)))
    return made


def train(strategy: str) -> Told:
    geometric = importlib.import_module("torch_geometric.nn")
    loaders = importlib.import_module("torch_geometric.loader")
    lightning_data = importlib.import_module("torch_geometric.data.lightning")
    pl = importlib.import_module("lightning.pytorch")
    importlib.import_module("lightning_async")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first = geometric.GraphConv(4, 32)
            self.second = geometric.GraphConv(32, 32)
            self.last = torch.nn.Linear(32, 1)

        def loss(self, batch: Any) -> torch.Tensor:
            x = self.first(batch.x, batch.edge_index).relu()
            x = self.second(x, batch.edge_index).relu()
            x = self.last(geometric.global_mean_pool(x, batch.batch)).squeeze(1)
            return torch.nn.functional.mse_loss(x, batch.y)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=batch.num_graphs)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-3)

    pl.seed_everything(1)
    validation = graphs(128, 2)
    (whole,) = loaders.DataLoader(validation, batch_size=128)
    callback, seen = watch(lambda module: module.loss(whole), lambda batch: batch.num_graphs)
    trainer = pl.Trainer(**TRAINER, strategy=strategy, callbacks=[callback], max_epochs=10)
    data = lightning_data.LightningDataset(graphs(512, 1), validation, batch_size=16, pin_memory=False)
    trainer.fit(Module(), datamodule=data)
    return tell(seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_learns_as_with_ddp(strategy: str, trainings: dict[str, Told]) -> None:
    assert_as_good_as_ddp(trainings, strategy)
