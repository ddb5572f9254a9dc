"""What every strategy of this package shares: ranks and their launch, one model at the start, collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from lightning_async.engine.replica import describe
from lightning_async.errors import LayoutMismatch
from lightning_async.flat import FlatLayout
from lightning_async.namespace import fabric, pytorch
from lightning_async.strategies.connection import Connection, check_backend, join_default_group, short_world
from lightning_async.strategies.environments import MPIRunEnvironment
from lightning_async.strategies.world import World

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import ParallelStrategy
else:
    ParallelStrategy = pytorch("strategies.parallel").ParallelStrategy

__all__ = ["ReplicatedStrategy", "StartMethod", "allow_compiled_modules", "rank_zero_info"]

T = TypeVar("T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ReplicatedStrategy(ParallelStrategy):
    """One whole replica per rank, on the device of its local rank.

    Args:
        dead_after: a rank without a heartbeat for so long is lost.
        process_group_backend: "gloo", "nccl" or "mpi". Default: "nccl" on CUDA, else "gloo".
        start_method: how Lightning starts the other ranks where no launcher did.

    Raises:
        ValueError: an unknown backend or start method.
    """

    is_distributed = True
    strategy_name: str

    def __init__(
        self, *, dead_after: timedelta, process_group_backend: str | None = None, start_method: StartMethod = "popen"
    ) -> None:
        self._environment: Any = None
        super().__init__()
        for argument, value, allowed in (
            ("process_group_backend", process_group_backend, (None, "gloo", "nccl", "mpi")),
            ("start_method", start_method, get_args(StartMethod)),
        ):
            if value not in allowed:
                raise ValueError(f"`{type(self).__name__}({argument}={value!r})` must be one of {allowed}.")
        check_backend(process_group_backend)
        self._dead_after = dead_after
        self._backend = process_group_backend
        self._start_method: StartMethod = start_method
        self._num_nodes = 1
        self._connection: Connection | None = None
        self.failed = False
        """This rank has ended with an exception: nothing waits for others any more."""
        self._runs = self._operations = 0

    # ---- ranks and processes ----

    @property
    def cluster_environment(self) -> Any:
        """Who this rank is. Lightning's own choice, except under a launcher that it does not know."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, environment: Any
    ) -> None:
        own = fabric("plugins.environments").LightningEnvironment
        if type(environment) is own and MPIRunEnvironment.detect():
            environment = MPIRunEnvironment()
        self._environment = environment

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Hosts that take part; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell the environment its ranks, and Lightning's printing whether it is rank 0."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        for module in (fabric("utilities.rank_zero"), pytorch("utilities.rank_zero")):
            module.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            launcher = pytorch("strategies.launchers.subprocess_script")._SubprocessScriptLauncher
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            launcher = pytorch("strategies.launchers.multiprocessing")._MultiProcessingLauncher
            self._launcher = launcher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        if self.world_size > 1:
            join_default_group(self.cluster_environment, self.backend, timedelta(minutes=30))
            self._runs += 1
            self._connection = Connection(
                self.cluster_environment,
                self.backend,
                self.bucket_device,
                name=f"lightning_async/{self._runs}",
                dead_after=self._dead_after,
            )

    @property
    def backend(self) -> str:
        """What moves payloads: "gloo", "nccl" or "mpi"."""
        return self._backend or ("nccl" if self.root_device.type == "cuda" else "gloo")

    @property
    def bucket_device(self) -> torch.device:
        """Where payloads are staged: on the GPU for NCCL, else in the host's memory."""
        return self.root_device if self.backend == "nccl" else torch.device("cpu")

    # ---- registration ----

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """The strategy's name, and the same with the start methods for notebooks."""
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            strategy_registry.register(
                cls.strategy_name + suffix,
                cls,
                description=f"{cls.__name__}; the other ranks are started by '{start_method}'.",
                override=True,
                start_method=start_method,
            )

    # ---- the model ----

    @property
    def module(self) -> LightningModule:
        """The user's module, which is there from `connect` on."""
        return cast("LightningModule", self.lightning_module)

    def model_to_device(self) -> None:
        self.module.to(self.root_device)

    def make_equal(self) -> None:
        """Compare the replicas' models, and start them all from rank 0's.

        Raises:
            LayoutMismatch: they differ; names the first difference.
        """
        if self.world is None:
            return
        mine = describe(self.module)
        for rank, theirs in enumerate(self.world.gather_objects(mine)):
            difference = FlatLayout.first_difference(mine, theirs)
            if difference is not None:
                raise LayoutMismatch(
                    f"Rank {self.global_rank} and rank {rank} hold different models; the first difference is "
                    f"{difference} (rank {self.global_rank} | rank {rank}). Build the same model on every rank."
                )
        self.world.make_equal_([*self.module.parameters(), *self.module.buffers()])

    def disconnect(self, in_order: bool) -> None:
        """Close the groups; with ``in_order``, when all ranks are here."""
        if self._connection is not None:
            self._connection.close(in_order)
            self._connection = None

    # ---- Lightning's collectives ----

    @property
    def world(self) -> World | None:
        """Collectives over all ranks while the Trainer runs; None otherwise, and in a world of one."""
        return self._connection.world if self._connection is not None else None

    @contextmanager
    def _together(self) -> Iterator[World | None]:
        """`world`; after a run, one for this operation (`trainer.save_checkpoint` after `fit`, say)."""
        if self._connection is not None:
            yield self._connection.world
        elif self.world_size > 1 and self._runs > 0 and not self.failed:
            self._operations += 1
            with short_world(self.cluster_environment, f"lightning_async/{self._runs}.{self._operations}") as world:
                yield world
        else:
            yield None

    def barrier(self, name: str | None = None) -> None:
        with self._together() as world:
            if world is not None:
                world.barrier(name or "")

    def broadcast(self, obj: T, src: int = 0) -> T:
        with self._together() as world:
            return obj if world is None else world.broadcast(obj, src)

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        with self._together() as world:
            return tensor if world is None or not isinstance(tensor, Tensor) else world.reduce(tensor, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(self.reduce(torch.tensor(float(decision)), reduce_op="min" if all else "max"))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._together() as world:
            return tensor.unsqueeze(0) if world is None else world.all_gather(tensor, sync_grads)


def rank_zero_info(text: str) -> None:
    """One INFO line, on rank 0, by Lightning's logger."""
    pytorch("utilities.rank_zero").rank_zero_info(text)


def allow_compiled_modules(strategy_class: type) -> None:
    """Lightning lets only strategies on a list of its own train a module that `torch.compile` returned."""
    trainer_module: Any = pytorch("trainer.trainer")
    verify = trainer_module._verify_strategy_supports_compile

    def verify_others(model: Any, strategy: Any) -> None:
        if not isinstance(strategy, strategy_class):
            verify(model, strategy)

    trainer_module._verify_strategy_supports_compile = verify_others
