"""SparseLoCo and the sparse messages that it is made for: what is not sent is not lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_async.algorithms import Round, SparseLoCo, TopK
from lightning_async.flat import FlatLayout
from tests.algorithms.replicas import fill

EVENTS = st.lists(st.sampled_from(["sent", "abandoned", "absent", "without weight"]), min_size=1, max_size=8)
LAW = settings(max_examples=40, deadline=None)


def sparse(code: TopK, message: Tensor) -> tuple[Tensor, Tensor]:
    """What a message decodes to, and what it lacks."""
    room = torch.zeros(code.message_bytes(message.numel()), dtype=torch.uint8)
    rest, decoded = torch.zeros_like(message), torch.empty_like(message)
    code.encode_(room, message, rest)
    code.decode_(decoded, room)
    return decoded, rest


@pytest.mark.parametrize("bits", [None, 2])
@LAW
@given(events=EVENTS, seed=st.integers(0, 2**31), fraction=st.floats(0.01, 1.0))
def test_what_was_sent_and_the_residual_are_what_was_to_be_sent(bits: Any, events, seed, fraction) -> None:
    numel = 301
    rule, code, anchor = SparseLoCo(outer_lr=0.5, decay=1.0), TopK(fraction, bits), fill(numel, seed)
    state = rule.init(anchor, FlatLayout([anchor]))
    due, sent = (torch.zeros(numel, dtype=torch.float64) for _ in range(2))
    for number, event in enumerate(events):
        snapshot = state.anchor + fill(numel, seed + number)
        before, message = state.anchor.clone(), snapshot.clone()
        assert rule.message_(message, state) == ()
        if event == "abandoned":
            continue
        work = {"sent": (1.0, 3.0), "absent": (0.0, 3.0), "without weight": (0.0, 3.0)}[event]
        received, mine = fill(numel, seed + 50 + number), None if event == "absent" else message
        if event == "sent":
            due += before.double() - snapshot.double()
            message.copy_(sparse(code, message)[0])
            sent += message.double()
        mean = received.clone()
        state = rule.merge_(mine, received, state, Round(number, 0, work))
        assert torch.equal(received, before - 0.5 * mean) and torch.equal(received, state.anchor)
        assert mine is None or torch.equal(mine, snapshot)
    torch.testing.assert_close(sent + state.error.double(), due, rtol=0, atol=1e-5)


@LAW
@given(seed=st.integers(0, 2**31), decay=st.floats(0.0, 1.0))
def test_without_compression_nothing_is_left(seed, decay) -> None:
    rule, anchor = SparseLoCo(decay=decay), fill(33, seed)
    state = rule.init(anchor, FlatLayout([anchor]))
    state.error.copy_(fill(33, seed + 1))
    sent = fill(33, seed + 2)
    rule.message_(sent, state)
    state = rule.merge_(sent, sent.clone(), state, Round(0, 0, (1.0,)))
    assert not state.error.any()


@pytest.mark.parametrize("bits", [None, 2])
@LAW
@given(numel=st.integers(1, 140_000), seed=st.integers(0, 2**31), fraction=st.floats(0.0005, 1.0))
def test_a_message_brings_the_largest_elements_and_the_same_when_encoded_again(bits: Any, numel, seed, fraction):
    code, message = TopK(fraction, bits), fill(numel, seed)
    decoded, rest = sparse(code, message)
    chosen = message.abs().topk(code.count(numel)).indices.sort().values
    assert torch.equal(decoded.nonzero().flatten(), chosen)
    assert torch.equal(rest, message - decoded)
    assert torch.equal(sparse(code, decoded)[0], decoded)
    if bits is None:
        assert torch.equal(decoded[chosen], message[chosen])
        return
    lacks, whole, brought = (each.double().square().sum() for each in (rest, message, decoded))
    torch.testing.assert_close(lacks, whole - brought, rtol=1e-5, atol=0)
    for mine, exact in zip(decoded[chosen].split(256), message[chosen].split(256), strict=True):
        assert torch.equal(mine.sign(), exact.sign()) and len(mine.abs().unique()) <= 2


def test_two_bits_are_a_sign_and_one_of_two_means() -> None:
    decoded, rest = sparse(TopK(0.5, bits=2), torch.tensor([1.0, -0.1, -3.0, 0.2, 10.0, -0.3, 8.0, 0.0]))
    assert decoded.tolist() == [2.0, 0.0, -2.0, 0.0, 9.0, 0.0, 9.0, 0.0]
    torch.testing.assert_close(rest, torch.tensor([-1.0, -0.1, -1.0, 0.2, 1.0, -0.3, -1.0, 0.0]))
    untouched = torch.tensor([0.0, 0.0, 5.0, -3.0])
    assert sparse(TopK(1.0, bits=2), untouched)[0].tolist() == [0.0, 0.0, 4.0, -4.0], "zeros stay zeros"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: SparseLoCo(outer_lr=0.0), ValueError, r"SparseLoCo\(outer_lr=0.0\)` must be > 0"),
        (lambda: SparseLoCo(decay=1.5), ValueError, r"SparseLoCo\(decay=1.5\)` must be <= 1"),
        (lambda: SparseLoCo(decay=-0.5), ValueError, r"SparseLoCo\(decay=-0.5\)` must be >= 0"),
        (lambda: SparseLoCo(decay=None), TypeError, r"SparseLoCo\(decay=None\)` must be a number"),  # pyright: ignore
        (lambda: TopK(0.1, bits=4), ValueError, r"TopK\(bits=4\)` must be one of \(None, 2\)"),  # pyright: ignore
        (lambda: TopK(1.5), ValueError, r"TopK\(fraction=1.5\)` must be <= 1"),
    ],
)
def test_arguments_that_cannot_be(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
