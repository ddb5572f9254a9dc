"""Scenarios of optimizers whose settings are not, or do not stay, what servers can be told once, at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_async import ParameterServerStrategy, ServerOptions
from lightning_async.trainer.namespace import pl
from tests.parameter_server.test_server import until
from tests.strategies import problem
from tests.strategies.served import BATCHES, Adversaries, fit
from tests.strategies.workers import Net, loader, make_trainer, rank, scenario, shard


class Cycled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@scenario
def cycled_momentum() -> Any:
    return fit(ParameterServerStrategy("sync", min_replicas=2), module=Cycled())


class Shared(Adversaries):
    def configure_optimizers(self) -> Any:
        *_, last = self.net.children()
        return [torch.optim.SGD(self.parameters(), lr=0.05), torch.optim.SGD(last.parameters(), lr=0.02)]


@scenario
def one_parameter_in_two_optimizers() -> Any:
    return fit(ParameterServerStrategy("sync"), module=Shared())


class Unfreezes(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": list(pl_module.net[2].parameters())})


def first_layer(ps: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(ps)[:2], lr=0.05)


@scenario
def group_added_on_servers() -> Any:
    strategy = ParameterServerStrategy("sync", min_replicas=2)
    return fit(strategy, module=Net(optimizer=first_layer), callbacks=[Unfreezes()])


@scenario
def group_added_beside() -> Any:
    strategy = ParameterServerStrategy(update_on_server=False, min_replicas=2)
    return fit(strategy, module=Net(optimizer=first_layer), callbacks=[Unfreezes()])


class Resets(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].state.clear()


@scenario
def state_reset_on_servers() -> Any:
    return fit(ParameterServerStrategy("sync", min_replicas=2), callbacks=[Resets()])


def decaying(ps: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1)


def plain(ps: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ps, lr=0.05)


@scenario
def settings_of_a_checkpoint(folder: Path) -> Any:
    """The program that goes on says others: those of the checkpoint count, as in torch."""

    def part(optimizer: Any, epochs: int, checkpoint: Path | None) -> dict[str, Any]:
        net = Net(optimizer=optimizer)
        saves = pl.callbacks.ModelCheckpoint(dirpath=folder / f"{epochs}", filename="{epoch}", save_top_k=-1)
        trainer = make_trainer(
            ParameterServerStrategy("sync"), callbacks=[saves], max_epochs=epochs, enable_checkpointing=True
        )
        trainer.fit(net, loader(shard([BATCHES] * 2)), ckpt_path=checkpoint)
        return {"values": problem.flat(net)}

    part(decaying, 1, None)
    return part(plain, 2, folder / "1" / "epoch=0.ckpt")


def falling(ps: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ps, lr=0.01)


class Scheduled(Net):
    """A rate by which the place in its schedule is known; one rank's first batch lasts until the other has had all."""

    def __init__(self, folder: Path, waits: bool) -> None:
        super().__init__(optimizer=falling)
        self.folder, self.waits, self.places = folder, waits, [0]

    def configure_optimizers(self) -> Any:
        optimizer = falling(self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def place(self) -> int:
        return round(0.01 / self.trainer.optimizers[0].param_groups[0]["lr"]) - 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not batch_idx:
            self.places.clear()
        self.places.append(self.place())
        if self.waits and rank() == 1 and batch_idx == 0:
            until(lambda: (self.folder / "all had").exists(), 50)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if rank() == 0 and batch_idx == BATCHES - 1:
            (self.folder / "all had").touch()


@scenario
def one_schedule(folder: Path) -> Any:
    """An epoch, in which one rank is much slower, and another one from its checkpoint."""

    def part(epochs: int, checkpoint: Path | None) -> dict[str, Any]:
        net = Scheduled(folder, waits=checkpoint is None)
        saves = pl.callbacks.ModelCheckpoint(dirpath=folder / f"{epochs}", filename="{epoch}", save_top_k=-1)
        strategy = ParameterServerStrategy(staleness="none", num_servers=2, options=ServerOptions(bigarray_bound=10))
        trainer = make_trainer(strategy, callbacks=[saves], max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(net, loader(shard([BATCHES] * 2)), ckpt_path=checkpoint)
        told = {"places": net.places, "at_end": net.place(), "metrics": strategy.summary.metrics()}
        return told | {"shown": sorted(strategy.summary.shown()), "numel": len(problem.flat(net))}

    first, path = part(1, None), folder / "1" / "epoch=0.ckpt"
    again = part(2, path)
    return {"first": first, "again": again}


class Skips(pl.plugins.precision.Precision):
    """One rank's third step comes to nothing, as where gradients of fp16 overflow."""

    def __init__(self) -> None:
        self.steps = 0

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if (rank(), self.steps) == (0, 3):
            return closure()
        return super().optimizer_step(optimizer, model, closure, **kwargs)


@scenario
def a_step_by_hand_is_skipped() -> Any:
    """Each rank would wait for the other one's push of another optimizer."""
    return fit(ParameterServerStrategy("sync", min_replicas=2), module=Adversaries(), plugins=[Skips()])
