"""The admission of a joining rank by the ranks that train: from a sync point on, all of them train together.

    ranks that train                         joining rank, a process of its own, see `strategies/joining_rank`
    rank 0 writes a notice to the store: the run and its settings
                                             builds its model, compares settings, sends heartbeats to these ranks
    notice the heartbeats, and rank 0 invites the joining rank
    ------ all ranks connect while the old connection is in use and training goes on, see `JoinPreparation` ------
    come to a sync point, where rank 0 copies its state; they exchange over the old connection whether each of them
    can admit the joining rank
        if all can: the old connection is closed, and averaging goes on over the new one
        rank 0 sends its state
                                             takes over the state, and trains with the others
        if not: the new connection is closed, and training goes on as before
                                             reads that it is not admitted, and waits again or ends

A joining rank that fails at any moment does not stop the others. Read `JoinCoordinator` first, which acts at sync
points. `JoinPreparation` prepares joins on a thread of each rank, and connects the ranks with a `JoinConnector`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_async.comm.collectives import Collectives
from lightning_async.engine.collectives import LightningCollectives, Packed, packed
from lightning_async.engine.control_plane import forks_of
from lightning_async.engine.replica import describe
from lightning_async.engine.report import RunSummary
from lightning_async.engine.timeouts import Timeouts
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout
from lightning_async.events import tell
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.strategies.averaging_state import clocks_of
from lightning_async.strategies.rank_mapping import call_of, count_run, name_in_run, next_run, run_name
from lightning_async.strategies.session import FitSessions
from lightning_async.trainer.data.join import JoinState
from lightning_async.trainer.environment.environments import RenumberedEnvironment
from lightning_async.trainer.environment.settings import TrainerSettings
from lightning_async.trainer.loops.loop_state import without_own
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.namespace import in_words
from lightning_async.trainer.strategy_view import StrategyView
from lightning_async.transports.base import Connection
from lightning_async.transports.torch import TorchTransport

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy

log = logging.getLogger(__name__)
PATIENCE = timedelta(seconds=30)
"""Longest time that connecting ranks wait for each other."""
_LOOK_S = 0.02
_END_S = 5.0
_GONE = "rank 0 was lost."


class PreparedJoin(NamedTuple):
    """A connection between all ranks that train and a joining rank, ready for the admission of the joining rank.

    Args:
        joining_rank: Name under which the joining rank waits.
        names: Stable ids of all ranks; the joining rank's is the last.
        run: Number of the run (session of all ranks) that begins when the rank has joined.
        connection: Connection of all ranks, with all groups that training needs.
        pair: Collectives between rank 0 and the joining rank; None on other ranks.
        place: Position of the joining rank in the epoch, as `JoinerData.place` returns it.
    """

    joining_rank: str
    names: tuple[str, ...]
    run: int
    connection: Connection
    pair: Collectives | None
    place: list[Any]

    @property
    def rank(self) -> int:
        """Number of this rank in the new connection."""
        return self.connection.root.rank

    @property
    def name(self) -> str:
        """Stable id of this rank."""
        return self.names[self.rank]


class JoinConnector:
    """A maker of connections between the ranks that train and a joining rank.

    Args:
        transport: Transport of this rank.
        environment: Cluster environment of this rank before the join.
        device: Device of this rank.
        timeouts: Timeouts of the strategy.
    """

    def __init__(self, transport: TorchTransport, environment: Any, device: torch.device, timeouts: Timeouts) -> None:
        self._transport = transport
        self._environment = environment
        self._device = device
        self._timeouts = timeouts

    def connect(
        self, rank: int, joining_rank: str, place: dict[str, Any], check: Callable[[], None],
        made: Callable[[Connection], None] = lambda connection: None, own: list[Any] | None = None,
    ) -> PreparedJoin:  # fmt: skip
        """Connect all ranks that an invitation names, the joining rank included; all of them call this together.

        Args:
            rank: Number of this rank in the new connection.
            joining_rank: Name of the joining rank.
            place: The invitation: a dict with the stable ids of the ranks that connect (``"names"``), the number of the
                new run (``"run"``), and the prefix of its keys in the store (``"room"``).
            check: Function that is called repeatedly while the ranks connect; it raises an error if one of them will
                not connect.
            made: Function that is called with the new connection before its groups are formed. Closing that connection
                interrupts the forming of groups. Default: nothing is called.
            own: On the joining rank, its position in the epoch, as `JoinerData.place` returns it. Default None, on a
                rank that trains already.

        Raises:
            AsyncTrainingError: the ranks could not connect; the new connection is closed.
        """
        names = tuple(place["names"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # CUDA's current device is that of a thread, and this is a new one
        environment = RenumberedEnvironment(self._environment, rank, names)
        timeouts = self._timeouts
        connection = self._transport.widen(environment, self._device, place["room"], timeouts, PATIENCE, check)
        try:
            made(connection)
            connection.hear_deaths(partial(name_in_run, names=names))
            connection.forks = forks_of(connection.root, connection.payload, self._timeouts)
            root: Any = connection.root  # torch's collectives, which can be split
            pair = root.split((0, len(names) - 1), "joining")
            connection.open()
            places = connection.world.gather_objects(own or [])
        except BaseException as error:
            release(connection, in_words(error))
            raise
        return PreparedJoin(joining_rank, names, int(place["run"]), connection, pair, places[-1])


def release(connection: Connection, why: str) -> None:
    """Close a prepared connection that is not used, and report ``why`` to its other ranks, so that they do not wait.

    This takes a few seconds at most.
    """
    connection.outlives = False
    connection.membership.on_change = None
    connection.membership.fail(why)
    connection.close(in_order=False)


class JoinCoordinator(CollectiveCallback):
    """The object on each live rank that admits joining ranks at sync points."""

    def __init__(self, strategy: AsyncStrategy) -> None:
        self._strategy = strategy
        self._door: JoinBoard | None = None
        self._join_preparation: JoinPreparation | None = None
        self._hands_over: threading.Thread | None = None
        self._state: JoinState | None = None

    def open(self, trainer: Any) -> None:
        """Begin to admit joining ranks, at the start of a session.

        The current rank 0 writes a notice of the run to the store, which joining ranks read.
        """
        strategy = self._strategy
        transport = self._strategy.transport
        connection = strategy.connection
        live_ranks = strategy.live_ranks
        if not isinstance(transport, TorchTransport) or connection is None or live_ranks is None:
            return
        self._door = transport.door(strategy.cluster_environment)
        self._state = self._state or JoinState(trainer)
        most = strategy.config.max_replicas or live_ranks.started
        timeouts = strategy.config.timeouts
        connector = JoinConnector(transport, strategy.cluster_environment, strategy.root_device, timeouts)
        self._join_preparation = JoinPreparation(strategy, connector, self._door, most, self._prepare_for, self._call)
        if self._speaks:
            self._pin(
                {
                    "room": connection.name,
                    "call": call_of(strategy.num_runs),
                    "settings": TrainerSettings(trainer).of_fit(),
                    "model": digest(strategy.module),
                }
            )
        self.notice()

    def close(self) -> None:
        """Stop admitting joining ranks, at the end of a session.

        Rank 0 also deletes the notice by which joining ranks find this run. If rank 0 has failed, the notice stays,
        because the other ranks may train on.
        """
        if self._speaks and not self._strategy.failed:
            self._pin({})
        if self._join_preparation is not None:
            self._join_preparation.close()
        if self._hands_over is not None:
            # The joining rank waits for the state, so this rank must not end before the state is sent.
            self._hands_over.join(PATIENCE.total_seconds())
        if self._state is not None:
            self._state.close()
        self._door = self._join_preparation = self._hands_over = self._state = None

    @property
    def _speaks(self) -> bool:
        """Whether this rank is the current rank 0, which writes the notice for joining ranks."""
        live_ranks = self._strategy.live_ranks
        return self._door is not None and live_ranks is not None and live_ranks.generation.rank == 0

    def _pin(self, notice: dict[str, Any]) -> None:
        assert self._door is not None
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            self._door.pin(notice)

    def notice(self) -> None:
        """Look for joining ranks and lost ranks.

        Called on any thread when heartbeats or the live ranks have changed.
        """
        if (join_preparation := self._join_preparation) is not None:
            join_preparation.look()

    def _prepare_for(self) -> None:
        if (fit_sessions := self._strategy.fit_sessions) is None:
            return
        fit_sessions.patches.joiner_data.prepare_for()
        state = self._state  # another thread may close it
        if self._speaks and fit_sessions.session is not None and state is not None:
            state.prepare_for(fit_sessions.session.averager.agreed.nbytes())

    def _call(self) -> None:
        if (call := self.call_together) is not None:
            call()

    def decide(self, world: LightningCollectives) -> bool:
        """Admit a joining rank if all ranks have prepared a connection with that joining rank.

        All ranks are at a sync point and have the same model. In one exchange each rank sends which join it has
        prepared and its position in the epoch. All ranks decide by these values, so no rank may change its values
        afterwards.

        Returns:
            Always False: the model was not replaced.
        """
        strategy = self._strategy
        fit_sessions = self._strategy.fit_sessions
        join_preparation = self._join_preparation
        if join_preparation is None or fit_sessions is None or fit_sessions.session is None:
            return False
        averager = fit_sessions.session.averager
        # A joining rank takes over rank 0's state, so after rank 0's last step it would have nothing to do.
        ready = None if world.rank == 0 and strategy.module.trainer.fit_loop.done else join_preparation.hold()
        mine = ["", None, {}, []]
        own = None
        if ready is not None:
            own, why = self._pack(ready, fit_sessions)
            # Gradients that a rank has gathered belong to this rank, and are not sent.
            place = fit_sessions.patches.joiner_data.place(self._name, comes=False)
            mine = [ready.joining_rank, why, {**clocks_of(averager, world.rank), "gathered": None}, place]
        told: list[Any] = world.gather_objects(mine)
        if ready is None or any(offer != ready.joining_rank for offer, *_ in told):
            join_preparation.let_go()
            return False
        join_preparation.take()
        try:
            why = next((why for _, why, *_ in told if why is not None), _GONE)
            join_preparation.answer(ready.joining_rank, admitted=not why, again=why is _GONE)
            if why:
                join_preparation.drop(ready, why)
                tell_failed(world.rank, ready.joining_rank, why)
            else:
                self._take_in(ready, own, [clocks for *_, clocks, _ in told], [place for *_, place in told], world)
        except BaseException as error:
            # A connection that the strategy uses already is closed by the strategy.
            if strategy.connection is not ready.connection:
                release(ready.connection, in_words(error))
            raise
        return False

    def _take_in(
        self, ready: PreparedJoin, own: Packed | None, clocks: list[Any], places: list[Any], world: LightningCollectives
    ) -> None:
        """End the session, begin one that includes the joining rank, and send rank 0's state to the joining rank.

        Args:
            ready: The prepared join.
            own: Packed state of rank 0 for the joining rank; None on other ranks.
            clocks: Clocks (counts of steps, rounds and work) of all ranks that train.
            places: Positions in the epoch of all ranks that train, see `JoinerData.place`.
            world: Collectives over the old connection.
        """
        strategy = self._strategy
        fit_sessions = self._strategy.fit_sessions
        assert fit_sessions is not None
        assert fit_sessions.session is not None
        averager = fit_sessions.session.averager
        places = [*places, ready.place]
        steps = [each["step"] for each in clocks]
        clocks.append({**without_own(clocks[0]), "alike": None, "summary": RunSummary().state_dict()})
        # The mean is computed without the joining rank, so that the shared clock does not change by its admission.
        gathered = {"replicas": clocks, "mean_steps": sum(steps) / len(steps)}
        handed = {"averaging": gathered, "places": places, "strategy": strategy.handed_over()}
        rest = packed(handed) if own is not None else None
        rank = world.rank
        run = count_run(ready.run)
        joining_rank = for_life(ready.joining_rank)
        size = len(ready.names)
        who = f"Rank {rank}" if rank == joining_rank else f"Rank {rank}: rank {joining_rank}"
        words = f"{who} has joined, and {size} replicas train from here."
        tell("joined", logging.WARNING, words, rank=rank, run=run, world_size=size)
        strategy.saved.go_on({**averager.state_dict(), **gathered}, averager.gathered())
        # Before the map of live ranks is read, because the old engine changes it when a rank is lost.
        fit_sessions.stop()
        live_ranks = strategy.live_ranks
        assert live_ranks is not None
        # By names, because a rank may have been lost since the connection was made.
        strategy.live_ranks = live_ranks.with_joining_ranks(ready.rank, ready.names, run)
        fit_sessions.widen(ready.connection, run)
        fit_sessions.patches.go_on(ready.connection.world, ready.name, places)
        if own is not None and rest is not None:
            self._hands_over = threading.Thread(
                target=_hand_over, args=(ready, own, rest), name="lightning_async hand-over", daemon=True
            )
            self._hands_over.start()

    def _pack(self, ready: PreparedJoin, fit_sessions: FitSessions) -> tuple[Packed | None, str | None]:
        """Pack, on rank 0, the state that it sends to the joining rank; do nothing on other ranks.

        Returns:
            On rank 0, the packed state and ``""``; after a failure, None and the error's text. On other ranks, None and
            None.
        """
        if ready.pair is None:
            return None, None
        assert fit_sessions.session is not None and self._state is not None
        try:
            averaging = fit_sessions.session.averager.state_dict()
            return self._state.packed({**fit_sessions.patches.for_joining_ranks(), "averaging": averaging}), ""
        except Exception as error:  # also of the user's hooks: the ranks that train go on
            ready.connection.membership.fail(in_words(error))  # so that the joining rank does not wait for the state
            return None, f"{type(error).__name__}: {error}"

    @property
    def _name(self) -> str:
        live_ranks = self._strategy.live_ranks
        assert live_ranks is not None
        return live_ranks.names[live_ranks.generation.rank]


def _hand_over(ready: PreparedJoin, *states: Packed) -> None:
    """Send states from rank 0 to the joining rank; runs on its own thread, so that training goes on meanwhile."""
    assert ready.pair is not None
    try:
        world = LightningCollectives(ready.pair, ready.connection.membership.check)
        for state in states:
            world.hand_over(state)
    except Exception as error:  # the joining rank is lost, as any rank may be, or training has ended
        log.warning("Rank %s did not get the state that it needs to join: %s", for_life(ready.joining_rank), error)


class JoinPreparation:
    """The preparation of joins in one session, while training goes on; `close` ends it.

    wait for a joining rank --(its heartbeat)--> invite it (rank 0), or read the invitation (other ranks)
    --> connect, and form all groups --> ready: call the ranks to a sync point --> taken by `JoinCoordinator`

    A thread does this while a rank waits to join. If a rank does not connect, is lost, or fails before
    `JoinCoordinator` takes the join, the connection is closed, and the joining rank is told to try again. It then takes
    a new name, because a join is prepared only once for each name.

    Args:
        view: Strategy of this rank, which trains.
        connector: Connects this rank with the others and the joining rank.
        door: The run's entries in the store for joining ranks.
        most: Largest number of replicas; no joining rank is invited beyond this number.
        on_coming: Called on the preparation's thread before this rank connects with a joining rank.
        on_ready: Called on the preparation's thread when a joining rank can be admitted.
    """

    def __init__(
        self,
        view: StrategyView,
        connector: JoinConnector,
        door: JoinBoard,
        most: int,
        on_coming: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        assert view.connection is not None
        self._view = view
        self._connector = connector
        self._door = door
        self._most = most
        self._on_coming = on_coming
        self._on_ready = on_ready
        self._connection: Connection = view.connection
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: set[str] = set()
        # The last reason why a joining rank could not be admitted, which is told once.
        self._refusal = ""
        """Names of joining ranks that have been prepared, with or without success."""
        self._ready: PreparedJoin | None = None
        self._held = False
        """Whether `hold` has returned the prepared join, which must not change until `take` or `let_go` is called."""
        self._making: Connection | None = None
        """The connection whose groups are being formed; `close` interrupts the forming of groups."""

    def look(self) -> None:
        """Start the thread that prepares joins, if it has something to do.

        It has something to do if a joining rank waits, or if one of the ranks of a prepared join was lost. Any thread
        may call this; it does not wait for other ranks.
        """
        with self._lock:
            if self._thread is None and (self._broken() or self._waiting()):
                # Started while the lock is held, so that there is one thread only.
                self._thread = threading.Thread(target=self._run, name="lightning_async reception", daemon=True)
                self._thread.start()

    def hold(self) -> PreparedJoin | None:
        """Return the join that is prepared, and keep it unchanged until `take` or `let_go`; None if there is none.

        This rank then tells the others that it can complete the join. So the join is kept even if a rank is lost
        meanwhile.
        """
        with self._lock:
            self._held = self._ready is not None and not self._broken()
            return self._ready if self._held else None

    def let_go(self) -> None:
        """Undo `hold`, because not all other ranks can take the join now."""
        with self._lock:
            self._held = False
        self.look()

    def take(self) -> None:
        """Forget the join that `hold` has returned: from now on its connection belongs to the caller."""
        with self._lock:
            self._ready = None
            self._held = False

    def answer(self, joining_rank: str, admitted: bool, again: bool = False) -> None:
        """Write to the store whether a joining rank is admitted.

        The joining rank does not train before it has read this.

        Args:
            joining_rank: Name of the joining rank.
            admitted: Whether the joining rank is admitted.
            again: Whether the joining rank may try again under another name. Default False.
        """
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            self._door.answer(joining_rank, admitted, again)

    def drop(self, ready: PreparedJoin, why: str) -> None:
        """Close the connection of a join that cannot be completed, without waiting until it is closed.

        ``ready`` is the join, which was removed by `take` before.
        """
        threading.Thread(target=release, args=(ready.connection, why), name="lightning_async goodbye").start()
        self.look()

    def close(self) -> None:
        """End the preparation; if a join is ready, tell its joining rank to try again, and close its connection."""
        self._ends.set()
        with self._lock:
            thread = self._thread
            making = self._making
            ready = self._ready
            self._ready = None
        if making is not None:
            # This ends the forming of groups on the other thread.
            making.root.close()
            making.payload.close()
        if ready is not None:
            self._send_again(ready.joining_rank)
            release(ready.connection, "training has ended, or begins anew")
        # Without the lock, which the thread needs to see the end.
        if thread is not None:
            thread.join(_END_S)

    def _waiting(self) -> list[str]:
        """Return the names of joining ranks that can be invited now; none while a join is ready.

        A rank that was started again has the stable id of the rank that it replaces. It must wait until that rank is
        known to be lost. The caller holds `self._lock`.
        """
        live_ranks = self._view.live_ranks
        if self._ends.is_set() or self._ready is not None or live_ranks is None:
            return []
        waiting = self._connection.membership.visitors() if live_ranks.generation.world_size < self._most else ()
        return [
            joining_rank
            for joining_rank in waiting
            if joining_rank not in self._seen and for_life(joining_rank) not in live_ranks.names
        ]

    def _broken(self) -> bool:
        """Return whether the prepared join cannot be completed, because one of its ranks was lost.

        While `hold` keeps the join, return False, because the ranks then decide about the join together. The caller
        holds `self._lock`.
        """
        try:
            if self._ready is not None and not self._held:
                self._ready.connection.membership.check()
                self._check_names(self._ready.names)
        except AsyncTrainingError:
            return True
        return False

    def _check_names(self, names: Sequence[str]) -> None:
        there = () if self._view.live_ranks is None else self._view.live_ranks.names
        if tuple(names[:-1]) != there:
            lost = ", ".join({*names[:-1]} - {*there})
            raise CollectiveTimeout(f"Meanwhile rank(s) {lost} were lost.")

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("The preparation of a join has failed; the next change among the ranks starts it again.")
            with self._lock:
                self._thread = None

    def _serve(self) -> None:
        while True:
            # With the lock no change is missed: if this thread does not see a change, `look` starts another thread.
            with self._lock:
                broken = self._ready if self._broken() else None
                waiting = self._waiting()
                if broken is not None:
                    self._ready = None
                elif not waiting:
                    self._thread = None
                    return
            if broken is not None:
                self._refuse(broken.joining_rank, "a rank was lost before it could be taken in")
                release(broken.connection, "a rank was lost")
            elif (found := self._invitation(waiting)) is None:
                self._ends.wait(_LOOK_S)
            elif self._prepare(*found):
                self._on_ready()

    def _invitation(self, waiting: list[str]) -> tuple[str, dict[str, Any]] | None:
        """Return the name of a joining rank and its invitation; None if there is no invitation yet.

        Rank 0 writes the invitation, for the first of the ``waiting`` ranks; the other ranks read it from the store.
        """
        live_ranks = self._view.live_ranks
        assert live_ranks is not None
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            if live_ranks.generation.rank == 0:
                joining_rank = waiting[0]
                run = next_run()
                names = [*live_ranks.names, for_life(joining_rank)]
                place = {"run": run, "room": f"{run_name(run)}.{joining_rank}", "rank": len(names) - 1, "names": names}
                place |= {"started": live_ranks.started, "ever": sorted(live_ranks.ever)}
                self._door.invite(joining_rank, place)
                return joining_rank, place
            return next(
                (
                    (joining_rank, place)
                    for joining_rank in waiting
                    if (place := self._door.read_invitation(joining_rank))
                ),
                None,
            )
        return None

    def _prepare(self, joining_rank: str, place: dict[str, Any]) -> bool:
        """Connect with an invited joining rank; return whether the join is ready for `hold`."""
        live_ranks = self._view.live_ranks
        membership = self._connection.membership
        assert live_ranks is not None
        self._seen.add(joining_rank)

        def check() -> None:
            membership.check()
            self._check_names(place["names"])
            # A joining rank that has connected ends its visit normally; a rank in neither list is lost.
            if joining_rank not in membership.visitors() and joining_rank not in membership.left():
                raise CollectiveTimeout(f"{joining_rank} is gone.")
            if self._ends.is_set() or self._door.read_answer(joining_rank):
                raise CollectiveError("Training has ended, or another rank could not.")

        def made(connection: Connection) -> None:
            self._making = connection
            check()

        try:
            check()
            self._on_coming()
            ready = self._connector.connect(live_ranks.generation.rank, joining_rank, place, check, made)
        except Exception as error:
            self._refuse(joining_rank, f"{type(error).__name__}: {error}")
            return False
        finally:
            self._making = None
        with self._lock:
            # `close` sets the event before it takes the lock: either `close` finds this join, or the event is set here.
            if not self._ends.is_set():
                self._ready = ready
                # Until the join is taken, a rank may be lost, which makes it invalid.
                ready.connection.membership.on_change = self.look
                return True
        self._send_again(joining_rank)
        release(ready.connection, "training has ended, or begins anew")
        return False

    def _refuse(self, joining_rank: str, why: str) -> None:
        self._send_again(joining_rank)
        live_ranks = self._view.live_ranks
        if self._ends.is_set() or live_ranks is None:
            return
        level = logging.DEBUG if why == self._refusal else logging.WARNING
        tell_failed(live_ranks.generation.rank, joining_rank, why, level)
        self._refusal = why

    def _send_again(self, joining_rank: str) -> None:
        """Write to the store that a joining rank must try again.

        This is called before the connection to the joining rank is closed, so that the joining rank finds the answer
        when the connection ends.
        """
        self.answer(joining_rank, admitted=False, again=True)


def for_life(joining_rank: str) -> str:
    """Return the stable id of a joining rank: the part of its name before the first dot."""
    return joining_rank.partition(".")[0]


def tell_failed(rank: int, joining_rank: str, why: str, level: int = logging.WARNING) -> None:
    words = f"Rank {rank}: rank {for_life(joining_rank)} could not be admitted, and training goes on without: {why}"
    tell("join_failed", level, words, rank=rank)


def digest(module: Any) -> int:
    """Return a hash of the names, shapes and types of all tensors that replicas share.

    The hash does not depend on which parameters are trained, because that may change within a fit.
    """
    return zlib.crc32(repr([line.rpartition(", ")[0] for line in describe(module)]).encode())
