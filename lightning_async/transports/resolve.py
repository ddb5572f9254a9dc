"""The choice of a strategy's transport: a given object, or the meaning of a short name."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from typing import Literal, get_args

import torch

from lightning_async.trainer.environment.environments import started_by_horovodrun
from lightning_async.transports.base import Transport
from lightning_async.transports.torch import TorchTransport

TransportName = Literal["auto", "torch", "horovod"]

REGISTERED: dict[str, Transport | TransportName] = {
    "": "auto",
    "_spawn": TorchTransport(start="spawn"),
    "_fork": TorchTransport(start="fork"),
    "_notebook": TorchTransport(start="fork"),
}
"""Transports in Lightning's registry of strategies, by the suffix of the strategy's name there."""


def choose_transport(owner: str, transport: Transport | TransportName, gloo_timeout: timedelta) -> Transport:
    """Return the given transport, or the transport with the given short name.

    "auto" is Horovod if horovodrun has started this process (``HOROVOD_RANK`` and ``HOROVOD_SIZE`` are set), else
    torch. Under mpirun alone Horovod must be requested.

    Raises:
        TypeError: The argument is no transport.
        ValueError: The name is unknown, or horovodrun has started the ranks and ``start`` says how to start them.
        ModuleNotFoundError: Horovod is requested, but not installed.
        RuntimeError: Both torchrun and horovodrun have set this process's rank.
    """
    if isinstance(transport, str):
        chosen = _named(owner, transport, gloo_timeout)
    elif isinstance(transport, type) or not isinstance(transport, Transport):
        raise TypeError(
            f"`{owner}(transport={transport!r})` must be a transport such as TorchTransport(), or one of "
            f"{get_args(TransportName)}."
        )
    else:
        chosen = transport
    if _is_horovod(chosen) and "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            f"`{owner}(transport={transport!r})`: the environment holds torchrun's TORCHELASTIC_RUN_ID beside what "
            "asks for Horovod, so there are two answers to who this process is. Launch by one of them, or pass "
            "`transport='torch'`."
        )
    if isinstance(chosen, TorchTransport) and chosen.start != "popen" and started_by_horovodrun():
        raise ValueError(
            f"`{owner}(transport={transport!r})` has no effect under horovodrun, which has started the ranks: leave "
            "`start` out."
        )
    return chosen


def how_to_have_more(transport: Transport) -> str:
    """Return advice on how to start more ranks, for a user whose run has a single rank.

    >>> how_to_have_more(TorchTransport())
    'Pass `Trainer(devices=2)` or more'
    """
    if _is_horovod(transport):
        return "Start more with `horovodrun -np 2 python SCRIPT`, or mpirun: the Trainer starts none"
    return "Pass `Trainer(devices=2)` or more"


def _is_horovod(transport: Transport) -> bool:
    return transport.backend_on(torch.device("cpu")) == "horovod"


def _named(owner: str, name: str, gloo_timeout: timedelta) -> Transport:
    if name not in get_args(TransportName):
        raise ValueError(
            f"`{owner}(transport={name!r})` must be one of {get_args(TransportName)}, or a transport such as "
            "TorchTransport(backend='gloo')."
        )
    if name == "torch" or (name == "auto" and not started_by_horovodrun()):
        return TorchTransport()
    # Imported here only, because nothing else needs Horovod.
    horovod = importlib.import_module("lightning_async.horovod.transport")
    return horovod.HorovodTransport(gloo_timeout=gloo_timeout)
