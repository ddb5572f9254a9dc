"""The sessions of a fit, in each of which this replica trains with the others over one connection.

`FitSessions` begins a session when training begins, after a checkpoint was restored during training, and when a rank
joins; there is one session at a time. `Session` builds the engine, the averager and the step runner, and closes them.
`status_record_of` describes a replica for ``lightning-async status``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_async.algorithms.schedules import Pace, straggler
from lightning_async.comm.default_group import DefaultGroupWatch, default_group
from lightning_async.engine.averaging.optimizer_state import AveragedState, every_tensor, recompute_batch_norm, reset
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.gradients.reduction import SynchronousGradients
from lightning_async.engine.replica import Replica
from lightning_async.engine.replica_engine import ReplicaEngine
from lightning_async.engine.report import RunSummary
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.engine.sync_points import SyncPointParticipant
from lightning_async.errors import CollectiveError
from lightning_async.membership.generation import Generation
from lightning_async.membership.signing import SECRET
from lightning_async.membership.status import ENDED, FAILED, StatusPublisher, StatusRecord, publish
from lightning_async.strategies.averaging_state import SavedState, state_of
from lightning_async.strategies.rank_mapping import RankMap
from lightning_async.trainer.data.samplers import SamplerResize
from lightning_async.trainer.loop_patches import LoopPatches, ShortEpochs
from lightning_async.trainer.loops.averaged_models import AveragedModels
from lightning_async.trainer.namespace import Undo, rank_zero_info, scaler_of, searches_lr, take_back
from lightning_async.transports.base import Connection
from lightning_async.transports.resolve import how_to_have_more

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy

log = logging.getLogger(__name__)
_GOODBYE_S = 40.0  # longer than a connection takes to close


class FitSessions:
    """The sessions of one fit, one at a time.

    A rank that trains alone has no connection, and so no sessions.
    """

    def __init__(self, strategy: AsyncStrategy, trainer: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self.patches = LoopPatches(strategy, trainer)
        self.session: Session | None = None
        self.undo: list[Undo] = []
        """Functions that remove the patches of this fit, in the order in which the patches were made."""
        self._begins_anew = self._stops = False
        self.warned = False
        """Whether this rank has warned of collectives of torch.distributed in training."""
        self._goodbyes: list[threading.Thread] = []

    def install(self, world: LightningCollectives | None) -> None:
        """Patch Lightning's loops; all ranks call this together.

        Args:
            world: Collectives over all ranks. None: this rank trains alone; then only its data loading is patched, so
                that it trains on all samples.
        """
        if world is None:
            self.undo += SamplerResize(self._strategy, self._trainer).install()
            self.undo += ShortEpochs(self._trainer).install()
            self.undo += self.patches.rates.install()
            return
        self.come()
        AveragedModels(self._trainer, world).make_equal(self._strategy.saved.own)

    def come(self) -> None:
        """Patch Lightning's loops without exchanging values with other ranks.

        A joining rank calls this directly, and receives the other ranks' values later.
        """
        self.undo.append(self.patches.remove)
        self.patches.install()

    def begin(self) -> None:
        """Begin a session with all other ranks, or log that this rank trains alone."""
        strategy = self._strategy
        self._begins_anew = False
        connection = strategy.connection
        self.patches.rates.stepped.update(strategy.saved.schedules)
        strategy.saved.schedules = []
        if connection is None:
            self.patches.rates.begin(None)
            strategy.summary = RunSummary(rank=strategy.global_rank, world_size=strategy.world_size)
            # The state fits the loaded weights only, and training alone changes these without it.
            strategy.saved.leave_behind()
            if (began := strategy.num_started) == 1:
                strategy.tell_alone(f"{strategy.alone}. {how_to_have_more(strategy.transport)}")
            else:
                log.warning(
                    "%s: this rank trains on alone, with all of the data: %d of %d ranks were lost, or have raised an "
                    "exception that the program has caught. `min_replicas=%d` ends training on all ranks instead.",
                    type(strategy).__name__, began - 1, began, began,
                )  # fmt: skip
            return
        self.patches.begin(connection.world)
        self._go_on(connection)
        self.patches.sync_points.on_met(connection.world)

    def start_over(self) -> None:
        """End this session, and make a new connection for the next one; all ranks call this together.

        This happens when a checkpoint was restored during training, or when a loop within the fit begins its own
        training, such as the learning-rate finder's. `begin_again` begins the next session.
        """
        self.stop()
        # A new connection, so that messages of the ended session cannot reach the next one.
        self._strategy.disconnect(in_order=True)
        self._strategy.connect_ranks()
        self._begins_anew = True
        self.patches.start_over()

    def begin_again(self) -> None:
        """Begin the next session if `start_over` has ended the last one; called before batches and sync points."""
        if self._begins_anew:
            self.begin()

    def widen(self, connection: Connection, run: int) -> None:
        """Begin a session over a connection with more ranks; averaging goes on with the state of the session before.

        Args:
            connection: Connection with all ranks, joining ranks included.
            run: Number of the run that begins.
        """
        before = self._strategy.connection
        self._strategy.use(connection, run)
        if before is not None:
            # Warnings that were given over the old connection are not repeated.
            connection.world.follow(before.world)
            # On another thread: closing in order waits for all ranks, and training need not wait for that.
            name = "lightning_async goodbye"
            self._goodbyes.append(threading.Thread(target=before.close, args=(True,), name=name, daemon=True))
            self._goodbyes[-1].start()
        self._go_on(connection)

    def summarise(self) -> None:
        """Complete and print the summary of the run; all ranks call this together, at the last sync point."""
        if self.session is not None:
            self.session.sum_up()
            self._strategy.saved.keep(self.session.state())
            if not searches_lr(self._trainer):
                self.session.tell()

    def end(self) -> None:
        """End the session and remove all patches, without waiting for other ranks."""
        self._strategy.saved.schedules = self.patches.rates.state()
        take_back(self.undo)
        self.stop()
        # The threads are daemons: without this wait the process could end before the connections are closed in order.
        while self._goodbyes:
            self._goodbyes.pop().join(_GOODBYE_S)

    def _go_on(self, connection: Connection) -> None:
        strategy = self._strategy
        self.session = Session(strategy, connection, self.patches.sync_points.within_batch, strategy.saved)
        strategy.summary = self.session.averager.summary
        self.session.start()
        if self._stops:
            self.session.averager.sync_points.request_stop()
        if strategy.host is not None:
            strategy.host.open(self._trainer)

    def stop(self) -> None:
        """Stop admitting joining ranks, and then end the session, if there is one."""
        # First the joins, whose threads use the session.
        if self._strategy.host is not None:
            self._strategy.host.close()
        if (session := self.session) is not None:
            session.close()
            self.session = None
            # A signal has asked this rank to stop, and the others do not know it yet: the next session tells them.
            self._stops = session.averager.sync_points.stop_requested


class UserCollectives(DefaultGroupWatch, SyncPointParticipant):
    """The collectives of torch's default group in one session: they hear of lost ranks, and of ranks that wait."""

    def __init__(self, strategy: AsyncStrategy, session: Session) -> None:
        self._strategy = strategy
        self._session = session
        self._group = default_group()
        self._sync_points = session.averager.sync_points
        self._sync_points.add(self)
        if self._group is not None:
            self._group.watch = self
        self._begin_stage()

    def close(self) -> None:
        if self._group is not None:
            self._group.watch = DefaultGroupWatch()
        self.begin_step()

    def begin_step(self, latches: bool = False) -> None:
        if self._group is not None:
            self._group.begin_step(latches)

    def lose_step(self) -> bool:
        """Return whether a collective of this step has failed by no fault of this rank, and log that it has.

        Wait for the live ranks to form new groups, if it seems that a rank was lost.
        """
        group = self._group
        if group is None or not group.failure:
            return False
        number = group.number
        patience = self._strategy.config.timeouts.dead_after.total_seconds() + 1.0
        until = time.monotonic() + patience
        control = self._session.averager.control

        def is_explained() -> bool:
            over = time.monotonic() > until and not control.reforming
            return over or group.is_behind or self._sync_points.misses_collective(number)

        self._sync_points.wait(is_explained)
        if not group.is_behind and not self._sync_points.misses_collective(number):
            return False
        log.warning("%s This batch is left out on this rank, and training goes on.", group.failure)
        return True

    def on_collective(self, name: str) -> None:
        strategy = self._strategy
        world = strategy.world
        sessions = strategy.fit_sessions
        if sessions is None or sessions.warned or world is None or not world.asynchronous:
            return
        if strategy.in_step or strategy.averages_gradients:
            return
        sessions.warned = True
        log.warning(
            "Rank %d: training calls a collective of torch.distributed (%s), so that all replicas wait for each other "
            "in every step. If a rank is lost, or waits elsewhere, the others leave that batch out. See "
            "docs/how-to/survive-failures.md.",
            strategy.global_rank, name,
        )  # fmt: skip

    def check(self, number: float) -> None:
        assert self._strategy.connection is not None
        self._strategy.connection.membership.check()
        if self._sync_points.misses_collective(number):
            raise CollectiveError("another rank does not call it, but waits at a sync point.")

    def before_sync_point(self) -> None:
        self._sync_points.tell_collectives(0 if self._group is None else self._group.count)

    def after_sync_point(self, waited_s: float) -> None:
        self._begin_stage()

    def _begin_stage(self) -> None:
        if self._group is not None and self._group.watch is self:
            self._group.stage = self._strategy.num_runs, self._sync_points.opened
        self.begin_step()


class Session:
    """The engine, averager and step runner of this replica over one connection; ended by `close`.

    A fit has one session, and a further one each time that training begins again within the fit or a rank joins.

    Args:
        strategy: Strategy of this rank.
        connection: Connection of all ranks of the session.
        meet: Function with which the averager waits at a sync point in the middle of a batch; it returns how the wait
            has ended.
        saved: Saved state of averaging; if it is not empty, averaging goes on from it.

    Raises:
        ValueError: ``min_replicas`` asks that training goes on after ranks are lost, which the transport does not
            support.
    """

    def __init__(
        self,
        strategy: AsyncStrategy,
        connection: Connection,
        meet: Callable[[SyncPointKind], Arrival],
        saved: SavedState,
    ) -> None:
        self._strategy = strategy
        self._connection = connection
        self._world = connection.world
        config = strategy.config
        replica = Replica(strategy.module, strategy.buffers, strategy.bucket_device, strategy.num_fragments)
        self._averaged: AveragedState | None = None
        if strategy.optimizer_state_policy == "average":
            state = AveragedState(strategy.optimizers)
            self._averaged = state
            replica.build(state, state.running_means)
        # A function, because optimizers get their state with their first step only.
        replica.watched = lambda: every_tensor(strategy.optimizers)
        control = ControlPlane(
            connection.root, connection.membership, replica, config.timeouts,
            payload=connection.payload, part_bytes=config.part_bytes, calls=connection.world.calls,
            min_replicas=strategy.fewest, forks=connection.forks,
        )  # fmt: skip
        if control.regroup.possible:
            generation = connection.membership.generation
            before = strategy.live_ranks
            wanted = config.fewest(strategy.num_started)
            strategy.live_ranks = RankMap(generation, strategy.num_runs, strategy.fewest, before, wanted)
            if strategy.shrinks:
                strategy.live_ranks.tell()
            control.regroup.on_loss = self._go_on
        elif strategy.shrinks:
            raise ValueError(
                f"`min_replicas={config.min_replicas}`: {strategy.transport!r} cannot form groups anew, so that the "
                "first rank that is lost ends training. Use `TorchTransport()`, or leave it out: over Horovod, "
                "`fit_elastic` trains on without ranks that are lost."
            )

        def on_change() -> None:
            # The engine waits for headers of other ranks, and must see at once that one of them is lost.
            control.wake()
            self._look()

        connection.membership.on_change = on_change
        self.averager = averager = strategy.make_engine(control, meet)
        self.user_collectives = UserCollectives(strategy, self)
        gradients = SynchronousGradients(
            control, averager.sync_points, averager.count_gradients, averager.ledger.weigh_step
        )
        self.gradients = gradients
        # Gradients that are not finite are dropped, except under a scaler, which must see them: it skips the step on
        # all ranks, and lowers its scale.
        gradients.rounds.drops = scaler_of(strategy.precision_plugin) is None
        gradients.rounds.on_drop = averager.summary.drop
        self.averager.summary.automatic = strategy.automatic
        self._saved = saved
        saved.resume(self.averager, strategy.global_rank, strategy.world_size)
        self.step_runner = strategy.make_step_runner(strategy, averager, gradients)
        self._publisher: StatusPublisher | None = None

    def start(self) -> None:
        """Start averaging; all ranks call this together, when all replicas hold the same model."""
        self._connection.open()
        self.averager.start()
        if (store := self._connection.store) is not None:
            strategy = self._strategy
            averager = self.averager
            run = self._strategy.num_runs
            secret = os.environ.get(SECRET)
            self._publisher = publish(store, lambda: status_record_of(averager, strategy.live_ranks, run), secret)
        if (replica := self._saved.take_replica()) is not None:
            self.averager.marks.part(replica, replica["tensors"], self._strategy.module)

    def _go_on(self, generation: Generation, why: str) -> None:
        """Go on without lost ranks, and look for joining ranks, for which there may now be room.

        Called on the engine's thread.
        """
        live_ranks = self._strategy.live_ranks
        assert live_ranks is not None
        lost = [name for name in live_ranks.generation.members if name not in generation.members]
        live_ranks.go_on(generation, why)
        self._strategy.go_on_without(lost, generation.rank)
        self._look()

    def _look(self) -> None:
        if self._strategy.host is not None:
            self._strategy.host.notice()

    def close(self) -> None:
        """Close the session, without waiting for other ranks."""
        self.user_collectives.close()
        self.averager.close()
        self.step_runner.close()
        if self._averaged is not None:
            self._averaged.close()
        if self._publisher is not None:
            self._publisher.end(FAILED if self._strategy.failed else ENDED)

    def on_model_changed(self) -> None:
        """Reset optimizers or recompute BatchNorm, as the settings say, after a sync point has changed the model."""
        strategy = self._strategy
        if strategy.optimizer_state_policy == "reset":
            reset(strategy.optimizers)
        if strategy.buffers == "recompute":
            recompute_batch_norm(strategy.module, list(self.step_runner.recent), self._world)

    def state(self) -> dict[str, Any]:
        return state_of(self.averager, self._world)

    def sum_up(self) -> None:
        """Complete the summary of the run; all ranks call this together, at the last sync point."""
        summary = self.averager.summary
        summary.elapsed_s = time.monotonic() - self.averager.started_at
        summary.samples_by_rank = self._world.gather_objects(summary.samples)
        names = self._world.gather_objects(self.averager.sync_points.name)
        paces = self._world.gather_objects(list(self._strategy.pacing.mean))
        self.step_runner.complete_summary()
        paces_by_name = {name: Pace(*pace) for name, pace in zip(names, paces, strict=True)}
        summary.paces = dict(paces_by_name)
        summary.straggler = str(straggler(paces_by_name) or "none")
        if (live_ranks := self._strategy.live_ranks) is not None:
            summary.rank = live_ranks.generation.rank
            summary.lost = live_ranks.lost

    def tell(self) -> None:
        """Print, on rank 0, the summary of the run and the advice that follows from it."""
        summary = self.averager.summary
        rank_zero_info(f"{summary.title}, as rank 0 saw it:\n{summary}")
        trainer: Any = self._strategy.module.trainer
        if summary.rank == 0 and not trainer.fast_dev_run and (advice := self._strategy.advice()):
            log.warning(advice)


def status_record_of(averager: ReplicaEngine, live_ranks: RankMap | None, run: int) -> StatusRecord:
    """Return the status of this replica, for ``lightning-async status``.

    Values are read without locks, so they may be of slightly different times; nothing depends on them.

    Args:
        averager: Averager of the session.
        live_ranks: Live ranks; None where no rank may be lost.
        run: Number of the run.
    """
    control = averager.control
    summary = averager.summary
    ledger = averager.ledger
    generation = control.membership.generation if live_ranks is None else live_ranks.generation
    sync_point = control.shared_state.sync_point
    if control.reforming:
        state = "re-forms"
    elif sync_point is not SyncPointKind.NONE:
        state = f"waits ({sync_point.name.lower().replace('_', ' ')})"
    elif live_ranks is not None and live_ranks.are_short:
        state = "waits (replicas)"
    else:
        state = "trains"
    exchanges = summary.rounds + summary.consensuses + summary.synchronous_steps
    names = generation.members if live_ranks is None else live_ranks.names
    mine = averager.sync_points.name
    paces = averager.sync_points.paces
    found = straggler({name: Pace(*pace) for name, pace in paces.items()})
    return StatusRecord(
        name=names[generation.rank] if generation.rank < len(names) else generation.name,
        rank=generation.rank,
        members=names,
        run=run,
        generation=generation.number,
        state=state,
        epoch=averager.epoch,
        step=averager.step,
        samples=summary.samples,
        rounds=summary.exchanges,
        round_ago_s=time.monotonic() - ledger.last_round if exchanges else -1.0,
        round_s=summary.each_s,
        failed_rounds=control.shared_state.failed,
        hidden_share=summary.hidden_share,
        idle_s=summary.idle_s,
        slow=f"{found.slower:.1f} times slower: {found.reason}" if found is not None and found.name == mine else "",
        sent_bytes=summary.sent_bytes,
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
    )
