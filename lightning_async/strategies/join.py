"""A rank that was lost comes back: those who train take it in at a sync point, and go on with it from there.

    those who train                          the joining rank, a process of its own, see `JoiningRank`
    pin a notice: which run, which settings
                                             builds its model, compares, sends heartbeats beside those of the run
    see it, and rank 0 invites it
    ------ all connect beside the connection that they have, and while they train, see `JoinPreparation` ------
    all go to a sync point, where rank 0 copies its state, and tell over the old connection whether they can
        all can: it is closed, and averaging goes on over the new one
        rank 0 hands its state over
                                             takes that over, and is one of them
        else: the new one is closed; nothing has happened
                                             hears that, and ends

So whatever becomes of the joining rank meanwhile, those who train go on. Read `JoinCoordinator` first, the side of
those who train; `JoinPreparation` works for it on a thread of each rank; `JoiningRank` is the other side.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistNetworkError, DistStoreError

from lightning_async.engine.averaging.report import RunSummary
from lightning_async.engine.collectives import LightningCollectives, Packed, packed
from lightning_async.engine.replica import describe
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout, StoreLost
from lightning_async.events import tell
from lightning_async.membership.generation import Generation
from lightning_async.membership.join_protocol import JoinBoard, JoinBoardWithTimeout
from lightning_async.membership.launcher_channel import came_back
from lightning_async.membership.startup import WaitWithLog
from lightning_async.strategies.averaging_state import clocks_of
from lightning_async.strategies.join_connection import PATIENCE, PreparedJoin, connect, release
from lightning_async.strategies.rank_mapping import RankMap, count_run, next_run, run_name
from lightning_async.strategies.session import FitSessions
from lightning_async.trainer.data.join import JoinState
from lightning_async.trainer.environment.settings import TrainerSettings, check_joining
from lightning_async.trainer.loops.loop_state import without_own
from lightning_async.trainer.namespace import in_words, pytorch
from lightning_async.transports.base import Connection
from lightning_async.transports.torch import TorchTransport

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy

log = logging.getLogger(__name__)
_LOOK_S = 0.02
_END_S = 5.0
_GONE = "rank 0 was lost."
_BOARD_LOOK_S = 0.05
_HEAR_S = 0.002  # while the others train, and while they stand and wait
_ANSWER_S = 5.0
_WAITS = (
    "waiting to be taken in by those who train: do they? If not, start all ranks again. If so, they may be as many as "
    "their `max_replicas` already, or on the way to a sync point"
)


class JoinCoordinator:
    """The side of those who train: it takes joining ranks in at sync points; see `CollectiveCallback`."""

    def __init__(self, strategy: AsyncStrategy) -> None:
        self._strategy = strategy
        self.call_together: Callable[[], None] | None = None
        self._door: JoinBoard | None = None
        self._join_preparation: JoinPreparation | None = None
        self._hands_over: threading.Thread | None = None
        self._state: JoinState | None = None

    def open(self, trainer: Any) -> None:
        """Announce that training begins, or goes on as another run."""
        strategy = self._strategy
        transport = self._strategy.transport
        connection = strategy.connection
        live_ranks = strategy.live_ranks
        if not isinstance(transport, TorchTransport) or connection is None or live_ranks is None:
            return
        self._door = transport.door(strategy.cluster_environment)
        self._state = self._state or JoinState(trainer)
        most = strategy.config.max_replicas or live_ranks.started
        self._join_preparation = JoinPreparation(strategy, self._door, most, self._prepare_for, self._call)
        if self._speaks:
            self._pin(
                {
                    "room": connection.name,
                    "fit": strategy.num_fits,
                    "settings": TrainerSettings(trainer).of_fit(),
                    "model": digest(strategy.module),
                }
            )
        self.notice()

    def close(self) -> None:
        """End the joins with training. Where this rank alone fails, the others may train on."""
        if self._speaks and not self._strategy.failed:
            self._pin({})
        if self._join_preparation is not None:
            self._join_preparation.close()
        if self._hands_over is not None:
            self._hands_over.join(PATIENCE.total_seconds())
        if self._state is not None:
            self._state.close()
        self._door = self._join_preparation = self._hands_over = self._state = None

    @property
    def _speaks(self) -> bool:
        """Whether this rank tells joining ranks of the run: the current rank 0 does."""
        live_ranks = self._strategy.live_ranks
        return self._door is not None and live_ranks is not None and live_ranks.generation.rank == 0

    def _pin(self, notice: dict[str, Any]) -> None:
        assert self._door is not None
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            self._door.pin(notice)

    def notice(self) -> None:
        """Look at what is new among the heartbeats; called on their thread."""
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
        """Go on with a joining rank if all can take the same one: all ranks stand here, and hold one model.

        One exchange says that, and where each is; nobody takes back what it has said in it. Returns False: the model
        stays as it is.
        """
        strategy = self._strategy
        fit_sessions = self._strategy.fit_sessions
        join_preparation = self._join_preparation
        if join_preparation is None or fit_sessions is None or fit_sessions.session is None:
            return False
        averager = fit_sessions.session.averager
        # For rank 0, and so for whoever is as it is, it may be too late.
        ready = None if world.rank == 0 and strategy.module.trainer.fit_loop.done else join_preparation.hold()
        mine = ["", None, {}, []]
        own = None
        if ready is not None:
            own, why = self._pack(ready, fit_sessions)  # what each has gathered stays with it
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
            if strategy.connection is not ready.connection:
                release(ready.connection, in_words(error))
            raise
        return False

    def _take_in(
        self, ready: PreparedJoin, own: Packed | None, clocks: list[Any], places: list[Any], world: LightningCollectives
    ) -> None:
        """Go on with the joining rank: all can."""
        strategy = self._strategy
        fit_sessions = self._strategy.fit_sessions
        assert fit_sessions is not None
        assert fit_sessions.session is not None
        averager = fit_sessions.session.averager
        places = [*places, ready.place]
        steps = [each["step"] for each in clocks]
        clocks.append({**without_own(clocks[0]), "alike": None, "summary": RunSummary().state_dict()})
        # The clock of all does not jump as one more comes.
        gathered = {"replicas": clocks, "mean_steps": sum(steps) / len(steps)}
        handed = {"averaging": gathered, "places": places, "strategy": strategy.handed_over()}
        rest = packed(handed) if own is not None else None
        rank = world.rank
        run = count_run(ready.run)
        joining_rank = for_life(ready.joining_rank)
        size = len(ready.names)
        words = f"Rank {rank}: rank {joining_rank} has joined, and {size} replicas train from here."
        tell("joined", logging.WARNING, words, rank=rank, run=run, world_size=size)
        strategy.saved.go_on({**averager.state_dict(), **gathered}, averager.gathered())
        fit_sessions.stop()  # from here on nobody is lost by its count
        live_ranks = strategy.live_ranks
        assert live_ranks is not None
        # By names, as one may be lost since it was made.
        strategy.live_ranks = live_ranks.with_joining_ranks(ready.rank, ready.names, run)
        fit_sessions.widen(ready.connection, run)
        fit_sessions.patches.go_on(ready.connection.world, ready.name, places)
        if own is not None and rest is not None:
            self._hands_over = threading.Thread(
                target=_hand_over, args=(ready, own, rest), name="lightning_async hand-over", daemon=True
            )
            self._hands_over.start()

    def _pack(self, ready: PreparedJoin, fit_sessions: FitSessions) -> tuple[Packed | None, str | None]:
        """Pack on rank 0 what the joining rank needs of it, and say why that could not be; "" where it could."""
        if ready.pair is None:
            return None, None
        assert fit_sessions.session is not None and self._state is not None
        try:
            averaging = fit_sessions.session.averager.state_dict()
            return self._state.packed({**fit_sessions.patches.for_joining_ranks(), "averaging": averaging}), ""
        except Exception as error:  # of hooks of the user's, too: who trains goes on
            ready.connection.membership.fail(in_words(error))  # nobody waits for it
            return None, f"{type(error).__name__}: {error}"

    @property
    def _name(self) -> str:
        """This rank's stable id."""
        live_ranks = self._strategy.live_ranks
        assert live_ranks is not None
        return live_ranks.names[live_ranks.generation.rank]


def _hand_over(ready: PreparedJoin, *states: Packed) -> None:
    """Hand states over to the joining rank, which waits for them; nobody else does."""
    assert ready.pair is not None
    try:
        world = LightningCollectives(ready.pair, ready.connection.membership.check)
        for state in states:
            world.hand_over(state)
    except Exception as error:  # it is lost, as any rank may be, or training has ended
        log.warning("Rank %s did not get what it needs to take part: %s", for_life(ready.joining_rank), error)


class JoinPreparation:
    """The preparation of joins in one run, beside training; closed by `close`.

    waits for joining ranks --(one sends heartbeats)--> invites it (rank 0), or finds the invitation
    --> all connect, and form all groups --> ready, calls to a sync point --> taken

    Where a rank does not come, is lost, or fails, the joining rank is answered and released, at any time until it is
    taken. A joining rank is prepared once: one that could not be taken in comes again by another name.

    Args:
        strategy: of a rank that trains.
        door: where joining ranks ask.
        most: so many replicas there may be.
        on_coming: called when one is about to come, before all connect, on that thread.
        on_ready: called when a joining rank can be taken, on a thread of its own.
    """

    def __init__(
        self,
        strategy: AsyncStrategy,
        door: JoinBoard,
        most: int,
        on_coming: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        assert strategy.connection is not None
        self._strategy = strategy
        self._door = door
        self._most = most
        self._on_coming = on_coming
        self._on_ready = on_ready
        self._connection = strategy.connection
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: set[str] = set()
        """Those that have been prepared, whatever became of them."""
        self._ready: PreparedJoin | None = None
        self._held = False
        """All are about to agree on who is ready."""
        self._making: Connection | None = None

    def look(self) -> None:
        """Look at what is new among those who train, or wait: from any thread, and never blocks."""
        with self._lock:
            if self._thread is None and (self._broken() or self._waiting()):
                self._thread = threading.Thread(target=self._run, name="lightning_async reception", daemon=True)
                self._thread.start()

    def hold(self) -> PreparedJoin | None:
        """Return who this rank can admit, if all others can, too; None for nobody yet.

        That stays so until `take` or `let_go`, whoever is lost meanwhile.
        """
        with self._lock:
            self._held = self._ready is not None and not self._broken()
            return self._ready if self._held else None

    def let_go(self) -> None:
        """Release the hold: others cannot take it, or cannot yet."""
        with self._lock:
            self._held = False
        self.look()

    def take(self) -> None:
        """Give who was held to the caller."""
        with self._lock:
            self._ready = None
            self._held = False

    def answer(self, joining_rank: str, admitted: bool, again: bool = False) -> None:
        """Answer a joining rank. It ends where it hears nothing: it is not to train alone what the others train."""
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            self._door.answer(joining_rank, admitted, again)

    def drop(self, ready: PreparedJoin, why: str) -> None:
        """Release who was taken and cannot stay, beside training."""
        threading.Thread(target=release, args=(ready.connection, why), name="lightning_async goodbye").start()
        self.look()

    def close(self) -> None:
        """End the preparation."""
        self._ends.set()
        with self._lock:
            thread = self._thread
            making = self._making
            ready = self._ready
            self._ready = None
        if making is not None:
            making.root.close()
            making.payload.close()
        if ready is not None:
            self._send_again(ready.joining_rank)
            release(ready.connection, "training has ended, or begins anew")
        if thread is not None:
            thread.join(_END_S)

    def _waiting(self) -> list[str]:
        """Return those who wait, and are not taken for one who is there; nobody while one is ready."""
        live_ranks = self._strategy.live_ranks
        if self._ends.is_set() or self._ready is not None or live_ranks is None:
            return []
        waiting = self._connection.membership.visitors() if live_ranks.generation.world_size < self._most else ()
        return [
            joining_rank
            for joining_rank in waiting
            if joining_rank not in self._seen and for_life(joining_rank) not in live_ranks.names
        ]

    def _broken(self) -> bool:
        """Return whether the rank that is ready cannot be admitted, as somebody is lost."""
        try:
            if self._ready is not None and not self._held:
                self._ready.connection.membership.check()
                self._check_names(self._ready.names)
        except AsyncTrainingError:
            return True
        return False

    def _check_names(self, names: Sequence[str]) -> None:
        there = () if self._strategy.live_ranks is None else self._strategy.live_ranks.names
        if tuple(names[:-1]) != there:
            lost = ", ".join({*names[:-1]} - {*there})
            raise CollectiveTimeout(f"Meanwhile rank(s) {lost} were lost.")

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception(
                "Who waits to join was not looked at; the next change among the ranks has it looked at again."
            )
            with self._lock:
                self._thread = None

    def _serve(self) -> None:
        while True:
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
        """Return an invitation of one of these ranks: rank 0 invites them one by one, the others read whom."""
        live_ranks = self._strategy.live_ranks
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
        live_ranks = self._strategy.live_ranks
        membership = self._connection.membership
        assert live_ranks is not None
        self._seen.add(joining_rank)

        def check() -> None:
            membership.check()
            self._check_names(place["names"])
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
            ready = connect(self._strategy, live_ranks.generation.rank, joining_rank, place, check, made)
        except Exception as error:
            self._refuse(joining_rank, f"{type(error).__name__}: {error}")
            return False
        finally:
            self._making = None
        with self._lock:
            if not self._ends.is_set():
                self._ready = ready
                ready.connection.membership.on_change = self.look
                return True
        self._send_again(joining_rank)
        release(ready.connection, "training has ended, or begins anew")
        return False

    def _refuse(self, joining_rank: str, why: str) -> None:
        self._send_again(joining_rank)
        live_ranks = self._strategy.live_ranks
        if self._ends.is_set() or live_ranks is None:
            return
        tell_failed(live_ranks.generation.rank, joining_rank, why)

    def _send_again(self, joining_rank: str) -> None:
        """Ask it to come again, before it hears that its connection is gone."""
        self.answer(joining_rank, admitted=False, again=True)


def for_life(joining_rank: str) -> str:
    """Return the stable id of a joining rank: what it was called when it was started."""
    return joining_rank.partition(".")[0]


def tell_failed(rank: int, joining_rank: str, why: str) -> None:
    """Report that a joining rank could not be taken in."""
    words = f"Rank {rank}: rank {for_life(joining_rank)} could not be taken in, and training goes on without: {why}"
    tell("join_failed", logging.WARNING, words, rank=rank)


class JoiningRank:
    """A process that was started while others train: it waits to be taken in, and goes on from where they are."""

    def __init__(self, strategy: AsyncStrategy, trainer: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._number = int(strategy.cluster_environment.started_as)
        self._attempts = 0
        self._refused = (
            f"Rank {self._number} could not be taken in: see what those who train have logged. They go on without."
        )
        self.patience = timedelta(minutes=30)
        """How long to wait for a training to begin, and for its ranks to come to a sync point."""

    def join(self) -> None:
        """Wait to be taken in, and take over what the others have.

        Raises:
            SettingsMismatch, ValueError: what they train is something else, or over another transport.
            SIGTERMException: told to end while waiting.
            CollectiveTimeout: nobody trains, or nobody takes it in, for 30 minutes.
            StoreLost: the store is, also where it only says nothing for `Timeouts(dead_after=)`.
        """
        try:
            self._join()
        except (DistNetworkError, DistStoreError, ConnectionError) as error:
            said = str(error).splitlines()[0].rstrip(".")
            raise StoreLost(
                f"rank {self._number}: while it waited to be taken in, the store failed ({said}). Without it nobody "
                "can be. Start all again from the last checkpoint."
            ) from error

    def _join(self) -> None:
        transport = self._strategy.transport
        if not isinstance(transport, TorchTransport):
            raise ValueError(f"{transport!r} takes nobody in: start all ranks together.")
        dead_after = self._strategy.config.timeouts.dead_after
        door = JoinBoardWithTimeout(
            transport.door(self._strategy.cluster_environment), self._number, dead_after, self._end_if_told
        )
        log.warning("Rank %d comes while others train, and waits to be taken in by them.", self._number)
        while True:
            notice = self._wait(door.read_notice)
            self._compare(notice)
            if self._visit(transport, door, str(notice["room"])):
                return

    def _wait(
        self,
        look: Callable[[], dict[str, Any]],
        worthwhile: Callable[[], bool] = lambda: True,
        look_s: float = _BOARD_LOOK_S,
    ) -> dict[str, Any]:
        """Return what is found, or nothing where it is no longer worthwhile to wait."""
        patience = WaitWithLog(
            self._number, self.patience, self._end_if_told, sleep=lambda seconds: time.sleep(min(seconds, look_s))
        )
        while not (found := look()) and worthwhile():
            patience.wait(lambda: _WAITS)
        return found

    def _end_if_told(self) -> None:
        if self._trainer.received_sigterm:
            raise pytorch("utilities.exceptions").SIGTERMException

    def _compare(self, notice: dict[str, Any]) -> None:
        strategy = self._strategy
        if notice.get("fit") != strategy.num_fits:
            raise ValueError(
                f"Rank {self._number} comes back to fit number {strategy.num_fits} of its script, and the others are "
                f"in number {notice.get('fit')}: where a script fits several times, it can join the first only."
            )
        check_joining(notice.get("settings", {}), TrainerSettings(self._trainer).of_fit())
        if notice.get("model") != digest(strategy.module):
            raise ValueError(
                f"Rank {self._number} comes back with another model than those who train have: its parameters or "
                "buffers differ in number, name, shape or type. Build the same model on every rank."
            )

    def _visit(self, transport: TorchTransport, door: JoinBoardWithTimeout, room: str) -> bool:
        """Send heartbeats beside a run until it invites this rank, and go on with it; False where that came to nothing
        before this rank had anything of theirs."""
        strategy = self._strategy
        self._attempts += 1
        joining_rank = f"{self._number}.{came_back()}.{self._attempts}"
        dead_after = strategy.config.timeouts.dead_after
        membership = transport.visit(strategy.cluster_environment, room, joining_rank, dead_after)
        try:
            door.ask(membership.start)
            place = self._wait(
                lambda: door.read_invitation(joining_rank), lambda: door.read_notice().get("room") == room
            )
            ready = self._connect(joining_rank, place, door) if place else None
        finally:
            membership.close()
        state = None if ready is None else self._receive(ready, lambda: door.read_answer(joining_rank))
        if ready is None or state is None:
            return False
        count_run(ready.run)
        config = strategy.config
        size = place["started"]
        began = RankMap(Generation.first(0, size), ready.run, config.survives(size), wanted=config.fewest(size))
        strategy.live_ranks = began.with_joining_ranks(ready.rank, ready.names, ready.run, place["ever"])
        self._take_part(ready, state, lambda: door.read_answer(joining_rank))
        return True

    def _connect(self, joining_rank: str, place: dict[str, Any], door: JoinBoardWithTimeout) -> PreparedJoin | None:
        """Connect with all who train; None where they could not come, and train on."""

        def check() -> None:
            self._end_if_told()
            if door.read_answer(joining_rank):
                raise CollectiveError("one of them could not.")

        fit_sessions = self._strategy.fit_sessions
        rank = int(place["rank"])
        assert fit_sessions is not None
        own = fit_sessions.patches.joiner_data.place(place["names"][rank], comes=True)
        try:
            return connect(self._strategy, rank, joining_rank, place, check, own=own)
        except StoreLost:
            raise
        except AsyncTrainingError as error:
            log.warning("Rank %d could not be taken in, and waits again: %s", self._number, error)
            return None

    def _receive(self, ready: PreparedJoin, answer: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Receive what rank 0 has, once all stand at a sync point; None where that does not happen, and they train on.

        Raises:
            AsyncTrainingError: they have stood there, and could not.
        """
        connection = ready.connection
        assert ready.pair is not None

        def check() -> None:
            connection.membership.check()
            self._end_if_told()

        world = LightningCollectives(ready.pair, check, self.patience)
        try:
            own = world.hand_over(None)
            of_all = world.hand_over(None)
            return {**own, **of_all, "averaging": {**own["averaging"], **of_all["averaging"]}}
        except BaseException as error:
            release(connection, in_words(error))
            if not isinstance(error, AsyncTrainingError) or isinstance(error, StoreLost):
                raise
            until = time.monotonic() + _ANSWER_S
            if not self._wait(answer, lambda: time.monotonic() < until).get("again", True):
                raise AsyncTrainingError(self._refused) from error
            log.warning("Rank %d could not be taken in, and waits again: %s", self._number, error)
            return None

    def _take_part(self, ready: PreparedJoin, state: dict[str, Any], answer: Callable[[], dict[str, Any]]) -> None:
        strategy = self._strategy
        trainer = self._trainer
        fit_sessions = self._strategy.fit_sessions
        connection = ready.connection
        assert fit_sessions is not None
        try:
            self._hear(connection, answer)
            JoinState(trainer).restore(state)
            if trainer.fit_loop.done:
                raise ValueError(
                    f"Rank {self._number} comes to epoch {trainer.current_epoch}, step {trainer.global_step} of the "
                    "others, where its own limits end training. Give it the same `max_epochs` and `max_steps`."
                )
            fit_sessions.come()
            fit_sessions.patches.joiner_data.begin_within_epoch(state["logged"])
        except BaseException as error:
            release(connection, in_words(error))
            raise
        strategy.take_handed_over(state["strategy"])
        strategy.saved.go_on(state["averaging"])
        fit_sessions.widen(connection, ready.run)
        fit_sessions.patches.go_on(connection.world, ready.name, state["places"], state)
        connection.world.asynchronous = True  # until the end of the epoch, where all meet

    def _hear(self, connection: Connection, answer: Callable[[], dict[str, Any]]) -> None:
        """Wait for the others' word that this rank is one of them.

        Raises:
            AsyncTrainingError: it is not, or they are gone.
        """
        patience = max(PATIENCE, 2 * self._strategy.config.timeouts.dead_after)  # one may be lost as they vote
        until = time.monotonic() + patience.total_seconds()

        def worthwhile() -> bool:
            connection.membership.check()
            return time.monotonic() < until

        if not self._wait(answer, worthwhile, look_s=_HEAR_S).get("admitted"):
            raise AsyncTrainingError(self._refused)


def digest(module: Any) -> int:
    """Hash the names, shapes and types of all that replicas share; what is trained of it may change in an epoch."""
    return zlib.crc32(repr([line.rpartition(", ")[0] for line in describe(module)]).encode())
