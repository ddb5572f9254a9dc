"""What `lightning-async status` shows of a job that trains, loses ranks, and has one stopped: real processes."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_async.cli import status
from lightning_async.cli.status import StoreAddress
from lightning_async.membership.signing import SECRET
from tests.strategies.test_live_ranks import SURVIVE
from tests.support import start_ranks

pytestmark = pytest.mark.processes


def look_until(look: Callable[[], Any], true: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 100
    while not true(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_status_follows_a_job_that_loses_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port), SECRET: "of this job"}
    monkeypatch.setenv(SECRET, env[SECRET])
    kwargs = {"folder": str(tmp_path), "deaths": {}, "epochs": 1000, "pause_s": 0.05}
    place = StoreAddress.of(address)

    def look() -> dict[str, Any]:
        return json.loads(place.look().json())

    def states(job: dict[str, Any]) -> list[str]:
        return [replica["state"].partition(" ")[0] for replica in job["replicas"]]

    with start_ranks(SURVIVE, 3, kwargs=kwargs, env=env, timeout=200) as group:
        job = look_until(look, lambda job: len(job["replicas"]) == 3 and all(r["rounds"] for r in job["replicas"]))
        assert [replica["name"] for replica in job["replicas"]] == ["0", "1", "2"]
        assert [replica["process"] for replica in job["replicas"]] == [rank.pid for rank in group.processes]
        assert all(replica["steps_per_s"] < 25.0 and replica["samples"] > 0 for replica in job["replicas"])
        group.signal(0, signal.SIGKILL)
        numbers = [0, 1]  # of the other two, each of which says so itself
        job = look_until(look, lambda job: [r["rank"] for r in job["replicas"]][1:] == numbers)
        assert job["generation"] == 1
        job = look_until(look, lambda job: states(job)[0] == "lost")
        assert job["training"] == 2
        assert job["replicas"][1]["failed_rounds"] >= 1
        assert re.search(
            r"\[event=lost rank=0 was=1 generation=1 world_size=2 names=1,2\]\n", (group._folder / "1.err").read_text()
        )
        before = job["replicas"][2]["step"]
        group.signal(1, signal.SIGSTOP)
        job = look_until(look, lambda job: states(job) == ["lost", "lost", "trains"])
        look_until(look, lambda job: job["replicas"][2]["step"] > before)
        assert status.main([address]) == 0
        shown = capfd.readouterr().out
        assert f"{address}: 1 of 3 replicas train, in generation 2\n" in shown
        check_prometheus(place, {"0": 0.0, "1": 0.0, "2": 1.0})
    assert status.main([address]) == 0  # all have been killed, and the store has not
    assert f"{address}: 0 of 3" in capfd.readouterr().out or look_until(look, lambda job: job["training"] == 0)


def check_prometheus(place: StoreAddress, training: dict[str, float]) -> None:
    """The same numbers, by the endpoint."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families  # pyright: ignore[reportMissingImports]

    from lightning_async.monitor.status import serve

    port, close = serve(lambda: [place.look()], "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        close()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {s.labels["rank"]: s.value for s in families["lightning_async_training"].samples}
    assert samples == training
    assert {s.labels["store"] for s in families["lightning_async_steps"].samples} == {f"{place.host}:{place.port}"}
    assert all(sample.value > 0.0 for sample in families["lightning_async_steps"].samples)
