"""Batches without a loss, gradients that are not finite, and raw steps, in every strategy: the numbers are those of one
process that has left out what one rank has left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.strategies import problem
from tests.strategies.own_steps import BATCHES, OTHERS, RAW, SHARP, ScheduleFree, Sharp
from tests.strategies.problem import Batch, batches, distance, flat, joined, momentum, train_alone
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

MODULE = "tests.strategies.own_steps"
ODD = [i for i in range(BATCHES) if i % 3 == 1]
FIRST, SECOND = batches(0, BATCHES), batches(1, BATCHES)
SAMPLES = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(MODULE, tmp_path_factory.mktemp("batches"), only=OTHERS)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(MODULE, tmp_path_factory.mktemp("raw"), only=RAW)


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(MODULE, tmp_path_factory.mktemp("sharp"), only=SHARP)


def together(parts: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def steps_of(size: int, whole_windows: bool) -> list[Batch]:
    """All samples of each step of two ranks' windows of so many batches; rank 1's odd ones are left out, with all of
    their window where ``whole_windows`` says so."""
    steps = []
    for start in range(0, BATCHES, size):
        numbers = range(start, start + size)
        odd = [i for i in numbers if i in ODD]
        mine = [] if odd and whole_windows else [i for i in numbers if i not in odd]
        steps.append(together([*(FIRST[i] for i in numbers), *(SECOND[i] for i in mine)]))
    return steps


@pytest.mark.parametrize(
    "name", ["none_in_step", "none_on_servers", "nan_in_step", "nan_in_step_by_hand", "nan_on_servers"]
)
def test_a_step_is_the_mean_over_what_there_is(ranks: Outcomes, name: str) -> None:
    expected, told = flat(train_alone(steps_of(1, whole_windows=False), optimizer=momentum)), ranks(name)
    for number, each in enumerate(told):
        assert distance(each["flat"], expected) < 1e-6
        assert each["global_step"] == each["steps"] == BATCHES
        assert each["samples"] == SAMPLES * (BATCHES - number * len(ODD))
        _check_told(each, number and name.startswith("nan") and len(ODD))
    assert told[0]["digest"] == told[1]["digest"]


# By the batch whose pass rank 1 loses: samples of its two steps, and the mean of their gradients where it has any. The
# gradients of earlier batches of the step are lost with it.
LOST = {1: ((7, 6.0), (26, 60.0)), 3: ((0, 0.0), (26, 60.0)), 4: ((10, 3.75), (21, 224 / 3))}


@pytest.mark.parametrize("scales", [False, True], ids=["fp32", "scaler"])
@pytest.mark.parametrize("lost", LOST)
def test_a_lost_pass_loses_the_gradients_of_its_step(ranks: Outcomes, lost: int, scales: bool) -> None:
    first, second = ranks("lost_passes")
    name = f"in step {lost} {scales}"
    weight = 0.0
    expected = []
    for own, (samples, gradient) in zip(((10, 3.75), (26, 60.0)), LOST[lost], strict=True):
        weight -= (own[0] * own[1] + samples * gradient) / (own[0] + samples)
        expected.append(weight)
    assert first[name][0] == second[name][0] == pytest.approx(expected, rel=1e-5)
    assert [first[name][1], second[name][1]] == [36, sum(samples for samples, _ in LOST[lost])]


@pytest.mark.parametrize("scales", [False, True], ids=["fp32", "scaler"])
@pytest.mark.parametrize(
    ("lost", "expected"), [(1, [[-3.0, -63.0], 33]), (3, [[0.0, -60.0], 26]), (4, [[-3.75, -59.75], 31])]
)
def test_a_lost_pass_of_a_local_step_counts_as_no_loss(
    ranks: Outcomes, lost: int, expected: list[Any], scales: bool
) -> None:
    """Lightning divides each loss by the number of batches of the step, whether they have a loss or not."""
    first, second = ranks("lost_passes")
    assert second[f"alone {lost} {scales}"] == expected
    assert first[f"alone {lost} {scales}"] == [[-3.75, -63.75], 36]


@pytest.mark.parametrize("name", ["none_in_windows", "nan_in_windows"])
def test_windows_of_ranks_stay_as_long_as_each_other(ranks: Outcomes, name: str) -> None:
    """A batch without a loss counts for its length only; one that is not finite takes its window along."""
    is_nan = name.startswith("nan")
    expected, told = flat(train_alone(steps_of(2, whole_windows=is_nan), optimizer=momentum)), ranks(name)
    for number, each in enumerate(told):
        assert distance(each["flat"], expected) < 1e-6
        assert each["global_step"] == each["steps"] == BATCHES // 2
        left_out = number * len(ODD) * (2 if is_nan else 1)
        assert each["samples"] == SAMPLES * (BATCHES - left_out)
        _check_told(each, number and is_nan and len(ODD))
    assert told[0]["digest"] == told[1]["digest"]


def test_in_accumulation_the_batch_counts_for_nothing(ranks: Outcomes) -> None:
    """One that is beside it in a window, be that before or behind it, weighs what its samples do."""
    told = ranks("none_in_accumulation")
    expected = flat(train_alone(steps_of(2, whole_windows=False), optimizer=momentum))
    for number, each in enumerate(told):
        assert distance(each["flat"], expected) < 1e-6
        assert each["samples"] == SAMPLES * (BATCHES - number * len(ODD))
        assert each["global_step"] == BATCHES // 2
    assert told[0]["digest"] == told[1]["digest"]


def test_where_no_rank_has_a_loss_nothing_is_stepped_with(ranks: Outcomes) -> None:
    data = [batch for i, batch in enumerate(joined(FIRST, SECOND)) if i != 4]
    expected = flat(train_alone(data, optimizer=momentum))
    for told in ranks("none_anywhere"):
        for name, each in told.items():
            assert distance(each["flat"], expected) < 1e-6, name
            assert each["samples"] == SAMPLES * (BATCHES - 1), name


@pytest.mark.parametrize(
    "name", ["nan_in_compressed_windows", "nan_on_servers_compressed", "nan_as_they_come", "nan_in_changes"]
)
def test_nothing_that_is_not_finite_is_in_the_model(ranks: Outcomes, name: str) -> None:
    told = ranks(name)
    for number, each in enumerate(told):
        assert torch.tensor(each["flat"]).isfinite().all()
        assert distance(each["flat"], flat(problem.network())) > 1e-2
        _check_told(each, number * len(ODD))
    assert told[0]["digest"] == told[1]["digest"]


@pytest.mark.parametrize("name", ["none_between_rounds", "none_as_they_come", "none_with_a_scaler"])
def test_ranks_with_and_without_a_loss_end_with_one_model(ranks: Outcomes, name: str) -> None:
    told = ranks(name)
    assert told[0]["digest"] == told[1]["digest"]
    for number, each in enumerate(told):
        assert each["global_step"] == BATCHES
        assert each["samples"] == SAMPLES * (BATCHES - number * len(ODD))
        assert distance(each["flat"], flat(problem.network())) > 1e-2
        _check_told(each, 0)


def test_a_scaler_hears_of_what_overflows_and_lowers_its_scale(ranks: Outcomes) -> None:
    """Nothing is dropped: it skips those steps itself, the same on all ranks."""
    told = ranks("overflow_with_a_scaler")
    assert told[0]["digest"] == told[1]["digest"]
    for each in told:
        assert 0 < each["steps"] < BATCHES
        assert each["global_step"] == BATCHES
        assert each["scale"] == 65536.0 / 2 ** (BATCHES - each["steps"])
        _check_told(each, 0)


def _check_told(told: dict[str, Any], dropped: int) -> None:
    """How many were dropped is in the summary, and in one metric; there is one warning."""
    assert told["dropped"] == [dropped, float(dropped), dropped > 0]
    assert told["warnings"] == (dropped > 0)


@pytest.mark.parametrize("name", ["raw_in_step", "raw_in_windows", "raw_on_servers", "raw_with_a_closure"])
def test_a_raw_step_is_lightnings(raw: Outcomes, name: str) -> None:
    both = joined(FIRST, SECOND)
    expected, told = flat(train_alone([*both, *both[: BATCHES // 2]], optimizer=momentum)), raw(name)
    for each in told:
        assert distance(each["flat"], expected) < 1e-6
        assert each["global_step"] == each["steps"] == BATCHES + BATCHES // 2
        assert not each.get("left behind")
    assert told[0]["digest"] == told[1]["digest"]


def test_raw_steps_between_rounds_count(raw: Outcomes) -> None:
    told = raw("raw_between_rounds")
    assert told[0]["digest"] == told[1]["digest"]
    for each in told:
        assert each["global_step"] == each["steps"] == BATCHES + BATCHES // 2
        assert each["samples"] == SAMPLES * each["steps"]
        assert not each["left behind"]


@pytest.mark.parametrize("name", ["bound_in_step", "bound_in_windows", "bound_on_servers"])
def test_a_step_that_cannot_be_led_is_refused_by_name(raw: Outcomes, name: str) -> None:
    for error in raw.errors(name):
        assert error.startswith(("RuntimeError: `SGD.step` (optimizer 0) was called in a way that", "PeerLost: "))
    assert any("`self.optimizers()`" in error for error in raw.errors(name))


def sharp_replicas(shards: Sequence[Sequence[Batch]], steps: int) -> list[float]:
    """The mean of replicas that each take a step of SAM with their own batch, again and again."""
    parameters = torch.tensor(flat(problem.network()))
    for i in range(steps):
        stepped = []
        for shard in shards:
            net = problem.network()
            torch.nn.utils.vector_to_parameters(parameters.clone(), net.parameters())
            optimizer = Sharp(net.parameters())

            def closure(net: Any = net, optimizer: Any = optimizer, batch: Batch = shard[i % BATCHES]) -> None:
                optimizer.zero_grad()
                problem.loss_of(net, batch).backward()

            optimizer.step(closure)
            stepped.append(torch.tensor(flat(net), dtype=torch.float32))
        parameters = torch.stack(stepped).mean(0)
    return parameters.tolist()


@pytest.mark.parametrize("name", ["unseen_between_rounds", "unseen_on_workers", "unseen_in_step"])
def test_steps_by_another_method_count_and_are_shared(sharp: Outcomes, name: str) -> None:
    steps = BATCHES + BATCHES // 2
    shards = [joined(FIRST, SECOND)] if name == "unseen_in_step" else [FIRST, SECOND]
    expected, told = sharp_replicas(shards, steps), sharp(name)
    for each in told:
        assert distance(each["flat"], expected) < 1e-6
        assert each["global_step"] == steps
        assert each["samples"] == SAMPLES * steps
    assert told[0]["digest"] == told[1]["digest"]


def test_a_closure_called_twice_is_sam_between_rounds(sharp: Outcomes) -> None:
    expected = sharp_replicas([FIRST, SECOND], BATCHES)
    for told in sharp("twice_between_rounds"):
        assert distance(told["flat"], expected) < 1e-6
        assert told["global_step"] == BATCHES


@pytest.mark.parametrize("name", ["free_in_step", "free_in_windows"])
def test_schedule_free_steps_are_those_of_one_process(sharp: Outcomes, name: str) -> None:
    """The model of eval mode, on all ranks, after validations in that mode."""
    made: list[ScheduleFree] = []

    def make(params: Any) -> ScheduleFree:
        made.append(ScheduleFree(params))
        return made[0]

    module = train_alone(joined(FIRST, SECOND), epochs=2, optimizer=make)
    made[0].eval()
    for told in sharp(name):
        assert distance(told["flat"], flat(module)) < 1e-5


def test_an_optimizer_that_waits_is_no_unseen_step(sharp: Outcomes) -> None:
    for told in sharp("late_second_optimizer"):
        assert set(told.values()) == {BATCHES}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unseen_refused_in_windows", "the parameters of `Sharp` have changed without its `step`"),
        ("unseen_refused_on_servers", "the parameters of `SGD` have changed without its `step`"),
        ("unseen_refused_when_automatic", "the parameters of `Sharp` have changed without its `step`"),
        ("sam_refused_in_windows", "`Sharp` evaluates the loss again within a step"),
        ("twice_refused_in_windows", "a step of `Again` calls its closure twice"),
        ("twice_refused_by_hand", "a step of `Sharp` calls its closure twice"),
        ("twice_moved_refused_by_hand", "a step of `Once` calls its closure twice, or after it has moved"),
        ("free_between_rounds", "`ScheduleFree.eval()` makes the model of the optimizer's own state"),
        ("free_on_workers", "`ScheduleFree.eval()` makes the model of the optimizer's own state"),
        ("stray_between_rounds", "Optimizer 0 (SGD) has parameters of shapes [(3, 2), (3,)] that no submodule of"),
        ("stray_in_windows", "Optimizer 0 (SGD) has parameters of shapes [(3, 2), (3,)] that no submodule of"),
        ("stray_on_servers", "Optimizer 0 (SGD) has parameters of shapes [(3, 2), (3,)] that no submodule of"),
        ("wide_in_step", "(4 parameters) have 64 bits, and gradients travel in fp32"),
        ("wide_in_windows", "['wide'] (1 parameters) have 64 bits, and gradients travel in fp32"),
    ],
)
def test_what_ranks_would_not_share_is_refused(sharp: Outcomes, name: str, words: str) -> None:
    errors = sharp.errors(name)
    assert any(words in error for error in errors), errors
    assert all(words in error or error.startswith("PeerLost") for error in errors), errors
