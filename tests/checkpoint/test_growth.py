"""Memory for a state that has grown comes in the background; large copies are divided among threads."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_async.checkpoint import buffers
from lightning_async.checkpoint import buffers as copying
from lightning_async.checkpoint.buffers import Buffer, BufferOwner, copy_
from lightning_async.checkpoint.shards import load
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.checkpoint.writer import SaveJob, Writer


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Memory does not come before this is set."""
    allowed, original = threading.Event(), Buffer.reserve

    def reserve(self: Buffer, size: int) -> None:
        assert threading.current_thread() is threading.main_thread() or allowed.wait(20.0)
        original(self, size)

    monkeypatch.setattr(Buffer, "reserve", reserve)
    monkeypatch.setattr(buffers, "LARGE", 1)
    yield allowed
    allowed.set()


def job(value: float, number: int = 1) -> SaveJob:
    return SaveJob(number, number, "run", (0,), {"x": torch.full((1 << 20,), value)}, {})


@pytest.mark.processes
def test_it_is_busy_until_the_memory_is_there_and_saves_then(tmp_path: Path, held: threading.Event) -> None:
    writer = Writer(tmp_path)
    try:
        writer.reserve(SaveJob(1, 1, "run", (0,), {"x": torch.zeros(3)}, {}))
        descriptors = [buffer.descriptor for buffer in writer._buffers]
        writer.expect(job(0.0), more=1000)
        assert writer.busy
        assert [buffer.owner for buffer in writer._buffers] == [BufferOwner.GROWING] * 2
        assert writer.poll() == []
        threading.Timer(0.2, held.set).start()
        writer.save(job(5.0))  # waits for it, and for no page
        grown = [buffer.descriptor for buffer in writer._buffers]
        assert all(old != new or os.fstat(new).st_size > 1 << 22 for old, new in zip(descriptors, grown, strict=True))
        (result,) = writer.wait(20.0)
        assert result.error is None
        assert not writer.busy
        writer.expect(job(0.0))  # there is enough
        assert not writer.busy
    finally:
        writer.close(20.0)
    (entry,) = CheckpointStore(tmp_path).entries()
    assert load(CheckpointStore(tmp_path), entry, 0).shared["x"].unique().tolist() == [5.0]
    assert not [thread for thread in threading.enumerate() if thread.name == "lightning_async-memory"]


def test_closing_waits_for_it(tmp_path: Path, held: threading.Event) -> None:
    writer = Writer(tmp_path)
    writer.expect(job(0.0))
    threading.Timer(0.1, held.set).start()
    writer.close(0.0)
    assert not writer.busy
    assert [buffer.descriptor for buffer in writer._buffers] == [-1, -1]


@pytest.mark.processes
@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "take one buffer"), (errno.EMFILE, "raise `ulimit -n`")])
def test_memory_that_is_not_there_is_said_by_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    writer = Writer(tmp_path)
    try:
        writer.expect(job(0.0))
        with pytest.raises(buffers.CheckpointError, match=f"there is no memory for a copy of the state.*{remedy}"):
            writer.save(job(1.0))
    finally:
        writer.close(0.0)


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_of_every_kind_and_size(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "LARGE", 0 if threads > 1 else 1 << 40)
    monkeypatch.setattr(copying, "PIECE", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    whole = torch.arange(30_000, dtype=torch.float64).view(100, 300)
    spectrum = torch.complex(torch.arange(20.0), torch.ones(20))
    tensors = [
        whole, whole.t(), whole[:, 3:7], whole[3:7], spectrum, spectrum.conj(), spectrum.conj().imag,
        torch.tensor(3, dtype=torch.int8), torch.empty(0, 4), torch.ones(3).expand(2, 3),
        torch.ones(7, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(5)), torch.ones(1, dtype=torch.bool),
    ]  # fmt: skip
    views = [torch.full(tensor.shape, 77).to(tensor.dtype) for tensor in tensors]
    copy_(views, tensors)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor)
