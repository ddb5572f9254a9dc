"""Ranks are lost, or come back, and training goes on: what Lightning, the launcher and the user learn of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_async.events import tell
from lightning_async.membership.generation import Generation
from lightning_async.membership.launcher_channel import came_back, tell_generation
from lightning_async.trainer.environment.environments import JoiningEnvironment, RenumberedEnvironment
from lightning_async.trainer.namespace import fabric, pytorch

log = logging.getLogger(__name__)


_ROOM = "lightning_async"  # of ranks whose numbers are those that they were started with
_runs = [0]
_here: list[RankMap] = []  # of this process, once ranks are lost: they are to every strategy that follows


class RankMap:
    """The live ranks of those that began, and the numbers that they have now.

    The engine's thread changes it, as soon as the groups of a new generation are formed; everybody reads.

    Args:
        generation: the first of a run.
        run: number of that run, which is equal on all ranks.
        min_replicas: fewer do not go on.
        before: who was left of an earlier run.
        wanted: fewer wait for others to come. Default: nobody waits.
    """

    def __init__(
        self, generation: Generation, run: int, min_replicas: int, before: RankMap | None = None, wanted: int = 0
    ) -> None:
        self._names = generation.members if before is None else before.names
        """For life: the numbers that the ranks of this run were started with."""
        self.started = generation.world_size if before is None else before.started
        """How many ranks there were at first."""
        self.ever = frozenset(range(self.started)) if before is None else before.ever
        """The numbers, for life, of all that have ever been there."""
        self._run = run
        self._min_replicas = min_replicas
        self.wanted = max(wanted, min_replicas)
        self.room = "" if before is None else before.room
        """Where those who are there meet, since their numbers have changed; "" where they have not."""
        self.generation = generation

    def with_joining_ranks(self, rank: int, names: Sequence[str], run: int, ever: Iterable[int] = ()) -> RankMap:
        """Return the map of a run with joining ranks.

        Args:
            rank: this rank's number in that run.
            names: stable ids of all its ranks.
            run: its number.
            ever: stable ids of others that have ever been there.
        """
        made = RankMap(Generation.first(rank, len(names)), run, self._min_replicas, self, self.wanted)
        made._names = tuple(names)
        made.ever = self.ever.union(ever, map(int, names))
        made._number(run)
        return made

    def begun_by(self, rank: int, names: Sequence[str], run: int) -> RankMap:
        """Return the map of ranks that begin while others may come; ``rank`` is this rank's number among them."""
        made = self.with_joining_ranks(rank, names, run)
        made.ever = frozenset(map(int, names))
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """The stable ids of the live ranks: the numbers that they were started with."""
        return tuple(map(self.called, self.generation.members))

    def called(self, name: str) -> str:
        """Return the stable id of a rank of this run by its name in it; of a lost one, too."""
        return self._names[int(name)]

    @property
    def lost(self) -> int:
        """The number of ranks that are lost."""
        return len(self.ever) - self.generation.world_size

    @property
    def are_short(self) -> bool:
        """Whether the live ranks are too few, and wait for others to come."""
        return self.generation.world_size < self.wanted

    @property
    def can_lose_one(self) -> bool:
        """Whether the others go on if one more is lost."""
        return self.generation.world_size > self._min_replicas

    def does_without(self, rank: int) -> bool:
        """Return whether the rank with this stable id is lost, and the others go on."""
        return str(rank) not in self.names

    def go_on(self, generation: Generation, why: str) -> None:
        """Follow a new generation in which ranks are missing, and say why."""
        before = self.generation
        self.generation = generation
        if self.room:  # numbers are not those that ranks were started with
            lost = [self.called(name) for name in before.members if name not in generation.members]
            why += f" (started as rank {', '.join(lost)})"
        self._number(self._run)
        self.tell()
        left = generation.world_size
        waits = self.wanted > self._min_replicas
        fewer = f"fewer than {self.wanted} {'wait for others to come' if waits else 'do not go on'}"
        rest = fewer if self.wanted > 1 else "training goes on until none is"
        tell(
            "lost", logging.WARNING,
            f"Rank {before.rank} goes on as rank {generation.rank} of {left}: {why.rstrip('.')}. {left} of "
            f"{len(self.ever)} replicas are left, and {rest}. Steps that the lost had not shared are gone; their "
            "samples are trained on by the others.",
            rank=generation.rank, was=before.rank, generation=generation.number, world_size=left, names=self.names,
        )  # fmt: skip
        if generation.rank == 0 and before.rank != 0:
            log.warning("This rank, started as rank %s, logs and saves from here.", self.names[0])

    def _number(self, run: int) -> None:
        """Number the ranks anew from this run on."""
        self.room = f"lightning_async/since{run}"
        _here[:] = [self]
        number_rank(self.generation.rank)

    def tell(self) -> None:
        """Tell the launcher of the generation; numbers go on counting up from run to run."""
        tell_generation((self._run << 32) + self.generation.number, self.names)


def count_run(at_least: int = 0) -> int:
    """The number of a new run of this process, by any strategy: what one leaves in the store is not the next one's.

    All ranks count alike; one that came late begins with ``at_least`` this.
    """
    _runs[0] = max(_runs[0] + 1, at_least)
    return _runs[0]


def next_run() -> int:
    """Return the number that `count_run` would give."""
    return _runs[0] + 1


def run_name(run: int) -> str:
    """Return the prefix of a run's keys in the store."""
    return f"lightning_async/{run}"


def left_here() -> RankMap | None:
    """Return the live ranks, where an earlier run of this process has lost some."""
    return _here[0] if _here else None


def among(live_ranks: RankMap | None, environment: Any, num_serving: int = 0) -> Any:
    """Return the environment of the live replicas; the last ``num_serving`` of the ranks that were started are none."""
    if live_ranks is None or not live_ranks.room:
        size = environment.world_size() - num_serving
        return (
            RenumberedEnvironment(environment, environment.global_rank(), size, _ROOM) if num_serving else environment
        )
    return RenumberedEnvironment(
        environment, live_ranks.generation.rank, live_ranks.generation.world_size, live_ranks.room
    )


def numbered_last(environment: Any) -> Any:
    """The environment of a process that was started while others train, and is not among them yet: they have a rank
    0, whatever its own number is."""
    comes = environment is not None and came_back() is not None and not _here
    return JoiningEnvironment(environment) if comes else environment


def name_in_run(rank: int, names: Sequence[str]) -> str:
    """Return the name in a run of the rank that was started with this number.

    >>> name_in_run(2, ()), name_in_run(2, ("0", "2", "3"))
    ('2', '1')

    Args:
        rank: that number.
        names: of those that began that run, the numbers that they were started with; none where all did.
    """
    return str(names.index(str(rank)) if names else rank)


def number_rank(rank: int) -> None:
    """Tell Lightning's printing, logging and saving which rank this process is."""
    for module in (fabric("utilities.rank_zero"), pytorch("utilities.rank_zero")):
        module.rank_zero_only.rank = rank
