"""Which ranks train, and which serve: the last ones."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from lightning_async.arguments import check_choice
from lightning_async.comm.keeper import facing
from lightning_async.strategies.dedicated import serve
from lightning_async.trainer.leaving import leave
from lightning_async.transports.choose import TransportName
from lightning_async.transports.transport import ElasticTransport, Transport

__all__ = ["Placement", "ServerRoles"]

Placement = Literal["colocated", "dedicated"]


class ServerRoles:
    """Some ranks may serve. See `Roles`.

    Args:
        owner: the strategy's name, for messages.
        placement: ``"colocated"``: all ranks train. ``"dedicated"``: the last ranks serve.
        num_servers: None: one.
        server_address: servers are elsewhere.

    Raises:
        ValueError: an unknown placement.
    """

    def __init__(
        self,
        owner: str,
        placement: Placement,
        num_servers: int | None,
        server_address: str | None,
    ) -> None:
        check_choice(owner, "placement", placement, get_args(Placement))
        self._owner, self.placement, self._num_servers = owner, placement, num_servers
        self._elsewhere = server_address is not None
        if self._elsewhere and placement == "dedicated":
            raise ValueError(
                f'`{owner}(placement="dedicated", server_address={server_address!r})`: servers that were started on '
                "their own are no ranks. Leave one of them out."
            )
        self.expects_more = False
        """Workers that begin do so without others, which are to be taken in."""

    @property
    def dedicated(self) -> bool:
        """Whether servers are ranks."""
        return self.placement == "dedicated"

    @property
    def num_servers(self) -> int:
        """Of those that do not train."""
        return self._num_servers or 1

    @property
    def num_serving(self) -> int:
        """How many ranks do."""
        return self.num_servers if self.dedicated else 0

    def of(self, environment: Any) -> tuple[str, int]:
        """ "worker" or "server", and which of these this process is."""
        rank = getattr(environment, "started_as", None)
        rank = environment.global_rank() if rank is None else rank
        started = environment.world_size()
        first = started - self.num_serving
        return ("server", rank - first) if first <= rank < started else ("worker", rank)  # new ones train

    def reached_at(self, environment: Any, num_nodes: int) -> str | None:
        """This server's address, by which other hosts reach it; none where all are on one host."""
        return facing(environment.main_address, environment.main_port) if num_nodes > 1 else None

    def transport(self, transport: Transport | TransportName) -> Transport | TransportName:
        """The one by which workers meet: where some ranks serve, these are no part of a group of all."""
        return "torch" if transport == "auto" and self.dedicated else transport

    def is_alone(self, world_size: int) -> bool:
        return world_size == 1 and not (self.expects_more or self.dedicated or self._elsewhere)

    def take_part(self, strategy: Any) -> None:
        role, number = self.of(strategy.cluster_environment)
        if role != "worker":
            serve(strategy, number)
            leave(strategy.module.trainer)

    # ---- checks ----

    def check_transport(self, transport: Transport) -> None:
        """Raise ValueError where its groups are of all ranks."""
        if not self.dedicated:
            return
        mpi = isinstance(transport, ElasticTransport) and transport.backend_on(torch.device("cpu")) == "mpi"
        if mpi or not isinstance(transport, ElasticTransport):
            raise ValueError(
                f"`{self._owner}(transport={transport!r})`: its groups are of all ranks, and some of them serve. Use "
                '`transport="torch"`, under any launcher, or `placement="colocated"`.'
            )

    def check_ranks(self, started: int) -> None:
        """Raise ValueError where there are more servers than ranks, or no rank is left to train."""
        if not self.dedicated and (self._num_servers or 0) > started:
            raise ValueError(
                f"`{self._owner}(num_servers={self._num_servers})`: there are {started} ranks, and each has one server "
                "beside it at most."
            )
        if self.num_serving >= started:
            raise ValueError(
                f'`{self._owner}(placement="dedicated", num_servers={self.num_servers})`: there are {started} ranks, '
                f"and one at least must train. Start more, or let servers be processes beside the workers: "
                '`placement="colocated"`.'
            )
