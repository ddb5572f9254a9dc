"""Scenarios of `ParameterServerStrategy` on two ranks, with real server processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_async import ParameterServerStrategy, ServerOptions
from lightning_async.membership.signing import SECRET
from lightning_async.parameter_server.client import ShardConnection
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.strategies.server_lifecycle import Servers
from lightning_async.trainer.namespace import pl, pytorch
from tests.cli.test_serve import SECRET_OF_JOB, free_ports, serving
from tests.strategies import problem
from tests.strategies.problem import adam, momentum
from tests.strategies.workers import Net, Pulls, Recorder, Some, loader, make_trainer, rank, scenario, shard

BATCHES = 12


def fit(
    strategy: Any, data: Any = None, optimizer: Any = momentum, module: Any = None, **options: Any
) -> dict[str, Any]:
    net, seen = module or Net(optimizer=optimizer), Recorder()
    validate = options.pop("validate", None)
    callbacks = [seen, *options.pop("callbacks", [])]
    trainer = make_trainer(strategy, callbacks=callbacks, **{"max_epochs": 2, **options})
    trainer.fit(net, loader(shard([BATCHES] * 2) if data is None else data), validate)
    return {
        "values": problem.flat(net),
        "step": trainer.global_step,
        "digest": problem.digest(net),
        "epochs": seen.epochs,
        "validations": seen.validations,
    }


def rows_of(strategy: ParameterServerStrategy) -> dict[str, str]:
    """What the summary tells of servers."""
    totals = strategy.summary.totals
    return {} if totals is None else totals.rows()


@scenario
def sync() -> Any:
    return fit(ParameterServerStrategy("sync"))


@scenario
def sync_batches_taken() -> Any:
    return fit(ParameterServerStrategy("sync"), problem.uneven(rank(), BATCHES), module=Pulls(optimizer=momentum))


@scenario
def sync_some_batches() -> Any:
    return fit(ParameterServerStrategy("sync"), problem.uneven(rank(), BATCHES), module=Some(optimizer=momentum))


class Scaled(pytorch("plugins").MixedPrecision):
    """Losses are scaled, and nothing is of less precision."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))  # pyright: ignore

    def forward_context(self) -> Any:
        return contextlib.nullcontext()


@scenario
def sync_scaled() -> Any:
    return fit(ParameterServerStrategy("sync"), plugins=[Scaled()])


@scenario
def sync_adam_two_servers() -> Any:
    return fit(
        ParameterServerStrategy("dist_sync", num_servers=2, options=ServerOptions(bigarray_bound=10)), optimizer=adam
    )


@scenario
def sync_uneven() -> Any:
    """One rank has fewer batches: the other goes on without it to the end of the epoch."""
    return fit(ParameterServerStrategy("sync"), shard([6, 12], [4, 8]))


@scenario
def asynchronous() -> Any:
    return fit(ParameterServerStrategy("async"), optimizer=adam, max_epochs=4)


@scenario
def overlapped() -> Any:
    """And how many gradients were said to be of what was pulled before the last pull."""
    ask, earlier = ShardConnection.ask, []

    def noted(line: ShardConnection, header: Any, size: int) -> None:
        last = line._spare  # pyright: ignore[reportPrivateUsage]
        ask(line, header, size)
        earlier.append(header["do"] == "push" and line._request[0]["of"] != last)  # pyright: ignore[reportPrivateUsage]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardConnection, "ask", noted)
        fitted = fit(ParameterServerStrategy("async", overlap=True), optimizer=adam, max_epochs=4)
    return {**fitted, "earlier": sum(earlier)}


@scenario
def bounded() -> Any:
    return fit(ParameterServerStrategy("ssp", max_staleness=1), shard([30, 30]))


@scenario
def changes() -> Any:
    """The optimizer is the worker's."""
    return fit(
        ParameterServerStrategy(update_on_server=False, options=ServerOptions(update_frequency=4)),
        optimizer=adam,
        max_epochs=4,
    )


class Adversaries(Net):
    """Two optimizers, stepped by hand; one of them has two groups, with another momentum each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
            self.manual_backward(problem.loss_of(self, batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return two_optimizers(self.net)


def two_optimizers(net: Any) -> list[torch.optim.Optimizer]:
    first, _, last = net
    groups = [{"params": [first.weight], "momentum": 0.9}, {"params": [first.bias], "lr": 0.02}]
    return [torch.optim.SGD(groups, lr=0.05), adam(last.parameters())]


@scenario
def two_by_hand() -> Any:
    return fit(ParameterServerStrategy("sync"), module=Adversaries())


class Apart(pl.LightningModule):
    """One parameter is stepped in each batch, one with the gradients of both, and one with those of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.each, self.both, self.second = (torch.nn.Parameter(torch.zeros(())) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        each, both, second = self.optimizers()  # pyright: ignore
        for optimizer in (each, second):
            optimizer.zero_grad()
        self.manual_backward((self.each + self.both + self.second) * (1 + rank()))
        for optimizer in (each, both, second) if batch_idx else (each,):
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=1.0) for p in (self.each, self.both, self.second)]


@scenario
def apart_by_hand() -> Any:
    """Of 6 and 2 samples, and of 2 and 6."""
    sizes = (2, 6) if rank() else (6, 2)
    return fit(ParameterServerStrategy("sync"), [torch.zeros(n, 1) for n in sizes], module=Apart(), max_epochs=1)


def goes_on(folder: Path, strategy: Any, epochs: int, checkpoint: Path | None = None, **options: Any) -> Any:
    """With a checkpoint after every epoch."""
    net = Net(optimizer=adam)
    saves = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(strategy, callbacks=[saves], max_epochs=epochs, enable_checkpointing=True, **options)
    trainer.fit(net, loader(options.get("data") or shard([BATCHES] * 2)), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "after.ckpt")
    return {"values": problem.flat(net), "step": trainer.global_step, "served": rows_of(strategy)}


@scenario
def resumed(folder: Path) -> Any:
    """Two epochs with two servers, and two more with one."""
    goes_on(folder, ParameterServerStrategy("sync", num_servers=2, options=ServerOptions(bigarray_bound=10)), 2)
    saved = folder / "epoch=1.ckpt"
    state = torch.load(saved, weights_only=True)["optimizer_states"][0]["state"]
    told = goes_on(folder / "more", ParameterServerStrategy("sync"), 4, saved)
    return told | {"steps": [float(each["step"]) for each in state.values()], "saved": str(saved)}


class Kills(pl.Callback):
    """Rank 0 kills the server beside it before some batches."""

    def __init__(self, batches: tuple[int, ...]) -> None:
        self.batches, self.killed = batches, []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        (server,) = trainer.strategy.servers.own if rank() == 0 else (None,)
        if server is not None and trainer.global_step in self.batches:
            self.killed.append(server.pid)
            os.kill(server.pid, signal.SIGKILL)


@scenario
def server_killed() -> Any:
    kills = Kills((3, 15))
    return fit(ParameterServerStrategy("sync"), optimizer=adam, callbacks=[kills]) | {"killed": len(set(kills.killed))}


class Stops(Kills):
    """The server stands still for a while."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        (server,) = trainer.strategy.servers.own if rank() == 0 else (None,)
        if server is not None and trainer.global_step in self.batches:
            self.killed.append(server.pid)
            os.kill(server.pid, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (server.pid, signal.SIGCONT)).start()


@scenario
def server_stopped() -> Any:
    stops = Stops((3, 15))
    return fit(ParameterServerStrategy("sync"), optimizer=adam, callbacks=[stops]) | {"killed": len(stops.killed)}


class Normed(Net):
    """With BatchNorm, a schedule by step and one by the loss, and what a user logs."""

    def __init__(self) -> None:
        super().__init__(network=lambda: torch.nn.Sequential(problem.network(), torch.nn.BatchNorm1d(1)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, sync_dist=True, batch_size=4)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@scenario
def as_users_do(folder: Path) -> Any:
    saves = pl.callbacks.ModelCheckpoint(dirpath=folder, monitor="val_loss", filename="best")
    often = pl.callbacks.ModelCheckpoint(dirpath=folder / "often", every_n_train_steps=5, save_top_k=-1)
    stops = pl.callbacks.EarlyStopping("val_loss", patience=50)
    average = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    told = fit(
        ParameterServerStrategy("async"), module=Normed(), callbacks=[saves, often, stops, average], max_epochs=4,
        validate=loader(problem.batches(5, 3)), accumulate_grad_batches=2, gradient_clip_val=0.5,
        precision="bf16-mixed", enable_checkpointing=True, val_check_interval=6,
    )  # fmt: skip
    files = sorted((folder / "often").glob("*.ckpt"))
    return told | {"saved": [states_of(path) for path in (folder / "best.ckpt", files[0])]}


def states_of(path: Path) -> list[Any]:
    """Of the optimizer: how many steps it has taken, for each parameter that it has a state of."""
    saved = torch.load(path, weights_only=True)
    return [float(each["step"]) for each in saved["optimizer_states"][0]["state"].values()]


@scenario
def finds_a_rate() -> Any:
    """Lightning's search trains, and goes back to where it was."""
    search = pl.callbacks.LearningRateFinder(num_training_steps=8, early_stop_threshold=None, update_attr=False)
    net = Net(optimizer=adam)
    net.lr = 0.01
    return fit("parameter_server", module=net, callbacks=[search], logger=False)


@scenario
def other_settings() -> Any:
    return fit(ParameterServerStrategy("sync" if rank() else "async"))


@scenario
def fails() -> Any:
    """One worker's step fails, while the other waits for its push."""
    module = Net()
    if rank() == 1:
        module.training_step = lambda batch, batch_idx: 1 / 0 if batch_idx == 4 else problem.loss_of(module, batch)
    return fit(ParameterServerStrategy("sync", min_replicas=2), module=module)


@scenario
def several_fits() -> Any:
    """Of one Trainer, with a validation and a test between them."""
    net, data = Net(optimizer=adam), loader(shard([BATCHES] * 2))
    trainer = make_trainer(ParameterServerStrategy("sync"), max_epochs=1)
    trainer.fit(net, data)
    trainer.validate(net, data, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, data)
    return {"values": problem.flat(net), "step": trainer.global_step}


@scenario
def on_their_own(folder: Path) -> Any:
    """Servers that are started by the command; this training has two, and goes back to the end of its first epoch."""
    where = folder / "where"
    with contextlib.ExitStack() as opened:
        if rank() == 0:
            options = ("--mode", "sync", "--num-workers", "2")
            _, told = opened.enter_context(serving(free_ports(), *options))
            (folder / "part").write_text(told)
            (folder / "part").rename(where)
        while not where.exists():
            time.sleep(0.05)
        os.environ[SECRET] = SECRET_OF_JOB
        opened.callback(os.environ.pop, SECRET)
        address = where.read_text()
        told = goes_on(
            folder / "first", ParameterServerStrategy("sync", options=ServerOptions(server_address=address)), 2
        )
        first = folder / "first" / "epoch=0.ckpt"
        again = goes_on(
            folder / "again", ParameterServerStrategy("sync", options=ServerOptions(server_address=address)), 2, first
        )
        with pytest.raises(ValueError, match="server 0 there has mode='sync', and this training has 'async'"):
            Servers.at(address, WorkerRules(staleness="auto"))
        with pytest.raises(ValueError, match=r"server 0 there waits for 2 workers before .* and 1 begin"):
            Servers.at(address, WorkerRules(mode="sync"))
        (folder / f"done {rank()}").touch()
        while rank() == 0 and not (folder / "done 1").exists():
            time.sleep(0.05)
        return told | {"again": again["values"]}
