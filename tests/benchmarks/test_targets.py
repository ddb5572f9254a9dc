"""Steps and time to a loss of the mean model, as the benchmark takes them from the ranks' copies, and a short run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from tests.benchmarks import targets
from tests.benchmarks.language import Copies, LanguageModule, held_out
from tests.benchmarks.measured import Job, RankResult
from tests.benchmarks.model import Slot
from tests.benchmarks.targets import Means, Run
from tests.support import run_ranks


def write(folder: Path, rank: int, steps: list[int], moments: list[float], values: Tensor) -> None:
    """Copies of a rank, as it makes them itself."""
    numbers, parameters = Copies.files(folder, rank)
    numbers.write_text("".join(f"{step} {moment}\n" for step, moment in zip(steps, moments, strict=True)))
    parameters.write_bytes(values.numpy().tobytes())


def results(*first_ends: float) -> list[RankResult]:
    return [RankResult(ends=[first]) for first in first_ends]


def test_copies_are_of_the_parameters_after_so_many_steps(tmp_path: Path) -> None:
    job = Job(
        peer="", rank=1, num_replicas=2, interface="lo", warmup=0, steps=9, copies="", copy_from=2, copy_every=3
    )  # fmt: skip
    module, copies = torch.nn.Linear(1, 1), Copies(job, tmp_path)
    with torch.no_grad():
        for step in range(7):
            module.weight.fill_(float(step))
            module.bias.fill_(-float(step))
            copies.begin_step(module)
    numbers, parameters = Copies.files(tmp_path, 1)
    assert [int(line.split()[0]) for line in numbers.read_text().splitlines()] == [2, 5]
    assert torch.frombuffer(bytearray(parameters.read_bytes()), dtype=torch.float32).tolist() == [2.0, -2.0, 5.0, -5.0]


def test_the_mean_of_the_replicas_is_judged_and_not_the_replicas(tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = LanguageModule(Slot(), 1e-3, 1)
    mine = parameters_to_vector(module.parameters()).detach()
    apart = 0.1 * torch.randn_like(mine)
    for rank, values in enumerate((mine + apart, mine - apart)):
        write(tmp_path, rank, [8], [5.0], values)
    assert Means(tmp_path, results(1.0, 1.0)).loss(0) == pytest.approx(held_out(module), rel=1e-4)


def test_the_target_is_reached_where_three_looks_are_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank is half as fast, and begins a second later: its copies say when, and the first has more steps."""
    write(tmp_path, 0, list(range(0, 100, 5)), [10.0 + 0.5 * i for i in range(20)], torch.zeros(20, 1))
    write(tmp_path, 1, list(range(0, 50, 5)), [11.0 + i for i in range(10)], torch.zeros(10, 1))
    means = Means(tmp_path, results(10.0, 11.0))
    assert means.seconds == [float(i) for i in range(10)]
    assert means.steps[:3] == [5.0, 12.5, 20.0]
    losses = [6.0, 5.0, 4.0, 0.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]  # one look of chance is no model that is as good
    monkeypatch.setattr(means, "loss", losses.__getitem__)
    assert means.around(3) == 3.0 and means.around(-1) == 0.5
    assert means.reach(2.5) == pytest.approx((5.0 + 7.5 * 6.5, 6.5))
    assert means.reach(0.5) is None
    assert means.reach(9.0) == (12.5, 1.0)
    monkeypatch.setattr(means, "loss", lambda look: math.nan)
    assert means.reach(9.0) is None


def run(lr: float, seed: int, steps: float | None, seconds: float | None, last_loss: float = 2.0) -> Run:
    return Run(
        lr=lr, seed=seed, steps=steps, seconds=seconds, step_ms=60.0, mb_per_step=0.0312, last_loss=last_loss
    )  # fmt: skip


def test_the_table_has_medians_over_the_seeds_at_the_best_rate_of_each_peer() -> None:
    free = [run(1e-3, 0, 500, 30.0), run(2e-3, 0, None, None), run(1e-3, 1, 600, 36.0), run(1e-3, 2, 400, 24.0)]
    ours = [run(1e-3, 0, 700, 42.0), run(2e-3, 0, 450, 30.0), run(2e-3, 1, 480, 27.0), run(2e-3, 2, 480, 28.8)]
    never = [run(1e-3, 0, None, None, math.nan), run(2e-3, 0, None, None, 2.5)]
    runs = {targets.FREE: free, "ours": ours, "others": never}
    assert targets.best_rate(never, 0) == 2e-3
    assert run(1e-3, 0, 500, 30.0).at(0.7, 6.7).seconds == pytest.approx(350.0)
    assert targets.markdown(runs, {"failed": "rank 1 ended\nwith lines"}, 0).splitlines()[2:] == [
        "| ddp free | 0.001 | 500 | 1.00 | 30.0 | 1.00 | 60.0 | 31.2 | 2.0000 |",
        "| ours | 0.002 | 480 | 0.90 | 28.8 | 1.00 | 60.0 | 31.2 | 2.0000 |",
        "| others | 0.002 | never |  | never |  | 60.0 | 31.2 | 2.5000 |",
        "| failed | failed: rank 1 ended | | | | | | | |",
    ]


def test_ddp_is_always_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert targets.parse(["--out", "x", "--peers", "ours"]).peers == ["ddp", "ours"]
    with pytest.raises(SystemExit):
        targets.parse(["--out", "x", "--steps", "19"])
    assert "19" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_quick_run_writes_table_and_numbers(tmp_path: Path) -> None:
    options = {"arguments": ["--quick", "--out", str(tmp_path)]}
    main = "tests.benchmarks.targets:main"
    (done,) = run_ranks(main, 1, kwargs=options, timeout=220, launched=False, forks=True)
    assert done.value == 0, done
    assert (tmp_path / "targets.md").read_text() in done.stdout
    told = json.loads((tmp_path / "targets.json").read_text())
    assert list(told["runs"]) == ["ddp free", *targets.QUICK_PEERS]
    assert 2.5 < told["target"] < 4.0 < math.log(105)
    for peer, (only,) in told["runs"].items():
        assert only["last_loss"] < told["target"], peer
        assert only["curve"][-1][2] < only["curve"][0][2], peer
        assert 10 <= only["steps"] <= 26 and only["seconds"] > 0.0, peer
    assert (tmp_path / "targets.svg").read_text().startswith("<?xml")
    assert told["runs"]["ddp free"][0]["steps"] == told["runs"]["ddp"][0]["steps"]
