"""torch's default group: the collectives of user code and other libraries, over the live ranks.

`torch.distributed` keeps one `DefaultGroup` for the whole life of a process, so that an early ``dist.group.WORLD``
stays right. The group inside it is formed at its first collective, and anew after each change of ranks.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_async.comm.collectives import Where
from lightning_async.comm.torch_groups import TorchGroup
from lightning_async.comm.torch_rendezvous import MeetingOptions, form
from lightning_async.errors import CollectiveError
from lightning_async.membership.generation import Generation
from lightning_async.membership.signing import Seal

_NAME = "lightning_async"
_TIMEOUT = timedelta(minutes=30)  # torch's own
_LOOK = timedelta(seconds=0.05)
_SETTLES_S = 10.0
_MAX_CTAS = 32  # as NCCL itself would take
_BETWEEN_TWO = ("send", "recv", "recv_anysource")
_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
    *_BETWEEN_TWO,
)  # fmt: skip


class Numbering(NamedTuple):
    """The numbers of ranks after one change of ranks.

    Args:
        rank: Number of this rank.
        world_size: Number of live ranks.
        change: Run and generation of the change, equal on all ranks; None on a joining rank that is not admitted yet.
    """

    rank: int
    world_size: int
    change: tuple[int, int] | None


class DefaultGroupWatch:
    """A base of objects that a `DefaultGroup` calls at its collectives, on the calling thread; it does nothing."""

    def on_collective(self, name: str) -> None:
        """Note that a collective of this name begins."""

    def check(self, number: float) -> None:
        """Raise if the collective with this number, counted since the group was formed, cannot complete.

        The number is infinite while the group is being formed: no waiting rank takes part in that.
        """


class DefaultGroup(dist.ProcessGroup):
    """A process group of the live ranks, whose rank and size change with them.

    A change of ranks fails the collective under way. The new numbers count from the next `begin_step` on, so that user
    code sees one world size within a step, and all ranks begin with a step's first collective in the new group.

    Args:
        store: Function that returns the store in which ranks meet.
        numbering: Numbers of the ranks at the start.
        backend: ``"gloo"`` or ``"nccl"``.
        device: Device on which NCCL connects.
        host: Address at which Gloo listens, see `MeetingOptions`.
    """

    def __init__(
        self, store: Callable[[], Any], numbering: Numbering, backend: str, device: torch.device, host: str | None
    ) -> None:
        super().__init__(numbering.rank, numbering.world_size)  # pyright: ignore[reportCallIssue]
        self.watch = DefaultGroupWatch()
        self.failure = ""
        """Why a collective of the present step has failed; empty if none has."""
        self.stage: tuple[int, int] = (0, 0)
        """The run and the number of its sync points that have opened, equal on all ranks that form the group."""
        self._store = store
        self._backend = backend
        self._device = device
        self._host = host
        self._numbering = self._newest = numbering
        self._used = False  # a collective was called in this step, or a number was read that holds for all of it
        self._latches = False
        self._failed_forming = False  # the collective that has failed in this step had no group yet
        self._count = 0  # collectives that have completed since the group was formed
        self._operations = itertools.count()
        self._group: TorchGroup | None = None
        self._torchs: Any = None  # the group as torch's class, which has all operations

    def install(self) -> None:
        """Make this torch's default group."""
        if _NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(_NAME, lambda *_: _installed[0], devices=["cpu", "cuda"])
        _installed[:] = [self]
        dist.init_process_group(
            _NAME, store=dist.HashStore(), rank=self._numbering.rank, world_size=self._numbering.world_size
        )
        self._publish()

    def begin_step(self, latches: bool = False) -> None:
        """Note that no collective of the coming step was called yet; new numbers of ranks count from here on.

        Args:
            latches: Whether numbers that user code reads hold for the whole step, as after a collective. Default: no.
        """
        self._used = self._failed_forming = False
        self._latches = latches
        self.failure = ""

    def renumber(self, numbering: Numbering) -> None:
        """Note a change of ranks, and fail the collective under way. Any thread may call this."""
        self._newest = numbering
        if (group := self._group) is not None:
            group.break_off()

    def settle(self) -> None:
        """Wait a short time for collectives under way, because a change of ranks would fail them."""
        until = time.monotonic() + _SETTLES_S
        while (group := self._group) is not None and group.connected and time.monotonic() < until:
            if all(works[0].is_completed() for _, works in group.in_flight.values() if works):
                return
            time.sleep(_LOOK.total_seconds())

    @property
    def is_behind(self) -> bool:
        """Whether ranks have changed since the collectives of this step began."""
        return self._newest is not self._numbering

    @property
    def number(self) -> float:
        """The number of the last collective that was called, counted as in `DefaultGroupWatch.check`."""
        return math.inf if self._failed_forming else self._count + bool(self.failure)

    @property
    def count(self) -> int:
        """The number of collectives that have completed since the group was formed; 0 once it must be formed anew."""
        return self._count if self._is_whole() else 0

    def rank(self) -> int:
        self._adopt()
        self._used |= self._latches
        return self._numbering.rank

    def size(self) -> int:
        self._adopt()
        self._used |= self._latches
        return self._numbering.world_size

    @property
    def _device_types(self) -> list[torch.device]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [torch.device("cuda" if self._backend == "nccl" else "cpu")]

    @property
    def group_name(self) -> str:  # pyright: ignore
        return distributed_c10d._world.pg_names[self]

    def _get_backend(self, device: torch.device) -> Any:
        return self._form()._get_backend(device)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.dispose()
        self._group = self._torchs = None

    def _is_whole(self) -> bool:
        return not (self.failure or self.is_behind) and self._group is not None and self._group.connected

    def _adopt(self) -> None:
        """Use the newest numbers, and let a broken group be formed anew, unless this step's collectives have begun."""
        if self._used or self._is_whole():
            return
        if self._group is not None:
            self._group.break_off()
            self.shutdown()
        self._count = 0
        if self.is_behind:
            self._numbering = self._newest
            self._publish()

    def _publish(self) -> None:
        """Tell torch's tables of the present ranks, of a store for users' groups, and of the names that are free."""
        world = distributed_c10d._world
        if dist.group.WORLD is not self:
            return
        backend = dist.Backend(self._backend)
        store = None
        if (change := self._numbering.change) is not None:
            world.group_count = (change[0] << 40) + (change[1] << 20) + 1
            store = distributed_c10d.PrefixStore(f"{_NAME}/groups/{change}", self._store())
        world.pg_map[self] = backend, store  # pyright: ignore[reportArgumentType]
        world.pg_backend_config[self] = str(distributed_c10d.BackendConfig(backend))  # pyright: ignore[reportArgumentType]
        world.pg_group_ranks[self] = {rank: rank for rank in range(self._numbering.world_size)}
        distributed_c10d._update_default_pg(self)

    def _form(self) -> Any:
        self._adopt()
        rank, world_size, change = self._numbering
        if self.failure:
            raise CollectiveError(self.failure)
        if change is None:
            raise CollectiveError(
                f"Rank {rank}: a collective of torch.distributed was called before the ranks that train have admitted "
                "this rank. Call it in `on_train_start` or later."
            )
        if self._group is None:
            # Ranks may have given up unequal numbers of attempts before the last sync point.
            store = distributed_c10d.PrefixStore(f"{_NAME}/default/{change}/{self.stage}", self._store())
            members = Generation.first(rank, world_size)
            options = MeetingOptions(Seal.of_job().within(str(change)), self._check, self._host)
            self._group = form(
                store, Where("torch's default group", members), self._backend, _TIMEOUT, self._device, _MAX_CTAS,
                lambda: False, options,
            )  # fmt: skip
            self._group.pg._set_sequence_number_for_group()
            if self._group.waits:  # Gloo's limit of an operation has been that of connecting until here
                self._group.pg._set_default_timeout(_TIMEOUT)
            self._torchs = dist.ProcessGroup(store, rank, world_size)
            kind = dist.Backend.backend_type_map[self._backend]
            self._torchs._set_default_backend(kind)
            for device in distributed_c10d.BackendConfig(dist.Backend(self._backend)).get_device_backend_map():  # pyright: ignore[reportArgumentType]
                self._torchs._register_backend(torch.device(device), kind, self._group.pg)
        return self._torchs

    def _check(self) -> None:
        if self.is_behind:
            raise CollectiveError("ranks were lost, or have joined.")
        self.watch.check(math.inf if self._group is None else self._count + 1)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "barrier" and self._numbering.change is None and not self.is_behind:
            return None  # of ranks that train already: a joining rank is not among them yet
        self._adopt()
        self._used = True
        self.watch.on_collective(name)
        try:
            work = getattr(self._form(), name)(*args, **kwargs)
            assert self._group is not None
            in_flight = self._group.in_flight
            for number in [number for number, (_, works) in in_flight.items() if works and works[0].is_completed()]:
                del in_flight[number]
            if work is not None:
                in_flight[next(self._operations)] = args, (work,)
            # Gloo's collectives are waited for here, also asynchronous ones, so that a wait in vain ends.
            while work is not None and self._group.waits and name not in _BETWEEN_TWO and not work.is_completed():
                try:
                    work.wait(_LOOK)
                except RuntimeError:
                    if work.is_completed():
                        raise
                self._check()
        except RuntimeError as error:
            if not self.failure:
                self._fail(name, error)
            raise CollectiveError(self.failure) from error
        self._count += name not in _BETWEEN_TWO
        return work

    def _fail(self, name: str, error: RuntimeError) -> None:
        rank, world_size, _ = self._numbering
        said = str(error).splitlines()[0]
        self.failure = f"Rank {rank} of {world_size}: torch's default group: {name} failed: {said}"
        self._failed_forming = self._group is None
        if self._group is not None:
            self._group.break_off()  # peers would wait for this rank


for _name in _COLLECTIVES:
    setattr(DefaultGroup, _name, lambda self, *args, name=_name, **kwargs: self._call(name, *args, **kwargs))
_installed: list[DefaultGroup] = []


def default_group() -> DefaultGroup | None:
    """Return torch's default group if it is of this package."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return group if isinstance(group, DefaultGroup) else None
