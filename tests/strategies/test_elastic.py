"""`fit_elastic` under a real `horovodrun` with two loopback "hosts", one of which comes, and dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import pytest
import torch

from tests.horovod import needs_horovod
from tests.strategies.elastic_script import HOLDS_AT, SAMPLES, VALIDATED, Module
from tests.strategies.test_live_ranks import logged
from tests.support import ROOT, Process, _start, shell_environment

pytestmark = pytest.mark.processes

SCRIPT = ROOT / "tests/strategies/elastic_script.py"
KINDS = "WORLD", "STEP", "COMMIT", "BEGINS", "VALIDATED", "HOLDS", "DONE", "SECOND", "ENDED"


class Line(NamedTuple):
    kind: str
    pid: int
    values: list[str]


class Step(NamedTuple):
    pid: int
    rank: int
    world_size: int
    epoch: int
    step: int
    at: float
    weight: float
    samples: list[int]


def read(log: Path) -> list[Line]:
    told = []
    for line in log.read_text(errors="replace").splitlines(keepends=True):
        kind, *values = (line.partition("<stdout>:")[2] or line).split() or [""]
        if kind in KINDS and line.endswith("\n"):
            told.append(Line(kind, int(values[0]), values[1:]))
    return told


def step_of(line: Line) -> Step:
    rank, world_size, epoch, step = map(int, line.values[:4])
    at, weight = map(float, line.values[4:6])
    return Step(line.pid, rank, world_size, epoch, step, at, weight, list(map(int, line.values[6].split(","))))


def name_hosts(folder: Path, *hosts: str) -> None:
    """What the discovery script says from now on."""
    script, text = folder / "new.sh", "#!/bin/sh\n" + "".join(f"echo {host}\n" for host in hosts)
    if (folder / "hosts.sh").exists() and (folder / "hosts.sh").read_text() == text:
        return
    script.write_text(text)
    script.chmod(0o755)
    script.replace(folder / "hosts.sh")


def kill_with_workers(pid: int) -> None:
    """As where a host is lost."""
    children = [child for told in Path(f"/proc/{pid}/task").glob("*/children") for child in told.read_text().split()]
    for each in (pid, *map(int, children)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


class Ranks:
    """Forks what horovodrun's processes ask for in a folder, see `elastic_rank`."""

    def __init__(self, folder: Path, how: str, out: IO[bytes]) -> None:
        self._folder, self._how, self._out = folder, how, out
        self._processes: dict[Path, Process] = {}

    def serve(self) -> None:
        for request in self._folder.glob("rank-*.json"):
            if request not in self._processes:
                told: dict[str, str] = json.loads(request.read_text())
                own = {name: value for name, value in told.items() if name.startswith(("HOROVOD_", "GLOO_"))}
                self._processes[request] = _start(
                    len(self._processes), SCRIPT, [self._how], shell_environment() | own, self._folder, self._out,
                    self._out, fresh=False, forks=False,
                )  # fmt: skip
            if (status := self._processes[request].poll()) is not None:
                request.with_suffix(".ended").write_text(str(status))

    def kill(self) -> None:
        for each in self._processes.values():
            if each.poll() is None:
                each.kill()
        for request in self._folder.glob("rank-*.json"):
            request.unlink()


def run(folder: Path, watch: Callable[[list[Line]], None], how: str, limit_s: float = 200.0) -> list[Line]:
    """Start on the hosts that `name_hosts` named, let ``watch`` act on what was told so far, and wait for the end."""
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "-np", "1", "--min-np", "1", "--max-np", "2"]
    command = [*launcher, "--host-discovery-script", str(folder / "hosts.sh"), "--network-interface", "lo"]
    log = folder / "log"
    deadline = time.monotonic() + limit_s
    with log.open("ab") as out:
        job = subprocess.Popen(
            [*command, sys.executable, "-S", str(SCRIPT.with_name("elastic_rank.py"))], cwd=folder,
            env=shell_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        ranks = Ranks(folder, how, out)
        try:
            while job.poll() is None:
                assert time.monotonic() < deadline, log.read_text()[-6000:]
                ranks.serve()
                watch(read(log))
                time.sleep(0.05)
            told = read(log)
            assert any(line.kind == "ENDED" for line in told), log.read_text()[-6000:]
            return told
        finally:
            ranks.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def committed(told: list[Line]) -> list[Step]:
    """The steps that were not gone back behind."""
    since, found = defaultdict[int, list[Step]](list), []
    for line in told:
        if line.kind == "STEP":
            since[line.pid].append(step_of(line))
        elif line.kind == "COMMIT":
            found += since.pop(line.pid, [])
        elif line.kind == "WORLD":
            since.pop(line.pid, None)
    return found


def replayed(steps: list[Step]) -> float:
    """The weight after synchronous steps with these batches, in one process."""
    module = Module()
    optimizer = module.configure_optimizers()
    for step in sorted({each.step for each in steps}):
        ranks = [each for each in steps if each.step == step]
        assert len(ranks) == ranks[0].world_size
        optimizer.zero_grad()
        for each in ranks:
            x = torch.tensor(each.samples, dtype=torch.float32).view(-1, 1)
            loss = (module.layer(x / SAMPLES) - 1.0).pow(2).mean()
            (loss * each.weight / len(ranks)).backward()
        optimizer.step()
    return float(module.layer.weight.detach())


@pytest.mark.alone
@needs_horovod
@pytest.mark.parametrize("how", ["horovod", "averaging", "gradients"])
def test_a_host_comes_and_another_is_lost_and_each_sample_is_in_committed_work_once(tmp_path: Path, how: str) -> None:
    """One rank; a host comes; there is news of hosts, and the same ranks begin again; one is lost.

    `HorovodStrategy` with two workers for its data and with saves beside the commits, averaging and windows of
    gradients without. Then the survivor validates, and fits again.
    """
    killed: dict[int, float] = {}

    def watch(so_far: list[Line]) -> None:
        if holds := [line.pid for line in so_far if line.kind == "HOLDS" and not killed]:
            killed[holds[0]] = time.time()
            kill_with_workers(holds[0])
        elif not killed and any(step_of(line).step > 5 for line in so_far if line.kind == "STEP"):  # behind a commit
            name_hosts(tmp_path, "localhost:1", "127.0.0.1:1")

    name_hosts(tmp_path, "localhost:1")
    told = run(tmp_path, watch, how)
    ((victim, killed_at),) = killed.items()
    check(told, victim, killed_at, how)
    # One file of four worlds with a Trainer each, and of what follows the fit. What is done again is logged again.
    epochs = [row["epoch"] for row in logged(tmp_path / "logs") if row["val_loss"]]
    assert sorted({*epochs}) == ["0", "1", "2"]
    assert epochs == sorted(epochs)
    if how == "horovod":
        (done,) = [line for line in told if line.kind == "DONE"]
        saved = sorted(each.name for each in (tmp_path / "checkpoints").glob("*-step-*"))
        assert saved[-1].endswith(f"-step-{done.values[0]}"), "saves go on beside commits"
        assert "until this: HostsUpdatedInterrupt" not in (tmp_path / "log").read_text(), "nothing has failed"


def check(told: list[Line], victim: int, killed_at: float, how: str) -> None:
    first = told[: next(i for i, line in enumerate(told) if line.kind == "SECOND")]
    steps, kept = [step_of(line) for line in first if line.kind == "STEP"], committed(first)
    worlds = [line.pid for line in first if line.kind == "WORLD"]
    survivor = worlds[0]
    assert worlds.count(survivor) == 4 and worlds.count(victim) == 2

    # Data.
    for epoch in range(2):
        dealt = sorted(x for step in kept if step.epoch == epoch and step.weight > 0.0 for x in step.samples)
        assert dealt == list(range(SAMPLES)), "each once, in spite of all that happened"
    seen = [line.values for line in first[: _done(first)] if line.kind == "VALIDATED"]
    for epoch in ("0", "1"):
        validated = sorted(int(x) for of, text in seen if of == epoch for x in text.split(","))
        assert validated == list(range(VALIDATED))

    # Going on.
    after = [step for step in steps if step.at > killed_at and step.world_size == 1]
    print(f"back in training {after[0].at - killed_at:.2f} s after the kill")
    assert {step.pid for step in after} == {survivor}
    assert after[0].at - killed_at < 40.0, "on a quiet machine it is a second; what waits in silence does so for 150"
    lost = [step for step in steps if step.pid == survivor and step not in kept]
    batches = 2 if how == "gradients" else 1  # of a step
    assert len(lost) <= batches * 5 + HOLDS_AT + batches, "of steps that were taken since a commit"
    assert lost or how != "horovod"
    (done,) = [line for line in first if line.kind == "DONE"]
    if how == "horovod":
        assert [step.weight for step in kept if step.weight != 1.0] in ([2.0, 0.0], [0.0, 2.0])
        assert float(done.values[1]) == pytest.approx(replayed(kept), abs=1e-5)
    elif how == "averaging":
        begins = [list(map(float, line.values)) for line in first if line.kind == "BEGINS"]
        assert len(begins) == 4, "twice, of two replicas"
        (first_step, *_), (_, first_rounds, _), again, beside = begins
        assert first_step == 0.0
        assert again[1:] == beside[1:] and min(again) > 0.0 and again[1] > first_rounds, "DiLoCo goes on"

    # Afterwards.
    last = [step_of(line) for line in told[len(first) :] if line.kind == "STEP"]
    assert sorted(x for step in last for x in step.samples) == sorted([*range(12)] * 2), (
        "a stream is of those that are there"
    )


def _done(told: list[Line]) -> int:
    """What follows is no part of the fit."""
    return next(i for i, line in enumerate(told) if line.kind == "DONE")
