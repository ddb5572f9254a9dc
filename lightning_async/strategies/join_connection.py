"""A second connection, of the ranks that train and of a joining rank, made on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_async.comm.collectives import Collectives
from lightning_async.engine.control_plane import forks_of
from lightning_async.strategies.rank_mapping import name_in_run
from lightning_async.trainer.environment.environments import RenumberedEnvironment
from lightning_async.trainer.namespace import in_words
from lightning_async.transports.base import Connection
from lightning_async.transports.torch import TorchTransport

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy

PATIENCE = timedelta(seconds=30)
"""How long those who connect wait for each other at most."""


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


def connect(
    strategy: AsyncStrategy, rank: int, joining_rank: str, place: dict[str, Any], check: Callable[[], None],
    made: Callable[[Connection], None] = lambda connection: None, own: list[Any] | None = None,
) -> PreparedJoin:  # fmt: skip
    """Connect all that an invitation names, the joining rank included.

    Args:
        strategy: of this rank.
        rank: its number among them.
        joining_rank: who is invited.
        place: the invitation.
        check: raises where somebody does not come.
        made: called with the connection before its groups are formed: closing it ends that.
        own: of the joining rank: where it is.

    Raises:
        AsyncTrainingError: it came to nothing, and nothing is left open.
    """
    names = tuple(place["names"])
    config = strategy.config
    transport = strategy.transport
    device = strategy.root_device
    assert isinstance(transport, TorchTransport)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    environment = RenumberedEnvironment(strategy.cluster_environment, rank, len(names), "")
    connection = transport.widen(environment, device, place["room"], config.timeouts.dead_after, PATIENCE, check)
    try:
        made(connection)
        connection.hear_deaths(partial(name_in_run, names=names))
        connection.forks = forks_of(connection.root, connection.payload, config.timeouts)
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
