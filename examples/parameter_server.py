"""Train the character-level model with parameter servers.

Start it by::

    python examples/parameter_server.py

This starts two workers, and a server process beside them. ``--mode async`` waits for nobody. ``--mode sync`` takes the
steps of a single process with the joined batch. Kill the server, or a worker: training continues. With ``--dedicated``
the servers are ranks, after the workers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl  # or: import pytorch_lightning as pl
import torch
from char_lm import CharData, CharLM

from lightning_async import ParameterServerStrategy


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["async", "sync", "ssp"], default="async")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--num-servers", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=200, metavar="STEPS", help="of each worker")
    parser.add_argument("--dedicated", action="store_true", help="servers are ranks, after those of the workers")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # one core per worker
    pl.seed_everything(1, verbose=False)
    data = CharData()
    model = CharLM(len(data.alphabet), data.context, total_steps=options.max_steps)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.workers + (options.num_servers if options.dedicated else 0),
        strategy=ParameterServerStrategy(
            options.mode,
            num_servers=options.num_servers,
            placement="dedicated" if options.dedicated else "colocated",
        ),
        max_steps=options.max_steps,
        val_check_interval=options.max_steps,
        check_val_every_n_epoch=None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        print(f"validation loss {float(trainer.callback_metrics['val/loss']):.3f}")


if __name__ == "__main__":
    main()
