"""Windows of accumulation on two ranks, with unequal batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_async import (
    AdaptiveGradientAccumulation,
    AsyncGradientStrategy,
    EveryNSteps,
    ParameterServerStrategy,
    Synchronous,
    Warmup,
)
from lightning_async.algorithms import ByEpoch, ByStep, CommunicationShare, NoiseScale, Times
from lightning_async.callbacks.accumulation import TimesProbe
from lightning_async.data.partition import Partition, PartitionedSampler, Sequential, Weighted
from lightning_async.engine.shared_state import Vote
from lightning_async.trainer.namespace import pl
from tests.callbacks.problem import Line, values
from tests.callbacks.ranks import ddp
from tests.strategies.workers import PATIENT, make_trainer, rank, scenario, together

SIZES = [[4, 4, 4, 4, 4, 4, 4, 3], [4, 4, 4, 4, 4, 4, 4, 1]]
"""Of the batches of each rank."""


def rows(of: int, sizes: list[int] | None = None) -> list[Tensor]:
    """The batches of a rank."""
    sizes = sizes or SIZES[of]
    return list(torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(of)).split(sizes))


class Steps(pl.Callback):
    """The batches after which the optimizer has stepped."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.rates: list[float] = []
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.at.append(batch_idx)


def fit(
    strategy: Any, accumulation: AdaptiveGradientAccumulation, data: Sequence[Tensor] | None = None, epochs: int = 1
) -> Any:
    torch.manual_seed(0)
    module, steps = Line(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)), Steps()
    trainer: Any = pl.Trainer(
        strategy=strategy, callbacks=[accumulation, steps], accelerator="cpu", devices=2, max_epochs=epochs,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    loader: Any = DataLoader(rows(rank()) if data is None else data, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    summary = getattr(strategy, "summary", None)
    return {
        "values": values(module), "history": module.history, "steps": steps.at, "seen": accumulation.state_dict(),
        "rates": steps.rates,
        "rounds": None if summary is None else summary.rounds,
        "samples": None if summary is None else summary.samples,
    }  # fmt: skip


@scenario
def ddp_by_samples() -> Any:
    return fit(ddp(), AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=24, lr_scaling="linear"))


@scenario
def ddp_of_unequal_batches() -> Any:
    accumulation = AdaptiveGradientAccumulation(2, lr_scaling="linear")
    return fit(ddp(), accumulation, rows(rank(), [6, 6, 6, 3] if rank() == 0 else [2, 2, 2, 1]))


@scenario
def synchronous_by_samples() -> Any:
    strategy = together(schedule=Synchronous(), timeouts=PATIENT)
    return fit(strategy, AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=24))


def synchronous(accumulation: AdaptiveGradientAccumulation, **options: Any) -> Any:
    return fit(together(schedule=Synchronous(), timeouts=PATIENT, **options), accumulation)


@scenario
def synchronous_by_number() -> Any:
    """The last batches have 3 samples and 1."""
    return synchronous(AdaptiveGradientAccumulation(2, lr_scaling="linear"))


@scenario
def synchronous_by_count() -> Any:
    return synchronous(AdaptiveGradientAccumulation(2, lr_scaling="linear", count=tokens))


def tokens(batch: Tensor) -> Any:
    """What a batch counts."""
    return 2.0 + (batch[0, 0] > 0)


@scenario
def synchronous_first() -> Any:
    """Synchronous steps, in which replicas have equal rates, then steps of each one's own."""
    strategy = together(schedule=Warmup(EveryNSteps(100), steps=2), timeouts=PATIENT)
    return fit(strategy, AdaptiveGradientAccumulation(2, lr_scaling="linear"))


@scenario
def synchronous_by_noise() -> Any:
    """Rank 1 sees ten times the noise of rank 0."""
    policy = NoiseScale(minimum=16, maximum=64, every=1, decay=0.0)
    accumulation = AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=policy, lr_scaling="linear")
    data = [each * 10 ** rank() for each in rows(rank(), [4] * 16)]
    return fit(together(schedule=Synchronous(), timeouts=PATIENT), accumulation, data)


@scenario
def synchronous_by_communication() -> Any:
    """Rank 1 measures other times than rank 0."""
    strategy = together(schedule=Synchronous(), timeouts=PATIENT)
    return timed(lambda accumulation, data: fit(strategy, accumulation, data))


def timed(train: Any) -> Any:
    policy = CommunicationShare(every=1, maximum=4)
    accumulation = AdaptiveGradientAccumulation(policy, lr_scaling="linear")
    told = TimesProbe.end_period

    def measured(probe: Any, mean: Any) -> Any:
        return told(probe, mean) and {"times": Times(1.0, 0.4 if rank() else 0.25)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimesProbe, "end_period", measured)
        return train(accumulation, rows(rank(), [4] * 16))


def served(mode: str, accumulation: AdaptiveGradientAccumulation, **options: Any) -> Any:
    return fit(ParameterServerStrategy(mode, min_replicas=2, **options), accumulation)


@scenario
def served_by_samples() -> Any:
    return served("sync", AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=24))


@scenario
def served_by_schedule() -> Any:
    return served("sync", AdaptiveGradientAccumulation(ByStep({0: 3, 1: 2, 2: 1})))


@scenario
def served_apart() -> Any:
    """Each push is a step, with the rate of its own samples."""
    return served("async", AdaptiveGradientAccumulation(3, lr_scaling="linear"))


@scenario
def served_changes() -> Any:
    """The optimizers are the workers', each of which steps by itself."""
    return served("sync", AdaptiveGradientAccumulation(3, lr_scaling="linear"), update_on_server=False)


@scenario
def served_in_step_with_rates() -> Any:
    return served("sync", AdaptiveGradientAccumulation(2, lr_scaling="linear"))


@scenario
def served_at_first_with_rates() -> Any:
    return served("async", AdaptiveGradientAccumulation(2, lr_scaling="sqrt"), warmup_steps=2)


@scenario
def served_by_noise() -> Any:
    policy = NoiseScale(minimum=16, maximum=64)
    return served("sync", AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=policy))


def gathered(accumulation: AdaptiveGradientAccumulation, data: Any = None, epochs: int = 1, **options: Any) -> Any:
    return fit(AsyncGradientStrategy(min_replicas=2, timeouts=PATIENT, **options), accumulation, data, epochs)


@scenario
def gathered_by_samples() -> Any:
    accumulation = AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=24, lr_scaling="linear")
    return gathered(accumulation, delay=0)


@scenario
def gathered_by_schedule() -> Any:
    return gathered(AdaptiveGradientAccumulation(ByStep({0: 3, 1: 2, 2: 1}), lr_scaling="linear"), delay=0)


@scenario
def gathered_late() -> Any:
    """The second window begins before any step, too."""
    return gathered(AdaptiveGradientAccumulation(ByStep({0: 3, 1: 2, 2: 1}), lr_scaling="linear"))


@scenario
def gathered_by_count() -> Any:
    return gathered(AdaptiveGradientAccumulation(2, lr_scaling="linear", count=tokens))


@scenario
def gathered_by_unequal_samples() -> Any:
    """A window has 8 samples of each rank, or as few more as can be."""
    data = rows(rank(), [4, 2, 2, 4, 3, 3, 4, 4] if rank() else [4, 4, 4, 4, 2, 4, 2, 4])
    accumulation = AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=16)
    return gathered(accumulation, data, delay=0)


@scenario
def gathered_by_noise() -> Any:
    """Without delay, and with it."""
    told = []
    for delay in (0, 1):
        policy = NoiseScale(minimum=16, maximum=64, every=1, decay=0.0)
        accumulation = AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=policy, lr_scaling="linear")
        told.append(gathered(accumulation, rows(rank(), [4] * 24), delay=delay))
    return told


class Validated(pl.Callback):
    """The batches behind which this rank validates. At the end of its second one rank 0 has heard that rank 1, which is
    ahead, stands at a validation."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if rank() == 0 and batch_idx == 1:
            box = trainer.strategy.sync_points._box
            with box.changed:
                box.agreed |= Vote.VALIDATE

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.at.append(pl_module.steps)


class Evaluated(Line):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...


@scenario
def gathered_and_validated() -> Any:
    """Rank 0 is between two windows as it hears of it, and its own clock comes to it with the next batch."""
    accumulation = AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=16)
    strategy, validated = AsyncGradientStrategy(min_replicas=2, timeouts=PATIENT), Validated()
    trainer: Any = make_trainer(
        strategy, callbacks=[accumulation, validated], max_epochs=1, val_check_interval=3, use_distributed_sampler=False
    )
    data: Any = [DataLoader(rows(rank(), [4] * count), batch_size=None) for count in (8, 1)]  # type: ignore[arg-type]
    trainer.fit(Evaluated(), *data)
    return validated.at


@scenario
def gathered_by_communication() -> Any:
    """As `synchronous_by_communication`."""
    return timed(lambda accumulation, data: gathered(accumulation, data, delay=0))


@scenario
def gathered_in_two_epochs() -> Any:
    return gathered(AdaptiveGradientAccumulation(ByEpoch({0: 2, 1: 4})), epochs=2)


@scenario
def ddp_by_schedule() -> Any:
    return fit(ddp(), AdaptiveGradientAccumulation(ByStep({0: 3, 1: 2, 2: 1})))


@scenario
def ddp_by_noise() -> Any:
    policy = NoiseScale(minimum=8, maximum=64, every=1)
    return fit(ddp(), AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=policy))


@scenario
def ddp_by_communication() -> Any:
    return fit(ddp(), AdaptiveGradientAccumulation(CommunicationShare(every=1)))


@scenario
def asynchronous() -> Any:
    strategy = together(schedule=EveryNSteps(2), timeouts=PATIENT, overlap=False)
    return fit(strategy, AdaptiveGradientAccumulation(ByStep({0: 1, 1: 2, 2: 1})))


@scenario
def different_settings() -> Any:
    strategy = together(schedule=EveryNSteps(2), timeouts=PATIENT)
    return fit(strategy, AdaptiveGradientAccumulation(2 + rank()))


@scenario
def a_target_of_other_ranks() -> Any:
    return fit(ddp(), AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=12))


@scenario
def ddp_in_pieces() -> Any:
    return fit(ddp(), AdaptiveGradientAccumulation(2, split_on_oom=True))


class Noted(pl.Callback):
    """The samples that a rank has, by their first element."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen += batch[:, 0].int().tolist()


def parts(strategy: Any, partition: Partition, accumulation: AdaptiveGradientAccumulation) -> Any:
    """Train on a partition that is not told which rank this is; the sampler's words, too."""
    data = torch.arange(40.0).unsqueeze(1).expand(40, 4)
    steps, noted, sampler = Steps(), Noted(), PartitionedSampler(data, partition)
    trainer: Any = pl.Trainer(
        strategy=strategy, callbacks=[accumulation, steps, noted], accelerator="cpu", devices=2, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Line(optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-6)), DataLoader(data, 4, sampler=sampler))  # type: ignore[arg-type]
    return {"seen": noted.seen, "steps": steps.at}


@scenario
def ddp_has_parts() -> Any:
    return parts(ddp(), Sequential(), AdaptiveGradientAccumulation(3))


@scenario
def ddp_has_unequal_parts() -> Any:
    return parts(ddp(), Weighted({1: 3.0}), AdaptiveGradientAccumulation(3))


@scenario
def drifting_has_parts() -> Any:
    strategy = together(schedule=EveryNSteps(2), timeouts=PATIENT)
    return parts(strategy, Weighted({1: 3.0}), AdaptiveGradientAccumulation(3))
