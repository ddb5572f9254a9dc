"""The strategy: `Trainer(strategy=AsyncAveragingStrategy(...))`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor

from lightning_async.algorithms import Synchronous
from lightning_async.algorithms.automatic import AdaptiveDiLoCo, MatchCommunication
from lightning_async.algorithms.averaging import AveragingRule
from lightning_async.algorithms.compression import TopK
from lightning_async.algorithms.outer_optimizers import DiLoCo
from lightning_async.algorithms.schedules import Schedule
from lightning_async.engine.averaging.rule_state import AveragerConfig, Weighting
from lightning_async.engine.compressed_mean import Compression
from lightning_async.engine.replica import BufferPolicy, OptimizerPolicy
from lightning_async.engine.timeouts import Timeouts
from lightning_async.strategies.async_strategy import AsyncStrategy
from lightning_async.trainer import configuration_checks
from lightning_async.trainer.environment.settings import check_optimizers
from lightning_async.trainer.namespace import counting, pytorch
from lightning_async.trainer.namespace import name as namespace
from lightning_async.transports.base import Transport
from lightning_async.transports.resolve import TransportName

_PLAIN_MEAN = DiLoCo(outer_lr=1.0, outer_momentum=0.0)
"""Makes of the replicas what `DeltaMean` makes, and takes compressed messages and the state of `AdaptiveDiLoCo`."""


class AsyncAveragingStrategy(AsyncStrategy):
    r"""Replicas take local steps and become one model by averaging in the background.

    Each replica :math:`i` trains alone. When the schedule says so it sends a snapshot :math:`s_i`; while it goes on
    training, the work-weighted mean :math:`m = \sum_i w_i s_i` arrives, and the parameters move by
    :math:`x_i \leftarrow x_i + (m - s_i)` (or by what another rule makes of it). Validation, checkpoints, the end of
    an epoch and the end of training happen at a *sync point*: all ranks wait there, serving rounds for those that still
    train, until every one holds the same model to the bit. Between sync points nothing waits for all ranks.

    Args:
        rule: how replicas become one model: ``"auto"`` (default) is `AdaptiveDiLoCo`, an outer optimizer whose
            settings follow from the local steps in a round; where a module steps several optimizers by itself it is
            the plain mean, as momentum leads models astray that train against each other. `DiLoCo`, `SlowMo`,
            `SparseLoCo`, `DeltaMean`, `PseudoGradientPenalty` around such a rule, or, without overlap, `Mean`. With
            `EASGD` they stay models of their own around a center.
        schedule: when: ``"auto"`` (default) is `MatchCommunication`, a period that follows from the time of a round;
            `AdaptivePeriod`, `EveryNSteps`, `EverySeconds`, `DyLU`, `Synchronous`, `Warmup`.
        overlap: rounds run while training goes on; False: training stands still for each.
        weighting: what a replica's contribution is weighted by: its ``"samples"`` since its last round (default),
            its ``"steps"``, ``"equal"``, or a function of a batch that says what it counts, such as its tokens: a
            number >= 0.
        buffers: floating-point buffers (BatchNorm statistics): ``"average"`` (default), ``"keep"`` each replica's,
            ``"broadcast"`` rank 0's, or ``"recompute"`` BatchNorm's from recent batches at every sync point. Integer
            buffers take the largest value of all replicas at every sync point.
        optimizer_state: ``"keep"`` each replica's (default), ``"average"`` it, or ``"reset"`` it after each round. Who
            has missed synchronous steps, being out of data, takes over the others' at the next sync point in any case.
        lr_clock: learning-rate schedulers that step per batch follow the replica's own steps (``"local"``,
            default), or the mean over all replicas (``"global"``). Under `Synchronous` there is one: steps are all's.
        compression: of the messages: ``"int8"`` or ``"fp8"`` (a quarter of the bytes; for rules that send differences,
            such as `DiLoCo`), ``"topk"`` or `TopK(fraction, bits)` (the largest elements; for the same rules),
            ``"bf16"`` (half), or ``"none"``; ``"auto"`` (default) is ``TopK(0.02, bits=2)`` under `SparseLoCo`, int8
            under other rules that send differences, else none. Nothing is lost: what a message cannot hold stays in the
            replica's parameters, or in the residual of `SparseLoCo`, and goes with the next one. Sync points exchange
            fp32.
        fragments: each round moves one of so many parts of the parameters, in turn, and each part has a round per
            period of the schedule: with 4, `EveryNSteps(32)` begins a round every 8 steps, of a quarter of the bytes.
            Parts are runs of whole parameters, balanced by bytes. ``"auto"`` (default): four where ``schedule`` is
            ``"auto"`` and rounds overlap, but no more than there are parameters; else one, all in every round.
        min_replicas: ranks may be lost as long as so many are left, and these go on: no local step of theirs is lost,
            the round under way is repeated by them, and they train on what the lost had not shared of the epoch. None
            (default): half of those that were started, rounded up; over Horovod all. The number of ranks: one that is
            lost ends training on all.
        max_replicas: ranks that are started while others train are taken in until there are so many: those that were
            lost, under their numbers, and new ones, under numbers of their own. None (default): as many as began.
        timeouts: how long to wait for what.
        part_mb: payloads move in parts of at most this many MiB. Default 16.
        transport: who starts the ranks and what moves their bytes: `TorchTransport`, `HorovodTransport`, or a short
            name, "torch", "horovod" or "auto" (default): Horovod where horovodrun started the ranks, else torch.

    Raises:
        TypeError: ``rule``, ``schedule`` or ``transport`` lacks what one must answer; a number of replicas is none.
        ValueError: an unknown policy, numbers of replicas that cannot be, a rule that overwrites together with
            ``overlap=True``, or one that sends its parameters together with 8 bits of compression or `TopK`; as
            training begins, more fragments than parameters that are trained.

    Source: local SGD (Stich, 2019), DiLoCo (Douillard et al., 2023), asynchronous model averaging as in Bagua, and for
    fragments Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
    https://arxiv.org/abs/2501.18512
    """

    strategy_name = "async_averaging"

    def __init__(
        self,
        rule: AveragingRule | Literal["auto"] = "auto",
        schedule: Schedule | Literal["auto"] = "auto",
        overlap: bool = True,
        *,
        weighting: Weighting | Callable[[Any], float] = "samples",
        buffers: BufferPolicy = "average",
        optimizer_state: OptimizerPolicy = "keep",
        lr_clock: configuration_checks.LrClock = "local",
        compression: Compression | TopK | Literal["auto", "topk"] = "auto",
        fragments: int | Literal["auto"] = "auto",
        min_replicas: int | None = None,
        max_replicas: int | None = None,
        timeouts: Timeouts | None = None,
        part_mb: float = 16.0,
        transport: Transport | TransportName = "auto",
    ) -> None:
        chosen = {"rule": rule, "schedule": schedule}  # the rest follows from these
        self.automatic = self._left_open = tuple(name for name, value in chosen.items() if value == "auto")
        rule = AdaptiveDiLoCo() if rule == "auto" else rule
        self._num_fragments = partial(_num_fragments, fragments, schedule == "auto" and overlap is True)
        fragments = self._num_fragments()
        if schedule == "auto":  # what is in flight is a part only, so that rounds may follow each other more closely
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
        self._fit_rule()
        if self.world is not None:
            apart = not isinstance(self.schedule, Synchronous)  # what replicas make of their own steps is averaged
            check_optimizers(self.world, self.module, self.optimizers, usual=apart)

    def _fit_rule(self) -> None:
        """Take a rule without momentum where several optimizers step manually, or warn of one that the user named."""
        in_rounds = not isinstance(self.schedule, Synchronous)
        several = in_rounds and not self.module.automatic_optimization and len(self.optimizers) > 1
        if "rule" in self._left_open:
            self.rule = _PLAIN_MEAN if several else AdaptiveDiLoCo()
            mean = f"the plain mean as rule for {len(self.optimizers)} optimizers that step manually"
            self.automatic = tuple(mean if several and name == "rule" else name for name in self._left_open)
        elif several and self.world is not None and self.world.rank == 0:
            configuration_checks.warn_of_momentum(self.module, len(self.optimizers), self.rule)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.averager is not None:
            self.averager.see_loss(self.loss_of_batch(closure_loss))
        return super().backward(closure_loss, *args, **kwargs)

    def loss_of_batch(self, closure_loss: Tensor) -> Tensor:
        """Return the loss that Lightning has divided by the number of batches of a step, which ranks may choose."""
        divided = self.module.automatic_optimization
        return closure_loss.detach() * (self.module.trainer.accumulate_grad_batches if divided else 1)

    @property
    def num_fragments(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._num_fragments(sum(p.requires_grad for p in self.module.parameters()))

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        shared = super().shared_steps  # first: it is None by default, and is asked for at every step
        return None if shared is None or isinstance(self.schedule, Synchronous) else shared

    def settings(self) -> dict[str, object]:
        return {
            **super().settings(), "rule": self.rule, "schedule": self.schedule,
            "optimizer_state": self.optimizer_state_policy, "lr_clock": self.lr_clock,
            "weighting": getattr(self.weighting, "__qualname__", self.weighting),
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `{namespace}`: rule={self.rule!r}, schedule={self.schedule!r}>"


def _num_fragments(given: int | Literal["auto"], several: bool, num_parameters: int = 4) -> int:
    """Return in how many parts parameters move: four at most, where that is "auto" and there may be ``several``."""
    if given != "auto":
        return given
    return max(1, min(4, num_parameters)) if several else 1


AsyncAveragingStrategy.register_strategies(pytorch("strategies").StrategyRegistry)
