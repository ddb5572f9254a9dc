"""What deaths cost: the arithmetic by table, and short runs of both programs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import elastic, soak
from tests.benchmarks.elastic_report import Outcome, write
from tests.benchmarks.elastic_trace import Death, Life, Traces, alike, alive, measure_death, measure_return
from tests.support import ROOT, run_ranks


def commit(t: float, id: int, members: str, digest: str = "a", failed: int = 0) -> dict[str, Any]:
    said = {"run": 1, "id": id, "members": list(members), "digest": digest, "failed": failed}
    return {"what": "commit", "t": t, **said}


def step(t: float, gap: float, gated: bool = False) -> dict[str, Any]:
    return {"what": "step", "t": t, "gap": gap, "gated": gated}


def life(name: str, *events: dict[str, Any]) -> Life:
    return Life(name, 100 + int(name), list(events))


BEFORE = [commit(1.0, 1, "012"), commit(1.5, 2, "012"), commit(2.0, 3, "012")]


def test_a_death_is_measured_to_the_last_survivors_next_round_without_the_dead():
    first = life("0", *BEFORE, commit(3.0, 4, "02", failed=1), step(2.9, 0.01))
    second = life(
        "2", *BEFORE, step(2.3, 5.0, gated=True), commit(3.2, 4, "02", failed=1), step(3.3, 0.2), step(9.0, 7.0)
    )
    death = measure_death([first, second], "merge", ["1"], 2.25)
    assert death is not None
    assert (death.place, death.name, death.ranks, death.repeated, death.alike) == ("merge", "1", 3, 1, True)
    assert death.recovery_s == pytest.approx(0.95)
    assert death.period_s == 0.5
    assert death.excess_s == pytest.approx(0.45)
    assert death.pause_s == 0.2


def test_a_round_with_the_dead_is_not_the_next_one():
    answered = life("0", *BEFORE, commit(2.26, 4, "012"))
    assert measure_death([answered], "commit", ["1"], 2.25) is None
    assert measure_death([life("0", *BEFORE, commit(3.0, 4, "0"))], "commit", ["1"], 2.25) is not None


def test_replicas_that_committed_different_bits_are_not_alike():
    assert alike([life("0", commit(1.0, 1, "01")), life("1", commit(1.1, 1, "01"))])
    assert not alike([life("0", commit(1.0, 1, "01")), life("1", commit(1.1, 1, "01", "b"))])
    ends = [{"what": "end", "t": 2.0, "digest": digest} for digest in "ab"]
    assert not alike([life("0", ends[0]), life("1", ends[1])])


def test_a_return_is_measured_from_the_kill_to_its_first_round():
    other = life("0", *BEFORE, step(9.0, 3.0), step(10.5, 0.04), step(11.0, 0.2, gated=True), step(20.0, 7.0))
    back = life("1", {"what": "start", "t": 10.0}, commit(12.0, 9, "012"))
    found = measure_return([other], back, 2.0)
    assert (found.name, found.ranks, found.away_s, found.joining_s, found.pause_s) == ("1", 3, 10.0, 2.0, 0.2)


def test_a_line_that_is_not_whole_yet_is_read_later(tmp_path: Path):
    path, traces = tmp_path / "trace-2-4711.jsonl", Traces(tmp_path)
    path.write_text(json.dumps(step(1.0, 0.1)) + "\n" + '{"what": "end", ')
    (found,) = traces.read()
    assert (found.name, found.process, len(found.events), found.ended) == ("2", 4711, 1, False)
    path.write_text(path.read_text() + '"t": 2.0, "digest": "a"}\n')
    assert traces.read()[0].ended


def test_a_number_that_another_process_has_taken_is_no_sign_of_life():
    mine = os.getpid()
    assert alive(mine) and alive(mine, by=time.monotonic())
    assert not alive(mine, by=1.0), "a second after the machine had started"
    assert Life("0", mine, [step(time.monotonic(), 0.0)]).alive and not Life("0", mine, [step(1.0, 0.0)]).alive


def test_samples_of_a_killed_process_count_up_to_its_last_round():
    events = [step(float(t), 0.0) for t in range(1, 6)] + [commit(3.5, 1, "01")]
    assert soak.kept(life("0", *events), killed=True, since=1.5, until=9.0) == 2
    assert soak.kept(life("0", *events), killed=False, since=1.5, until=9.0) == 4


@pytest.mark.processes
@pytest.mark.timeout(230)
@pytest.mark.parametrize(
    ("scenario", "places"), [("averaging", ("payload", "optimizer", "merge")), ("synchronous", ("payload", "commit"))]
)
def test_ranks_die_in_a_collective_an_optimizers_step_and_a_merge_and_numbers_come_out(
    scenario: str, places: tuple[str, ...], tmp_path: Path
):
    kills, ranks = len(places), len(places) + 2
    options = ["--scenario", scenario, "--kills", str(kills), "--ranks", str(ranks), "--places", *places, "--untold"]
    options += ["--out", str(tmp_path)]
    (done,) = run_ranks(
        "tests.benchmarks.elastic:main", 1, kwargs={"arguments": options}, timeout=200, launched=False, forks=True
    )
    assert done.value == 0, done
    assert (tmp_path / "elastic.md").read_text() in done.stdout
    assert (tmp_path / "elastic.png").read_bytes().startswith(b"\x89PNG")
    (outcome,) = json.loads((tmp_path / "elastic.json").read_text())["outcomes"]
    deaths = outcome["deaths"]
    assert [(death["place"], death["ranks"], death["alike"]) for death in deaths] == [
        (place, ranks - dead, True) for dead, place in enumerate(places)
    ]
    assert deaths[0]["repeated"] == 1 and all(death["repeated"] <= 1 for death in deaths)
    assert (outcome["codes"], outcome["errors"]) == ([0], [])
    for target in (f"pass: {scenario}: rounds repeated: 1.000 (<= 1.0)", f"pass: {scenario}: errors: 0.000 (<= 0.0)"):
        assert target in done.stdout
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"]  # nothing of the run is left


@pytest.mark.parametrize(("strict", "status"), [((), 0), (("--strict",), 1)])
def test_a_target_that_is_missed_is_a_failure_where_that_is_asked_for(
    strict: tuple[str, ...], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    late = Death(
        place="merge", name="1", ranks=3, recovery_s=3.0, period_s=0.5, pause_s=0.1, repeated=1, alike=True
    )  # fmt: skip

    def measure(options: argparse.Namespace, command: str) -> list[Outcome]:
        outcomes = [Outcome(name="averaging", deaths=[late], codes=[0])]
        write(options.out, [command], outcomes)
        return outcomes

    monkeypatch.setattr(elastic, "measure", measure)
    assert elastic.main(["--out", str(tmp_path), *strict]) == status
    assert (
        "FAIL: averaging: s to the next round, beyond the period (p95): 2.500 (<= 1.0)"
        in (tmp_path / "elastic.md").read_text()
    )


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_asks_for_the_targets_and_installs_what_the_soak_compares_with():
    shown = subprocess.run(
        ["make", "-n", "kills", "soak", "VENV=none", "KILLS=100"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "tests.benchmarks.elastic --out runs/elastic --strict --kills 100" in shown
    assert "tests.benchmarks.soak --out runs/elastic --strict --seconds 600" in shown
    assert '--editable ".[soak]"' in shown
    extra = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("soak = "))
    assert "torchft==" in extra


@pytest.mark.benchmark
def test_a_short_soak(tmp_path: Path):
    options = ["--seconds", "12", "--free-seconds", "4", "--every", "5", "--ranks", "3", "--out", str(tmp_path)]
    assert soak.main(options) == 0
    result = json.loads((tmp_path / "soak.json").read_text())["ours"]
    assert result["kills"] >= 1 and result["alike"] and result["fault_free"] > 0.0
