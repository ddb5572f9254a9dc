"""Workers that pull while they compute: a gradient is of what was pulled before, and is measured from there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_async.algorithms import AdaptiveDelayCompensation, Dana, DelayCompensation, GapAware, StalenessPolicy
from lightning_async.comm.p2p import ShmChannel
from lightning_async.parameter_server.store import BOTH, Store
from tests.algorithms.replicas import fill
from tests.parameter_server.running import Running, running
from tests.parameter_server.test_policies import NAMES, ORDER, SGD, N, Oracle, Stored
from tests.parameter_server.test_server import lose_answer


class Overlapping:
    """As with `overlap=True`: what a push brings is there once the next gradient is computed, at what was there before.

    Args:
        server, oracle: that both are pushed to.
        name: this worker's.
    """

    def __init__(self, server: Running, oracle: Oracle, name: str) -> None:
        self.server, self.oracle, self.name = server, oracle, name
        self.client = server.worker(name, overlap=True)
        self.client.gradients[0].copy_(fill(N, 0))
        (version,) = self.client.start(*SGD).versions
        self.has = self.coming = version, oracle.pull(name)

    def step(self, gradient: Tensor, pull: bool) -> None:
        (base, self.oracle.pulled[self.name]), self.has = self.has, self.coming
        lag = self.server.store.version - base
        self.oracle.push(self.name, gradient, lag)
        self.client.gradients[0].copy_(gradient)
        answer = self.client.push(bases=[base], pull=pull)
        assert answer.lags == (lag,)
        if pull:
            self.coming = answer.versions[0], self.oracle.pull(self.name)
            torch.testing.assert_close(self.client.weights[0].double(), self.coming[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pull_every", [1, 2])
@pytest.mark.parametrize(
    "policy",
    [GapAware(), Dana(GapAware("gradient")), DelayCompensation(0.5), AdaptiveDelayCompensation(0.5, eps=1e-4)],
    ids=str,
)
def test_what_is_measured_is_from_what_a_gradient_was_computed_at(
    policy: StalenessPolicy, pull_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, pushes = Oracle(policy), dict.fromkeys(NAMES, 0)
    with running(N, staleness=policy) as server:
        workers = {name: Overlapping(server, oracle, name) for name in NAMES}
        for turn, name in enumerate(ORDER):
            pushes[name] += 1
            if turn % 4 == 1:  # the same is asked again
                lose_answer(server, ShmChannel, monkeypatch, new_server=False)
            if turn % 4 == 3:  # of another server, which knows what is in the memory alone
                server.server.close()
                server.begin()
            if turn == 11:  # at a sync point: what is pulled last is pulled again, and nothing is under way
                (version,) = workers[name].client.pull().versions
                workers[name].has = workers[name].coming = version, oracle.pull(name)
            workers[name].step(fill(N, turn + 1, 0.5), pushes[name] % pull_every == 0)
            torch.testing.assert_close(server.store.params.double(), oracle.x, rtol=1e-5, atol=1e-5)
        other = Store(os.memfd_create("test"))  # what a snapshot has
        other.restore(server.store.record, {part: array.clone() for part, array in server.store.parts.items()})
        for number, spare in enumerate((True, False, True), pushes["a"] + 1):
            for store in (server.store, other):
                store.push("a", number, fill(N, 30 + number), 3, spare=spare)
            assert torch.equal(server.store.params, other.params)
        other.close()


def test_a_second_place_is_there_for_who_asks_for_it() -> None:
    page, mine = os.sysconf("SC_PAGESIZE"), Stored(GapAware())

    def used() -> int:
        return os.fstat(mine.file).st_blocks * 512

    with_one, target = used(), torch.empty(N)
    for _ in range(2):
        mine.store.pull("b", target, spare=True)
        assert used() - with_one == page
    mine.reopen()
    before: Any = {name: told for name, told in mine.store.workers.items() if name != "b"}
    assert [name for name, told in mine.store.workers.items() if told["bank"] & BOTH] == ["b"]
    mine.store.remember(before)
    assert used() == with_one - page
    mine.close()
