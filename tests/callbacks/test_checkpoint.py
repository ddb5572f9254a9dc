"""`FaultTolerantCheckpoint` on a single device: killed, told to go, damaged, with a disk that fails."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_async import DivergenceMonitor, FaultTolerantCheckpoint
from lightning_async.algorithms import AtEpochEnd, Best, EveryNth, KeepAny, Latest
from lightning_async.algorithms.divergence import History
from lightning_async.checkpoint.shards import load
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.checkpoint.writer import SaveJob, Writer
from lightning_async.data import iterators
from lightning_async.errors import CheckpointError
from lightning_async.membership.launcher_channel import Failure
from lightning_async.trainer.data import epoch_data
from lightning_async.trainer.loops import preemption
from lightning_async.trainer.namespace import pl
from tests.callbacks.checkpoint_ranks import At, Interrupted, Noisy, interrupt, send, until

pytestmark = pytest.mark.processes

BATCHES, EPOCHS = 12, 2


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def data(workers: int = 0) -> DataLoader[Any]:
    x = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True, num_workers=workers)


def whole_data() -> DataLoader[Any]:
    return DataLoader(data().dataset, batch_size=4 * BATCHES)


def trainer_of(*callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS}
    return pl.Trainer(callbacks=list(callbacks), **(quiet | defaults | options))


def train(saved: FaultTolerantCheckpoint, *callbacks: Any, module: Any = None, **options: Any) -> Any:
    module = Noisy() if module is None else module
    torch.manual_seed(11)
    trainer_of(saved, *callbacks, **options).fit(module, data())
    return module


def every(folder: Path, steps: int = 4, **settings: Any) -> FaultTolerantCheckpoint:
    usual = {"every_n_train_steps": steps, "busy": "wait", "save_on_exception": False}
    return FaultTolerantCheckpoint(folder, **{**usual, **settings})


def steps_in(folder: Path) -> list[int]:
    return [entry.step for entry in CheckpointStore(folder).entries()]


def in_child(body: Callable[[], Any], timeout: float = 140.0) -> int:
    """The exit code of a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(timeout)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


class Told(Noisy):
    """Writes every loss to a file, at once."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with self.path.open("a") as file:
            file.write(json.dumps([self.trainer.global_step, float(loss.detach())]) + "\n")
        return loss


@pytest.mark.timeout(200)
def test_killed_three_times_the_history_is_that_of_one_run(tmp_path: Path) -> None:
    whole = train(every(tmp_path / "whole", 3))
    for stop in (7, 13, 20, None):
        kill = At(stop, lambda: os.kill(os.getpid(), signal.SIGKILL)) if stop else At(-1, interrupt)
        saved = every(tmp_path / "parts", 3)
        code = in_child(lambda kill=kill, saved=saved: train(saved, kill, module=Told(tmp_path / "losses")))
        assert code == (0 if stop is None else -signal.SIGKILL)
    lines = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert [step for step, _ in lines] != list(range(BATCHES * EPOCHS)), "some steps came twice"
    assert {step for step, _ in lines} == set(range(BATCHES * EPOCHS))
    assert [[step, loss] for step, loss in lines if whole.losses[step] != loss] == []


@pytest.mark.timeout(150)
def test_a_signal_saves_and_ends_with_75(tmp_path: Path) -> None:
    tell = At(9, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert in_child(lambda: train(every(tmp_path, 1000), tell)) == 75
    assert steps_in(tmp_path) == [10]
    assert CheckpointStore(tmp_path).entries()[0].manifest.reason == "preemption"  # pyright: ignore
    assert min(train(every(tmp_path, 1000)).losses) == 10


@pytest.mark.timeout(150)
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([signal.SIGUSR2], 1.2)
        os.kill(os.getpid(), signal.SIGTERM)

    assert in_child(lambda: train(every(tmp_path, 1000), At(9, twice))) == -signal.SIGTERM
    assert steps_in(tmp_path) == []


class Unreadable(Dataset[Any]):
    def __init__(self, is_read: bool, bad: int = 37) -> None:
        self.is_read = is_read
        self.bad = bad

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> Any:
        if index == self.bad and not self.is_read:
            raise ValueError("no picture")
        return torch.full((4,), float(index)), torch.zeros(1)


class FailingStep(Noisy):
    def __init__(self, error: Exception | None = None, bad: int = 37) -> None:
        super().__init__()
        self.error = ValueError("no picture") if error is None else error
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if bool((batch[0] == self.bad).any()):
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("in_step", "workers"), [(False, 0), (True, 0), (True, 2), (False, 2)])
def test_a_failure_is_reported_with_its_samples(
    in_step: bool, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Failure] = []
    monkeypatch.setattr(epoch_data, "tell_failure", reported.append)
    loader = DataLoader(Unreadable(in_step), batch_size=4, shuffle=True, num_workers=workers)
    for _ in range(2):
        torch.manual_seed(11)
        trainer = trainer_of(every(tmp_path / "saves", 1000))
        with pytest.raises(ValueError, match="no picture"):
            trainer.fit(FailingStep(), loader)
    gc.collect()  # an exception of torch's loader is part of a reference cycle, which keeps its workers alive
    first, second = reported
    assert first.text.endswith("ValueError: no picture")
    assert 37 in first.samples
    assert len(first.samples) == 4
    assert second.repeats(first, is_same_rank=False)


@pytest.mark.parametrize("is_prefetched", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("in_step", "bad"), [(True, 1), (True, 37), (False, 37)])
def test_a_plain_loaders_failure_names_its_samples(
    in_step: bool, bad: int, workers: int, is_prefetched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Failure] = []
    monkeypatch.setattr(epoch_data, "tell_failure", reported.append)
    monkeypatch.setattr(epoch_data, "follower", lambda loader: None)
    if is_prefetched:  # Lightning fetches one batch ahead of a loader without a length
        monkeypatch.setattr(f"{pl.__name__}.loops.fetchers.sized_len", lambda loader: None)
    trainer = trainer_of(every(tmp_path, 1000))
    with pytest.raises(ValueError, match="no picture"):
        trainer.fit(FailingStep(bad=bad), DataLoader(Unreadable(in_step, bad), batch_size=4, num_workers=workers))
    gc.collect()
    assert [failure.samples for failure in reported] == [list(range(bad // 4 * 4, bad // 4 * 4 + 4))]


@pytest.mark.parametrize(
    ("error", "is_reported"),
    [
        (torch.distributed.DistBackendError("NCCL"), False),
        (torch.distributed.DistNetworkError("reset"), False),
        (torch.OutOfMemoryError("full"), False),
        (ConnectionResetError("reset"), False),
        (TimeoutError("late"), False),
        (OSError(5, "Input/output error"), True),
        (RuntimeError("sizes differ"), True),
    ],
)
def test_errors_from_outside_are_not_reported(
    error: Exception, is_reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Failure] = []
    monkeypatch.setattr(epoch_data, "tell_failure", reported.append)
    with pytest.raises(type(error)):
        trainer_of(every(tmp_path, 1000)).fit(FailingStep(error), DataLoader(Unreadable(True), batch_size=4))
    assert len(reported) == is_reported


class SignalledHook(pl.Callback):
    """Sends SIGTERM to its own process in one hook, and says when that hook has ended."""

    def __init__(self, hook: str, ended: Path) -> None:
        setattr(self, hook, self.signal)
        self.ended = ended

    def signal(self, *_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self.ended.touch()


class Downloads(Noisy):
    def prepare_data(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(120.0)


@pytest.mark.timeout(150)
def test_a_signal_before_training_ends_it_at_once_with_75(tmp_path: Path) -> None:
    begun = time.monotonic()
    assert in_child(lambda: train(every(tmp_path, 1000), module=Downloads())) == 75
    assert time.monotonic() - begun < 60.0
    assert in_child(lambda: train(every(tmp_path, 1000), SignalledHook("setup", tmp_path / "ended"))) == 75
    assert not (tmp_path / "ended").exists()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "teardown"])
def test_a_signal_after_the_last_save_changes_no_code(hook: str, tmp_path: Path) -> None:
    assert in_child(lambda: train(every(tmp_path, 1000), SignalledHook(hook, tmp_path / "ended"))) == 0
    assert (tmp_path / "ended").exists()
    assert steps_in(tmp_path) == [BATCHES * EPOCHS]


@pytest.mark.timeout(150)
def test_a_signal_between_two_fits_ends_the_second_with_75(tmp_path: Path) -> None:
    def script() -> None:
        train(every(tmp_path / "first", 1000), SignalledHook("on_fit_end", tmp_path / "ended"))
        train(every(tmp_path / "second", 1000))

    assert in_child(script) == 75
    assert steps_in(tmp_path / "first") == [BATCHES * EPOCHS]
    assert steps_in(tmp_path / "second") == []


@pytest.mark.timeout(150)
def test_a_program_with_more_to_do_ends_with_75(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_LATE_S", 0.5)

    def script() -> None:
        train(every(tmp_path, 1000))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(120.0)

    assert in_child(script) == 75


class Waits(Dataset[Any]):
    """A worker sends a signal to the group once its rank waits for this sample; the next worker does not."""

    def __init__(self, folder: Path, index: int, late: bool) -> None:
        self.asked, self.sent = folder / "asked", folder / "sent"
        self.index, self.late = index, late
        self.x = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        if i == self.index and not self.sent.exists():
            until(self.asked.exists, "the rank waits for a batch")
            self.sent.touch()
            if self.late:  # this worker dies first
                send(f"sleep 0.3; kill -TERM {os.getppid()}", wait=False)
                os.kill(os.getpid(), signal.SIGTERM)
            send(f"kill -TERM -{os.getpgid(0)}")
            until(lambda: False, "the signal has come")
        noisy = self.x[i] + 0.01 * torch.randn(4)
        return noisy, noisy.sum(dim=0, keepdim=True)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("late", [False, True], ids=["all at once", "workers first"])
def test_a_signal_to_the_group_of_a_rank_that_waits_for_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    def train_in(folder: str) -> Any:
        dataset, module = Waits(tmp_path, 4 * 9 if folder == "parts" else -1, late), Noisy()
        torch.manual_seed(11)
        loader = DataLoader(dataset, batch_size=4, num_workers=2, prefetch_factor=1)
        trainer_of(every(tmp_path / folder, 1000)).fit(module, loader)
        return module

    def interrupted() -> None:
        os.setsid()
        original = iterators._Multi._get_data

        def get_data(self: Any) -> Any:
            if self._here.taken == 9:
                (tmp_path / "asked").touch()
            return original(self)

        monkeypatch.setattr(iterators._Multi, "_get_data", get_data)
        train_in("parts")

    assert in_child(interrupted) == 75
    (saved,) = steps_in(tmp_path / "parts")
    assert saved in (9, 10), "the batch on its way was trained on, or is read again"
    assert CheckpointStore(tmp_path / "parts").entries()[0].manifest.reason == "preemption"  # pyright: ignore
    whole, rest = train_in("whole").losses, train_in("parts").losses
    assert rest == {step: loss for step, loss in whole.items() if step >= saved}


class Pooled(Noisy):
    """Has a pool of processes, and misses it when the group is told to go."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 9:
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                pool.submit(int).result()
                send(f"kill -TERM -{os.getpgid(0)}")
                until(lambda: any(each.exitcode is not None for each in (pool._processes or {}).values()), "it died")
                pool.submit(int).result()
        return super().training_step(batch, batch_idx)


@pytest.mark.timeout(150)
def test_a_pool_that_the_signal_ends_is_no_failure(tmp_path: Path) -> None:
    def interrupted() -> None:
        os.setsid()
        train(every(tmp_path, 1000, save_on_exception=True), module=Pooled())

    assert in_child(interrupted) == 75
    assert steps_in(tmp_path) == [9], "before the batch that could not be trained on"
    manifest = CheckpointStore(tmp_path).entries()[0].manifest
    assert manifest is not None
    assert (manifest.reason, manifest.ranks) == ("preemption", (0,))
    assert manifest.notes["exception"].startswith("BrokenProcessPool")
    assert min(train(every(tmp_path, 1000)).losses) == 9


@pytest.mark.timeout(150)
def test_the_users_handler_runs_once_behind_the_save_and_in_no_fork(tmp_path: Path) -> None:
    said = tmp_path / "said"

    def handle(number: int, frame: Any) -> None:
        with said.open("a") as file:
            file.write(f"{number} in {os.getpid()}, saved {steps_in(tmp_path / 'saves')}\n")
        raise SystemExit(3)

    def live() -> None:
        (tmp_path / "lives").touch()
        signal.pause()

    def tell() -> None:
        fork = multiprocessing.get_context("fork").Process(target=live)
        fork.start()
        until((tmp_path / "lives").exists, "the fork lives: Python drops signals that come as it begins")
        os.kill(fork.pid or 0, signal.SIGTERM)
        fork.join()
        (tmp_path / "fork").write_text(str(fork.exitcode))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    def interrupted() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.signal(signal.SIGTERM, handle)
        train(every(tmp_path / "saves", 1000), At(9, tell))

    assert in_child(interrupted) == 75
    assert (tmp_path / "fork").read_text() == "-15"
    assert said.read_text() == f"15 in {(tmp_path / 'pid').read_text()}, saved [10]\n"


def test_an_exception_leaves_nothing_patched(tmp_path: Path) -> None:
    trainer, module = trainer_of(every(tmp_path), At(9, interrupt)), Noisy()
    before = {id(owner): set(vars(owner)) for owner in _patched(trainer)}
    with pytest.raises(Interrupted):
        trainer.fit(module, data())
    for owner in _patched(trainer):
        left = {name for name in vars(owner).keys() - before[id(owner)] if callable(vars(owner)[name])}
        assert left == set(), f"{type(owner).__name__} keeps {left}"
    trainer.callbacks[:] = [callback for callback in trainer.callbacks if not isinstance(callback, At)]
    trainer.fit(module, data())
    assert trainer.global_step == BATCHES * EPOCHS
    assert min(step for step in module.losses if step > 9) == 10


def _patched(trainer: Any) -> list[Any]:
    fit = trainer.fit_loop
    signals, connector = trainer._signal_connector, trainer._checkpoint_connector
    return [trainer.strategy, fit, fit.epoch_loop, fit.epoch_loop.val_loop, signals, connector]


def test_what_has_ended_is_complete_and_does_not_train_again(tmp_path: Path) -> None:
    train(every(tmp_path, 5))
    assert steps_in(tmp_path) == [24, 20]
    assert train(every(tmp_path, 5)).losses == {}
    assert steps_in(tmp_path) == [24, 20]
    longer = train(every(tmp_path, 5), max_epochs=EPOCHS + 1)
    assert [min(longer.losses), max(longer.losses)] == [24, 35]


@pytest.mark.parametrize("limits", [{"max_epochs": -1}, {"max_epochs": 2}])
def test_training_that_had_ended_within_an_epoch_goes_on_with_the_rest_of_it(
    limits: dict[str, Any], tmp_path: Path
) -> None:
    whole = train(every(tmp_path / "whole", 50), max_steps=22, **limits)
    first = train(every(tmp_path / "parts", 50), max_steps=17, **limits)
    assert train(every(tmp_path / "parts", 50), max_steps=17, **limits).losses == {}
    second = train(every(tmp_path / "parts", 50), max_steps=22, **limits)
    assert sorted(second.losses) == [17, 18, 19, 20, 21]
    assert first.losses | second.losses == whole.losses


def test_when_and_what_to_keep(tmp_path: Path) -> None:
    class Validated(Noisy):
        def on_train_epoch_end(self) -> None: ...

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", float(abs(self.trainer.global_step - 12)))

    module = Validated()
    keep = KeepAny(Best("score"), EveryNth(10))
    saved = FaultTolerantCheckpoint(tmp_path, save=AtEpochEnd(), keep=keep, busy="wait")
    trainer = trainer_of(saved, max_epochs=4, num_sanity_val_steps=0)
    trainer.fit(module, data(), whole_data())
    entries = CheckpointStore(tmp_path).entries()
    assert [entry.step for entry in entries] == [48, 12], "the newest, and the best"
    assert [entry.manifest.metrics["score"] for entry in entries if entry.manifest] == [36.0, 0.0]
    again = FaultTolerantCheckpoint(tmp_path, save=AtEpochEnd(), keep=Best("score"), recover="best")
    module = Validated()
    trainer_of(again, max_epochs=2, num_sanity_val_steps=0).fit(module, data(), whole_data())
    assert min(module.losses) == 12


def test_a_chosen_step_and_none(tmp_path: Path) -> None:
    train(every(tmp_path, 5, keep=Latest(9)))
    assert min(train(every(tmp_path, 5, recover="step=15", keep=Latest(9))).losses) == 15
    assert min(train(every(tmp_path, 50, recover=None, keep=Latest(9))).losses) == 0


def test_a_path_of_the_users_goes_first(tmp_path: Path) -> None:
    train(every(tmp_path, 5, keep=Latest(9)))
    path = next(entry.path for entry in CheckpointStore(tmp_path).entries() if entry.step == 10)
    module = Noisy()
    trainer_of(every(tmp_path, 50, keep=Latest(9))).fit(module, data(), ckpt_path=path)
    assert min(module.losses) == 10


def test_damage_is_named_and_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(every(tmp_path, 5))
    newest = Path(CheckpointStore(tmp_path).entries()[0].path)
    (newest / "rank-0.bin").write_bytes(b"\0" * (newest / "rank-0.bin").stat().st_size)
    with caplog.at_level(logging.WARNING, "lightning_async"):
        assert min(train(every(tmp_path, 5)).losses) == 20
    assert "rank-0.bin has the checksum" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if "damaged" in path.name] == [f"{newest.name}.damaged-1"]


def forge(folder: Path, change: Callable[[Any], object]) -> None:
    """Change what rank 0 has saved in the newest checkpoint, and make all checksums right."""
    store = CheckpointStore(folder)
    (newest, *_) = store.entries()
    assert newest.manifest is not None
    loaded = load(store, newest, 0)
    change(loaded.own)
    own: Any = loaded.own
    if (states := own.pop("optimizer_states", None)) is not None:
        loaded.shared["optimizer_states"] = states
    store.files.remove(newest.path)
    writer = Writer(folder)
    writer.save(SaveJob(newest.number, newest.step, "forged", (0,), loaded.shared, loaded.own, asdict(newest.manifest)))
    assert [result.error for result in writer.close(60.0)] == [None]


AVERAGING = {"round": 1, "num_rounds": 1, "rule": "Mean", "rule_state": {}, "parameters": []}
CLOCKS: dict[str, Any] = {"step": 1, "epoch": 0, "summary": {}, "rule_state": {}}
WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "no checkpoint": lambda own: own.pop("checkpoint"),
    "no step": lambda own: own["checkpoint"].update(global_step="ten"),
    "a list of loops": lambda own: own["checkpoint"].update(loops=[]),
    "a negative count": lambda own: own["checkpoint"]["loops"]["fit_loop"]["epoch_progress"]["total"].update(ready=-1),
    "a word for a count": lambda own: own["checkpoint"]["loops"]["fit_loop"].update(epoch_progress="first"),
    "no loaders": lambda own: own["resume"].update(loaders=3),
    "a word for an optimizer": lambda own: own.update(optimizer_states=["Adam"]),
    "an optimizer without groups": lambda own: own.update(optimizer_states=[{"state": {}, "param_groups": None}]),
    "a word for averaging": lambda own: own.update(averaging="DiLoCo"),
    "a word for a step": lambda own: own.update(averaging=AVERAGING, clocks={**CLOCKS, "step": "ten"}),
    "a hundred million ranks": lambda own: own["resume"].update(dealt=(0, 10**8)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_contents_that_no_save_writes_are_passed_over(
    tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(every(tmp_path, 5))
    forge(tmp_path, WRONG[wrong])
    with caplog.at_level(logging.WARNING, "lightning_async"):
        assert min(train(every(tmp_path, 5)).losses) == 20
    assert "000005-step-24 is skipped: it does not hold what a checkpoint must" in caplog.text


def test_what_cannot_be_cleaned_is_named_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (strange := tmp_path / "000001-step-3.tmp-x").symlink_to(strange)
    with caplog.at_level(logging.WARNING, "lightning_async"):
        assert len(train(every(tmp_path, 5)).losses) == 24
    assert f"cannot be deleted: [Errno 40] Too many levels of symbolic links: '{strange}'" in caplog.text


def test_saves_that_fail_are_loud_and_end_training_after_some(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def take_away() -> None:
        shutil.rmtree(tmp_path / "saves")
        tmp_path.joinpath("saves").write_text("no directory any more")

    for steps, ends in ((2, 10), (10, 24)):
        (tmp_path / "saves").unlink(missing_ok=True)
        (tmp_path / "saves").mkdir()
        module, saved = Noisy(), every(tmp_path / "saves", steps)
        if steps == 2:
            # or 4: one may begin before the third is known to have failed
            with pytest.raises(CheckpointError, match=r"[34] saves in a row have failed, .*[^.]\. Training ends"):
                train(saved, At(1, take_away), module=module)
        else:  # two failures, and the last save
            train(saved, At(1, take_away), module=module)
        assert 6 <= len(module.losses) <= ends
    assert len(module.losses) == 24
    assert "A checkpoint could not be saved; training goes on" in caplog.text


def test_what_cannot_be_saved_is_named_when_training_starts(tmp_path: Path) -> None:
    class Strange(Noisy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"what": object()}

    with pytest.raises(TypeError, match=r"mine\['what'\] is a builtins.object.*or pass `.*\(objects='pickle'\)`"):
        train(every(tmp_path), module=Strange())


@pytest.mark.timeout(150)
def test_nan_rolls_back_to_a_good_checkpoint(tmp_path: Path) -> None:
    """The poisoned one that was saved meanwhile never becomes good; the data goes on."""

    class Poisoned(Noisy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 30:
                with torch.no_grad():
                    self.net[0].weight.fill_(float("nan"))  # pyright: ignore

    monitor = DivergenceMonitor(remedies=["roll_back"], history=History(warmup=5))
    saved = every(tmp_path, 4, keep=Latest(3), good_after=6)
    module = train(saved, monitor, module=Poisoned(), max_epochs=5)
    assert monitor.rollbacks == 1
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())
    bad = [step for step, loss in module.losses.items() if loss != loss]
    assert bad
    assert max(bad) <= 32
    good = [entry.step for entry in CheckpointStore(tmp_path).entries() if entry.good]
    assert good
    assert not set(good) & set(range(30, 34))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_train_steps": 0}, "FaultTolerantCheckpoint(every_n_train_steps=0)"),
        ({"train_time_interval": timedelta(0)}, "FaultTolerantCheckpoint(train_time_interval="),
        ({"save": 5}, "save=5"),
        ({"keep": "all"}, "keep='all'"),
        ({"recover": "newest"}, "recover='newest'"),
        ({"recover": "best"}, "recover='best'"),
        ({"busy": "never"}, "busy='never'"),
        ({"buffers": 3}, "buffers=3"),
        ({"max_failures": 0}, "max_failures=0"),
        ({"good_after": 0}, "good_after=0"),
    ],
)
def test_wrong_arguments_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r".*") as raised:
        FaultTolerantCheckpoint("somewhere", **settings)
    assert message in str(raised.value)


def test_evaluation_begins_with_the_model_that_it_is_given(tmp_path: Path) -> None:
    class Validated(Noisy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weight", self.net[0].weight.sum())  # pyright: ignore

    trained = Validated()
    trainer_of(every(tmp_path, 5), num_sanity_val_steps=0).fit(trained, data(), whole_data())
    trainer, fresh = trainer_of(every(tmp_path, 5)), Validated()
    before = float(fresh.net[0].weight.detach().sum())  # pyright: ignore
    handler = signal.getsignal(signal.SIGTERM)
    (told,) = trainer.validate(fresh, whole_data(), verbose=False)
    assert told["weight"] == pytest.approx(before)
    assert signal.getsignal(signal.SIGTERM) is handler
    path = CheckpointStore(tmp_path).entries()[0].path
    (told,) = trainer.validate(fresh, whole_data(), ckpt_path=path, verbose=False)
    assert told["weight"] == pytest.approx(float(trained.net[0].weight.detach().sum()))  # pyright: ignore


def test_a_dev_run_neither_resumes_nor_saves(tmp_path: Path) -> None:
    train(every(tmp_path, 5))
    before = steps_in(tmp_path)
    assert list(train(every(tmp_path, 5), fast_dev_run=2).losses) == [0, 1]
    assert steps_in(tmp_path) == before


def test_a_search_for_a_learning_rate_is_not_saved(tmp_path: Path) -> None:
    finder = pl.callbacks.LearningRateFinder(num_training_steps=8)

    class Tuned(Noisy):
        lr = 0.01

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    train(every(tmp_path, 3, keep=Latest(99)), finder, module=Tuned())
    assert steps_in(tmp_path) == [24, *range(24, 0, -3)]


def test_a_policy_of_the_users_own(tmp_path: Path) -> None:
    class Primes:
        def due(self, progress: Any) -> bool:
            return progress.step in (2, 3, 5, 7, 11, 13)

    train(FaultTolerantCheckpoint(tmp_path, save=Primes(), keep=Latest(99), busy="wait"))
    assert steps_in(tmp_path) == [24, 13, 11, 7, 5, 3, 2]
