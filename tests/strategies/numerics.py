"""Scenarios whose results are compared with training in one process, or with a reference in float64."""

from __future__ import annotations

from typing import Any

import torch

from lightning_async import EASGD, AsyncAveragingStrategy, DeltaMean, DiLoCo, EveryNSteps, Mean, Synchronous, Warmup
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.problem import adam, momentum
from tests.strategies.workers import PATIENT, Net, Pulls, Some, fit, loader, logged, make_trainer, rank, scenario, shard


def every_step(rule: Any, **options: Any) -> AsyncAveragingStrategy:
    return AsyncAveragingStrategy(
        rule, EveryNSteps(1), overlap=False, timeouts=PATIENT, **{"compression": "none", **options}
    )


@scenario
def delta_mean_every_step() -> Any:
    return fit(every_step(DeltaMean()), loader(shard((12, 12))), max_epochs=2)


@scenario
def mean_every_step() -> Any:
    return fit(every_step(Mean()), loader(shard((12, 12))), max_epochs=2)


@scenario
def mean_of_unequal_batches() -> Any:
    return fit(every_step(Mean()), loader(shard((12, 12), (3, 9))))


@scenario
def mean_of_batches_taken() -> Any:
    return fit(every_step(Mean()), loader(problem.uneven(rank(), 12)), Pulls(), max_epochs=2)


@scenario
def mean_with_accumulation() -> Any:
    return fit(every_step(Mean()), loader(shard((10, 10))), accumulate_grad_batches=3, max_epochs=2)


@scenario
def compressed() -> Any:
    local_sgd, data = DiLoCo(outer_lr=1.0, outer_momentum=0.0), loader(shard((12, 12)))
    return {
        name: fit(every_step(local_sgd, compression=name, part_mb=1e-4), data, max_epochs=2)
        for name in ("bf16", "fp8", "int8")
    }


@scenario
def synchronous() -> Any:
    return fit(AsyncAveragingStrategy(schedule=Synchronous()), loader(shard((12, 12))), Net(optimizer=momentum))


@scenario
def synchronous_adam() -> Any:
    return fit(AsyncAveragingStrategy(schedule=Synchronous()), loader(shard((12, 12))), Net(optimizer=adam))


def uneven_in_step(module: Net) -> Any:
    """Two epochs of synchronous steps, of batches of unequal size."""
    strategy, data = AsyncAveragingStrategy(schedule=Synchronous()), loader(problem.uneven(rank(), 12))
    return fit(strategy, data, module, max_epochs=2)


class ByHand(Net):
    """Steps with the gradients of two batches."""

    def __init__(self) -> None:
        super().__init__(optimizer=momentum)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(problem.loss_of(self, batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


@scenario
def synchronous_by_hand() -> Any:
    return uneven_in_step(ByHand())


@scenario
def synchronous_some_batches() -> Any:
    return uneven_in_step(Some(optimizer=momentum))


@scenario
def synchronous_batches_taken() -> Any:
    return uneven_in_step(Pulls(optimizer=momentum))


@scenario
def synchronous_clipped_and_accumulated() -> Any:
    return fit(
        AsyncAveragingStrategy(schedule=Synchronous()),
        loader(shard((10, 10), (3, 9))),
        Net(optimizer=momentum),
        accumulate_grad_batches=3,
        gradient_clip_val=0.2,
        max_epochs=2,
    )


@scenario
def diloco() -> Any:
    """Several times: whichever rank comes first, the numbers are the same."""
    told = []
    for _ in range(4):
        strategy = AsyncAveragingStrategy(
            DiLoCo(outer_lr=0.7, outer_momentum=0.9),
            EveryNSteps(4),
            overlap=False,
            timeouts=PATIENT,
            compression="none",
        )
        told.append(fit(strategy, loader(shard((12, 12), (3, 9))), max_epochs=2))
    return told[0] | {"same": [t["history"] == told[0]["history"] for t in told]}


@scenario
def warm_up() -> Any:
    strategy = AsyncAveragingStrategy(
        DiLoCo(0.7, 0.9), Warmup(EveryNSteps(4), steps=6), overlap=False, timeouts=PATIENT, compression="none"
    )
    return fit(strategy, loader(shard((14, 14), (3, 9))))


@scenario
def weighted_consensus(**options: Any) -> Any:
    """No round before the sync point: each replica goes its own way for an epoch."""
    strategy = AsyncAveragingStrategy(DeltaMean(), EveryNSteps(1000), **options)
    seen: list[list[float]] = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(problem.flat(pl_module))

    told = fit(strategy, loader(shard((10, 20), (3, 5))), callbacks=[Look()])
    return told | {"agreed": seen}


@scenario
def weighted_by_a_function() -> Any:
    return weighted_consensus(weighting=lambda batch: len(batch[0]) ** 2)


class ValidateAgain(pl.Callback):
    """A second validation right after the first, then a third."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for _ in range(2):
            first_loop_iter = trainer._logger_connector._first_loop_iter
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
            trainer._logger_connector._first_loop_iter = first_loop_iter


def _validate_again(rule: Any) -> Any:
    strategy = AsyncAveragingStrategy(rule, EveryNSteps(3), compression="none")
    return fit(
        strategy,
        loader(shard((13, 7), (3, 5))),
        Net(pause_s=(0.0, 0.004)),
        val=loader(shard((2, 2))),
        callbacks=[ValidateAgain()],
        max_epochs=2,
    )


@scenario
def validate_again_delta_mean() -> Any:
    return _validate_again(DeltaMean())


@scenario
def validate_again_diloco() -> Any:
    return _validate_again(DiLoCo())


@scenario
def validate_again_easgd() -> Any:
    return _validate_again(EASGD())


@scenario
def same_data_on_both_ranks() -> Any:
    """Averaging equal replicas changes nothing, so even Adam is the training of one process."""
    told = {}
    data = problem.batches(0, 12)
    for policy in ("keep", "average"):
        strategy = AsyncAveragingStrategy(
            rule=DeltaMean(), schedule=EveryNSteps(2), overlap=False, timeouts=PATIENT, optimizer_state=policy
        )
        told[policy] = fit(strategy, loader(data), Net(optimizer=adam))["flat"]
    return told


@scenario
def world_of_sums() -> Any:
    """Lightning's collectives at a sync point, against numbers."""
    told: dict[str, Any] = {}

    class Ask(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            s, me = trainer.strategy, float(trainer.global_rank + 1)
            told["mean"] = float(s.reduce(torch.tensor(me)))
            told["int_mean"] = float(s.reduce(torch.tensor(int(me)), reduce_op="mean"))
            told["sum"] = float(s.reduce(torch.tensor(me), reduce_op="sum"))
            told["max"] = float(s.reduce(torch.tensor(me), reduce_op="max"))
            told["all"] = [s.reduce_boolean_decision(me == 1.0), s.reduce_boolean_decision(me == 1.0, all=False)]
            told["broadcast"] = s.broadcast({"from": trainer.global_rank})
            told["gathered"] = pl_module.all_gather(torch.full((2,), me)).tolist()
            leaf = torch.tensor([me], requires_grad=True)
            rows = pl_module.all_gather(leaf, sync_grads=True)
            (rows * torch.tensor([[3.0], [5.0]])).sum().backward()
            told["grad"] = leaf.grad.tolist() if leaf.grad is not None else None

    with logged() as messages:
        fit(None, loader(shard((2, 2))), val=loader(shard((1, 1))), callbacks=[Ask()])
    return told | {"warnings": [m for m in messages if "two sync points, where" in m]}


@scenario
def two_trainers_in_one_process() -> Any:
    """One strategy object for two fits, and two strategies, one after the other."""
    strategy = every_step(Mean())
    told = [fit(strategy, loader(shard((3, 3))))["digest"]]
    module = Net()
    trainer = make_trainer(every_step(Mean()))
    trainer.fit(module, loader(shard((3, 3))))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(shard((3, 3))))
    return [*told, problem.digest(module), trainer.current_epoch]
