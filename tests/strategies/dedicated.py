"""What ranks do of which the last ones serve."""

from __future__ import annotations

import os
import select
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_async import ParameterServerStrategy, ServerOptions
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.problem import adam, momentum
from tests.strategies.served import rows_of
from tests.strategies.workers import Net, Recorder, loader, make_trainer

BATCHES = 12


class Hears(pl.Callback):
    """Of exceptions."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        print("EXCEPTION", repr(exception), flush=True)


class Data(pl.LightningDataModule):
    """Says who asks for it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def prepare_data(self) -> None:
        self._note("prepare_data")

    def setup(self, stage: str) -> None:
        self._note("setup")

    def train_dataloader(self) -> Any:
        self._note("train_dataloader")
        assert self.trainer is not None
        return loader(problem.batches(self.trainer.global_rank, BATCHES))

    def val_dataloader(self) -> Any:
        return loader(problem.batches(5, 3))

    def _note(self, what: str) -> None:
        (self.folder / f"{what}.{os.environ.get('RANK')}").touch()


def fit(strategy: Any, data: Any, devices: int, optimizer: Any = adam, **options: Any) -> dict[str, Any]:
    net, seen = Net(optimizer=optimizer, pause_s=[0.0] * 4), Recorder()
    callbacks = [seen, Hears(), *options.pop("callbacks", [])]
    trainer = make_trainer(strategy, callbacks=callbacks, devices=devices, **{"max_epochs": 2, **options})
    trainer.fit(net, datamodule=data)
    told = {"values": problem.flat(net), "digest": problem.digest(net), "step": trainer.global_step}
    sampler = trainer.strategy.distributed_sampler_kwargs
    return told | {"world_size": trainer.world_size, "sampler": sampler, "validations": len(seen.validations)}


def trainings(folder: str) -> list[dict[str, Any]]:
    """Of one script: with one server, and with optimizers of the worker's own."""
    torch.set_num_threads(1)
    data = Data(Path(folder))
    first = fit(ParameterServerStrategy("sync", placement="dedicated"), data, 3)
    strategy = ParameterServerStrategy("async", placement="dedicated", update_on_server=False)
    return [first, fit(strategy, data, 3, momentum)]


def alone_with_a_server(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    strategy = ParameterServerStrategy("sync", placement="dedicated")
    return fit(strategy, Data(Path(folder)), 2)


class Kills(pl.Callback):
    """Rank 0 kills the process of rank 2 before a batch; its server goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 3:
            os.kill(int((self.folder / "pid.2").read_text()), signal.SIGKILL)


def server_rank_killed(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    Path(folder, f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
    strategy = ParameterServerStrategy("sync", placement="dedicated")
    return fit(strategy, Data(Path(folder)), 3, callbacks=[Kills(Path(folder))])


class KillsSupervisor(pl.Callback):
    """Rank 0 kills what holds the server's memory, and goes on when that has ended with its server."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 3:
            (supervisor,) = supervisors()
            (server,) = map(int, Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split())
            ended = os.pidfd_open(server)
            os.kill(supervisor, signal.SIGKILL)
            assert select.select([ended], [], [], 60)[0]  # it answers nobody from now on
            os.close(ended)


def supervises(command: Path) -> bool:
    """Whether that is the supervisor of a server, of this test's."""
    try:
        told, mine = command.read_bytes(), command.with_name("environ").read_bytes()
    except OSError:
        return False
    return b"supervises a server" in told and f"MASTER_PORT={os.environ['MASTER_PORT']}".encode() in mine


class KillsOneWithASnapshot(KillsSupervisor):
    """The same, once all that was acknowledged is in a snapshot."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 3:
            (worker,) = trainer.strategy._session.step_runner.tables.workers
            until = time.monotonic() + 60
            while (answer := worker.client.pull()).durable != answer.versions:
                assert time.monotonic() < until
                time.sleep(0.05)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)


def memory_comes_back(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    kept = Path(folder, "kept")
    strategy = ParameterServerStrategy(
        "sync", placement="dedicated", options=ServerOptions(snapshots=kept, snapshot_every=0.05)
    )
    told = fit(strategy, Data(Path(folder)), 3, callbacks=[KillsOneWithASnapshot()])
    return told | {"served": rows_of(strategy)}


def memory_lost(folder: str) -> str:
    torch.set_num_threads(1)
    strategy = ParameterServerStrategy("sync", placement="dedicated")
    try:
        fit(strategy, Data(Path(folder)), 3, callbacks=[KillsSupervisor()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was lost"


def supervisors() -> list[int]:
    return sorted(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if supervises(path))


class UntilAllTrain(pl.Callback):
    """The late one is told when the others train; two epochs after it has joined all end."""

    def __init__(self, folder: Path, all_: int) -> None:
        self.folder, self.all, self.epochs = folder, all_, 0
        self.sizes: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            (self.folder / "trains").touch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.sizes.append(trainer.world_size)
        self.epochs += trainer.world_size == self.all
        trainer.should_stop = self.epochs == 3


def comes_late(folder: str, dedicated: bool, wait_for_workers: Any, workers: int = 3) -> dict[str, Any]:
    """Rank 1 of the workers comes when the others train."""
    torch.set_num_threads(1)
    until = UntilAllTrain(Path(folder), workers)
    strategy = ParameterServerStrategy(
        "sync",
        placement="dedicated" if dedicated else "colocated",
        options=ServerOptions(wait_for_workers=wait_for_workers),
    )
    while os.environ["RANK"] == "1" and not (Path(folder) / "trains").exists():
        time.sleep(0.01)
    told = fit(strategy, Data(Path(folder)), workers + dedicated, callbacks=[until], max_epochs=1000)
    return told | {"sizes": until.sizes}


def begins_otherwise(folder: str, otherwise: str, placement: Any, waits: Any) -> dict[str, Any]:
    """One rank is told otherwise than the others: that all workers wait for all, and servers are beside them."""
    if os.environ["RANK"] == otherwise:
        placement = "colocated"
        waits = "all"
    strategy = ParameterServerStrategy(placement=placement, options=ServerOptions(wait_for_workers=waits))
    return fit(strategy, Data(Path(folder)), int(os.environ["WORLD_SIZE"]))


def never_comes(folder: str) -> dict[str, Any]:
    """Rank 1 of three workers is not started, and the others begin a little later."""
    torch.set_num_threads(1)
    if os.environ["RANK"] == "1":
        return {}
    strategy = ParameterServerStrategy("sync", options=ServerOptions(wait_for_workers=(2, timedelta(seconds=1))))
    return fit(strategy, Data(Path(folder)), 3)
