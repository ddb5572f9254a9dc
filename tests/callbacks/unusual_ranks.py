"""Checkpoints of two ranks that drift, with states and moments of unusual kinds."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_async import DeltaMean, DiLoCo, DivergenceMonitor, EveryNSteps, Warmup
from lightning_async.algorithms import Latest
from lightning_async.algorithms.divergence import History
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.checkpoint.shards import load_own
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.engine.shared_state import Vote
from lightning_async.errors import PeerLost
from lightning_async.trainer.namespace import pl
from tests.callbacks.checkpoint_ranks import (
    BATCHES,
    EPOCHS,
    Interrupted,
    Noisy,
    Stands,
    data,
    goes_on,
    settled,
    train,
    until,
)
from tests.strategies import problem
from tests.strategies.workers import make_trainer, rank, scenario, together, until_it_has_arrived


class Mixed(Noisy):
    """Parameters of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
        self.finer = nn.Parameter(torch.ones(3, dtype=torch.float64) / 3)
        self.coarse = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.ones(3, 4).t())
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        x = self.second(self.first(batch[0])).square().mean() * self.scalar + (batch[0] @ self.turned).square().mean()
        more = (self.waves.abs() - batch[0].mean()).square().mean() + self.finer.square().sum().float()
        return loss + x + more + (self.coarse.float() * batch[0].mean()).square().mean() + self.empty.sum()


@scenario
def mixed(folder: Path) -> dict[str, Any]:
    return goes_on(folder, lambda: together(DiLoCo(), EveryNSteps(4)), Mixed)


@scenario
def mixed_standing_still(folder: Path) -> dict[str, Any]:
    return goes_on(folder, lambda: together(DeltaMean(), EveryNSteps(4), overlap=False), Mixed)


@scenario
def averaged_state(folder: Path) -> dict[str, Any]:
    strategy = lambda: together(DeltaMean(), EveryNSteps(4), optimizer_state="average")  # noqa: E731
    return goes_on(folder, strategy)


@scenario
def compressed(folder: Path) -> dict[str, Any]:
    return goes_on(folder, lambda: together(DiLoCo(), EveryNSteps(4), compression="int8"))


@scenario
def warmed_up(folder: Path) -> dict[str, Any]:
    strategy = lambda: together(DiLoCo(), Warmup(EveryNSteps(4), steps=10))  # noqa: E731
    return goes_on(folder, strategy, every_n_train_steps=2)


@scenario
def weights_averaged(folder: Path) -> dict[str, Any]:
    strategy = lambda: together(DiLoCo(), EveryNSteps(4))  # noqa: E731
    return goes_on(folder, strategy, Noisy, callbacks=lambda: [pl.callbacks.EMAWeightAveraging(decay=0.9)])


class Averages(pl.Callback):
    """What a rank's average over time was after each of its steps."""

    def __init__(self, average: Any) -> None:
        self.average, self.seen = average, dict[int, str]()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen[trainer.global_step] = problem.digest(self.average._average_model)


@scenario
def averages_of_each_rank(folder: Path) -> dict[str, Any]:
    """Rank 1 begins to average later, in the middle of the epoch in which training goes on.

    At the sync point at the end of that epoch each average weighs as many updates as were made of it since the one
    before, those by the training that was interrupted included.
    """
    recorders: list[Averages] = []

    def callbacks() -> list[Any]:
        average = pl.callbacks.EMAWeightAveraging(decay=0.9, update_starting_at_step=14 * rank())
        recorders.append(Averages(average))
        return [average, recorders[-1]]

    strategy = lambda: together(DeltaMean(), EveryNSteps(4), overlap=False)  # noqa: E731
    told = goes_on(folder, strategy, callbacks=callbacks)
    whole, _, rest = (each.seen for each in recorders)
    return told | {"averages": {step: whole[step] == seen for step, seen in rest.items()}, "at_16": whole[16]}


class Validated(Noisy):
    """Rank 1 takes the first step of an epoch when it has heard that rank 0 waits for it with a validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sync_points: Any = self.trainer.strategy.sync_points  # pyright: ignore[reportAttributeAccessIssue]
        if rank() == 1 and batch_idx == 0:
            until(lambda: Vote.VALIDATE in sync_points.agreed, "rank 0 asks for a validation")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@scenario
def saved_while_one_waits_for_a_validation(folder: Path) -> Any:
    """The places of all ranks in each save; it ends with the epoch in which one of rank 0's is a validation."""
    store, late = CheckpointStore(folder), time.monotonic() + 40.0

    def places() -> dict[int, list[Any]]:
        found = {}
        for entry in store.entries():
            assert entry.manifest is not None
            owns = [load_own(store, entry, each) for each in entry.manifest.ranks]
            found[entry.number] = [own and own["resume"] and own["resume"]["where"] for own in owns]
        return found

    class Ends(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen = rank() == 0 and (time.monotonic() > late or "validation" in [each[0] for each in places().values()])
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(seen, all=False)

    saved = FaultTolerantCheckpoint(folder, every_n_train_steps=1, keep=Latest(9999))
    trainer = make_trainer(
        together(DeltaMean(), EveryNSteps(1)), callbacks=[saved, Ends()], max_epochs=-1,
        enable_checkpointing=True, val_check_interval=BATCHES // 2,
    )  # fmt: skip
    trainer.fit(Validated(), data(), data(1))
    return places()


@scenario
def saves_go_on_after_a_rollback(folder: Path) -> Any:
    class Poisoned(Noisy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            until_it_has_arrived(self)  # what is to be saved is marked by rounds
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 40:
                with torch.no_grad():
                    self.net[0].weight.fill_(float("nan"))  # pyright: ignore

    monitor = DivergenceMonitor(remedies=["roll_back"], history=History(warmup=5))
    strategy = together(DeltaMean(), EveryNSteps(4))
    train(
        folder, strategy, monitor, module=Poisoned(), batches=50, every_n_train_steps=8, good_after=4, keep=Latest(99)
    )
    entries = [entry for entry in CheckpointStore(folder).entries() if entry.manifest]
    return {"rollbacks": monitor.rollbacks, "saves": [[e.number, e.step] for e in reversed(entries)]}


@scenario
def one_without_data(folder: Path) -> Any:
    x = torch.randn(4 * BATCHES * rank(), 4)
    batches = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4)

    def run() -> Noisy:
        module, strategy = Noisy(), together(DeltaMean(), EveryNSteps(3))
        saved = FaultTolerantCheckpoint(folder, every_n_train_steps=2)
        make_trainer(strategy, callbacks=[saved], max_epochs=EPOCHS, enable_checkpointing=True).fit(module, batches)
        return module

    module = run()
    entries = CheckpointStore(folder).entries()
    again = run()
    equal = problem.digest(module) == problem.digest(again)
    return {"saves": len(entries), "steps": len(module.losses), "again": len(again.losses), "equal": equal}


@scenario
def divided_state(folder: Path) -> None:
    class Divided(Noisy):
        def configure_optimizers(self) -> Any:
            with warnings.catch_warnings():  # the import uses what torch itself calls deprecated
                warnings.simplefilter("ignore", DeprecationWarning)
                from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)

    train(folder, "ddp", module=Divided())


def one_has_finished(folder: Path, batches: int) -> dict[str, Any]:
    """Rank 0 has taken its last step, and waits for rank 1, which goes on then, and ends after a save."""
    steps, store, waits = 2 * BATCHES, CheckpointStore(folder), folder / ".waits"

    def trained(*callbacks: Any) -> Noisy:
        module = Noisy()
        saves = FaultTolerantCheckpoint(folder, every_n_train_steps=3, busy="wait", save_on_exception=False)
        trainer = make_trainer(
            together(DiLoCo(), EveryNSteps(3)), callbacks=[saves, *callbacks],
            max_steps=steps, max_epochs=-1, enable_checkpointing=True,
        )  # fmt: skip
        trainer.fit(module, data(batches if rank() == 0 else BATCHES))
        return module

    def saved() -> bool:
        return any(entry.step >= (steps + BATCHES) // 2 for entry in store.entries()[:1])

    with contextlib.suppress(Interrupted, PeerLost):
        trained(*([Late(waits), Ends(steps, saved)] if rank() == 1 else [Stands(waits, steps)]))
    last = settled(folder)[0].step
    rest = trained()
    manifest = store.entries()[0].manifest
    return {
        "saved": last,
        "steps": len(rest.losses),
        "digest": problem.digest(rest),
        "reason": manifest.reason if manifest else None,
    }


class Late(pl.Callback):
    """Goes on in the second epoch when the other rank waits, and has each round done before its next step."""

    def __init__(self, waits: Path) -> None:
        self.waits = waits

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > BATCHES:
            until(self.waits.exists, "rank 0 has finished")
            until(lambda: trainer.strategy.averager.control.buckets.message is None, "the round is done")


class Ends(pl.Callback):
    """Interrupts this rank within one of the last steps, when it has saved: at times a later save is the first one."""

    def __init__(self, steps: int, saved: Callable[[], bool]) -> None:
        self.steps, self.saved = steps, saved

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        left = self.steps - trainer.global_step
        if left > 8:
            return
        late = time.monotonic() + (30.0 if left == 1 else 3.0)
        while not self.saved() and time.monotonic() < late:
            time.sleep(0.005)
        assert left > 1 or self.saved(), f"rank {rank()} waits in vain for a save"
        if self.saved():
            raise Interrupted


@scenario
def one_has_finished_its_steps(folder: Path) -> dict[str, Any]:
    return one_has_finished(folder, BATCHES)


@scenario
def one_has_finished_more_epochs(folder: Path) -> dict[str, Any]:
    """The ranks have unequal numbers of epochs, and meet at the end of training only."""
    return one_has_finished(folder, BATCHES // 2)
