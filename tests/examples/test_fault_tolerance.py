"""The example that kills its own training: a short run of it, and that it would notice a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.fault_tolerance import Attempt, report
from tests.support import ROOT, run_ranks

WHOLE = Attempt({0: "0x1.0p+0", 1: "0x1.8p+0", 2: "0x1.cp+0"}, "its end")


@pytest.mark.processes
@pytest.mark.timeout(240)  # four processes, of which three come one after the other
def test_a_training_that_is_killed_is_equal_with_one_that_is_not(tmp_path: Path) -> None:
    (run,) = run_ranks(
        ROOT / "examples/fault_tolerance.py", 1, args=["--steps=100", "--seed=1"], env={"TMPDIR": str(tmp_path)},
        cwd=tmp_path, launched=False, forks=True, timeout=220,
    )  # fmt: skip
    assert "All 200 losses, and the weights at the end, are equal" in run.stdout
    assert "kill -9" in run.stdout
    assert not list(tmp_path.glob("fault-tolerance-*"))


def test_a_loss_that_is_repeated_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        Attempt({0: "0x1.0p+0", 1: "0x1.8p+0"}, "kill -9"),
        Attempt({1: "0x1.8p+0", 2: "0x1.cp+0"}, "its end"),
    )
    assert report(WHOLE, [first, second], weights_equal=True)
    assert "2        1 to 2  its end               1  2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("attempt", "weights_equal", "said"),
    [
        (WHOLE._replace(losses={**WHOLE.losses, 1: "0x1.8000000000001p+0"}), True, "batch 1 of attempt 1"),
        (Attempt({0: "0x1.0p+0", 1: "0x1.8p+0"}, "its end"), True, "batch 2 was never trained"),
        (WHOLE, False, "the weights at the end"),
        (Attempt({}, "its end"), True, "batch 0 was never trained"),
    ],
)
def test_a_difference_is_told(
    attempt: Attempt, weights_equal: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not report(WHOLE, [attempt], weights_equal)
    assert f"NOT equal with the training without interruption: {said}" in capsys.readouterr().out
