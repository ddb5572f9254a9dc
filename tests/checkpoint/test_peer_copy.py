"""A state on its way into another rank's memory, and back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_async.checkpoint.buffers import Buffer
from lightning_async.checkpoint.peer_copy import PeerCopySender, Sent, find
from lightning_async.comm.peer_storage import Address, PeerStore, deposit, fetch
from lightning_async.membership.signing import Seal

SEAL = Seal("a secret")


@pytest.fixture
def keepers() -> Iterator[dict[str, PeerStore]]:
    before = {*threading.enumerate()}
    found = {name: PeerStore("127.0.0.1", SEAL) for name in ("0", "2")}
    yield found
    for keeper in found.values():
        keeper.close()
    assert {*threading.enumerate()} == before  # the courier's included


@pytest.fixture
def peer_copy_sender(keepers: dict[str, PeerStore]) -> Iterator[PeerCopySender]:
    found = PeerCopySender("1", SEAL)
    yield found
    found.close()
    found.close()


def sent(peer_copy_sender: PeerCopySender) -> Sent:
    """What becomes of the copy under way."""
    until = time.monotonic() + 30.0
    while not (results := peer_copy_sender.poll()):
        assert time.monotonic() < until
        time.sleep(0.001)
    (result,) = results
    return result


def back(keepers: dict[str, PeerStore]) -> tuple[Any, Any]:
    """The state that is found, and the step that it is of."""
    found, silent = find("1", SEAL, {name: keeper.address for name, keeper in keepers.items()})
    assert not silent
    return (None, None) if found is None else (found.own, found.label["step"])


def unusual() -> dict[str, Any]:
    values = torch.arange(12.0).view(3, 4)
    return {
        "transposed": values.t(), "conjugate": (values + 1j * values).conj(), "scalar": torch.tensor(3),
        "empty": torch.empty(0, 2), "bf16": values.bfloat16(), "fp8": values.to(torch.float8_e4m3fn).view(torch.uint8),
        "bool": values > 3, "trained": torch.nn.Parameter(values), "expanded": torch.ones(1).expand(5),
        "plain": (1, None, float("inf"), b"bytes", {"nested": [torch.zeros(2)]}),
    }  # fmt: skip


def test_what_comes_back_lies_where_it_has_arrived(
    peer_copy_sender: PeerCopySender, keepers: dict[str, PeerStore]
) -> None:
    """It is not copied once more, and is the caller's to change."""
    assert peer_copy_sender.send(
        keepers["2"].address, {"step": 7, "at": 1.0}, [torch.full((64,), float(i)) for i in range(3)]
    )
    assert sent(peer_copy_sender).error is None
    tensors, _ = back(keepers)
    assert [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors] == [0, 256, 512]
    tensors[1].add_(1.0)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [2.0], [2.0]]


def test_what_has_arrived_is_of_the_moment_of_the_copy(
    peer_copy_sender: PeerCopySender, keepers: dict[str, PeerStore]
) -> None:
    own, expected = unusual(), unusual()
    assert peer_copy_sender.send(keepers["2"].address, {"step": 7, "at": 1.0}, own)
    with torch.no_grad():
        for value in own.values():
            if isinstance(value, Tensor) and value.data_ptr() and value.numel() > 1 and not value.is_conj():
                value.copy_(torch.zeros_like(value)) if value.stride() != (0,) else None
    assert sent(peer_copy_sender).error is None
    found, step = back(keepers)
    assert step == 7
    assert found.keys() == expected.keys()
    assert found["plain"][:4] == expected["plain"][:4]
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype is value.dtype and found[name].shape == value.shape, name
            assert torch.equal(found[name], value.detach().resolve_conj()), name


def test_a_state_that_grows_gets_its_memory_in_the_background(
    peer_copy_sender: PeerCopySender, keepers: dict[str, PeerStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    to, large = keepers["2"].address, torch.arange(10 << 20)
    assert peer_copy_sender.send(to, {"step": 1}, {"x": large[:10]})
    assert sent(peer_copy_sender).error is None
    sync_point, reserve = threading.Event(), Buffer.reserve

    def slowly(buffer: Buffer, size: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert sync_point.wait(30.0)
        reserve(buffer, size)

    monkeypatch.setattr(Buffer, "reserve", slowly)
    assert not peer_copy_sender.send(to, {"step": 2}, {"x": large})
    assert peer_copy_sender.busy
    sync_point.set()
    until = time.monotonic() + 30.0
    while peer_copy_sender.busy:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert peer_copy_sender.send(to, {"step": 3}, {"x": large})
    assert sent(peer_copy_sender).error is None
    found, step = back(keepers)
    assert step == 3 and torch.equal(found["x"], large)
    assert (
        peer_copy_sender.costs.saves == peer_copy_sender.costs.committed == 2 and peer_copy_sender.costs.stalled_s > 0.0
    )


def test_what_cannot_travel_is_named_and_the_next_one_goes(
    peer_copy_sender: PeerCopySender, keepers: dict[str, PeerStore]
) -> None:
    with pytest.raises(TypeError, match=r"own.*exp_avg.*sparse"):
        peer_copy_sender.send(keepers["2"].address, {}, {"exp_avg": torch.zeros(3).to_sparse()})
    assert not peer_copy_sender.busy
    assert peer_copy_sender.send(keepers["2"].address, {"step": 2}, {"exp_avg": torch.zeros(3)})
    assert sent(peer_copy_sender).error is None


def test_the_next_neighbour_gets_the_next_copy_and_the_last_one_forgets(
    peer_copy_sender: PeerCopySender, keepers: dict[str, PeerStore]
) -> None:
    assert peer_copy_sender.send(keepers["2"].address, {"step": 1}, {"x": 1})
    assert sent(peer_copy_sender).error is None
    gone = PeerStore("127.0.0.1", SEAL)
    gone.close()
    assert peer_copy_sender.send(gone.address, {"step": 2}, {"x": 2})
    failed = sent(peer_copy_sender)
    assert failed.error is not None and "ConnectionRefusedError" in failed.error and failed.to == gone.address
    assert back(keepers) == ({"x": 1}, 1)  # it serves until a newer one is whole
    assert peer_copy_sender.send(keepers["0"].address, {"step": 3}, {"x": 3})
    assert sent(peer_copy_sender).error is None
    until = time.monotonic() + 30.0
    while keepers["2"].owners:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert back(keepers) == ({"x": 3}, 3)
    assert (peer_copy_sender.costs.committed, peer_copy_sender.costs.failed) == (2, 1)


def test_closing_waits_for_nobody(keepers: dict[str, PeerStore]) -> None:
    peer_copy_sender = PeerCopySender("1", SEAL)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        to = Address("127.0.0.1", silent.getsockname()[1], "")
        assert peer_copy_sender.send(to, {}, {"x": torch.zeros(1000)})
        asked, _ = silent.accept()
        began = time.monotonic()
        peer_copy_sender.close()
        assert time.monotonic() - began < 4.0  # it would be given up after ten
        asked.close()


def test_of_several_copies_the_newest_counts_and_others_are_forgotten(keepers: dict[str, PeerStore]) -> None:
    for name, life, at in (("0", 1, 5.0), ("2", 0, 6.0)):  # on another host, whose clock is behind
        peer_copy_sender = PeerCopySender("1", SEAL)
        assert peer_copy_sender.send(keepers[name].address, {"step": int(at), "life": life, "at": at}, {"x": at})
        assert sent(peer_copy_sender).error is None
        peer_copy_sender.close()
    assert back(keepers) == ({"x": 5.0}, 5)
    assert fetch(keepers["2"].address, SEAL, "1") is None
    assert keepers["0"].owners == ("1",)


@pytest.mark.parametrize("damage", ["a byte of a tensor", "a byte of the text", "the length"])
def test_a_damaged_copy_does_not_cost_the_older_one(keepers: dict[str, PeerStore], damage: str) -> None:
    for name, step in (("0", 1), ("2", 2)):
        sender = PeerCopySender("1", SEAL)
        assert sender.send(keepers[name].address, {"step": step, "at": float(step)}, {"x": torch.full((4,), step)})
        assert sent(sender).error is None
        sender.close()
    newest = keepers["2"]._kept["1"]
    if damage == "the length":
        newest.label["text"] = 10**9
    else:
        newest.data[0 if "tensor" in damage else newest.label["text"] + 5] ^= 0x40
    found, silent = find("1", SEAL, {name: keeper.address for name, keeper in keepers.items()})
    assert found is not None and found.label["step"] == 1 and found.own["x"].tolist() == [1, 1, 1, 1]
    assert len(silent) == 1
    assert keepers["0"].owners == ("1",)


def test_copies_that_are_all_damaged_stay(keepers: dict[str, PeerStore]) -> None:
    for keeper in keepers.values():
        deposit(keeper.address, SEAL, "1", {"text": 99}, memoryview(b"ab{}"))
    assert find("1", SEAL, {name: keeper.address for name, keeper in keepers.items()})[0] is None
    assert [keeper.owners for keeper in keepers.values()] == [("1",), ("1",)]


def test_bytes_that_are_no_state_count_as_none(keepers: dict[str, PeerStore]) -> None:
    for label, why in (
        ({"text": 2}, "the copy of rank 1's state does not say what it should"),
        ({"text": 5, "at": "now"}, "its text cannot begin at byte 5 of 4"),
        ({}, "its text cannot begin at byte None of 4"),
    ):
        deposit(keepers["0"].address, SEAL, "1", label, memoryview(b"ab{}"))
        found, silent = find("1", SEAL, {"0": keepers["0"].address})
        assert found is None
        assert why in silent["that has a copy"]


def test_all_are_asked_at_once_and_those_that_are_silent_cost_one_wait(
    peer_copy_sender: PeerCopySender, keepers: dict[str, PeerStore]
) -> None:
    """Each of three says nothing before all have been asked: asked one after another, the first would be given up."""
    assert peer_copy_sender.send(keepers["0"].address, {"at": 1.0}, {"x": 5.0})
    assert sent(peer_copy_sender).error is None
    everybody = threading.Barrier(3)

    def say_nothing(listener: socket.socket) -> None:
        channel, _ = listener.accept()
        with channel:
            everybody.wait(60.0)

    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        threads = [threading.Thread(target=say_nothing, args=(each,), daemon=True) for each in listeners]
        for thread in threads:
            thread.start()
        gone = [Address("127.0.0.1", each.getsockname()[1], "token") for each in listeners]
        asked = {"2": gone[0], "3": gone[1], "0": keepers["0"].address, "4": gone[2]}
        found, silent = find("1", SEAL, asked)
        for thread in threads:
            thread.join(60.0)
    assert found is not None
    assert found.own == {"x": 5.0}
    assert silent == dict.fromkeys("234", "ConnectionError: the connection ended")
    assert find("1", SEAL, {}) == (None, {})
