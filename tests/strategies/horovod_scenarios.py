"""Synchronous training over Horovod: scenarios whose results are compared with training in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_async import (
    AdaptiveGradientAccumulation,
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    DeltaMean,
    HorovodStrategy,
)
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.own_steps import NotFinite, Without
from tests.strategies.problem import adam, momentum
from tests.strategies.workers import Net, loader, make_trainer, rank, scenario, shard


def fit(module: Any = None, data: Any = None, val: Any = None, strategy: Any = None, **options: Any) -> dict[str, Any]:
    """Train once; the Trainer's ``devices`` is what a user who forgets it would leave."""
    module = Net() if module is None else module
    data = loader(shard((12, 12))) if data is None else data
    ckpt_path = options.pop("ckpt_path", None)
    trainer = make_trainer(strategy or HorovodStrategy(), **{"devices": 1, **options})
    trainer.fit(module, data, val, ckpt_path=ckpt_path)
    return {
        "flat": problem.flat(module),
        "digest": problem.digest(module),
        "step": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "initialised": dist.is_initialized(),
    }


@scenario
def sgd() -> Any:
    return fit(max_epochs=2)


@scenario
def with_momentum() -> Any:
    return fit(Net(optimizer=momentum))


@scenario
def without_a_loss_on_one_rank() -> Any:
    return fit(Without())


@scenario
def not_finite_on_one_rank() -> Any:
    strategy = HorovodStrategy()
    return fit(NotFinite(), strategy=strategy) | {"dropped": strategy.dropped_gradients}


@scenario
def with_adam_in_many_buckets() -> Any:
    return fit(Net(optimizer=adam), strategy=HorovodStrategy(bucket_mb=1e-5))


@scenario
def accumulated_and_clipped() -> Any:
    data = loader(shard((10, 10)))
    return fit(Net(optimizer=momentum), data, accumulate_grad_batches=3, gradient_clip_val=0.2, max_epochs=2)


class Weighs(pl.Callback):
    """Weighs the last batch of an epoch as `fit_elastic` does, by this rank's share of its samples."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.weight = (8 / 6, 4 / 6)[rank()] if batch_idx == 8 else 1.0


@scenario
def windows_of_unequal_batches() -> Any:
    windows = [AdaptiveGradientAccumulation(base_batch_size=3, target_batch_size=18, count=lambda batch: len(batch[0]))]
    data = loader(shard((9, 9), (4, 2)))
    return fit(Net(optimizer=momentum), data, callbacks=[*windows, Weighs()], max_epochs=2)


class KeepsGradients(Net):
    """Zeroes gradients in place: they stay where the buckets are."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


@scenario
def gradients_zeroed_in_place() -> Any:
    return fit(KeepsGradients(optimizer=momentum), loader(shard((10, 10))), accumulate_grad_batches=3, max_epochs=2)


class Manual(Net):
    """The same training by hand, its backward pass in two halves."""

    def __init__(self) -> None:
        super().__init__(optimizer=momentum)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(problem.loss_of(self, batch) / 2)
        optimizer.step()


@scenario
def by_hand() -> Any:
    return fit(Manual())


class Bare(Manual):
    """By hand, and past Lightning: two backward passes that no strategy hears of."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            (problem.loss_of(self, batch) / 2).backward()
        optimizer.step()


@scenario
def by_bare_hands() -> Any:
    return fit(Bare())


@scenario
def by_bare_hands_in_many_buckets() -> Any:
    return fit(Bare(), strategy=HorovodStrategy(bucket_mb=1e-5))


class TwoPlayers(Net):
    """Two networks in turn, each with its optimizer, as adversaries train."""

    def __init__(self) -> None:
        super().__init__()
        self.other = problem.network()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [momentum(self.net.parameters()), momentum(self.other.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for player, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(problem.loss_of(player, batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class Unfreezing(pl.LightningModule):
    """Its first layer is frozen in its first epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        self.layers[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.layers[0].requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(torch.full((2, 4), 1.0 + self.trainer.global_rank)).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@scenario
def unfrozen_where_an_epoch_starts() -> Any:
    return fit(Unfreezing(), max_epochs=2)


class Normed(pl.LightningModule):
    """BatchNorm sees other batches on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.Sequential(self.norm, nn.Linear(4, 1))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(torch.randn(8, 4) + 10.0 * self.trainer.global_rank).square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.layers(torch.ones(2, 4)).sum().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@scenario
def validated_with_buffers() -> Any:
    module, val = Normed(), loader(shard((1, 1)))
    trainer = make_trainer(HorovodStrategy(), devices=1, max_epochs=2)
    trainer.fit(module, loader(shard((4, 4))), val)
    trainer.validate(module, val)
    return {"seen": module.seen, "mean": module.norm.running_mean.tolist()}  # pyright: ignore


@scenario
def two_players() -> Any:
    return fit(TwoPlayers())


class Branches(Net):
    """One part is used by rank 0 only, one by nobody, one is frozen. Weight decay would move what has a gradient."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05, weight_decay=0.1))
        self.mine, self.nobodys, self.frozen = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            for part in (self.mine, self.nobodys, self.frozen):
                part.weight.fill_(0.5)
                part.bias.fill_(0.25)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = problem.loss_of(self, batch)
        return loss + self.mine(torch.ones(1, 1)).sum() if rank() == 0 else loss


@scenario
def unused_parameters() -> Any:
    module = Branches()
    told = fit(module, loader(shard((1, 1))))
    return told | {
        "mine": [float(module.mine.weight), float(module.mine.bias)],
        "nobodys": [float(module.nobodys.weight), float(module.nobodys.bias)],
        "frozen": [float(module.frozen.weight), float(module.frozen.bias)],
    }


@scenario
def other_starts() -> Any:
    """Each rank builds another model: training begins with rank 0's."""
    module = Net()
    if rank() == 1:
        with torch.no_grad():
            for param in module.parameters():
                param.add_(1.0)
    return fit(module)


@scenario
def other_shapes() -> Any:
    return fit(Net(network=lambda: problem.network(8 + rank())))


@scenario
def survivors_over_horovod() -> Any:
    return fit(strategy=AsyncAveragingStrategy(rule=DeltaMean(), transport="horovod", min_replicas=1))


@scenario
def survivors_of_windows_over_horovod() -> Any:
    return fit(strategy=AsyncGradientStrategy(transport="horovod", min_replicas=1))


@scenario
def bf16_mixed() -> Any:
    return fit(precision="bf16-mixed")


@scenario
def bf16_true() -> Any:
    return fit(precision="bf16-true")


@scenario
def compressed() -> Any:
    return fit(strategy=HorovodStrategy(compression="fp16"))


@scenario
def adasum_without_mpi() -> Any:
    return fit(strategy=HorovodStrategy(reduction="adasum"))


class Measures(Net):
    """Logs in all the ways there are."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        me = float(self.global_rank + 1)
        self.log("mean", me, sync_dist=True)
        self.log("sum", me, sync_dist=True, reduce_fx="sum")
        self.mean.update(me, weight=self.global_rank + 1)
        self.log("metric", self.mean)


@scenario
def lightnings_collectives() -> Any:
    told: dict[str, Any] = {}

    class Ask(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            s, me = trainer.strategy, float(trainer.global_rank + 1)
            told["reduced"] = [float(s.reduce(torch.tensor(me), reduce_op=op)) for op in ("mean", "sum", "max")]
            told["all"] = [s.reduce_boolean_decision(me == 1.0), s.reduce_boolean_decision(me == 1.0, all=False)]
            told["broadcast"] = s.broadcast({"from": trainer.global_rank})
            told["gathered"] = pl_module.all_gather(torch.full((2,), me)).tolist()
            s.barrier("here")

    return fit(Measures(), val=loader(shard((2, 2))), callbacks=[Ask()]) | told


@scenario
def lightnings_sampler() -> Any:
    """Plain data and no sampler: each rank sees its half."""
    seen: list[float] = []

    class Sees(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch[1].view(-1).tolist())
            return super().training_step(batch, batch_idx)

    data = TensorDataset(torch.randn(20, problem.FEATURES), torch.arange(20.0).view(-1, 1))
    fit(Sees(), DataLoader(data, batch_size=5, shuffle=True), use_distributed_sampler=True)
    return seen


@scenario
def saved_and_resumed(folder: Path) -> Any:
    whole = fit(Net(optimizer=adam), max_epochs=4)
    first = Net(optimizer=adam)
    trainer = make_trainer(HorovodStrategy(), devices=1, max_epochs=2)
    trainer.fit(first, loader(shard((12, 12))))
    path = folder / "half.ckpt"
    trainer.save_checkpoint(path)
    rest = fit(Net(optimizer=adam), max_epochs=4, ckpt_path=path)
    return {"whole": whole["flat"], "rest": rest["flat"], "step": rest["step"]}


@scenario
def validated_and_tested() -> Any:
    module = Measures()
    trainer = make_trainer(HorovodStrategy(), devices=1)
    return [trainer.validate(module, loader(shard((2, 2))), verbose=False)[0] for _ in range(2)]
