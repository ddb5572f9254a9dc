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
    """Who is left of the ranks that began; the numbers that they have now.

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
        """Those who are there once others have come, for a run of all of them: what this rank's number is in it, what
        all are called for life, and who else has ever been there."""
        made = RankMap(Generation.first(rank, len(names)), run, self._min_replicas, self, self.wanted)
        made._names = tuple(names)
        made.ever = self.ever.union(ever, map(int, names))
        made._number(run)
        return made

    def begun_by(self, rank: int, names: Sequence[str], run: int) -> RankMap:
        """These begin, and others may come: what this rank's number is among them."""
        made = self.with_joining_ranks(rank, names, run)
        made.ever = frozenset(map(int, names))
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """The numbers that those who are left were started with."""
        return tuple(map(self.called, self.generation.members))

    def called(self, name: str) -> str:
        """The number that a rank of this run, by its name in it, was started with; of one that is lost, too."""
        return self._names[int(name)]

    @property
    def lost(self) -> int:
        """How many ranks are gone."""
        return len(self.ever) - self.generation.world_size

    @property
    def are_short(self) -> bool:
        """Whether those who are left wait for others to come."""
        return self.generation.world_size < self.wanted

    @property
    def can_lose_one(self) -> bool:
        """Whether the others go on should one more be lost."""
        return self.generation.world_size > self._min_replicas

    def does_without(self, rank: int) -> bool:
        """Whether the one that was started with this number is lost, and the others go on."""
        return str(rank) not in self.names

    def go_on(self, generation: Generation, why: str) -> None:
        """A generation is formed in which others are missing, for these reasons."""
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
        """Numbers are others from this run on."""
        self.room = f"lightning_async/since{run}"
        _here[:] = [self]
        number_rank(self.generation.rank)

    def tell(self) -> None:
        """The launcher hears of it; numbers go on counting up from run to run."""
        tell_generation((self._run << 32) + self.generation.number, self.names)


def count_run(at_least: int = 0) -> int:
    """The number of a new run of this process, by any strategy: what one leaves in the store is not the next one's.

    All ranks count alike; one that came late begins with ``at_least`` this.
    """
    _runs[0] = max(_runs[0] + 1, at_least)
    return _runs[0]


def next_run() -> int:
    """What `count_run` would say."""
    return _runs[0] + 1


def run_name(run: int) -> str:
    """Of what a run has in the store."""
    return f"lightning_async/{run}"


def left_here() -> RankMap | None:
    """Who is left, where an earlier run of this process has lost ranks."""
    return _here[0] if _here else None


def among(live_ranks: RankMap | None, environment: Any, num_serving: int = 0) -> Any:
    """The environment of the replicas that are there; so many of the last ranks that were started are none."""
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
    """What the rank that was started with this number is called in a run.

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
