"""Windows of gradients on two ranks give the steps of one process with the same windows, and of DDP."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_async import AsyncGradientStrategy, DelayCompensation, TopK
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.problem import Batch, adam, batches, distance, flat, joined, momentum, train_alone
from tests.strategies.workers import Net, Outcomes, loader, logged, make_trainer

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.gradient_windows"
Shards = Sequence[Sequence[Batch]]

EQUAL: Shards = (batches(0, 12), batches(1, 12))
SHORT: Shards = (batches(0, 10), batches(1, 10))
UNEQUAL: Shards = (batches(0, 12, 3), batches(1, 12, 9))


def reference(
    shards: Shards,
    size: int | Sequence[int],
    delay: int,
    *,
    epochs: int = 1,
    clip: float | None = None,
    sync_points: Sequence[int] = (),
    halves_every: int = 0,
    strength: float = 0.0,
    warm: int = 0,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
) -> tuple[list[float], int]:
    """The parameters and the number of steps, in float64; ``sync_points`` come after so many batches of an epoch."""
    module, steps = problem.network().double(), 0
    sizes = [size] * len(shards[0]) if isinstance(size, int) else size
    closes = {*itertools.accumulate(sizes)}
    stepper = optimizer(module.parameters())
    flying: list[Tensor] | None = None
    before, since = [p.detach().clone() for p in module.parameters()], 0

    def step() -> None:
        nonlocal flying, steps, before
        if flying is None:
            return
        now = [p.detach().clone() for p in module.parameters()]
        if since < steps:
            flying = [g + strength * g * g * (x - old) for g, x, old in zip(flying, now, before, strict=True)]
        before = now
        for p, g in zip(module.parameters(), flying, strict=True):
            p.grad = g
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        stepper.step()
        flying, steps = None, steps + 1
        if halves_every and steps % halves_every == 0:
            stepper.param_groups[0]["lr"] /= 2

    for _ in range(epochs):
        total, samples, began = [torch.zeros_like(p) for p in module.parameters()], 0, steps
        for i, every in enumerate(zip(*shards, strict=True), start=1):
            for x, y in every:
                loss = problem.loss_of(module, (x.double(), y.double()))
                for t, g in zip(total, torch.autograd.grad(loss, list(module.parameters())), strict=True):
                    t.add_(g, alpha=len(x))
                samples += len(x)
            if i in closes or i == len(shards[0]):
                step()
                flying, since = [t / samples for t in total], began
                total, samples, began = [torch.zeros_like(t) for t in total], 0, steps
                if delay == 0 or steps < warm:
                    step()
                    began = steps
            if i in sync_points:
                step()
                began = began if samples else steps
        step()
    return flat(module), steps


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_delay", lambda: reference(EQUAL, 3, 0, epochs=2)),
        ("no_delay_adam_clipped", lambda: reference(SHORT, 3, 0, epochs=2, clip=0.2, optimizer=adam)),
        ("no_delay_unequal_batches", lambda: reference(UNEQUAL, 2, 0)),
        ("delayed", lambda: reference(UNEQUAL, 2, 1, epochs=2)),
        (
            "slow_steps_at_gates",
            lambda: reference((batches(0, 14), batches(1, 14)), 4, 1, epochs=2, sync_points=(6, 12)),
        ),
        ("compensated", lambda: reference(EQUAL, 2, 1, epochs=2, sync_points=(6,), strength=0.5, warm=1)),
    ],
)
def test_steps_are_those_of_one_process_in_float64(
    ranks: Outcomes, name: str, expected: Callable[[], tuple[list[float], int]]
) -> None:
    where, steps = expected()
    for told in ranks(name):
        assert distance(told["flat"], where) < 1e-5
        assert told["global_step"] == told["steps"] == steps
    assert ranks(name)[0]["digest"] == ranks(name)[1]["digest"]


def test_without_delay_windows_are_accumulation_of_ddp(ranks: Outcomes) -> None:
    """Windows that divide the epoch: Lightning scales a shorter one by the number of batches of a whole one."""
    expected = flat(train_alone(joined(*EQUAL), epochs=2, accumulate=3, optimizer=momentum))
    for told in ranks("no_delay"):
        assert distance(told["flat"], expected) < 1e-6


def test_without_delay_the_last_backward_pass_of_a_window_sends_as_it_goes(ranks: Outcomes) -> None:
    """And so it does in a warm-up; where gradients change behind it without a trace they leave when it is over."""
    for told in ranks("no_delay"):
        assert told["on_their_way"] == [False, False, True] * 8
    for told in ranks("warm"):
        assert told["on_their_way"][:4] == [False, True] * 2
    for (changed, behind), (expected, within) in ranks("changed_behind_the_pass"):
        assert changed == expected
        assert (behind, within) == ([False] * 4, [False, True] * 2)


def test_without_delay_windows_are_those_of_ddp_itself(ranks: Outcomes) -> None:
    for told, expected in zip(ranks("no_delay"), ranks("ddp"), strict=True):
        assert distance(told["flat"], expected) < 1e-6


def test_the_delay_shows() -> None:
    """What the comparisons above compare with is not trivial."""
    late = reference(UNEQUAL, 2, 1)[0]
    assert distance(reference(UNEQUAL, 2, 0)[0], late) > 1e-3
    assert distance(reference(UNEQUAL, 2, 1, strength=0.5)[0], late) > 1e-3


def test_validations_and_epochs_step_with_what_is_in_flight(ranks: Outcomes) -> None:
    """14 batches in windows of 4, a validation after 8: ``global_step``, schedulers and hooks see each step once."""
    shards = (batches(0, 14), batches(1, 14))
    where, steps = reference(shards, 4, 1, epochs=2, sync_points=(8,), halves_every=2)
    a, b = ranks("steps_and_schedulers")
    assert a["digest"] == b["digest"]
    assert distance(a["flat"], where) < 1e-5
    assert a["steps"] == a["global_step"] == steps == 8
    assert a["rates"] == b["rates"] == [0.05 / 2 ** (i // 2) for i in range(8)]
    assert a["lr"] == 0.05 / 2**4
    assert a["stepped"] == [*[0] * 7, 1, *[2] * 5, 3, *[4] * 7, 5, *[6] * 5, 7]
    assert [i % 14 for i, step in enumerate(a["is_update"]) if step] == [7, 13, 7, 13]
    assert a["samples_by_rank"] == [112.0, 112.0]


def test_the_first_steps_have_no_delay(ranks: Outcomes) -> None:
    for told in ranks("warm"):
        assert told["stepped"] == [0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5]
        assert told["global_step"] == 6


def test_the_last_step_before_max_steps_is_not_late(ranks: Outcomes) -> None:
    for told in ranks("limited"):
        assert told["stepped"] == [0, 0, 0, 1, 1, 3]
        assert (told["global_step"], told["samples"]) == (3, 24.0)


def test_a_rank_without_data_takes_the_steps_of_the_others(ranks: Outcomes) -> None:
    a, b = ranks("uneven")
    assert a["digest"] == b["digest"]
    assert a["epochs"] == b["epochs"] == a["validations"] == b["validations"]
    assert a["norms"] == b["norms"] and a["rates"] == b["rates"]
    assert a["samples_by_rank"] == [32.0, 104.0]  # each sample once an epoch
    assert a["global_step"] == b["global_step"] == 10


def test_batches_that_a_module_takes_by_itself_count_their_samples(ranks: Outcomes) -> None:
    for given, taken in ranks("pulled"):
        assert taken["digest"] == given["digest"] and taken["samples"] == given["samples"] == 2 * 33.0


def test_schedulers_are_those_of_all_steps_and_epochs_on_ranks_of_unequal_data(ranks: Outcomes) -> None:
    """The step that is taken at the end of an epoch has the epoch's rate, and others' steps have it, too. A frequency
    counts the batches of an epoch, two for each step, and starts anew, as Lightning's does."""
    a, b = ranks("scheduled")
    assert a == b
    by_epoch = [0.05] * 6 + [0.025] * 6
    by_batches = [0.05] * 4 + [0.025] * 6 + [0.0125] * 2
    for told, rates in zip(a, (by_epoch, by_epoch, by_epoch, by_batches), strict=True):
        assert told["rates"] == rates
        assert told["shown"] == told["steps"] == 12
    assert a[1]["digest"] == a[2]["digest"] != a[0]["digest"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "ends_too_soon",
            "`OneCycleLR` ends after 6 steps, and this training has 14: all ranks take each step of the one",
        ),
        ("watched_by_step", "`ReduceLROnPlateau` with `interval='step'` watches a metric of each rank's own batches"),
        ("epochs_apart", "at the end of an epoch: a scheduler of learning rates, of which all replicas have the same."),
    ],
)
def test_schedulers_that_cannot_be_alike_are_refused_on_every_rank(ranks: Outcomes, name: str, words: str) -> None:
    assert all(error.startswith("ValueError") and words in error for error in ranks.errors(name))


def test_saves_by_steps_are_due_with_steps(ranks: Outcomes) -> None:
    """None before the first one; the sync point that one is made at takes a step."""
    for told in ranks("scheduled")[0]:
        assert told["saved"][0] in (4, 5) and len(told["saved"]) <= 3, told["saved"]


def test_steps_at_sync_points_are_logged_as_others(ranks: Outcomes) -> None:
    """With the last batch's metrics, once, and the rate that each was taken with."""
    told = ranks("told_at_gates")[0]
    assert told["straight"]["batch"] == [[5, 11.0], [11, 11.0]]
    assert dict(told["straight"]["lr-SGD"]) == {5: 0.05 / 2**2, 11: 0.05 / 2**5}
    assert [step for step, _ in told["straight"]["val_loss"]] == [5, 11]
    resumed = told["resumed"]
    assert [step for step, _ in resumed["batch"]] == list(range(12, 18))
    assert [step for step, _ in resumed["val_loss"]] == [17]
    assert dict(resumed["lr-SGD"]) == {step: 0.05 / 2 ** (step // 2) for step in range(12, 18)}


@pytest.mark.parametrize(("case", "steps", "validations"), [(0, 8, 2), (1, 12, 2), (2, 3, 0)])
def test_averages_over_time_follow_every_step(ranks: Outcomes, case: int, steps: int, validations: int) -> None:
    """Also those that no batch's end follows, before anything is validated, and at the end."""
    told = [each[case] for each in ranks("averages_over_time")]
    assert told[0]["digest"] == told[1]["digest"]
    for rank in told:
        assert rank["count"] == rank["global_step"] == len(rank["models"]) == steps
        assert len(rank["validated"]) == validations
        for step, seen in [*rank["validated"], (steps, rank["flat"])]:
            assert distance(seen, torch.tensor(rank["models"][:step]).mean(0).tolist()) < 1e-6


def test_a_save_that_is_due_with_the_last_step_is_made(ranks: Outcomes) -> None:
    """Steps that were saved before are due no more in a training that goes on from there."""
    for told in ranks("told_at_gates"):
        assert (told["straight"]["steps"], told["resumed"]["steps"]) == (12, 18)
        first, second, last = told["straight"]["saved"]
        assert first in (4, 5) and second in (8, 9) and last == 12
        assert len(told["resumed"]["saved"]) == 1 and told["resumed"]["saved"][0] in (16, 17)


@pytest.mark.parametrize("name", ["until_reduced", "until_reduced_uneven"])
def test_windows_as_long_as_a_reduction(ranks: Outcomes, name: str) -> None:
    a, b = ranks(name)
    assert a["digest"] == b["digest"] and a["validations"] == b["validations"]
    assert a["norms"] == b["norms"] and a["global_step"] == b["global_step"]
    assert a["steps"] == len(a["norms"])


def test_windows_as_long_as_a_reduction_lose_no_sample(ranks: Outcomes) -> None:
    for told in ranks("until_reduced"):
        assert told["samples_by_rank"] == [120.0, 360.0]
    a, b = ranks("until_reduced_uneven")
    assert a["global_step"] == 16
    assert a["stepped"][:3] == b["stepped"][:3] == [1, 2, 3]  # the warm-up


def test_another_number_in_mid_epoch_mixes_no_windows(ranks: Outcomes) -> None:
    for told in ranks("another_number_in_mid_epoch"):
        assert [i + 1 for i, step in enumerate(told["is_update"]) if step] == [4, 8, 11, 14]
        assert told["samples"] == 56.0
    for of in ranks("another_number_with_momentum"):
        for delay, told in enumerate(of):
            where, steps = reference((batches(0, 14), batches(1, 14)), [4, 4, 3, 3], delay)
            assert distance(told["flat"], where) < 1e-5 and told["steps"] == steps == 4


def test_tensors_of_unusual_kinds(ranks: Outcomes) -> None:
    """What no replica has used has no gradient; what one has used within a window counts as zero elsewhere."""

    def late(part: float) -> float:
        """What three steps leave of a parameter, each of them by ``part`` of what it was one step before."""
        return 1 - 2 * part - part * (1 - part)

    a, b = ranks("odd_tensors")
    assert a == b
    assert a["steps"] == 3 and a["missing"] == [True] * 3
    assert a["unused"] == pytest.approx([0.3] * 3) and a["frozen"] == pytest.approx([0.7] * 2)
    # Of 8 equal batches of a window on two ranks one has a gradient of 2 * x. Steps of 0.05, one window late.
    assert a["ones"] == pytest.approx([0.5 * late(0.05 * 2 / 8)] * 2)
    assert a["waves"] == pytest.approx([0.3125**0.5 * late(0.05 * 2)] * 2)
    assert a["short"] == pytest.approx([0.5 * late(0.05 * 2)] * 2, rel=2e-2)
    assert a["counted"] == 12
    trained = 2 * problem.FEATURES + 65 + 3 + 2 + 2 * 2 + 2  # each in fp32 as it travels; no buffers
    assert (a["windows"], a["window_bytes"]) == (3, 4 * trained)


def test_a_window_that_is_not_finite_is_dropped_on_all_ranks(ranks: Outcomes) -> None:
    for told in ranks("scaled"):
        assert (told["steps"], told["synchronous_steps"], told["samples"]) == (5, 6, 40.0)
        assert told["scale"] == 1024.0  # halved for it, and doubled again after three steps
    assert ranks("scaled")[0]["digest"] == ranks("scaled")[1]["digest"]


def test_what_is_left_behind_by_a_fit(ranks: Outcomes) -> None:
    for told in ranks("validated_twice"):
        assert told["first"] == told["after"] != told["last"]
        assert told["steps"] == [3, 6]
        assert told["accumulates"] == 1


def test_a_search_for_a_learning_rate_steps_without_delay_and_leaves_nothing(ranks: Outcomes) -> None:
    a, b = ranks("searched")
    assert a["lr"] == b["lr"] != 0.05
    for told in (a, b):
        found, plain = told["found"], told["plain"]
        assert [found[key] for key in ("digest", "steps", "global_step")] == [
            plain[key] for key in ("digest", "steps", "global_step")
        ]
        assert plain["global_step"] == 24
        assert told["looked"]["lr"] == told["like_ddp"]["lr"] and len(told["looked"]["lr"]) == 20
        assert distance(told["looked"]["loss"], told["like_ddp"]["loss"]) < 1e-5


def test_lightnings_checkpoints_hold_the_open_window(ranks: Outcomes) -> None:
    for told in ranks("resumed"):
        assert told["resumed"] == told["straight"]
        assert told["window"] == [[2, 8.0]] * 2


def test_windows_that_a_checkpoint_by_hand_drops_are_told_at_the_resume(ranks: Outcomes) -> None:
    """In between a rank knows of its own only: without a delay two batches, with one the four on their way, too."""
    told, nothing = ranks("saved_between_gates")
    assert nothing == {"0": [], "1": []}
    for delay, samples in (("0", 8), ("1", 24)):
        (words,) = told[delay]
        assert f"{samples} samples that the rank that saved it had gathered are in no step, nor is what" in words
        assert "epoch 0, step " in words and "`FaultTolerantCheckpoint` keeps them" in words


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_windows_of_more_ranks_than_go_on_are_told_at_the_resume(ranks: Outcomes) -> None:
    ranks("resumed")
    trainer = make_trainer(AsyncGradientStrategy(4), devices=1)
    with logged() as said:
        trainer.fit(Net(optimizer=momentum), loader(batches(0, 10)), ckpt_path=ranks.folder("resumed") / "saved.ckpt")
    (words,) = (each for each in said if "windows of gradients" in each)
    assert "16 samples that its 2 ranks had gathered are in no step, and are dropped." in words


def test_compressed_windows_stay_near_those_that_are_not(ranks: Outcomes) -> None:
    """By how much depends on what a message lacks, and is far less than what training moves."""
    where, steps = reference(UNEQUAL, 2, 1, epochs=2)
    moved = distance(flat(problem.network()), where)
    a, b = ranks("compressed")
    for mine, theirs, near in zip(a, b, (0.01, 0.05, 0.02, 0.5, 0.5), strict=True):
        assert mine["digest"] == theirs["digest"] and mine["global_step"] == steps
        assert 0.0 < distance(mine["flat"], where) < near * moved


def test_corrections_of_the_delay_take_compressed_means(ranks: Outcomes) -> None:
    (plain, coded), (_, theirs) = ranks("compressed_and_corrected")
    assert coded["digest"] == theirs["digest"] and coded["global_step"] == plain["global_step"]
    moved = distance(flat(problem.network()), plain["flat"])
    assert 0.0 < distance(coded["flat"], plain["flat"]) < 0.05 * moved


def test_a_rank_without_data_takes_compressed_steps_of_the_others(ranks: Outcomes) -> None:
    a, b = ranks("compressed_without_data")
    assert a == b and len(set(a)) == len(a) == 2


def test_a_compressed_window_that_is_not_finite_is_dropped_on_all_ranks(ranks: Outcomes) -> None:
    a, b = ranks("compressed_and_scaled")
    assert a == b
    for _, steps, finite in a:
        assert steps == 5 and finite


def test_checkpoints_hold_what_compressed_messages_lacked(ranks: Outcomes) -> None:
    for told in ranks("compressed_and_resumed"):
        assert told["resumed"] == told["straight"]
        assert told["residual"] == [True, True]
        assert told["window"] == [[2, 8.0]] * 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"accumulate": 0}, ValueError, "accumulate=0"),
        ({"accumulate": 2.0}, TypeError, "accumulate=2.0"),
        ({"accumulate": "until_done"}, ValueError, "accumulate='until_done'"),
        ({"accumulate": "a number of batches"}, ValueError, "must be 'until_reduced', or a number of batches."),
        ({"accumulate": "until_reduced", "delay": 0}, ValueError, "without a delay"),
        ({"delay": 2}, ValueError, "delay=2"),
        ({"correction": "none"}, TypeError, "correction='none'"),
        ({"correction": DelayCompensation(), "delay": 0}, ValueError, "without a delay nothing is corrected"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps=-1"),
        ({"compression": "int4"}, ValueError, "compression='int4'"),
        ({"compression": TopK}, ValueError, "AsyncGradientStrategy(compression=<class"),
        ({"buffers": "drop"}, ValueError, "AsyncGradientStrategy(buffers='drop')"),
        ({"part_mb": 0.0}, ValueError, "AsyncGradientStrategy(part_mb=0.0)"),
        ({"part_mb": "16"}, TypeError, "AsyncGradientStrategy(part_mb='16')"),
        ({"timeouts": 12}, TypeError, "`timeouts=12` must be Timeouts(...)"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        AsyncGradientStrategy(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (Net, {"accumulate_grad_batches": 2}, "AsyncGradientStrategy(accumulate=2)"),
        (Net, {"callbacks": [pl.callbacks.GradientAccumulationScheduler({1: 2})]}, "GradientAccumulationScheduler"),
        (lambda: Net(optimizer=torch.optim.LBFGS), {}, "`LBFGS` evaluates the loss again"),
        (lambda: Net(optimizer=torch.optim.SparseAdam), {}, "SparseAdam takes sparse gradients"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    module: Callable[[], Any], options: dict[str, Any], words: str, alone: None
) -> None:
    trainer = make_trainer("async_gradients", devices=1, **options)
    with pytest.raises(ValueError, match=re.escape(words)):
        trainer.fit(module(), loader(batches(0, 2)), loader(batches(0, 1)))


@pytest.mark.parametrize(
    ("accumulate", "steps"), [((), list(range(10))), ((4,), [3, 7, 9]), (("until_reduced",), list(range(10)))]
)
def test_a_world_of_one_accumulates(accumulate: Any, steps: list[int], alone: None) -> None:
    stepped: list[int] = []

    class Says(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.strategy.is_update_step:
                stepped.append(batch_idx)

    trainer, module = make_trainer(AsyncGradientStrategy(*accumulate), devices=1, callbacks=[Says()]), Net()
    trainer.fit(module, loader(batches(0, 10)), loader(batches(0, 1)))
    alike = train_alone(batches(0, 10), accumulate=4 if accumulate == (4,) else 1)
    assert flat(module) == flat(alike)
    assert stepped == steps and trainer.global_step == len(steps)


def test_windows_enter_no_averager_and_no_round_of_averaging(ranks: Outcomes) -> None:
    for found in ranks("modules_entered"):
        assert not {"averager.py", "rounds.py"}.intersection(found["entered"]), found
