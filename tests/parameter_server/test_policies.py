"""What a store makes of late pushes: each policy against its equation in float64, and whole or absent when killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_async.algorithms import (
    AdaptiveDelayCompensation,
    AdaptiveLr,
    Bounded,
    Buffered,
    Clipping,
    Dana,
    DelayCompensation,
    GapAware,
    NoCorrection,
    StalenessPolicy,
    WeightPrediction,
)
from lightning_async.parameter_server.partition import Spans
from lightning_async.parameter_server.shared_memory import SIZE
from lightning_async.parameter_server.store import Store
from tests.algorithms.catalogue import STALENESS
from tests.algorithms.replicas import fill
from tests.parameter_server.running import running
from tests.parameter_server.test_store import (
    WORKER,
    Killed,
    killed_after_the_record,
    killed_before_the_record,
    killed_in_step,
    killed_within_the_record,
)

N, LR, MU = 33, 0.05, 0.5
Optimizer = tuple[str, dict[str, Any]]
SGD: Optimizer = ("SGD", {"lr": LR, "momentum": MU})
NAMES = "abc"
ORDER = "abcaabbcabcccabacbba"  # who pushes, one after the other


class Stored:
    """A store and its workers, each with what it has pulled."""

    def __init__(
        self,
        policy: StalenessPolicy,
        optimizer: tuple[str, dict[str, Any]] = SGD,
        names: str = NAMES,
        start: Tensor | None = None,
    ) -> None:
        start = fill(N, 0) if start is None else start
        self.file = os.memfd_create("test")
        self.store = Store(os.dup(self.file))
        self.store.remember({name: {**WORKER, "life": 1} for name in names})
        self.store.initialise(start, *optimizer, policy=policy)
        self.pulled = {name: torch.empty_like(start) for name in names}
        self.bases = dict.fromkeys(names, 0)
        for name in names:
            self.pull(name)

    def reopen(self) -> None:
        self.store.close()
        self.store = Store(os.dup(self.file))

    def pull(self, name: str) -> None:
        self.store.pull(name, self.pulled[name])
        self.bases[name] = self.store.version

    def push(self, name: str, gradient: Tensor, skips: Spans = ()) -> bool:
        number = self.store.workers[name]["push"] + 1
        self.store.push(name, number, gradient, self.store.version - self.bases[name], skips=skips)
        return self.store.workers[name]["dropped"]

    def close(self) -> None:
        self.store.close()
        os.close(self.file)


@pytest.fixture
def stored() -> Iterator[Callable[..., Stored]]:
    made: list[Stored] = []

    def make(*given: Any, **named: Any) -> Stored:
        made.append(Stored(*given, **named))
        return made[-1]

    yield make
    for each in made:
        each.close()


def optimizers(policy: StalenessPolicy) -> list[tuple[str, dict[str, Any]]]:
    others = (
        [] if policy.momentum_by_worker else [("Adam", {"lr": 0.01}), ("Adagrad", {"lr": 0.1}), ("SGD", {"lr": LR})]
    )
    return [SGD, *others, *([] if policy.momentum_by_worker else [("delta", {})])]


@pytest.mark.parametrize("row", STALENESS, ids=lambda row: row.name)
def test_one_worker_has_the_plain_optimizer_to_the_bit(row: Any, stored: Callable[..., Stored]):
    policy = row.make()
    for optimizer in optimizers(policy):
        plain, mine = (stored(each, optimizer, names="a") for each in (NoCorrection(), policy))
        for turn in range(5):
            gradient = fill(N, turn + 1, 0.5)
            assert not mine.push("a", gradient)
            plain.push("a", gradient)
            mine.pull("a")
            plain.pull("a")
            bound = 1e-6 if policy.momentum_by_worker else 0.0  # it keeps a sum of momenta, which is rounded as such
            for there, wanted in [(mine.store.params, plain.store.params)] + [
                (mine.store.state[name], plain.store.state[name]) for name in plain.store.state
            ]:
                torch.testing.assert_close(there, wanted, rtol=bound, atol=bound)
            if not (policy.predicts or policy.momentum_by_worker):
                assert torch.equal(mine.pulled["a"], plain.store.params)


POLICIES = [*((row.name, row.make()) for row in STALENESS), ("Buffered-3", Buffered(3, DelayCompensation(0.5)))]


@pytest.mark.parametrize("policy", [policy for _, policy in POLICIES], ids=[name for name, _ in POLICIES])
def test_parameters_without_gradients_are_as_if_absent(policy: StalenessPolicy, stored: Callable[..., Stored]):
    """The others move as in a store without them; they stay, and workers pull what they are."""
    skips, rest = [(10, 20)], [*range(10), *range(20, N)]
    for name, arguments in optimizers(policy):
        optimizer = name, arguments if name == "delta" else {**arguments, "weight_decay": 0.1}
        whole, part = stored(policy, optimizer), stored(policy, optimizer, start=fill(N, 0)[rest])
        for turn, worker in enumerate(ORDER):
            gradient = fill(N, turn + 1, 0.5)
            gradient[10:20] = 0.0
            assert whole.push(worker, gradient, skips) == part.push(worker, gradient[rest])
            if turn % 2:
                whole.reopen()
            whole.pull(worker)
            part.pull(worker)
            torch.testing.assert_close(whole.store.params[rest], part.store.params, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(whole.pulled[worker][rest], part.pulled[worker], rtol=1e-6, atol=1e-6)
            assert torch.equal(whole.store.params[10:20], fill(N, 0)[10:20])
            assert torch.equal(whole.pulled[worker][10:20], fill(N, 0)[10:20])
        assert whole.store.version == part.store.version > 0
        for name, field in part.store.state.items():
            torch.testing.assert_close(whole.store.state[name][rest], field, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("policy", [policy for _, policy in POLICIES], ids=[name for name, _ in POLICIES])
def test_parameters_that_were_trained_stay_once_frozen(policy: StalenessPolicy, stored: Callable[..., Stored]):
    """Whatever momentum they have; and workers pull what they are, in place of where their momentum points."""
    for optimizer in optimizers(policy):
        mine = stored(policy, optimizer)
        for turn, worker in enumerate(ORDER[:9]):
            mine.push(worker, fill(N, turn + 1, 0.5))
            mine.pull(worker)
        frozen = mine.store.params[10:20].clone()
        state = {name: field[10:20].clone() for name, field in mine.store.state.items() if name != "ahead"}
        for turn, worker in enumerate(ORDER[9:18]):
            gradient = fill(N, turn + 1, 0.5)
            gradient[10:20] = 0.0
            mine.push(worker, gradient, [(10, 20)])
            mine.pull(worker)
            assert torch.equal(mine.store.params[10:20], frozen)
            assert torch.equal(mine.pulled[worker][10:20], frozen)
        assert all(torch.equal(mine.store.state[name][10:20], field) for name, field in state.items())
        mine.store.remember({name: entry for name, entry in mine.store.workers.items() if name != "a"})
        mine.pull("b")
        assert torch.equal(mine.pulled["b"][10:20], frozen)


def test_a_buffered_update_steps_what_any_of_its_pushes_has(stored: Callable[..., Stored]):
    mine = stored(Buffered(2), ("SGD", {"lr": 1.0, "weight_decay": 1.0}), start=torch.ones(6))
    for turn in range(2):
        mine.push("a", torch.tensor([2.0, 2.0, 0.0, 0.0, 0.0, 0.0]), [(2, 6)])
        mine.reopen()
        mine.push("b", torch.tensor([0.0, 4.0, 4.0, 0.0, 0.0, 8.0]), [(0, 1), (3, 5)])
        before = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0] if turn == 0 else [-1.0, -3.0, -2.0, 1.0, 1.0, -4.0])
        mean = torch.tensor([1.0, 3.0, 2.0, 0.0, 0.0, 4.0])
        used = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
        assert torch.equal(mine.store.params, before - used * (mean + before))


def test_one_worker_of_dana_has_nesterovs_momentum(stored: Callable[..., Stored]):
    mine = stored(Dana(GapAware("gradient")), ("SGD", {"lr": LR, "momentum": MU, "weight_decay": 0.1}), names="a")
    parameter = torch.nn.Parameter(fill(N, 0))
    theirs = torch.optim.SGD([parameter], lr=LR, momentum=MU, nesterov=True)
    for _ in range(8):
        parameter.grad = parameter.detach() ** 3  # a gradient that depends on where it is computed
        theirs.step()
        decayed = 0.1 * mine.store.params  # what the store adds of its own, at other weights than torch would
        mine.push("a", mine.pulled["a"] ** 3 - decayed)
        mine.pull("a")
        torch.testing.assert_close(mine.pulled["a"], parameter.detach(), rtol=1e-5, atol=1e-6)


class Oracle:
    """SGD with momentum in float64, with all that policies may ask for, written for reading."""

    def __init__(self, policy: StalenessPolicy) -> None:
        self.policy = policy
        self.x = fill(N, 0).double()
        self.m = torch.zeros(N, dtype=torch.float64)
        self.own = {name: torch.zeros(N, dtype=torch.float64) for name in NAMES}
        self.pulled = {name: self.x.clone() for name in NAMES}
        self.square = torch.zeros(N, dtype=torch.float64)
        self.steps: list[float] = []
        self.lags: list[int] = []
        self.last = torch.zeros(N, dtype=torch.float64)
        self.buffer: list[Tensor] = []

    def push(self, name: str, gradient: Tensor, lag: int) -> None:
        policy, g = self.policy, gradient.double()
        self.lags.append(lag)
        moved = self.x - self.pulled[name]
        rate = 1.0
        match policy:
            case DelayCompensation():
                g = g + policy.strength * g * g * moved
            case AdaptiveDelayCompensation():
                self.square = policy.decay_square * self.square + (1 - policy.decay_square) * g * g
                g = g + policy.strength / (self.square + policy.eps).sqrt() * g * g * moved
            case AdaptiveLr():
                rate = (1 + lag) ** -0.5
            case Bounded():
                if lag >= policy.max_staleness:
                    return
            case Clipping():
                g = g * min(1.0, policy.max_norm / g.norm().item())
            case GapAware() if lag and self.steps:
                rate = 1 / (1 + moved.norm().item() / (sum(self.steps) / len(self.steps)))
            case Dana(policy=DelayCompensation(strength=strength)):
                g = g + strength * g * g * moved
            case Dana(policy=GapAware()) if lag and self.steps:
                g = g / (1 + moved.norm().item() / (sum(self.steps) / len(self.steps)))
            case Buffered():
                self.buffer.append(g * (1 + lag) ** -0.5)
                if len(self.buffer) < policy.buffer_size:
                    return
                g = torch.stack(self.buffer).mean(0)
                self.buffer = []
        before = self.x
        if isinstance(policy, Dana):
            self.own[name] = MU * self.own[name] + g
            self.x = self.x - LR * self.own[name]
        else:
            self.m = MU * self.m + g
            self.x = self.x - rate * LR * self.m
        self.last = self.x - before
        self.steps.append(self.last.norm().item())
        self.ahead_by = sum(self.lags) / len(self.lags)

    def pull(self, name: str) -> Tensor:
        there = self.x
        if isinstance(self.policy, Dana):
            there = self.x - LR * MU * torch.stack(list(self.own.values())).sum(0)
        if isinstance(self.policy, WeightPrediction) and self.steps:
            there = self.x + self.policy.steps * self.ahead_by * self.last
        self.pulled[name] = there.clone()
        return there


@pytest.mark.parametrize(
    "policy",
    [
        NoCorrection(), DelayCompensation(0.5), AdaptiveDelayCompensation(0.5, eps=1e-4), AdaptiveLr(form="sqrt"),
        Bounded(3), Clipping(2.0), GapAware(), Dana(), Dana(GapAware("gradient")),
        Buffered(3, AdaptiveLr(form="sqrt")), WeightPrediction(0.25),
    ],
    ids=str,
)  # fmt: skip
def test_several_workers_have_what_the_equation_says(policy: StalenessPolicy, stored: Callable[..., Stored]):
    oracle, mine = Oracle(policy), stored(policy)
    dropped = 0
    for turn, name in enumerate(ORDER):
        gradient = fill(N, turn + 1, 0.5)
        lag = mine.store.version - mine.bases[name]
        oracle.push(name, gradient, lag)
        dropped += mine.push(name, gradient)
        if turn % 5 == 2:
            mine.reopen()  # its state is all in the file
        mine.pull(name)
        torch.testing.assert_close(mine.store.params.double(), oracle.x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.pulled[name].double(), oracle.pull(name), rtol=1e-5, atol=1e-5)
    assert mine.store.lags["counts"].keys() >= {"0", "1"}
    assert sum(mine.store.lags["counts"].values()) == len(ORDER)
    assert (
        mine.store.lags["dropped"] == dropped == (sum(lag >= 3 for lag in oracle.lags) if policy == Bounded(3) else 0)
    )
    assert mine.store.lags["mean"] == pytest.approx(sum(oracle.lags) / len(oracle.lags))
    expected = len(ORDER) // 3 if policy.buffer_size > 1 else len(ORDER) - dropped
    assert mine.store.version == expected


@pytest.mark.parametrize("policy", [Dana(GapAware("gradient")), Dana(DelayCompensation(0.5))], ids=str)
def test_what_was_computed_at_the_weights_that_a_sync_point_shows_is_late_from_there(policy: StalenessPolicy):
    """Elsewhere workers pull what is ahead of these."""
    oracle = Oracle(policy)
    with running(N, staleness=policy) as server:
        clients = {name: server.worker(name) for name in NAMES}
        for client in clients.values():
            client.gradients[0].copy_(fill(N, 0))
            client.start(*SGD)
        for turn, name in enumerate(ORDER):
            if turn % 4 == 3:
                for each, client in clients.items():
                    client.pull("params")
                    oracle.pulled[each] = oracle.x.clone()
            client, gradient = clients[name], fill(N, turn + 1, 0.5)
            client.gradients[0].copy_(gradient)
            answer = client.push()
            oracle.push(name, gradient, answer.lags[0])
            torch.testing.assert_close(client.weights[0].double(), oracle.pull(name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "policy",
    [Dana(GapAware("gradient")), AdaptiveDelayCompensation(0.5), Buffered(3), WeightPrediction(), Bounded(2)],
    ids=str,
)
@pytest.mark.parametrize(
    ("kill", "applied"),
    [
        (killed_in_step, False),
        (killed_before_the_record, False),
        (killed_within_the_record, False),
        (killed_after_the_record, True),
    ],
)
def test_whoever_is_killed_within_a_push_leaves_it_whole_or_absent(
    policy: StalenessPolicy,
    kill: Callable[[Store, pytest.MonkeyPatch], None],
    applied: bool,
    stored: Callable[..., Stored],
    monkeypatch: pytest.MonkeyPatch,
):
    wanted, mine = stored(policy), stored(policy)
    for turn, name in enumerate(ORDER[:9]):
        gradient, number = fill(N, turn + 1, 0.5), mine.store.workers[name]["push"] + 1
        with monkeypatch.context() as patch:
            kill(mine.store, patch)
            try:
                mine.push(name, gradient)
                done = True  # a push that is gathered, or left out, takes no step to be killed in
            except Killed:
                done = applied
        mine.reopen()
        assert mine.store.workers[name]["push"] == number - (not done)
        if not done:
            mine.push(name, gradient)
        wanted.push(name, gradient)
        for each in (mine, wanted):
            each.pull(name)
        assert mine.store.version == wanted.store.version
        assert torch.equal(mine.store.params, wanted.store.params)
        assert torch.equal(mine.pulled[name], wanted.pulled[name])
        assert all(torch.equal(mine.store.state[each], wanted.store.state[each]) for each in wanted.store.state)
        assert mine.store.lags == wanted.store.lags


@pytest.mark.parametrize(
    ("policy", "arrays"),
    [
        (NoCorrection(), 0),
        (AdaptiveLr(), 0),
        (GapAware(), 1),
        (DelayCompensation(), 1),
        (Dana(), 2),
        (Dana(GapAware()), 3),
    ],
    ids=str,
)
def test_memory_of_a_worker_is_there_when_a_policy_wants_it_and_is_given_back(
    policy: StalenessPolicy, arrays: int, stored: Callable[..., Stored]
):
    page = os.sysconf("SC_PAGESIZE")
    mine = stored(policy)

    def used() -> int:
        return os.fstat(mine.file).st_blocks * 512

    for name in NAMES:
        mine.push(name, fill(N, 1))
    three = used()
    mine.store.remember({name: told for name, told in mine.store.workers.items() if name != "b"})
    assert three - used() == arrays * page
    mine.store.remember({**mine.store.workers, "d": {**WORKER, "life": 2}})
    mine.pulled["d"], mine.bases["d"] = torch.empty(N), 0
    mine.pull("d")  # where b was
    mine.push("d", fill(N, 1))
    assert used() == three
    assert not arrays or mine.store.workers["d"]["slot"] == 1
    mine.store.remember({})
    assert used() == three - len(NAMES) * arrays * page
    mine.reopen()
    assert used() == three - len(NAMES) * arrays * page
    assert mine.store.workers == {} and mine.store.version == 4


def test_the_momentum_of_a_worker_that_is_gone_leads_nowhere(stored: Callable[..., Stored]):
    mine = stored(Dana())
    for turn, name in enumerate(ORDER):
        mine.push(name, fill(N, turn + 1))
        mine.pull(name)
    there, total = mine.store.params.clone(), mine.store.state["momentum_buffer"].clone()
    mine.store.remember({name: told for name, told in mine.store.workers.items() if name == "a"})
    mine.pull("a")
    assert torch.equal(mine.store.params, there)
    left = mine.store.state["momentum_buffer"]
    assert not torch.allclose(left, total, atol=0.1)
    torch.testing.assert_close(mine.pulled["a"], there - LR * MU * left, rtol=1e-6, atol=1e-6)
    mine.store.remember({})
    torch.testing.assert_close(mine.store.state["momentum_buffer"], torch.zeros(N), rtol=0, atol=1e-5)
    assert mine.store.version == len(ORDER)


@pytest.mark.parametrize(
    "optimizer",
    [("Adam", {}), ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}), ("delta", {})],
    ids=str,
)
def test_dana_is_for_sgd_with_momentum(optimizer: tuple[str, dict[str, Any]]):
    store = Store(os.memfd_create("test"))
    with pytest.raises(ValueError, match="has no momentum that each worker could have of its own"):
        store.initialise(torch.zeros(3), *optimizer, policy=Dana())
    assert not store.ready
    store.close()


def test_half_precision_gradients_are_weighed_and_corrected_in_fp32(stored: Callable[..., Stored]):
    for policy in (DelayCompensation(0.5), Clipping(0.5), Dana(GapAware("gradient")), Buffered(2)):
        whole, half = stored(policy), stored(policy)
        for turn, name in enumerate("abab"):
            gradient = fill(N, turn + 1).bfloat16()
            whole.push(name, gradient.float())
            half.push(name, gradient)
        torch.testing.assert_close(half.store.params, whole.store.params, rtol=1e-6, atol=1e-6)


def test_many_workers_come_and_go_and_the_journal_stays_small():
    store = Store(file := os.memfd_create("test"))
    store.initialise(torch.zeros(3), "SGD", {"lr": 0.1, "momentum": 0.5}, policy=Dana())
    for number in range(1000):
        store.remember({f"host-{number}.example.org": {**WORKER, "life": number + 1}})
        store.push(f"host-{number}.example.org", 1, torch.ones(3), 0)
    assert store.record["lives"] == 1000 and len(store.workers) == 1
    assert os.fstat(file).st_size < SIZE + (6 + 2 * 2) * os.sysconf("SC_PAGESIZE")
    many = {f"{number}": {**WORKER, "life": 3000 + number} for number in range(280)}
    store.remember(many)
    with pytest.raises(ValueError, match=r"remembers 679 workers, and has no room for one more"):
        store.remember({**many, **{f"more {number}": {**WORKER, "life": 4000 + number} for number in range(400)}})
    assert len(store.workers) == 280
    for name in store.workers:  # and those that it has taken fit, whatever they do
        store.push(name, 10**9, torch.ones(3), 10**8)
    store.close()
