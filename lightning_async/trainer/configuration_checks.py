"""Checks before training that refuse configurations which cannot work with asynchronous replicas.

Messages name the argument or object, its values and a remedy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics import Metric

from lightning_async._checks import check_bool, check_choice, check_protocol
from lightning_async.algorithms.automatic import AdaptiveDiLoCo, AdaptivePeriod
from lightning_async.algorithms.averaging import AveragingRule
from lightning_async.algorithms.compression import TopK
from lightning_async.algorithms.outer_optimizers import DiLoCo, PseudoGradientPenalty, SlowMo
from lightning_async.algorithms.schedules import Schedule, Warmup
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.compressed_mean import Compression
from lightning_async.engine.replica import BufferPolicies, BufferPolicy, OptimizerPolicy, with_statistics
from lightning_async.trainer.loops.updates import updates_of
from lightning_async.trainer.namespace import pl, pytorch, searches_lr, validation_interval

log = logging.getLogger(__name__)


LrClock = Literal["samples", "global", "local"]


def check_arguments(rule: Any, schedule: Any, overlap: bool) -> None:
    """Raise TypeError or ValueError for invalid values of these arguments of `AsyncAveragingStrategy`."""
    owner = "AsyncAveragingStrategy"
    check_protocol(owner, "rule", rule, AveragingRule, "'auto', or an averaging rule such as DeltaMean()")
    check_protocol(owner, "schedule", schedule, Schedule, "'auto', or a schedule such as EveryNSteps(32)")
    check_bool(owner, "overlap", overlap)
    if isinstance(schedule, Warmup) and schedule.warmup_sync_every and isinstance(schedule.schedule, AdaptivePeriod):
        raise ValueError(
            f"`{owner}(schedule={schedule!r})`: rounds of the warm-up, in which replicas hardly part, would be the "
            "measure of all later ones, and the period would stay at its minimum. Leave `warmup_sync_every` out."
        )


def check_compression(owner: str, compression: object) -> None:
    """Raise ValueError unless ``compression`` is a compression that averaging supports."""
    names = ("auto", "topk", *get_args(Compression))
    if not isinstance(compression, TopK) and not (isinstance(compression, str) and compression in names):
        raise ValueError(
            f"`{owner}(compression={compression!r})` must be one of {names}, or a TopK such as TopK(0.02, bits=2)."
        )


def check_policies(owner: str, buffers: object, optimizer_state: object, lr_clock: object, part_mb: float) -> None:
    """Raise TypeError or ValueError for an invalid value of an argument that several strategies have in common."""
    if isinstance(buffers, Mapping):
        for pattern, policy in buffers.items():
            check_choice(owner, f"buffers[{pattern!r}]", policy, ("average", "keep", "broadcast"))
    else:
        check_choice(owner, "buffers", buffers, get_args(BufferPolicy))
    check_choice(owner, "optimizer_state", optimizer_state, get_args(OptimizerPolicy))
    check_choice(owner, "lr_clock", lr_clock, get_args(LrClock))
    if not isinstance(part_mb, int | float) or isinstance(part_mb, bool):
        raise TypeError(f"`{owner}(part_mb={part_mb!r})` must be a number, got {type(part_mb).__name__}.")
    if not part_mb > 0:
        raise ValueError(f"`{owner}(part_mb={part_mb!r})` must be > 0.")


def warn_of_momentum(module: Any, num_optimizers: int, rule: AveragingRule) -> None:
    """Warn if ``rule`` has an outer optimizer with momentum, and the module steps several optimizers by itself.

    Such optimizers may train models against each other, as a GAN's do. Momentum harms such models.
    """
    outer = rule.rule if isinstance(rule, PseudoGradientPenalty) else rule
    has_momentum = isinstance(outer, AdaptiveDiLoCo) or (isinstance(outer, SlowMo) and outer.beta > 0)
    if isinstance(outer, DiLoCo) and outer.outer_optimizer is None:
        has_momentum = outer.outer_momentum > 0
    if has_momentum:
        log.warning(
            "`%s` steps %d optimizers by itself, and `rule=%r` is an outer optimizer with momentum. Momentum harms "
            "models that train against each other, such as a GAN's. For those pass `rule=DeltaMean()`, or, with "
            "compressed messages, `rule=DiLoCo(outer_lr=1.0, outer_momentum=0.0)`, which gives the same mean.",
            type(module).__name__, num_optimizers, rule,
        )  # fmt: skip


def check_callbacks(callbacks: list[Any]) -> None:
    """Raise ValueError for a callback that changes the model or data of one replica only.

    This check runs before the callback's own check of the strategy, so that the user reads this message.
    """
    kinds = pytorch("callbacks")
    for callback in callbacks:
        if isinstance(callback, kinds.ModelPruning):
            raise ValueError(
                "`ModelPruning` renames the parameters that it prunes and adds masks, while replicas average what they "
                "had at the start. Prune before training (`torch.nn.utils.prune`, then `prune.remove`), or train with "
                "`Trainer(devices=1)` or `strategy='ddp'`."
            )
        if isinstance(callback, kinds.BatchSizeFinder):
            raise ValueError(
                "`BatchSizeFinder` looks on one device only. Use it with `Trainer(devices=1)` and no strategy, then "
                "train the replicas with the size that was found."
            )


def check_shareable(owner: str, module: Any, optimizers: Iterable[Any], averages_gradients: bool) -> None:
    """Raise ValueError for an optimizer whose parameters, or whose state that is a part of the model, no rank shares.

    Args:
        owner: Name of the strategy, for the message.
        module: The user's module.
        optimizers: Its optimizers.
        averages_gradients: Whether every step has the mean gradient of all ranks, so that optimizers' states are equal.
    """
    shared = set(module.parameters())
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if strange := [tuple(p.shape) for p in params if p not in shared]:
            raise ValueError(
                f"Optimizer {number} ({kind}) has parameters of shapes {strange} that no submodule of "
                f"`{type(module).__name__}` has, so `{owner}` would not share them, and ranks would part. Make them a "
                "part of the module: `self.losses = torch.nn.ModuleList(...)` in place of a list, or "
                "`self.scale = torch.nn.Parameter(...)`."
            )
        if not averages_gradients and callable(getattr(optimizer, "eval", None)):
            raise ValueError(
                f"`{kind}.eval()` makes the model of the optimizer's own state, as schedule-free optimizers do, and "
                f"`{owner}` shares parameters only, so that each rank would validate and save another model. Pass "
                "`AsyncAveragingStrategy(schedule=Synchronous())` or `AsyncGradientStrategy(delay=0)`: the state is "
                "equal on all ranks there."
            )


def check_survival(owner: str, min_replicas: int | None, max_replicas: int | None, world_size: int) -> None:
    """Raise ValueError if there are fewer ranks than ``min_replicas``, or more than ``max_replicas``.

    None for either of them: no such limit.
    """
    if min_replicas is not None and min_replicas > world_size:
        raise ValueError(f"`{owner}(min_replicas={min_replicas})`: there are {world_size} ranks only.")
    if max_replicas is not None and max_replicas < world_size:
        raise ValueError(f"`{owner}(max_replicas={max_replicas})`: there are {world_size} ranks.")


def check_setup(module: Any, layer_sync: Any, buffers: BufferPolicies) -> None:
    """Raise ValueError for a module with a layer or a metric that waits for all ranks at every step.

    Also raise it if ``buffers`` is "recompute", the module has BatchNorm's statistics, and it has no ``forward``, by
    which they would be recomputed.
    """
    batch_norms = [name for name, child in module.named_modules() if isinstance(child, nn.SyncBatchNorm)]
    if layer_sync is not None or batch_norms:
        what = "`Trainer(sync_batchnorm=True)`" if layer_sync is not None else f"SyncBatchNorm in {batch_norms}"
        raise ValueError(
            f"{what} waits for all replicas in every forward pass, and replicas run at their own pace here. Use plain "
            'BatchNorm with `AsyncAveragingStrategy(buffers="average")` or `"recompute"`.'
        )
    bare = type(module).forward is pl.LightningModule.forward and "forward" not in vars(module)
    if buffers == "recompute" and bare and with_statistics(module):
        raise ValueError(
            f"`buffers='recompute'` passes batches through `{type(module).__name__}.forward` for BatchNorm's "
            "statistics, and it has none. Define `forward`, or pass `buffers='average'`."
        )
    for name, child in module.named_modules():
        if isinstance(child, Metric) and child.dist_sync_on_step:
            raise ValueError(
                f"The metric `{name}` has `dist_sync_on_step=True`: it waits for all replicas at every step, and they "
                "run at their own pace. Leave it False; at the end of an epoch it is synchronised anyway."
            )


class FitCheck:
    """The checks that all ranks make together before the first batch.

    ``share`` is the number of steps of a learning-rate schedule in an optimizer step. Default: 1.0.
    """

    def __init__(self, trainer: Any, world: LightningCollectives, share: float = 1.0) -> None:
        self._trainer = trainer
        self._world = world
        self._share = share

    def run(self) -> bool:
        """Run all checks, and return whether all ranks have the same number of epochs.

        If the result is True, all ranks wait for one another at the end of each epoch. All ranks call this together.

        Raises:
            ValueError: The ranks have unequal numbers of epochs, but a callback, scheduler or the like needs all ranks
                together at an epoch's end. It is also raised if all ranks take every step together, and a scheduler has
                fewer steps than training, or watches a metric that each rank computes from its own batches.
        """
        trainer = self._trainer
        world = self._world
        # Every check gathers from all ranks, so all ranks make them in this order, and raise together.
        self._check_length()
        self._check_watched()
        epochs = world.gather_objects(self._epochs())
        if len(set(epochs)) == 1:
            return True
        batches = world.gather_objects(trainer.num_training_batches)
        users = self._epoch_end_users()
        numbers = (
            f"With `max_steps={trainer.max_steps}` the ranks have {epochs} epochs, because their loaders hold "
            f"{batches} batches"
        )
        # Ranks without these could go on to the next epoch alone.
        if users:
            raise ValueError(
                f"{numbers}, and these work on all ranks together at the end of an epoch: {', '.join(users)}. Limit "
                "training by `max_epochs`, give every rank the same number of batches, or let them run after "
                "validations (`val_check_interval` as a number of batches with `check_val_every_n_epoch=None`)."
            )
        log.warning("%s; they meet at validations and at the end of training only.", numbers)
        return False

    def _check_length(self) -> None:
        """Raise ValueError for a `OneCycleLR` with fewer steps than training has, given the data of all ranks.

        All ranks take as many steps as the rank with the most data, which only a comparison of all ranks shows.
        """
        trainer = self._trainer
        updates = updates_of(trainer)
        if updates is None or not trainer.strategy.in_step or searches_lr(trainer):
            return
        batches = trainer.num_training_batches
        every = trainer.accumulate_grad_batches
        limit = trainer.max_steps
        mine = math.inf if math.isinf(batches) else math.ceil(batches / every) * self._epochs()
        by_step = [each for each in trainer.lr_scheduler_configs if each.interval == "step"]
        lengths = [
            each.scheduler.total_steps * updates.rates.steps_between(each)
            for each in by_step
            if isinstance(each.scheduler, OneCycleLR)
        ]
        # All ranks take as many steps as the one with the most data, so each needs the others' numbers.
        told = self._world.gather_objects(
            [mine if limit in (None, -1) else min(mine, limit), min(lengths, default=math.inf)]
        )
        steps = max(steps for steps, _ in told) * self._share
        shortest = min(length for _, length in told)
        if shortest < steps < math.inf:
            raise ValueError(
                f"`OneCycleLR` ends after {shortest:g} steps, and this training has {steps:g}: all ranks take each "
                f"step of the one that has the most data; these have data for {[steps for steps, _ in told]} steps. "
                f"Pass `total_steps={steps:g}` on all ranks: `trainer.estimated_stepping_batches` knows a rank's own "
                "data only."
            )

    def _check_watched(self) -> None:
        """Raise ValueError for a scheduler that watches a metric at each step if ranks share learning rates.

        Each rank computes such a metric from its own batch, so ranks would choose different learning rates.
        """
        trainer = self._trainer
        if updates_of(trainer) is None or not trainer.lightning_module.automatic_optimization:
            return
        for each in trainer.lr_scheduler_configs:
            if each.reduce_on_plateau and each.interval == "step":
                raise ValueError(
                    f"`{type(each.scheduler).__name__}` with `interval='step'` watches a metric of each rank's own "
                    "batches, and all ranks have one learning rate here. Let it watch one of whole epochs, such as "
                    'that of a validation: `{"scheduler": ..., "interval": "epoch", "monitor": "val_loss"}`.'
                )

    def _epochs(self) -> float:
        """Return the number of epochs that this rank will train, given its number of batches."""
        trainer = self._trainer
        limit = math.inf if trainer.max_epochs in (None, -1) else float(trainer.max_epochs)
        batches = trainer.num_training_batches
        if trainer.max_steps in (None, -1) or math.isinf(batches):
            return limit
        steps_per_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
        return min(limit, float(math.ceil(trainer.max_steps / steps_per_epoch)))

    def _epoch_end_users(self) -> list[str]:
        """Return the names of callbacks, metrics, arguments and schedulers that need all ranks at an epoch's end."""
        trainer = self._trainer
        callbacks = pytorch("callbacks")
        users = []
        for callback in trainer.callbacks:
            if isinstance(callback, callbacks.ModelCheckpoint) and callback._should_save_on_train_epoch_end(trainer):
                users.append("ModelCheckpoint")
            if isinstance(callback, callbacks.EarlyStopping):
                at_epoch_end = callback._check_on_train_epoch_end
                if at_epoch_end is None:
                    at_epoch_end = validation_interval(trainer) == 1.0 and trainer.check_val_every_n_epoch == 1
                if at_epoch_end:
                    users.append("EarlyStopping")
            if isinstance(callback, callbacks.StochasticWeightAveraging):
                users.append("StochasticWeightAveraging")
        users += [f"the metric `{n}`" for n, m in trainer.lightning_module.named_modules() if isinstance(m, Metric)]
        if trainer.reload_dataloaders_every_n_epochs:
            users.append("`reload_dataloaders_every_n_epochs`")
        if updates_of(trainer) is not None and any(each.interval == "epoch" for each in trainer.lr_scheduler_configs):
            users.append("a scheduler of learning rates, of which all replicas have the same")
        return users


def check_momentum_stays(owner: str, schedulers: Iterable[Any]) -> None:
    """Raise ValueError for a scheduler that changes the momentum, because servers receive only the learning rate.

    ``schedulers`` are the Trainer's ``lr_scheduler_configs``.
    """
    for each in schedulers:
        if getattr(each.scheduler, "cycle_momentum", False):
            raise ValueError(
                f"`{type(each.scheduler).__name__}` changes the momentum, too, and servers hear of new learning rates "
                f"only. Pass `cycle_momentum=False` to it, or `{owner}(update_on_server=False)`: the optimizer is the "
                "worker's then."
            )
