"""`AsyncAveragingStrategy`: replicas take local steps, and their parameters are averaged in the background."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

from torch import Tensor

from lightning_async.algorithms import Synchronous
from lightning_async.algorithms.automatic import AdaptiveDiLoCo, MatchCommunication
from lightning_async.algorithms.averaging import AveragingRule
from lightning_async.algorithms.compression import TopK
from lightning_async.algorithms.outer_optimizers import DiLoCo
from lightning_async.algorithms.schedules import Schedule
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.compressed_mean import Compression
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.replica import BufferPolicies, OptimizerPolicy
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.engine.timeouts import Timeouts
from lightning_async.engine.work_ledger import Weighting
from lightning_async.strategies.async_strategy import AsyncStrategy
from lightning_async.strategies.local_steps import LocalSteps
from lightning_async.trainer import configuration_checks
from lightning_async.trainer.environment.settings import check_optimizers, text_of_code
from lightning_async.trainer.namespace import counting, pytorch
from lightning_async.trainer.namespace import name as namespace
from lightning_async.transports.base import Transport
from lightning_async.transports.resolve import TransportName

_PLAIN_MEAN = DiLoCo(outer_lr=1.0, outer_momentum=0.0)
"""A rule that averages as `DeltaMean` does. Unlike `DeltaMean`, it allows compression, and it can go on from the state
of `AdaptiveDiLoCo`."""


class AsyncAveragingStrategy(AsyncStrategy):
    r"""A strategy in which replicas take local steps and become one model by averaging in the background.

    Each replica :math:`i` trains alone. When the schedule says so, it sends a snapshot :math:`s_i` of its parameters
    and goes on training. When the work-weighted mean :math:`m = \sum_i w_i s_i` arrives, its parameters move by
    :math:`x_i \leftarrow x_i + (m - s_i)`; other rules use the mean in other ways. Validation, checkpoints, the end of
    an epoch and the end of training happen at a *sync point*. A rank that has reached the sync point waits. Meanwhile
    it takes part in the rounds of ranks that still train, until all ranks have the same model to the bit. Between sync
    points no rank waits for all others.

    Args:
        rule: Computes one model from the replicas. ``"auto"`` (default) is `AdaptiveDiLoCo`, an outer optimizer whose
            settings follow from the number of local steps in a round. For a module that steps several optimizers
            manually, ``"auto"`` is the plain mean, because momentum harms models that train against each other. Other
            rules are `DiLoCo`, `SlowMo`, `SparseLoCo`, `DeltaMean`, `PseudoGradientPenalty` around one of these, and,
            with ``overlap=False``, `Mean`. With `EASGD` replicas are different models between sync points.
        schedule: Decides when a round begins. ``"auto"`` (default) is `MatchCommunication`, whose period follows from
            the time that a round takes. Others are `AdaptivePeriod`, `EveryNSteps`, `EverySeconds`, `DyLU`,
            `Synchronous` and `Warmup`.
        overlap: True (default): rounds run while training goes on. False: training waits for each round.
        weighting: Weight of a replica's contribution: its ``"samples"`` since its last round (default), its
            ``"steps"``, ``"equal"``, or a function that returns the weight of a batch, such as its number of tokens, as
            a number >= 0. The function's code must be equal on all ranks; values from outside that it uses, such as
            the rank, may differ, because each rank weights its own batches.
        buffers: Treatment of floating-point buffers (BatchNorm statistics): ``"average"`` (default), ``"keep"`` each
            replica's, ``"broadcast"`` rank 0's, or ``"recompute"`` BatchNorm's from recent batches at every sync
            point. Integer buffers take the largest value of all replicas at every sync point. A dict has policies by
            patterns of names, of which the first that matches counts, such as ``{"queue*": "keep"}``; here ``"keep"``
            is for integer buffers, too, and buffers that match no pattern are averaged. Buffers with
            ``persistent=False`` are always each replica's own.
        optimizer_state: Treatment of the optimizers' state: ``"keep"`` each replica's (default), ``"average"`` it, or
            ``"reset"`` it after each round. A replica that was out of data and has missed synchronous steps always
            takes over the others' state at the next sync point.
        lr_clock: What a learning-rate scheduler with interval ``"step"`` counts. ``"samples"`` (default): the replica's
            own steps, each of them as a part of a step if fewer ranks train than at the start, or as more if there are
            more. A step of the schedule stands for as many samples as all ranks trained on per step when training
            began, so that schedules end with the data, whoever is left. ``"global"``: in the same way the mean steps
            of all replicas. ``"local"``: the replica's own steps as they are. Where ``max_steps`` ends training,
            schedules count steps as they are, too. Under `Synchronous` ``"global"`` and ``"samples"`` are the same.
        compression: Compression of messages: ``"int8"`` or ``"fp8"`` (a quarter of the bytes; for rules that send
            differences, such as `DiLoCo`), ``"topk"`` or `TopK(fraction, bits)` (only the largest elements; for the
            same rules), ``"bf16"`` (half of the bytes), or ``"none"``. ``"auto"`` (default) is ``TopK(0.02, bits=2)``
            under `SparseLoCo`, int8 under other rules that send differences, else none. What compression drops from a
            message stays in the replica's parameters, or in the residual of `SparseLoCo`, and is sent with a later
            message. Sync points exchange fp32.
        fragments: Number of parts of the parameters. Each round moves one part, in turn, and each part has one round
            per period of the schedule: with 4, `EveryNSteps(32)` begins a round every 8 steps, with a quarter of the
            bytes. Parts are runs of whole parameters, balanced by bytes. ``"auto"`` (default): four if ``schedule`` is
            ``"auto"`` and rounds overlap, but no more than there are parameters; else one.
        min_replicas: Smallest number of replicas with which training goes on after ranks are lost. Live ranks lose no
            local step; they repeat the round that was under way. If a lost rank had trained on samples of this epoch
            but had not shared those steps, the live ranks train on these samples again. None (default): half of the
            ranks that were started, rounded up; over Horovod all of them. If it is the number of all ranks, the loss of
            one rank ends training on all.
        max_replicas: Largest number of replicas. Ranks that are started during training are admitted up to this number:
            lost ranks under their earlier numbers, new ranks under new numbers. None (default): as many as were
            started.
        timeouts: Time limits of waits, see `Timeouts`. Default: those of `Timeouts()`.
        part_mb: Largest size in MiB of the parts in which payloads move. Default 16.
        transport: Starts the ranks and moves their bytes: `TorchTransport`, `HorovodTransport`, or a short name,
            "torch", "horovod" or "auto" (default), which is Horovod if horovodrun started the ranks, else torch.

    Raises:
        TypeError: ``rule``, ``schedule`` or ``transport`` lacks a method that it must have; a number of replicas is no
            int.
        ValueError: the value of ``weighting``, ``buffers``, ``optimizer_state``, ``lr_clock`` or ``compression`` is
            unknown; numbers of replicas contradict each other; a rule that overwrites the parameters is combined with
            ``overlap=True``, or a rule that sends the parameters themselves with `TopK` or 8 bits of compression; when
            training begins, there are more fragments than trained parameters.

    Source: local SGD (Stich, 2019), DiLoCo (Douillard et al., 2023), asynchronous model averaging as in Bagua, and for
    fragments Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
    https://arxiv.org/abs/2501.18512
    """

    strategy_name = "async_averaging"
    make_step_runner = LocalSteps

    def __init__(
        self,
        rule: AveragingRule | Literal["auto"] = "auto",
        schedule: Schedule | Literal["auto"] = "auto",
        overlap: bool = True,
        *,
        weighting: Weighting | Callable[[Any], float] = "samples",
        buffers: BufferPolicies = "average",
        optimizer_state: OptimizerPolicy = "keep",
        lr_clock: configuration_checks.LrClock = "samples",
        compression: Compression | TopK | Literal["auto", "topk"] = "auto",
        fragments: int | Literal["auto"] = "auto",
        min_replicas: int | None = None,
        max_replicas: int | None = None,
        timeouts: Timeouts | None = None,
        part_mb: float = 16.0,
        transport: Transport | TransportName = "auto",
    ) -> None:
        chosen = {"rule": rule, "schedule": schedule}  # other automatic arguments follow from these two
        self.automatic = self._left_open = tuple(name for name, value in chosen.items() if value == "auto")
        rule = AdaptiveDiLoCo() if rule == "auto" else rule
        self._num_fragments = partial(_num_fragments, fragments, schedule == "auto" and overlap is True)
        fragments = self._num_fragments()
        if schedule == "auto":
            # A round of fragments moves only a part, so that rounds may follow each other more closely.
            schedule = MatchCommunication() if fragments == 1 else MatchCommunication(factor=1.3)
        configuration_checks.check_arguments(rule, schedule, overlap)
        owner = type(self).__name__
        configuration_checks.check_compression(owner, compression)
        if compression == "auto" and rule.keeps_residual:
            compression = TopK(0.02, bits=2)
        elif compression == "topk":
            compression = TopK()
        elif compression == "auto":
            compression = "int8" if rule.sends_difference else "none"
        configuration_checks.check_policies(owner, buffers, optimizer_state, lr_clock, part_mb)
        self.weighting = weighting
        if callable(weighting):
            self.count = counting(owner, weighting)
            weighting = "samples"
        config = AveragerConfig(
            overlap=overlap, weighting=weighting, compression=compression, timeouts=Timeouts.or_default(timeouts),
            part_bytes=max(4, int(part_mb * 2**20)), min_replicas=min_replicas, max_replicas=max_replicas,
            fragments=fragments,
        )  # fmt: skip
        config.check_rule(owner, rule)
        super().__init__(
            config, buffers=buffers, optimizer_state=optimizer_state, lr_clock=lr_clock, transport=transport
        )
        self.rule = rule
        self.schedule = schedule

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        # The module has its optimizers from here on.
        self._fit_rule()
        if self.world is not None:
            # Replicas step with their own gradients between rounds, unless the schedule is `Synchronous`.
            apart = not isinstance(self.schedule, Synchronous)
            settled = {"rule": self.rule, "fragments": self.num_fragments}
            check_optimizers(self.world, self.module, self.optimizers, usual=apart, settled=settled)

    def _fit_rule(self) -> None:
        """Set the rule if it is "auto": the mean if several optimizers step manually, else `AdaptiveDiLoCo`.

        Momentum harms several such optimizers, so warn if the user has chosen a rule with momentum for them.
        """
        in_rounds = not isinstance(self.schedule, Synchronous)
        several = in_rounds and not self.module.automatic_optimization and len(self.optimizers) > 1
        if "rule" in self._left_open:
            self.rule = _PLAIN_MEAN if several else AdaptiveDiLoCo()
            mean = f"the plain mean as rule for {len(self.optimizers)} optimizers that step manually"
            self.automatic = tuple(mean if several and name == "rule" else name for name in self._left_open)
        elif several and self.world is not None and self.world.rank == 0:
            configuration_checks.warn_of_momentum(self.module, len(self.optimizers), self.rule)

    @property
    def averages_gradients(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return isinstance(self.schedule, Synchronous)

    def make_engine(self, control: ControlPlane, meet: Callable[[SyncPointKind], Arrival]) -> BackgroundAverager:
        return BackgroundAverager(control, self.rule, self.schedule, self.config, meet)

    @property
    def averager(self) -> BackgroundAverager | None:
        return cast(BackgroundAverager | None, super().averager)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.averager is not None:
            self.averager.see_loss(self.loss_of_batch(closure_loss))
        return super().backward(closure_loss, *args, **kwargs)

    def loss_of_batch(self, closure_loss: Tensor) -> Tensor:
        """Return a batch's loss before Lightning divided it by the number of accumulated batches.

        Ranks may accumulate different numbers of batches, so their divided losses could not be compared.
        """
        divided = self.module.automatic_optimization
        return closure_loss.detach() * (self.module.trainer.accumulate_grad_batches if divided else 1)

    @property
    def num_fragments(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._num_fragments(sum(p.requires_grad for p in self.module.parameters()))

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        # First, because it is None by default, and this is called at every step.
        shared = super().shared_steps
        return None if shared is None or isinstance(self.schedule, Synchronous) else shared

    def advice(self) -> str:
        return self.summary.advice(self.schedule)

    def settings(self) -> dict[str, object]:
        return {
            **super().settings(), "rule": self.rule, "schedule": self.schedule,
            "optimizer_state": self.optimizer_state_policy, "lr_clock": self.lr_clock,
            "weighting": self.weighting if isinstance(self.weighting, str) else text_of_code(self.weighting),
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `{namespace}`: rule={self.rule!r}, schedule={self.schedule!r}>"


def _num_fragments(given: int | Literal["auto"], several: bool, num_parameters: int = 4) -> int:
    """Return the number of fragments.

    Args:
        given: The user's setting. An int is returned unchanged.
        several: Whether "auto" may give more than one fragment.
        num_parameters: Number of parameters. "auto" gives at most as many fragments, and at most four.
    """
    if given != "auto":
        return given
    return max(1, min(4, num_parameters)) if several else 1


AsyncAveragingStrategy.register_strategies(pytorch("strategies").StrategyRegistry)
