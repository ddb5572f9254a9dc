"""Which engine moves the bytes of a strategy."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal, get_args

from lightning_async.arguments import check_choice
from lightning_async.trainer.environments import HorovodEnvironment
from lightning_async.transports.horovod import HorovodEngine
from lightning_async.transports.torch import StartMethod, TorchEngine
from lightning_async.transports.transport import Engine

__all__ = ["EngineName", "make_engine"]

EngineName = Literal["auto", "torch", "horovod"]


def make_engine(
    owner: str, name: EngineName, process_group_backend: str | None, start_method: StartMethod, gloo_timeout: timedelta
) -> Engine:
    """The engine that ``name`` asks for.

    "auto" is Horovod where horovodrun has started this process (``HOROVOD_RANK`` and ``HOROVOD_SIZE`` are set), else
    torch. Under mpirun alone Horovod must be asked for.

    Raises:
        ValueError: an unknown name, or arguments that have no effect with the engine.
        ModuleNotFoundError: Horovod is called for, but not installed.
        RuntimeError: both torchrun and horovodrun say who this process is.
    """
    check_choice(owner, "engine", name, get_args(EngineName))
    if name == "torch" or (name == "auto" and not HorovodEnvironment.detect()):
        return TorchEngine(owner, process_group_backend, start_method)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            f"`{owner}(engine={name!r})`: the environment holds torchrun's TORCHELASTIC_RUN_ID beside what asks for "
            "Horovod, so there are two answers to who this process is. Launch by one of them, or pass `engine='torch'`."
        )
    return HorovodEngine(owner, process_group_backend, start_method, gloo_timeout)
