"""The directory of checkpoints: a final name stands for a whole checkpoint, whatever fails and whatever is damaged."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from lightning_async.algorithms import Latest
from lightning_async.checkpoint.recovery import recover
from lightning_async.checkpoint.retention import prune
from lightning_async.checkpoint.storage import Chunk, FileRecord, LocalFiles, RemoteFiles
from lightning_async.checkpoint.store import CheckpointStore, Manifest, RankManifest
from lightning_async.errors import CheckpointError, DamagedCheckpoint
from tests.checkpoint.stores import FailingCalls, assert_whole, save, write_ranks
from tests.support import ROOT


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    if request.param == "local":
        yield CheckpointStore(tmp_path / "not" / "there" / "yet")
    else:
        remote = CheckpointStore(f"memory://{uuid.uuid4().hex}/run")
        yield remote
        remote.files.remove(remote.dirpath)


def names(store: CheckpointStore) -> list[str]:
    return store.files.names(store.dirpath)


def test_a_save_is_committed_listed_verified_and_numbered(store: CheckpointStore):
    assert store.entries() == [] and store.next_number() == 1
    assert save(store, 1, metrics={"loss": 2.0}).name == "000001-step-10"
    save(store, 2, step=1200)
    save(store, 3, step=5)  # after a rollback: order is by number
    entries = store.entries()
    assert [(entry.number, entry.step) for entry in entries] == [(3, 5), (2, 1200), (1, 10)]
    assert store.next_number() == 4
    for entry in entries:
        assert_whole(store, entry)
        assert entry.manifest is not None
        assert sorted(entry.manifest.files) == [
            *("rank-0.bin", "rank-0.json", "rank-0.manifest.json"),
            *("rank-1.bin", "rank-1.json", "rank-1.manifest.json"),
        ]
    assert entries[-1].manifest is not None and entries[-1].manifest.metrics == {"loss": 2.0}
    assert names(store) == ["000001-step-10", "000002-step-1200", "000003-step-5"]


def test_nothing_is_a_checkpoint_before_all_ranks_are_there(store: CheckpointStore):
    temporary = store.temporary(1, 10, "run")
    with store.hold(temporary):
        assert store.missing(temporary, (0, 1)) == [0, 1]
        write_ranks(store, temporary, 1, (1,))
        assert store.missing(temporary, (0, 1)) == [0]
        with pytest.raises(
            CheckpointError, match=r"000001-step-10.* cannot be committed: nothing is there of .* \[0\]"
        ):
            store.commit(temporary, Manifest(1, 10, ranks=(0, 1)))
        assert store.entries() == []
        assert store.next_number() == 2
    store.discard(temporary)
    assert names(store) == []


def test_a_rank_is_not_there_before_all_it_says_is_durable(tmp_path: Path):
    """Another process, that of the first rank, looks at any moment: here after each system call."""

    class Watched:
        def __getattr__(self, name: str) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                seen.append((name, store.missing(temporary, (0,))))
                return getattr(os, name)(*arguments)

            return call

    seen: list[tuple[str, list[int]]] = []
    store = CheckpointStore(tmp_path)
    temporary = store.temporary(1, 10, "run")
    watched = CheckpointStore(tmp_path, LocalFiles(Watched()))
    watched.add_rank(temporary, RankManifest(0, {}))
    before = seen[: 1 + next(index for index in reversed(range(len(seen))) if seen[index][0] == "write")]
    assert all(missing == [0] for _, missing in before)
    synced = seen[len(before) :]
    assert synced[0] == ("fsync", [0])
    assert store.missing(temporary, (0,)) == []
    assert store.files.names(temporary) == ["rank-0.manifest.json"]


def test_two_ranks_that_wrote_one_file_are_not_committed(store: CheckpointStore):
    temporary = store.temporary(1, 10, "run")
    write_ranks(store, temporary, 1, (0,))
    store.add_rank(temporary, RankManifest(1, {"rank-0.bin": FileRecord(1, 1)}))
    with pytest.raises(DamagedCheckpoint, match=r"rank-1.manifest.json names \['rank-0.bin'\]"):
        store.commit(temporary, Manifest(1, 10, ranks=(0, 1)))
    assert store.entries() == []


def test_a_manifest_that_names_no_files_of_a_rank_is_damage(tmp_path: Path):
    """What it does not name, nobody would verify."""
    store = CheckpointStore(tmp_path)
    entry = save(store, 1)
    assert entry.manifest is not None
    for files, ranks in (({}, (0, 1)), (entry.manifest.files, (0, 1, 5))):
        strange = dataclasses.replace(entry.manifest, files=files, ranks=ranks)
        (Path(entry.path) / "manifest.json").write_bytes(strange.to_bytes())
        with pytest.raises(DamagedCheckpoint, match=rf"has no files of ranks \[{ranks[0] if not files else 5}"):
            store.verify(entry)
        assert isinstance(store.entries()[0].error, DamagedCheckpoint)


def test_what_somebody_has_deleted_is_not_committed(store: CheckpointStore):
    temporary = store.temporary(1, 10, "run")
    with store.hold(temporary):
        write_ranks(store, temporary, 1, (0, 1))
        store.files.unlink(f"{temporary}/rank-1.bin")
        with pytest.raises(DamagedCheckpoint, match=r"had \['rank-1.bin'\], which somebody has deleted"):
            store.commit(temporary, Manifest(1, 10, ranks=(0, 1)))
    assert store.entries() == []


def test_a_run_must_be_a_word(tmp_path: Path):
    with pytest.raises(ValueError, match=r"run='../x'"):
        CheckpointStore(tmp_path).temporary(1, 10, "../x")


def test_good_ones_are_marked(store: CheckpointStore):
    first, second = save(store, 1), save(store, 2)
    store.promote(first)
    store.promote(first)
    assert [entry.good for entry in store.entries()] == [False, True]
    assert_whole(store, first)
    store.files.write(f"{second.path}/good.json", [store.files.read(f"{first.path}/good.json")])
    assert [entry.good for entry in store.entries()] == [False, True]  # that is the mark of another one


def test_what_is_damaged_is_out_of_the_way_and_kept(store: CheckpointStore):
    entry = save(store, 7)
    assert store.quarantine(entry).endswith("000007-step-70.damaged-1")
    entry = save(store, 7)
    assert store.quarantine(entry).endswith("000007-step-70.damaged-2")
    assert store.entries() == [] and store.next_number() == 8
    store.quarantine(entry)  # another rank was quicker
    assert names(store) == ["000007-step-70.damaged-1", "000007-step-70.damaged-2"]
    assert "rank-1.manifest.json" in store.files.names(f"{store.dirpath}/000007-step-70.damaged-2")


def test_what_is_removed_is_gone(store: CheckpointStore):
    first, second = save(store, 1), save(store, 2)
    store.remove(first)
    store.remove(first)
    assert names(store) == ["000002-step-20"]
    assert_whole(store, second)


def test_one_of_another_name_is_no_checkpoint(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    entry = save(store, 1)
    shutil.copytree(entry.path, tmp_path / "copy of 000001-step-10")
    shutil.copytree(entry.path, tmp_path / "000009-step-10")
    (tmp_path / "000008-step-10").write_text("a file")
    ninth, eighth, first = store.entries()
    assert_whole(store, first)
    assert eighth.manifest is None and "manifest.json is missing" in str(eighth.error)
    assert ninth.manifest is None and "is that of 000001-step-10" in str(ninth.error)


def test_what_was_left_unfinished_is_cleaned_when_its_writer_is_gone(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    mine, theirs, dead = (store.temporary(number, 1, run) for number, run in ((2, "me"), (3, "them"), (4, "dead")))
    for temporary in (mine, theirs, dead):
        write_ranks(store, temporary, 1, (0,))
    removed = f"{store.final(5, 1)}.removed"
    write_ranks(store, removed, 5, (0,))
    with store.hold(theirs):
        assert store.writing() == ["000003-step-1.tmp-them"]
        assert store.clean("me") == ["000004-step-1.tmp-dead", "000005-step-1.removed"]
    assert store.clean("me") == ["000003-step-1.tmp-them"]
    assert names(store) == ["000001-step-10", "000002-step-1.tmp-me"]


def test_what_a_link_leads_to_is_not_deleted(tmp_path: Path):
    """A checkpoint that was moved to another disk, and other things that are no folders, under names of ours."""
    store, elsewhere = CheckpointStore(tmp_path / "run"), tmp_path / "elsewhere"
    first, _ = save(store, 1), save(store, 2)
    shutil.move(first.path, elsewhere)
    for link in (first.path, store.temporary(3, 30, "x"), f"{store.final(4, 40)}.removed"):
        os.symlink(elsewhere, link)
    os.symlink(tmp_path / "nowhere", store.temporary(5, 50, "x"))
    for path in (store.temporary(6, 60, "x"), f"{store.final(7, 70)}.removed"):
        Path(path).touch()
    before = sorted(os.listdir(elsewhere))
    assert_whole(store, store.entries()[1])
    assert store.writing() == []
    assert [entry.number for entry in prune(store, Latest(1))] == [1]
    assert [int(name[:6]) for name in store.clean()] == [3, 4, 5, 6, 7]
    assert names(store) == ["000002-step-20"]
    assert sorted(os.listdir(elsewhere)) == before


def test_what_was_left_unfinished_at_a_url_is_cleaned_after_a_while(monkeypatch: pytest.MonkeyPatch):
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}/run")
    save(store, 1)
    write_ranks(store, store.temporary(2, 20, "other"), 2, (0,))
    assert store.clean("me") == []
    monkeypatch.setattr("lightning_async.checkpoint.storage.STALE_S", -1.0)
    assert store.clean("me") == ["000002-step-20"]
    assert names(store) == ["000001-step-10"]
    store.files.remove(store.dirpath)


class Died(Exception):
    pass


class Dying(RemoteFiles):
    """A process at a remote store that ends before one of its changes; a folder is not deleted in one step there."""

    def __init__(self, url: str, after: int) -> None:
        super().__init__(url)
        self.left = after

    def _change(self) -> None:
        if not self.left:
            raise Died
        self.left -= 1

    def write(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        self._change()
        return super().write(path, chunks)

    def unlink(self, path: str) -> None:
        self._change()
        super().unlink(path)

    def remove(self, folder: str) -> None:
        for name in reversed(self.names(folder)):
            self.unlink(f"{folder}/{name}")
        super().remove(folder)


def test_at_a_url_whoever_dies_leaves_a_whole_one_at_any_moment():
    found = []
    for after in range(100):
        url = f"memory://{uuid.uuid4().hex}/run"
        store = CheckpointStore(url)
        save(store, 1)
        dying = CheckpointStore(url, Dying(url, after))
        try:
            save(dying, 2)
            prune(dying, Latest(1))
            ended = True
        except Died:
            ended = False
        recovered = recover(store)
        assert recovered.entry is not None and not recovered.damaged and not recovered.unreadable
        for entry in store.entries():
            assert_whole(store, entry)
        found.append(recovered.entry.number)
        assert store.next_number() >= 2
        store.files.remove(store.dirpath)
        if ended:
            break
    saving = 2 * 3 + 1
    assert found[: saving + 1] == [1] * saving + [2]
    assert set(found[saving:]) == {2} and len(found) > 2 * saving


def damages(source: random.Random, data: bytes) -> Iterator[bytes]:
    """A flipped bit, a truncation, a page of zeros."""
    flipped = bytearray(data)
    flipped[source.randrange(len(data))] ^= 1 << source.randrange(8)
    yield bytes(flipped)
    yield data[: source.randrange(len(data))]
    start, length = source.randrange(len(data)), source.randrange(1, 64)
    zeroed = data[:start] + bytes(len(data[start : start + length])) + data[start + length :]
    if zeroed != data:
        yield zeroed


def test_a_thousand_damages_are_all_noticed_and_none_is_resumed_from(tmp_path: Path):
    store, source = CheckpointStore(tmp_path), random.Random(7)
    old, new = save(store, 1), save(store, 2)
    store.promote(new)
    paths = sorted(Path(new.path).iterdir())
    assert len(paths) == 8
    noticed = 0
    while noticed < 1000:
        path = source.choice(paths)
        data = path.read_bytes()
        for damaged in damages(source, data):
            path.write_bytes(damaged)
            found = next(entry for entry in store.entries() if entry.number == 2)
            if path.name == "good.json":
                assert not found.good
            else:
                with pytest.raises(DamagedCheckpoint, match=re.escape(str(path))):
                    store.verify(found)
                assert not isinstance(found.error, OSError)
                if noticed % 10 == 0:
                    assert recover(store).entry == old
                    os.rename(f"{new.path}.damaged-1", new.path)
            noticed += 1
        path.write_bytes(data)
    assert_whole(store, new)
    recovered = recover(store).entry
    assert recovered is not None and recovered.number == 2 and recovered.good


FAILURES = [("write", errno.ENOSPC), ("write", errno.EIO), ("fsync", errno.EIO), ("rename", errno.EROFS)]
"""What fails, and how; ``mkdir`` is held by the directory that is read-only."""


@pytest.mark.parametrize(("call", "number"), FAILURES, ids=lambda value: str(value))
def test_a_save_that_fails_anywhere_is_loud_and_leaves_the_old_one_whole(tmp_path: Path, call: str, number: int):
    good = CheckpointStore(tmp_path)
    old = save(good, 1)
    told = []
    for after in range(100):
        bad = CheckpointStore(tmp_path, LocalFiles(FailingCalls(call, number, after)))
        try:
            new = save(bad, 2)
        except OSError as error:
            told.append((error.errno, str(error)))
        else:
            assert_whole(good, new)
            break
        for entry in good.entries():  # an fsync of the directory may fail after the rename: then the new one is there
            assert_whole(good, entry)
        assert_whole(good, old)
        assert recover(good).entry == good.entries()[0]
        good.clean("another")
        if len(good.entries()) == 2:
            good.remove(good.entries()[0])
        assert names(good) == ["000001-step-10"]
    assert len(told) >= (1 if call == "rename" else 7)
    for errno_, words in told:
        assert errno_ == number and str(tmp_path) in words and os.strerror(number) in words


WITHOUT_RIGHTS = """
import os, sys, types
package = types.ModuleType("lightning_async")  # without its imports, which take seconds
package.__path__ = [sys.argv[1]]
sys.modules[package.__name__] = package
from lightning_async.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[2])
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    store.hold(store.temporary(2, 20, "run")).__enter__()
except OSError as error:
    print(error)
"""


@pytest.mark.processes
def test_a_directory_that_is_read_only_is_named():
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(folder)
        old = save(store, 1)
        os.chmod(folder, 0o555)
        command = [sys.executable, "-S", "-c", WITHOUT_RIGHTS, str(ROOT / "lightning_async"), folder]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60)
        os.chmod(folder, 0o755)
        assert told.stdout == f"[Errno 13] Permission denied: '{folder}/000002-step-20.tmp-run'\n", told.stderr
        assert_whole(store, old)
        assert names(store) == ["000001-step-10"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Two megabytes that can fill."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.processes
def test_a_disk_that_fills_loses_nothing_and_goes_on_when_there_is_room(small_disk: Path):
    store = CheckpointStore(small_disk)
    old = save(store, 1)
    temporary = store.temporary(2, 20, "run")
    with store.hold(temporary), pytest.raises(OSError, match=f"No space left on device: '{temporary}/rank-0.bin'"):
        store.files.write(f"{temporary}/rank-0.bin", [os.urandom(4 << 20)])
    assert [entry.number for entry in store.entries()] == [1]
    assert_whole(store, old)
    with pytest.raises(OSError, match="No space left on device"):
        save(store, 3)
    store.discard(temporary)
    assert_whole(store, save(store, 3))
    assert [entry.number for entry in prune(store, Latest(1))] == [1]
    store.clean("another")
    assert names(store) == ["000003-step-30"]
