"""Scenarios of what a module decides by itself: batches without a loss, gradients that are not finite, raw steps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from lightning_async import (
    AsyncGradientStrategy,
    EveryNSteps,
    Mean,
    ParameterServerStrategy,
    ServerOptions,
    Synchronous,
)
from lightning_async.strategies.session import UserCollectives
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies import problem
from tests.strategies.problem import adam, momentum
from tests.strategies.workers import (
    PATIENT,
    SCENARIOS,
    Net,
    fit,
    loader,
    logged,
    make_trainer,
    rank,
    scenario,
    shard,
    together,
)

BATCHES = 12
ALIKE = {"min_replicas": 2, "timeouts": PATIENT}


def in_step() -> Any:
    return together(schedule=Synchronous())


def windows(**options: Any) -> Any:
    return AsyncGradientStrategy(2, delay=0, **ALIKE, **options)


def servers(**options: Any) -> Any:
    return ParameterServerStrategy("sync", min_replicas=2, **options)


def scaling(init_scale: float) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)  # pyright: ignore
    return pytorch("plugins").MixedPrecision("16-mixed", "cpu", scaler)


def is_odd(batch_idx: int) -> bool:
    """Whether there is something about this batch, which rank 1 has."""
    return rank() == 1 and batch_idx % 3 == 1


class Without(Net):
    """Makes no loss of some batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"optimizer": momentum, **options})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if is_odd(batch_idx) else super().training_step(batch, batch_idx)


class NotFinite(Without):
    """Has a loss that is no number in their place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = problem.loss_of(self, batch)
        return loss * float("nan") if is_odd(batch_idx) else loss


def train(strategy: Any, module: Any, **options: Any) -> dict[str, Any]:
    with logged() as messages:
        told = fit(strategy, loader(shard((BATCHES, BATCHES))), module, **options)
    summary = strategy.summary
    metrics = {name.partition("/")[2]: value for name, value in summary.metrics().items()}
    return told | {
        "dropped": [summary.dropped_gradients, metrics["dropped_gradients"], "gradients dropped" in str(summary)],
        "warnings": sum("are not finite" in message for message in messages),
    }


@scenario
def none_in_step() -> Any:
    return train(in_step(), Without())


@scenario
def none_in_accumulation() -> Any:
    return train(in_step(), Without(), accumulate_grad_batches=2)


class BreaksOff(torch.autograd.Function):
    """A collective that a backward pass calls, and that breaks off because a rank has died."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("broken off")


class LosesPass(pl.LightningModule):
    """One weight, whose gradient in batch ``i`` is ``2 ** i``. Rank 1 loses the backward pass of one batch."""

    def __init__(self, lost: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.lost = lost

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.weight * batch[0].mean()
        return BreaksOff.apply(loss) if (rank(), batch_idx) == (1, self.lost) else loss  # pyright: ignore

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@scenario
def lost_passes() -> Any:
    """Eight batches of 1 to 8 samples, of which four are one step: the weight's way, and the samples of this rank."""
    data = loader([(torch.full((i + 1, 1), 2.0**i),) for i in range(8)])
    told: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UserCollectives, "lose_step", lambda self: True)
        for kind, schedule in (("in step", Synchronous()), ("alone", EveryNSteps(99))):
            for scales in (False, True):
                for lost in (1, 3, 4):
                    strategy = together(schedule=schedule)
                    plugins = [scaling(4.0)] if scales else []
                    trainer = make_trainer(strategy, plugins=plugins, accumulate_grad_batches=4, max_epochs=1)
                    module = LosesPass(lost)
                    weights: list[float] = []
                    module.on_train_batch_end = lambda *_, module=module, weights=weights: weights.append(  # pyright: ignore
                        float(module.weight.detach())
                    )
                    trainer.fit(module, data)
                    told[f"{kind} {lost} {scales}"] = [weights[3::4], strategy.summary.samples]
    return told


@scenario
def none_in_windows() -> Any:
    return train(windows(), Without())


@scenario
def none_on_servers() -> Any:
    return train(servers(), Without())


@scenario
def none_between_rounds() -> Any:
    return train(together(), Without())


@scenario
def none_with_a_scaler() -> Any:
    """The rank without a loss steps with the others' mean; its first batch has none."""

    class WithoutTheFirst(Without):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx + 1)

    return train(in_step(), WithoutTheFirst(), plugins=[scaling(64.0)])


@scenario
def none_as_they_come() -> Any:
    return train(ParameterServerStrategy(min_replicas=2), Without())


@scenario
def none_anywhere() -> Any:
    """No rank has a loss in batch 4."""

    class Never(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 4 else problem.loss_of(self, batch)

    made: Any = {"in step": in_step, "windows": lambda: AsyncGradientStrategy(1, delay=0, **ALIKE), "servers": servers}
    return {name: train(make(), Never(optimizer=momentum)) for name, make in made.items()}


@scenario
def nan_in_step() -> Any:
    return train(in_step(), NotFinite())


@scenario
def nan_in_step_by_hand() -> Any:
    class ByHand(NotFinite):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    return train(in_step(), ByHand())


@scenario
def nan_in_windows() -> Any:
    return train(windows(), NotFinite())


@scenario
def nan_in_compressed_windows() -> Any:
    return train(windows(compression="int8"), NotFinite())


@scenario
def nan_on_servers() -> Any:
    return train(servers(), NotFinite())


@scenario
def nan_on_servers_compressed() -> Any:
    return train(servers(compression="int8"), NotFinite())


@scenario
def nan_as_they_come() -> Any:
    return train(ParameterServerStrategy(min_replicas=2, overlap=True), NotFinite(optimizer=adam))


@scenario
def nan_in_changes() -> Any:
    """The worker has stepped with it: the change is dropped, and the servers' weights take its place."""
    strategy = ParameterServerStrategy(
        update_on_server=False, pull_every=3, min_replicas=2, options=ServerOptions(update_frequency=2)
    )
    return train(strategy, NotFinite(optimizer=adam))


@scenario
def overflow_with_a_scaler() -> Any:
    """The scaler's first scale is too large for fp16: it skips on all ranks, and finds one that is not."""

    class Large(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return problem.loss_of(self, batch) * (50.0 if rank() else 1.0)

    plugin = scaling(65536.0)
    told = train(in_step(), Large(optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-5)), plugins=[plugin])
    return told | {"scale": plugin.scaler.get_scale()}


class Raw(Net):
    """Steps its optimizer by itself, and copies it meanwhile."""

    def __init__(self, bound: bool = False) -> None:
        super().__init__(optimizer=momentum)
        self.automatic_optimization, self.bound = False, bound

    def configure_optimizers(self) -> Any:
        self.own = super().configure_optimizers()
        self.step = self.own.step
        return self.own

    def training_step(self, batch: Any, batch_idx: int) -> None:
        own = self.optimizers(use_pl_optimizer=False) if batch_idx % 2 else self.own
        own.zero_grad()  # pyright: ignore
        self.manual_backward(problem.loss_of(self, batch))
        self.step() if self.bound else own.step()  # pyright: ignore
        for copied in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
            assert isinstance(copied, torch.optim.SGD)


def raw(strategy: Any) -> Any:
    """Two epochs, of which ``max_steps`` ends the second one in its midst."""
    module = Raw()
    told = train(strategy, module, max_epochs=2, max_steps=BATCHES + BATCHES // 2)
    return told | {"left behind": "step" in vars(module.own) or bool(module.own._optimizer_step_pre_hooks)}


@scenario
def raw_in_step() -> Any:
    return raw(in_step())


@scenario
def raw_in_windows() -> Any:
    return raw(AsyncGradientStrategy(1, delay=0, **ALIKE))


@scenario
def raw_on_servers() -> Any:
    return raw(servers())


@scenario
def raw_between_rounds() -> Any:
    return raw(together())


@scenario
def raw_with_a_closure() -> Any:
    """`optimizer.step(closure)`, and what it returns."""

    class WithClosure(Raw):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> Any:
                self.own.zero_grad()
                loss = problem.loss_of(self, batch)
                self.manual_backward(loss)
                return loss

            assert float(self.own.step(closure)) > 0.0

    return train(in_step(), WithClosure(), max_epochs=2, max_steps=BATCHES + BATCHES // 2)


def refused(strategy: Any) -> Any:
    make_trainer(strategy).fit(Raw(bound=True), loader(shard((BATCHES, BATCHES))))


@scenario
def bound_in_step() -> Any:
    return refused(in_step())


@scenario
def bound_in_windows() -> Any:
    return refused(AsyncGradientStrategy(1, **ALIKE))


@scenario
def bound_on_servers() -> Any:
    return refused(servers())


class Sharp(torch.optim.Optimizer):
    """SAM as people write it: two methods of its own, and an optimizer inside; `step` with a closure does both."""

    def __init__(self, params: Any, rho: float = 0.5) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05)
        self.moves: list[torch.Tensor] = []

    @property
    def params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        gradients = [p.grad for p in self.params if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        self.moves = [gradient * (self.param_groups[0]["rho"] / norm) for gradient in gradients]
        torch._foreach_add_(self.params, self.moves)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        torch._foreach_sub_(self.params, self.moves)
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class Unseen(Net):
    """Steps in manual optimization by the two methods of `Sharp`."""

    def __init__(self) -> None:
        super().__init__(optimizer=Sharp)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(problem.loss_of(self, batch))
        optimizer.first_step()
        self.manual_backward(problem.loss_of(self, batch))
        optimizer.second_step()


def each_step() -> Any:
    return together(Mean(), EveryNSteps(1), overlap=False)


def workers() -> Any:
    return servers(update_on_server=False)


@scenario
def unseen_between_rounds() -> Any:
    return train(each_step(), Unseen(), max_epochs=2, max_steps=BATCHES + BATCHES // 2)


@scenario
def unseen_on_workers() -> Any:
    return train(workers(), Unseen(), max_epochs=2, max_steps=BATCHES + BATCHES // 2)


@scenario
def unseen_in_step() -> Any:
    return train(in_step(), Unseen(), max_epochs=2, max_steps=BATCHES + BATCHES // 2)


@scenario
def unseen_refused_in_windows() -> Any:
    return train(AsyncGradientStrategy(1, **ALIKE), Unseen())


@scenario
def unseen_refused_on_servers() -> Any:
    """Written by hand, because servers refuse another optimizer's class before."""

    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(problem.loss_of(self, batch))
            with torch.no_grad():
                for p in self.parameters():
                    p.sub_(0.05 * p.grad)  # pyright: ignore[reportOptionalOperand]

    return train(servers(), ByHand())


@scenario
def unseen_refused_when_automatic() -> Any:
    class Automatic(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            closure()
            optimizer.first_step()
            closure()
            optimizer.second_step()

    return train(each_step(), Automatic(optimizer=Sharp))


@scenario
def late_second_optimizer() -> Any:
    """One optimizer takes no step for long, while a weight of it is normalised, and parameters are predicted."""

    class Later(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.critic = False, problem.network(4)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (self.net, self.critic)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                self.critic[0].weight.clamp_(-1.0, 1.0)  # pyright: ignore
            number = int(batch_idx >= BATCHES // 2)
            optimizer: Any = self.optimizers()[number]  # pyright: ignore
            optimizer.zero_grad()
            self.manual_backward(problem.loss_of((self.net, self.critic)[number], batch))
            optimizer.step()

    made = {"windows": AsyncGradientStrategy(1, **ALIKE), "rounds": each_step(), "step": in_step()}
    return {name: train(strategy, Later())["global_step"] for name, strategy in made.items()}


class ClosureTwice(Net):
    """SAM by a closure that is called twice, in automatic optimization."""

    def __init__(self) -> None:
        super().__init__(optimizer=Sharp)


@scenario
def twice_between_rounds() -> Any:
    return train(each_step(), ClosureTwice())


@scenario
def sam_refused_in_windows() -> Any:
    return train(AsyncGradientStrategy(1, **ALIKE), ClosureTwice())


@scenario
def twice_refused_in_windows() -> Any:
    class Again(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            optimizer.step(closure)
            closure()

    return train(AsyncGradientStrategy(1, **ALIKE), Again())


@scenario
def twice_refused_by_hand() -> Any:
    class ByHand(ClosureTwice):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()

            def closure() -> None:
                optimizer.zero_grad()
                self.manual_backward(problem.loss_of(self, batch))

            optimizer.step(closure)

    return train(windows(), ByHand())


@scenario
def twice_moved_refused_by_hand() -> Any:
    """The first gradient is there before the step, which moves the parameters, and then calls its closure once."""

    class Once(Sharp):
        def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            if any(p.grad is not None for p in self.params):
                self.first_step()
            closure()
            self.second_step()

    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> None:
                self.manual_backward(problem.loss_of(self, batch))

            closure()
            self.optimizers().step(closure)  # pyright: ignore

        def configure_optimizers(self) -> Any:
            return Once(self.parameters())

    return train(windows(), ByHand())


class Stray(Net):
    """Trains a layer that is in a list, and so in no module."""

    def configure_optimizers(self) -> Any:
        self.losses = [torch.nn.Linear(2, 3)]
        return torch.optim.SGD([*self.parameters(), *self.losses[0].parameters()], lr=0.05)


@scenario
def stray_between_rounds() -> Any:
    return train(together(), Stray())


@scenario
def stray_in_windows() -> Any:
    return train(windows(), Stray())


@scenario
def stray_on_servers() -> Any:
    return train(servers(), Stray())


@scenario
def wide_in_step() -> Any:
    return train(in_step(), Net(), precision="64-true")


@scenario
def wide_in_windows() -> Any:
    """One layer of 64 bits among others."""

    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.wide = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.wide.float().sum()

    return train(AsyncGradientStrategy(1, **ALIKE), Mixed())


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: the parameters are the points of gradients in train mode, and the model in eval mode."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5, "beta": 0.9, "steps": 0})
        self.trains = True

    @property
    def group(self) -> Any:
        return self.param_groups[0]

    @torch.no_grad()
    def _switch(self, trains: bool, weight: float) -> None:
        if self.trains != trains:
            self.trains = trains
            for p, state in self.state.items():
                p.lerp_(state["z"], weight)

    def train(self) -> None:
        self._switch(True, 1 - self.group["beta"])

    def eval(self) -> None:
        self._switch(False, 1 - 1 / self.group["beta"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        assert self.trains
        self.group["steps"] += 1
        lr, beta, weight = self.group["lr"], self.group["beta"], 1 / self.group["steps"]
        for p in self.group["params"]:
            z = self.state[p].setdefault("z", p.clone())
            p.lerp_(z, weight).add_(p.grad, alpha=lr * (beta * (1 - weight) - 1))
            z.sub_(p.grad, alpha=lr)
        return loss


class Free(Net):
    """Is validated in its optimizer's eval mode."""

    def __init__(self) -> None:
        super().__init__(optimizer=ScheduleFree)

    def optimizer(self) -> Any:
        return self.trainer.strategy.optimizers[0]

    def on_validation_epoch_start(self) -> None:
        self.optimizer().eval()

    def on_validation_epoch_end(self) -> None:
        self.optimizer().train()

    def on_train_end(self) -> None:
        self.optimizer().eval()


def free(strategy: Any) -> Any:
    return train(strategy, Free(), val=loader(shard((2, 2))), max_epochs=2, num_sanity_val_steps=0)


@scenario
def free_in_step() -> Any:
    return free(in_step())


@scenario
def free_in_windows() -> Any:
    return free(AsyncGradientStrategy(1, delay=0, **ALIKE))


@scenario
def free_between_rounds() -> Any:
    return free(each_step())


@scenario
def free_on_workers() -> Any:
    return free(workers())


SHARP = tuple(
    name for name in SCENARIOS[__name__] if name.startswith(("unseen", "late", "twice", "sam", "stray", "wide", "free"))
)
RAW = tuple(name for name in SCENARIOS[__name__] if name.startswith(("raw", "bound")))
OTHERS = tuple(name for name in SCENARIOS[__name__] if name not in (*RAW, *SHARP))
