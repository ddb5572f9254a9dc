"""Peer memory: copies of each rank's own state in another rank's memory."""

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
    r"""A callback that keeps each rank's own state in the next rank's memory, in case the rank dies and restarts.

    A rank that restarts takes over rank 0's state, see docs/specification/failures.md, and then restores its own
    state from its last copy. For asynchronous replicas, its own state is the optimizer state, random states,
    the gradient scale of fp16, and buffers that each replica keeps. The weights are those of the live ranks. On a
    single host, rank :math:`r` sends its copies to rank :math:`(r + 1) \bmod n` of the live ranks. With several hosts,
    it sends them to the rank at the same position among the live ranks of the next host. Training pauses while the
    state is copied into memory. A thread then sends the copy over TCP, with a checksum. If a copy does not arrive
    completely, the previous copy stays valid. No disk is involved.

    This costs host memory: one copy of this rank's own state, two copies of another rank's state, and two more for each
    rank that is lost. If ranks step together, no optimizer state is copied, because all ranks have the same. For a
    restart of all ranks use `FaultTolerantCheckpoint`, alone or beside this callback.

    Args:
        every_n_train_steps: Copy after each time this number of optimizer steps.
        save: Alternatively, a policy of `lightning_async.algorithms`. Default, without either of the two:
            ``Adaptive(share=0.05)``, which copies as often as is possible within 5% of the training time.

    Raises:
        TypeError: ``save`` lacks a method of a policy, or ``every_n_train_steps`` is no int.
        ValueError: ``every_n_train_steps`` is less than 1. When training starts: the strategy does not admit
            ranks that restart.
        SettingsMismatch: Before training, on every rank: only some ranks have this callback.

    Source: in-memory checkpoints at a neighbour, as in Gemini (Wang et al., SOSP 2023).

    >>> PeerMemory(every_n_train_steps=10)
    PeerMemory(save=EveryNTrainSteps(n=10))
    """

    of_all_ranks = True

    def __init__(self, every_n_train_steps: int | None = None, *, save: SavePolicy | None = None) -> None:
        self.policy = save_policy(type(self).__name__, save, every_n_train_steps)
        self._now: Peers | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare the exchange of copies: each rank's own state goes to another rank's memory.

        Lightning calls this when the ranks are connected, and before a checkpoint is restored.
        """
        check_object(self, trainer)
        self._now = None
        strategy = trainer.strategy
        if stage != "fit" or trainer.fast_dev_run:
            return
        # Only a strategy that admits joining ranks can return a copy to its owner.
        if view_of(strategy).host is None:
            raise ValueError(
                f"`{type(self).__name__}` is for ranks that are lost and come back, which those of "
                f"`{type(strategy).__name__}` cannot: use `AsyncAveragingStrategy` over `TorchTransport`, or leave it "
                "out."
            )
        if trainer.world_size == 1:
            rank_zero_info(f"`{type(self).__name__}`: there is a single rank, and no other one to keep its state.")
        elif not strategy.shrinks:
            log.warning("`%s`: the first rank that is lost ends training here (`min_replicas=`), so nothing is kept.",
                        type(self).__name__)  # fmt: skip
        else:
            self._now = Peers(trainer, self.policy)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to receive copies of other ranks' states.

        Lightning calls this before replicas become asynchronous, and before a joining rank asks to join.
        """
        if self._now is not None and not searches_lr(trainer):
            self._now.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._now is not None and not searches_lr(trainer):
            self._now.boundary(bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._now is not None:
            self._now.summarise()

    def come(self, told: dict[str, Any]) -> None:
        if self._now is not None:
            self._now.come()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(save={self.policy!r})"
