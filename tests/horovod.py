"""Ranks of a real Horovod, for tests: skipped where it is not installed (`make horovod` builds it)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.support import ROOT

__all__ = ["KINDS", "horovod_environment", "needs_horovod", "needs_horovod_mpi", "rendezvous", "variables"]

KINDS = "PeerLost", "HorovodFailed", "HorovodPeerLost", "HorovodTimeout"
"""Of errors where a rank is lost."""
INSTALLED = importlib.util.find_spec("horovod") is not None
needs_horovod = pytest.mark.skipif(not INSTALLED, reason="Horovod is not installed: `make horovod`")


def _mpi_is_built() -> bool:
    return INSTALLED and bool(importlib.import_module("horovod.torch").mpi_built())


needs_horovod_mpi = pytest.mark.skipif(
    not _mpi_is_built(), reason="Horovod is not installed, or without MPI: `make horovod HOROVOD_ARGS=--mpi`"
)


@contextlib.contextmanager
def rendezvous(num_ranks: int, prefix: Sequence[str] = ()) -> Iterator[int]:
    """The rendezvous server, in a process of its own that ``prefix`` may start elsewhere; yields its port."""
    command = [*prefix, sys.executable, "-m", "tests.rendezvous", str(num_ranks)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.kill()


def variables(
    rank: int, size: int, port: int, *, address: str, host: str, interface: str, one_host: bool
) -> dict[str, str]:
    """What horovodrun sets for a rank.

    Args:
        rank, size: of the rank.
        port, address: of the rendezvous server.
        host: where the rank is.
        interface: the network's, there.
        one_host: all ranks are on one host, or each is on one of its own.
    """
    local, local_size = (rank, size) if one_host else (0, 1)
    cross, cross_size = (0, 1) if one_host else (rank, size)
    own: dict[str, Any] = {
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_RENDEZVOUS_PORT": port,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": interface,
        "HOSTNAME": host,
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": local,
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": cross,
        "CROSS_SIZE": cross_size,
    }
    return {f"HOROVOD_{name}": str(value) for name, value in own.items()}


@contextlib.contextmanager
def horovod_environment(nprocs: int) -> Iterator[Callable[[int], Mapping[str, str]]]:
    """The variables of each rank on this host, with a rendezvous server: for `tests.support.run_ranks`."""
    with rendezvous(nprocs) as port:
        yield lambda rank: variables(
            rank, nprocs, port, address="127.0.0.1", host="localhost", interface="lo", one_host=True
        )
