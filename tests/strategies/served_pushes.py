"""Scenarios of how pushes and pulls travel, on two ranks with real server processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_async import ParameterServerStrategy, ServerOptions, TopK, TwoBit
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.problem import adam, momentum
from tests.strategies.served import BATCHES, Adversaries, Kills, fit
from tests.strategies.workers import Net, loader, make_trainer, rank, scenario, shard

WARMUP = 6


@scenario
def compressed_in_step() -> Any:
    """Its server is killed meanwhile."""
    kills = Kills((3, 15))
    told = fit(ParameterServerStrategy("sync", compression="int8"), callbacks=[kills])
    return told | {"killed": len(set(kills.killed))}


@scenario
def compressed_as_they_come() -> Any:
    """Two servers, while the next batch is computed."""
    strategy = ParameterServerStrategy(
        compression=TopK(0.2),
        overlap=True,
        num_servers=2,
        options=ServerOptions(bigarray_bound=10),
    )
    return fit(strategy, optimizer=adam, max_epochs=4)


@scenario
def compressed_changes() -> Any:
    strategy = ParameterServerStrategy(
        update_on_server=False, compression=TwoBit(0.02), options=ServerOptions(update_frequency=3)
    )
    return fit(strategy, optimizer=adam, max_epochs=4)


@scenario
def compressed_tables() -> Any:
    """Three of them, of two optimizers that are stepped by hand."""
    return fit(ParameterServerStrategy("ssp", compression="bf16"), module=Adversaries(), max_epochs=4)


@scenario
def goes_on_with_what_was_owed(folder: Path) -> Any:
    """Two epochs, a checkpoint, and two more."""

    def part(where: Path, epochs: int, checkpoint: Path | None) -> dict[str, Any]:
        net = Net(optimizer=momentum)
        saves = pl.callbacks.ModelCheckpoint(dirpath=where, filename="{epoch}", save_top_k=-1)
        strategy = ParameterServerStrategy("sync", compression="2bit")
        trainer = make_trainer(strategy, callbacks=[saves], max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(net, loader(shard([BATCHES] * 2)), ckpt_path=checkpoint)
        return {"values": problem.flat(net), "step": trainer.global_step}

    part(folder, 2, None)
    saved = torch.load(folder / "epoch=1.ckpt", weights_only=True)["lightning_async"]["replicas"]
    carried_residual = [
        sum(float(each.abs().sum()) for each in replica["gathered"]["carried_residual"].values()) for replica in saved
    ]
    return part(folder / "more", 4, folder / "epoch=1.ckpt") | {"carried_residual": carried_residual}


@scenario
def warmed_up() -> Any:
    """An epoch in step, and no more."""
    return fit(ParameterServerStrategy(warmup_steps=BATCHES, staleness="none"), max_epochs=1)


@scenario
def warmed_up_then_as_they_come() -> Any:
    strategy = ParameterServerStrategy(warmup_steps=WARMUP, overlap=True, pull_every=2)
    return fit(strategy, optimizer=adam, max_epochs=4)


class Halved(Net):
    """Parameters of half precision, and a rate at which a step is lost in them."""

    def __init__(self) -> None:
        super().__init__(network=lambda: problem.network().bfloat16(), optimizer=small)


def small(ps: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ps, lr=2e-4)


@scenario
def half_precision() -> Any:
    """The servers hold fp32: single steps are lost in no worker's bf16."""
    net = Halved()
    net.training_step = lambda batch, batch_idx: half_loss(net.net, batch)
    return fit(ParameterServerStrategy("sync"), module=net) | {"dtype": str(next(net.parameters()).dtype)}


def half_loss(network: nn.Module, batch: problem.Batch) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(network(x.bfloat16()).float(), y)


class Odd(nn.Module):
    """Parameters of unusual kinds."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.table = nn.Embedding(5, problem.FEATURES, sparse=True, _weight=torch.randn(5, 6, generator=draw))
        self.across = nn.Parameter(torch.randn(4, problem.FEATURES, generator=draw).t())
        self.twisted = nn.Parameter(torch.randn(4, dtype=torch.complex64, generator=draw))
        self.scale, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(4, generator=draw), requires_grad=False)
        self.tied, self.unused = self.across, nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x[:, 0] > 0).long())
        hidden = (x + rows) @ self.across + 0.1 * (x.square() @ self.tied)
        turned = (hidden * self.twisted).abs() * self.frozen
        return self.scale * turned.sum(1, keepdim=True) + self.none.sum()


class Sometimes(nn.Module):
    """A layer that rank 1 uses in every other batch, one that is frozen from the start, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = problem.network()
        with torch.random.fork_rng():
            torch.manual_seed(8)
            self.branch, self.frozen, self.unused = (nn.Linear(problem.FEATURES, 1) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor, uses_branch: bool | None = None) -> Tensor:
        self.calls += 1
        uses_branch = rank() == 1 and self.calls % 2 == 1 if uses_branch is None else uses_branch
        return self.inner(x) + self.frozen(x) + (self.branch(x) if uses_branch else 0.0)


def decaying_adam(ps: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1)


@scenario
def sometimes_used() -> Any:
    strategy = ParameterServerStrategy("sync", num_servers=2, options=ServerOptions(bigarray_bound=20))
    return fit(strategy, module=Net(network=Sometimes, optimizer=decaying_adam))


def plain_sgd(ps: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.01)


@scenario
def odd_parameters() -> Any:
    strategy = ParameterServerStrategy("sync", num_servers=2, options=ServerOptions(bigarray_bound=20))
    return fit(strategy, module=Net(network=Odd, optimizer=plain_sgd))


@scenario
def odd_parameters_compressed() -> Any:
    module = Net(network=Odd, optimizer=plain_sgd)
    return fit(ParameterServerStrategy("sync", num_servers=2, compression="fp8"), module=module)


@scenario
def too_wide() -> Any:
    return fit(ParameterServerStrategy(), module=Net(network=lambda: problem.network().double()))


@scenario
def others_compression() -> Any:
    return fit(ParameterServerStrategy(compression="2bit" if rank() else "none"))
