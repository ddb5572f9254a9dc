"""Scenarios of Lightning's features on drifting replicas: optimizers, precisions, schedulers, buffers, loggers."""

from __future__ import annotations

import csv
import gc
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_async import (
    AsyncAveragingStrategy,
    DeltaMean,
    DiLoCo,
    EveryNSteps,
    Mean,
    Synchronous,
)
from lightning_async.engine.gradients.overlap import Overlap
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies import problem
from tests.strategies.test_optimizer_state import OPTIMIZERS
from tests.strategies.workers import (
    PATIENT,
    Net,
    Recorder,
    fit,
    loader,
    logged,
    make_trainer,
    rank,
    report,
    scenario,
    shard,
    together,
    until_it_has_arrived,
)  # fmt: skip


def every_step(**options: Any) -> AsyncAveragingStrategy:
    return together(Mean(), EveryNSteps(1), overlap=False, timeouts=PATIENT, **options)


# ---- manual optimization ----


class Gan(pl.LightningModule):
    """Two optimizers, and losses that both look at both networks; both are built before the first step.

    With ``overlapped``, rounds arrive between the two steps of a batch.
    """

    def __init__(self, raw: bool = False, toggled: bool = False, overlapped: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.overlapped = overlapped
        self.a, self.b = problem.network(), problem.network(4)
        self.raw, self.toggled = raw, toggled
        self.moved_by_others: list[float] = []

    def losses(self, batch: problem.Batch) -> tuple[Tensor, Tensor]:
        x, y = batch
        difference = self.a(x) - self.b(x)
        return (self.a(x) - y).square().mean() + difference.square().mean(), (
            self.b(x) + y - difference
        ).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt_a, opt_b = self.optimizers(use_pl_optimizer=not self.raw)  # pyright: ignore
        parts = ((opt_a, self.a, 0), (opt_b, self.b, 1))
        if self.toggled:
            for optimizer, _, which in parts:
                self.toggle_optimizer(optimizer)
                self.manual_backward(self.losses(batch)[which])
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
            return
        losses = self.losses(batch)
        grads = [torch.autograd.grad(losses[i], [*net.parameters()], retain_graph=True) for _, net, i in parts]
        before = [[p.detach().clone() for p in net.parameters()] for _, net, _ in parts]
        for optimizer in (opt_a, opt_b):
            optimizer.zero_grad()
        for i, loss in enumerate(losses):
            self.manual_backward(loss, retain_graph=i == 0, inputs=[*parts[i][1].parameters()])
        for optimizer, _, _ in parts:
            optimizer.step()
            if self.overlapped and optimizer is opt_a:
                until_it_has_arrived(self)
        # within a batch the parameters move by this rank's own steps only
        self.moved_by_others += [
            float((p.detach() - (old - 0.05 * g)).abs().max())
            for (_, net, i) in parts
            for p, old, g in zip(net.parameters(), before[i], grads[i], strict=True)
        ]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.a, self.b)]


def _gan(strategy: Any, numbers: tuple[int, int] = (8, 8), **options: Any) -> Any:
    module = Gan(**options)
    told = fit(strategy, loader(shard(numbers)), module)
    return told | {"moved_by_others": max(module.moved_by_others, default=0.0)}


@scenario
def gan() -> Any:
    return _gan(every_step())


class Plain(Net):
    """Manual optimization with `loss.backward()`; or, accumulated, with a step on the gradients of the batch before."""

    def __init__(self, accumulated: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulated = accumulated

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), problem.loss_of(self, batch)
        if not self.accumulated:
            loss.backward()
        elif batch_idx % 2 == 0:
            self.manual_backward(loss)
            return
        optimizer.step()
        optimizer.zero_grad()


@scenario
def plain_backward_synchronous() -> Any:
    return fit(together(schedule=Synchronous()), loader(shard((4, 4))), Plain())


@scenario
def accumulated_synchronous() -> Any:
    return fit(together(schedule=Synchronous()), loader(shard((4, 4))), Plain(accumulated=True))


class Caught(Net):
    """Manual optimization; rank 1's second backward pass fails half-way, and the batch is passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.failed = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), problem.loss_of(self, batch)
        optimizer.zero_grad()
        first = next(self.parameters())

        def fail(_: Tensor) -> None:
            raise ArithmeticError("this batch is odd")

        hook = first.register_hook(fail) if rank() == 1 and batch_idx == 1 else None
        try:
            self.manual_backward(loss)
        except ArithmeticError:
            self.failed += 1
            return
        finally:
            if hook is not None:
                hook.remove()
        optimizer.step()


class Halved(Net):
    """Halves each rank's own gradients, in a way that leaves no trace."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.data.mul_(0.5)


@scenario
def within_the_backward_pass() -> Any:
    """How often gradients left within it; and what becomes of those that a hook changes, or that fail."""
    begun: list[str] = []
    begin = Overlap.begin

    def counted(self: Overlap, *args: Any) -> None:
        begun.append(kind)
        begin(self, *args)

    told = {}
    Overlap.begin = counted  # type: ignore[method-assign]
    try:
        for kind, module in (("plain", Net()), ("halved", Halved()), ("caught", Caught())):
            numbers = (8, 9) if kind == "caught" else (8, 8)
            told[kind] = fit(together(schedule=Synchronous()), loader(shard(numbers)), module)
            told[kind] |= {"begun": begun.count(kind), "failed": getattr(module, "failed", 0)}
    finally:
        Overlap.begin = begin  # type: ignore[method-assign]
    return told


@scenario
def no_optimizer() -> Any:
    return fit(None, loader(shard((4, 4))), Net(optimizer=lambda ps: None))  # pyright: ignore[reportArgumentType]


@scenario
def gan_with_raw_optimizers() -> Any:
    return _gan(every_step(), raw=True)


@scenario
def gan_toggled() -> Any:
    return _gan(together(schedule=EveryNSteps(3)), numbers=(8, 14), toggled=True)


@scenario
def gan_overlapped() -> Any:
    return _gan(together(schedule=EveryNSteps(1)), numbers=(10, 15), overlapped=True)


@scenario
def gan_synchronous() -> Any:
    return _gan(together(schedule=Synchronous()))


@scenario
def gan_synchronous_raw() -> Any:
    return _gan(together(schedule=Synchronous()), raw=True)


# ---- precision ----


@scenario
def precisions() -> Any:
    double = [(x.double(), y.double()) for x, y in shard((8, 8))]
    return {
        "bf16-mixed mean": fit(every_step(), loader(shard((8, 8))), precision="bf16-mixed"),
        "bf16-mixed synchronous": fit(together(schedule=Synchronous()), loader(shard((8, 8))), precision="bf16-mixed"),
        "64-true mean": fit(every_step(), loader(double), precision="64-true"),
    }


class Climber(pl.LightningModule):
    """One bf16 weight at 1; rank 1 moves it by one unit in the last place each step, rank 0 not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.w.sum() * (-1.0 if rank() else 0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2.0**-7)


@scenario
def bf16_true() -> Any:
    data = [torch.zeros(1 if rank() else 15, 1) for _ in range(32)]
    return fit(every_step(), loader(data), Climber(), precision="bf16-true")


class Overflowing(Net):
    """The loss of rank 1's batches 2 and 5 is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if rank() == 1 and batch_idx in (2, 5) else loss


def _half(strategy: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # pyright: ignore[reportPrivateImportUsage]
    plugin = pytorch("plugins").MixedPrecision("16-mixed", "cpu", scaler)
    told = fit(strategy, loader(shard((10, 10))), Overflowing(), plugins=[plugin])
    return told | {"scale": scaler.get_scale()}


@scenario
def half_mixed() -> Any:
    return _half(together(schedule=EveryNSteps(2), overlap=False))


@scenario
def half_mixed_synchronous() -> Any:
    return _half(together(schedule=Synchronous()))


@scenario
def compiled() -> Any:
    module = Net()
    told = fit(every_step(), loader(shard((8, 8))), torch.compile(module, backend="aot_eager"))
    return told | {"flat": problem.flat(module)}


# ---- learning rates ----


class Scheduled(Net):
    def __init__(self, interval: str, plateau: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.interval, self.plateau = interval, plateau

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0 + rank(), sync_dist=True)  # never gets better

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if self.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def _scheduled(module: Scheduled, numbers: tuple[int, int], val: Any = None, **options: Any) -> Any:
    trainer = make_trainer(together(schedule=EveryNSteps(2), lr_clock=options.pop("lr_clock", "samples")), **options)
    rates: list[float] = []

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer.callbacks.append(Rates())
    trainer.fit(module, loader(shard(numbers)), val)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    return {"last_epoch": scheduler.last_epoch, "lr": trainer.optimizers[0].param_groups[0]["lr"], "rates": rates}


class InStep(Scheduled):
    """Rank 1 takes a step when rank 0 has taken four more, or all of its own; each rank says so in ``folder``."""

    def __init__(self, folder: Path) -> None:
        super().__init__("step")
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        other = 1 - rank()
        awaited = min(24, 4 * (batch_idx + 1)) if rank() else batch_idx // 4
        while awaited and not (self.folder / f"{other}.{awaited}").exists():  # until `LIMIT_S` at the latest
            time.sleep(0.001)
        if rank():
            until_it_has_arrived(self)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        (self.folder / f"{rank()}.{batch_idx + 1}").touch()


@scenario
def lr_clocks(folder: Path) -> Any:
    modules = {"samples": Scheduled("step"), "local": Scheduled("step"), "global": InStep(folder)}
    return {clock: _scheduled(module, (24, 24), lr_clock=clock) for clock, module in modules.items()}


@scenario
def lr_per_epoch() -> Any:
    return _scheduled(Scheduled("epoch"), (4, 9), max_epochs=3)


@scenario
def lr_on_plateau() -> Any:
    return _scheduled(Scheduled("epoch", plateau=True), (4, 9), val=loader(shard((1, 1))), max_epochs=3)


# ---- parameters and buffers ----


class Odd(Net):
    """An unused, a frozen, and a shared parameter, and one that only rank 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.full((3,), 0.3))
        self.frozen = nn.Parameter(torch.full((3,), 0.7), requires_grad=False)
        self.once = nn.Parameter(torch.ones(()))
        self.tied = nn.ModuleList([nn.Linear(problem.FEATURES, problem.FEATURES, bias=False) for _ in range(2)])
        self.tied[1].weight = self.tied[0].weight
        nn.init.eye_(self.tied[0].weight)  # pyright: ignore[reportArgumentType]
        self.without_gradient: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(self.tied[1](torch.tanh(self.tied[0](x))))
        return out * self.once if rank() else out

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.without_gradient.append(self.unused.grad is None and self.frozen.grad is None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, weight_decay=0.1)


@scenario
def odd_parameters() -> Any:
    told = {}
    for name, strategy in (("mean", every_step()), ("synchronous", together(schedule=Synchronous()))):
        module = Odd()
        told[name] = fit(strategy, loader(shard((6, 6))), module)
        told[name] |= {
            "unused": module.unused.tolist(),
            "frozen": module.frozen.tolist(),
            "once": module.once.item(),
            "tied": module.tied[0].weight is module.tied[1].weight,
            "without_gradient": all(module.without_gradient),
        }
    return told


@scenario
def buffers() -> Any:
    """No round before the only sync point."""
    told = {}
    for policy in ("average", "keep", "broadcast", "recompute"):
        module, local = Net(network=problem.normalised), []
        norm: Any = module.net[0]  # pyright: ignore[reportIndexIssue]

        class Local(pl.Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
                local.append(pl_module.net[0].running_mean.tolist())  # noqa: B023

        strategy = together(schedule=EveryNSteps(1000), buffers=policy)
        fit(strategy, loader(shard((5, 9), (3, 5))), module, callbacks=[Local()])
        told[policy] = {
            "mean": norm.running_mean.tolist(),
            "var": norm.running_var.tolist(),
            "tracked": norm.num_batches_tracked.item(),
            "local": local[-1],
            "training": norm.training,
            "digest": problem.digest(module),
        }
    return told


@scenario
def optimizer_states() -> Any:
    told = {}
    for policy in ("keep", "average", "reset"):
        module = Net(optimizer=lambda ps: torch.optim.Adam(ps, lr=0.01))
        sizes: list[int] = []

        class Sizes(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                sizes.append(len(trainer.optimizers[0].state))  # noqa: B023

        strategy = together(schedule=EveryNSteps(2), overlap=False, optimizer_state=policy)
        trainer = make_trainer(strategy, callbacks=[Sizes()])
        trainer.fit(module, loader(shard((6, 6))))
        states = list(trainer.optimizers[0].state.values())
        told[policy] = {
            "sizes": sizes,
            "exp_avg": [v for s in states for v in s["exp_avg"].flatten().tolist()],
            "step": [float(s["step"]) for s in states],
            "digest": problem.digest(module),
        }
    return told


@scenario
def optimizer_states_of_all_kinds() -> Any:
    """Rank 0 has no data: at the end it has the state of rank 1."""
    told = {}
    for name in ("Adafactor", "momentum", "NAdam", "Rprop"):
        module = Net(optimizer=OPTIMIZERS[name])
        strategy = together(schedule=EveryNSteps(2), overlap=False, optimizer_state="average")
        trainer = make_trainer(strategy)
        trainer.fit(module, loader(shard((0, 6))))
        states = [trainer.optimizers[0].state[p] for p in module.parameters()]
        told[name] = {
            key: [v for state in states if key in state for v in state[key].flatten().tolist()]
            for key in sorted({key for state in states for key in state})
        }
    return told


# ---- entry points and data ----


class Samples(pl.LightningModule):
    """Logs and returns what samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch[0].flatten().tolist()
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", batch[0].mean(), sync_dist=True, batch_size=len(batch[0]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 2.0 * batch[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def numbers(batch_size: int = 2) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(12.0).view(12, 1)), batch_size=batch_size)


@scenario
def evaluation() -> Any:
    """Before any fit, with one strategy object for all of it, then after a fit."""
    module = Samples()
    trainer = make_trainer("async_averaging", use_distributed_sampler=True)
    told: dict[str, Any] = {
        "validate": trainer.validate(module, numbers(), verbose=False),
        "test": trainer.test(module, numbers(), verbose=False),
        "predict": torch.cat(trainer.predict(module, numbers())).flatten().tolist(),
    }
    trainer.fit(module, numbers(), numbers())
    told["seen"] = sorted(module.seen)
    told["after"] = trainer.validate(module, numbers(), verbose=False)
    told["strategy"] = type(trainer.strategy).__name__
    return told


@scenario
def data_modules() -> Any:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return numbers()

    told = {}
    for sampler in (True, False):
        module = Samples()
        trainer = make_trainer(use_distributed_sampler=sampler, max_epochs=2)
        trainer.fit(module, datamodule=Data())
        told[str(sampler)] = sorted(module.seen)
    return told


class Stream(IterableDataset):
    """Rank 0 has five samples, rank 1 eleven; nobody knows before."""

    def __iter__(self) -> Any:
        for i in range(11 if rank() else 5):
            yield (torch.tensor([float(i)]),)


@scenario
def iterable() -> Any:
    module = Samples()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, DataLoader(Stream(), batch_size=2))
    return report(trainer, module) | {"seen": module.seen}


@scenario
def reloaded() -> Any:
    class Reloading(Net):
        def train_dataloader(self) -> Any:
            return loader(shard((3 + self.current_epoch, 5)))

    return fit(None, None, Reloading(), reload_dataloaders_every_n_epochs=1, max_epochs=3)


# ---- ways to end ----


@scenario
def fast_dev_run() -> Any:
    return fit(None, loader(shard((5, 9))), val=loader(shard((2, 2))), fast_dev_run=True)


@scenario
def max_steps() -> Any:
    return fit(None, loader(shard((4, 4))), max_steps=10, max_epochs=-1)


@scenario
def max_time() -> Any:
    started = time.monotonic()
    told = fit(
        together(schedule=EveryNSteps(4)),
        loader(shard((2, 2)) * 5000),
        Net(pause_s=(0.005, 0.02)),
        max_time={"seconds": 1},
        max_epochs=-1,
    )
    return told | {"seconds": time.monotonic() - started}


@scenario
def one_rank_stops() -> Any:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.should_stop or (rank() == 1 and batch_idx == 5)

    return fit(
        together(schedule=EveryNSteps(4)),
        loader(shard((2, 2)) * 2000),
        Net(pause_s=(0.002, 0.002)),
        callbacks=[Stop()],
    )


# ---- calls between sync points ----


@scenario
def calls_between_gates() -> Any:
    class Calls(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mine", float(rank()), on_step=True, sync_dist=True)
            self.trainer.strategy.barrier("mine")
            seen.append(float(self.trainer.strategy.reduce(torch.tensor(float(rank())))))
            return super().training_step(batch, batch_idx)

    seen: list[float] = []
    with logged() as messages:
        told = fit(None, loader(shard((5, 20))), Calls())
    return told | {"seen": seen, "warnings": [m for m in messages if "between two sync points" in m]}


@scenario
def gather_between_gates() -> Any:
    class Gathers(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.all_gather(torch.ones(2))
            return super().training_step(batch, batch_idx)

    return fit(None, loader(shard((5, 20))), Gathers())


# ---- telemetry ----


@scenario
def telemetry(folder: Path) -> Any:
    csv_logger = pytorch("loggers").CSVLogger(folder, name="run", version=0)
    recorder = Recorder()
    module = Net(rounds_arrive=True)
    trainer = make_trainer(
        together(schedule=EveryNSteps(2)), callbacks=[recorder], logger=csv_logger, log_every_n_steps=5
    )
    shown: set[str] = set()
    in_bar: set[str] = set()

    class Shown(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            shown.update(trainer.callback_metrics)
            in_bar.update(trainer.progress_bar_metrics)

    trainer.callbacks.append(Shown())
    with logged() as messages:
        trainer.fit(module, loader(shard((30, 30))), loader(shard((1, 1))))
    told = report(trainer, module) | {
        "summaries": [m for m in messages if m.startswith("Asynchronous averaging")],
        "shown": sorted(shown),
        "in_bar": sorted(in_bar),
    }
    if rank() == 0:
        with (folder / "run" / "version_0" / "metrics.csv").open() as file:
            told["rows"] = list(csv.DictReader(file))
    return told


@scenario
def memory() -> Any:
    """Tensors as large as the parameters, beyond parameters and gradients, at the end of every batch."""

    class Wide(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.zeros(50_000)) for _ in range(4)])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            time.sleep(0.002)
            return sum((p * batch[0][0, 0]).sum() for p in self.parts)  # pyright: ignore

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            storages = {}
            for thing in gc.get_objects():
                if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
                    storage = thing.untyped_storage()
                    if storage.nbytes() > 600_000:  # not the small steps of the arithmetic
                        storages[storage.data_ptr()] = storage.nbytes()
            peaks.append(sum(storages.values()) / (4 * 200_000))

    told = {}
    for name, rule in (("DeltaMean", DeltaMean()), ("DiLoCo", DiLoCo())):
        peaks: list[float] = []
        gc.collect()
        gc.freeze()  # what was there before need not be looked at
        fit(together(rule, EveryNSteps(2)), loader(shard((10, 10))), Wide(), callbacks=[Count()])
        told[name] = peaks
    return told
