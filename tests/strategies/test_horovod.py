"""`HorovodStrategy` on two ranks of a real Horovod gives the numbers of training in one process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from lightning_async import AsyncAveragingStrategy, HorovodStrategy, HorovodTransport, Timeouts, TorchTransport
from lightning_async.strategies import base
from tests.horovod import horovod_environment, needs_horovod
from tests.strategies import problem
from tests.strategies.problem import adam, batches, distance, flat, joined, momentum, train_alone
from tests.strategies.test_own_steps import ODD, steps_of
from tests.strategies.workers import Outcomes

pytestmark = [pytest.mark.processes, needs_horovod]
EQUAL = joined(batches(0, 12), batches(1, 12))
FINITE = [batch for i, batch in enumerate(EQUAL) if i not in ODD]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    with horovod_environment(2) as env:
        return Outcomes("tests.strategies.horovod_scenarios", tmp_path_factory.mktemp("horovod"), env=env)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("sgd", lambda: train_alone(EQUAL, epochs=2)),
        ("with_momentum", lambda: train_alone(EQUAL, optimizer=momentum)),
        ("without_a_loss_on_one_rank", lambda: train_alone(steps_of(1, whole_windows=False), optimizer=momentum)),
        ("not_finite_on_one_rank", lambda: train_alone(FINITE, optimizer=momentum)),
        ("with_adam_in_many_buckets", lambda: train_alone(EQUAL, optimizer=adam)),
        (
            "accumulated_and_clipped",
            lambda: train_alone(EQUAL[:10], epochs=2, accumulate=3, clip=0.2, optimizer=momentum),
        ),
        (
            "windows_of_unequal_batches",
            lambda: train_alone(joined(batches(0, 9, 4), batches(1, 9, 2)), epochs=2, accumulate=3, optimizer=momentum),
        ),
        ("gradients_zeroed_in_place", lambda: train_alone(EQUAL[:10], epochs=2, accumulate=3, optimizer=momentum)),
        ("by_hand", lambda: train_alone(EQUAL, optimizer=momentum)),
        ("by_bare_hands", lambda: train_alone(EQUAL, optimizer=momentum)),
        ("by_bare_hands_in_many_buckets", lambda: train_alone(EQUAL, optimizer=momentum)),
        ("other_starts", lambda: train_alone(EQUAL)),
    ],
)
def test_equals_one_process_on_the_joined_batch(ranks: Outcomes, name: str, alone: Callable[[], nn.Module]) -> None:
    told = ranks(name)
    assert told[0]["digest"] == told[1]["digest"]
    assert distance(told[0]["flat"], flat(alone())) < 1e-6
    assert not told[0]["initialised"], "torch.distributed is not needed"


def test_a_mean_that_is_not_finite_is_counted_on_all_ranks(ranks: Outcomes) -> None:
    assert [told["dropped"] for told in ranks("not_finite_on_one_rank")] == [len(ODD)] * 2


def test_two_players_train_as_in_one_process(ranks: Outcomes) -> None:
    expected = flat(train_alone(EQUAL, optimizer=momentum))
    for told in ranks("two_players"):
        assert distance(told["flat"], [*expected, *expected]) < 1e-6


def test_all_validate_with_rank_0s_buffers_in_a_fit_as_behind_it(ranks: Outcomes) -> None:
    first, second = ranks("validated_with_buffers")
    assert first["seen"] == second["seen"] and first["mean"] == second["mean"]
    assert first["seen"][-1] == first["seen"][-2] != first["seen"][-3]
    assert max(map(abs, first["mean"])) < 5.0, "rank 0's own, of batches around 0"


def test_a_layer_that_is_unfrozen_where_an_epoch_starts_is_averaged_from_then_on(ranks: Outcomes) -> None:
    told = ranks("unfrozen_where_an_epoch_starts")
    assert told[0]["digest"] == told[1]["digest"]
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(told[0]["step"]):
        alone[0].requires_grad_(step >= told[0]["step"] // 2)
        optimizer.zero_grad()
        sum(alone(torch.full((2, 4), 1.0 + rank)).square().sum() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert distance(told[0]["flat"], flat(alone)) < 1e-6


def test_a_parameter_that_some_ranks_use_and_one_that_none_uses(ranks: Outcomes) -> None:
    for told in ranks("unused_parameters"):
        # Its gradient is 1 on rank 0 and 0 on rank 1; weight decay is 0.1.
        assert distance(told["mine"], [0.5 - 0.05 * (0.5 + 0.05), 0.25 - 0.05 * (0.5 + 0.025)]) < 1e-7
        assert told["nobodys"] == [0.5, 0.25]
        assert told["frozen"] == [0.5, 0.25]


def test_models_of_other_shapes_are_refused(ranks: Outcomes) -> None:
    for error in ranks.errors("other_shapes"):
        assert error.startswith("LayoutMismatch") and "net.0.weight" in error


@pytest.mark.parametrize("name", ["survivors_over_horovod", "survivors_of_windows_over_horovod"])
def test_survivors_over_horovod_are_refused(ranks: Outcomes, name: str) -> None:
    for error in ranks.errors(name):
        assert error.startswith("ValueError: `min_replicas=1`: HorovodTransport")


@pytest.mark.parametrize(("name", "error"), [("bf16_mixed", 0.05), ("compressed", 2e-3), ("bf16_true", 0.3)])
def test_lower_precision_keeps_replicas_equal(ranks: Outcomes, name: str, error: float) -> None:
    expected = flat(train_alone(EQUAL))
    told = ranks(name)
    assert told[0]["digest"] == told[1]["digest"]
    assert 0.0 < distance(told[0]["flat"], expected) < error


def test_adasum_without_mpi_is_refused(ranks: Outcomes) -> None:
    for error in ranks.errors("adasum_without_mpi"):
        assert error.startswith("ValueError: Adasum needs Horovod over MPI")


def test_lightnings_collectives(ranks: Outcomes) -> None:
    for told in ranks("lightnings_collectives"):
        assert told["reduced"] == [1.5, 3.0, 2.0]
        assert told["all"] == [False, True]
        assert told["broadcast"] == {"from": 0}
        assert told["gathered"] == [[1.0, 1.0], [2.0, 2.0]]
        # The metric is weighted by rank + 1: (1 * 1 + 2 * 2) / 3.
        assert told["metrics"]["mean"] == 1.5
        assert told["metrics"]["sum"] == pytest.approx(6.0)
        assert told["metrics"]["metric"] == pytest.approx(5 / 3)


def test_validation_alone(ranks: Outcomes) -> None:
    for told in ranks("validated_and_tested"):
        assert [each["metric"] for each in told] == pytest.approx([5 / 3, 5 / 3])


def test_lightnings_sampler_deals_out_the_data(ranks: Outcomes) -> None:
    left, right = ranks("lightnings_sampler")
    assert sorted(left + right) == list(map(float, range(20)))


def test_a_checkpoint_is_resumed(ranks: Outcomes) -> None:
    for told in ranks("saved_and_resumed"):
        assert told["step"] == 48
        assert distance(told["whole"], told["rest"]) < 1e-7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"compression": "bf16"}, ("compression='bf16'", "fp16")),
        ({"reduction": "sum"}, ("reduction='sum'", "adasum")),
        ({"bucket_mb": 0.0}, ("bucket_mb=0.0", "> 0")),
        ({"reduction": "adasum", "compression": "fp16"}, ("adasum", "compression='fp16'")),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        HorovodStrategy(**arguments)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_a_transport_of_its_own_timeout() -> None:
    with pytest.raises(ValueError, match=r"`HorovodTransport\(gloo_timeout=datetime.timedelta\(0\)\)` must be longer"):
        HorovodTransport(gloo_timeout=timedelta(0))
    transport = HorovodTransport(gloo_timeout=timedelta(seconds=7))
    assert AsyncAveragingStrategy(transport=transport).transport is transport
    with pytest.raises(ValueError, match=r"`Timeouts\(replicas=.*over HorovodTransport.*nobody comes back"):
        AsyncAveragingStrategy(transport=transport, timeouts=Timeouts(replicas=timedelta(minutes=1)))
    dead_after = AsyncAveragingStrategy().config.timeouts.dead_after
    assert AsyncAveragingStrategy(transport="horovod").transport == HorovodTransport(gloo_timeout=dead_after)


def test_who_has_one_rank_hears_what_starts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under plain python, whatever ``devices`` says."""
    said: list[str] = []
    monkeypatch.setattr(base, "rank_zero_info", said.append)
    strategy: Any = HorovodStrategy()
    strategy.parallel_devices, strategy.cluster_environment = [torch.device("cpu")] * 2, None
    monkeypatch.setattr(strategy, "setup_replica", lambda trainer: None)
    strategy.setup(None)
    assert strategy.world_size == 1
    assert said == [
        "HorovodStrategy: there is one rank only, and it trains as with a single device, whatever `devices` says. "
        "Start more with `horovodrun -np 2 python SCRIPT`, or mpirun: the Trainer starts none."
    ]


def test_torchruns_variables_beside_horovods_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(RuntimeError, match="TORCHELASTIC_RUN_ID"):
        AsyncAveragingStrategy()
    with pytest.raises(RuntimeError, match="TORCHELASTIC_RUN_ID"):
        AsyncAveragingStrategy(transport=HorovodTransport())
    assert AsyncAveragingStrategy(transport="torch").transport == TorchTransport()


def test_the_reference_moves() -> None:
    assert distance(flat(problem.network()), flat(train_alone(EQUAL))) > 0.05
    assert torch.is_grad_enabled()
