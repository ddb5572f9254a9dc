"""What the launcher knows of a job, what can happen to it, and what can be done then: values.

There are no clocks, processes or signals in here; `decide` has what follows from what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from lightning_async.arguments import check_int, check_real

__all__ = [
    "CANNOT_START", "STORE_LOST", "TRY_AGAIN", "Action", "Announce", "Due", "Ended", "Event", "Finish", "Generation",
    "Phase", "Policy", "Rejoin", "Send", "Signalled", "Start", "State", "StoreLost", "Told", "Wait",
]  # fmt: skip

TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: a rank that was told to go has saved, and can be started again."""
STORE_LOST = 69
"""EX_UNAVAILABLE: the store, in which ranks meet, has died."""
CANNOT_START = 71
"""EX_OSERR: the system did not let a rank or the store start, or a file be written."""

_LONGEST_PAUSE_S = 60.0
_LONGEST_START_S = 1800.0
"""Until a first step: imports, downloads and compilation have taken half an hour at most, unless somebody says more."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is asked of the launcher.

    Args:
        ranks: how many there are.
        max_restarts: how often ranks are started again after one has died, all of them, or that one where the others
            go on. Default: 0.
        grace_s: seconds that ranks have to save and to end when the job is told to end. Default: 30.
        patience_s: seconds that they have when one of them has died, to go on without it, and then to end. Default: 5.
        first_pause_s: before the first restart of all ranks; each further pause is twice as long, up to a minute.
            Default: 1.
        standbys: processes that have imported what the program does, and are to be the next ranks that are started
            again. Default: 0.
        hang_after_s: without a step of any rank for so long all are killed, as if each had died. Default: None, never.
        hang_after_start_s: the same, before the first step of a training. Default: half an hour, or ``hang_after_s``
            where that is longer.

    Raises:
        TypeError, ValueError: an argument is out of range.
    """

    ranks: int
    max_restarts: int = 0
    grace_s: float = 30.0
    patience_s: float = 5.0
    first_pause_s: float = 1.0
    standbys: int = 0
    hang_after_s: float | None = None
    hang_after_start_s: float | None = None

    def __post_init__(self) -> None:
        check_int(self, "ranks", at_least=1)
        check_int(self, "max_restarts", at_least=0)
        check_int(self, "standbys", at_least=0)
        for name in ("grace_s", "patience_s", "first_pause_s"):
            check_real(self, name, at_least=0.0)
        if self.hang_after_s is not None:
            check_real(self, "hang_after_s", above=0.0)
        if self.hang_after_start_s is not None:
            check_real(self, "hang_after_start_s", above=0.0)
            if self.hang_after_s is None:
                raise ValueError(
                    f"`Policy(hang_after_start_s={self.hang_after_start_s:g})` needs `hang_after_s`: without it nobody "
                    "looks for hangs (--hang-after)."
                )

    @property
    def all(self) -> frozenset[int]:
        return frozenset(range(self.ranks))

    @property
    def hang_limits(self) -> tuple[float, float] | None:
        """Seconds without a step that are a hang: before the first one of a training, and then; None for no limit."""
        if self.hang_after_s is None:
            return None
        return self.hang_after_start_s or max(_LONGEST_START_S, self.hang_after_s), self.hang_after_s

    def pause_s(self, before: int) -> float:
        """Before all ranks are started again, when they have been so often before."""
        return min(self.first_pause_s * 2.0 ** min(before, 60), _LONGEST_PAUSE_S)

    def pause_alone_s(self, in_vain: int) -> float:
        """Before a rank is started again alone, when it has been so often since it last trained with the others."""
        return self.pause_s(in_vain - 1) if in_vain else self.first_pause_s / 10.0


class Phase(Enum):
    """Where the job stands."""

    RUNNING = "running"
    REGROUPING = "regrouping"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"
    FINISHED = "finished"


@dataclass(frozen=True)
class Ended:
    """A rank has ended: its exit status, or minus the number of the signal that has killed it."""

    rank: int
    status: int


@dataclass(frozen=True)
class Generation:
    """Ranks that train together: the first, of all, is 0; later ones are without those that have died, and with those
    that have joined again."""

    number: int
    members: frozenset[int]


@dataclass(frozen=True)
class Told:
    """A rank has told that it is in this generation."""

    rank: int
    generation: Generation


@dataclass(frozen=True)
class StoreLost:
    """The process that holds the store has ended."""


@dataclass(frozen=True)
class Signalled:
    """The launcher was sent a signal, at that many monotonic seconds."""

    number: int
    at: float


@dataclass(frozen=True)
class Due:
    """What the last `Wait` waited for has not happened in time; of a rank: its pause is over."""

    rank: int | None = None


Event = Ended | Told | StoreLost | Signalled | Due


@dataclass(frozen=True)
class Start:
    """Start these ranks, with a store of their own."""

    ranks: frozenset[int]


@dataclass(frozen=True)
class Rejoin:
    """Start this rank alone, for the so manyeth time, that it may join those who train."""

    rank: int
    count: int


@dataclass(frozen=True)
class Send:
    """Send these ranks a signal."""

    number: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class Announce:
    """Tell these ranks that one has died."""

    dead: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class Wait:
    """Be `Due` after so many seconds, in place of what was waited for before, by all or for this rank alone."""

    seconds: float
    rank: int | None = None


@dataclass(frozen=True)
class Finish:
    """End with this exit code."""

    code: int


Action = Start | Rejoin | Send | Announce | Wait | Finish


@dataclass(frozen=True)
class State:
    """What is known.

    Args:
        phase: where the job stands.
        living: ranks whose processes live.
        statuses: of the ranks of this start that have ended, in this order.
        told: the last generation that each rank has told, in its present life.
        lost: ranks that have died, and without which training goes on. Those of them that live have been started again,
            and have not joined yet; or they were left behind by others, who have ended or are told to end.
        rejoins: how often each rank was to be started again alone, in this start.
        in_vain: the same, since it last trained with the others.
        pausing: ranks that will be.
        store_lost: the store has died first.
        asked: the signal by which the job was told to end, if it was.
        asked_at: when that was.
        killed: those that live have been sent SIGKILL.
        restarts: so far, of all ranks and of single ones.
        anew: those of all ranks.
    """

    phase: Phase = Phase.RUNNING
    living: frozenset[int] = frozenset()
    statuses: Mapping[int, int] = field(default_factory=dict)
    told: Mapping[int, Generation] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    rejoins: Mapping[int, int] = field(default_factory=dict)
    in_vain: Mapping[int, int] = field(default_factory=dict)
    pausing: frozenset[int] = frozenset()
    store_lost: bool = False
    asked: int | None = None
    asked_at: float = 0.0
    killed: bool = False
    restarts: int = 0
    anew: int = 0

    @property
    def trains(self) -> bool:
        """Whether nobody has been told to end."""
        return self.phase in (Phase.RUNNING, Phase.REGROUPING)

    @property
    def settled(self) -> bool:
        """Whether all who live train together, and nobody is to be started again."""
        return self.phase is Phase.RUNNING and self.agreed is not None and not self.pausing | self.lost & self.living

    @property
    def first(self) -> int | None:
        """The rank that died first in this start, of those that are not lost; None where none has."""
        if self.store_lost:
            return None
        return next((rank for rank, status in self.statuses.items() if status != 0 and rank not in self.lost), None)

    @property
    def agreed(self) -> Generation | None:
        """The newest generation, if all of its members that live are in it.

        What the dead have told is void, and who is to join does not say with whom the others train.
        """
        told = {
            rank: generation
            for rank, generation in self.told.items()
            if self.statuses.get(rank, 0) == 0 and rank not in self.lost
        }
        number = max((generation.number for generation in told.values()), default=-1)
        newest = {generation for generation in told.values() if generation.number == number}
        if len(newest) != 1:
            return None
        (generation,) = newest
        here = all(self.told.get(rank) == generation for rank in generation.members & self.living)
        return generation if here else None

    @property
    def left_behind(self) -> frozenset[int]:
        """Ranks that trained with the others and live, and without which the others have told that they went on."""
        agreed = self.agreed
        if agreed is None:
            return frozenset()
        return (self.living & self.told.keys()) - agreed.members - self.lost
