"""A rank that was lost comes back: those who train take it in at a sync point, and go on with it from there.

    those who train                          the joining rank, a process of its own, see `strategies/joining_rank`
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
those who train; `JoinPreparation` works for it on a thread of each rank, and has a `JoinConnector` connect them.
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
from lightning_async.engine.averaging.report import RunSummary
from lightning_async.engine.collectives import LightningCollectives, Packed, packed
from lightning_async.engine.control_plane import forks_of
from lightning_async.engine.replica import describe
from lightning_async.engine.timeouts import Timeouts
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout
from lightning_async.events import tell
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.strategies.averaging_state import clocks_of
from lightning_async.strategies.rank_mapping import count_run, name_in_run, next_run, run_name
from lightning_async.strategies.session import FitSessions
from lightning_async.trainer.data.join import StateCopying, state_for_joining_ranks
from lightning_async.trainer.environment.environments import RenumberedEnvironment
from lightning_async.trainer.environment.settings import settings_of
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
"""How long those who connect wait for each other at most."""
_LOOK_S = 0.02
_END_S = 5.0
_GONE = "rank 0 was lost."


class PreparedJoin(NamedTuple):
    """A connection of all who train with a joining rank.

    Args:
        joining_rank: the name under which the joining rank waits.
        names: for life, of all; the joining rank's is the last.
        run: the number that their run will have.
        connection: of all, with all groups that training needs.
        pair: of rank 0 and the joining rank; None on the others.
        place: where the joining rank is, see `JoinerData.place`.
    """

    joining_rank: str
    names: tuple[str, ...]
    run: int
    connection: Connection
    pair: Collectives | None
    place: list[Any]

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        return self.connection.root.rank

    @property
    def name(self) -> str:
        """The stable id of the joining rank."""
        return self.names[self.rank]


class JoinConnector:
    """Connections of the ranks that train with a joining rank, made on all of them or on none.

    Args:
        transport: of this rank.
        environment: of this rank, in its own run.
        device: of this rank.
        timeouts: of the strategy.
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
        """Connect all that an invitation names, the joining rank included.

        Args:
            rank: the number of this rank among them.
            joining_rank: who is invited.
            place: the invitation.
            check: raises where somebody does not come.
            made: called with the connection before its groups are formed: closing it ends that.
            own: of the joining rank: where it is.

        Raises:
            AsyncTrainingError: it came to nothing, and nothing is left open.
        """
        names = tuple(place["names"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        environment = RenumberedEnvironment(self._environment, rank, len(names), "")
        dead_after = self._timeouts.dead_after
        connection = self._transport.widen(environment, self._device, place["room"], dead_after, PATIENCE, check)
        try:
            made(connection)
            connection.hear_deaths(partial(name_in_run, names=names))
            connection.forks = forks_of(connection.root, connection.payload, self._timeouts)
            root: Any = connection.root  # of torch: its groups can be formed anew, and split
            pair = root.split((0, len(names) - 1), "joining")
            connection.open()
            places = connection.world.gather_objects(own or [])
        except BaseException as error:
            release(connection, in_words(error))
            raise
        return PreparedJoin(joining_rank, names, int(place["run"]), connection, pair, places[-1])


def release(connection: Connection, why: str) -> None:
    """Close what came to nothing; the others in it hear why, so that nobody waits. Takes some seconds at most."""
    connection.outlives = False
    connection.membership.on_change = None
    connection.membership.fail(why)
    connection.close(in_order=False)


class JoinCoordinator(CollectiveCallback):
    """The side of those who train: it takes joining ranks in at sync points."""

    def __init__(self, strategy: AsyncStrategy) -> None:
        self._strategy = strategy
        self._door: JoinBoard | None = None
        self._join_preparation: JoinPreparation | None = None
        self._hands_over: threading.Thread | None = None
        self._copying = StateCopying()

    def open(self, trainer: Any) -> None:
        """Announce that training begins, or goes on as another run."""
        strategy = self._strategy
        transport = self._strategy.transport
        connection = strategy.connection
        live_ranks = strategy.live_ranks
        if not isinstance(transport, TorchTransport) or connection is None or live_ranks is None:
            return
        self._door = transport.door(strategy.cluster_environment)
        most = strategy.config.max_replicas or live_ranks.started
        timeouts = strategy.config.timeouts
        connector = JoinConnector(transport, strategy.cluster_environment, strategy.root_device, timeouts)
        self._join_preparation = JoinPreparation(strategy, connector, self._door, most, self._prepare_for, self._call)
        if self._speaks:
            self._pin(
                {
                    "room": connection.name,
                    "fit": strategy.num_fits,
                    "settings": settings_of(strategy, trainer),
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
        self._copying.close()
        self._door = self._join_preparation = self._hands_over = None

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
        if self._speaks and fit_sessions.session is not None:
            self._copying.prepare_for(self._strategy.module.trainer, fit_sessions.session.averager.agreed.nbytes())

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
        assert fit_sessions.session is not None
        try:
            own = state_for_joining_ranks(self._strategy.module.trainer)
            averaging = fit_sessions.session.averager.state_dict()
            return self._copying.packed({**own, **fit_sessions.patches.for_joining_ranks(), "averaging": averaging}), ""
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
        view: of the strategy of a rank that trains.
        connector: connects this rank with the others and the joining rank.
        door: where joining ranks ask.
        most: so many replicas there may be.
        on_coming: called when one is about to come, before all connect, on that thread.
        on_ready: called when a joining rank can be taken, on a thread of its own.
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
        """Return whether the rank that is ready cannot be admitted, as somebody is lost."""
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
        live_ranks = self._view.live_ranks
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
            ready = self._connector.connect(live_ranks.generation.rank, joining_rank, place, check, made)
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
        live_ranks = self._view.live_ranks
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


def digest(module: Any) -> int:
    """Hash the names, shapes and types of all that replicas share; what is trained of it may change in an epoch."""
    return zlib.crc32(repr([line.rpartition(", ")[0] for line in describe(module)]).encode())
