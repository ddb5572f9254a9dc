"""Whenever the power fails, the old checkpoint or the new one is whole; once a save has returned, the new one is.

The system calls of real saves are recorded, and every prefix is replayed on a disk that loses power (`disk`). The
same calls without some of their fsyncs show that this would find what is wrong.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_async.algorithms import Latest
from lightning_async.checkpoint.recovery import recover
from lightning_async.checkpoint.retention import prune
from lightning_async.checkpoint.storage import LocalFiles
from lightning_async.checkpoint.store import CheckpointStore, Manifest
from tests.checkpoint.disk import Call, Disk, Recorder
from tests.checkpoint.stores import assert_whole, save, write_ranks

STATES = 24
"""States of the disk that are drawn after each prefix."""


class Scenario:
    """Saves of a run, recorded: what was durable before, the calls, and what must be found from which call on."""

    def __init__(self, root: Path) -> None:
        self.root, self.recorder = root, Recorder()
        self.recorded = CheckpointStore(root / "runs" / "one", LocalFiles(self.recorder))
        self.promises: list[tuple[int, int]] = []
        """From this call on, this checkpoint must be found, or a newer one."""
        self.has_good = False
        """There is a good one at the start, so one must be there at any moment."""

    def promise(self, number: int) -> None:
        self.promises.append((len(self.recorder.calls), number))

    def problems(self, calls: list[Call], disk: Disk, work: Path) -> list[str]:
        """What a recovery gets wrong after a prefix of the calls; ends with the first prefix that shows anything."""
        seen: set[frozenset[tuple[str, bytes | None]]] = set()
        promises = dict(self.promises)
        least = 0
        for played in range(len(calls) + 1):
            if played:
                disk.play(calls[played - 1])
            if played in promises:
                least, seen = promises[played], set()
            source = random.Random(played)
            for _ in range(STATES):
                state = disk.after_power_loss(source)
                # What a folder holds that is no checkpoint makes no difference, but that it is there.
                key = frozenset(
                    (path, data) for path, data in state.items() if not re.search(r"\.(tmp|removed).*/", path)
                )
                if key in seen:
                    continue
                seen.add(key)
                wrong = self._wrong(state, least, work)
                if wrong:
                    return [f"after {played} of {len(calls)} calls, the last one {calls[:played][-1:]}: {wrong}"]
        return []

    def _wrong(self, state: dict[str, bytes | None], least: int, work: Path) -> str:
        for path, data in state.items():
            if data is None:
                (work / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
            else:
                (work / path.lstrip("/")).write_bytes(data)
        store = CheckpointStore(work / "runs" / "one")
        try:
            store.clean("next")
            found = recover(store)
            if found.damaged or found.unreadable:
                return f"a final name stood for something damaged: {found}"
            number = found.entry.number if found.entry else 0
            if number < least:
                return f"{number} was found, {least} had been committed"
            for entry in store.entries():
                assert_whole(store, entry)
            if self.has_good and not any(entry.good for entry in store.entries()):
                return "no good one is left"
            if store.next_number() <= number or store.clean("next"):
                return "numbers or remnants"
        finally:
            shutil.rmtree(work)
        return ""


def first_save(scenario: Scenario) -> None:
    """In a directory that is not there yet."""
    save(scenario.recorded, 1, ranks=(0,))
    scenario.promise(1)


def save_and_prune(scenario: Scenario) -> None:
    """Over two older checkpoints, one of which is good, so that one goes."""
    save(scenario.recorded, 4)
    scenario.promise(4)
    assert [entry.number for entry in prune(scenario.recorded, Latest(1))] == [1, 3]
    scenario.recorded.promote(scenario.recorded.entries()[0])
    assert [entry.number for entry in prune(scenario.recorded, Latest(1))] == [2]


def fail_and_save(scenario: Scenario) -> None:
    """What a dead run left is cleaned, a save is given up, the next one succeeds, a damaged one is put aside."""
    store = scenario.recorded
    store.clean("run")
    temporary = store.temporary(4, 40, "run")
    write_ranks(store, temporary, 4, (0,))
    store.discard(temporary)
    save(store, 5)
    scenario.promise(5)


def prepare_older(scenario: Scenario) -> None:
    store = CheckpointStore(scenario.recorded.dirpath)
    save(store, 1)
    store.promote(save(store, 2))
    save(store, 3)
    scenario.promise(3)
    scenario.has_good = True
    write_ranks(store, store.temporary(3, 40, "dead"), 4, (0, 1))


def play(
    prepare: Callable[[Scenario], None] | None, run: Callable[[Scenario], None], folder: Path
) -> tuple[Scenario, Callable[[], Disk]]:
    root, before = folder / "root", folder / "before"
    root.mkdir()
    scenario = Scenario(root)
    if prepare:
        prepare(scenario)
    shutil.copytree(root, before)

    def disk() -> Disk:
        loaded = Disk(before)
        loaded.root = str(root)
        return loaded

    run(scenario)
    return scenario, disk


@pytest.fixture(params=[(None, first_save), (prepare_older, save_and_prune), (prepare_older, fail_and_save)])
def played(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Scenario, Callable[[], Disk]]:
    before, scenario = request.param
    return play(before, scenario, tmp_path)


def test_after_every_prefix_the_old_or_the_new_one_is_whole(
    played: tuple[Scenario, Callable[[], Disk]], tmp_path: Path
):
    scenario, disk = played
    assert len(scenario.recorder.calls) > 15
    assert not scenario.problems(scenario.recorder.calls, disk(), tmp_path / "after")


WITHOUT = {
    "fsync of files": lambda call: call.path.rpartition("/")[2].startswith(("rank", "manifest")),
    "fsync of the new folder": lambda call: ".tmp-" in call.path.rpartition("/")[2],
    "fsync of the directory": lambda call: call.path.endswith("/one"),
}


@pytest.mark.parametrize("left_out", WITHOUT)
def test_without_an_fsync_that_would_be_found(
    played: tuple[Scenario, Callable[[], Disk]], tmp_path: Path, left_out: str
):
    scenario, disk = played
    nothing = Call("none", "")
    calls = [nothing if c.name == "fsync" and WITHOUT[left_out](c) else c for c in scenario.recorder.calls]
    assert nothing in calls
    assert scenario.problems(calls, disk(), tmp_path / "after")


@pytest.mark.parametrize("left_out", ["good.json", "000004-step-40"])
def test_without_an_fsync_the_mark_of_a_good_one_would_be_lost(tmp_path: Path, left_out: str):
    scenario, disk = play(prepare_older, save_and_prune, tmp_path)
    calls = scenario.recorder.calls
    calls = [Call("none", "") if c.name == "fsync" and c.path.endswith(f"/{left_out}") else c for c in calls]
    assert "no good one is left" in scenario.problems(calls, disk(), tmp_path / "after")[0]


def test_a_manifest_that_comes_first_would_be_found(tmp_path: Path):
    """Written under the final name, the manifest before the files: a part would stand for the whole."""
    root = tmp_path / "root"
    root.mkdir()
    scenario = Scenario(root)
    store = scenario.recorded
    final = store.final(1, 10)
    store.files.write(f"{final}/manifest.json", [Manifest(1, 10).to_bytes()])
    write_ranks(store, final, 1, (0,))
    (tmp_path / "before").mkdir()
    disk = Disk(tmp_path / "before")
    disk.root = str(root)
    assert "damaged" in scenario.problems(scenario.recorder.calls, disk, tmp_path / "after")[0]
