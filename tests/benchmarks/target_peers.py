"""Ways to average the language model that others have: torchft's and hivemind's, as callbacks of a training."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed import TCPStore

from tests.benchmarks import gradient_peers
from tests.benchmarks.fitting import Peer, claims_of, fit
from tests.benchmarks.language import SAMPLES, language
from tests.benchmarks.link import free_port
from tests.benchmarks.measured import Job, RankResult

__all__ = ["PEERS", "missing"]

EVERY = 32
"""Steps of a round."""
WAIT = timedelta(seconds=60)
NEEDS = {"target torchft": "torchft", "target hivemind": "hivemind"}


def missing(peer: str) -> str | None:
    """The package that a peer needs and that is not installed."""
    package = next((package for prefix, package in NEEDS.items() if peer.startswith(prefix)), None)
    return package if package is not None and importlib.util.find_spec(package) is None else None


class Others(pl.Callback):
    """Lets a rank find the others of a job through a store that rank 0 keeps."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.first = os.environ["MASTER_ADDR"]
        self.store = TCPStore(self.first, int(os.environ["MASTER_PORT"]), job.num_replicas, job.rank == 0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.first, 9))
            self.address = probe.getsockname()[0]

    def wait_for_all(self, what: str) -> None:
        """Until all ranks have come here."""
        self.store.set(f"{what} {self.job.rank}", "")
        self.store.wait([f"{what} {rank}" for rank in range(self.job.num_replicas)], WAIT)


class Torchft(Others):
    """Averages by one of torchft's context managers, around the optimizer.

    Args:
        job: of the rank.
        around: makes the context manager of a manager, a module and its optimizer.
    """

    def __init__(self, job: Job, around: Callable[..., AbstractContextManager[Any]]) -> None:
        from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
        from torchft._torchft import LighthouseServer  # pyright: ignore[reportMissingImports]

        super().__init__(job)
        self._around = around
        if job.rank == 0:
            self._lighthouse = LighthouseServer(
                bind="0.0.0.0:0", min_replicas=job.num_replicas, join_timeout_ms=100, quorum_tick_ms=20
            )
            # what it says of itself is the machine's name, which is nobody's in a network namespace
            self.store.set("lighthouse", f"http://{self.first}:{self._lighthouse.address().rpartition(':')[2]}")
        self._mine = TCPStore(self.address, 0, None, True, wait_for_workers=False)  # others connect to it
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=WAIT), load_state_dict=lambda _: None, state_dict=dict,
            min_replica_size=job.num_replicas, use_async_quorum=False, init_sync=False, rank=0, world_size=1,
            store_addr=self.address, store_port=self._mine.port, lighthouse_addr=self.store.get("lighthouse").decode(),
            replica_id=str(job.rank), hostname=self.address,
        )  # fmt: skip

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # entered only now, that the module's own hook is the first: the slot ends before a round
        self._averaging = self._around(self._manager, pl_module, trainer.optimizers[0])
        self._averaging.__enter__()
        self.wait_for_all("begin")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._averaging.__exit__(None, None, None)
        self.wait_for_all("end")
        self._manager.shutdown(wait=False)


class Hivemind(Others):
    """Averages the parameters in the background by ``hivemind.Optimizer``, with local updates."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        import hivemind  # pyright: ignore[reportMissingImports]

        known = [] if self.job.rank == 0 else self.store.get("dht").decode().split()
        self._dht = hivemind.DHT(
            host_maddrs=[f"/ip4/{self.address}/tcp/{free_port(self.address)}"], initial_peers=known, start=True
        )
        if self.job.rank == 0:
            self.store.set("dht", " ".join(str(each) for each in self._dht.get_visible_maddrs()))
        self._optimizer = hivemind.Optimizer(
            dht=self._dht, run_id="targets", batch_size_per_step=SAMPLES, optimizer=trainer.optimizers[0],
            target_batch_size=EVERY * SAMPLES * self.job.num_replicas, use_local_updates=True,
            # the defaults are for rounds of minutes
            matchmaking_time=1.0, averaging_timeout=20.0, averager_opts={"request_timeout": 0.5},
            tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.3},
        )  # fmt: skip
        trainer.strategy.optimizers = [self._optimizer]
        self.wait_for_all("begin")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.wait_for_all("end")
        self._optimizer.shutdown()
        self._dht.shutdown()


def _local_sgd(manager: Any, module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> Any:
    from torchft.local_sgd import LocalSGD  # pyright: ignore[reportMissingImports]

    return LocalSGD(manager, module, optimizer, sync_every=EVERY)


def _diloco(**options: Any) -> Callable[..., Any]:
    def around(manager: Any, module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> Any:
        from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

        outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return DiLoCo(manager, [module], optimizer, outer, sync_every=EVERY, **options)

    return around


def _others(about: str, made: Callable[[Job], Others]) -> Peer:
    def run_others(job: Job) -> RankResult:
        return fit(job, SingleDeviceStrategy(torch.device("cpu")), made(job), work=language())

    return Peer(about=about, run=run_others, batch=SAMPLES, sync_every=EVERY)


def _ours(about: str, arguments: Callable[[Any], dict[str, Any]]) -> Peer:
    """``arguments``: of the strategy, made of the package."""

    def run_ours(job: Job) -> RankResult:
        import lightning_async

        strategy = lightning_async.AsyncAveragingStrategy(**arguments(lightning_async))
        result = fit(job, strategy, num_nodes=job.num_replicas, work=language())
        result.claims = claims_of(strategy)
        return result

    return Peer(about=about, run=run_ours, batch=SAMPLES, sync_every=EVERY, ours=True, timed=True)


def _ddp(hook: str) -> Peer:
    return replace(gradient_peers.PEERS[f"ddp accumulate=1{hook}"], sync_every=1)


PEERS: dict[str, Peer] = {
    "target ddp": _ddp(""),
    "target ddp bf16 hook": _ddp(", bf16 hook"),
    "target ddp PowerSGD hook": _ddp(", PowerSGD hook"),
    "target ours": _ours("AsyncAveragingStrategy() as it is", lambda package: {}),
    "target ours whole": _ours("AsyncAveragingStrategy(fragments=1)", lambda package: {"fragments": 1}),
    "target ours DeltaMean H=32": _ours(
        "DeltaMean(), EveryNSteps(32), not compressed",
        lambda package: {
            "rule": package.DeltaMean(), "schedule": package.EveryNSteps(EVERY), "compression": "none",
        },
    ),
    "target ours SparseLoCo H=32": _ours(
        "SparseLoCo(), EveryNSteps(32), TopK(0.02, bits=2)",
        lambda package: {
            "rule": package.SparseLoCo(), "schedule": package.EveryNSteps(EVERY),
            "compression": package.TopK(0.02, bits=2),
        },
    ),
    **{
        f"target ours DiLoCo H={steps}": _ours(
            f"DiLoCo(0.7, 0.6), EveryNSteps({steps}), int8",
            lambda package, steps=steps: {
                "rule": package.DiLoCo(0.7, 0.6), "schedule": package.EveryNSteps(steps), "compression": "int8",
            },
        )
        for steps in (16, 32, 64)
    },
    "target torchft LocalSGD H=32": _others("torchft's LocalSGD", lambda job: Torchft(job, _local_sgd)),
    "target torchft DiLoCo": _others("torchft's DiLoCo, H=32, outer SGD 0.7, 0.9", lambda job: Torchft(job, _diloco())),
    "target torchft DiLoCo tuned": _others(
        "the same, fragment_sync_delay=20, fragment_update_alpha=0.5, in a bucket",
        lambda job: Torchft(
            job, _diloco(fragment_sync_delay=20, fragment_update_alpha=0.5, use_bucketization=True)
        ),
    ),
    "target hivemind H=32": _others("hivemind.Optimizer, use_local_updates=True, in the background", Hivemind),
}  # fmt: skip
