"""Training ends by an exception: what was trained until then is saved, and goes on as if nothing had happened."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.trainer.namespace import pl
from tests.callbacks.checkpoint_ranks import At, Interrupted, Noisy, interrupt
from tests.callbacks.test_checkpoint import BATCHES, EPOCHS, every, steps_in, train, trainer_of

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]
BAD = 17
"""The batch at which it goes wrong, of all."""


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Numbers(Dataset[Any]):
    """Fails when it is asked for a sample for the n-th time."""

    def __init__(self, fails_at: int = -1) -> None:
        self.asked, self.fails_at = 0, fails_at
        self.x = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        self.asked += 1
        if self.asked == self.fails_at:
            raise Interrupted
        noisy = self.x[i] + 0.01 * torch.randn(4)
        return noisy, noisy.sum(dim=0, keepdim=True)


class Rows(Noisy):
    """Tells what each batch was, with a scheduler, values that are logged, and validations amid an epoch."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.register_buffer("large", torch.zeros(1 << 15))
        self.register_buffer("made", None, persistent=False)
        self.rows: dict[int, Any] = {}
        self.fails: dict[str, int] = {}
        self.epochs: dict[int, float] = {}

    def at(self, place: str) -> None:
        if self.fails.get(place) == self.batch:
            raise Interrupted

    @property
    def batch(self) -> int:
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.large += 1.0
        self.made = torch.ones(3) if self.made is None else self.made + 1.0  # pyright: ignore
        loss = super().training_step(batch, batch_idx) + 1e-3 * self.large[0] + 1e-3 * self.made.sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.rows[self.batch] = float(loss.detach()), lr, float(torch.rand(())), float(self.large[0])
        self.at("forward")
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.at("manual")
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def on_train_epoch_end(self) -> None:
        self.at("epoch end")
        self.epochs[self.current_epoch] = float(self.trainer.callback_metrics["loss_epoch"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("validation")
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _Halved(optimizer), "interval": "step"}}


class _Halved(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, 5, 0.5)


class Hooks(pl.Callback):
    """Fails in a hook; counts validations, as EarlyStopping does."""

    def __init__(self) -> None:
        self.validated = 0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated += not trainer.sanity_checking

    def state_dict(self) -> dict[str, Any]:
        return {"validated": self.validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validated = state_dict["validated"]


def _hook(name: str, place: str = "") -> Any:
    def hook(self: Any, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        pl_module.at(place or name)

    return hook


class Fails(pl.Callback):
    """After the other callbacks."""


for _name in (
    "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_before_zero_grad", "on_train_batch_end", "on_validation_end",
):  # fmt: skip
    setattr(Fails, _name, _hook(_name))


def run(folder: Path, fails: dict[str, int] | None = None, samples: int = -1, **options: Any) -> Rows:
    settings = {"every_n_train_steps": 1000, "save_on_exception": True, **options.pop("settings", {})}
    module = Rows(options.pop("automatic", True))
    module.fails = fails or {}
    saved = every(folder, **settings)
    trainer = trainer_of(
        saved, hooks := Hooks(), Fails(), num_sanity_val_steps=0, val_check_interval=3, log_every_n_steps=1, **options
    )
    torch.manual_seed(11)
    loader = DataLoader(Numbers(samples), batch_size=4, shuffle=True)
    module.hooks = hooks  # pyright: ignore
    trainer.fit(module, loader, DataLoader(Numbers(), batch_size=4 * BATCHES))
    return module


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rows]:
    """A run that nothing has interrupted, once for each kind of it."""
    runs: dict[str, Rows] = {}

    def get(**options: Any) -> Rows:
        if repr(options) not in runs:
            runs[repr(options)] = run(tmp_path_factory.mktemp("whole"), **options)
        return runs[repr(options)]

    return get


def goes_on(folder: Path, whole: Callable[..., Rows], first: int, fails: dict[str, int], **options: Any) -> Rows:
    """It fails, is saved, and goes on with the ``first`` batch; all that follows is equal."""
    samples = options.pop("samples", -1)
    with pytest.raises(Interrupted):
        run(folder, fails, samples, **options)
    entry = CheckpointStore(folder).entries()[0]
    assert entry.manifest is not None
    assert entry.manifest.reason == "exception"
    assert entry.manifest.notes == {"exception": "Interrupted: "}
    again, expected = run(folder, **options), whole(**options)
    assert min(again.rows) == first
    assert again.rows == {batch: row for batch, row in expected.rows.items() if batch >= first}
    assert {epoch: expected.epochs[epoch] for epoch in again.epochs} == again.epochs
    for (name, a), b in zip(expected.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(expected.made, again.made)
    assert again.hooks.validated == expected.hooks.validated  # pyright: ignore
    return again


PLACES = {
    "on_train_batch_start": BAD, "forward": BAD, "on_before_backward": BAD, "on_after_backward": BAD,
    "on_before_zero_grad": BAD, "on_before_optimizer_step": BAD,
    "on_train_batch_end": BAD + 1, "validation": BAD + 1, "on_validation_end": BAD + 1,
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_what_was_trained_goes_on_from_the_batch_that_failed(place: str, tmp_path: Path, whole: Any) -> None:
    goes_on(tmp_path, whole, PLACES[place], {place: BAD})


def test_data_that_cannot_be_read(tmp_path: Path, whole: Any) -> None:
    goes_on(tmp_path, whole, BAD, {}, samples=4 * BAD + 2)


def test_at_the_end_of_an_epoch(tmp_path: Path, whole: Any) -> None:
    again = goes_on(tmp_path, whole, BATCHES, {"epoch end": BATCHES - 1})
    assert len(again.epochs) == EPOCHS, "the hooks of its end come again"


def test_amid_an_accumulation(tmp_path: Path, whole: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Before the batch's backward pass all is there; behind it the gradients are not what they were."""
    options = {"accumulate_grad_batches": 3}
    goes_on(tmp_path / "a", whole, BAD - 1, {"forward": BAD - 1}, **options)
    goes_on(tmp_path / "b", whole, BAD, {"on_train_batch_end": BAD - 1}, **options)
    with pytest.raises(Interrupted):
        run(tmp_path / "c", {"on_after_backward": BAD - 1}, **options)
    assert steps_in(tmp_path / "c") == []
    assert "there is no checkpoint of this moment: gradients in accumulation have changed" in caplog.text


def test_manual_optimization(tmp_path: Path, whole: Any, caplog: pytest.LogCaptureFixture) -> None:
    goes_on(tmp_path / "a", whole, BAD, {"on_train_batch_start": BAD}, automatic=False)
    goes_on(tmp_path / "b", whole, BAD + 1, {"on_train_batch_end": BAD}, automatic=False)
    with pytest.raises(Interrupted):
        run(tmp_path / "c", {"manual": BAD}, automatic=False)
    assert steps_in(tmp_path / "c") == []
    assert "manual optimization" in caplog.text


class Halfway(torch.optim.Adam):
    """Fails within a step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        output = super().step(closure)
        self.steps += 1
        if self.steps == BAD + 1:
            raise Interrupted
        return output


class Stepping(Noisy):
    def configure_optimizers(self) -> Any:
        return Halfway(self.parameters(), lr=0.01)


def test_a_step_that_is_half_done_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Interrupted):
        train(every(tmp_path, 4, save_on_exception=True), module=Stepping())
    assert steps_in(tmp_path) == [16, 12]
    assert "the optimizer or a scheduler had begun a step" in caplog.text


def test_what_fails_behind_a_step_that_is_done(tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As averaging does, where a peer is lost."""
    strategy = type(trainer_of().strategy)
    original = strategy.optimizer_step

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        self.lightning_module.at("averaging")
        return output

    monkeypatch.setattr(strategy, "optimizer_step", optimizer_step)
    goes_on(tmp_path, whole, BAD + 1, {"averaging": BAD})


def test_a_batch_that_always_fails_fills_no_directory(tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(Interrupted):
            run(tmp_path, {"forward": BAD}, settings={"every_n_train_steps": 8})
    assert steps_in(tmp_path) == [BAD, 16]


def test_it_can_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, {"forward": BAD}, settings={"save_on_exception": False})
    assert steps_in(tmp_path) == []


def test_what_goes_wrong_with_the_save_is_not_what_the_user_sees(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Noisy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.trainer.global_step == 7:
                raise RuntimeError("no disk")

    with caplog.at_level(logging.ERROR), pytest.raises(Interrupted):
        train(every(tmp_path, 1000, save_on_exception=True), At(7, interrupt), module=Odd())
    assert "the training until this exception cannot be saved: RuntimeError('no disk')" in caplog.text


def test_by_hand(tmp_path: Path) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            train(every(tmp_path, 1000, save_on_exception=True), At(7, press))
    finally:
        signal.signal(signal.SIGINT, before)  # which Lightning takes away
    assert steps_in(tmp_path) == [7]
