"""What an exchange takes elsewhere; ``python -m tests.benchmarks.server_peers PEER OPTIMIZER NUMEL REPEATS``.

Each peer has a server and a worker in processes of their own on this host; what is printed are the worker's seconds, in
JSON. What is not installed is looked for in the folder that PEERS names, with a folder for each, as these fill it:

    pip install --target PEERS/mxnet mxnet==1.9.1 'numpy<1.24'
    pip install --target PEERS/torchft torchft opentelemetry-sdk opentelemetry-exporter-otlp
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["OPTIMIZERS", "PEERS", "seconds_of"]

OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.001}}

WARM = 3
_LIMIT_S = 90.0


def seconds_of(peer: str, optimizer: str, numel: int, repeats: int) -> list[float] | str:
    """So many exchanges of a peer; or why there are none."""
    command = [sys.executable, "-m", "tests.benchmarks.server_peers", peer, optimizer, str(numel), str(repeats)]
    folder = os.path.join(os.environ.get("PEERS", ""), peer)
    path = os.pathsep.join([*([folder] if os.path.isdir(folder) else []), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            said, error = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"nothing within {_LIMIT_S:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # its servers, too
    told = [line for line in said.splitlines() if line.startswith("[")]
    return json.loads(told[-1]) if told else (error.strip().splitlines() or ["it says nothing"])[-1]


def timed(exchange: Callable[[], object], repeats: int) -> None:
    """Print how long each takes, but for the first ones."""
    seconds = []
    for _ in range(repeats + WARM):
        began = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds[WARM:]), flush=True)


def made(optimizer: str, numel: int) -> Any:
    """A shard's weights, and torch's own optimizer of them."""
    import torch

    weights = torch.nn.Parameter(torch.zeros(numel))
    return weights, getattr(torch.optim, optimizer)([weights], **OPTIMIZERS[optimizer])


# ---- a server of torch.distributed.rpc ----

_held: list[Any] = []


def _apply(gradient: Any) -> Any:
    weights, optimizer = _held
    weights.grad = gradient
    optimizer.step()
    return weights.detach()


def _serves_rpc(port: int, optimizer: str, numel: int) -> None:
    import torch.distributed.rpc as rpc

    _held[:] = made(optimizer, numel)
    rpc.init_rpc("server", rank=0, world_size=2, rpc_backend_options=_options(port))
    rpc.shutdown()


def _options(port: int) -> Any:
    import torch.distributed.rpc as rpc

    return rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")


def by_rpc(optimizer: str, numel: int, repeats: int) -> None:
    """The plain one: a call by which a tensor goes, and one comes back."""
    import torch
    import torch.distributed.rpc as rpc

    port = _free_port()
    server = multiprocessing.get_context("spawn").Process(target=_serves_rpc, args=(port, optimizer, numel))
    server.start()
    rpc.init_rpc("worker", rank=1, world_size=2, rpc_backend_options=_options(port))
    gradient, weights = torch.full((numel,), 1e-3), torch.empty(numel)
    timed(lambda: weights.copy_(rpc.rpc_sync("server", _apply, args=(gradient,))), repeats)
    rpc.shutdown()
    server.join()


# ---- torchft's ----


def _torchft(optimizer: str, numel: int) -> Any:
    import torch
    from torchft.parameter_server import ParameterServer  # pyright: ignore[reportMissingImports]
    from torchft.process_group import ProcessGroupGloo  # pyright: ignore[reportMissingImports]

    class Served(ParameterServer):
        @classmethod
        def new_process_group(cls) -> Any:
            return ProcessGroupGloo()

        def forward(self, session_id: str, pg: Any) -> None:
            weights, stepped = made(optimizer, numel)
            weights.grad = torch.empty(numel)
            while True:
                pg.broadcast_one(weights.grad, root=1).wait()
                stepped.step()
                pg.broadcast_one(weights.detach(), root=0).wait()

    return Served


def _serves_torchft(optimizer: str, numel: int, told: Any) -> None:
    server = _torchft(optimizer, numel)(port=0)
    told.send(server.address())
    time.sleep(_LIMIT_S)


def by_torchft(optimizer: str, numel: int, repeats: int) -> None:
    """A group of two for a worker and its server, over Gloo."""
    import torch

    ours, theirs = multiprocessing.Pipe()
    spawned = multiprocessing.get_context("spawn")
    server = spawned.Process(target=_serves_torchft, args=(optimizer, numel, theirs), daemon=True)
    server.start()
    pg = _torchft(optimizer, numel).new_session(ours.recv())
    gradient, weights = torch.full((numel,), 1e-3), torch.empty(numel)

    def exchange() -> None:
        pg.broadcast_one(gradient, root=1).wait()
        pg.broadcast_one(weights, root=0).wait()

    timed(exchange, repeats)
    server.kill()


# ---- MXNet's ----

_ROLE = "import mxnet"  # a scheduler or a server serves within the import, until its workers are gone


def by_mxnet(optimizer: str, numel: int, repeats: int) -> None:
    """The key-value store ``dist_async``, with its scheduler and a server."""
    told = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(_free_port())}
    told |= {"DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1", "DMLC_NODE_HOST": "127.0.0.1"}
    others = [
        subprocess.Popen([sys.executable, "-c", _ROLE], env={**os.environ, **told, "DMLC_ROLE": role})
        for role in ("scheduler", "server")
    ]
    os.environ.update(told, DMLC_ROLE="worker")
    import mxnet  # pyright: ignore[reportMissingImports]

    arguments = dict(OPTIMIZERS[optimizer])
    store = mxnet.kv.create("dist_async")
    store.set_optimizer(getattr(mxnet.optimizer, optimizer)(learning_rate=arguments.pop("lr"), **arguments))
    weights = mxnet.nd.zeros(numel)
    store.init(0, weights)
    gradient = mxnet.nd.full(numel, 1e-3)

    def exchange() -> None:
        store.push(0, gradient)
        store.pull(0, out=weights)
        weights.wait_to_read()

    timed(exchange, repeats)
    for each in others:
        each.kill()
        each.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


PEERS = {"rpc": by_rpc, "torchft": by_torchft, "mxnet": by_mxnet}
"""By name: a server of torch.distributed.rpc, torchft's, and MXNet's dist_async."""

if __name__ == "__main__":
    PEERS[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
