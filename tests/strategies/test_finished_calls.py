"""Finished calls of the Trainer, which a rank that was started again takes over from the store."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_async.engine.timeouts import Timeouts
from lightning_async.errors import AsyncTrainingError, PeerLost
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.signing import Seal
from lightning_async.strategies import finished_calls, rank_mapping
from lightning_async.strategies.finished_calls import CallIsOver, FinishedCalls
from lightning_async.trainer.namespace import pl

DATA = TensorDataset(torch.arange(8.0).reshape(8, 1))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Folds(pl.LightningDataModule):
    def __init__(self, folder: str, names: set[str]) -> None:
        super().__init__()
        self.save_hyperparameters()


class Rank:
    """A rank of a job of two, whose Trainer runs by itself."""

    def __init__(self, store: HashStore, number: int, folder: Path) -> None:
        self.trainer: Any = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, logger=False, default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        self.model = Model()
        door = JoinBoard(store, Seal())
        strategy: Any = SimpleNamespace(
            cluster_environment=None, stable_id=str(number), global_rank=number, num_started=2, fit_sessions=None,
            config=SimpleNamespace(timeouts=Timeouts()),
            transport=SimpleNamespace(door=lambda environment: door, check_others=self.check),
        )  # fmt: skip
        self.calls = FinishedCalls(strategy)
        self.all_ended = False
        self.before_check: Any = lambda: None

    def check(self, environment: Any, dead_after: Any) -> None:
        self.before_check()
        if self.all_ended:
            raise PeerLost("rank 1 waits for others in vain")

    def fit(self) -> None:
        rank_mapping._runs[:] = [1]
        self.trainer.fit(self.model, DataLoader(DATA, 4))
        self.calls.begin(self.trainer, [DataLoader(DATA, 4)])

    def publish(self, result: Any = None) -> None:
        rank_mapping._runs[:] = [1]
        self.calls.publish(self.trainer, result)

    def come_back(self, call: str = "fit", data: Any = DATA) -> Any:
        """Make the first call again, and return its result."""
        rank_mapping._runs[:] = [0]
        trainer = self.trainer
        trainer.strategy.connect(self.model)
        trainer.state.fn = pl.trainer.states.TrainerFn(call)
        self.calls.begin(trainer, [DataLoader(data, 4)])
        with pytest.raises(CallIsOver) as caught:
            self.calls.wait(trainer)
        return self.calls.take_over(trainer, caught.value.parts)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, Rank]:
    """Rank 0, which has fitted, and rank 1, which is started again."""
    monkeypatch.setattr(rank_mapping, "_runs", [0])
    monkeypatch.setattr(finished_calls, "_room", [1 << 26])
    monkeypatch.setattr(finished_calls, "_LARGE_BYTES", 10_000)
    store = HashStore()
    zero = Rank(store, 0, tmp_path / "0")
    zero.fit()
    return zero, Rank(store, 1, tmp_path / "1")


def test_a_finished_fit_is_taken_over(ranks: tuple[Rank, Rank]) -> None:
    zero, one = ranks
    zero.publish()
    assert one.come_back() is None
    assert torch.equal(one.model.layer.weight, zero.model.layer.weight)
    assert one.trainer.callback_metrics == zero.trainer.callback_metrics != {}
    assert one.trainer.checkpoint_callback.best_model_path == zero.trainer.checkpoint_callback.best_model_path != ""
    assert (one.trainer.current_epoch, one.trainer.global_step) == (2, 4)
    assert one.trainer.state.finished
    assert rank_mapping.next_call() == 2


def test_a_rank_prefers_the_results_of_its_own_process(ranks: tuple[Rank, Rank]) -> None:
    zero, one = ranks
    for rank, error in ((zero, 1.0), (one, 2.0)):
        rank.trainer.state.fn = pl.trainer.states.TrainerFn("test")
        rank.trainer.strategy.connect(rank.model)
        rank.calls.begin(rank.trainer, [DataLoader(DATA, 4)])
        rank.publish([{"error": error}])
    assert one.come_back("test") == [{"error": 2.0}]


def test_a_rank_without_predictions_has_none(ranks: tuple[Rank, Rank]) -> None:
    zero, one = ranks
    zero.trainer.state.fn = pl.trainer.states.TrainerFn("predict")
    zero.calls.begin(zero.trainer, [DataLoader(DATA, 4)])
    zero.publish([torch.ones(8)])
    assert one.come_back("predict") == []
    predictions = zero.come_back("predict")
    assert torch.equal(predictions[0], torch.ones(8))


@pytest.mark.parametrize("result", [torch.ones(9000), object()], ids=["large", "no plain data"])
def test_a_result_that_was_not_kept_is_refused(
    ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, result: object
) -> None:
    zero, one = ranks
    monkeypatch.setattr(finished_calls, "_room", [30_000])
    zero.publish([result])
    with pytest.raises(AsyncTrainingError, match=r"call 1 .* is over, and its result was not kept.*Writer"):
        one.come_back()


def test_a_model_that_is_too_large_is_warned_of(
    ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    zero, one = ranks
    monkeypatch.setattr(finished_calls, "_room", [30_000])
    zero.model.layer = torch.nn.Linear(100, 100)
    zero.publish()
    before = one.model.layer.weight.clone()
    with caplog.at_level(logging.WARNING):
        one.come_back()
    assert "the model of call 1 of the Trainer (`fit`) cannot be had" in caplog.text
    assert torch.equal(one.model.layer.weight, before)


def test_a_call_with_the_data_of_another_fold_is_refused(ranks: tuple[Rank, Rank]) -> None:
    zero, one = ranks
    zero.calls.begin(zero.trainer, [DataLoader(Subset(DATA, [0, 1, 2]), 4)])
    zero.publish()
    with pytest.raises(AsyncTrainingError, match=r"is fit\(DataLoader of 3, \w+\), and was fit\(.*must not leave out"):
        one.come_back(data=Subset(DATA, [3, 4, 5]))


def test_a_tensor_that_differs_in_the_middle_is_refused(ranks: tuple[Rank, Rank]) -> None:
    zero, one = ranks
    data = torch.zeros(5000)
    zero.calls.begin(zero.trainer, [DataLoader(TensorDataset(data.clone()), 4)])
    zero.publish()
    data[2500] = 1.0
    with pytest.raises(AsyncTrainingError, match="must not leave out"):
        one.come_back(data=TensorDataset(data))


def test_hparams_that_differ_are_warned_of(ranks: tuple[Rank, Rank], caplog: pytest.LogCaptureFixture) -> None:
    zero, one = ranks
    zero.calls.begin(zero.trainer, [Folds(folder="/tmp/a", names={"a", "b"})])
    zero.publish()
    rank_mapping._runs[:] = [0]
    one.trainer.state.fn = zero.trainer.state.fn
    one.calls.begin(one.trainer, [Folds(folder="/tmp/b", names={"b", "a"})])
    with caplog.at_level(logging.WARNING), pytest.raises(CallIsOver):
        one.calls.wait(one.trainer)
    assert "has data with hparams [[['folder', '/tmp/b'], ['names', ['a', 'b']]" in caplog.text


def test_plain_values_do_not_depend_on_the_process() -> None:
    plain = finished_calls._plain
    assert plain({"b": {"y", "x"}, "a": object()}) == [["a", "object"], ["b", ["x", "y"]]]
    assert plain([1, 2]) != plain([2, 1])
    assert plain(["a", [1.5]]) == ["a", plain([1.5])]


def test_a_rank_that_waits_alone_ends(ranks: tuple[Rank, Rank]) -> None:
    _, one = ranks
    one.all_ended = True
    with pytest.raises(PeerLost, match="waits for others in vain"):
        one.come_back("test")


def test_a_result_of_ranks_that_have_ended_is_taken(ranks: tuple[Rank, Rank]) -> None:
    """They publish it after the first look, and end before the second."""
    zero, one = ranks
    one.all_ended = True
    zero.trainer.state.fn = pl.trainer.states.TrainerFn("test")
    zero.calls.begin(zero.trainer, [DataLoader(DATA, 4)])
    one.before_check = lambda: (zero.publish([{"error": 1.0}]), rank_mapping.begin_call(1))
    assert one.come_back("test") == [{"error": 1.0}]


def test_a_call_that_has_failed_fails_on_a_returning_rank(ranks: tuple[Rank, Rank]) -> None:
    zero, one = ranks
    zero.calls._open_board().settle("roll/2", {"members": ["0"]})
    with pytest.raises(AsyncTrainingError, match="call 1 of the Trainer has ended without a result"):
        one.come_back()
    assert rank_mapping.next_call() == 2, "a script that catches this goes on with its next call"
