"""The ways of training that the benchmark compares, each as a function that one rank runs.

All but ``ddp raw`` and the probes train through Lightning's Trainer, with the same module, data and callbacks: what
differs is the strategy.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager  # noqa: TID251 (a peer)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks import horovod_peers
from tests.benchmarks.link import pace_sockets
from tests.benchmarks.measured import Job, Meter, RankResult, note_step
from tests.benchmarks.model import BATCH, CharModule, Slot, loader

__all__ = ["PEERS", "Job", "Peer", "RankResult", "run", "samples_in"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way of training.

    Args:
        about: a few words for the report.
        run: does a `Job`.
        sync_every: steps from one communication to the next; 0 for none.
        alone: whether it is a single process, whatever the number of replicas.
        ours: whether it is the package under test.
        horovod: whether Horovod's launcher starts it, rather than torchrun.
        compressed: whether its messages take fewer bytes than the model.
        accumulates: batches between two communications of a peer whose ranks must take equally many steps; 0 for none.
    """

    about: str
    run: Callable[[Job], RankResult]
    sync_every: int = 0
    alone: bool = False
    ours: bool = False
    horovod: bool = False
    compressed: bool = False
    accumulates: int = 0


class PeriodicAveraging(pl.Callback):
    """PyTorch's own post-local SGD: a blocking average of the parameters after every so many steps."""

    def __init__(self, sync_every: int) -> None:
        self.averager = PeriodicModelAverager(period=sync_every, warmup_steps=0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.averager.average_parameters(pl_module.parameters())


def _fit(
    job: Job, strategy: Strategy, *callbacks: pl.Callback, num_nodes: int = 1, accumulate: int = 1, lr: float = 1e-3
) -> RankResult:
    """Train with Lightning's Trainer."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    torch.manual_seed(0)
    meter = Meter(job)
    module = CharModule(Slot(job.step_s, job.tail_s), lr)
    trainer = pl.Trainer(
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        devices=1,
        num_nodes=num_nodes,
        strategy=strategy,
        # The meter comes last, so that what the other callbacks do is in the step.
        callbacks=[*callbacks, meter],
        max_steps=-1 if job.seconds is not None else job.warmup + job.steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(job.rank, job.seconds))
    meter.result.losses = module.losses
    return meter.result


def single(job: Job) -> RankResult:
    """No process group at all."""
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "GROUP_RANK"):
        os.environ.pop(name, None)
    return _fit(job, SingleDeviceStrategy(torch.device("cpu")))


def ddp(job: Job) -> RankResult:
    """Lightning's DDPStrategy over Gloo."""
    return _fit(job, DDPStrategy(process_group_backend="gloo"), num_nodes=job.num_replicas)


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


def periodic(job: Job) -> RankResult:
    """`PeriodicModelAverager`, from a callback (Lightning's own use of it needs a GPU)."""
    dist.init_process_group("gloo")
    averaging = PeriodicAveraging(job.sync_every or 32)
    result = _fit(job, SingleDeviceStrategy(torch.device("cpu")), averaging)
    _leave()
    return result


def ours(job: Job, rule: str, schedule: Any, **options: Any) -> RankResult:
    """The strategy under test, through its public interface."""
    import lightning_async

    made = {"DeltaMean": lightning_async.DeltaMean, "DiLoCo": lightning_async.DiLoCo}[rule]()
    strategy = lightning_async.AsyncAveragingStrategy(rule=made, schedule=schedule, **options)
    result = _fit(job, strategy, num_nodes=job.num_replicas)
    result.claims = _claims(strategy)
    return result


def _claims(strategy: Any) -> dict[str, float]:
    """The numbers of the strategy's own summary, and the share it says it hid."""
    summary = strategy.summary
    if summary is None:
        return {}
    numbers = summary.state_dict() if hasattr(summary, "state_dict") else vars(summary)
    claims = {name: float(value) for name, value in numbers.items() if isinstance(value, (int, float))}
    return {**claims, "hidden_share": float(summary.hidden_share)}


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


def rate_for(batches: float) -> float:
    """The learning rate of steps of so many batches on each replica: Adam's goes with the square root."""
    return 1e-3 * batches**0.5


def _accumulated(batches: int) -> Callable[[Job], RankResult]:
    def run_ddp(job: Job) -> RankResult:
        strategy = DDPStrategy(process_group_backend="gloo")
        return _fit(job, strategy, num_nodes=job.num_replicas, accumulate=batches, lr=rate_for(batches))

    return run_ddp


def _windows(accumulate: Any, batches: int, compensated: bool = False, **options: Any) -> Callable[[Job], RankResult]:
    """``batches``: what a window is likely to hold, for the learning rate."""

    def run_windows(job: Job) -> RankResult:
        import lightning_async

        correction = lightning_async.DelayCompensation() if compensated else None
        strategy = lightning_async.AsyncGradientStrategy(accumulate, correction=correction, **options)
        result = _fit(job, strategy, num_nodes=job.num_replicas, lr=rate_for(batches))
        result.claims = _claims(strategy)
        return result

    return run_windows


def probe_compute(job: Job) -> RankResult:
    """Unpadded compute with all replicas on the machine at once: what the slot must hold."""
    module = CharModule(Slot())
    optimizer = module.configure_optimizers()
    batches = iter(loader(job.rank))
    result = RankResult()
    while len(result.ends) < job.warmup + job.steps:
        inputs, targets = next(batches)
        start = time.monotonic()
        loss = cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
        middle = time.monotonic()
        loss.backward()
        optimizer.step()
        end = time.monotonic()
        optimizer.zero_grad()
        result.compute_s.append((middle - start, end - middle))
        result.ends.append(end)
    return result


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
    **{
        f"ddp accumulate={n}": Peer(
            about=f"DDPStrategy, accumulate_grad_batches={n}", run=_accumulated(n), accumulates=n
        )
        for n in (1, 2, 4, 8, 16)
    },
    "windows of 8": Peer(about="ours, gradients, accumulate=8, delay=1", run=_windows(8, 8), ours=True),
    "windows of 8, no delay": Peer(about="the same, delay=0", run=_windows(8, 8, delay=0), ours=True),
    "windows until reduced": Peer(about="accumulate='until_reduced'", run=_windows("until_reduced", 12), ours=True),
    "windows of 8, compensated": Peer(
        about="accumulate=8, delay=1, DelayCompensation()", run=_windows(8, 8, compensated=True), ours=True
    ),
    "windows until reduced, compensated": Peer(
        about="until_reduced, DelayCompensation()", run=_windows("until_reduced", 12, compensated=True), ours=True
    ),
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
    "probe compute": Peer(about="unpadded compute, all replicas at once", run=probe_compute),
    "probe round": Peer(about="blocking all-reduce of the model", run=probe_round),
}


def run(job: Job) -> RankResult:
    """Do the job, with one thread."""
    torch.set_num_threads(1)
    if job.pace_mbit is not None:
        pace_sockets(job.pace_mbit)
    return PEERS[job.peer].run(job)


def samples_in(ends: list[float], start: float, stop: float) -> int:
    """Samples of the steps that ended in the window."""
    return BATCH * sum(start < end <= stop for end in ends)
