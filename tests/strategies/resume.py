"""Scenarios of saving and going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_async import EASGD, AsyncAveragingStrategy, DeltaMean, DiLoCo, EveryNSteps
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.workers import (
    PATIENT,
    Net,
    Recorder,
    loader,
    logged,
    make_trainer,
    rank,
    report,
    scenario,
    shard,
)


def diloco() -> AsyncAveragingStrategy:
    return AsyncAveragingStrategy(DiLoCo(), EveryNSteps(3), overlap=False, timeouts=PATIENT, compression="none")


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    rule = {name: value.tolist() for name, value in state["rule_state"].items()}
    state = {**state, **state["replicas"][rank() % len(state["replicas"])]}
    return {name: state[name] for name in ("round", "rule", "step", "epoch")} | {"rule_state": rule}


class AtStart(pl.Callback):
    """The engine's state before the first batch."""

    state: Any = None
    elapsed_s = 0.0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.state is None:
            averager = trainer.strategy.averager
            clocks = averager.clocks()
            self.state = _plain({**averager.state_dict(), "replicas": [clocks]})
            self.elapsed_s = clocks["summary"]["elapsed_s"]


def _train(epochs: int, checkpoint: Path | None = None, save: Path | None = None, strategy: Any = None) -> Any:
    recorder, start, module = Recorder(), AtStart(), Net()
    callbacks: list[Any] = [recorder, start]
    if save is not None:
        callbacks.append(pl.callbacks.ModelCheckpoint(dirpath=save, filename="{epoch}", save_top_k=-1))
    trainer = make_trainer(
        strategy or diloco(), callbacks=callbacks, max_epochs=epochs, enable_checkpointing=save is not None
    )
    trainer.fit(module, loader(shard((6, 6), (3, 9))), ckpt_path=checkpoint)
    return report(trainer, module, recorder) | {"start": start.state, "elapsed_s": start.elapsed_s}


@scenario
def interrupted(folder: Path) -> Any:
    """Four epochs at once, and two and two."""
    return _interrupted(folder, DiLoCo())


@scenario
def interrupted_with_models_of_their_own(folder: Path) -> Any:
    return _interrupted(folder, EASGD())


def _interrupted(folder: Path, rule: Any) -> Any:
    def strategy() -> AsyncAveragingStrategy:
        return AsyncAveragingStrategy(rule, EveryNSteps(3), overlap=False, timeouts=PATIENT, compression="none")

    whole = _train(4, strategy=strategy())
    first = _train(2, save=folder, strategy=strategy())
    saved = torch.load(folder / "epoch=1.ckpt", weights_only=True)
    second = _train(4, checkpoint=folder / "epoch=1.ckpt", strategy=strategy())
    return {
        "whole": whole,
        "first": first,
        "second": second,
        "saved": _plain(saved["lightning_async"]),
        "elapsed_s": saved["lightning_async"]["replicas"][rank()]["summary"]["elapsed_s"],
        "global_step": saved["global_step"],
    }


@scenario
def other_rule(folder: Path) -> Any:
    _train(1, save=folder)
    return _train(2, checkpoint=folder / "epoch=0.ckpt", strategy=AsyncAveragingStrategy(DeltaMean()))


@scenario
def rule_that_begins(folder: Path) -> Any:
    """Of the rule in the checkpoint there is no state."""
    _train(1, save=folder, strategy=AsyncAveragingStrategy(DeltaMean(), EveryNSteps(3), timeouts=PATIENT))
    told = []
    for rule in (DiLoCo(), DeltaMean()):
        strategy = AsyncAveragingStrategy(rule, EveryNSteps(3), timeouts=PATIENT)
        with logged() as messages:
            _train(2, checkpoint=folder / "epoch=0.ckpt", strategy=strategy)
        told.append([m for m in messages if "holds no state of a rule" in m])
    return told


@scenario
def saved_after_fit(folder: Path) -> Any:
    """`trainer.save_checkpoint` after the fit holds what a checkpoint of its end holds."""
    module = Net()
    trainer = make_trainer(diloco(), max_epochs=2)
    trainer.fit(module, loader(shard((6, 6), (3, 9))))
    trainer.save_checkpoint(folder / "end.ckpt")
    trainer.strategy.barrier()
    saved = torch.load(folder / "end.ckpt", weights_only=True) if rank() == 0 else {}
    return {"keys": sorted(saved), "state": _plain(saved["lightning_async"]) if "lightning_async" in saved else None}


@scenario
def saved_after_an_evaluation(folder: Path) -> Any:
    """By hand, after the fitted model was validated; and after weights of an earlier epoch were loaded into it."""
    module, data = Net(), loader(shard((6, 6), (3, 9)))
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(diloco(), max_epochs=2, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.save_checkpoint(folder / "end.ckpt")
    trainer.validate(module, data, ckpt_path=folder / "epoch=0.ckpt", verbose=False)
    trainer.save_checkpoint(folder / "earlier.ckpt")
    trainer.validate(Net(), data, verbose=False)
    trainer.save_checkpoint(folder / "other.ckpt")
    trainer.strategy.barrier()
    saved = {name: torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("end", "earlier", "other")}
    states = {name: c["lightning_async"] for name, c in saved.items() if "lightning_async" in c}
    weights = {name: torch.cat([t.flatten() for t in c["state_dict"].values()]) for name, c in saved.items()}
    return {
        "steps": {name: _plain(state)["step"] for name, state in states.items()},
        "gap": {name: float((s["rule_state"]["anchor"] - weights[name]).abs().max()) for name, s in states.items()},
    }


@scenario
def fit_after_an_evaluation(folder: Path) -> Any:
    """A checkpoint that was only looked at has no part in a fit: at a learning rate of zero nothing moves."""
    _train(1, save=folder)
    moved = {}
    for name, strategy in (("same rule", diloco()), ("other rule", AsyncAveragingStrategy(DeltaMean()))):
        data, trainer = loader(shard((6, 6))), make_trainer(strategy)
        trainer.validate(Net(), data, ckpt_path=folder / "epoch=0.ckpt", verbose=False)
        module = Net(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0))
        before = problem.flat(module)
        trainer.fit(module, data)
        moved[name] = problem.distance(before, problem.flat(module))
    return moved


@scenario
def loads_without_this_package(folder: Path) -> Any:
    """A checkpoint is an ordinary Lightning checkpoint."""
    told = _train(1, save=folder)
    module = Net()
    module.load_state_dict(torch.load(folder / "epoch=0.ckpt", weights_only=True)["state_dict"])
    return {"same": problem.digest(module) == told["digest"]}
