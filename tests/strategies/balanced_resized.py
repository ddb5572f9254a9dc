"""What a rank of the tests of batches by speed does that goes on from a checkpoint of more ranks, or of fewer."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from lightning_async import BalancedBatchSizes
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.errors import PeerLost
from tests.strategies import balanced
from tests.strategies.workers import rank

SAVED_AT = 37


def train(folder: str, costs: list[float], stops_after: int = -1) -> None:
    """Until so many steps are taken, some after the one checkpoint, or to the end."""
    ranks = int(os.environ["WORLD_SIZE"])
    balanced.RANKS, balanced.COSTS = ranks, tuple(costs)  # pyright: ignore[reportAttributeAccessIssue]
    module, sizes = balanced.Noted(optimizer=balanced.momentum), BalancedBatchSizes(every=12)
    module.stops_after = stops_after
    saved = FaultTolerantCheckpoint(
        Path(folder) / "saved", every_n_train_steps=SAVED_AT, busy="wait", save_on_exception=False
    )
    with contextlib.suppress(balanced.Interrupted, PeerLost):
        balanced.train(
            balanced.synchronous(), sizes, module, max_epochs=2, devices=ranks, callbacks=[saved],
            enable_checkpointing=True,
        )  # fmt: skip
    (Path(folder) / f"{ranks}.{rank()}.json").write_text(json.dumps(module.batches))
