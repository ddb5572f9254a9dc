"""Train on ranks that come and go, under Horovod Elastic.

Start it by::

    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/elastic.py

``hosts.sh`` prints the hosts that are there at the moment, one line for each: ``name:slots``. Kill a rank, or add or
remove a host: the others train on from the last commit in memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import lightning.pytorch as pl  # or: import pytorch_lightning as pl
import torch
from char_lm import CharData, CharLM

from lightning_async import HorovodStrategy, fit_elastic


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=200, metavar="STEPS")
    parser.add_argument("--commit-every", type=int, default=10, metavar="STEPS")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # one core per rank
    pl.seed_everything(1, verbose=False)
    data = CharData()
    model = CharLM(len(data.alphabet), data.context, total_steps=options.max_steps)

    def make_trainer() -> pl.Trainer:  # called for every world of ranks
        return pl.Trainer(
            accelerator="cpu",
            strategy=HorovodStrategy(),
            max_steps=options.max_steps,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )

    trainer = fit_elastic(make_trainer, model, datamodule=data, commit_every=options.commit_every)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps; loss {float(trainer.callback_metrics['train/loss']):.3f}")


if __name__ == "__main__":
    main()
