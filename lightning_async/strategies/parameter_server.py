"""The strategy: `Trainer(strategy=ParameterServerStrategy(...))`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from lightning_async.algorithms import DeltaMean, Synchronous
from lightning_async.algorithms.compression import Bf16, Fp8, Int8, PushCompressionName, TopK, TwoBit, make_compression
from lightning_async.algorithms.staleness import StalenessPolicy
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.replica import BufferPolicy
from lightning_async.engine.timeouts import Timeouts
from lightning_async.parameter_server.metrics import PushTotals, WorkerSteps
from lightning_async.parameter_server.tables import ParameterGroup, described
from lightning_async.strategies import server_options
from lightning_async.strategies.async_strategy import AsyncStrategy
from lightning_async.strategies.rank_mapping import numbered_last
from lightning_async.strategies.server_lifecycle import (
    Servers,
    StartQuorum,
    WaitForWorkers,
    find_again,
    join_or_start,
    register_worker,
)
from lightning_async.strategies.server_options import Mode, resolve_staleness
from lightning_async.strategies.server_placement import Placement, ServerRoles, check_momentum, end, join
from lightning_async.strategies.server_steps import PushSteps, States
from lightning_async.trainer import configuration_checks
from lightning_async.trainer.checkpoint.checkpoint_state import ALIKE, REPLICAS
from lightning_async.trainer.environment.settings import check_equal
from lightning_async.trainer.namespace import name as namespace
from lightning_async.trainer.namespace import pytorch
from lightning_async.transports.base import Transport
from lightning_async.transports.resolve import TransportName


class ParameterServerStrategy(AsyncStrategy):
    r"""Workers push gradients to servers that hold the weights and the optimizer, and pull weights.

    Each rank is a worker; servers are processes beside them, or the last ranks, which share out the elements of all
    parameters. With a push of worker :math:`i` that was computed at version :math:`b`, in asynchronous mode

    .. math:: x_{v+1} = x_v - \eta\, u(g_i(x_b)), \qquad \text{lag } \tau = v - b

    with the optimizer's :math:`u`, and what ``staleness`` does about the lag. In synchronous mode a version is made of
    one push of each worker, of :math:`n_i` samples:

    .. math:: x_{v+1} = x_v - \eta\, u\Big(\frac{\sum_i n_i\, g_i(x_v)}{\sum_i n_i}\Big)

    which is training in one process on the joined batch. Wherever all ranks wait for one another (validation, the end
    of an epoch, checkpoints) all have the same version. Optimizers are those of ``configure_optimizers``: servers make
    the same by name, learning rates go with every push, and checkpoints hold their state as torch has it. Gradients are
    clipped before they leave. A parameter without a gradient counts as one whose gradient is zero.

    A worker that dies is not waited for; a server that dies is started again with all that it had, and every push that
    was acknowledged is in the weights once.

    Args:
        mode: ``"async"`` (default): each push is applied as it comes. ``"sync"``: see above. ``"ssp"``: as they come,
            and weights lack at most ``max_staleness`` of the slowest one's pushes, of as many as their worker has made
            since a sync point. MXNet's names ("dist_async", "dist_sync", "dist_sync_device" and others) are taken, too.
        num_servers: that share out each group of parameters. None (default): one on each host; one, where
            they are ranks.
        placement: ``"colocated"`` (default): servers are processes beside the workers. ``"dedicated"``: the last
            ``num_servers`` ranks serve: they build no data, never train, and end with 0 in their first run, once all
            workers have ended.
        wait_for_workers: training begins with ``"all"`` (default); with a number, as soon as so many have come, the
            first rank among them; with (a number, a timedelta), once others have had so long to come. Later ones join.
        server_address: ``"HOST:PORT,HOST:PORT"`` of servers that ``lightning-async serve`` has started. They keep
            their weights from training to training: who comes first brings them. Default: servers are started here.
        snapshots, snapshot_every: folder in which servers that are started here keep what they have, every so many
            seconds (60): where one is lost with its memory, another begins with the newest. Default: none are taken.
        update_on_server: True (default): see above. False: the optimizer, of whatever class, is the
            worker's; changes of the weights are pushed, which servers add; in sync mode their mean, weighted equally.
        lr_clock: schedulers that step per batch follow the servers' version, by the number of workers, (``"global"``)
            or a worker's steps (``"local"``). None (default): the first, but in sync mode, or with its own optimizer.
        staleness: what is done about lag: ``"auto"`` (default): `Dana` with `GapAware` for SGD with momentum,
            `GapAware` rates for others; ``"none"``, another short name, or a policy of `algorithms.staleness`.
        max_staleness: pushes, for ``mode="ssp"`` (default 3); updates, for ``staleness="bounded"`` (default 16).
        staleness_lr_factor, buffer_size: for ``"adaptive_lr"`` (default 0.9); for ``"fedbuff"`` and ``"rennala"`` (10).
        warmup_steps: so many steps at first are as in ``"sync"``, in the other modes. Momentum that each worker has of
            its own (`Dana`) begins after them. Default 0.
        update_frequency: local steps of the worker's own optimizer between pushes. Default 1.
        pull_every: pushes between pulls. Default 1.
        compression: of pushes: ``"bf16"``, ``"fp8"``, ``"int8"``, ``"2bit"``, ``"topk"``, or a value of `algorithms`
            with arguments of its own. What a push lacks is in the next one. Default ``"none"``.
        consistent_pull: what is pulled is of one version of all servers of a group of parameters: no push is in the
            weights of one server and absent from another's. Pushes of all workers wait during such a pull. In
            synchronous mode it always is. Default False.
        overlap: the next batch is computed while a push is under way, at weights without it. Default False.
        bigarray_bound: elements from which on a parameter is split evenly over servers. Default 1,000,000.
        buffers: floating-point buffers (BatchNorm statistics) at sync points, see `AsyncAveragingStrategy`.
        min_replicas, max_replicas: see `AsyncAveragingStrategy`.
        timeouts: how long to wait for what.
        transport: see `AsyncAveragingStrategy`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, or two of them contradict each other; at the start of training more
            servers than ranks, or an optimizer that servers cannot have.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; the key-value store
    of MXNet; Ho et al. for ``"ssp"``, 2013.

    >>> ParameterServerStrategy("dist_sync")
    <ParameterServerStrategy for `lightning.pytorch`: mode='sync'>
    """

    def __init__(
        self,
        mode: str = "async",
        *,
        num_servers: int | None = None,
        placement: Placement = "colocated",
        wait_for_workers: WaitForWorkers = "all",
        server_address: str | None = None,
        snapshots: str | os.PathLike[str] | None = None,
        snapshot_every: float | None = None,
        update_on_server: bool = True,
        lr_clock: configuration_checks.LrClock | None = None,
        staleness: str | StalenessPolicy = "auto",
        max_staleness: int | None = None,
        staleness_lr_factor: float | None = None,
        buffer_size: int | None = None,
        warmup_steps: int = 0,
        update_frequency: int = 1,
        pull_every: int = 1,
        compression: PushCompressionName | Bf16 | Fp8 | Int8 | TwoBit | TopK = "none",
        consistent_pull: bool = False,
        overlap: bool = False,
        bigarray_bound: int = 1_000_000,
        buffers: BufferPolicy = "average",
        min_replicas: int | None = None,
        max_replicas: int | None = None,
        timeouts: Timeouts | None = None,
        transport: Transport | TransportName = "auto",
    ) -> None:
        owner = type(self).__name__
        self.mode: Mode = server_options.mode_of(owner, mode)
        self.num_servers = num_servers
        self.server_address = server_address
        self.snapshots = server_options.folder_of(owner, snapshots)
        self.snapshot_every = snapshot_every
        self.bigarray_bound = bigarray_bound
        self.quorum = StartQuorum.of(owner, wait_for_workers)
        self.update_on_server = update_on_server
        self.max_staleness = max_staleness
        self.update_frequency = update_frequency
        self.pull_every = pull_every
        self.consistent_pull = consistent_pull
        self.warmup_steps = warmup_steps
        self.overlap = overlap
        self.staleness_lr_factor = staleness_lr_factor
        self.buffer_size = buffer_size
        self.compression = make_compression(owner, compression)
        self.staleness, self.max_staleness = resolve_staleness(self, staleness)
        server_options.check_service(self)
        configuration_checks.check_policies(owner, buffers, "keep", "local", 1.0)
        config = AveragerConfig(
            timeouts=Timeouts.or_default(timeouts), min_replicas=min_replicas, max_replicas=max_replicas
        )
        roles = ServerRoles(owner, placement, num_servers, server_address, self.quorum.is_all)
        self.roles: ServerRoles = roles  # pyright: ignore[reportIncompatibleVariableOverride]
        clock = server_options.clock_of(self, lr_clock)
        super().__init__(
            DeltaMean(), Synchronous(), config, buffers=buffers, lr_clock=clock, transport=roles.transport(transport)
        )
        self.roles.check_transport(self.transport)
        self.quorum.check_transport(owner, self.transport)
        self.servers: Servers | None = None
        self.served_run: int | None = None
        self.states = States(self)
        self.brings = False
        """Whether servers take this training's weights, whatever they have: it goes on from a checkpoint."""
        self.groups = [ParameterGroup(0, 0, "delta", {})]
        """Groups of parameters, each with a table on servers."""
        self.progress = WorkerSteps()

    strategy_name = "parameter_server"
    alone = "without servers: nothing is pushed, and the optimizer is its own"
    make_step_runner = PushSteps
    make_totals = PushTotals
    join_servers = join
    served = True

    def connect_ranks(self) -> None:
        if not self.quorum.is_all and self.live_ranks is None and not self.is_joining:
            join_or_start(self, type(self).__name__)
        try:
            super().connect_ranks()
        finally:  # servers must see that this worker was there, and has ended
            if self.roles.dedicated:
                register_worker(self, *self.roles.of(self.cluster_environment))
        if self.roles.dedicated and self.connection is not None:
            self.connection.on_end = lambda: None  # the store lasts until they have seen it

    def come_late(self) -> None:
        self._environment = numbered_last(self._environment)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit" and self.update_on_server:
            self.groups = described(type(self).__name__, self.optimizers)
            if self.world is not None:
                check_equal(self.world, {"optimizers": repr([tuple(group) for group in self.groups])})
            check_momentum(self, trainer)

    def go_on_without(self, names: Sequence[str], rank: int) -> None:
        if rank == 0 and self.servers is not None:  # so that no worker waits for their pushes
            self.servers.forget(names)

    def handed_over(self) -> dict[str, Any]:
        servers = self.servers
        return {
            "servers": [] if servers is None else servers.addresses, "run": self.served_run,
            "job": "" if servers is None else servers.job, "progress": self.progress.plain(),
        }  # fmt: skip

    def take_handed_over(self, told: dict[str, Any]) -> None:
        self.served_run = told["run"]
        self.progress.take(told["progress"])
        self.servers = find_again(self, self.served_run, told["servers"])
        self.servers.job = told["job"]

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        return None if self.lr_clock == "local" or self._session is None else self.progress.steps

    def start_over(self) -> None:
        super().start_over()
        end(self, in_order=True)
        self.brings = True

    def teardown(self) -> None:
        failed = self.failed
        super().teardown()
        end(self, in_order=not failed)

    @property
    def alike(self) -> frozenset[str]:
        """Names of what is equal on all ranks in a checkpoint."""
        return ALIKE if self.update_on_server else REPLICAS

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.states.fetch([optimizer])
        return super().optimizer_state(optimizer)

    def states_here(self, alone_s: float | None = None) -> AbstractContextManager[None]:
        return self.states.here(alone_s)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.saved.leave_rule(type(self.rule).__qualname__)
        return checkpoint

    def summarise(self) -> None:
        super().summarise()
        self.states.fetch(self.optimizers)  # for a checkpoint that is saved when the servers are gone

    def settings(self) -> dict[str, object]:
        return {
            **super().settings(), **server_options.settings_of(self), "wait_for_workers": self.quorum,
            "placement": "dedicated" if self.roles.dedicated else "colocated",
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `{namespace}`: mode={self.mode!r}>"


ParameterServerStrategy.register_strategies(pytorch("strategies").StrategyRegistry)
