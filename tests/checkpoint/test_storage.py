"""Files are durable and known by size and checksum; errors name the path."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_async.checkpoint.storage import PIECE, STALE_S, FileRecord, Files, LocalFiles, RemoteFiles, files_at
from lightning_async.errors import DamagedCheckpoint
from tests.checkpoint.stores import FailingCalls
from tests.support import ROOT


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Files, str]]:
    if request.param == "local":
        yield files_at(tmp_path / "run")
    else:
        files, root = files_at(f"memory://{uuid.uuid4().hex}/run/")
        yield files, root
        files.remove(root)


def test_what_is_written_is_read_and_checked(place: tuple[Files, str]):
    files, root = place
    whole = os.urandom(PIECE + 77)
    path = f"{root}/a/b.bin"
    record = files.write(path, [whole[:10], bytearray(whole[10:20]), memoryview(whole)[20:]])
    assert record == FileRecord(len(whole), zlib.crc32(whole))
    assert files.read(path) == whole == bytes(files.view(path))
    files.check(path, record)
    empty = files.write(f"{root}/a/empty", [])
    assert empty == FileRecord(0, 0) and not files.view(f"{root}/a/empty")
    files.check(f"{root}/a/empty", empty)
    assert files.names(f"{root}/a") == ["b.bin", "empty"]
    assert files.write(path, [b"shorter"]) == FileRecord(7, zlib.crc32(b"shorter"))
    assert files.read(path) == b"shorter"


def test_what_was_not_written_is_noticed(place: tuple[Files, str]):
    files, root = place
    record = files.write(f"{root}/a", [b"0123456789"])
    files.write(f"{root}/longer", [b"0123456789."])
    files.write(f"{root}/other", [b"0123456798"])
    with pytest.raises(DamagedCheckpoint, match="/longer has 11 bytes, 10 were written"):
        files.check(f"{root}/longer", record)
    with pytest.raises(DamagedCheckpoint, match=r"/other has the checksum [0-9a-f]{8}, a684c7c6 was written"):
        files.check(f"{root}/other", record)
    with pytest.raises(DamagedCheckpoint, match="/absent is missing; it had 10 bytes"):
        files.check(f"{root}/absent", record)


def test_folders_are_named_listed_and_removed(place: tuple[Files, str]):
    files, root = place
    assert files.names(root) == [] and not files.exists(root)
    files.write(f"{root}/one/x", [b"1"])
    files.write(f"{root}/one/y", [b"2"])
    files.rename(f"{root}/one", f"{root}/two")
    assert files.names(root) == ["two"] and files.names(f"{root}/two") == ["x", "y"]
    files.unlink(f"{root}/two/x")
    files.unlink(f"{root}/two/x")
    assert files.names(f"{root}/two") == ["y"] and files.exists(f"{root}/two/y")
    files.remove(f"{root}/two")
    files.remove(f"{root}/two")
    assert not files.exists(f"{root}/two")


def test_a_path_or_a_url_has_its_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for given in ("run", Path("run/"), "./run/", f"file://{tmp_path}/run"):
        files, root = files_at(given)
        assert isinstance(files, LocalFiles) and root == f"{tmp_path}/run"
    files, root = files_at("memory://a/run/")
    assert isinstance(files, RemoteFiles) and root == "memory://a/run"
    assert not files.atomic
    with pytest.raises(ValueError, match="no atomic rename"):
        files.commit("memory://a/x", "memory://a/y")


def put(kind: str, path: Path, target: Path) -> None:
    """Something in place of a file, as anybody who may write into the folder can make it."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": target, "device": Path("/dev/zero"), "nowhere": target / "x"}[kind])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "nowhere", "device", "pipe"])
def test_a_write_replaces_what_is_no_file(tmp_path: Path, kind: str):
    (target := tmp_path / "precious").write_bytes(b"x" * 50)
    put(kind, tmp_path / "a", target)
    LocalFiles().write(f"{tmp_path}/a", [b"new"])
    assert (tmp_path / "a").read_bytes() == b"new" and not (tmp_path / "a").is_symlink()
    assert target.read_bytes() == b"x" * 50


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "nowhere", "device", "pipe", "folder"])
def test_a_lock_is_no_link_pipe_or_device(tmp_path: Path, kind: str):
    (target := tmp_path / "precious").write_bytes(b"x" * 50)
    put(kind, tmp_path / "a", target)
    with pytest.raises(DamagedCheckpoint, match="/a is a link, a folder, a pipe or a device"):
        LocalFiles().lock(f"{tmp_path}/a")
    assert target.read_bytes() == b"x" * 50 and sorted(os.listdir(tmp_path)) == ["a", "precious"]


def test_a_link_in_place_of_a_folder_is_not_held(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").symlink_to("elsewhere")
    with pytest.raises(OSError, match="/folder"), LocalFiles().hold(f"{tmp_path}/folder"):
        pass


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_only_files_are_read_and_nothing_is_waited_for(tmp_path: Path, kind: str):
    files = LocalFiles()
    put(kind, tmp_path / "a", tmp_path)
    for read in (files.read, files.view, lambda path: files.check(path, FileRecord(3, 0))):
        with pytest.raises(DamagedCheckpoint, match="/a is a folder, a pipe or a device"):
            read(f"{tmp_path}/a")


def test_a_text_of_gigabytes_is_not_read(tmp_path: Path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedCheckpoint, match="1099511627776 bytes"):
        LocalFiles().read(f"{tmp_path}/a")


@pytest.mark.parametrize(("call", "number"), [("write", errno.ENOSPC), ("write", errno.EIO), ("fsync", errno.EIO)])
def test_errors_name_the_path(tmp_path: Path, call: str, number: int):
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=f"{os.strerror(number)}: '{tmp_path}/a'") as raised:
        LocalFiles(FailingCalls(call, number)).write(f"{tmp_path}/a", [b"x"])
    assert raised.value.errno == number
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders_is_taken_as_it_is(tmp_path: Path, number: int, fails: bool):
    files = LocalFiles(FailingCalls("fsync", number))
    with pytest.raises(OSError, match=str(tmp_path)) if fails else contextlib.nullcontext():
        files.sync(str(tmp_path))
    with pytest.raises(OSError, match=f"{tmp_path}/a"):
        files.write(f"{tmp_path}/a", [b"x"])


def test_a_write_that_takes_a_part_only_goes_on(tmp_path: Path):
    class Short:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def write(self, descriptor: int, data: memoryview) -> int:
            return os.write(descriptor, data[:3])

    record = LocalFiles(Short()).write(f"{tmp_path}/a", [b"0123456789"])
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert record == FileRecord(10, zlib.crc32(b"0123456789"))


def test_one_folder_is_told_from_another(tmp_path: Path):
    files = LocalFiles()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("a")
    a, b, link = (files.identity(f"{tmp_path}/{name}") for name in ("a", "b", "link"))
    assert a == link != b
    absent = f"{tmp_path}/absent"
    assert files.identity(absent) != files.identity(absent), "nothing is known of it"


HOLDER = """
import sys, types
package = types.ModuleType("lightning_async")  # without its imports, which take seconds
package.__path__ = [sys.argv[2]]
sys.modules[package.__name__] = package
from lightning_async.checkpoint.storage import LocalFiles
with LocalFiles().hold(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(folder), str(ROOT / "lightning_async")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.processes
def test_a_folder_is_held_until_its_writers_are_gone(tmp_path: Path):
    files, folder = LocalFiles(), tmp_path / "deep" / "folder"
    with holder(folder) as writer:
        assert not files.idle(str(folder))
        with files.hold(str(folder)):  # several ranks hold it together
            writer.kill()
            writer.wait(10)
            assert not files.idle(str(folder))
        assert files.idle(str(folder))


def test_without_locks_age_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    files, folder = LocalFiles(), f"{tmp_path}/folder"
    with files.hold(folder):
        assert not files.idle(folder)
    assert not files.idle(folder)
    long_ago = time.time() - STALE_S - 10
    os.utime(folder, (long_ago, long_ago))
    assert files.idle(folder)
