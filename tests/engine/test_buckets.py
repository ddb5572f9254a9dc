"""Whose the buckets are, along every legal way through their states; and what an illegal one meets."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from lightning_async.engine.buckets import BucketOwner, Buckets, InFlightRound, Message
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import SharedState
from lightning_async.flat import ROOM

WAIT = 10.0


def made(numel: int = 3) -> tuple[Buckets, SharedState]:
    module = nn.Linear(numel, 1, bias=False)
    nn.init.ones_(module.weight)
    shared_state = SharedState()
    return Buckets(Replica(module), shared_state), shared_state


def packed(buckets: Buckets, shared_state: SharedState) -> Message:
    message = Message(priority=1, step=4)
    with shared_state.changed:
        assert buckets.can_pack()
        buckets.take()
    with buckets.used(message):
        assert buckets.owner is BucketOwner.TRAINING
        buckets.sent.fill_(2.0)
    return message


def exchange(buckets: Buckets, message: Message | None) -> InFlightRound:
    return InFlightRound(1, None, message, buckets.received)  # type: ignore[arg-type]


def test_they_begin_free_with_the_parameters_as_the_last_target() -> None:
    buckets, _ = made()
    assert (buckets.owner, buckets.message, buckets.arrived) == (BucketOwner.FREE, None, None)
    assert buckets.received.tolist() == [1.0] * 3
    assert buckets.sent.tolist() == [0.0] * 3


def test_a_message_goes_from_its_packing_to_its_merge() -> None:
    buckets, shared_state = made()
    message = packed(buckets, shared_state)
    assert (buckets.owner, buckets.message) == (BucketOwner.FREE, message)
    with shared_state.changed:
        assert buckets.announce() is message
        assert not buckets.can_pack()
    buckets.claim()
    assert buckets.owner is BucketOwner.ENGINE
    with buckets.handing_over():
        buckets.hand_over(exchange(buckets, message))
    assert (buckets.owner, buckets.message) == (BucketOwner.FREE, None)
    assert buckets.arrived is not None
    with shared_state.changed:
        buckets.release()
        assert not buckets.can_pack(), "what has arrived comes first"
        buckets.take()
    with buckets.used():
        buckets.arrived = None
    with shared_state.changed:
        assert buckets.can_pack()


def test_an_error_while_packing_leaves_no_message() -> None:
    buckets, shared_state = made()
    with shared_state.changed:
        buckets.take()
    with pytest.raises(KeyError), buckets.used(Message(1, 0)):
        raise KeyError
    assert (buckets.owner, buckets.message) == (BucketOwner.FREE, None)


def test_what_the_engine_holds_the_training_thread_cannot_take() -> None:
    buckets, shared_state = made()
    buckets.claim()
    with shared_state.changed, pytest.raises(AssertionError):
        buckets.take()
    with shared_state.changed:
        buckets.release()
        buckets.take()
        with pytest.raises(AssertionError):
            buckets.announce()


def test_the_engine_waits_for_a_merge_before_it_hands_over_another_result() -> None:
    buckets, shared_state = made()
    buckets.arrived = exchange(buckets, None)
    with shared_state.changed:
        buckets.take()
    handed = threading.Event()

    def engine() -> None:
        buckets.claim()  # it leaves the two alone: a result is being taken
        assert buckets.owner is BucketOwner.TRAINING
        assert buckets.landing() is not buckets.sent
        with buckets.handing_over():
            handed.set()

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        assert not handed.wait(0.1)
        with buckets.used():
            buckets.arrived = None
        assert handed.wait(WAIT)
    finally:
        thread.join(WAIT)


def test_an_absent_rank_moves_from_the_last_target_and_needs_no_third_bucket() -> None:
    buckets, _ = made()
    sent, last = buckets.sent, buckets.received
    assert buckets.landing() is sent
    assert buckets.turn(sent) is last
    assert (buckets.received, buckets.sent) == (sent, last)


def test_a_rank_that_missed_two_rounds_borrows_one() -> None:
    buckets, _ = made()
    buckets.turn(buckets.landing())
    buckets.arrived = exchange(buckets, None)
    third = buckets.landing()
    assert third is not buckets.sent and third is not buckets.received
    sent = buckets.sent
    buckets.turn(third)
    assert buckets.received is third and buckets.sent is sent


def test_waiting_for_a_header_to_be_served_hears_of_failures() -> None:
    buckets, shared_state = made()
    with shared_state.changed:
        buckets.announce()

    def see() -> None:
        raise ConnectionError("a peer is lost")

    with pytest.raises(ConnectionError, match="lost"), buckets.alone(see):
        pass
    assert buckets.owner is BucketOwner.FREE


def test_training_begins_with_the_parameters_as_they_are_in_the_memory_that_is_there() -> None:
    buckets, _ = made()
    before = buckets.sent.data_ptr(), buckets.received.data_ptr()
    with torch.no_grad():
        buckets.replica.parameters[0].fill_(3.0)
    buckets.begin(torch.clone)
    assert buckets.received.tolist() == [3.0] * 3
    assert (buckets.sent.data_ptr(), buckets.received.data_ptr()) == before


def test_a_new_layout_begins_with_the_parameters_as_they_are() -> None:
    buckets, _ = made()
    with torch.no_grad():
        buckets.replica.parameters[0].fill_(3.0)
    moved: list[int] = []

    def registered(bucket: torch.Tensor) -> torch.Tensor:
        moved.append(bucket.numel())
        return bucket.clone()

    buckets.lay_out(registered)
    assert moved == [ROOM + 3] * 2
    assert buckets.received.tolist() == [3.0] * 3
