"""The memory that the trainer and the writer share."""

from __future__ import annotations

import gc
import os
import resource
import warnings
from pathlib import Path

import pytest
import torch

from lightning_async.checkpoint import buffers
from lightning_async.checkpoint.buffers import Buffer, BufferOwner, layout
from lightning_async.comm.collectives import as_bytes
from lightning_async.comm.serialization import DTYPES
from lightning_async.errors import CheckpointError


@pytest.fixture
def buffer():
    buffer = Buffer("test")
    buffer.owner = BufferOwner.FILLING
    yield buffer
    buffer.release()


def held(buffer: Buffer, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Read through the descriptor, as the writer does."""
    found = []
    for tensor, at in zip(tensors, layout(tensors)[0], strict=True):
        data = bytearray(os.pread(buffer.descriptor, tensor.nbytes, at))
        found.append(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))
    return found


def assert_holds(buffer: Buffer, tensors: list[torch.Tensor], text: bytes) -> None:
    end = buffer.fill(tensors, text)
    for found, tensor in zip(held(buffer, tensors), tensors, strict=True):
        assert torch.equal(found, as_bytes(tensor.contiguous()))
    assert os.pread(buffer.descriptor, len(text), end) == text


def test_tensors_of_every_kind(buffer: Buffer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        tensors = [torch.arange(12).reshape(3, 4).to(dtype) for dtype in DTYPES.values() if dtype.itemsize > 1]
        tensors += [torch.arange(7).to(dtype) for dtype in DTYPES.values() if dtype.itemsize == 1]
        tensors += [torch.tensor(3.0), torch.zeros(0, 4), tensors[0].t(), torch.ones(3).expand(2, 3)]
        assert_holds(buffer, tensors, b'{"a": 1}')


def test_the_same_memory_again_and_more_where_the_state_grows(buffer: Buffer):
    state = [torch.randn(100_000), torch.randn(30)]
    assert_holds(buffer, state, b"text")
    first = buffer.descriptor
    inode = os.fstat(first).st_ino
    state[0].add_(1)
    assert_holds(buffer, state, b"longer text")
    assert_holds(buffer, [torch.ones(50, 2), torch.randn(30)], b"")
    assert os.fstat(buffer.descriptor).st_ino == inode
    assert_holds(buffer, [*state, torch.randn(2_000_000)], b"text")
    assert os.fstat(buffer.descriptor).st_ino != inode
    assert_holds(buffer, state, b"text")
    assert_holds(buffer, [], b"text")


def test_no_page_is_missing_after_reserve(buffer: Buffer):
    buffer.reserve(40_000_000)
    assert os.fstat(buffer.descriptor).st_blocks * 512 >= 40_000_000
    tensor = torch.ones(10_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer.fill([tensor], b"")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000  # of about 10,000 pages


def test_copies_take_the_memory_along_that_was_there(buffer: Buffer):
    tensors = [torch.randn(10_000_000), torch.randn(3, 2).t(), torch.tensor(2, dtype=torch.int64)]
    buffer.reserve(40_000_100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    copies = buffer.part_with(tensors)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000  # of about 10,000 pages
    assert (buffer.size, buffer.owner, buffer.descriptor) == (0, BufferOwner.FREE, -1)
    buffer.part_with([torch.zeros(10_000_000)])
    assert all(torch.equal(*pair) and pair[0].is_contiguous() for pair in zip(copies, tensors, strict=True))


def test_released_memory_and_descriptors_are_gone():
    gc.collect()  # what other tests of this process have left counts as open until then
    buffer = Buffer("released")
    before = len(os.listdir("/proc/self/fd"))
    for size in (1000, 3_000_000, 9_000_000):
        buffer.reserve(size)
    buffer.release()
    assert len(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as maps:
        assert "memfd:released" not in maps.read()


def test_where_the_system_has_no_anonymous_memory_a_file_without_a_name_serves(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert_holds(buffer, [torch.arange(1000)], b"text")
    assert not list(tmp_path.iterdir())


def test_no_memory_is_an_error_not_a_signal(buffer: Buffer, monkeypatch: pytest.MonkeyPatch):
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(buffers.os, "posix_fallocate", refuse)
    with pytest.raises(CheckpointError, match=r"no memory for a copy of the state, \d+ MiB"):
        buffer.reserve(100_000_000 - 10)
    monkeypatch.undo()
    assert_holds(buffer, [torch.ones(3)], b"text")
