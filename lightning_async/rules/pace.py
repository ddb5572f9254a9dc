"""How fast replicas are, which of them is slow, and why."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["Pace", "Reason", "Straggler", "straggler"]

Reason = Literal["data", "compute", "communication"]
_REASONS: tuple[Reason, ...] = ("data", "compute", "communication")


class Pace(NamedTuple):
    """What a batch takes of one replica's own time; what it waits for others is nobody's pace.

    Args:
        data_s: until the loader has it.
        compute_s: training on it.
        communication_s: packing and merging, on the training thread.
        samples: in it; 0.0 while nothing is known.
    """

    data_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    samples: float = 0.0

    @property
    def batch_s(self) -> float:
        """Of a batch, in all."""
        return self.data_s + self.compute_s + self.communication_s

    @property
    def is_known(self) -> bool:
        """Whether it was measured."""
        return self.samples > 0.0 and self.batch_s > 0.0

    def per_sample(self) -> Pace:
        """The same of one sample."""
        return Pace(self.data_s / self.samples, self.compute_s / self.samples, self.communication_s / self.samples, 1.0)


class Straggler(NamedTuple):
    """The slowest replica.

    Args:
        name: whose.
        slower: its time for a sample, over the others' (median).
        reason: what takes it longer than others, most of all.
        share: of what it takes longer, how much that is.

    >>> str(Straggler("2", 3.0, "data", 0.9))
    'Rank 2 takes 3.0 times as long for a sample as the others do, 90% of it for data'
    """

    name: str
    slower: float
    reason: Reason
    share: float

    def __str__(self) -> str:
        return (
            f"Rank {self.name} takes {self.slower:.1f} times as long for a sample as the others do, "
            f"{100 * self.share:.0f}% of it for {self.reason}"
        )


def straggler(paces: Mapping[str, Pace], factor: float = 1.5) -> Straggler | None:
    r"""The replica that takes much longer for a sample than the others do; None where none does.

    .. math:: t_i > f\, \operatorname{median}_{j \ne i} t_j

    Args:
        paces: by name; those that are not known are left out.
        factor: :math:`f`. Default 1.5.

    >>> found = straggler({"0": Pace(0.0, 0.1, 0.0, 4), "1": Pace(0.2, 0.1, 0.0, 4)})
    >>> found.name, found.reason, round(found.slower, 3)
    ('1', 'data', 3.0)
    >>> straggler({"0": Pace(0.0, 0.1, 0.0, 4), "1": Pace(0.0, 0.2, 0.0, 8)}) is None
    True
    """
    known = {name: pace.per_sample() for name, pace in paces.items() if pace.is_known}
    if len(known) < 2:
        return None
    name = max(known, key=lambda each: known[each].batch_s)
    mine, others = known[name], [pace for other, pace in known.items() if other != name]
    usual_s = statistics.median(pace.batch_s for pace in others)
    if mine.batch_s <= factor * usual_s:
        return None
    longer = {
        reason: getattr(mine, f"{reason}_s") - statistics.median(getattr(pace, f"{reason}_s") for pace in others)
        for reason in _REASONS
    }
    reason = max(_REASONS, key=lambda each: longer[each])
    whole = sum(max(0.0, each) for each in longer.values())
    return Straggler(name, mine.batch_s / usual_s, reason, longer[reason] / whole if whole > 0.0 else 1.0)
