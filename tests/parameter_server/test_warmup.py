"""The first versions are made in step, whatever the mode; then pushes are applied as they come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lightning_async.algorithms import NAMES
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.consistency import WorkerRules
from tests.algorithms.replicas import fill
from tests.parameter_server.running import running
from tests.parameter_server.test_server import on_threads, until

N = 8
SGD = {"lr": 0.1, "momentum": 0.5}


def push(client: Client, gradient: torch.Tensor, weight: float = 1.0) -> Any:
    client.gradients[0].copy_(gradient)
    return client.push(weight=weight)


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_first_together_then_as_they_come(mode: str) -> None:
    with running(N, mode=mode, num_workers=2, warmup_steps=2, max_staleness=9) as server:
        a, b = server.started("a"), server.started("b")
        assert a.pull().in_step
        for turn in range(2):
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(push, a, torch.ones(N), 1.0)
                until(lambda: "a" in server.server._rounds.waiting)
                assert not waits.done()
                push(b, torch.full((N,), 5.0), 3.0)
                answer = waits.result(20)
            assert (answer.versions, answer.lags, answer.in_step) == ((turn + 1,), (0,), turn == 0)
            assert a.weights[0].tolist() == b.weights[0].tolist() == [4.0 * (turn + 1)] * N
        assert [push(a, torch.ones(N)).versions for _ in range(3)] == [(3,), (4,), (5,)]
        assert push(b, torch.ones(N)).lags == (3,)
        assert b.weights[0].tolist() == [12.0] * N


@pytest.mark.parametrize("policy", sorted(NAMES))
def test_in_step_no_push_is_late_whatever_the_policy(policy: str) -> None:
    """It is training of one worker on the mean; what a policy keeps of each worker begins afterwards, as if anew."""
    optimizer = ("SGD", SGD) if "dana" in policy else ("Adam", {"lr": 0.1})
    found = []
    for joint in (False, True):
        with running(N, num_workers=1 if joint else 2, staleness=policy, warmup_steps=0 if joint else 4) as server:
            workers = [server.worker(name) for name in ("a" if joint else "ab")]
            for worker in workers:
                worker.gradients[0].copy_(fill(N, 9))
                worker.start(*optimizer)
            for turn in range(4):
                gradients = [fill(N, turn), fill(N, 10 + turn)]
                if joint:
                    push(workers[0], sum(gradients) / 2)  # pyright: ignore[reportArgumentType]
                else:
                    on_threads(*[lambda w=w, g=g: push(w, g) for w, g in zip(workers, gradients, strict=True)])
            found.append(workers[0].weights[0].clone())
            if not joint:
                assert torch.equal(workers[0].weights[0], workers[1].weights[0])
                assert not workers[0].pull().in_step
    if policy in ("fedbuff", "rennala"):  # these gather several pushes otherwise
        assert not torch.equal(found[0], fill(N, 9))
    elif policy != "clipping":  # which is of pushes that are not late, too
        torch.testing.assert_close(found[0], found[1])


def test_momentum_of_workers_together_is_given_up_with_the_first_step_of_one() -> None:
    """What is pulled then is ahead by its own momentum only."""
    with running(N, num_workers=2, staleness="dana", warmup_steps=3) as server:
        workers = [server.started(name, "SGD", SGD) for name in "ab"]
        for turn in range(3):
            on_threads(*[lambda w=w, t=turn: push(w, fill(N, t)) for w in workers])
        assert server.store.scalars[0][1]["together"] == 1.0
        before, gradient = server.store.params.clone(), fill(N, 77)
        killed = server.server
        server.begin()
        killed.close()
        push(workers[0], gradient)
        torch.testing.assert_close(server.store.params, before - 0.1 * gradient)
        torch.testing.assert_close(server.store.state["momentum_buffer"], gradient)
        torch.testing.assert_close(workers[0].weights[0], before - 0.1 * 1.5 * gradient)
        assert "together" not in server.store.scalars[0][1]


def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    with running(N, num_workers=2, warmup_steps=5) as server:
        a, b = server.started("a"), server.started("b")
        on_threads(lambda: push(a, torch.ones(N)), lambda: push(b, torch.ones(N)))
        b.close(leave=False)
        assert push(a, torch.ones(N)).versions == (2,)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup_steps=-1.*>= 0"):
        WorkerRules(warmup_steps=-1)


def test_a_training_that_goes_on_brings_what_is_left_of_it() -> None:
    """A server that is started again knows it, too."""
    with running(N, num_workers=1, warmup_steps=3) as server:
        a = server.started("a")
        assert a.pull().in_step
        for _ in range(2):
            push(a, torch.ones(N))
        a.gradients[0].zero_()
        answer = a.start(anew=True, warmup_steps=1)
        assert (answer.versions, answer.in_step) == ((0,), True)
        assert [push(a, torch.ones(N)).in_step for _ in range(2)] == [False, False]
        server.server.close()
        server.begin()
        assert not a.pull().in_step
