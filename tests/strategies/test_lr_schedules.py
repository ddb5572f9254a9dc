"""Learning-rate schedules count the samples of all ranks: how far they are with fewer ranks, or more."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_async.trainer.loops import lr_schedules
from lightning_async.trainer.loops.lr_schedules import LearningRates


def make(ranks: int = 2, world: int = 1, batches: float = 10, frequency: int = 1, **trainer: Any) -> Any:
    """Learning rates of one scheduler, of a rank that trains on ``batches`` in an epoch with ``ranks`` live ranks."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = SimpleNamespace(scheduler=scheduler, interval="step", reduce_on_plateau=False, frequency=frequency)
    epoch_loop = SimpleNamespace(_update_learning_rates=None)
    fit_loop = SimpleNamespace(max_batches=batches, epoch_loop=epoch_loop, on_advance_end=lambda: None)
    module = SimpleNamespace(lr_scheduler_step=lambda scheduler, metric: scheduler.step())
    options = {
        "max_epochs": 4,
        "max_steps": -1,
        "limit_train_batches": 1.0,
        "accumulate_grad_batches": 1,
        "should_stop": False,
        **trainer,
    }
    made: Any = SimpleNamespace(
        fit_loop=fit_loop, lightning_module=module, lr_scheduler_configs=[config], callbacks=[], **options,
        _checkpoint_connector=SimpleNamespace(dump_checkpoint=dict),
    )  # fmt: skip
    view: Any = SimpleNamespace(num_sharing=ranks, shared_steps=None, updates=None, in_step=False)
    rates = LearningRates(view, made)
    rates.install()
    rates.begin(SimpleNamespace(gather_objects=lambda value: [value] * ranks))  # pyright: ignore[reportArgumentType]

    def train(steps: int, live: int = ranks, ends: bool = False) -> int:
        view.num_sharing = live
        optimizer.step()
        for _ in range(steps):
            module.lr_scheduler_step(scheduler, None)
        if ends:
            fit_loop.on_advance_end()
        return scheduler.last_epoch

    return SimpleNamespace(rates=rates, train=train, view=view, trainer=made, scheduler=scheduler)


def test_with_the_ranks_of_the_start_each_step_counts() -> None:
    rank = make(ranks=3)
    assert [rank.train(1) for _ in range(12)] == list(range(1, 13)), "also beyond the epoch's length at the start"
    assert rank.train(0, ends=True) == 12


def test_after_a_loss_each_step_is_a_part_of_one() -> None:
    rank = make(ranks=3)
    assert rank.train(4) == 4
    assert [rank.train(1, live=1) for _ in range(6)] == [4, 4, 5, 5, 5, 6]
    assert rank.train(0, live=1, ends=True) == 10, "the epoch ends where it was to end"
    assert [rank.train(3, live=1) for _ in range(10)] == list(range(11, 21))
    assert rank.train(9, live=1) == 20, "samples of the lost rank that are trained on twice carry it no further"


def test_with_more_ranks_each_step_is_more_than_one() -> None:
    rank = make(ranks=2)
    assert [rank.train(1, live=3) for _ in range(4)] == [1, 3, 4, 6]


def test_frequencies_count_in_the_steps_of_the_schedule() -> None:
    rank = make(ranks=2, frequency=2)  # Lightning asks for every second step
    assert rank.train(6, live=1) == 3
    assert rank.train(0, live=1, ends=True) == 5


def test_a_resume_on_other_ranks_counts_as_the_training_before() -> None:
    before = make(ranks=2)
    before.train(3)
    after = make(ranks=1, batches=20)
    after.rates.stepped.clear()
    after.rates.stepped.update(dict(before.rates.state()))
    after.rates.begin(None)
    assert after.train(4, live=1) == 2
    assert after.rates.stepped["steps"] == 10
    assert after.train(0, live=1, ends=True) == 7, "three of ten steps were taken before"


@pytest.mark.parametrize(
    "trainer", [{"max_steps": 30}, {"max_steps": 99, "max_epochs": -1}, {"limit_train_batches": 10}]
)
def test_schedules_count_steps_where_training_does(trainer: Any) -> None:
    rank = make(ranks=2, **trainer)
    assert rank.train(5, live=1) == 5


def test_a_limit_of_steps_beyond_the_epochs_does_not_count() -> None:
    assert make(ranks=2, max_steps=41).train(6, live=1) == 3


def test_local_schedules_count_steps() -> None:
    rank = make(ranks=2)
    assert rank.train(5, live=0) == 5


def test_streams_without_a_length_have_no_end_to_keep() -> None:
    rank = make(ranks=2, batches=math.inf)
    assert rank.train(5, live=1, ends=True) == 2
    assert rank.train(1, live=1) == 3, "the half step of the epoch before counts"


def test_mean_steps_are_shares_of_steps_too() -> None:
    rank = make(ranks=4)
    rank.train(0)
    counts = []
    for now, live in ((3, 4), (5, 2), (4, 2), (7, 2)):
        rank.view.shared_steps = (0, now)
        rank.view.num_sharing = live
        rank.rates.follow()
        counts.append(rank.scheduler.last_epoch)
    assert counts == [3, 4, 4, 5]


def test_a_resume_goes_on_at_the_place_of_schedules_that_follow_mean_steps() -> None:
    before = make(ranks=4, batches=250)
    before.train(0, live=2)
    before.view.shared_steps = (0, 1000)
    before.rates.follow()
    assert before.scheduler.last_epoch == 500

    after = make(ranks=2, batches=500)
    after.rates.stepped.clear()
    after.rates.stepped.update(before.rates.state())
    after.rates.begin(None)
    after.train(0)
    after.view.shared_steps = (1000, 1000)
    after.rates.follow()
    assert after.scheduler.last_epoch == 0, "its state is that of the checkpoint"
    after.view.shared_steps = (1000, 2000)
    after.rates.follow()
    assert after.scheduler.last_epoch == 500
    assert dict(after.rates.state())["at"] == 1000.0


def test_training_that_begins_again_after_a_loss_counts_the_ranks_of_the_start() -> None:
    rank = make(ranks=2)
    assert rank.train(4, live=1) == 2
    rank.rates.start_over()
    rank.rates.begin(None)
    assert rank.rates.share() == 0.5
    assert rank.train(4, live=1) == 4
    assert rank.train(0, live=1, ends=True) == 10


def test_mean_steps_go_on_at_their_place_when_training_begins_again_after_a_loss() -> None:
    rank = make(ranks=2)
    rank.train(0, live=1)
    for first, now in ((0, 4), (4, 8)):
        rank.view.shared_steps = (first, now)
        rank.rates.follow()
        rank.rates.start_over()
        rank.rates.begin(None)
    assert rank.scheduler.last_epoch == 4


@pytest.mark.parametrize("searches", [False, True])
def test_training_that_begins_again_forgets_the_counts(searches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make(ranks=2)
    monkeypatch.setattr(lr_schedules, "searches_lr", lambda trainer: searches)
    rank.rates.begin(None)
    rank.train(4, live=1 if searches else 2)
    # Lightning restores the user's training before it begins again.
    monkeypatch.setattr(lr_schedules, "searches_lr", lambda trainer: False)
    rank.rates.start_over()
    assert rank.rates.stepped == {}


def test_places_belong_to_the_same_schedulers_while_lightning_sees_some_of_them() -> None:
    rank = make(ranks=2, batches=100)
    step = rank.trainer.lr_scheduler_configs[0]
    other = torch.optim.lr_scheduler.StepLR(step.scheduler.optimizer, 1)
    epoch = SimpleNamespace(scheduler=other, interval="epoch", reduce_on_plateau=False, frequency=1)
    rank.trainer.lr_scheduler_configs = [epoch, step]
    rank.rates.begin(None)
    # Only due schedulers are shown to Lightning where ranks take their steps together.
    rank.trainer.lr_scheduler_configs = [SimpleNamespace(**{**vars(step), "frequency": 1})]
    assert rank.train(50) == 50
    assert rank.train(50, live=1) == 75
    rank.trainer.lr_scheduler_configs = [epoch, step]
    assert rank.train(0, live=1, ends=True) == 100
    assert other.last_epoch == 0


def test_a_scheduler_that_was_replaced_takes_no_steps_nor_does_its_successor() -> None:
    rank = make(ranks=2)
    assert rank.train(4, live=1) == 2
    averaged = torch.optim.lr_scheduler.StepLR(rank.scheduler.optimizer, 1)
    config = SimpleNamespace(scheduler=averaged, interval="epoch", reduce_on_plateau=False, frequency=1)
    rank.trainer.lr_scheduler_configs[0] = config  # as StochasticWeightAveraging does
    assert rank.train(0, live=1, ends=True) == 2
    assert averaged.last_epoch == 0


@pytest.mark.parametrize(("frequency", "steps"), [(4, 10), (2, 10), (8, 5), (6, 3)])
def test_frequencies_count_batches_where_gradients_accumulate(frequency: int, steps: int) -> None:
    rank = make(ranks=2, batches=40, frequency=frequency, accumulate_grad_batches=4)
    assert rank.train(4, live=1) == 2
    assert rank.train(0, live=1, ends=True) == steps
