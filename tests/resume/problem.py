"""A small training with everything random in it, all its safe points, and going on from one of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_async.trainer.checkpoint.resume import Resume
from lightning_async.trainer.data.samplers import resized
from lightning_async.trainer.namespace import pl

FEATURES = 4


def draw() -> torch.Tensor:
    """A sample's augmentation, from all three generators."""
    return torch.randn(FEATURES) + random.random() + float(np.random.rand())


class Sized(Dataset[torch.Tensor]):
    def __init__(self, length: int = 23) -> None:
        self.length = length
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, list):
            return torch.stack([self[i] for i in index])
        self.fetched.append(index)
        return draw() * 0.1 + index


class Endless(IterableDataset[torch.Tensor]):
    """Without a length: Lightning fetches one batch ahead. Each worker draws the order of its share."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        share = list(range(self.length))[info.id :: info.num_workers] if info is not None else list(range(self.length))
        random.shuffle(share)
        for index in share:
            yield draw() * 0.1 + index


class Saves(Endless):
    """Knows its position, as torchdata's datasets do."""

    def __init__(self, length: int = 23) -> None:
        super().__init__(length)
        self.at = 0
        self.fetched: list[int] = []

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        share = range(self.length)[worker::workers]
        while self.at < len(share):
            self.at += 1
            self.fetched.append(share[self.at - 1])
            yield draw() * 0.1 + share[self.at - 1]
        self.at = 0


class Net(pl.LightningModule):
    def __init__(self, adam: bool = False, manual: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 5), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
        )
        self.adam, self.manual = adam, manual
        self.automatic_optimization = not manual
        self.rows: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
        loss = torch.stack([(self.layers(t.reshape(-1, FEATURES)) ** 2).mean() for t in tensors]).sum()
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        seen = [round(float(t.sum()), 5) for t in tensors]
        self.rows.append(
            ("train", self.current_epoch, batch_idx, self.global_step, float(loss.detach()), seen, lr, self._random())
        )
        if self.manual:
            self.manual_backward(loss)
            if (batch_idx + 1) % self.manual == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()
                self.lr_schedulers().step()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = (self.layers(batch) ** 2).mean()
        if not self.trainer.sanity_checking:
            self.rows.append(("validate", self.current_epoch, batch_idx, self.global_step, float(loss), self._random()))

    def on_train_epoch_start(self) -> None:
        self.rows.append(("epoch", self.current_epoch, self._random()))

    def on_train_epoch_end(self) -> None:
        self.rows.append(("end of epoch", self.current_epoch, self._random()))

    def _random(self) -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def configure_optimizers(self) -> Any:
        parameters = self.parameters()
        optimizer: Any = torch.optim.Adam(parameters, 0.01) if self.adam else torch.optim.SGD(parameters, 0.01, 0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass
class Point:
    """A safe point: what would be in the file, and how many rows had been written."""

    where: str
    epoch: int
    batch: int
    rows: int
    state: dict[str, Any]
    checkpoint: dict[str, Any]
    others: list[dict[str, Any]] = field(default_factory=list)
    """The states of all ranks, where their number is another."""

    @property
    def name(self) -> str:
        return f"{self.where} {self.epoch}:{self.batch}"


class Follow(pl.Callback):
    """What the real callback does: installs, saves, hands over."""

    def __init__(self, start: Point | None = None, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self.start, self.wanted = start, wanted
        self.points: list[Point] = []
        self.problems: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.resume = Resume(trainer)
        self.undo = self.resume.install()
        self.resume.on_boundary = lambda: self._save(trainer)
        if self.start is not None and self.start.others:
            others = copy.deepcopy(self.start.others)
            self.resume.restore(resized(others, trainer.global_rank, trainer.world_size))
        else:
            self.resume.restore(copy.deepcopy(self.start.state) if self.start is not None else None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.problems = self.resume.problems()
        draw()  # a resume does so once more

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for undo in reversed(self.undo):
            undo()

    def _save(self, trainer: Any) -> None:
        epoch = trainer.fit_loop.epoch_loop
        point = Point(str(self.resume.where), trainer.current_epoch, epoch.batch_progress.current.ready, 0, {}, {})
        if self.wanted(point.name):
            rows = trainer.lightning_module.rows
            point.rows = len(rows)
            while point.where == "validation" and rows[point.rows - 1][0] == "validate":
                point.rows -= 1  # it validates from the beginning
            point.state = copy.deepcopy(self.resume.capture())
            point.checkpoint = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
            self.points.append(point)


@dataclass
class Training:
    """How to train."""

    loader: Callable[[], Any]
    module: Callable[[], Net] = Net
    validates: bool = True
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: Callable[[], Any] = lambda: "auto"
    seed: int = 1
    callbacks: Callable[[], list[Any]] = list

    def fit(self, folder: Path, start: Point | None = None, wanted: Callable[[str], bool] = lambda name: True) -> Any:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(self.seed if start is None else self.seed + 100)
        if start is not None:
            torch.save(start.checkpoint, folder / "point.ckpt")
            torch.save(start.state, folder / "state.pt")  # and loads as what it is: plain values and tensors
            start = replace(start, state=torch.load(folder / "state.pt", weights_only=True))
        follow, module = Follow(start, wanted), self.module()
        settings = {"max_epochs": 3, "num_sanity_val_steps": 0, "enable_progress_bar": False, **self.trainer}
        if not self.validates:
            settings["limit_val_batches"] = 0
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=self.strategy(), logger=False, enable_checkpointing=False, enable_model_summary=False,
            callbacks=[*self.callbacks(), follow], **settings,
        )  # fmt: skip
        loader = self.loader()
        validation = DataLoader(Sized(5), batch_size=3) if loader is not None else None  # else the module has both
        trainer.fit(module, loader, validation, ckpt_path=folder / "point.ckpt" if start is not None else None)
        weights = torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])
        module.rows.append(("weights", weights.tolist()))
        return module.rows, follow, loader


def goes_on(training: Training, folder: Path, names: list[str] | None = None) -> list[str]:
    """Train without interruption, then from every safe point (of these names): the rows that follow are the same."""
    rows, follow, _ = training.fit(folder, wanted=lambda name: names is None or name in names)
    assert names is None or {point.name for point in follow.points} == set(names)
    for point in follow.points:
        again, _, _ = training.fit(folder, point, wanted=lambda name: False)
        expected = rows[point.rows :]
        for index, (new, old) in enumerate(zip(again, expected, strict=False)):
            assert new == old, f"from {point.name}: row {index} of {len(expected)}\n{new}\n{old}"
        assert len(again) == len(expected), f"from {point.name}: {again[len(expected) :]} {expected[len(again) :]}"
    return [point.name for point in follow.points]
