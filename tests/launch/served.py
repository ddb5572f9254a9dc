"""A user's script for ranks on two hosts: each host has a server, and half of the parameters."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from lightning_async import ParameterServerStrategy, ServerOptions
from lightning_async.comm.p2p_gloo import machine_name
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.problem import adam
from tests.strategies.served import BATCHES
from tests.strategies.workers import Net, loader

if __name__ == "__main__":
    torch.set_num_threads(1)
    strategy = ParameterServerStrategy("sync", options=ServerOptions(bigarray_bound=10))
    here: list[bool] = []

    class Looks(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert strategy.servers is not None
            here.extend(address["machine"] == machine_name() for address in strategy.servers.addresses)

    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", num_nodes=2, devices=1, max_epochs=2, logger=False, callbacks=[Looks()],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )  # fmt: skip
    net, rank = Net(optimizer=adam), int(os.environ["RANK"])
    trainer.fit(net, loader(problem.batches(rank, BATCHES)))
    told = {"rank": rank, "here": here, "values": problem.flat(net)}
    print("ENDED", json.dumps(told), flush=True)
