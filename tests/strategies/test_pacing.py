"""What a replica's time goes into, by a clock that the test moves."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_async.algorithms.schedules import Pace
from lightning_async.trainer.loops.timing import Pacing


class Loop:
    """Of Lightning's loop what is patched: a batch takes ``data``, then ``rest`` seconds."""

    def __init__(self) -> None:
        self.now = self.merged = 0.0
        self.sync_points = SimpleNamespace(
            waited_s=0.0, told=[], paces={}, tell_pace=lambda pace: self.sync_points.told.append(pace)
        )
        self.trainer = SimpleNamespace(
            fit_loop=SimpleNamespace(epoch_loop=self), callbacks=[], global_rank=0, strategy=None
        )
        strategy: Any = SimpleNamespace(sync_points=self.sync_points)
        self.pacing = Pacing(strategy, self.trainer, lambda: self.merged, lambda: self.now)
        self.undo = self.pacing.install()

    def _on_before_fetch(self) -> None: ...

    def _on_after_fetch(self) -> None: ...

    def advance(self, times: tuple[float, float, float, float]) -> None:
        data, compute, communication, waiting = times
        self._on_before_fetch()
        self.now += data
        self._on_after_fetch()
        self.pacing.samples = 8.0
        self.now += compute + communication + waiting
        self.merged += communication
        self.sync_points.waited_s += waiting


def test_times_are_told_apart_and_waiting_for_others_is_nobodys() -> None:
    loop = Loop()
    for _ in range(3):
        loop.advance((50.0, 50.0, 50.0, 50.0))  # the first ones are not measured
    for _ in range(19):
        loop.advance((1.0, 2.0, 0.5, 7.0))
    assert loop.sync_points.told == []
    loop.advance((1.0, 2.0, 0.5, 7.0))
    assert loop.sync_points.told == [loop.pacing.pace] == [loop.pacing.mean]
    assert loop.pacing.pace == pytest.approx(Pace(1.0, 2.0, 0.5, 8.0))
    for _ in range(100):
        loop.advance((1.0, 4.0, 0.5, 0.0))
    assert loop.pacing.pace.compute_s == pytest.approx(4.0, abs=0.02)  # of late
    assert loop.pacing.mean.compute_s == pytest.approx((20 * 2.0 + 100 * 4.0) / 120)  # of all
    for undo in loop.undo:
        undo()
    loop.advance((1.0, 100.0, 0.5, 0.0))
    assert loop.pacing.batches == 120


def test_a_straggler_is_named_once_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    for global_rank, warnings in ((0, 1), (1, 0)):
        caplog.clear()
        loop = Loop()
        loop.trainer.global_rank = global_rank
        loop.sync_points.paces = {"0": Pace(0.1, 1.0, 0.0, 8.0), "3": Pace(2.1, 1.0, 0.0, 8.0)}
        with caplog.at_level(logging.WARNING, "lightning_async.events"):
            for _ in range(40):
                loop.advance((1.0, 2.0, 0.5, 0.0))
        assert len(caplog.records) == warnings
        if warnings:
            assert "Rank 3 takes 2.8 times as long" in caplog.text and "100% of it for data" in caplog.text
            assert "[event=straggler rank=3 slower=2.82 reason=data]" in caplog.text
