"""The options of averaging, and the averaging rule with the rule's state.

`AveragerConfig` holds the options. `RuleState` holds the rule and its state, which are equal on all replicas between
rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_async.algorithms.automatic import Trend
from lightning_async.algorithms.averaging import AveragingRule, Round
from lightning_async.algorithms.compression import TopK
from lightning_async.engine.buckets import Buckets
from lightning_async.engine.checkpoint_markers import BY_FRAGMENT, ModelState
from lightning_async.engine.compressed_mean import Compression
from lightning_async.engine.shared_state import SharedState
from lightning_async.engine.timeouts import Timeouts
from lightning_async.engine.work_ledger import Weighting
from lightning_async.flat import FlatLayout

_LEFT_BY_CODES = 1e-6
"""The weight at a sync point of a step that a replica has already sent in a message of codes; a new step has weight 1.
Such a message leaves a small compression error in the replica's parameters. The weight is negligible beside new work,
but decides if no replica has new work."""
_FIRST_ROUNDS = 4  # of each fragment: later measurements are relative to those of these rounds
EXAMPLE = "Timeouts(dead_after=timedelta(seconds=12))"


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


class RoundTrends:
    """The trends of two measurements of committed rounds, which tell the schedule how far replicas are apart.

    Args:
        num_fragments: Number of fragments of the parameters, each with rounds of its own.
    """

    def __init__(self, num_fragments: int = 1) -> None:
        self._num_fragments = num_fragments
        self.spread = Trend()
        """The trend of the squared distance between replicas, divided by the steps since they agreed."""
        self.loss_variance = Trend()
        """The trend of the variance of losses over replicas."""

    def compare(self, spread: float, loss_variance: float) -> None:
        """Add the measurements of a committed round to the trends `spread` and `loss_variance`.

        ``spread`` is that of the round's fragment. An infinite measurement is unknown, and is left out.
        """
        window = _FIRST_ROUNDS * self._num_fragments
        self.spread = self.spread.add(self._num_fragments * spread, window)  # scaled from one fragment to all
        self.loss_variance = self.loss_variance.add(loss_variance, window)

    def state_dict(self) -> dict[str, Any]:
        return {
            "spread": list(self.spread), "loss_variance": list(self.loss_variance), "fragments": self._num_fragments,
        }  # fmt: skip

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a saved state; a trend counts rounds of all fragments, so it is converted to their present number."""
        for name in ("spread", "loss_variance"):
            trend = Trend(*saved[name])
            number = trend.number * self._num_fragments // int(saved["fragments"])
            setattr(self, name, trend._replace(number=number))


class RuleState(ModelState):
    """The averaging rule, and the rule's state for each fragment of the parameters.

    The state is equal on all replicas between rounds, except for the fields in `AveragingRule.per_replica`. Only the
    methods of this object change the state. The lock `SharedState.committing` protects it: the engine's thread holds
    the lock when it commits a round; on the training thread, `mix_` and the methods that copy the state take the lock.
    """

    def __init__(self, rule: AveragingRule, buckets: Buckets, shared_state: SharedState) -> None:
        self.rule = rule
        self._states: list[Any] = []
        super().__init__(buckets, shared_state)

    @property
    def name(self) -> str:
        """The rule's name, which a checkpoint stores beside the rule's state."""
        return _name_of(self.rule)

    @property
    def next_fragment(self) -> int:
        return self.num_rounds % self._replica.num_fragments

    def begin(self, target: Tensor) -> None:
        """Initialise the rule's state from the parameters in the bucket ``target``, which are equal on all replicas."""
        super().begin(target)
        replica = self._replica
        self._states = [
            self.rule.init(replica.of_rule(target, fragment), replica.layout_of(fragment))
            for fragment in range(replica.num_fragments)
        ]

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

    def _models(self, target: Tensor) -> list[Tensor]:
        models = zip(super()._models(target), self._states, strict=True)
        return [self.rule.common_model(model, state) for model, state in models]

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

    def load_state_dict(self, saved: dict[str, Any], own: dict[str, Any]) -> None:
        """Load ``saved``, a result of `state_dict`, and ``own``, a result of ``rule_state_dict(own=True)``.

        Fields that differ between replicas, and that ``own`` lacks, keep their initial values. Raises ValueError if
        another rule has saved its state.
        """
        super().load_state_dict(saved, own)
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
        parts = value[BY_FRAGMENT] if isinstance(value, dict) and value.keys() == {BY_FRAGMENT} else [value]
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


def _carry_over(old: Tensor, names: Sequence[str], sizes: Sequence[int], new: Tensor, layout: FlatLayout) -> None:
    """Copy values from ``old`` into ``new`` for each parameter that has the same name and size in both.

    ``old`` is laid out by ``names`` and ``sizes``, and ``new`` by ``layout``.
    """
    was = dict(zip(names, old.split(list(sizes)), strict=True))
    for name, part in zip(layout.names, new.split(layout.sizes), strict=True):
        if name in was and was[name].shape == part.shape:
            part.copy_(was[name])
