"""Two ranks in lockstep over Horovod, of which one goes wrong."""

from __future__ import annotations

from typing import Any

from lightning_async import HorovodStrategy
from lightning_async.callbacks.divergence import DivergenceMonitor
from tests.callbacks.problem import Line
from tests.callbacks.ranks import HISTORY, NAN, fit, on_rank_1
from tests.strategies.workers import scenario


@scenario
def skips_a_gradient_of_one_rank_on_all() -> Any:
    return fit(HorovodStrategy(), Line(on_rank_1({9: NAN})), DivergenceMonitor(), n=20)


@scenario
def cuts_learning_rates_together() -> Any:
    monitor = DivergenceMonitor(signals=["loss"], remedies=["log", "cut_lr"], history=HISTORY)
    return fit(HorovodStrategy(), Line(on_rank_1({15: 1e3, 21: 1e3})), monitor, n=30)
