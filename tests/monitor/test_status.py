"""What all replicas' records say together, by table."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from lightning_async.membership.status import StatusRecord
from lightning_async.monitor.status import JobStatus

NOW = 1000.0


def said(name: str, **fields: Any) -> StatusRecord:
    base = StatusRecord(
        name=name, rank=int(name), members=("0", "1", "2"), run=1, state="trains", process=100 + int(name), host="here",
        at=NOW - 0.5, step=50, steps_per_s=40.0, rounds=5, round_ago_s=0.25, round_s=0.012,
    )  # fmt: skip
    return replace(base, **fields)


def states(*standings: StatusRecord) -> dict[str, str]:
    job = JobStatus.of("store:1", standings, NOW)
    return {replica.standing.name: replica.state for replica in job.replicas}


def test_all_train_and_one_lags():
    job = JobStatus.of("store:1", [said("2", step=30), said("0"), said("1")], NOW)
    assert [(r.standing.name, r.state, r.lag, r.restarts) for r in job.replicas] == [
        ("0", "trains", 0, 0), ("1", "trains", 0, 0), ("2", "trains", 20, 0),
    ]  # fmt: skip
    assert job.training == 3
    assert job.table().splitlines() == [
        "store:1: 3 of 3 replicas train, in generation 0",
        "rank  now  state   epoch  step  steps/s  lag  rounds   last   took  failed  hidden  restarts      process",
        "0       0  trains      0    50     40.0    0       5  0.8 s  12 ms       0    100%         0  100 on here",
        "1       1  trains      0    50     40.0    0       5  0.8 s  12 ms       0    100%         0  101 on here",
        "2       2  trains      0    30     40.0   20       5  0.8 s  12 ms       0    100%         0  102 on here",
    ]
    found = json.loads(job.json())
    assert [replica["name"] for replica in found["replicas"]] == ["0", "1", "2"]
    assert found["replicas"][2] | {"lag": 20, "step": 30, "state": "trains", "rounds": 5} == found["replicas"][2]


def test_one_is_silent_and_then_lost_to_the_others():
    stopped = said("1", at=NOW - 60.0)
    assert states(said("0"), stopped, said("2")) == {"0": "trains", "1": "silent", "2": "trains"}
    after = {"members": ("0", "2"), "generation": 1}
    assert states(said("0", **after), stopped, said("2", rank=1, **after)) == {
        "0": "trains",
        "1": "lost",
        "2": "trains",
    }
    job = JobStatus.of("store:1", [said("0", **after), stopped, said("2", rank=1, **after)], NOW)
    assert (job.training, job.generation) == (2, 1)
    assert "1       -  lost (60 s)" in job.table()
    assert "in generation 1" in job.table()


def test_one_that_the_others_left_out_is_lost_though_it_is_heard():
    after = {"members": ("0",), "generation": 1}
    assert states(said("0", **after), said("1")) == {"0": "trains", "1": "lost"}


def test_one_that_came_back_is_one_replica_with_a_restart():
    job = JobStatus.of("store:1", [said("0"), said("1", at=NOW - 30.0), said("1", process=7, step=40)], NOW)
    assert [(r.standing.process, r.state, r.lag, r.restarts) for r in job.replicas] == [
        (100, "trains", 0, 0), (7, "trains", 10, 1),
    ]  # fmt: skip
    again = JobStatus.of("store:1", [said("0", run=1), said("0", run=2, restarts=3)], NOW)
    assert [r.restarts for r in again.replicas] == [3]  # another run of one process is no restart


def test_those_that_have_ended_are_not_silent():
    assert states(said("0", state="ended", at=NOW - 60.0), said("1", state="failed", at=NOW - 60.0)) == {
        "0": "ended", "1": "failed",
    }  # fmt: skip


def test_before_anybody_trains():
    assert JobStatus.of("store:1", [], NOW).table() == "store:1: no replica has trained yet"
    assert json.loads(JobStatus.of("store:1", [], NOW).json())["replicas"] == []
