"""The two ranks of `overlap_gpu`: one trains on the device, its peer on the CPU only averages."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.nn import functional as F

from lightning_async.algorithms import DeltaMean, EveryNSteps
from lightning_async.algorithms.schedules import Action, ReplicaClock, Schedule
from lightning_async.comm.gpu_staging import StagedCollectives
from lightning_async.comm.torch_collectives import TorchCollectives
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.replica import Replica
from lightning_async.engine.timeouts import Timeouts
from lightning_async.membership.membership import Membership
from lightning_async.ops import native
from tests.benchmarks.worker import die_with_parent

__all__ = ["Block", "Job", "measure"]

LIMIT = timedelta(seconds=60)
"""For everything that a rank waits for, one round included."""
PEERS_STEP_S = 0.01
WARMUP_STEPS = 3
END_S = 5.0
"""What closing takes, at most."""
DEPTH, EXPANSION = 8, 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure.

    Args:
        device: of rank 0's training, "cuda" or "cpu".
        numel: about so many parameters.
        tokens: rows of a batch.
        steps: steps of a block without averaging.
        blocks: pairs of blocks, at most.
        until: by `time.monotonic`, which is one clock for all processes: no further pair is begun that would end later.
        port: of the store.
        parent: the process without which this one shall not live, if that has started it.
    """

    device: str
    numel: int
    tokens: int
    steps: int
    blocks: int
    until: float
    port: int
    parent: int


@dataclass(kw_only=True)
class Block:
    """Some steps of rank 0's, timed as a whole; one round beside them, from the step of its snapshot to its merge.

    Args:
        steps: how many.
        seconds: from an idle device to an idle device.
        step_s: each step on the device's own time line; stops nothing.
        snapshot, merge: which steps were followed by them.
        in_flight_s: between the two.
        exchange_s: of that, moving and committing the payload.
        sent_bytes: this rank's message.
    """

    steps: int
    seconds: float = 0.0
    step_s: list[float] = field(default_factory=list)
    snapshot: int | None = None
    merge: int | None = None
    in_flight_s: float = 0.0
    exchange_s: float = 0.0
    sent_bytes: int = 0


class Layer(nn.Module):
    """A transformer's feed-forward half: two large matrices and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, EXPANSION * width, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(EXPANSION * width, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))


@torch.no_grad()
def build(numel: int, device: torch.device) -> nn.Sequential:
    """At least ``numel`` parameters in bf16, the same numbers on every device."""
    width = 32 * math.ceil(math.sqrt(numel / (2 * EXPANSION * DEPTH)) / 32)
    with torch.device("meta"):
        module = nn.Sequential(*(Layer(width) for _ in range(DEPTH)))
    module.to_empty(device=device)
    # One matrix for all: drawing a billion numbers would take longer than the measurement.
    values = torch.randn(EXPANSION * width * width, generator=torch.Generator().manual_seed(0))
    values = values.mul_(0.5 / math.sqrt(width)).to(device, torch.bfloat16)
    for parameter in module.parameters():
        parameter.copy_(values.view_as(parameter))
    return module


def probe(module: nn.Module) -> list[float]:
    """Return a few elements of every parameter.

    They come through pinned memory: while the driver copies to other memory, it lets no other thread of the process
    reach the GPU, so a round would advance only between steps.
    """
    few = torch.cat([p.detach().flatten()[:16].float() for p in module.parameters()])
    return torch.empty_like(few, device="cpu", pin_memory=few.is_cuda).copy_(few).tolist()


class Switch:
    """A schedule that starts as many rounds as are ``allowed``; ``started`` counts the snapshots that were taken."""

    def __init__(self, schedule: Schedule, allowed: float) -> None:
        self.allowed, self.started = allowed, 0
        self._schedule, self._asked = schedule, False

    def next(self, clock: ReplicaClock) -> Action:
        """What the schedule says, or a local step."""
        if self._asked and clock.steps_since_round == 0:  # all steps are in a message: it was packed
            self.started += 1
        action = self._schedule.next(clock) if self.started < self.allowed else Action.LOCAL
        self._asked = action is Action.ROUND
        return action


class Marks:
    """Moments on the device's own time line."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: list[Any] = []

    def idle(self) -> float:
        """The time, when the device has nothing left to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def take(self) -> None:
        """After what was queued until now; the host does not wait for it."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._taken.append(event)
        else:
            self._taken.append(time.perf_counter())

    def between(self) -> list[float]:
        """Seconds from each to the next, once the device is idle."""
        pairs = itertools.pairwise(self._taken)
        return [a.elapsed_time(b) / 1e3 if self._device.type == "cuda" else b - a for a, b in pairs]


class Training:
    """Rank 0: steps of AdamW on one batch, alone or with a round beside them."""

    def __init__(self, job: Job, module: nn.Sequential, averager: BackgroundAverager, switch: Switch) -> None:
        self.device, self.module, self.averager, self.switch = torch.device(job.device), module, averager, switch
        first = next(module.parameters())
        self.batch = torch.randn(2, job.tokens, first.shape[1], device=self.device, dtype=first.dtype)
        # A step that bf16 does not round away.
        lr = 0.02 * float(first.detach().float().std())
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0, fused=True)
        self.moves: list[tuple[list[float], list[float]]] = []

    def step(self) -> None:
        """Forward, backward, optimizer."""
        F.mse_loss(self.module(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def alone(self, steps: int) -> Block:
        """Steps that the averager knows nothing of."""
        marks = Marks(self.device)
        started = marks.idle()
        marks.take()
        for _ in range(steps):
            self.step()
            marks.take()
        return Block(steps=steps, seconds=marks.idle() - started, step_s=marks.between())

    def with_round(self, watched: bool = False) -> Block:
        """Steps until a whole round has passed; ``watched``: note what its merge did, which takes time."""
        self.switch.allowed += 1
        averager, marks, block, report = self.averager, Marks(self.device), Block(steps=0), None
        before: list[float] = []
        left_at = came_at = 0.0
        started = ended = marks.idle()
        marks.take()
        while report is None:
            if ended - started > LIMIT.total_seconds():
                raise TimeoutError(f"no round within {LIMIT} and {block.steps} steps")
            action = averager.plan()
            if block.snapshot is None and self.switch.started == self.switch.allowed:
                block.snapshot, left_at = block.steps - 1, ended
            self.step()
            if watched:
                before = probe(self.module)
            came_at = time.perf_counter()
            report = averager.tick(action, 1.0)
            ended = time.perf_counter()
            marks.take()
            block.steps += 1
        block.seconds = marks.idle() - started
        block.step_s, block.merge = marks.between(), block.steps - 1
        block.in_flight_s, block.exchange_s, block.sent_bytes = (
            came_at - left_at, report.exchange_s, report.payload_bytes
        )  # fmt: skip
        if watched:
            self.moves.append((before, probe(self.module)))
        return block


def train(job: Job, training: Training, store: Any) -> dict[str, Any]:
    """Pairs of blocks, as many as there is time for."""
    pairs: list[tuple[Block, Block]] = []

    def ready() -> None:
        """The peer has taken its snapshot for the next round: nothing of the last one disturbs what follows."""
        store.wait([f"snapshot/{training.switch.started}"], LIMIT)

    for _ in range(WARMUP_STEPS):
        training.step()
    ready()
    training.with_round(watched=True)
    while len(pairs) < job.blocks:
        started = time.monotonic()
        ready()
        pairs.append((training.alone(job.steps), training.with_round()))
        now = time.monotonic()
        if now + 1.2 * (now - started) + END_S > job.until:
            break
    store.set("end", str(training.averager.summary.rounds))
    return {"pairs": [[asdict(block) for block in pair] for pair in pairs], "moves": training.moves}


def accompany(averager: BackgroundAverager, switch: Switch, store: Any) -> None:
    """Rank 1: what would be steps are pauses, until rank 0 has ended and all its rounds are merged here too."""
    told = 0
    while not store.check(["end"]) or averager.summary.rounds < int(store.get("end")):
        averager.tick(averager.plan(), 1.0)
        while told < switch.started:
            store.set(f"snapshot/{told}", "")
            told += 1
        time.sleep(PEERS_STEP_S)


@contextlib.contextmanager
def averaging(rank: int, job: Job, module: nn.Module, schedule: Schedule) -> Iterator[BackgroundAverager]:
    """The engine as the strategy makes it: buckets beside the parameters, payloads over Gloo."""
    store = connect(job)
    comm = TorchCollectives(store, rank, 2, timeout=LIMIT, form_timeout=LIMIT)
    device = next(module.parameters()).device
    large: Any = TorchCollectives(store, rank, 2, name="device", timeout=LIMIT, form_timeout=LIMIT)
    if rank == 0:
        large = StagedCollectives(large, device)
    membership = Membership(store, rank, 2)
    membership.start()
    # Blocks without averaging are no stalls.
    config = AveragerConfig(weighting="equal", timeouts=Timeouts(grace=timedelta(hours=1)))
    replica = Replica(module, device=device)
    control = ControlPlane(comm, membership, replica, config.timeouts, payload=large)
    membership.on_change = control.wake
    averager = BackgroundAverager(control, DeltaMean(), schedule, config)
    try:
        comm.open()
        large.open()
        averager.start()
        yield averager
        averager.close()
        store.set(f"closed/{rank}", "")
        store.wait([f"closed/{1 - rank}"], LIMIT)
    except BaseException as error:
        membership.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        averager.close()
        membership.close()
        large.close()
        comm.close()


def connect(job: Job) -> Any:
    """A client of the store, which the parent hosts."""
    return TCPStore("127.0.0.1", job.port, None, False, LIMIT, wait_for_workers=False)


def measure(**fields: Any) -> dict[str, Any]:
    """One rank's part; see `Job`."""
    job = Job(**fields)
    if os.getppid() == job.parent:  # else it was forked by another, and ends by its deadline
        die_with_parent(job.parent)
    rank = int(os.environ["RANK"])
    module = build(job.numel, torch.device(job.device if rank == 0 else "cpu"))
    switch = Switch(EveryNSteps(1), math.inf if rank else 0)
    start = probe(module)
    with averaging(rank, job, module, switch) as averager:
        if rank == 0:
            told = train(job, Training(job, module, averager, switch), connect(job))
        else:
            accompany(averager, switch, connect(job))
            told = {}
        told |= {"failed_rounds": averager.summary.failed_rounds, "rounds": averager.summary.rounds}
    return told | {
        "numel": sum(p.numel() for p in module.parameters()),
        "threads": torch.get_num_threads(),
        "ops": native.backend("cpu").name,
        "start": start,
        "end": probe(module),
    }
