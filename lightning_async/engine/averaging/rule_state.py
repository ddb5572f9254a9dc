"""Averaging on one replica: its options, the counts of its work, and the averaging rule with the rule's state.

`AveragerConfig` holds the options. `WorkLedger` counts the work (samples and steps) that no committed round includes
yet. `RuleState` holds the rule and its state, which are equal on all replicas between rounds.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from lightning_async.algorithms.automatic import Trend
from lightning_async.algorithms.averaging import AveragingRule, Round
from lightning_async.algorithms.compression import TopK
from lightning_async.engine.buckets import Buckets
from lightning_async.engine.compressed_mean import Compression
from lightning_async.engine.shared_state import SharedState
from lightning_async.engine.timeouts import Timeouts
from lightning_async.flat import FlatLayout

_LEFT_BY_CODES = 1e-6
"""The weight at a sync point of a step that a replica has already sent in a message of codes; a new step has weight 1.
Such a message leaves a small compression error in the replica's parameters. The weight is negligible beside new work,
but decides if no replica has new work."""
EXAMPLE = "Timeouts(dead_after=timedelta(seconds=12))"
_BY_FRAGMENT = "fragments"
_FIRST_ROUNDS = 4  # of each fragment: later measurements are relative to those of these rounds
T = TypeVar("T", float, tuple[float, ...])
Weighting = Literal["samples", "steps", "equal"]


@dataclass(frozen=True, kw_only=True)
class AveragerConfig:
    """The options of averaging, besides the rule and the schedule; raises TypeError or ValueError for invalid ones."""

    overlap: bool = True  # rounds run while training goes on; False: training waits for each
    weighting: Weighting = "samples"  # a message's weight: its number of samples or steps, or 1
    compression: Compression | TopK = "none"  # compression of messages, see `CompressedMean`
    fragments: int = 1  # number of fragments of the parameters; each round moves one, in turn
    part_bytes: int = 16 << 20  # largest size of one part of a payload
    min_replicas: int | None = None  # fewer do not continue training; None: half of the started ones, see `fewest`
    max_replicas: int | None = None  # ranks may join up to this number; None: as many as were started
    timeouts: Timeouts = field(default_factory=Timeouts)  # timeouts of the engine

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
        if not isinstance(self.fragments, int) or isinstance(self.fragments, bool):
            raise TypeError(f"`fragments={self.fragments!r}` must be an int.")
        if self.fragments < 1:
            raise ValueError(f"`fragments={self.fragments}` must be at least 1.")
        for name, none in (("min_replicas", "half"), ("max_replicas", "as many as were started")):
            given = getattr(self, name)
            if not isinstance(given, int | None) or isinstance(given, bool):
                raise TypeError(f"`{name}={given!r}` must be a number of replicas, or None for {none}.")
            if given is not None and given < 1:
                raise ValueError(f"`{name}={given}` must be at least 1.")
        if (self.min_replicas or 1) > (self.max_replicas or math.inf):
            raise ValueError(f"`min_replicas={self.min_replicas}` must be at most `max_replicas={self.max_replicas}`.")

    def settings(self) -> dict[str, object]:
        names = ("overlap", "weighting", "compression", "fragments", "min_replicas", "max_replicas")
        own = {name: getattr(self, name) for name in names}
        return {**own, "part_mb": self.part_bytes / 2**20, "timeouts.replicas": self.timeouts.replicas}

    def fewest(self, started: int, can_lose: bool = True) -> int:
        """Return the smallest number of live replicas with which training continues after others were lost.

        It is `min_replicas`, or by default half of the replicas with which training ``started``, rounded up.
        ``can_lose`` is False if the transport cannot form new groups; then the default is all of them.

        >>> [AveragerConfig().fewest(started) for started in (1, 2, 3, 8)]
        [1, 1, 2, 4]
        """
        if self.min_replicas is not None:
            return self.min_replicas
        return (started + 1) // 2 if can_lose else started

    def survives(self, started: int, can_lose: bool = True) -> int:
        """Return the smallest number of live replicas that form new groups after others were lost.

        With `timeouts.replicas` it is 1: then even a single live replica forms a group, in which it waits for others to
        join. Otherwise it is the result of `fewest`, which also describes the arguments.
        """
        return 1 if self.timeouts.replicas else self.fewest(started, can_lose)

    def weight_of_reported(self, rule: AveragingRule) -> float:
        """Return the factor with which work that a round has averaged already counts in a consensus.

        Without compression it is 0. With compression a part of the work was not sent, and is in this replica's
        parameters only, so the factor is larger. It is 1 if the rule lets replicas keep models of their own, as for
        work that no round has averaged yet.
        """
        if not rule.absent_follow:
            return 1.0
        if self.compression == "none" or rule.keeps_residual:
            return 0.0
        return 1.0 if isinstance(self.compression, TopK) else _LEFT_BY_CODES  # most of a sparse message is left

    def check_rule(self, owner: str, rule: AveragingRule) -> None:
        """Raise ValueError if ``rule`` does not work with these options; the error message names ``owner``."""
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
        if isinstance(self.compression, TopK) and rule.mixes:
            raise ValueError(
                f"`{owner}(rule={rule!r}, compression={self.compression!r})`: this rule gives up a part of what is in "
                "the parameters beyond the messages, and with it what sparse messages lack, which is most of them. "
                'Use a rule without mixing, or codes, such as `compression="int8"`.'
            )


@dataclass(frozen=True)
class Work:
    """An amount of work of one replica: samples and optimizer steps."""

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
    """The counts of one replica's work: a step adds to them, a committed round subtracts the work in its message.

    Each fragment of the parameters has two counts. ``work`` determines this replica's weight in the next mean, and is
    set to zero when replicas agree, which means that all of them hold one model. ``since_round`` counts the steps since
    the fragment's last round, whether or not replicas have agreed since then. The lock `SharedState.changed` protects
    all fields.
    """

    now: Callable[[], float] = time.monotonic
    num_fragments: int = 1
    work: list[Work] = field(init=False)  # by fragment, work since replicas last agreed that no round includes
    since_round: list[float] = field(init=False)  # by fragment, steps since its last round
    reported: list[Work] = field(init=False)  # by fragment, work in the last committed message; none after a consensus
    last_round: float = 0.0  # when a round was last committed
    fresh: bool = False
    """Whether synchronous steps were taken since the rule's state was initialised.

    If so, the next round initialises the rule's state anew.
    """
    synchronous: bool = False
    """Whether this replica takes synchronous steps; then all other replicas wait for it, however slow it is."""
    missed: int = 0
    """The number of synchronous steps that the other replicas took, but this replica's optimizers did not."""

    before_s: float = 0.0  # seconds between the last round and the checkpoint that was loaded
    spread: Trend = field(default_factory=Trend)
    """The trend of the squared distance between replicas, divided by the steps since they agreed."""
    loss_variance: Trend = field(default_factory=Trend)  # trend of the variance of losses over replicas

    def __post_init__(self) -> None:
        self.agree()
        self.since_round = [0.0] * self.num_fragments

    def start(self) -> None:
        self.last_round = self.now() - self.before_s

    def step(self, samples: float) -> None:
        self.work = [Work(work.samples + samples, work.steps + 1) for work in self.work]
        self.since_round = [steps + 1 for steps in self.since_round]

    def agree(self) -> None:
        """Set this replica's work to zero, as one model includes the work of all replicas; keep ``since_round``."""
        self.work = [Work()] * self.num_fragments
        self.reported = [Work()] * self.num_fragments

    def round(self, work: Work | None, steps: float = 0.0, fragment: int = 0) -> None:
        """Count a committed round of ``fragment``: subtract the ``work`` and ``steps`` of this replica's message.

        ``work`` is None if this replica had no message in the round.
        """
        self.last_round = self.now()
        if work is not None:
            self.work[fragment] -= work
            self.reported[fragment] = work
            self.since_round[fragment] -= steps

    def compare(self, spread: float, loss_variance: float) -> None:
        """Add the measurements of a committed round to the trends `spread` and `loss_variance`.

        ``spread`` is that of the round's fragment. An infinite measurement is unknown, and is left out.
        """
        window = _FIRST_ROUNDS * self.num_fragments
        self.spread = self.spread.add(self.num_fragments * spread, window)  # scaled from one fragment to all
        self.loss_variance = self.loss_variance.add(loss_variance, window)

    def synchronous_step(self, work: Work | None) -> None:
        """Count a step with averaged gradients; ``work`` is None if this replica had no gradients in that step.

        If this replica takes synchronous steps, a step without its gradients also counts as missed. If it takes local
        steps already, the step does not change its work.
        """
        self.fresh = True
        self.last_round = self.now()
        self.missed += work is None and self.synchronous
        if work is not None or self.synchronous:
            # All replicas share this work already. It only tells which rank has the newest model if a sync point comes.
            self.agree()
            self.work = [work or Work()] * self.num_fragments
            self.since_round = [0.0] * self.num_fragments

    def begin(self) -> None:
        if self.fresh:
            self.fresh = False
            self.since_round = [0.0] * self.num_fragments
            self.last_round = self.now()

    def part(self) -> None:
        self.work = [Work()] * self.num_fragments
        self.since_round = [0.0] * self.num_fragments
        self.missed = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "synchronous": self.synchronous,
            "fresh": self.fresh,
            "missed": self.missed,
            "steps_since_round": list(self.since_round),
            "seconds_since_round": self.now() - self.last_round,
            "trends": {"spread": list(self.spread), "loss_variance": list(self.loss_variance)},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.synchronous = bool(saved["synchronous"])
        self.fresh = bool(saved["fresh"])
        self.missed = int(saved["missed"])
        since = saved["steps_since_round"]
        self.since_round = self._of_cut(since)
        self.before_s = float(saved["seconds_since_round"])
        self.spread = self._trend_of(saved["trends"]["spread"], len(since))
        self.loss_variance = self._trend_of(saved["trends"]["loss_variance"], len(since))

    def work_dict(self) -> list[list[float]]:
        return [[work.samples, work.steps] for work in self.work]

    def reported_dict(self) -> list[list[float]]:
        return [[work.samples, work.steps] for work in self.reported]

    def load_work(self, work: Sequence[Any], reported: Sequence[Any]) -> None:
        self.work = [Work(*pair) for pair in self._of_cut([tuple(pair) for pair in work])]
        self.reported = [Work(*pair) for pair in self._of_cut([tuple(pair) for pair in reported])]

    def _trend_of(self, saved: Sequence[Any], num_fragments: int) -> Trend:
        """Return the trend that a checkpoint has ``saved``.

        A trend counts the rounds of all fragments. The checkpoint has counted rounds of ``num_fragments`` fragments, so
        its count is converted to the present number of fragments.
        """
        trend = Trend(*saved)
        return trend._replace(number=trend.number * self.num_fragments // num_fragments)

    def _of_cut(self, counts: list[T]) -> list[T]:
        """Return saved ``counts`` by fragment, for the present number of fragments.

        If the number of fragments has changed, every fragment gets the largest saved count.
        """
        return list(counts) if len(counts) == self.num_fragments else [max(counts)] * self.num_fragments


class RuleState:
    """The averaging rule, and the rule's state for each fragment of the parameters.

    The state is equal on all replicas between rounds, except for the fields in `AveragingRule.per_replica`. Only the
    methods of this object change the state. The lock `SharedState.committing` protects it: the engine's thread holds
    the lock when it commits a round; on the training thread, `mix_` and the methods that copy the state take the lock.
    """

    def __init__(self, rule: AveragingRule, buckets: Buckets, shared_state: SharedState) -> None:
        self.rule = rule
        self.num_rounds = 0
        """The number of committed averaging rounds, equal on all replicas; it determines the next round's fragment."""
        self._states: list[Any] = []
        self._sizes: list[int] = []
        self._replica = buckets.replica
        self._buckets = buckets
        self._shared_state = shared_state
        self.begin(buckets.received)

    @property
    def name(self) -> str:
        """The rule's name, which a checkpoint stores beside the rule's state."""
        return _name_of(self.rule)

    @property
    def next_fragment(self) -> int:
        return self.num_rounds % self._replica.num_fragments

    def begin(self, target: Tensor) -> None:
        """Initialise the rule's state from the parameters in the bucket ``target``, which are equal on all replicas."""
        replica = self._replica
        layouts = [replica.layout_of(f) for f in range(replica.num_fragments)]
        self._states = [self.rule.init(replica.of_rule(target, f), layout) for f, layout in enumerate(layouts)]
        self._sizes = [layout.numel for layout in layouts]

    def message_(self, sent: Tensor, fragment: int) -> tuple[float, ...]:
        """Turn the snapshot of ``fragment`` in the bucket ``sent`` into the rule's message, in place.

        Return the numbers that the rule adds to this rank's header.
        """
        return self.rule.message_(self._replica.of_rule(sent, fragment), self._states[fragment])

    def merge_(self, sent: Tensor | None, target: Tensor, round: Round) -> None:
        """Let the rule turn the mean message of a committed round into the parameters to which replicas move.

        The caller holds `SharedState.committing`.

        Args:
            sent: Bucket with this replica's message, which becomes the snapshot again; None without a finite message.
            target: Bucket with the mean message, which is overwritten by the result.
            round: Facts of the round.
        """
        f = round.fragment
        of_rule = self._replica.of_rule
        mine = None if sent is None else of_rule(sent, f)
        self._states[f] = self.rule.merge_(mine, of_rule(target, f), self._states[f], round)
        self.num_rounds += 1

    def mix_(self, live: Tensor, base: Tensor, target: Tensor, round: Round) -> None:
        f = round.fragment
        with self._shared_state.committing:
            self._states[f] = self.rule.mix_(live, base, target, self._states[f], round)

    def share(self, target: Tensor, mine: int, num_shares: int) -> dict[str, Any]:
        """Copy this rank's share of the model and of the rule's state, for a checkpoint after a round.

        ``target`` is the bucket with the round's result. Each flat tensor is divided into ``num_shares`` parts of about
        equal size, of which part ``mine`` is copied. Other values are copied completely. The share has only values that
        are equal on all replicas. The caller holds `SharedState.committing`.
        """
        state = self._by_name(own=False)
        of_rule = self._replica.of_rule
        models = [self.rule.common_model(of_rule(target, f), each) for f, each in enumerate(self._states)]
        tensors = {"model": models, **{name: parts for name, parts in state.items() if self._is_joined(parts)}}
        return {
            **self._origin(),
            "flat": {name: _share(parts, mine, num_shares) for name, parts in tensors.items()},
            "shapes": {
                name: list(parts[0].shape) if len(parts) == 1 else [sum(self._sizes)] for name, parts in tensors.items()
            },
            "plain": {name: _copied(parts) for name, parts in state.items() if name not in tensors},
        }

    def state_dict(self) -> dict[str, Any]:
        with self._shared_state.committing:
            return {**self._origin(), "rule_state": self._whole(own=False)}

    def _origin(self) -> dict[str, Any]:
        layout = self._replica.layout
        return {
            "round": self._shared_state.next_exchange,
            "num_rounds": self.num_rounds,
            "rule": self.name,
            "parameters": [[name, size] for name, size in zip(layout.names, layout.sizes, strict=True)],
        }

    def rule_state_dict(self, own: bool) -> dict[str, Any]:
        """Copy fields of the rule's state for a checkpoint.

        With ``own``, these are the fields that differ between replicas; otherwise, the fields that are equal on all.
        """
        with self._shared_state.committing:
            return self._whole(own)

    def nbytes(self) -> int:
        """Return the size of the tensors in the rule's state; any thread may call this."""
        with self._shared_state.committing:
            states = [self.rule.state_dict(state) for state in self._states]
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    def _by_name(self, own: bool) -> dict[str, list[Any]]:
        """Return fields of the rule's state by name, each as a list of the field's values by fragment.

        ``own`` selects the fields as in `rule_state_dict`.
        """
        states = [self.rule.state_dict(state) for state in self._states]
        names = [name for name in states[0] if (name in self.rule.per_replica) == own]
        return {name: [state[name] for state in states] for name in names}

    def _whole(self, own: bool) -> dict[str, Any]:
        """Copy the fields that ``own`` selects (see `rule_state_dict`), and join the fragments of each flat field.

        So the copy can be loaded with another number of fragments.
        """
        state = self._by_name(own)
        return {k: torch.cat(parts) if self._is_flat(parts) else _copied(parts) for k, parts in state.items()}

    def _is_flat(self, parts: Sequence[Any]) -> bool:
        sizes = zip(parts, self._sizes, strict=True)
        return all(isinstance(p, Tensor) and p.dtype is torch.float32 and p.shape == (size,) for p, size in sizes)

    def _is_joined(self, parts: Sequence[Any]) -> bool:
        return self._is_flat(parts) or (len(parts) == 1 and isinstance(parts[0], Tensor))

    def load_state_dict(self, saved: dict[str, Any], own: dict[str, Any]) -> None:
        """Load ``saved``, a result of `state_dict`, and ``own``, a result of ``rule_state_dict(own=True)``.

        Fields that differ between replicas, and that ``own`` lacks, keep their initial values. Raises ValueError if
        another rule has saved its state.
        """
        self._shared_state.next_exchange = int(saved["round"])
        self.num_rounds = int(saved["num_rounds"])
        if saved["rule"] != self.name and not (saved["rule_state"] or own):
            return  # the other rule had no state, so this rule's begins here
        if saved["rule"] != self.name:
            raise ValueError(
                f"`rule={self.rule!r}` cannot go on from a checkpoint that `{saved['rule']}` wrote: pass that rule."
            )
        fitted = self._fitted({**saved["rule_state"], **own}, saved["parameters"])
        whole = {**self.rule_state_dict(own=True), **fitted}
        for fragment, state in enumerate(self._states):
            part = {name: self._part(name, value, fragment) for name, value in whole.items()}
            self._states[fragment] = self.rule.load_state_dict(state, part)

    def _part(self, name: str, value: Any, fragment: int) -> Any:
        """Return the part of ``value``, the field ``name`` of a saved state, that belongs to ``fragment``.

        Raises ValueError for a field without a number per element if the number of fragments has changed.
        """
        count = len(self._sizes)
        if isinstance(value, Tensor) and value.shape == (sum(self._sizes),):
            return value.split(self._sizes)[fragment]
        parts = value[_BY_FRAGMENT] if isinstance(value, dict) and value.keys() == {_BY_FRAGMENT} else [value]
        if len(parts) != count:
            raise ValueError(
                f"`fragments={count}` cannot go on from a checkpoint of `fragments={len(parts)}`: `{name}` of "
                f"`rule={self.rule!r}` has no value for each element. Pass `fragments={len(parts)}`."
            )
        return parts[fragment]

    def _fitted(self, state: dict[str, Any], places: Sequence[Any]) -> dict[str, Any]:
        """Return a saved state, rearranged for the present layout of the parameters.

        Parameters that the saved state lacks keep their present values. ``places`` holds the name and the size of each
        saved parameter, in the sequence of the saved layout.
        """
        layout = self._replica.layout
        if [name for name, _ in places] == list(layout.names):
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
        """Initialise the rule's state for a new layout of the parameters; ``before`` is the old layout.

        Parameters that are in both layouts keep their values in the state.
        """
        old = self._flat_fields()
        self.begin(self._buckets.received)
        for name, parts in self._flat_fields().items():
            if name in old:
                whole = torch.cat(old[name])
                for fragment, part in enumerate(parts):
                    _carry_over(whole, before.names, before.sizes, part, self._replica.layout_of(fragment))

    def _flat_fields(self) -> dict[str, list[Tensor]]:
        """Return, by name, the fields of the rule's state that hold one number per element of the parameters.

        Each field is a list with one tensor per fragment.
        """
        fields = {**self._by_name(own=False), **self._by_name(own=True)}
        return {name: parts for name, parts in fields.items() if self._is_flat(parts)}


def _name_of(rule: AveragingRule) -> str:
    """Return a rule's name; for a rule that wraps another one, also the name of the wrapped rule, in brackets.

    Both names are needed, because states of different rules may have fields of the same name but different meaning.
    """
    name = getattr(rule, "saved_as", "") or type(rule).__qualname__
    inner = getattr(rule, "rule", None)
    return f"{name}({_name_of(inner)})" if isinstance(inner, AveragingRule) else name


def _copied(parts: Sequence[Any]) -> Any:
    return copy.deepcopy(parts[0] if len(parts) == 1 else {_BY_FRAGMENT: list(parts)})


def _share(parts: Sequence[Tensor], mine: int, num_shares: int) -> Tensor:
    """Copy part number ``mine`` of ``num_shares`` about equal parts of the tensors, joined as one flat tensor."""
    size, rest = divmod(sum(part.numel() for part in parts), num_shares)
    start = mine * size + min(mine, rest)
    end = start + size + (mine < rest)
    found = []
    for part in parts:
        found.append(part.reshape(-1)[max(0, start) : max(0, end)])
        start -= part.numel()
        end -= part.numel()
    return torch.cat(found)


def _carry_over(old: Tensor, names: Sequence[str], sizes: Sequence[int], new: Tensor, layout: FlatLayout) -> None:
    """Copy values from ``old`` into ``new`` for each parameter that has the same name and size in both.

    ``old`` is laid out by ``names`` and ``sizes``, and ``new`` by ``layout``.
    """
    was = dict(zip(names, old.split(list(sizes)), strict=True))
    for name, part in zip(layout.names, new.split(layout.sizes), strict=True):
        if name in was and was[name].shape == part.shape:
            part.copy_(was[name])
