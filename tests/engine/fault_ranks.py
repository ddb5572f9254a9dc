"""In-process ranks that fail: scripted faults, per-rank arguments, and what became of each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_async.algorithms import DeltaMean, EveryNSteps
from lightning_async.comm.collectives import Pending
from lightning_async.engine.averaging.rounds import ROUND
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.decision import decide, from_rows
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Header
from lightning_async.engine.timeouts import Timeouts
from lightning_async.membership.membership import Membership
from tests.comm.faulty import Fault, FaultyCollectives
from tests.comm.simulated import InProcessWorld
from tests.engine.ranks import Rank, assemble

PAYLOAD, HEADER = "world/payload", "world/header"
NEVER = EveryNSteps(10**6)
DEADLINES = Timeouts(payload=timedelta(seconds=30), grace=timedelta(seconds=90), reform=timedelta(seconds=60))
LIMIT_S = 60.0
"""For whatever a test waits for."""


@dataclass
class Outcome:
    """What became of one rank."""

    value: Any = None
    error: BaseException | None = None


@dataclass
class Ledger:
    """The header tables that one rank has seen; each decides the same on every rank."""

    tables: list[list[list[float]]] = field(default_factory=list)
    components: list[Any] = field(default_factory=list)
    message_sent: threading.Event = field(default_factory=threading.Event)
    """The engine has sent a header with a message."""

    def work(self) -> float:
        """Work that rounds and agreements have counted; right where none of them failed."""
        total = 0.0
        consensus, averaging, *_ = self.components
        for table in self.tables:
            headers, *parts = from_rows([Header(), *(component.blank for component in self.components)], table)
            round_decision = decide(headers, parts, self.components)
            kind = round_decision.plan.kind if round_decision.plan is not None else None
            if kind is averaging.average:
                total += sum(part.work for part in parts[1])
            elif kind is consensus.round or round_decision.opens:
                total += sum(part.unreported[0] for part in parts[0])
        return total


class _Recorded(Pending[Tensor]):
    def __init__(self, inner: Pending[Tensor], ledger: Ledger) -> None:
        self._inner, self._ledger = inner, ledger

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout: timedelta) -> bool:
        return self._inner.wait(timeout)

    def result(self, timeout: timedelta | None = None) -> Tensor:
        table = self._inner.result(timeout)
        self._ledger.tables.append(table.tolist())
        return table


class Recording:
    """Any collectives, with every table of headers written down."""

    def __init__(self, inner: Any, ledger: Ledger) -> None:
        self._inner, self._ledger = inner, ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fork(self, name: str, timeout: timedelta | None = None) -> Any:
        return Recording(self._inner.fork(name, timeout), self._ledger)

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Any:
        is_header = self._inner.name == HEADER and buffer.numel() >= len(Header._fields)
        if is_header and buffer[Header._fields.index("ready")] == ROUND:
            self._ledger.message_sent.set()
        pending = self._inner.all_gather(buffer, out)
        return _Recorded(pending, self._ledger) if is_header else pending


@dataclass
class FaultyRank(Rank):
    """A replica with what a test of failures needs to reach."""

    membership: Any = None
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def number(self) -> int:
        return self.averager.summary.rank

    @property
    def rule_state(self) -> dict[str, Tensor]:
        return self.averager.state_dict()["rule_state"]


@contextmanager
def faulty_rank(
    collectives: Any,
    store: Any,
    goal: float,
    *,
    script: Sequence[Fault] = (),
    rule: Any = None,
    schedule: Any = None,
    overlap: bool = False,
    timeouts: Timeouts = DEADLINES,
    dead_after: timedelta = timedelta(seconds=20),
    numel: int = 8,
    rows: int = 1,
    weighting: Any = "samples",
    part_bytes: int = 16 << 20,
    compression: Any = "none",
    gradients: Any = "none",
    min_replicas: int | None = None,
    fragments: int = 1,
    module: Callable[[], nn.Module] | None = None,
) -> Iterator[FaultyRank]:
    replica = nn.Linear(numel, rows, bias=False) if module is None else module()
    if module is None:
        with torch.no_grad():
            replica.weight.fill_(1.0)  # pyright: ignore
    membership = Membership(
        store, collectives.rank, collectives.world_size, interval=timedelta(seconds=0.02), dead_after=dead_after,
        fresh=True, readmit=False,
    )  # fmt: skip
    membership.start()
    ledger = Ledger()

    def nobody(mine: Any) -> Any:
        raise ConnectionError("this rank is dead")

    def die() -> None:
        membership._board.exchange = nobody  # its heartbeats end without a word; `Kill` breaks its connections off too

    averager, component = assemble(
        FaultyCollectives(Recording(collectives, ledger), script, kill=die),  # pyright: ignore[reportArgumentType]
        membership,
        Replica(replica, fragments=fragments),
        rule or DeltaMean(),
        schedule or EveryNSteps(4),
        AveragerConfig(
            overlap=overlap,
            timeouts=timeouts,
            weighting=weighting,
            part_bytes=part_bytes,
            compression=compression,
            fragments=fragments,
        ),
        compression=gradients,
        min_replicas=min_replicas,
    )
    ledger.components = averager.control.components
    try:
        averager.start()
        try:
            yield FaultyRank(averager, component, replica, goal, 0.1, membership, ledger)
        except BaseException as error:
            membership.fail(f"{type(error).__name__}: {error}")  # as the strategy does in `on_exception`
            raise
    finally:
        averager.close()
        membership.close()


def outcomes(
    world_size: int,
    body: Callable[[FaultyRank], Any],
    *,
    scripts: dict[int, Sequence[Fault]] | None = None,
    each: dict[int, dict[str, Any]] | None = None,
    timeout: float = 150.0,
    **kwargs: Any,
) -> list[Outcome]:
    """Run ``body`` on every rank, each to its own end; ``each`` holds further arguments by rank."""
    world = InProcessWorld(world_size)

    def on_rank(collectives: Any) -> Outcome:
        number = collectives.rank
        mine: dict[str, Any] = kwargs | {"script": (scripts or {}).get(number, ())} | (each or {}).get(number, {})
        try:
            with faulty_rank(collectives, world.store, float(number), **mine) as rank:
                return Outcome(value=body(rank))
        except BaseException as error:
            return Outcome(error=error)

    return world.run(on_rank, timedelta(seconds=timeout))


def values(world_size: int, body: Callable[[FaultyRank], Any], **kwargs: Any) -> list[Any]:
    """As `outcomes`, where no rank may fail."""
    all_ = outcomes(world_size, body, **kwargs)
    for outcome in all_:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in all_]


class Turnstile:
    """Lets ranks wait for each other by name, with a deadline, where a test needs an order."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def event(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def set(self, name: str) -> None:
        self.event(name).set()

    def wait(self, name: str, timeout: float = LIMIT_S) -> None:
        assert self.event(name).wait(timeout), f"nobody came to {name!r}"
