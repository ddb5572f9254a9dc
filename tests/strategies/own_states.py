"""Scenarios of what is a replica's own: taken, put back over another rank's, and nothing of it left at the end."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from lightning_async import AsyncAveragingStrategy, DeltaMean, EveryNSteps, PeerMemory, Synchronous, Warmup
from lightning_async.comm.serialization import flatten, unflatten
from lightning_async.trainer.checkpoint.checkpoint_state import TrainerState
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies import problem
from tests.strategies.workers import Net, loader, logged, make_trainer, rank, scenario, shard

MixedPrecision = pytorch("plugins").MixedPrecision


class Unfreezing(Net):
    """Has BatchNorm's buffers, and a layer that is unfrozen in a group of its own."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda ps: torch.optim.Adam(list(ps)[:6], lr=0.01, amsgrad=True))
        self.norm = nn.BatchNorm1d(problem.FEATURES)
        self.late = nn.Linear(1, 1).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1 + rank())
        x, y = batch
        return nn.functional.mse_loss(self.late(self.net(self.norm(x))), y)


class Takes(pl.Callback):
    """Takes what is its own in the first epoch, and puts that back in the second one, when there is more of it."""

    def __init__(self) -> None:
        self.own: Any = None
        self.told: dict[str, Any] = {}

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        (optimizer,) = trainer.optimizers
        if trainer.current_epoch == 1:
            optimizer.add_param_group({"params": list(pl_module.late.requires_grad_(True).parameters()), "lr": 0.5})
            optimizer.param_groups[0]["lr"] = 0.25

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (optimizer,) = trainer.optimizers
        if (trainer.current_epoch, batch_idx) == (0, 1):
            tree, tensors = flatten(TrainerState(trainer).capture_own())
            self.own = unflatten(tree, [tensor.clone() for tensor in tensors])
            self.draw = float(torch.rand(()))
            trainer.precision_plugin.scaler.update(8.0)  # as after many overflows
        if (trainer.current_epoch, batch_idx) == (1, 2):
            self._put_back(trainer, pl_module, optimizer)

    def _put_back(self, trainer: Any, module: Any, optimizer: Any) -> None:
        (mine,), names = self.own["optimizers"], {p: name for name, p in module.named_parameters()}
        of_another_shape = mine.pop("net.2.weight")
        mine["net.2.weight"] = {**of_another_shape, "exp_avg": torch.zeros(3)}
        late = {names[p]: s["exp_avg"].clone() for p, s in optimizer.state.items() if "late" in names[p]}
        kept = optimizer.state[module.net[2].weight]["exp_avg"].clone()
        done = TrainerState(trainer).restore_own(self.own)
        state = {names[p]: each for p, each in optimizer.state.items()}
        self.told = {
            "done": done,
            "own": all(
                torch.equal(state[n][k], v) for n, each in mine.items() for k, v in each.items() if "2.w" not in n
            ),
            "names": sorted(mine),
            "late": all(torch.equal(state[name]["exp_avg"], value) for name, value in late.items()) and len(late),
            "kept": torch.equal(state["net.2.weight"]["exp_avg"], kept),
            "lr": [group["lr"] for group in optimizer.param_groups],
            "buffers": torch.equal(module.norm.running_mean, self.own["buffers"]["norm.running_mean"]),
            "scale": trainer.precision_plugin.scaler.get_scale(),
            "draw": float(torch.rand(())) == self.draw,
        }


def strategy(**options: Any) -> AsyncAveragingStrategy:
    return AsyncAveragingStrategy(**{"rule": DeltaMean(), "schedule": EveryNSteps(3), "min_replicas": 1, **options})


def ours() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("lightning_async"))


@scenario
def put_back() -> Any:
    takes, half = Takes(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    trainer = make_trainer(strategy(buffers="keep"), callbacks=[takes], max_epochs=2, plugins=[half])
    trainer.fit(Unfreezing(), loader(shard((4, 4))))
    return takes.told


@scenario
def what_is_own() -> Any:
    """By how replicas train; of a warm-up, while it lasts and after."""
    told: dict[str, Any] = {}

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            told.setdefault(name, []).append(sorted(TrainerState(trainer).capture_own()))

    options: dict[str, dict[str, Any]] = {
        "asynchronous": {}, "buffers": {"buffers": "keep"}, "averaged": {"optimizer_state": "average"},
        "synchronous": {"schedule": Synchronous()}, "warm-up": {"schedule": Warmup(EveryNSteps(2), steps=2)},
    }  # fmt: skip
    for name in options:
        trainer = make_trainer(strategy(**options[name]), callbacks=[Looks()])
        module = Net()
        module.register_buffer("seen", torch.zeros(2))
        trainer.fit(module, loader(shard((4, 4))))
    return told


@scenario
def a_state_that_cannot_travel() -> Any:
    """Training goes on without copies, and says so once; one whose ranks cannot be lost says that there are none."""

    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "state": {0: {"odd": torch.zeros(3).to_sparse()}}}

    told = {}
    for name, net, min_replicas in (
        ("odd", Net(optimizer=lambda ps: Odd(ps, lr=0.1)), 1),
        ("needs all", Net(), 2),
    ):
        memory = PeerMemory(every_n_train_steps=1)
        with logged() as messages:
            trainer = make_trainer(strategy(min_replicas=min_replicas), callbacks=[memory])
            trainer.fit(net, loader(shard((4, 4))))
        of_memory = [m for m in messages if "kept" in m or "copies of its own state are sent" in m]
        told[name] = of_memory, trainer.global_step
    return told


@scenario
def nothing_is_left() -> Any:
    """Of fits, of one that fails, and of a validation; the second fit has its own. Comes last: ranks are lost."""
    before, memory, told = ours(), PeerMemory(every_n_train_steps=1), []

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            told.append([name for name in ours() if name not in before])
            if self.trainer.global_step == 6:
                raise ValueError("on purpose")
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(strategy(), callbacks=[memory], max_epochs=1)
    net = Fails()
    trainer.fit(net, loader(shard((3, 3))))
    left: list[Any] = [ours() == before and memory._now is not None and memory._now.keeper is None]
    trainer.validate(net, loader(shard((1, 1))), verbose=False)
    left.append(memory._now is None)
    trainer.fit_loop.max_epochs = 5
    try:
        trainer.fit(net, loader(shard((3, 3))))
    except Exception as error:
        left.append(type(error).__name__)
    left.append(ours() == before and not vars(trainer.strategy).get("teardown"))
    return {"left": left, "within": sorted({name for names in told for name in names if "k" in name})}
