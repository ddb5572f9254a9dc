"""What keeps a fit from being resumed exactly is said at its start, by name, and with what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_async.data.stateful_loader import sources_of
from lightning_async.trainer.checkpoint.resume import Resume
from tests.resume.problem import Endless, Net, Sized, Training
from tests.resume.test_loaders import Batches, StatefulDataLoader, UntilItsEnd


class Wrapping(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__())


class Stateful(DataLoader[Any]):
    """As torchdata's: an iterator of its own, and a state."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def iterator() -> Iterator[torch.Tensor]:
    yield from Batches()


LOADERS = {
    "in_order=True": lambda: DataLoader(Sized(), 3, num_workers=1, in_order=False),
    "`__iter__` of its own": lambda: Wrapping(Sized(), 3),
    "use torch's DataLoader": lambda: Stateful(Sized(), 3, num_workers=1),
    "use torch's DataLoader, which reads its dataset again": UntilItsEnd,
    "is an iterator (generator)": iterator,
}


@pytest.mark.parametrize("told", LOADERS)
def test_a_loader(told: str) -> None:
    (source,) = sources_of([LOADERS[told]()])
    (problem,) = source.problems()
    assert problem.startswith("the train dataloader ") and told in problem


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_batches_that_the_step_fetches(tmp_path: Path) -> None:
    class Fetches(Net):
        def training_step(self, dataloader_iter: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    training = Training(lambda: DataLoader(Sized(), 3), Fetches, trainer={"max_epochs": 1})
    _, follow, _ = training.fit(tmp_path, wanted=lambda name: False)
    assert [re.sub("`.*?`", "", problem)[:20] for problem in follow.problems] == [" fetches batches its"]


@pytest.mark.processes
def test_no_problem(tmp_path: Path) -> None:
    loaders = (
        lambda: DataLoader(Sized(), 3, num_workers=1),
        lambda: DataLoader(Endless(), 3),
        lambda: StatefulDataLoader(Sized(), 3, num_workers=1),
        Batches,
    )
    for loader in loaders:
        _, follow, _ = Training(loader, trainer={"max_epochs": 1}).fit(tmp_path, wanted=lambda name: False)
        assert follow.problems == []


def test_fetching_again_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(lambda: DataLoader(Endless(), 3), trainer={"max_epochs": 2})
    _, follow, _ = training.fit(tmp_path, wanted=lambda name: name == "batch 0:5")
    with caplog.at_level(logging.WARNING, "lightning_async"):
        training.fit(tmp_path, follow.points[0], wanted=lambda name: False)
    (told,) = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_async")]
    assert "the train dataloader cannot save its position: its first 5 batches are fetched again" in told


def test_a_foreign_state_of_a_loader_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    loader = StatefulDataLoader(Sized(), 3)
    (source,) = sources_of([loader])
    loader.load_state_dict({"begin": 2})
    assert loader.state_dict() == {} and len(list(loader)) == 8
    assert "begins the epoch anew: the checkpoint holds its position as its own `state_dict` had it" in caplog.text
    source.detach()
    loader.load_state_dict({"begin": 2})
    assert len(list(loader)) == 6 and loader.state_dict() == {"begin": 8}


def test_between_safe_points_nothing_is_taken() -> None:
    with pytest.raises(RuntimeError, match="on_boundary"):
        Resume(None).capture()


def test_lightning_is_left_as_it_was(tmp_path: Path) -> None:
    loader = DataLoader(Sized(), 3)
    _, follow, _ = Training(lambda: loader, trainer={"max_epochs": 1}).fit(tmp_path, wanted=lambda name: False)
    fit = follow.resume._trainer.fit_loop
    own = [vars(thing).keys() for thing in (fit, fit.epoch_loop, fit.epoch_loop.val_loop)]
    assert not {"run", "reset", "on_run_start", "on_advance_end", "_evaluation_step"} & {
        n for names in own for n in names
    }
    assert "_get_iterator" not in vars(loader)
