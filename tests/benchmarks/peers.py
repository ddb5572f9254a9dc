"""The ways of training that the benchmark compares, each as a function that one rank runs.

All but ``ddp raw`` and the probes train through Lightning's Trainer, with the same module, data and callbacks: what
differs is the strategy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager  # noqa: TID251 (a peer)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks import gradient_peers, horovod_peers, target_peers
from tests.benchmarks.fitting import Peer, Work, claims_of, fit, small
from tests.benchmarks.language import SAMPLES, language
from tests.benchmarks.link import pace_sockets
from tests.benchmarks.measured import Job, RankResult, note_step
from tests.benchmarks.model import CharModule, Slot, loader

__all__ = ["PEERS", "Job", "Peer", "RankResult", "run", "samples_in"]


class PeriodicAveraging(pl.Callback):
    """PyTorch's own post-local SGD: a blocking average of the parameters after every so many steps."""

    def __init__(self, sync_every: int) -> None:
        self.averager = PeriodicModelAverager(period=sync_every, warmup_steps=0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.averager.average_parameters(pl_module.parameters())


def single(job: Job) -> RankResult:
    """No process group at all."""
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "GROUP_RANK"):
        os.environ.pop(name, None)
    return fit(job, SingleDeviceStrategy(torch.device("cpu")))


def ddp(job: Job) -> RankResult:
    """Lightning's DDPStrategy over Gloo."""
    strategy = DDPStrategy(process_group_backend="gloo")
    return fit(job, strategy, num_nodes=job.num_replicas, accumulate=job.accumulate)


def ddp_raw(job: Job) -> RankResult:
    """`DistributedDataParallel` in a loop of its own, without Lightning."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = CharModule(Slot(job.step_s, job.tail_s))
    replica = DistributedDataParallel(module)
    optimizer = module.configure_optimizers()
    batches = iter(loader(job.rank))
    result = RankResult()
    while len(result.ends) < job.warmup + job.steps:
        inputs, targets = next(batches)
        module.slot.begin()
        loss = cross_entropy(replica(inputs).flatten(0, 1), targets.flatten())
        result.losses.append(loss.item())
        module.slot.before_backward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note_step(job, result)
    _leave()
    return result


def periodic(job: Job, work: Work = small) -> RankResult:
    """`PeriodicModelAverager`, from a callback (Lightning's own use of it needs a GPU)."""
    dist.init_process_group("gloo")
    averaging = PeriodicAveraging(job.sync_every or 32)
    result = fit(job, SingleDeviceStrategy(torch.device("cpu")), averaging, work=work)
    _leave()
    return result


def ours(job: Job, rule: str, schedule: Any, **options: Any) -> RankResult:
    """The strategy under test, through its public interface."""
    import lightning_async

    made = {"DeltaMean": lightning_async.DeltaMean, "DiLoCo": lightning_async.DiLoCo}[rule]()
    strategy = lightning_async.AsyncAveragingStrategy(rule=made, schedule=schedule, **options)
    result = fit(job, strategy, num_nodes=job.num_replicas)
    result.claims = claims_of(strategy)
    return result


def _every(rule: str, num_steps: int, **options: Any) -> Callable[[Job], RankResult]:
    def run_every(job: Job) -> RankResult:
        from lightning_async import EveryNSteps

        return ours(job, rule, EveryNSteps(job.sync_every or num_steps), **options)

    return run_every


def _timed(job: Job) -> RankResult:
    from lightning_async import EverySeconds

    return ours(job, "DeltaMean", EverySeconds(job.round_s))


def _synchronous(job: Job) -> RankResult:
    from lightning_async import Synchronous

    return ours(job, "DeltaMean", Synchronous())


def _windows(job: Job) -> RankResult:
    from lightning_async import AsyncGradientStrategy

    return fit(job, AsyncGradientStrategy(job.accumulate, delay=0), num_nodes=job.num_replicas)


def _probe_compute(work: Work) -> Callable[[Job], RankResult]:
    def probe_compute(job: Job) -> RankResult:
        module, batches = work(job, Slot())
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        result = RankResult()
        for inputs, targets in batches:
            start = time.monotonic()
            loss = cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
            middle = time.monotonic()
            loss.backward()
            optimizer.step()
            end = time.monotonic()
            optimizer.zero_grad()
            result.compute_s.append((middle - start, end - middle))
            result.ends.append(end)
            if len(result.ends) == job.warmup + job.steps:
                break
        return result

    return probe_compute


def probe_round(job: Job) -> RankResult:
    """Blocking all-reduces of a buffer as large as the model: what a round costs where nothing hides it."""
    dist.init_process_group("gloo")
    size = sum(param.numel() for param in CharModule(Slot()).parameters())
    buffer = torch.zeros(size)
    result = RankResult()
    for _ in range(job.warmup + job.steps):
        dist.barrier()
        start = time.monotonic()
        dist.all_reduce(buffer)
        result.round_s.append(time.monotonic() - start)
        note_step(job, result)
    _leave()
    return result


def _leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


PEERS: dict[str, Peer] = {
    "single": Peer(about="one process, no communication: the limit", run=single, alone=True),
    "apart": Peer(about="all replicas at once, no communication", run=single),
    "ddp": Peer(about="Lightning's DDPStrategy, Gloo", run=ddp, sync_every=1),
    "ddp raw": Peer(about="DistributedDataParallel without Lightning", run=ddp_raw, sync_every=1),
    "periodic": Peer(about="PyTorch's PeriodicModelAverager, H=32", run=periodic, sync_every=32),
    "blocking": Peer(
        about="ours, DeltaMean, overlap=False, H=32",
        run=_every("DeltaMean", 32, overlap=False),
        sync_every=32,
        ours=True,
    ),
    "ours": Peer(about="ours, DeltaMean, H=32", run=_every("DeltaMean", 32), sync_every=32, ours=True),
    "ours H=16": Peer(about="ours, DeltaMean, H=16", run=_every("DeltaMean", 16), sync_every=16, ours=True),
    "ours DiLoCo": Peer(about="ours, DiLoCo, H=32", run=_every("DiLoCo", 32), sync_every=32, ours=True),
    "ours DiLoCo H=8": Peer(about="ours, DiLoCo, H=8", run=_every("DiLoCo", 8), sync_every=8, ours=True),
    "ours int8 H=8": Peer(
        about="ours, DiLoCo, H=8, int8",
        run=_every("DiLoCo", 8, compression="int8"),
        sync_every=8,
        ours=True,
        compressed=True,
    ),
    "ours timed": Peer(about="ours, DeltaMean, EverySeconds", run=_timed, ours=True),
    "ours synchronous": Peer(about="ours, Synchronous", run=_synchronous, sync_every=1, ours=True),
    "ours over Horovod": Peer(
        about="ours, DeltaMean, H=32, over Horovod",
        run=_every("DeltaMean", 32),
        sync_every=32,
        ours=True,
        horovod=True,
    ),
    "ours windows": Peer(about="ours, gradients, delay=0", run=_windows, ours=True),
    **gradient_peers.PEERS,
    **target_peers.PEERS,
    "target periodic H=32": Peer(
        about="PyTorch's PeriodicModelAverager",
        run=lambda job: periodic(job, language()),
        sync_every=32,
        batch=SAMPLES,
    ),
    "beginning of gradients": gradient_peers.BEGINNING,
    "wide ddp": Peer(about="Lightning's DDPStrategy, Gloo", run=horovod_peers.ddp, sync_every=1),
    "wide hvd": Peer(
        about="hvd.DistributedOptimizer in Lightning",
        run=horovod_peers.optimizer_in_lightning,
        sync_every=1,
        horovod=True,
    ),
    "wide hvd raw": Peer(
        about="hvd.DistributedOptimizer without Lightning",
        run=horovod_peers.optimizer_raw,
        sync_every=1,
        horovod=True,
    ),
    "wide ours": Peer(about="ours, HorovodStrategy", run=horovod_peers.strategy, sync_every=1, ours=True, horovod=True),
    "wide synchronous": Peer(about="ours, Synchronous", run=horovod_peers.synchronous, sync_every=1, ours=True),
    "wide windows": Peer(about="ours, gradients, delay=0", run=horovod_peers.windows, ours=True),
    "probe compute": Peer(about="unpadded compute, all replicas at once", run=_probe_compute(small)),
    "probe language": Peer(about="the same of the batches that gradients are of", run=_probe_compute(language())),
    "probe round": Peer(about="blocking all-reduce of the model", run=probe_round),
}


def run(job: Job) -> RankResult:
    """Do the job, with one thread."""
    torch.set_num_threads(1)
    if job.pace_mbit is not None:
        pace_sockets(job.pace_mbit)
    return PEERS[job.peer].run(job)


def samples_in(peer: str, ends: list[float], start: float, stop: float) -> int:
    """Samples of a peer's steps that ended in the window."""
    return PEERS[peer].batch * sum(start < end <= stop for end in ends)
