"""Two ranks with directories of their own, as hosts have them, with settings that differ, and with torch's reader."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_async import DeltaMean, DiLoCo, EveryNSteps, Synchronous
from lightning_async.algorithms import Latest
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.errors import CheckpointError, PeerLost
from lightning_async.trainer.checkpoint.checkpoint_recovery import CheckpointReader
from lightning_async.trainer.checkpoint.checkpoint_state import whole
from lightning_async.trainer.environment.environments import NOBODY
from tests.callbacks.checkpoint_ranks import STOP, At, Interrupted, Noisy, interrupt, train
from tests.strategies.workers import rank, scenario, together


def place(folder: Path) -> Path:
    return folder / f"host-{rank()}"


def goes_on(folder: Path, strategy: Callable[[], Any], harm: Callable[[Path], None]) -> dict[str, Any]:
    """Interrupted at the 17th step; rank 1 has no whole checkpoint of the 16th then, rank 0 has."""
    reference = train(folder / "reference", strategy(), keep=Latest(9))
    with contextlib.suppress(Interrupted, PeerLost):  # a rank may hear of the other's end within its 17th step
        train(place(folder), strategy(), At(STOP, interrupt), keep=Latest(9))
    store = CheckpointStore(place(folder))
    before = store.entries()
    if rank() == 1:
        harm(Path(before[0].path))
    torch.distributed.barrier()
    rest = train(place(folder), strategy(), keep=Latest(9))
    return {
        "before": [entry.step for entry in before],
        "ranks": [entry.manifest.ranks for entry in before if entry.manifest],
        "first": min(rest.losses),
        "exact": [rest.losses[step] == reference.losses[step] for step in rest.losses],
        "after": [[entry.number, entry.step] for entry in store.entries()],
        "aside": sum(".damaged-" in name for name in os.listdir(store.dirpath)),
    }


def flip(path: Path) -> None:
    data = bytearray((path / "rank-1.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "rank-1.bin").write_bytes(data)


@scenario
def ddp_lost(folder: Path) -> Any:
    return goes_on(folder, lambda: "ddp", shutil.rmtree)


@scenario
def synchronous_damaged(folder: Path) -> Any:
    return goes_on(folder, lambda: together(DeltaMean(), Synchronous()), flip)


@scenario
def a_new_host(folder: Path) -> Any:
    """Its disk is empty: to begin anew would throw away what the other one has."""
    with contextlib.suppress(Interrupted):
        train(place(folder), "ddp", At(STOP, interrupt))
    torch.distributed.barrier()
    if rank() == 1:
        shutil.rmtree(place(folder))
    try:
        train(place(folder), "ddp")
    except CheckpointError as error:
        return str(error)
    return "it has begun"


@scenario
def apart(folder: Path) -> None:
    train(place(folder), together(DiLoCo(), EveryNSteps(4)))


@scenario
def other_settings(folder: Path) -> dict[str, str]:
    """Of rank 1, one after the other; what each rank raises."""
    told = {}
    different = {"recover": None, "every_n_train_steps": 3, "busy": "skip", "good_after": 7}
    for name, value in different.items():
        strategy = "ddp" if name in ("recover", "busy") else together()
        try:
            train(folder, strategy, **({name: value} if rank() else {}))
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return {**told, "left": str(sorted(name for name in os.listdir(folder) if not name.startswith(".")))}


def killed(folder: str) -> None:
    """Rank 1 is killed with the process that writes its 16th step, as where a host loses power; rank 0 alone."""
    saver: list[Any] = []

    class Finds(At):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            saver[:] = [each._now.saver for each in trainer.callbacks if hasattr(each, "_now")]

    def end() -> None:
        if rank() == 1:
            os.kill(saver[0]._writer.pid, signal.SIGKILL)
        else:
            saver[0].wait(20.0)
            signal.sigtimedwait([signal.SIGUSR2], 1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    def stop() -> None:
        if rank() == 1:
            saver[0].wait(20.0)
            os.kill(saver[0]._writer.pid, signal.SIGSTOP)

    train(place(Path(folder)), "ddp", Finds(15, stop), At(STOP, end))


def begun_again(folder: str) -> list[Any]:
    store = CheckpointStore(place(Path(folder)))
    there = [entry.step for entry in store.entries()]
    module = train(store.dirpath, "ddp")  # pyright: ignore[reportArgumentType]
    return [there, min(module.losses), store.entries()[0].step]


# ---- torch.distributed.checkpoint ----


def sharded(value: torch.Tensor, mesh: Any) -> DTensor:
    """Zeros like this, divided otherwise than they were saved."""
    kinds = [Shard(value.dim() - 1)] if value.dim() else [Replicate()]
    return distribute_tensor(torch.zeros_like(value), mesh, kinds)


def read(folder: Path, strategy: Any, reason: str) -> dict[str, Any]:
    """A model and Adam's moments, by torch.distributed.checkpoint: whole, and divided."""
    train(folder, strategy, keep=Latest(9))
    store = CheckpointStore(folder)
    entry = next(entry for entry in store.entries() if entry.manifest and entry.manifest.reason == reason)
    expected, _ = whole(store, entry, NOBODY)
    mesh, kind = init_device_mesh("cpu", (2,)), expected["state_dict"]
    plain = {"state_dict": {name: torch.zeros_like(value) for name, value in kind.items()}, "global_step": -1}
    dcp.load(plain, storage_reader=CheckpointReader(entry.path))
    moments = expected["optimizer_states"][0]["state"]
    divided = {
        "state_dict": {name: sharded(value, mesh) for name, value in kind.items()},
        "optimizer_states": [{"state": {i: {k: sharded(v, mesh) for k, v in moments[i].items()} for i in moments}}],
    }
    dcp.load(divided, storage_reader=CheckpointReader(entry.path))
    local = divided["state_dict"]["net.0.weight"].to_local()
    return {
        "step": [plain["global_step"], expected["global_step"]],
        "plain": [torch.equal(plain["state_dict"][name], value) for name, value in kind.items()],
        "divided": [torch.equal(divided["state_dict"][name].full_tensor(), value) for name, value in kind.items()],
        "local": [list(local.shape), torch.equal(local, kind["net.0.weight"].chunk(2, dim=1)[rank()])],
        "moments": [
            torch.equal(divided["optimizer_states"][0]["state"][i][name].full_tensor(), value)
            for i in moments
            for name, value in moments[i].items()
        ],
        "not zero": all(bool(value.any()) for name, value in kind.items() if "net.2" not in name),
    }


@scenario
def reads_ddp(folder: Path) -> Any:
    return read(folder, "ddp", "the end")


@scenario
def reads_drifting(folder: Path) -> Any:
    """A round's, whose parameters are there in shares."""
    return read(folder, together(DiLoCo(), EveryNSteps(4)), "due")


@scenario
def reads_damaged(folder: Path) -> dict[str, str]:
    train(folder, "ddp")
    path = Path(CheckpointStore(folder).entries()[0].path)
    torch.distributed.barrier()
    if rank() == 0:
        flip(path)
    torch.distributed.barrier()
    module = nn.Module()
    module.net = Noisy().net
    try:
        dcp.load({"state_dict": module.state_dict()}, storage_reader=CheckpointReader(path))
    except dcp.CheckpointException as error:
        return {each: str(why) for each, why in enumerate(error.failures.values())} | {"all": str(error)}  # type: ignore
    return {}
