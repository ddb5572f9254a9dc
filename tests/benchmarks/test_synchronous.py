"""What the comparison of `Synchronous()` with DDP makes of its numbers, and a short run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.measured import Job, RankResult
from tests.benchmarks.synchronous import Compared, cpu_time, markdown, width_of
from tests.support import run_ranks

JOB = Job(peer="ddp", rank=0, num_replicas=2, interface="lo", warmup=1, steps=4)


def test_numbers_are_compared_within_a_repeat() -> None:
    """The machine is faster in one than in another."""
    found = Compared(about="1 MB", link="loopback", wall_ms=([2.0, 4.0, 9.0], [2.2, 3.0, 9.9]), cpu_ms=([1.0], [1.5]))
    assert found.row() == "| 1 MB | loopback | 4.00 | 3.00 | 1.100 | 1.00 | 1.50 | 1.500 |"
    assert len(markdown([found]).splitlines()) == 3
    assert cpu_time(JOB, [RankResult(cpu_s=[1.0, 1.8]), RankResult(cpu_s=[0.5, 1.7])]) == pytest.approx(0.25)


@pytest.mark.parametrize("megabytes", [1, 10, 100])
def test_the_wide_model_has_the_gradients_that_it_is_to_have(megabytes: float) -> None:
    assert 24 * width_of(megabytes) ** 2 * 4 == pytest.approx(1e6 * megabytes, rel=0.01)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_short_run_measures_both(tmp_path: Path) -> None:
    options = ["--quick", "--out", str(tmp_path)]
    main = "tests.benchmarks.synchronous:main"
    (done,) = run_ranks(main, 1, kwargs={"arguments": options}, timeout=220, launched=False, forks=True)
    assert done.value == 0, done
    assert (tmp_path / "synchronous.md").read_text() in done.stdout
    (found,) = json.loads((tmp_path / "synchronous.json").read_text())
    assert found["about"] == "1 MB"
    for numbers in (found["wall_ms"], found["cpu_ms"]):
        assert [len(each) for each in numbers] == [1, 1]
        assert all(each > 0.0 for (each,) in numbers)
