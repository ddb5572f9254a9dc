"""The settings of checkpoints, the clock that says when a save is due, and the gather by which ranks agree on it."""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_async.algorithms import Best, KeepPolicy, SavePolicy, SaveProgress
from lightning_async.checkpoint.saver import Costs
from lightning_async.comm.collectives import Collectives, Pending
from lightning_async.comm.torch_collectives import TorchCollectives
from lightning_async.comm.torch_rendezvous import MeetingOptions
from lightning_async.errors import CollectiveError
from lightning_async.membership.startup import is_loopback
from lightning_async.trainer.strategy_view import view_of


@dataclass(frozen=True)
class Settings:
    """The user's settings of checkpoints, equal on all ranks except the directory; see `FaultTolerantCheckpoint`."""

    dirpath: str
    save: SavePolicy
    keep: KeepPolicy
    recover: str | None
    busy: str
    buffers: int
    max_failures: int
    good_after: int
    best: Best | None
    on_exception: bool
    objects: str
    trainable_only: bool

    def compared(self) -> str:
        """Return the settings that must be equal on all ranks, as text.

        The directory is left out, because hosts may have different ones.
        """
        words = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "dirpath")
        # Objects with the default representation count as equal if they are of one class.
        return re.sub(r" at 0x[0-9a-f]+", "", words)


class SaveClock:
    """A record of one rank's last save, from which it follows whether the next save is due.

    Args:
        policy: Policy that says when a save is due.
        costs: Measured costs of the saves so far.
        step: Step number at which the clock starts, as if a save had been made there.
    """

    def __init__(self, policy: SavePolicy, costs: Costs, step: int) -> None:
        self._policy = policy
        self._costs = costs
        self.saved_step = step
        self._saved_at = time.monotonic()
        self._put_off = False

    def due_by_steps(self, step: int, epoch_end: bool) -> bool:
        """Return whether a save is due because of the number of steps alone, whatever the time since the last save.

        Ranks that take every step together get the same answer, without communication.
        """
        return self._put_off or self._policy.due(SaveProgress(step, self.saved_step, 0.0, math.inf, epoch_end))

    def due(self, step: int, epoch_end: bool) -> bool:
        since = time.monotonic() - self._saved_at
        progress = SaveProgress(step, self.saved_step, since, self._costs.of_one, epoch_end)
        return self._put_off or self._policy.due(progress)

    def asks(self, settings: Settings, busy: bool, step: int, ahead: int, epoch_end: bool) -> bool:
        """Return whether to begin a save that is due in ``ahead`` steps.

        If an earlier save is still being written (``busy``), the user's setting ``settings.busy`` decides: begin and
        wait for the earlier save, put the new save off, or skip it.
        """
        if not self.due(step + ahead, epoch_end):
            return False
        if not busy or settings.busy == "wait":
            return True
        if settings.busy == "skip":
            self.saved(step)
        else:
            self.put_off()
        return False

    def put_off(self) -> None:
        """Record that a due save cannot begin yet.

        The save stays due until `saved` is called, even if it was due only at an epoch's end.
        """
        self._put_off = True

    def saved(self, step: int) -> None:
        self.saved_step = step
        self._saved_at = time.monotonic()
        self._put_off = False


_DEADLINE = timedelta(minutes=30)
_GOODBYE = timedelta(seconds=2)
_made = itertools.count(1)


class DelayedGather:
    """An all-gather of one row of numbers from each rank at every step, whose result is read one step later.

    Reading usually does not wait, because the gather has begun one step earlier.

    Args:
        collectives: Communicator that only this object uses.
        owned: Whether `close` closes the communicator, too. Default: False.
    """

    def __init__(self, collectives: Collectives, owned: bool = False) -> None:
        self._collectives = collectives
        self._owned = owned
        self._pending: Pending[Tensor] | None = None

    def receive(self) -> list[list[float]]:
        """Return the rows that all ranks sent one step ago, by rank; empty if none was sent since the last call."""
        pending = self._pending
        self._pending = None
        # This returns at once: the exchange began a step ago.
        return [] if pending is None else pending.result().tolist()

    def send(self, row: Sequence[float]) -> None:
        assert self._pending is None
        self._pending = self._collectives.all_gather(torch.tensor(row, dtype=torch.float64))

    def ask(self, row: Sequence[float], patience: timedelta) -> list[list[float]]:
        """Gather ``row`` from every rank now; empty if not all ranks call this, or `send`, within ``patience``.

        After this call, the object must not gather again: only `close` may follow.
        """
        until = time.monotonic() + patience.total_seconds()
        try:
            if self._pending is not None:
                self._pending.result(patience)
            last = self._collectives.all_gather(torch.tensor(row, dtype=torch.float64))
            return last.result(timedelta(seconds=max(0.0, until - time.monotonic()))).tolist()
        except CollectiveError:
            # Not all ranks are here, so no rank may rely on the others.
            return []
        finally:
            self._pending = None

    def close(self) -> None:
        if self._pending is not None:
            # Let the last exchange end, because another rank may still need this rank's part of it.
            self._pending.wait(_GOODBYE)
            self._pending = None
        if self._owned:
            self._collectives.close()


def lagged_of(owner: str, trainer: Any) -> DelayedGather | None:
    """Create a `DelayedGather` over the Trainer's ranks; return None for a single rank. All ranks call this together.

    Raises:
        ValueError: The Trainer's strategy is neither of this package nor over torch.distributed. The message names the
            ``owner``.
    """
    strategy = trainer.strategy
    world = view_of(strategy).world
    if trainer.world_size == 1:
        return None
    name = f"lagged{next(_made)}"
    if world is not None:
        return DelayedGather(world.fork(name, _DEADLINE))
    if not dist.is_initialized():
        raise ValueError(
            f"`{owner}` cannot reach the other ranks of {type(strategy).__name__}: use a strategy of this package, or "
            "one over torch.distributed (DDPStrategy, FSDPStrategy)."
        )
    store = distributed_c10d.PrefixStore(f"lightning_async/{name}", distributed_c10d._get_default_store())
    # Ranks of one host listen on loopback, which no firewall closes.
    host = "127.0.0.1" if is_loopback(os.environ.get("MASTER_ADDR", "")) else None
    collectives = TorchCollectives(
        store, trainer.global_rank, trainer.world_size, name=name, timeout=_DEADLINE, form_timeout=_DEADLINE,
        meeting_options=MeetingOptions(host=host),
    )  # fmt: skip
    collectives.open()
    return DelayedGather(collectives, owned=True)
