"""Cluster environments that say who trains and who serves: the variables of ps-lite and MXNet, and TensorFlow's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from lightning_async.comm.membership.start import Patience, open_store
from lightning_async.trainer.namespace import fabric

__all__ = ["DMLCEnvironment", "RoleEnvironment", "TFConfigEnvironment", "find_roles"]

Role = Literal["worker", "server", "scheduler"]
ClusterEnvironment: Any = fabric("plugins.environments").ClusterEnvironment

_DMLC, _TF = "DMLC_ROLE", "TF_CONFIG"
_ARRIVALS = timedelta(minutes=30)
_OTHERS = ("TORCHELASTIC_RUN_ID", "HOROVOD_RANK")
"""Variables of launchers that number all ranks themselves."""


class RoleEnvironment(ClusterEnvironment):
    """Workers are ranks; servers, and who keeps the store, are none of theirs.

    A process has one device, the first one of its Trainer's.

    Args:
        role: of this process.
        num_workers, num_servers: of all.
        address, port: of the store.
    """

    store_elsewhere = False
    """The store is kept by a process that is no worker."""

    def __init__(self, role: Role, num_workers: int, num_servers: int, address: str, port: int) -> None:
        super().__init__()
        self.role, self.num_workers, self.num_servers = role, num_workers, num_servers
        self._address, self._port = address, port

    @property
    def number(self) -> int:
        """Among those of its role."""
        raise NotImplementedError

    @property
    def listens_at(self) -> int:
        """The port at which this server is reached from other hosts; 0: a free one."""
        return 0

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._address

    @property
    def main_port(self) -> int:
        return self._port

    @staticmethod
    def detect() -> bool:
        """Whether the environment says who serves."""
        return _DMLC in os.environ or (_TF in os.environ and _has_servers(os.environ[_TF]))

    def world_size(self) -> int:
        return self.num_workers

    def set_world_size(self, size: int) -> None:
        """Nothing: the environment has decided."""

    def global_rank(self) -> int:
        """Of a worker; others come after all workers."""
        before = {"worker": 0, "server": self.num_workers, "scheduler": self.num_workers + self.num_servers}
        return before[self.role] + self.number

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the environment has decided."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nothing: the environment has decided."""


class DMLCEnvironment(RoleEnvironment):
    """The variables of ps-lite, as MXNet's launchers set them: DMLC_ROLE ("worker", "server" or "scheduler"),
    DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT.

    The scheduler keeps the store, at these two. Workers and servers are numbered there as they come, or by
    DMLC_WORKER_ID and DMLC_SERVER_ID.

    Raises:
        ValueError: a variable is missing, or is no such number; or one that came has no place left.
        CollectiveTimeout: the scheduler is not there within 30 minutes.
    """

    store_elsewhere = True

    def __init__(self) -> None:
        role, workers, servers = os.environ[_DMLC], _number("DMLC_NUM_WORKER"), _number("DMLC_NUM_SERVER")
        if role not in ("worker", "server", "scheduler"):
            raise ValueError(f"{_DMLC}={role!r} must be worker, server or scheduler.")
        if not (address := os.environ.get("DMLC_PS_ROOT_URI")):
            raise ValueError(f"{_DMLC}={role}: DMLC_PS_ROOT_URI, the address of the scheduler, is not set.")
        super().__init__(role, workers, servers, address, _number("DMLC_PS_ROOT_PORT"))
        self._number = 0 if role == "scheduler" else _number(f"DMLC_{role.upper()}_ID", 0, None)

    @property
    def number(self) -> int:
        if self._number is None:
            self._number = self._arrive()
        there = {"worker": self.num_workers, "server": self.num_servers, "scheduler": 1}[self.role]
        if self._number >= there:
            raise ValueError(
                f"This {self.role} is number {self._number}, counted from 0, and DMLC_NUM_{self.role.upper()} is "
                f"{there}. One that is to take another's place needs that one's DMLC_{self.role.upper()}_ID."
            )
        return self._number

    def _arrive(self) -> int:
        patience = Patience(0, _ARRIVALS, check=lambda: None)
        store = open_store(self.main_address, self.main_port, False, patience)
        return store.add(f"lightning_async/arrivals/{self.role}", 1) - 1


class TFConfigEnvironment(RoleEnvironment):
    """TensorFlow's variable TF_CONFIG: a "cluster" of "chief", "worker" and "ps", and this "task".

    The chief, if there is one, is the first worker; the first worker keeps the store at its address. Each "ps" is a
    server, which listens at the port that it has there.

    Raises:
        ValueError: it is no such thing, or this task is none that trains or serves, such as an "evaluator".
    """

    def __init__(self) -> None:
        cluster, kind, index = _parsed(os.environ[_TF])
        workers, servers = [*cluster.get("chief", []), *cluster.get("worker", [])], cluster.get("ps", [])
        if kind == "evaluator":
            raise ValueError(
                f"{_TF}: this task is an evaluator, and `trainer.fit` validates by itself, on all workers. Leave the "
                "evaluator out of the job."
            )
        if kind not in ("chief", "worker", "ps"):
            raise ValueError(f"{_TF}: this task is a {kind!r}; it must be a chief, a worker or a ps.")
        if not 0 <= index < len(cluster.get(kind, [])):
            raise ValueError(f"{_TF}: this task is {kind} {index}, and the cluster has {cluster.get(kind, [])}.")
        if not workers:
            raise ValueError(f"{_TF}: the cluster has no chief and no worker.")
        address, port = _place(workers[0])
        super().__init__("server" if kind == "ps" else "worker", len(workers), len(servers), address, port)
        self._number = index + (len(cluster.get("chief", [])) if kind == "worker" else 0)
        self._port_of_server = _place(servers[index])[1] if kind == "ps" else 0

    @property
    def number(self) -> int:
        return self._number

    @property
    def listens_at(self) -> int:
        return self._port_of_server


def find_roles() -> RoleEnvironment | None:
    """What the environment says of roles; None where that is nothing.

    Raises:
        RuntimeError: a launcher that numbers ranks has started this process, too.
        ValueError: it cannot be.
    """
    if not RoleEnvironment.detect():
        return None
    told = _DMLC if _DMLC in os.environ else _TF
    if other := next((name for name in _OTHERS if name in os.environ), None):
        raise RuntimeError(
            f"The environment holds {told} beside {other}, so there are two answers to who this process is. Launch by "
            f'one of them: unset {told}, or pass `placement="colocated"`, and it does not count.'
        )
    return DMLCEnvironment() if told == _DMLC else TFConfigEnvironment()


def _number(name: str, least: int = 1, default: Any = ...) -> Any:
    text = os.environ.get(name, "")
    if not text and default is not ...:
        return default
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ValueError(f"{name}={text!r} must be a number from {least} on.")
    return int(text)


def _has_servers(text: str) -> bool:
    """Others set the variable, too, for jobs without any."""
    return bool(_parsed(text)[0].get("ps"))


def _parsed(text: str) -> tuple[Mapping[str, list[str]], str, int]:
    """The cluster, and the kind and the index of this task."""
    try:
        told = json.loads(text)
        cluster, task = told.get("cluster", {}), told.get("task", {})
        cluster = {name: [str(place) for place in places] for name, places in cluster.items()}
        return cluster, str(task.get("type", "")), int(task.get("index", 0))
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{_TF} must be JSON, with a cluster and a task, and is {text!r}: {error}") from None


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{_TF}: {text!r} must be HOST:PORT.")
    return host.removeprefix("[").removesuffix("]"), int(port)
