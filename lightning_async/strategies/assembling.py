"""Where nobody counts the starts of a rank, or somebody does for each rank alone: the store says who comes back."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from lightning_async.comm.launched import CHANNEL, REJOIN
from lightning_async.comm.membership.assembly import AGENTS_STORE
from lightning_async.comm.membership.presence import naming_the_stores_host

__all__ = ["asks_the_store", "come_together"]

log = logging.getLogger(__name__)
_AUTO = "auto"


def asks_the_store(variables: Mapping[str, str]) -> bool:
    """Whether the store is to say what a process with these variables is: they say so, or each rank has an agent of
    torchrun, of which each counts for itself, and starts its own rank again.

    Raises:
        ValueError: they say so, and not that somebody else than rank 0 has the store.

    >>> agents = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1"}
    >>> asks_the_store({**agents, "WORLD_SIZE": "3"}), asks_the_store({**agents, "WORLD_SIZE": "1"})
    (True, False)
    >>> asks_the_store({**agents, "WORLD_SIZE": "3", "LIGHTNING_ASYNC_REJOIN": "torchrun"})
    False
    """
    outlives, told = variables.get(AGENTS_STORE) == "True", variables.get(REJOIN)
    if told == _AUTO and not outlives:
        raise ValueError(
            f"{REJOIN}={_AUTO} needs a store that outlives rank 0: start one at MASTER_ADDR and MASTER_PORT, as "
            f"examples/kubernetes.yaml does, and export {AGENTS_STORE}=True."
        )
    by_torchrun = outlives and "TORCHELASTIC_RUN_ID" in variables and CHANNEL not in variables
    several = variables.get("WORLD_SIZE", "1") != "1"
    return told == _AUTO or (told is None and by_torchrun and several and variables.get("LOCAL_WORLD_SIZE") == "1")


def come_together(strategy: Any) -> bool:
    """All ranks call this at the start of their first run; whether others train, so that this one joins them.

    Args:
        strategy: whose ranks they are; it knows its numbers.

    Raises:
        ValueError: the store is asked for and cannot say it.
        CollectiveTimeout: ranks are missing, and nobody trains.
    """
    if strategy.host is None or not asks_the_store(os.environ):
        return False
    quorum, rank = getattr(strategy, "quorum", None), strategy.global_rank
    if quorum is not None and not quorum.is_all:
        if os.environ.get(REJOIN) == _AUTO:
            raise ValueError(
                f"{REJOIN}={_AUTO}: all ranks begin together, and `wait_for_workers` says that some come later. Leave "
                'it at "all".'
            )
        return False
    with naming_the_stores_host(rank):
        found = strategy.transport.assemble(strategy.cluster_environment)
    os.environ[REJOIN] = f"{found.again}@{found.attempt}"
    if found.again:
        log.warning("Rank %d was started again while others train.", rank)
    elif found.attempt:
        log.info("Rank %d begins with all others, which were started again, too.", rank)
    return bool(found.again)
