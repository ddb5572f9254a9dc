"""Peer memory: what is a replica's own outlives it in the memory of another rank."""

from __future__ import annotations

import logging
from typing import Any

from lightning_async.algorithms import SavePolicy
from lightning_async.callbacks.checkpoint import save_policy
from lightning_async.trainer.checkpoint.peer_copies import Peers
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.namespace import Callback, check_object, rank_zero_info, searches_lr
from lightning_async.trainer.strategy_view import view_of

log = logging.getLogger(__name__)


class PeerMemory(CollectiveCallback, Callback):
    r"""Keeps each rank's own state in the memory of the next one: a rank that died comes back with it, without a disk.

    A rank that joins takes over rank 0's state, see docs/failure-semantics.md, and then its own, as of its last copy,
    at step :math:`k`: the optimizers' state of each parameter where replicas are asynchronous, random states, the scale
    of fp16's gradients, buffers that are kept apart; the weights are the run's. Rank :math:`r` leaves its copies with
    rank :math:`(r + 1) \bmod n` of the live ranks, or with the one at the same place on the next host. Training stands
    still while the state is copied into memory; a thread sends it, over TCP, with a checksum. What has not arrived
    whole counts as not sent, and the copy before serves.

    Costs memory of the host: one copy of this rank's own state, and two of another one's; two more for each rank that
    is lost. Where the ranks step together no optimizer state is copied: all have the same. For a restart of all ranks
    use `FaultTolerantCheckpoint`, alone or beside this one.

    Args:
        every_n_train_steps: copy whenever so many optimizer steps were taken.
        save: or a policy of `lightning_async.algorithms`. Default, without either of the two:
            ``Adaptive(share=0.05)``, as often as costs at most 5% of the training time.

    Raises:
        TypeError: ``save`` lacks what a policy must answer, ``every_n_train_steps`` is no int.
        ValueError: ``every_n_train_steps`` is less than 1. When training starts: the strategy takes nobody back in.
        SettingsMismatch: before training, on every rank: only some of them have it.

    Source: in-memory checkpoints at a neighbour, as in Gemini (Wang et al., SOSP 2023).

    >>> PeerMemory(every_n_train_steps=10)
    PeerMemory(save=EveryNTrainSteps(n=10))
    """

    of_all_ranks = True

    def __init__(self, every_n_train_steps: int | None = None, *, save: SavePolicy | None = None) -> None:
        self.policy = save_policy(type(self).__name__, save, every_n_train_steps)
        self._now: Peers | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the copies ready; the ranks have met, and nothing is restored yet."""
        check_object(self, trainer)
        self._now = None
        strategy = trainer.strategy
        if stage != "fit" or trainer.fast_dev_run:
            return
        if view_of(strategy).host is None:
            raise ValueError(
                f"`{type(self).__name__}` is for ranks that are lost and come back, which those of "
                f"`{type(strategy).__name__}` cannot: use `AsyncAveragingStrategy` over `TorchTransport`, or leave it "
                "out."
            )
        if trainer.world_size == 1:
            rank_zero_info(f"`{type(self).__name__}`: there is one rank, and nobody to keep what is its own.")
        elif not strategy.shrinks:
            log.warning("`%s`: the first rank that is lost ends training here (`min_replicas=`), so nothing is kept.",
                        type(self).__name__)  # fmt: skip
        else:
            self._now = Peers(trainer, self.policy)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Listen, before replicas become asynchronous, and before one that comes back asks to join."""
        if self._now is not None and not searches_lr(trainer):
            self._now.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._now is not None and not searches_lr(trainer):
            self._now.boundary(bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._now is not None:
            self._now.summarise()

    def for_joining_ranks(self) -> dict[str, Any]:
        return {}  # nothing, but `come` is called

    def come(self, told: dict[str, Any]) -> None:
        if self._now is not None:
            self._now.come()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(save={self.policy!r})"
