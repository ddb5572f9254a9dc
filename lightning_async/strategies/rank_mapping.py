"""`RankMap`: the live ranks and their present numbers, after ranks were lost or have joined.

The functions here also report a rank's new number to Lightning, to the launcher and in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from lightning_async.comm.default_group import Numbering, default_group
from lightning_async.events import tell
from lightning_async.membership.generation import Generation
from lightning_async.membership.launcher_channel import came_back, tell_generation
from lightning_async.trainer.environment.environments import JoiningEnvironment, RenumberedEnvironment
from lightning_async.trainer.namespace import fabric, pytorch

log = logging.getLogger(__name__)


_RUNS_IN_CALL = 1 << 12
_runs = [0]
_failures: list[str] = []  # The exception that has ended this process's last call of the Trainer, if one has.
_here: list[RankMap] = []  # The map of this process once numbers have changed; later strategies begin with it.


class RankMap:
    """A map from the live ranks to the stable ids with which they were started.

    The engine's thread changes it as soon as the groups of a new generation are formed; any thread may read it.

    Args:
        generation: First generation of a run.
        run: Number of that run, which is equal on all ranks.
        min_replicas: Smallest number of live ranks that go on after a loss.
        before: Map of the live ranks before this run. Default: there is none, and all ranks have the numbers with which
            they were started.
        wanted: Smallest number of live ranks that train; fewer live ranks wait for other ranks to join. Default: live
            ranks never wait.
    """

    def __init__(
        self, generation: Generation, run: int, min_replicas: int, before: RankMap | None = None, wanted: int = 0
    ) -> None:
        self._names = generation.members if before is None else before.names
        """Stable ids of the ranks of this run: the numbers that they were started with."""
        self.started = generation.world_size if before is None else before.started
        """The number of ranks with which the job was started."""
        self.ever = frozenset(range(self.started)) if before is None else before.ever
        """Stable ids of all ranks that have ever taken part."""
        self._run = run
        self._min_replicas = min_replicas
        self.wanted = max(wanted, min_replicas)
        self.joined = frozenset[str]() if before is None else before.joined
        """Stable ids of ranks that have joined since the present call of the Trainer has begun."""
        self.room = "" if before is None else before.room
        """A name that changes with the numbers of the live ranks; ``""`` while these are the numbers of the start."""
        self.generation = generation

    def with_joining_ranks(self, rank: int, names: Sequence[str], run: int, ever: Iterable[int] = ()) -> RankMap:
        """Return the map of rank numbers to stable ids for the run that begins when ranks have joined.

        Args:
            rank: Number of this rank in that run.
            names: Stable ids of all ranks of that run.
            run: Number of that run.
            ever: Stable ids of other ranks that have ever taken part. Default: none.
        """
        made = RankMap(Generation.first(rank, len(names)), run, self._min_replicas, self, self.wanted)
        made._names = tuple(names)
        made.ever = self.ever.union(ever, map(int, names))
        made.joined |= {*names} - {*self.names}
        made._number(run)
        return made

    def begun_by(self, rank: int, names: Sequence[str], run: int) -> RankMap:
        """Return the map for a training that begins before all ranks have started.

        Args:
            rank: Number of this rank among the ranks that begin.
            names: Stable ids of the ranks that begin.
            run: Number of their run.
        """
        made = self.with_joining_ranks(rank, names, run)
        made.ever = frozenset(map(int, names))
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """Stable ids of the live ranks, in the order of their present numbers."""
        return tuple(map(self.called, self.generation.members))

    def called(self, name: str) -> str:
        """Return the stable id of the rank, live or lost, that has the name ``name`` in this run."""
        return self._names[int(name)]

    @property
    def lost(self) -> int:
        return len(self.ever) - self.generation.world_size

    @property
    def are_short(self) -> bool:
        """Whether the live ranks are too few to train, and wait for ranks to join."""
        return self.generation.world_size < self.wanted

    @property
    def can_lose_one(self) -> bool:
        """Whether training goes on if one more rank is lost."""
        return self.generation.world_size > self._min_replicas

    def does_without(self, rank: int) -> bool:
        """Return whether the rank with this stable id was lost, and the live ranks have gone on without it."""
        return str(rank) not in self.names

    def go_on(self, generation: Generation, why: str) -> None:
        """Change to a new generation, renumber its ranks, and report this to the launcher and in the log.

        Args:
            generation: The new generation, without the lost ranks.
            why: Reason of the loss, for the log.
        """
        before = self.generation
        self.generation = generation
        if self.room:  # ``why`` names ranks by present numbers, which people cannot find in the launcher's output
            lost = [self.called(name) for name in before.members if name not in generation.members]
            why += f" (started as rank {', '.join(lost)})"
        self._number(self._run)
        self.tell()
        left = generation.world_size
        waits = self.wanted > self._min_replicas
        fewer = f"fewer than {self.wanted} {'wait for others to come' if waits else 'do not go on'}"
        rest = fewer if self.wanted > 1 else "training goes on down to the last one"
        tell(
            "lost", logging.WARNING,
            f"Rank {before.rank} goes on as rank {generation.rank} of {left}: {why.rstrip('.')}. {left} of "
            f"{len(self.ever)} replicas are left, and {rest}. Steps that lost ranks had not shared are gone; the other "
            "ranks train on their samples.",
            rank=generation.rank, was=before.rank, generation=generation.number, world_size=left, names=self.names,
        )  # fmt: skip
        if generation.rank == 0 and before.rank != 0:
            log.warning("This rank, started as rank %s, logs and saves from here.", self.names[0])

    def _number(self, run: int) -> None:
        """Use this map's numbers as the ranks of this process, from run ``run`` on and in later runs."""
        self.room = f"lightning_async/since{run}"
        _here[:] = [self]
        number_rank(self.generation.rank)
        numbering = Numbering(self.generation.rank, self.generation.world_size, (run, self.generation.number))
        if (group := default_group()) is not None:
            group.renumber(numbering)
        elif dist.is_available() and dist.is_initialized():
            log.warning(
                "torch's default group was formed by your program, and keeps the ranks of the start, lost ones too. Do "
                "not call `init_process_group`: then the strategy makes one that follows the live ranks."
            )

    def tell(self) -> None:
        """Report the live ranks to the launcher, under a number that grows with each generation and each run."""
        tell_generation((self._run << 32) + self.generation.number, self.names)


def count_run(at_least: int = 0) -> int:
    """Count a new run of this process, whichever strategy makes it, and return its number.

    Each run has its own number, so that it does not read what an earlier run has left in the store. All ranks count the
    same runs. Each call of the Trainer begins with a multiple of `_RUNS_IN_CALL`, so that ranks count alike although an
    exception has kept one of them from counting all runs of the call before.

    Args:
        at_least: Smallest number to return, for a rank that has joined and has not counted earlier runs. Default: none.
    """
    _runs[0] = max(_runs[0] + 1, at_least)
    return _runs[0]


def next_run() -> int:
    """Return the number that `count_run` would return, without counting a run."""
    return _runs[0] + 1


def call_of(run: int) -> int:
    """Return the number of the call of the Trainer to which a run belongs: 1 for the first."""
    return run // _RUNS_IN_CALL + 1


def begin_call(call: int) -> None:
    """Count a call of the Trainer, which all its ranks begin together."""
    _runs[0] = (call - 1) * _RUNS_IN_CALL
    _failures.clear()


def next_call() -> int:
    return call_of(_runs[0]) + 1 if _runs[0] else 1


def note_failure(text: str) -> None:
    """Note that an exception has ended this process's call of the Trainer: it takes part in the next one again."""
    _failures[:] = [text]


def has_failed() -> bool:
    return bool(_failures)


def keep_map(live_ranks: RankMap | None) -> None:
    """Set the map with which later strategies of this process begin; None: all ranks have the numbers of the start."""
    _here[:] = [] if live_ranks is None else [live_ranks]


def run_name(run: int) -> str:
    """Return the prefix of a run's keys in the store."""
    return f"lightning_async/{run}"


def left_here() -> RankMap | None:
    """Return the map of live ranks that an earlier run of this process has left, or None.

    A run leaves a map if ranks were lost or have joined, so that ranks got new numbers.
    """
    return _here[0] if _here else None


def among(live_ranks: RankMap | None, environment: Any, num_serving: int = 0) -> Any:
    """Return the cluster environment with the current rank and the number of live replicas.

    Args:
        live_ranks: Live ranks; None where no rank may be lost.
        environment: Environment of this rank.
        num_serving: Number of dedicated servers: the last of the ranks that were started. Default 0.
    """
    if live_ranks is None or not live_ranks.room:
        names = tuple(map(str, range(environment.world_size() - num_serving)))
        return RenumberedEnvironment(environment, environment.global_rank(), names) if num_serving else environment
    return RenumberedEnvironment(environment, live_ranks.generation.rank, live_ranks.names, live_ranks.joined)


def numbered_last(environment: Any) -> Any:
    """Return an environment that gives this process the highest rank while it waits to join a running training.

    The ranks that train have a rank 0 already. So this process must not act as rank 0, even if it was started with that
    number.
    """
    comes = environment is not None and came_back() is not None and not _here
    return JoiningEnvironment(environment) if comes else environment


def name_in_run(rank: int, names: Sequence[str]) -> str:
    """Return a rank's name in a run: its index among the ranks that began the run, as text.

    Args:
        rank: Number with which the rank was started.
        names: Stable ids of the ranks that began the run; empty if all began it under their own numbers.

    >>> name_in_run(2, ()), name_in_run(2, ("0", "2", "3"))
    ('2', '1')
    """
    return str(names.index(str(rank)) if names else rank)


def number_rank(rank: int) -> None:
    """Set the rank by which Lightning decides whether this process prints, logs and saves."""
    for module in (fabric("utilities.rank_zero"), pytorch("utilities.rank_zero")):
        module.rank_zero_only.rank = rank
