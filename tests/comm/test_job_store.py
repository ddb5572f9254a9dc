"""The store of a process, for all of its runs."""

from __future__ import annotations

import atexit
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore

from lightning_async.membership.launcher_channel import REJOIN
from lightning_async.membership.startup import AGENTS_STORE, ProcessRole
from lightning_async.transports import torch as job_store


def test_a_store_in_the_place_of_the_one_that_ranks_have_assembled_in_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was found there is not so in the other one: a rank would wait for those who train elsewhere, or in vain."""
    for name in ("_stores", "_assembled"):
        monkeypatch.setattr(job_store, name, [])
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    monkeypatch.setenv(AGENTS_STORE, "True")
    monkeypatch.delenv(REJOIN, raising=False)
    server: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environment = SimpleNamespace(
        main_address="127.0.0.1", main_port=server.port, global_rank=lambda: 0, world_size=lambda: 1
    )
    assert job_store.assemble(environment) == ProcessRole(0, 0)
    port = server.port
    del server
    another: Any = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    with pytest.raises(DistError):
        job_store.store_of(environment, 0)
    del another
