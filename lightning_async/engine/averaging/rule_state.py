"""The agreement of replicas: `RuleState` is the state that all share, `WorkLedger` the work that it does not hold yet.

`AveragerConfig` says how one replica averages.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_async.algorithms.averaging import AveragingRule, Round
from lightning_async.algorithms.compression import TopK
from lightning_async.engine.buckets import Buckets
from lightning_async.engine.compressed_mean import Compression
from lightning_async.engine.shared_state import SharedState
from lightning_async.engine.timeouts import Timeouts
from lightning_async.flat import FlatLayout

REST = 1e-6
"""What a reported step weighs at a sync point beside a new one: a message of codes leaves a bit of what it reported in
the replica's parameters. That weighs next to nothing beside new work, and decides where there is none."""
EXAMPLE = "Timeouts(dead_after=timedelta(seconds=12))"
Weighting = Literal["samples", "steps", "equal"]


@dataclass(frozen=True, kw_only=True)
class AveragerConfig:
    """One replica's way to average, beside its rule and its schedule. Raises TypeError or ValueError if wrong."""

    overlap: bool = True  # rounds run while training goes on; False: training waits for each
    weighting: Weighting = "samples"  # a message's weight: the samples or the steps behind it, or 1 for each
    compression: Compression | TopK = "none"  # of the rule's messages, see `CompressedMean` and `SparseMean`
    part_bytes: int = 16 << 20  # payloads move in parts of at most this size
    min_replicas: int | None = None  # fewer do not go on; None: half of the started, rounded up, or all, see `fewest`
    max_replicas: int | None = None  # joining ranks are admitted up to this number; None: as many as were started
    timeouts: Timeouts = field(default_factory=Timeouts)  # of the engine

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise ValueError(f"`AveragerConfig(weighting={self.weighting!r})` must be one of {get_args(Weighting)}.")
        if not isinstance(self.compression, TopK) and self.compression not in get_args(Compression):
            raise ValueError(
                f"`AveragerConfig(compression={self.compression!r})` must be one of {get_args(Compression)}, or a TopK."
            )
        if self.part_bytes < 4:
            raise ValueError(f"`AveragerConfig(part_bytes={self.part_bytes})` must be at least 4.")
        if not isinstance(self.timeouts, Timeouts):
            raise TypeError(f"`timeouts={self.timeouts!r}` must be Timeouts(...), such as {EXAMPLE}.")
        for name, none in (("min_replicas", "half"), ("max_replicas", "as many as were started")):
            given = getattr(self, name)
            if not isinstance(given, int | None) or isinstance(given, bool):
                raise TypeError(f"`{name}={given!r}` must be a number of replicas, or None for {none}.")
            if given is not None and given < 1:
                raise ValueError(f"`{name}={given}` must be at least 1.")
        if (self.min_replicas or 1) > (self.max_replicas or math.inf):
            raise ValueError(f"`min_replicas={self.min_replicas}` must be at most `max_replicas={self.max_replicas}`.")

    def settings(self) -> dict[str, object]:
        names = ("overlap", "weighting", "compression", "min_replicas", "max_replicas")
        own = {name: getattr(self, name) for name in names}
        return {**own, "part_mb": self.part_bytes / 2**20, "timeouts.replicas": self.timeouts.replicas}

    def fewest(self, started: int, can_lose: bool = True) -> int:
        """Return how many replicas go on without those that are lost; fewer end.

        >>> [AveragerConfig().fewest(started) for started in (1, 2, 3, 8)]
        [1, 1, 2, 4]

        ``can_lose``: the transport can form groups anew.
        """
        if self.min_replicas is not None:
            return self.min_replicas
        return (started + 1) // 2 if can_lose else started

    def survives(self, started: int, can_lose: bool = True) -> int:
        """Return how many form groups anew: one, where fewer than `fewest` wait for others."""
        return 1 if self.timeouts.replicas else self.fewest(started, can_lose)

    def rest(self, rule: AveragingRule) -> float:
        """Return what a reported step weighs at a sync point, for what its message has left in the parameters."""
        if self.compression == "none" or rule.keeps_residual:
            return 0.0
        return 1.0 if isinstance(self.compression, TopK) else REST  # most of a sparse message is left

    def check_rule(self, owner: str, rule: AveragingRule) -> None:
        """Raise ValueError, in the name of ``owner``, for a rule that this configuration cannot carry out."""
        if self.overlap and not rule.overlappable:
            raise ValueError(
                f"`{owner}(rule={rule!r}, overlap=True)`: this rule overwrites the parameters, so the steps taken "
                "during a round would be lost. Pass `overlap=False`, or `rule=DeltaMean()`."
            )
        if self.compression not in ("none", "bf16") and not rule.sends_difference:
            sparse = isinstance(self.compression, TopK)
            lacks = "of which a part says too little" if sparse else "which 8 bits hold too coarsely"
            raise ValueError(
                f"`{owner}(rule={rule!r}, compression={self.compression!r})`: this rule sends the parameters "
                f"themselves, {lacks} for replicas ever to agree. Use a rule that sends "
                "differences (`DiLoCo(outer_lr=1.0, outer_momentum=0.0)` averages as `DeltaMean()` does), or "
                '`compression="bf16"`.'
            )


@dataclass(frozen=True)
class Work:
    """An amount of work of one replica."""

    samples: float = 0.0
    steps: float = 0.0

    def __sub__(self, other: Work) -> Work:
        return Work(self.samples - other.samples, self.steps - other.steps)

    def weight(self, weighting: Weighting) -> float:
        if weighting == "equal":
            return float(self.steps > 0 or self.samples > 0)
        return self.steps if weighting == "steps" else self.samples


@dataclass
class WorkLedger:
    """Two counts of one replica's work: counted when a step is done, counted off when a round that holds it commits.

    ``work`` weighs it in the next mean, and an agreement ends it. ``since_round`` is the clock of rounds, and goes on
    over agreements. Every field is read and written under `SharedState.changed`.
    """

    now: Callable[[], float] = time.monotonic
    work: Work = field(default_factory=Work)  # what no round holds, since replicas last agreed: its weight
    since_round: float = 0.0  # steps that no round holds
    reported: Work = field(default_factory=Work)  # what the last committed message held; none after a consensus
    last_round: float = 0.0  # when a round was last committed
    fresh: bool = False
    """Synchronous steps were taken since the rule's state was begun: that begins anew with the next round."""
    synchronous: bool = False
    """The replica takes synchronous steps: nobody goes on without it, and it is not excused for being slow."""
    missed: int = 0
    """Synchronous steps of the others that this replica had no part in: its optimizers have not taken them."""

    before_s: float = 0.0  # seconds since the last round, where training goes on from a checkpoint

    def start(self) -> None:
        self.last_round = self.now() - self.before_s

    def step(self, samples: float) -> None:
        self.work = Work(self.work.samples + samples, self.work.steps + 1)
        self.since_round += 1

    def agree(self) -> None:
        """Count all work off: it is in the model that all hold. The clock of rounds goes on."""
        self.work = Work()
        self.reported = Work()

    def round(self, work: Work | None, steps: float = 0.0) -> None:
        """Count off this replica's ``work`` and ``steps`` in a committed round; None: it was absent."""
        self.last_round = self.now()
        if work is not None:
            self.work = self.work - work
            self.reported = work
            self.since_round -= steps

    def synchronous_step(self, work: Work | None) -> None:
        """Count a step on averaged gradients; ``work`` is None for a replica that has gone on to local steps."""
        self.fresh = True
        self.last_round = self.now()
        self.missed += work is None and self.synchronous
        if work is not None or self.synchronous:
            # Shared already: what is kept is only who has the newest model, should a sync point come next.
            self.work = work or Work()
            self.reported = Work()
            self.since_round = 0.0

    def begin(self) -> None:
        if self.fresh:
            self.fresh, self.since_round, self.last_round = False, 0.0, self.now()

    def part(self) -> None:
        self.work = Work()
        self.since_round = 0.0
        self.missed = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "synchronous": self.synchronous,
            "fresh": self.fresh,
            "missed": self.missed,
            "steps_since_round": self.since_round,
            "seconds_since_round": self.now() - self.last_round,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.synchronous = bool(saved["synchronous"])
        self.fresh = bool(saved["fresh"])
        self.missed = int(saved.get("missed", 0))
        self.since_round = float(saved.get("steps_since_round", 0.0))
        self.before_s = float(saved.get("seconds_since_round", 0.0))


class RuleState:
    """The rule and its state for each fragment, equal on all replicas between rounds.

    Only this touches them, under `SharedState.committing`, which the loop holds for commits.
    """

    def __init__(self, rule: AveragingRule, buckets: Buckets, shared_state: SharedState) -> None:
        self.rule = rule
        self._states: list[Any] = []
        self._replica = buckets.replica
        self._buckets = buckets
        self._shared_state = shared_state
        self.begin(buckets.received)

    def begin(self, target: Tensor) -> None:
        """Begin the rule's state where all replicas hold the parameters in the bucket ``target``."""
        replica = self._replica
        fragments = range(replica.num_fragments)
        self._states = [self.rule.init(replica.of_rule(target, f), replica.layout) for f in fragments]

    def message_(self, sent: Tensor, fragment: int) -> tuple[float, ...]:
        """Turn the snapshot in a bucket into the rule's message; return its scalars."""
        return self.rule.message_(self._replica.of_rule(sent, fragment), self._states[fragment])

    def merge_(self, sent: Tensor | None, target: Tensor, round: Round) -> None:
        """Turn the mean message of a committed round in the bucket ``target`` into the target."""
        f = round.fragment
        of_rule = self._replica.of_rule
        mine = None if sent is None else of_rule(sent, f)
        self._states[f] = self.rule.merge_(mine, of_rule(target, f), self._states[f], round)

    def agree_(self, target: Tensor) -> None:
        """Turn the mean of the parameters of a consensus into the model that it shows."""
        for fragment, state in enumerate(self._states):
            mean = self._replica.of_rule(target, fragment)
            shown = self.rule.agree(mean, state)
            if shown is not mean:
                mean.copy_(shown)

    def mix_(self, live: Tensor, base: Tensor, target: Tensor, round: Round) -> None:
        f = round.fragment
        with self._shared_state.committing:
            self._states[f] = self.rule.mix_(live, base, target, self._states[f], round)

    def abandon_(self, sent: Tensor, fragment: int) -> None:
        with self._shared_state.committing:
            mine = self._replica.of_rule(sent, fragment)
            self._states[fragment] = self.rule.abandon_(mine, self._states[fragment])

    def share(self, target: Tensor, mine: int, num_shares: int) -> dict[str, Any]:
        """Copy one of equal parts of each flat tensor after a round that has made ``target``, and the rest whole.

        Only what is equal on all replicas. Under `SharedState.committing`.
        """
        state = {k: v for k, v in self.rule.state_dict(self._states[0]).items() if k not in self.rule.per_replica}
        layout = self._replica.layout
        flat = {"model": self._replica.of_rule(target), **state}
        return {
            "round": self._shared_state.next_exchange,
            "rule": type(self.rule).__qualname__,
            "parameters": [[name, size] for name, size in zip(layout.names, layout.sizes, strict=True)],
            "flat": {
                name: value.reshape(-1).tensor_split(num_shares)[mine].clone()
                for name, value in flat.items()
                if isinstance(value, Tensor)
            },
            "shapes": {name: list(value.shape) for name, value in flat.items() if isinstance(value, Tensor)},
            "plain": {name: copy.deepcopy(v) for name, v in state.items() if not isinstance(v, Tensor)},
        }

    def state_dict(self) -> dict[str, Any]:
        with self._shared_state.committing:
            round_id = self._shared_state.next_exchange
            state = self._copied(own=False)
        layout = self._replica.layout
        places = [[name, size] for name, size in zip(layout.names, layout.sizes, strict=True)]
        return {"round": round_id, "rule": type(self.rule).__qualname__, "rule_state": state, "parameters": places}

    def rule_state_dict(self, own: bool) -> dict[str, Any]:
        """Copy the rule's state: this replica's ``own``, or what is equal on all."""
        with self._shared_state.committing:
            return self._copied(own)

    def nbytes(self) -> int:
        """Return the bytes of the tensors in the rule's state; from any thread."""
        with self._shared_state.committing:
            state = self.rule.state_dict(self._states[0])
        return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))

    def _copied(self, own: bool) -> dict[str, Any]:
        state = self.rule.state_dict(self._states[0])
        return {k: copy.deepcopy(v) for k, v in state.items() if (k in self.rule.per_replica) == own}

    def load_state_dict(self, saved: dict[str, Any], own: dict[str, Any]) -> None:
        """Go on from `state_dict`; raise ValueError for another rule's. State that ``own`` lacks begins anew."""
        mine = type(self.rule).__qualname__
        self._shared_state.next_exchange = int(saved["round"])
        if saved["rule"] != mine and not (saved["rule_state"] or own):
            return  # that one has no state: this one's begins here
        if saved["rule"] != mine:
            raise ValueError(
                f"`rule={self.rule!r}` cannot go on from a checkpoint that `{saved['rule']}` wrote: pass that rule."
            )
        places = saved.get("parameters")
        state = self._fitted({**saved["rule_state"], **own}, places)
        whole = {**self.rule_state_dict(own=True), **state}
        self._states[0] = self.rule.load_state_dict(self._states[0], whole)

    def _fitted(self, state: dict[str, Any], places: Sequence[Any] | None) -> dict[str, Any]:
        """Fit a saved state to this layout: parameters may have been frozen or unfrozen; new ones begin anew."""
        layout = self._replica.layout
        if places is None or [name for name, _ in places] == list(layout.names):
            return state
        sizes = [size for _, size in places]
        now = {**self.rule_state_dict(own=False), **self.rule_state_dict(own=True)}
        fitted = dict(state)
        for key, old in state.items():
            new = now.get(key)
            if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == (sum(sizes),):
                _carry_over(old, [name for name, _ in places], sizes, new, layout)
                fitted[key] = new
        return fitted

    def follow_layout(self, before: FlatLayout) -> None:
        """Begin the rule's state anew for another layout than ``before``, with what is known of old parameters."""
        after = self._replica.layout
        old = _flat_tensors(self._states[0], before.numel)
        self.begin(self._buckets.received)
        for name, tensor in _flat_tensors(self._states[0], after.numel).items():
            if name in old:
                _carry_over(old[name], before.names, before.sizes, tensor, after)


def _carry_over(old: Tensor, names: Sequence[str], sizes: Sequence[int], new: Tensor, layout: FlatLayout) -> None:
    """Copy a flat tensor of another layout for each parameter that is still there, in its size."""
    was = dict(zip(names, old.split(list(sizes)), strict=True))
    for name, part in zip(layout.names, new.split(layout.sizes), strict=True):
        if name in was and was[name].shape == part.shape:
            part.copy_(was[name])


def _flat_tensors(state: Any, numel: int) -> dict[str, Tensor]:
    """Return the fields of a rule's state that hold one number per element of the parameters."""
    fields = state._asdict() if hasattr(state, "_asdict") else {}
    return {name: t for name, t in fields.items() if isinstance(t, Tensor) and t.shape == (numel,)}
