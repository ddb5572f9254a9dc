"""Copies of every rank's own state in the memory of another rank, for a rank that dies and comes back.

At the end of each batch, `Peers.boundary` asks whether a copy is due, and sends the state that `TrainerState` captures.
A rank that comes back first asks all ranks for the copy of its state, and then joins. `JoinState.restore` gives it rank
0's state. Finally `Peers.come` replaces, in this state, the parts that differ between replicas by those from the copy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from lightning_async.algorithms import SavePolicy
from lightning_async.checkpoint.peer_copy import PeerCopy, PeerCopySender, Sent, find
from lightning_async.comm.peer_storage import Address, PeerStore, facing, next_to
from lightning_async.errors import AsyncTrainingError, CheckpointError
from lightning_async.events import tell
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.launcher_channel import came_back
from lightning_async.membership.signing import Seal
from lightning_async.trainer.checkpoint.checkpoint_state import TrainerState
from lightning_async.trainer.checkpoint.save_timing import SaveClock
from lightning_async.trainer.environment.environments import StableIds, names_of
from lightning_async.trainer.namespace import in_words, rank_zero_info

log = logging.getLogger(__name__)

# Wait this long after a copy that failed, so that a dead peer does not cost a connection at every batch.
_PAUSE_S = 1.0
# Warn after this number of failed copies in a row.
_PATIENCE = 3


class Peers:
    """The exchange of copies between the ranks of one fit: each rank stores copies of another rank's own state.

    A rank's own state is the part that the other replicas do not share, see `TrainerState.capture_own`. ``policy`` says
    when a copy is due.
    """

    def __init__(self, trainer: Any, policy: SavePolicy) -> None:
        self._trainer = trainer
        self._state = TrainerState(trainer)
        self._policy = policy
        self._seal = Seal.of_job()
        self._door: JoinBoard | None = None
        self.keeper: PeerStore | None = None
        self._peer_copy_sender: PeerCopySender | None = None
        self._clock: SaveClock | None = None
        self._found: PeerCopy | None = None
        self._silent: dict[str, str] = {}
        self._asked = False
        self._known: tuple[Any, ...] = ()
        """The live ranks and their `RankMap` at the time when `_after` and `_to` were determined."""
        self._after: tuple[Any, ...] = ()
        """The rank that is to store this rank's copies, and the `RankMap`; empty without one. `_to` is its address."""
        self._to: Address | None = None
        self._sent: tuple[Any, ...] = ()
        self._failed = 0
        self._not_before = 0.0
        self._stale = False
        self._cannot = False

    def start(self) -> None:
        """Listen for copies from other ranks, and publish this rank's address; a second call does nothing.

        A joining rank also asks the other ranks for the copy of its own state.

        Raises:
            AsyncTrainingError: This rank cannot listen at an address that the other ranks can reach.
        """
        if self.keeper is not None:
            return
        strategy = self._trainer.strategy
        mine = str(names_of(self._trainer).mine)
        board = self._door = strategy.transport.door(strategy.cluster_environment)
        try:
            self.keeper = keeper = PeerStore(facing(*board.host), self._seal)
        except OSError as error:
            raise AsyncTrainingError(
                f"Rank {mine}: the others can leave nothing in this rank's memory, as it cannot listen at the address "
                f"that faces {board.host[0]}: {error}. Leave `PeerMemory` out, or see to this host's addresses."
            ) from error
        # The end of the session closes the threads, also if training fails.
        strategy.fit_sessions.undo.append(self.close)
        board.keep_at(mine, keeper.address.note())
        if strategy.joining:
            self._find()

    def _find(self) -> None:
        """Ask every other rank for the copy of this rank's state."""
        assert self._door is not None
        mine = str(names_of(self._trainer).mine)
        self._asked = True
        addresses = {name: Address.of(self._door.read_keeper(name)) for name in self._door.keepers() if name != mine}
        others = {name: address for name, address in addresses.items() if address is not None}
        self._found, self._silent = find(mine, self._seal, others)

    def come(self) -> None:
        """Restore this rank's own state from a copy that a peer stores, on a joining rank.

        It replaces the parts of rank 0's state, received before, that differ between ranks. The copy may be some steps
        older. If there is no copy, or the copy does not fit, this rank keeps rank 0's state and logs a warning.
        """
        mine = names_of(self._trainer).mine
        self.start()
        # A live rank that was cut off and reconnects has not asked before.
        if not self._asked:
            self._find()
        if (found := self._found) is None:
            why = "; ".join(f"rank {name} does not answer ({error})" for name, error in self._silent.items())
            tell(
                "own_state_lost", logging.WARNING,
                f"Rank {mine} joins, and no rank has a copy of its own state: it begins with rank 0's optimizer state, "
                f"and with random numbers of its start. {why or 'It is new, or died before its first copy'}.",
                rank=mine,
            )  # fmt: skip
            return
        step = found.label.get("step")
        now = self._trainer.global_step
        try:
            done = self._state.restore_own(found.own)
        # Optimizers of the user may raise anything, and training can go on with rank 0's state.
        except Exception as error:
            words = (
                f"Rank {mine}: what was kept of its own does not fit, and it begins with rank 0's: {in_words(error)}"
            )
            tell("own_state_lost", logging.WARNING, words, rank=mine)
            return
        words = f"Rank {mine} goes on with its own of step {step}, while the run is at step {now}: {', '.join(done)}."
        tell("own_state", logging.WARNING, words, rank=mine, step=step, now=now)

    def boundary(self, epoch_end: bool) -> None:
        """Send a copy of this rank's own state to its peer, if a copy is due after this batch.

        ``epoch_end`` says whether the batch is the epoch's last one.
        """
        if self.keeper is None or self._cannot or self._trainer.strategy.averager is None:
            return
        step = self._trainer.global_step
        names = names_of(self._trainer)
        if self._peer_copy_sender is None or self._clock is None:
            self._peer_copy_sender = PeerCopySender(str(names.mine), self._seal, self._found and self._found.at)
            self._clock = SaveClock(self._policy, self._peer_copy_sender.costs, step - 1)
        self._found = None
        self._asked = False
        sender = self._peer_copy_sender
        clock = self._clock
        sender.step()
        for sent in sender.poll():
            self._take_result(sent)
        self._look(names)
        # The peer with the last copy is lost or was started again, and has lost the copy.
        moved = self._sent and self._after != self._sent
        if not self._after or not (moved or clock.due(step, epoch_end)):
            return
        if sender.busy or self._to is None or time.monotonic() < self._not_before:
            clock.put_off()
            return
        label = {"step": step, "epoch": self._trainer.current_epoch, "life": came_back() or 0, "at": time.time()}
        try:
            begun = sender.send(self._to, label, self._state.capture_own())
        # The state holds a value that cannot be sent, and later states will hold it, too.
        except (TypeError, KeyError, ValueError, CheckpointError) as error:
            log.warning("Rank %d: no more copies of its own state are sent from here on: %s", names.mine, error)
            self._cannot = True
            return
        if begun:
            self._sent = self._after
            clock.saved(step)
        else:
            clock.put_off()

    def _look(self, names: StableIds) -> None:
        """Choose the peer that stores this rank's copies, if ranks have changed or the last choice has failed."""
        live_ranks = self._trainer.strategy.live_ranks
        # Ranks that join get another `RankMap`, so comparing it notices a rank that has died and come back.
        if self._known == (names.left, live_ranks) and not (self._stale and time.monotonic() >= self._not_before):
            return
        self._known = (names.left, live_ranks)
        self._after = ()
        self._to = None
        self._not_before = 0.0
        if len(names.left) > 1 and names.mine in names.left:
            assert self._door is not None
            # If the store is gone, the heartbeat reports it.
            with contextlib.suppress(RuntimeError, OSError):
                found = {rank: Address.of(self._door.read_keeper(str(rank))) for rank in names.left}
                hosts = {rank: "" if address is None else address.host for rank, address in found.items()}
                after = next_to(names.mine, names.left, hosts)
                self._after = (after, live_ranks)
                self._to = found[after] if after is not None else None
        self._pause(self._to is None)

    def _pause(self, stale: bool) -> None:
        """Set whether the peer must be chosen again.

        If ``stale`` is True, `_look` chooses a peer again, but only after a pause.
        """
        self._stale = stale
        if stale:
            self._not_before = time.monotonic() + _PAUSE_S

    def _take_result(self, sent: Sent) -> None:
        """Process the result of one copy: count failed copies in a row, and warn once if there are several."""
        if sent.error is None:
            self._failed = 0
            return
        self._failed += 1
        self._pause(True)
        if self._clock is not None:
            self._clock.put_off()
        if self._failed == _PATIENCE:
            log.warning(
                "Rank %d: %d copies of its own state in a row did not reach the next rank, at %s, port %d; the last "
                "one after %.1f s: %s. Should it die now, it comes back with an older one, or none. Can that host be "
                "reached?",
                names_of(self._trainer).mine, self._failed, sent.to.host, sent.to.port, sent.seconds, sent.error,
            )  # fmt: skip

    def summarise(self) -> None:
        """Log the number, the size and the cost of this rank's copies."""
        if self._peer_copy_sender is None or self.keeper is None:
            return
        costs = self._peer_copy_sender.costs
        mib = self._peer_copy_sender.size / 2**20
        stood_ms = 1000 * costs.stalled_s / max(1, costs.saves)
        rank_zero_info(
            f"Peer memory, as rank 0 saw it: {costs.saves} copies of its own state, {mib:.1f} MiB each, of which "
            f"{costs.failed} did not arrive; each paused training for {stood_ms:.1f} ms. Rank 0 keeps "
            f"{self.keeper.size / 2**20:.1f} MiB for rank(s) {', '.join(self.keeper.owners) or 'none'}."
        )

    def close(self) -> None:
        sender = self._peer_copy_sender
        self._peer_copy_sender = None
        keeper = self.keeper
        self.keeper = None
        if sender is not None:
            sender.close()
        if keeper is not None:
            keeper.close()
