"""A rank that was lost comes back: those who train take it in at a gate, and go on with it from there.

    those who train                          the newcomer, a process of its own, see `guest`
    pin a notice: which run, which settings
                                             builds its model, compares, waits beside the run as a guest
    see the guest, and rank 0 invites it
    ------ all connect beside the connection that they have, and while they train, see `reception` ------
    all go to a gate, where rank 0 copies its state, and tell over the old connection whether they can
        all can: it is closed, and averaging goes on over the new one
        rank 0 hands its state over
                                             takes that over, and is one of them
        else: the new one is closed; nothing has happened
                                             hears that, and ends

So whatever becomes of the newcomer meanwhile, those who train go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from lightning_async.comm.membership.door import Door
from lightning_async.engine.averaging.report import RunSummary
from lightning_async.engine.tensors import describe
from lightning_async.engine.world import Packed, World, packed
from lightning_async.events import tell
from lightning_async.strategies.connecting import PATIENCE, Connected, Ready, release
from lightning_async.strategies.course import Course
from lightning_async.strategies.reception import Reception, for_life, tell_failed
from lightning_async.strategies.saved_state import SavedState, clocks_of
from lightning_async.strategies.survivors import count_run
from lightning_async.trainer.absent import without_own
from lightning_async.trainer.latecomer import Copying, state_for_newcomers
from lightning_async.trainer.patches import in_words
from lightning_async.trainer.settings import settings_of
from lightning_async.transports.transport import ElasticTransport

__all__ = ["Host", "Hosting", "digest"]

log = logging.getLogger(__name__)
_GONE = "rank 0 was lost."


class Hosting(Connected, Protocol):
    """What a strategy has to whose training ranks come back."""

    num_fits: int
    num_runs: int
    failed: bool
    saved: SavedState
    course: Course | None

    @property
    def module(self) -> Any: ...

    def settings(self) -> dict[str, object]: ...

    def handed_over(self) -> dict[str, Any]: ...

    def take_handed_over(self, told: dict[str, Any]) -> None: ...

    def usual_settings(self) -> dict[str, object]: ...


class Host:
    """Takes newcomers in; see `Convened`.

    Args:
        strategy: whose training they come to.
    """

    def __init__(self, strategy: Hosting) -> None:
        self._strategy = strategy
        self.call_together: Callable[[], None] | None = None
        self._door: Door | None = None
        self._reception: Reception | None = None
        self._hands_over: threading.Thread | None = None
        self._copying = Copying()

    def open(self, trainer: Any) -> None:
        """Training begins, or goes on as another run: let it be known."""
        strategy, transport = self._strategy, self._strategy.transport
        connection, survivors = strategy.connection, strategy.survivors
        if not isinstance(transport, ElasticTransport) or connection is None or survivors is None:
            return
        self._door = transport.door(strategy.cluster_environment)
        most = strategy.config.max_replicas or survivors.started
        self._reception = Reception(strategy, self._door, most, self._foresee, self._call)
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
        """Training ends: it takes nobody in any more. Where this rank alone fails, the others may train on."""
        if self._speaks and not self._strategy.failed:
            self._pin({})
        if self._reception is not None:
            self._reception.close()
        if self._hands_over is not None:
            self._hands_over.join(PATIENCE.total_seconds())
        self._copying.close()
        self._door = self._reception = self._hands_over = None

    @property
    def _speaks(self) -> bool:
        """Whether it is this rank that tells newcomers of those that train."""
        survivors = self._strategy.survivors
        return self._door is not None and survivors is not None and survivors.generation.rank == 0

    def _pin(self, notice: dict[str, Any]) -> None:
        assert self._door is not None
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            self._door.pin(notice)

    def notice(self) -> None:
        """Something is new among the heartbeats, on whose thread this is called."""
        if (reception := self._reception) is not None:
            reception.look()

    def _foresee(self) -> None:
        if (course := self._strategy.course) is None:
            return
        course.patches.foresee()
        if self._speaks and course.session is not None:
            self._copying.foresee(self._strategy.module.trainer, course.session.averager.agreed.nbytes())

    def _call(self) -> None:
        if (call := self.call_together) is not None:
            call()

    def decide(self, world: World) -> bool:
        """All ranks stand, and hold one model: if each of them can take the same newcomer, they go on with it.

        One exchange says that, and where each is; nobody takes back what it has said in it. Returns False: the model
        stays as it is.
        """
        strategy, course, reception = self._strategy, self._strategy.course, self._reception
        if reception is None or course is None or course.session is None:
            return False
        averager, place = course.session.averager, course.patches.place
        # For rank 0, and so for whoever is as it is, it may be too late.
        ready = None if world.rank == 0 and strategy.module.trainer.fit_loop.done else reception.hold()
        mine, own = ["", None, {}, []], None
        if ready is not None:
            own, why = self._pack(ready, course)  # what each has gathered stays with it
            mine = [ready.guest, why, {**clocks_of(averager, world.rank), "gathered": None}, place(self._name)]
        told: list[Any] = world.gather_objects(mine)
        if ready is None or any(offer != ready.guest for offer, *_ in told):
            reception.let_go()
            return False
        reception.take()
        try:
            why = next((why for _, why, *_ in told if why is not None), _GONE)
            reception.answer(ready.guest, admitted=not why, again=why is _GONE)
            if why:
                reception.drop(ready, why)
                tell_failed(world.rank, ready.guest, why)
            else:
                self._take_in(ready, own, [clocks for *_, clocks, _ in told], [place for *_, place in told], world)
        except BaseException as error:
            if strategy.connection is not ready.connection:
                release(ready.connection, in_words(error))
            raise
        return False

    def _take_in(self, ready: Ready, own: Packed | None, clocks: list[Any], places: list[Any], world: World) -> None:
        """All can, and go on with the newcomer."""
        strategy, course = self._strategy, self._strategy.course
        assert course is not None
        assert course.session is not None
        averager, places = course.session.averager, [*places, ready.place]
        steps = [each["step"] for each in clocks]
        clocks.append({**without_own(clocks[0]), "alike": None, "summary": RunSummary().state_dict()})
        # The clock of all does not jump as one more comes.
        gathered = {"replicas": clocks, "mean_steps": sum(steps) / len(steps)}
        handed = {"averaging": gathered, "places": places, "strategy": strategy.handed_over()}
        rest = packed(handed) if own is not None else None
        rank, run = world.rank, count_run(ready.run)
        guest, size = for_life(ready.guest), len(ready.names)
        words = f"Rank {rank}: rank {guest} has joined, and {size} replicas train from here."
        tell("joined", logging.WARNING, words, rank=rank, run=run, world_size=size)
        strategy.saved.go_on({**averager.state_dict(), **gathered}, averager.gathered())
        course.stop()  # from here on nobody is lost by its count
        survivors = strategy.survivors
        assert survivors is not None
        # By names, as one may be lost since it was made.
        strategy.survivors = survivors.with_newcomers(ready.rank, ready.names, run)
        course.widen(ready.connection, run)
        course.patches.go_on(ready.connection.world, ready.name, places)
        if own is not None and rest is not None:
            self._hands_over = threading.Thread(
                target=_hand_over, args=(ready, own, rest), name="lightning_async hand-over", daemon=True
            )
            self._hands_over.start()

    def _pack(self, ready: Ready, course: Course) -> tuple[Packed | None, str | None]:
        """On rank 0 what the newcomer needs of it, as it is now, and why that could not be; "" where it could."""
        if ready.pair is None:
            return None, None
        assert course.session is not None
        try:
            own = state_for_newcomers(self._strategy.module.trainer)
            averaging = course.session.averager.state_dict()
            return self._copying.packed({**own, **course.patches.for_newcomers(), "averaging": averaging}), ""
        except Exception as error:  # of hooks of the user's, too: who trains goes on
            ready.connection.membership.fail(in_words(error))  # nobody waits for it
            return None, f"{type(error).__name__}: {error}"

    @property
    def _name(self) -> str:
        """This rank's, for life."""
        survivors = self._strategy.survivors
        assert survivors is not None
        return survivors.names[survivors.generation.rank]


def _hand_over(ready: Ready, *states: Packed) -> None:
    """The newcomer is one of them, and waits for this; nobody else does."""
    assert ready.pair is not None
    try:
        world = World(ready.pair, ready.connection.membership.check)
        for state in states:
            world.hand_over(state)
    except Exception as error:  # it is lost, as any rank may be, or training has ended
        log.warning("Rank %s did not get what it needs to take part: %s", for_life(ready.guest), error)


def digest(module: Any) -> int:
    """Of the names, shapes and types of all that replicas share; what is trained of it may change in an epoch."""
    return zlib.crc32(repr([line.rpartition(", ")[0] for line in describe(module)]).encode())
