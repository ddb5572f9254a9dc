"""What a process has of Horovod, which is imported only when it is asked for.

Nothing in Horovod can be cancelled, and its blocking calls know no deadline. So every operation here is asynchronous,
named, and polled; a failed or late one *poisons* the world: nothing more is submitted, the buffers of what is under way
stay alive until Horovod has shut down, and every later operation raises at once.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

import torch

from lightning_async.comm.operation import Operation
from lightning_async.errors import CollectiveError, CollectiveTimeout, PeerLost

__all__ = ["Flight", "HorovodOperation", "HorovodWorld", "Start", "load"]

T = TypeVar("T")
Start = Callable[[str], int]
_current: HorovodWorld | None = None


def load() -> ModuleType:
    """``horovod.torch``.

    Raises:
        ModuleNotFoundError: it is not installed; says how to get it.
    """
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Horovod for this torch ({torch.__version__}) is not installed ({error}). Build it with "
            "`lightning-async build-horovod`, or train without it: `AsyncAveragingStrategy(transport='torch')`."
        ) from error


class HorovodWorld:
    """What this process has of Horovod, from one ``hvd.init()`` to the next.

    Args:
        hvd: the module.
        process_sets: Horovod's, by their ranks in ascending order.
    """

    def __init__(self, hvd: ModuleType, process_sets: Mapping[tuple[int, ...], Any]) -> None:
        self.hvd: Any = hvd
        self.rank, self.size, self.local_rank = int(hvd.rank()), int(hvd.size()), int(hvd.local_rank())
        self.one_host = int(hvd.local_size()) == self.size
        self.another_follows = False
        """What fails here goes on in another world: this process, and what it holds, stays until that is formed."""
        self.failure: CollectiveError | None = None
        self.num_runs = 0
        """Runs of strategies so far, which names their operations apart; equal on all ranks."""
        self.store: Any = None
        """Of all ranks, for what is no collective; made by whoever needs it first."""
        self.life = hvd.mpi_ops._handle_map  # a new one comes with every init
        self._process_sets = dict(process_sets)
        self.flights: set[Flight] = set()
        internal_error = importlib.import_module("horovod.common.exceptions").HorovodInternalError

        class HorovodFailed(CollectiveError, internal_error):
            """For Horovod Elastic, too: it goes on after a `HorovodInternalError`, and after no other."""

        class HorovodTimeout(CollectiveTimeout, internal_error):
            """See `HorovodFailed`."""

        class HorovodPeerLost(PeerLost, internal_error):
            """See `HorovodFailed`."""

        self.failed_type, self.timeout_type, self.lost_type = HorovodFailed, HorovodTimeout, HorovodPeerLost

    @classmethod
    def join(
        cls,
        size: int | None = None,
        gloo_timeout: timedelta | None = None,
        process_sets: Sequence[Collection[int]] = (),
    ) -> HorovodWorld:
        """Initialise Horovod where that is not done.

        Args:
            size: what the launcher started; compared with Horovod's own number.
            gloo_timeout: after which Gloo inside Horovod gives up on a silent peer, unless
                ``HOROVOD_GLOO_TIMEOUT_SECONDS`` says so. Read by Horovod at its start only.
            process_sets: the ranks of every `HorovodCollectives.split` to come, and every two that will
                `HorovodCollectives.exchange` in worlds of more than two. Read by Horovod at its start only.

        Raises:
            ModuleNotFoundError: Horovod is not installed.
            RuntimeError: Horovod sees another number of ranks.
        """
        global _current
        hvd: Any = load()
        if not hvd.is_initialized():
            if gloo_timeout is not None:
                os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(gloo_timeout.total_seconds())))
            # Waiting for a header is no stall here, and what is one is found by deadlines of our own.
            os.environ.setdefault("HOROVOD_STALL_CHECK_DISABLE", "1")
            # What is worth fusing is fused before it comes here: Horovod's own buffer would cost two copies more.
            os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
            sets = {tuple(sorted(ranks)): hvd.ProcessSet(sorted(ranks)) for ranks in process_sets}
            hvd.init(process_sets=list(sets.values()))
            _current = cls(hvd, sets)
        elif _current is None or _current.life is not hvd.mpi_ops._handle_map:
            _current = cls(hvd, {})  # the user has initialised it
        if size is not None and _current.size != size:
            raise RuntimeError(
                f"Horovod sees {_current.size} rank(s), but the launcher started {size}: each would train alone. This "
                "Horovod was built without MPI? `lightning-async build-horovod --mpi`, or use horovodrun."
            )
        return _current

    @staticmethod
    def current(size: int | None = None) -> HorovodWorld | None:
        """The world, where Horovod is initialised; ``size`` is what `join` compares."""
        hvd: Any = sys.modules.get("horovod.torch")
        return HorovodWorld.join(size) if hvd is not None and hvd.is_initialized() else None

    @staticmethod
    def leave() -> None:
        """Shut Horovod down; with a rank that stands still this blocks until Gloo's timeout."""
        load().shutdown()

    def process_set(self, ranks: Sequence[int]) -> Any:
        """The process set of these ranks, in ascending order; None where there is none."""
        if len(ranks) == self.size:
            return self.hvd.global_process_set
        return self._process_sets.get(tuple(ranks))

    def add_process_set(self, ranks: Sequence[int]) -> Any:
        """The same, made now where Horovod was started with ``HOROVOD_DYNAMIC_PROCESS_SETS=1``; all ranks call it."""
        found = self.process_set(ranks)
        if found is None and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1":
            found = self._process_sets[tuple(ranks)] = self.hvd.add_process_set(list(ranks))
        return found

    def poison(self, error: Exception) -> CollectiveError:
        """Fail what is under way, and all that is to come."""
        if self.failure is None:
            late = isinstance(error, CollectiveTimeout)
            self.failure = (self.timeout_type if late else self.failed_type)(str(error))
            for flight in list(self.flights):
                flight.operation.fail(self.failure)
        return self.failure


class HorovodOperation(Operation[T]):
    """An operation that belongs to a world of Horovod."""

    remedy = (
        "Horovod cannot cancel: this process takes part in no collective any more. Start again from the last "
        "checkpoint, or run under Horovod Elastic."
    )


class Flight:
    """The pieces of one operation, submitted one after the other: a small one of another fork is not kept waiting."""

    def __init__(self, world: HorovodWorld, name: str, starts: Sequence[Start], operation: HorovodOperation) -> None:
        self.operation = operation
        self._world, self._name, self._starts = world, name, starts
        self._outputs: list[Any] = []
        self._handle: int | None = None
        self._lock = threading.Lock()

    def advance(self, finish: Callable[[list[Any]], object]) -> None:
        """Submit the next piece, or end the operation; never blocks."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            hvd = self._world.hvd
            while not self.operation.ended():
                if self._handle is None and len(self._outputs) == len(self._starts):
                    self.operation.complete(finish(self._outputs))
                elif self._handle is None:
                    # In Lightning's validation, new tensors would be such that Horovod's thread must not resize.
                    with torch.inference_mode(False):
                        self._handle = self._starts[len(self._outputs)](f"{self._name}.{len(self._outputs)}")
                elif not hvd.poll(self._handle):
                    return
                else:
                    self._outputs.append(hvd.synchronize(self._handle))  # does not block: it has ended
                    self._handle = None
            if self._handle is None:  # else Horovod may still write: the world keeps this, and so the buffers
                self._world.flights.discard(self)
        except Exception as error:
            self._world.poison(CollectiveError(f"{self.operation}: {error} {self.operation.remedy}"))
        finally:
            self._lock.release()
