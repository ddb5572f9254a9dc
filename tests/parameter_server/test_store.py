"""A store is whole wherever its process is killed: an update and whose push it is are there together, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_async.parameter_server import optimizers
from lightning_async.parameter_server.optimizers import (
    Adam,
    ServerRates,
    Sgd,
    ShardSpan,
    TooManyRuns,
    make_optimizer,
)
from lightning_async.parameter_server.shared_memory import SIZE, Journal
from lightning_async.parameter_server.store import Store

WORKER = {"life": 1, "push": 0, "clock": 0, "live": True}


class Killed(BaseException):
    """In place of signal 9, at a place of the test's choice."""


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def opened(file: int) -> Store:
    """What the next process finds."""
    return Store(os.dup(file))


@settings(max_examples=20)
@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), min_size=1, max_size=6))
def test_a_journal_holds_the_last_record(records: list[dict[str, int]]):
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    for record in records:
        Journal(memory).write(record)
        assert Journal(memory).record == record


@settings(max_examples=50)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), unique_by=lambda each: each[0], max_size=3),
        min_size=2,
        max_size=6,
    )
)
def test_what_is_the_same_object_as_before_is_in_the_record_as_it_is(records: list[list[tuple[str, int]]]):
    """Records that share what has not changed, as those of a store do, each with other parts of the same few values."""
    told = {"push": 3, "live": True}
    values: list[Any] = [None, 7, "x", [0.0, 1], {"numel": 5, "arguments": {}}, {"w": told}, {"w": told, "v": {**told}}]
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    journal = Journal(memory)
    for pairs in records:
        record = {name: values[which] for name, which in pairs}
        journal.write(record)
        assert journal.record == Journal(memory).record == record


@settings(max_examples=30)
@given(st.data())
def test_a_record_that_is_written_in_part_is_the_one_before(data: st.DataObject):
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    journal = Journal(memory)
    for number in range(data.draw(st.integers(1, 4))):
        journal.write({"number": number})
    before, record = memory.clone(), journal.record
    journal.write({"number": 99, "more": "x" * data.draw(st.integers(0, 50))})
    changed = (memory != before).nonzero().flatten()
    kept = data.draw(st.lists(st.booleans(), min_size=len(changed), max_size=len(changed)))
    torn = before.clone()
    for at, there in zip(changed.tolist(), kept, strict=True):
        if there:
            torn[at] = memory[at]
    assert Journal(torn).record == (journal.record if all(kept) else record)


def test_a_record_that_is_too_long_is_refused_and_nothing_changed():
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    journal = Journal(memory)
    journal.write({"a": 1})
    with pytest.raises(ValueError, match="does not fit"):
        journal.write({"a": "x" * SIZE})
    assert Journal(memory).record == {"a": 1} == journal.record


def killed_in_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = store._optimizer
    assert optimizer is not None

    class Half:
        fields = optimizer.fields

        def step(self, span: Any, *rest: Any) -> Any:
            optimizer.step(span, *rest)
            for tensor in span.new.values():
                tensor[::2] = float("nan")
            raise Killed

    monkeypatch.setattr(store, "_optimizer", Half())


def killed_before_the_record(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(record: Any) -> None:
        raise Killed

    monkeypatch.setattr(store._held.journal, "write", write)


def killed_within_the_record(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, write = store._held.journal, store._held.journal.write

    def half(record: Any) -> None:
        before = bytes(journal._memory)
        write(record)
        changed = [at for at, (a, b) in enumerate(zip(before, journal._memory, strict=True)) if a != b]
        for at in changed[len(changed) // 2 :]:
            journal._memory[at] = before[at]
        raise Killed

    monkeypatch.setattr(journal, "write", half)


def killed_after_the_record(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write = store._held.journal.write

    def whole(record: Any) -> None:
        write(record)
        raise Killed

    monkeypatch.setattr(store._held.journal, "write", whole)


@pytest.mark.parametrize("optimizer", [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {}), ("Adagrad", {})], ids=str)
@pytest.mark.parametrize(
    ("kill", "applied"),
    [
        (killed_in_step, False),
        (killed_before_the_record, False),
        (killed_within_the_record, False),
        (killed_after_the_record, True),
    ],
)
def test_whoever_is_killed_within_an_update_leaves_it_whole_or_absent(
    file: int,
    optimizer: tuple[str, dict[str, Any]],
    kill: Callable[[Store, pytest.MonkeyPatch], None],
    applied: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    gradients = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    wanted = Store(os.memfd_create("wanted"))
    store = opened(file)
    for each in (wanted, store):
        each.remember({"a": WORKER})
        each.initialise(torch.ones(33), *optimizer)
    for number, gradient in enumerate(gradients, start=1):
        with monkeypatch.context() as patch:
            kill(store, patch)
            with pytest.raises(Killed):
                store.apply(gradient, {"a": number})
        store.close()
        store = opened(file)
        assert store.workers["a"]["push"] == number - (not applied)
        if store.workers["a"]["push"] < number:
            store.apply(gradient, {"a": number})
        wanted.apply(gradient, {"a": number})
        assert store.version == wanted.version == number
        assert torch.equal(store.params, wanted.params)
        assert store.state.keys() == wanted.state.keys()
        assert all(torch.equal(store.state[name], wanted.state[name]) for name in store.state)
    store.close()
    wanted.close()


def test_a_store_whose_first_weights_were_half_there_has_none(file: int, monkeypatch: pytest.MonkeyPatch):
    store = opened(file)
    killed_before_the_record(store, monkeypatch)
    with pytest.raises(Killed):
        store.initialise(torch.ones(7), "SGD", {"lr": 0.1})
    store.close()
    monkeypatch.undo()
    store = opened(file)
    assert not store.ready
    store.initialise(torch.full((5,), 2.0), "delta", {}, "plan")
    store.close()
    store = opened(file)
    assert store.version == 0 and store.contents["fingerprint"] == "plan"
    assert torch.equal(store.params, torch.full((5,), 2.0))
    with pytest.raises(ValueError, match="has weights already, of version 0"):
        store.initialise(torch.ones(5), "delta", {})
    store.close()


def test_memory_is_that_of_two_banks_and_a_journal_and_does_not_grow(file: int):
    store = opened(file)
    store.remember({"a": WORKER})
    store.initialise(torch.zeros(100_000), "SGD", {"lr": 0.1, "momentum": 0.9})
    size = os.fstat(file).st_size
    assert 4 * 400_000 <= size - SIZE <= 4 * 404_000
    for number in range(1, 40):
        store.apply(torch.ones(100_000), {"a": number})
    assert os.fstat(file).st_size == size
    store.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("together", [True, False])
def test_what_is_not_finite_changes_no_weight_and_counts_as_come(file: int, bad: float, together: bool):
    """A server does not rely on its workers for that."""
    store = opened(file)
    store.remember({"a": WORKER})
    store.initialise(torch.zeros(70_000), "SGD", {"lr": 0.5, "momentum": 0.9})
    spoilt = torch.ones(70_000)
    spoilt[69_999] = bad
    for number, gradient in enumerate((torch.ones(70_000), spoilt, torch.ones(70_000)), start=1):
        if together:
            store.apply(gradient, {"a": number})
        else:
            assert not store.push("a", number, gradient, 0)
        assert store.workers["a"]["push"] == number
        assert store.workers["a"]["dropped"] == (number == 2)
    assert store.version == 2
    assert torch.equal(store.params, torch.full((70_000,), -0.5 - 0.5 * 1.9))
    assert torch.equal(store.state["momentum_buffer"], torch.full((70_000,), 1.9))
    assert store.lags["dropped"] == (0 if together else 1)
    store.close()


OPTIMIZERS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": None}),  # as torch takes it: falsy
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "maximize": True}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {"initial_accumulator_value": 0.5}),
    ("Adadelta", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("ASGD", {}),
    ("Rprop", {}),
]


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("lr", [None, 0.05])
def test_an_optimizer_on_a_server_is_that_of_torch(file: int, name: str, arguments: dict[str, Any], lr: float | None):
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(17, generator=generator), torch.randn(6, 17, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    theirs = getattr(torch.optim, name)([parameter], **arguments)
    store = opened(file)
    store.remember({"a": WORKER})
    store.initialise(start, name, arguments)
    for number, gradient in enumerate(gradients, start=1):
        store.close()
        store = opened(file)  # its state is all in the file
        for group in theirs.param_groups:
            group["lr"] = lr if lr is not None else group["lr"]
        parameter.grad = gradient.clone()
        theirs.step()
        store.apply(gradient, {"a": number}, lr)
        torch.testing.assert_close(store.params, parameter.detach(), rtol=2e-6, atol=1e-7)
    store.close()


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("together", [False, True])
def test_a_parameter_without_a_gradient_is_not_stepped(file: int, name: str, arguments: dict[str, Any], together: bool):
    """As torch's: the first parameter has a gradient in all steps, the second in some, the third in none."""
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(17, generator=generator), torch.randn(6, 17, generator=generator)
    parameters = [torch.nn.Parameter(part.clone()) for part in start.split((5, 9, 3))]
    theirs = getattr(torch.optim, name)(parameters, **arguments)
    store = opened(file)
    store.remember({"a": WORKER})
    store.initialise(start, name, arguments)
    for number, gradient in enumerate(gradients, start=1):
        store.close()
        store = opened(file)
        skipped = slice(14, 17) if number in (2, 3, 5) else slice(5, 17)
        gradient[skipped] = 0.0
        for parameter, part in zip(parameters, gradient.split((5, 9, 3)), strict=True):
            parameter.grad = part.clone() if part.any() else None
        theirs.step()
        skips = [(skipped.start, skipped.stop)]
        if together:
            store.apply(gradient, {"a": number}, skips=skips)
        else:
            reply = torch.empty(17)
            assert store.push("a", number, gradient, 0, reply=reply, skips=skips)
            assert torch.equal(reply, store.params)
        torch.testing.assert_close(store.params, torch.cat([*parameters]).detach(), rtol=2e-6, atol=1e-7)
    assert torch.equal(store.params[14:], start[14:])
    assert store.scalars[-1][1] == {} and all(not field[14:].any() for field in store.state.values())
    store.close()


def test_a_large_shard_is_stepped_where_there_are_gradients(file: int):
    """A shard of several pieces and threads, with spans across the borders of pieces."""
    numel = 1_200_000
    store = Store(os.dup(file), threads=2)
    store.remember({"a": WORKER})
    store.initialise(torch.zeros(numel), "SGD", {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.5})
    borders = torch.tensor([10, 600_000, 600_001, 1_100_000])
    expected, momentum = torch.zeros(numel), torch.zeros(numel)
    for number in (1, 2, 3):
        skips = [(0, 10), (600_000, 600_001), (1_100_000, numel)][number - 1 :]
        used = torch.ones(numel, dtype=torch.bool)
        for start, stop in skips:
            used[start:stop] = False
        store.push("a", number, used.float(), 0, skips=skips)
        momentum[used] = 0.5 * momentum[used] + (1.0 + 0.5 * expected[used])
        expected[used] -= momentum[used]
        assert torch.equal(store.params[borders], expected[borders])
        assert torch.equal(store.params, expected)
    store.close()


def test_state_in_too_many_parts_is_refused(file: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optimizers, "MOST_RUNS", 3)
    store = opened(file)
    store.remember({"a": WORKER})
    store.initialise(torch.zeros(9), "Adam", {"lr": 0.1})
    gradient = torch.ones(9)
    store.push("a", 1, gradient, 0, skips=[(0, 2)])
    before = store.params.clone()
    with pytest.raises(TooManyRuns, match=r"into 5 parts, of 3 at most.*update_on_server=False"):
        store.push("a", 2, gradient, 0, skips=[(4, 6), (7, 9)])
    assert torch.equal(store.params, before) and store.version == 1
    store.push("a", 2, gradient, 0)
    assert store.scalars == [(2, {"step": 1}), (9, {"step": 2})]
    store.close()


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True}, Sgd),
        ("Adam", {"weight_decay": 0.01, "maximize": True}, Adam),
        ("AdamW", {}, Adam),
    ],
    ids=str,
)
def test_decay_is_part_of_the_fused_step_and_late_pushes_leave_it_whole(
    name: str, arguments: dict[str, Any], kind: type
):
    """As torch's, where a late push counts for less: its gradient shrinks, or the rate, and decay with it only."""
    start = torch.tensor([1.0, -3.0, 0.25])
    for factor, scale in ((1.0, 0.5), (0.25, 1.0)):
        ours, theirs = make_optimizer(name, arguments), torch.nn.Parameter(start.clone())
        assert isinstance(ours, kind) and isinstance(make_optimizer(name, arguments, known=True), kind)
        optimizer = getattr(torch.optim, name)([theirs], **arguments)
        optimizer.param_groups[0]["lr"] *= factor
        banks = [{field: torch.zeros(3) for field in ("params", *ours.fields)} for _ in range(2)]
        banks[0]["params"].copy_(start)
        scalars: dict[str, float] = {}
        for number in range(4):
            gradient = torch.tensor([0.5, 0.125, -2.0]) * (number + 1)
            theirs.grad = gradient * scale
            optimizer.step()
            old, new = banks[number % 2], banks[1 - number % 2]
            reply = torch.empty(3)
            scalars = ours.step(
                ShardSpan(old, new, gradient, reply, 3), scalars, ServerRates(factor=factor, scale=scale)
            )
            torch.testing.assert_close(new["params"], theirs.detach(), rtol=3e-7, atol=1e-7)
            assert torch.equal(reply, new["params"])


@pytest.mark.parametrize(
    ("name", "arguments", "error", "match"),
    [
        ("LBFGS", {}, ValueError, "'LBFGS'. cannot be sharded"),
        ("Adafactor", {}, ValueError, "'Adafactor'. cannot be sharded"),
        ("SparseAdam", {}, ValueError, "'SparseAdam'. cannot be sharded"),
        ("Optimizer", {}, ValueError, "must be 'delta', or the name of a class"),
        ("lr_scheduler", {}, ValueError, "must be 'delta', or the name of a class"),
        ("Adam", {"learning_rate": 1}, TypeError, "learning_rate"),
        ("Adam", {"lr": -1.0}, ValueError, "Invalid learning rate"),
        ("delta", {"lr": 1.0}, TypeError, r"takes no arguments, got \['lr'\]"),
    ],
)
def test_optimizers_that_are_refused(name: str, arguments: dict[str, Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        make_optimizer(name, arguments)


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS, ids=str)
def test_one_that_is_known_is_the_same(name: str, arguments: dict[str, Any]):
    first, again = make_optimizer(name, arguments), make_optimizer(name, arguments, known=True)
    assert type(first) is type(again) and first.fields == again.fields
    if type(first) in (Adam, Sgd):
        assert vars(first) == vars(again)


def test_half_precision_gradients_are_applied_to_fp32_weights(file: int):
    store = opened(file)
    store.remember({"a": WORKER})
    store.initialise(torch.zeros(3), "SGD", {"lr": 1.0})
    store.apply(torch.full((3,), 2.0**-20, dtype=torch.bfloat16), {"a": 1})
    store.apply(torch.full((3,), 1.0, dtype=torch.bfloat16), {"a": 2})
    assert store.params.tolist() == [-1.0 - 2.0**-20] * 3
    store.close()
