"""A module's `state_dict` has other keys than its tensors, or only what is trained is saved."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.cli.main import main
from lightning_async.engine.replica import tensors_of
from lightning_async.errors import CheckpointError
from lightning_async.trainer.checkpoint.checkpoint_state import TrainerState
from lightning_async.trainer.data import join
from lightning_async.trainer.data.join import JoinState
from lightning_async.trainer.namespace import pl
from tests.callbacks.checkpoint_ranks import BATCHES, At, Interrupted, interrupt
from tests.callbacks.partial_ranks import KINDS, STRATEGIES, Adapted, AdapterOnly
from tests.callbacks.test_checkpoint import data, every, steps_in, train, trainer_of, whole_data
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.callbacks.partial_ranks"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_restores_all_that_state_dict_lacks(ranks: Outcomes, strategy: str, kind: str) -> None:
    for rank in ranks(f"{strategy}_{kind}"):
        assert set(rank["losses"]) == {True}
        assert {tensor: value for tensor, value in rank["tensors"].items() if value} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_resumes_what_two_have_saved(ranks: Outcomes, tmp_path: Path, kind: str) -> None:
    """From within an epoch, whose rest is divided anew."""
    for name in ("ordinary", kind):
        assert len(ranks(f"averaging_{name}")) == 2
    folders = {name: ranks.folder(f"averaging_{name}") / "parts" for name in ("ordinary", kind)}
    first, second = ({*steps_in(folder)} for folder in folders.values())
    within = max(step for step in first & second if step % BATCHES)

    def resumed(name: str, module: Any) -> Any:
        shutil.copytree(folders[name], tmp_path / name)
        torch.manual_seed(11)
        loader: Any = DataLoader(data().dataset, batch_size=4, shuffle=True, drop_last=True)
        trainer_of(every(tmp_path / name, recover=f"step={within}")).fit(module, loader)
        return module

    expected, module = resumed("ordinary", Adapted()), resumed(kind, KINDS[kind]())
    assert module.losses == expected.losses != {}
    expected = tensors_of(expected)
    assert [name for name, value in tensors_of(module).items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_keys_that_lightning_saves(tmp_path: Path, kind: str) -> None:
    fit = trainer_of(every(tmp_path / "run"))
    fit.fit(KINDS[kind](), data())
    fit.save_checkpoint(tmp_path / "of_lightning.ckpt")
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "ours.ckpt")]) == 0
    expected, ours = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("of_lightning", "ours"))
    assert list(ours["state_dict"]) == list(expected["state_dict"])
    assert all(torch.equal(value, expected["state_dict"][key]) for key, value in ours["state_dict"].items())
    assert ours.keys() == expected.keys()


def test_a_commit_restores_what_state_dict_lacks() -> None:
    """As `fit_elastic` makes it in memory."""

    def state_of(module: Any) -> TrainerState:
        return TrainerState(SimpleNamespace(lightning_module=module, state=SimpleNamespace(fn="fit")))

    module, other = AdapterOnly(), AdapterOnly()
    torch.nn.init.ones_(module.net[0].weight)  # pyright: ignore[reportArgumentType]
    checkpoint = {"state_dict": {**module.state_dict(), "net.3.weight": module.net[3].weight.half()}}  # pyright: ignore
    state_of(module).add_left_out(checkpoint)
    load = lambda checkpoint, strict: other.load_state_dict(checkpoint["state_dict"], False)  # noqa: E731
    state_of(other).load_model(load, checkpoint, strict=False)
    expected = tensors_of(module)
    assert [name for name, value in tensors_of(other).items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_joining_rank_receives_what_state_dict_lacks(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(join, "packed", lambda state, copies: state)

    class Joins(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.received: Any = JoinState(trainer).packed({})
            trainer.should_stop = True

    trainer_of(joins := Joins(), enable_checkpointing=False).fit(module := KINDS[kind](), data())
    received, names = joins.received["tensors"], {"lora.weight", "net.0.weight"}  # renamed, left out or halved
    expected = tensors_of(module)
    own_names = {"adapter_only": {"lora.weight"}, "trainable_only": names}
    assert names - {*received} == own_names.get(kind, set())
    assert [name for name, value in received.items() if not torch.equal(value, expected[name])] == []


class Large(Adapted):
    """A base of 1 MiB, of which nothing is trained at first."""

    def __init__(self, seed: int = 7, extra: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.large = torch.nn.Linear(512, 512).requires_grad_(False)
        if extra:
            self.extra = torch.nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.large.weight.mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested = float(self.lora.weight.detach().sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def size_of(folder: Path) -> int:
    manifest = CheckpointStore(folder).entries()[0].manifest
    assert manifest is not None
    return sum(record.size for record in manifest.files.values())


def test_trainable_only_resumes_to_the_bit_without_the_base(tmp_path: Path) -> None:
    whole = train(every(tmp_path / "whole"), module=Large())
    with contextlib.suppress(Interrupted):
        train(every(tmp_path / "part", trainable_only=True), At(17, interrupt), module=Large())
    rest = train(every(tmp_path / "part", trainable_only=True), module=Large())
    assert min(rest.losses) == 16
    assert all(rest.losses[step] == whole.losses[step] for step in rest.losses)
    expected = tensors_of(whole)
    assert [name for name, value in tensors_of(rest).items() if not torch.equal(value, expected[name])] == []
    assert size_of(tmp_path / "whole") - size_of(tmp_path / "part") > 4 * 512 * 512
    trainer_of(every(tmp_path / "part")).test(tested := Large(), whole_data(), ckpt_path="best")
    assert tested.tested == float(rest.lora.weight.detach().sum())
    with pytest.raises(CheckpointError, match=r"\['large.weight', 'large.bias'\]"):
        trainer_of(every(tmp_path / "part")).test(Large(seed=8), whole_data(), ckpt_path="best")


def test_trainable_only_names_a_base_of_other_values(tmp_path: Path) -> None:
    saved = {"trainable_only": True}
    train(every(tmp_path, **saved), module=Large(), max_epochs=1)
    with pytest.raises(
        CheckpointError, match=r"parameters \['large.weight', 'large.bias'\] of this module are missing"
    ):
        train(every(tmp_path, **saved), module=Large(seed=8))
    with pytest.raises(RuntimeError, match=r"Missing key.*extra.weight"):
        train(every(tmp_path, **saved), module=Large(extra=True))


def test_trainable_only_saves_what_is_thawed_and_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {"trainable_only": True}
    train(every(tmp_path, **saved), module=Large(), max_epochs=1)
    before, thawed = size_of(tmp_path), Large()
    thawed.large.requires_grad_(True)
    with caplog.at_level(logging.WARNING):
        train(every(tmp_path, **saved), module=thawed)
    assert "parameters ['large.bias', 'large.weight'] are trained, and were frozen in the checkpoint" in caplog.text
    assert size_of(tmp_path) - before > 4 * 512 * 512
    again = train(every(tmp_path, **saved), module=Large())
    assert torch.equal(again.large.weight, thawed.large.weight)


def test_trainable_only_saves_what_is_written_in_rows(tmp_path: Path) -> None:
    """The last elements of a weight, which are not among the sampled ones."""
    module = Large()

    def write() -> None:
        with torch.no_grad():
            module.large.weight[-1, -40:] = 5.0
            module.large.bias.mul_(1.0)  # written to, and not changed

    with contextlib.suppress(Interrupted):
        train(every(tmp_path, trainable_only=True), At(9, write), At(17, interrupt), module=module)
    again = train(every(tmp_path, trainable_only=True), module=Large())
    assert torch.equal(again.large.weight, module.large.weight)
    state = TrainerState(SimpleNamespace(), trainable_only=True)
    assert [state._is_changed("bias", module.large.bias) for _ in range(2)] == [False, False]
    write()
    assert not state._is_changed("bias", module.large.bias)


def test_an_adapter_on_another_base_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(every(tmp_path), module=AdapterOnly(), max_epochs=1)
    other = AdapterOnly()
    torch.nn.init.ones_(other.base.weight)
    with caplog.at_level(logging.WARNING):
        train(every(tmp_path), module=other)
    assert "parameters ['base.weight'] are left out by `state_dict`, and differ" in caplog.text
