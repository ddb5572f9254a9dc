"""How pushes and pulls travel: compressed, of one version, in step at first; from parameters of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_async.algorithms import Int8, TwoBit
from lightning_async.parameter_server.client import PushResiduals
from tests.strategies import problem
from tests.strategies.problem import batches, distance, flat, joined, momentum, train_alone
from tests.strategies.served import BATCHES
from tests.strategies.served_pushes import Odd, Sometimes, decaying_adam, half_loss, plain_sgd
from tests.strategies.test_parameter_server import loss
from tests.strategies.workers import SCENARIOS, Outcomes

pytestmark = pytest.mark.processes

COMPRESSED = (
    "compressed_in_step", "compressed_as_they_come", "compressed_changes", "compressed_tables",
    "goes_on_with_what_was_owed", "others_compression",
)  # fmt: skip
OTHERS = (
    "warmed_up", "warmed_up_then_as_they_come", "half_precision", "odd_parameters", "odd_parameters_compressed",
    "too_wide", "sometimes_used",
)  # fmt: skip
DATA = [batches(0, BATCHES), batches(1, BATCHES)]


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served_pushes", tmp_path_factory.mktemp("compressed"), only=COMPRESSED)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served_pushes", tmp_path_factory.mktemp("others"), only=OTHERS)


def test_all_scenarios_are_run() -> None:
    assert sorted(SCENARIOS["tests.strategies.served_pushes"]) == sorted((*COMPRESSED, *OTHERS))


def in_step(compression: Any, epochs: int) -> list[float]:
    """What one process makes of both ranks' gradients as they arrive."""
    net = problem.network()
    optimizer, numel = momentum(net.parameters()), sum(p.numel() for p in net.parameters())
    kept, out = [PushResiduals(compression, numel) for _ in DATA], torch.empty(numel)
    memory = torch.zeros(4 * numel, dtype=torch.uint8)
    for _ in range(epochs):
        for parts in zip(*DATA, strict=True):
            mean = torch.zeros(numel)
            for batch, feedback in zip(parts, kept, strict=True):
                gradients = torch.autograd.grad(problem.loss_of(net, batch), list(net.parameters()))
                feedback.source.copy_(torch.cat([each.flatten() for each in gradients]))
                compression.decode_(out, memory[: feedback.encode_(memory)])
                mean += out / len(DATA)
            nn.utils.vector_to_parameters(mean, gradients_of(net))
            optimizer.step()
    return flat(net)


def gradients_of(net: nn.Module) -> Any:
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    return [p.grad for p in net.parameters()]


def test_in_step_what_arrives_is_what_is_stepped_with_also_when_the_server_is_killed(compressed: Outcomes) -> None:
    told, expected = compressed("compressed_in_step"), in_step(Int8(), 2)
    assert told[0]["killed"] == 2
    for each in told:
        assert distance(each["values"], expected) < 1e-4  # a sum in another order may round to another code
    assert told[0]["digest"] == told[1]["digest"]


@pytest.mark.parametrize("name", ["compressed_as_they_come", "compressed_changes", "compressed_tables"])
def test_all_learn_and_hold_one_model_at_sync_points(compressed: Outcomes, name: str) -> None:
    learned(compressed(name))


def test_after_a_warm_up_they_learn_as_they_come(others: Outcomes) -> None:
    learned(others("warmed_up_then_as_they_come"))


def learned(told: list[Any]) -> None:
    assert told[0]["digest"] == told[1]["digest"]
    assert told[0]["epochs"] == told[1]["epochs"]
    assert loss(told[0]["values"]) < 0.6 * loss(flat(problem.network()))


def test_a_checkpoint_holds_what_compression_has_yet_to_deliver_of_each_worker(compressed: Outcomes) -> None:
    told, expected = compressed("goes_on_with_what_was_owed"), in_step(TwoBit(), 4)
    for each in told:
        assert each["step"] == 4 * BATCHES
        assert distance(each["values"], expected) < 1e-4
        assert len(each["carried_residual"]) == 2 and min(each["carried_residual"]) > 0.1


def test_a_warm_up_is_training_of_one_process(others: Outcomes) -> None:
    told = others("warmed_up")
    alone = flat(train_alone(joined(*DATA), optimizer=momentum))
    for each in told:
        assert distance(each["values"], alone) < 1e-6


def alone(network: nn.Module, loss_of: Callable[..., Any], lr: float, epochs: int = 2) -> list[float]:
    """Plain SGD on fp32 masters of a model of whatever precision, by the mean of both ranks' gradients."""
    masters = [p.detach().clone().float() for p in network.parameters()]
    for _ in range(epochs):
        for parts in zip(*DATA, strict=True):
            gradients = [torch.autograd.grad(loss_of(network, batch), list(network.parameters())) for batch in parts]
            with torch.no_grad():
                for p, master, *each in zip(network.parameters(), masters, *gradients, strict=True):
                    master -= lr * sum(gradient.float() for gradient in each) / len(each)
                    p.copy_(master)
    return flat(network)


def test_workers_of_half_precision_have_masters_of_fp32_on_servers(others: Outcomes) -> None:
    told, start = others("half_precision"), problem.network().bfloat16()
    before = flat(start)
    expected = alone(start, half_loss, lr=2e-4)
    assert distance(before, expected) > 1e-3
    for each in told:
        assert each["dtype"] == "torch.bfloat16"
        assert distance(each["values"], expected) < 1e-6


def test_parameters_of_unusual_kinds(others: Outcomes) -> None:
    expected = flat(train_alone(joined(*DATA), epochs=2, module=Odd(), optimizer=plain_sgd))
    exact, coded = others("odd_parameters"), others("odd_parameters_compressed")
    for each, about in zip(exact, coded, strict=True):
        assert distance(each["values"], expected) < 1e-5
        assert distance(about["values"], expected) < 0.05
    assert coded[0]["digest"] == coded[1]["digest"]


def test_parameters_without_gradients_are_not_stepped(others: Outcomes) -> None:
    net = Sometimes()
    optimizer = decaying_adam(net.parameters())
    for _ in range(2):
        for number, parts in enumerate(zip(*DATA, strict=True)):
            optimizer.zero_grad()
            for rank, (x, y) in enumerate(parts):
                (nn.functional.mse_loss(net(x, rank == 1 and number % 2 == 0), y) / 2).backward()
            optimizer.step()
    assert torch.equal(net.unused.weight, Sometimes().unused.weight)
    assert not torch.equal(net.branch.weight, Sometimes().branch.weight)
    told = others("sometimes_used")
    for each in told:
        assert distance(each["values"], flat(net)) < 1e-5


def test_what_servers_cannot_hold_is_named(others: Outcomes) -> None:
    for error in others.errors("too_wide"):
        assert "net.0.weight" in error and "64 bits" in error


def test_all_ranks_have_one_compression(compressed: Outcomes) -> None:
    for error in compressed.errors("others_compression"):
        assert "compression" in error and "TwoBit(threshold=0.5)" in error and "None" in error
