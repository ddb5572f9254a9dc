"""`RankMap`: the live ranks and their present numbers, after ranks were lost or have joined.

The functions here also pass changes of numbers to Lightning, to the launcher and to the log.
"""

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


_ROOM = "lightning_async"  # Prefix in the store under which ranks meet that have the numbers they were started with.
_runs = [0]
_here: list[RankMap] = []  # The map of this process once numbers have changed; later strategies begin with it.


class RankMap:
    """A map from the live ranks to the stable ids with which they were started.

    The engine's thread changes it as soon as the groups of a new generation are formed; any thread may read it.

    Args:
        generation: First generation of a run.
        run: Number of that run, which is equal on all ranks.
        min_replicas: Smallest number of ranks that go on.
        before: Map of an earlier run. Default: none of its ranks was renumbered.
        wanted: Smallest number of ranks that do not wait for others to come. Default: no rank waits.
    """

    def __init__(
        self, generation: Generation, run: int, min_replicas: int, before: RankMap | None = None, wanted: int = 0
    ) -> None:
        self._names = generation.members if before is None else before.names
        """Stable ids of the ranks of this run: the numbers that they were started with."""
        self.started = generation.world_size if before is None else before.started
        """Number of ranks at first."""
        self.ever = frozenset(range(self.started)) if before is None else before.ever
        """Stable ids of all ranks that have ever taken part."""
        self._run = run
        self._min_replicas = min_replicas
        self.wanted = max(wanted, min_replicas)
        self.room = "" if before is None else before.room
        """Prefix in the store under which the live ranks meet since their numbers have changed; else ``""``."""
        self.generation = generation

    def with_joining_ranks(self, rank: int, names: Sequence[str], run: int, ever: Iterable[int] = ()) -> RankMap:
        """Return the map of a run with joining ranks.

        Args:
            rank: Number of this rank in that run.
            names: Stable ids of all ranks of that run.
            run: Number of that run.
            ever: Stable ids of other ranks that have ever taken part. Default: none.
        """
        made = RankMap(Generation.first(rank, len(names)), run, self._min_replicas, self, self.wanted)
        made._names = tuple(names)
        made.ever = self.ever.union(ever, map(int, names))
        made._number(run)
        return made

    def begun_by(self, rank: int, names: Sequence[str], run: int) -> RankMap:
        """Return the map of ranks that begin before others have come.

        Args:
            rank: Number of this rank among those that begin.
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
        """Return the stable id of a rank, live or lost, that has this name in the run."""
        return self._names[int(name)]

    @property
    def lost(self) -> int:
        """Number of lost ranks."""
        return len(self.ever) - self.generation.world_size

    @property
    def are_short(self) -> bool:
        """Whether the live ranks are too few to train, and wait for others to come."""
        return self.generation.world_size < self.wanted

    @property
    def can_lose_one(self) -> bool:
        """Whether the others go on if one more is lost."""
        return self.generation.world_size > self._min_replicas

    def does_without(self, rank: int) -> bool:
        """Return whether the rank with this stable id is lost, and the others go on."""
        return str(rank) not in self.names

    def go_on(self, generation: Generation, why: str) -> None:
        """Follow a new generation that lacks lost ranks, renumber the ranks, and report it.

        Args:
            generation: The new generation.
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
        """Use the present numbers of the ranks from this run on, also in later strategies of this process."""
        self.room = f"lightning_async/since{run}"
        _here[:] = [self]
        number_rank(self.generation.rank)

    def tell(self) -> None:
        """Report the generation to the launcher, under a number that grows from run to run, too."""
        tell_generation((self._run << 32) + self.generation.number, self.names)


def count_run(at_least: int = 0) -> int:
    """Return the number of a new run of this process, by any strategy.

    Runs have different numbers, so that a run does not read what an earlier one has left in the store. All ranks count
    the same runs.

    Args:
        at_least: Smallest number, for a rank that has joined and has not counted earlier runs. Default: none.
    """
    _runs[0] = max(_runs[0] + 1, at_least)
    return _runs[0]


def next_run() -> int:
    """Return the number that `count_run` would return, without counting a run."""
    return _runs[0] + 1


def run_name(run: int) -> str:
    """Return the prefix of a run's keys in the store."""
    return f"lightning_async/{run}"


def left_here() -> RankMap | None:
    """Return the map of live ranks if an earlier run of this process has renumbered them, else None."""
    return _here[0] if _here else None


def among(live_ranks: RankMap | None, environment: Any, num_serving: int = 0) -> Any:
    """Return an environment in which only the live replicas are counted.

    Args:
        live_ranks: Live ranks; None where no rank may be lost.
        environment: Environment of this rank.
        num_serving: Number of started ranks, the last ones, that are no replicas. Default 0.
    """
    if live_ranks is None or not live_ranks.room:
        size = environment.world_size() - num_serving
        return (
            RenumberedEnvironment(environment, environment.global_rank(), size, _ROOM) if num_serving else environment
        )
    return RenumberedEnvironment(
        environment, live_ranks.generation.rank, live_ranks.generation.world_size, live_ranks.room
    )


def numbered_last(environment: Any) -> Any:
    """Return the environment of a process, with a last number while it waits to join ranks that train.

    Those ranks have a rank 0 already, which this process must not be, whatever its own number is.
    """
    comes = environment is not None and came_back() is not None and not _here
    return JoiningEnvironment(environment) if comes else environment


def name_in_run(rank: int, names: Sequence[str]) -> str:
    """Return the name that a rank has in a run.

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
