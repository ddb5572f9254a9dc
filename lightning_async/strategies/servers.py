"""The servers of one training: who starts which, how workers reach them, and how they end."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning_async.comm.channel import CheckedDial, Dial, nobody_listens
from lightning_async.comm.reach import dial, look_up_all
from lightning_async.engine.server.line import forget, tell_over
from lightning_async.engine.server.plan import Plan
from lightning_async.engine.server.process import ServerProcess
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.replacing import Guard, Start
from lightning_async.engine.world import World
from lightning_async.errors import AsyncTrainingError, PeerLost

__all__ = ["Servers", "hosts"]

log = logging.getLogger(__name__)
_LESS = {"max_staleness": " (less the pushes between two pulls)"}
_DRAIN_S, _TELL_S, _GONE_S, _PAUSE_S = 30.0, 180.0, 10.0, 0.2
_BACK_S = 60.0  # whoever has started it sees to it, and reads a folder before anything listens there again


def hosts(num_servers: int, world_size: int) -> list[int]:
    """The rank that starts each server: they are spread evenly.

    >>> hosts(2, 4), hosts(3, 3)
    ([0, 2], [0, 1, 2])
    """
    return [server * world_size // num_servers for server in range(num_servers)]


class Servers:
    """Where they are, and those that this rank has started.

    Args:
        addresses: of all servers, see `reach.dial`; each has all tables.
        own: of this rank, by their numbers. Default: none.
        check: raises where a server, by its number, that cannot be reached will not come back. Default: it may.
        of_this_run: ranks have started them beside themselves, for this training alone. Default: they are others'.
        come_back: in the place of one that is lost another one is started, with a snapshot. Default: in nobody's.
    """

    def __init__(
        self,
        addresses: Sequence[Mapping[str, Any]],
        own: Mapping[int, ServerProcess] | None = None,
        check: Callable[[int], None] | None = None,
        of_this_run: bool = False,
        come_back: bool = False,
    ) -> None:
        self.addresses, self._check = [dict(address) for address in addresses], check
        self._own = dict(own or {})
        self._guard: Guard | None = None
        self._of_this_run, self._come_back = of_this_run, come_back
        self.job = ""
        """What tells this training's workers from those of others that have the same servers."""
        self._closed = False
        self._refused: dict[int, tuple[float, float]] = {}
        """By server: when nobody listened there, first and last."""

    @property
    def own(self) -> list[ServerProcess]:
        """Of this rank."""
        return list(self._own.values())

    @classmethod
    def start(cls, world: World, num_servers: int, how: Start) -> Servers:
        """All ranks call this together.

        Args:
            world: of all ranks.
            num_servers: at least 1.
            how: they are started.

        Raises:
            AsyncTrainingError: the system does not let one start, or a folder of snapshots cannot be written to.
        """
        mine = [server for server, rank in enumerate(hosts(num_servers, world.world_size)) if rank == world.rank]
        own: dict[int, ServerProcess] = {}
        try:
            for server in mine:
                own[server] = how.begin(server)
            told = world.gather_objects([process.address for process in own.values()])
        except BaseException:
            for process in own.values():
                process.close()
            raise
        keeps = how.shelving.folder is not None
        found = cls([at for addresses in told for at in addresses], own, of_this_run=True, come_back=keeps)
        if own and keeps:
            found._guard = Guard(how, found._own)
        return found

    @classmethod
    def at(cls, places: str, terms: Terms) -> Servers:
        """Those that were started on their own.

        Raises:
            ValueError: they treat workers in another way.
            PeerLost: one does not answer.
        """
        addresses, wanted = look_up_all(places), terms.plain()
        names = ["mode", "staleness", "warmup_steps", *(["max_staleness"] if terms.mode == "ssp" else [])]
        for number, address in enumerate(addresses):
            waits_for = address["terms"]["num_workers"]
            if terms.in_step(0) and waits_for > terms.num_workers:
                raise ValueError(
                    f"`server_address={places!r}`: server {number} there waits for {waits_for} workers before its "
                    f"first version, and {terms.num_workers} begin. Start it with `--num-workers "
                    f"{terms.num_workers}`, or start more workers."
                )
            for name in names:
                if (theirs := address["terms"][name]) != wanted[name]:
                    raise ValueError(
                        f"`server_address={places!r}`: server {number} there has {name}={theirs!r}, and this training "
                        f"has {wanted[name]!r}{_LESS.get(name, '')}. Start it with `--{name.replace('_', '-')}`, or "
                        "change the training's."
                    )
        found = cls(addresses)
        if terms.num_workers == 1 and terms.mode == "async":  # each is worker 0, and there may be many
            found.job = f"-{secrets.token_hex(4)}"
        return found

    def name_of(self, worker: str) -> str:
        """What servers call a worker of this training."""
        return f"{worker}{self.job}"

    def dials(self, plan: Plan) -> list[Dial]:
        """Memory for talking to them of one table, for the shards of its plan."""
        sizes = zip(self.addresses, plan.sizes, strict=True)
        dials = [dial(address, 4 * size, 4 * size) for address, size in sizes]
        return [CheckedDial(each, partial(self._check_there, server)) for server, each in enumerate(dials)]

    def _check_there(self, server: int, error: PeerLost) -> None:
        if self._check is not None:
            self._check(server)
        # Else somebody has started it elsewhere, and may again. These are listened for as long as they have weights. A
        # worker that was stopped hears first that the others have ended without it.
        if self._of_this_run and nobody_listens(error) and self._refused_for(server):
            raise AsyncTrainingError(
                f"server {server} is gone for good, with its weights: {error} The process that supervised it was "
                "killed (by hand, or by the system for want of memory), or its host was. Start again from the last "
                "checkpoint."
            ) from error

    def _refused_for(self, server: int) -> bool:
        """Whether nobody has listened there for a while, in which another one would have come."""
        now = time.monotonic()
        first, last = self._refused.get(server, (now, now))
        self._refused[server] = (first if now - last < _GONE_S else now), now
        return now - self._refused[server][0] >= (_BACK_S if self._come_back else _GONE_S)

    def forget(self, names: Sequence[str]) -> None:
        """These workers are lost: tell the servers, beside whatever this thread does, and those that are started again
        meanwhile, too: what one has kept says that it is to wait for them."""
        for server in range(len(self.addresses)):
            told = server, [self.name_of(name) for name in names]
            threading.Thread(target=self._forget, args=told, name="lightning_async forgets", daemon=True).start()

    def _forget(self, server: int, names: list[str]) -> None:
        until = time.monotonic() + _TELL_S
        while True:
            called: Any = None
            try:
                called = dial(self.addresses[server], 0, 0)
                forget(called, names)
                return
            except (PeerLost, OSError) as error:
                if self._closed or time.monotonic() > until:
                    log.warning("A server was not told that workers %s are lost: %s", names, error)
                    return
            finally:
                if called is not None:
                    called.close()
            time.sleep(_PAUSE_S)

    def close(self, in_order: bool, tells: bool = False) -> None:
        """End this rank's, once nobody needs them any more; where this rank has failed, others go on with them.

        Args:
            in_order: all have come to the end.
            tells: this rank tells all servers so, of which those need to hear it whose starter has died.
        """
        self._closed = True
        if self._guard is not None:
            self._guard.close()
        own = [process.address for process in self.own]
        others = [address for address in self.addresses if address not in own]
        for address in others if in_order and tells and self._of_this_run else ():
            tell_over(dial(address, 0, 0))
        while self._own:
            _, process = self._own.popitem()
            if in_order:
                process.close(_DRAIN_S)
            else:
                process.leave()
