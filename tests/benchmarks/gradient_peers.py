"""Gradients of several batches a step: DDP with accumulation, and windows in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, Strategy

from tests.benchmarks.delays import begin
from tests.benchmarks.fitting import Peer, claims_of, fit
from tests.benchmarks.language import SAMPLES, Looks, language
from tests.benchmarks.measured import Job, RankResult

__all__ = ["BEGINNING", "PEERS"]


def _train(
    job: Job, strategy: Strategy, batches: int, late: bool = False, accumulate: int = 1, *callbacks: pl.Callback
) -> RankResult:
    looks, work = Looks(job), language(batches, late)
    result = fit(job, strategy, looks, *callbacks, num_nodes=job.num_replicas, accumulate=accumulate, work=work)
    result.held_out = looks.judge()
    return result


class Hooked(pl.Callback):
    """Gives DDP a communication hook: Lightning leaves out its `ddp_comm_hook` on CPUs, silently."""

    def __init__(self, state: Any, hook: Callable[..., Any]) -> None:
        self._state, self._hook = state, hook

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.model.register_comm_hook(self._state, self._hook)  # pyright: ignore


def _bf16_hook() -> Hooked:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook  # noqa: TID251 (a peer)

    # DDP refuses the hook itself where there is no NCCL, though Gloo adds up bf16, too. It also refuses annotations
    # that are strings, as all of this module are: hence a lambda.
    return Hooked(None, lambda state, bucket: bf16_compress_hook(state, bucket))


def _powersgd_hook() -> Hooked:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power  # noqa: TID251 (a peer)

    state = power.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=10)
    return Hooked(state, power.powerSGD_hook)


def _ddp(
    about: str, batches: int, hook: Callable[[], Hooked] | None = None, share: float = 1.0, **options: Any
) -> Peer:
    """``share``: of the bytes of an exchange, that are left; ``options``: of DDP."""

    def run_ddp(job: Job) -> RankResult:
        strategy = DDPStrategy(process_group_backend="gloo", **options)
        return _train(job, strategy, batches, False, batches, *([] if hook is None else [hook()]))

    return Peer(
        about=about,
        run=run_ddp,
        batch=SAMPLES,
        compressed=share < 1.0,
        update_s=lambda batch_s, exchange_s: batches * batch_s + share * exchange_s,
    )


# The hook's second exchange of a bucket starts on a thread of Gloo's: with two buckets, ranks differ in the order of
# their collectives, and end.
_ONE_BUCKET: dict[str, Any] = {"bucket_cap_mb": 64}


def _windows(
    about: str,
    accumulate: Any,
    batches: int,
    correction: Callable[[Any], Any] | None = None,
    late: bool = True,
    share: float = 1.0,
    **options: Any,
) -> Peer:
    """``batches``: that a window is likely to have; ``correction``: of the package."""

    def run_windows(job: Job) -> RankResult:
        import lightning_async

        size: Any = accumulate(lightning_async) if callable(accumulate) else accumulate
        made = None if correction is None else correction(lightning_async)
        strategy = lightning_async.AsyncGradientStrategy(size, correction=made, **options)
        result = _train(job, strategy, batches, late)
        result.claims = claims_of(strategy)
        return result

    def update_s(batch_s: float, exchange_s: float) -> float:
        computes, travels = batches * batch_s, share * exchange_s
        if accumulate == "until_reduced":
            return travels + batch_s / 2  # it ends with a batch
        return computes + travels if options.get("delay") == 0 else max(computes, travels)

    return Peer(about=about, run=run_windows, batch=SAMPLES, ours=True, compressed=share < 1.0, update_s=update_s)


def _until_reduced(about: str, correction: Callable[[Any], Any] | None = None) -> Peer:
    return _windows(f"accumulate='until_reduced'{about}", "until_reduced", 8, correction)


def _served(mode: str) -> Peer:
    def run_served(job: Job) -> RankResult:
        import lightning_async

        strategy = lightning_async.ParameterServerStrategy(mode, num_servers=1)
        result = _train(job, strategy, 1)
        result.claims = claims_of(strategy)
        return result

    return Peer(
        about=f"ParameterServerStrategy({mode!r}), one server", run=run_served, batch=SAMPLES, ours=True,
        timed=True, update_s=lambda batch_s, exchange_s: batch_s,
    )  # fmt: skip


def _begin(job: Job) -> RankResult:
    assert job.begin is not None
    begin(Path(job.begin), job.steps, job.num_replicas, job.rates[0], job.seed)
    return RankResult()


BEGINNING = Peer(about="trains the model that others begin with", run=_begin, alone=True)
PEERS: dict[str, Peer] = {
    **{f"ddp accumulate={n}": _ddp(f"DDPStrategy, accumulate_grad_batches={n}", n) for n in (1, 2, 4, 8, 16)},
    "ddp accumulate=8, bf16 hook": _ddp("accumulate_grad_batches=8, torch's bf16_compress_hook", 8, _bf16_hook, 0.5),
    "ddp accumulate=8, PowerSGD hook": _ddp(
        "accumulate_grad_batches=8, torch's, rank 1", 8, _powersgd_hook, 0.1, **_ONE_BUCKET
    ),
    "ddp accumulate=1, bf16 hook": _ddp("DDPStrategy, torch's bf16_compress_hook", 1, _bf16_hook, 0.5),
    "ddp accumulate=1, PowerSGD hook": _ddp("DDPStrategy, torch's, rank 1", 1, _powersgd_hook, 0.1, **_ONE_BUCKET),
    "windows of 1, int8, no delay": _windows(
        "ours, gradients, accumulate=1, delay=0, int8", 1, 1, late=False, share=0.25, delay=0, compression="int8"
    ),
    "windows of 1, int8": _windows(
        "ours, gradients, accumulate=1, delay=1, int8", 1, 1, share=0.25, compression="int8"
    ),
    "windows of 1, PowerSGD": _windows(
        "ours, gradients, accumulate=1, delay=1, PowerSGD(1)", 1, 1, share=0.1, compression="powersgd"
    ),
    "windows of 1, PowerSGD, no delay": _windows(
        "ours, gradients, accumulate=1, delay=0, PowerSGD(1)",
        1,
        1,
        late=False,
        share=0.1,
        delay=0,
        compression="powersgd",
    ),
    "windows of 8": _windows("ours, gradients, accumulate=8, delay=1", 8, 8),
    "windows of 8, no delay": _windows("the same, delay=0", 8, 8, late=False, delay=0),
    "windows of 8, int8": _windows("accumulate=8, delay=1, int8", 8, 8, share=0.25, compression="int8"),
    "windows of 8, PowerSGD": _windows("accumulate=8, PowerSGD(1)", 8, 8, share=0.1, compression="powersgd"),
    "servers, sync": _served("sync"),
    "servers, async": _served("async"),
    "windows balanced": _windows("accumulate=BalancedWindows(4)", lambda package: package.BalancedWindows(4), 4),
    "windows until reduced": _until_reduced(""),
    "windows until reduced, compensated": _until_reduced(
        ", DelayCompensation()", lambda package: package.DelayCompensation()
    ),
    "windows until reduced, predicted": _until_reduced(
        ", WeightPrediction()", lambda package: package.WeightPrediction()
    ),
    "windows until reduced, predicted by 2": _until_reduced(
        ", WeightPrediction(2.0)", lambda package: package.WeightPrediction(2.0)
    ),
}
