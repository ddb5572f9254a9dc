"""Training that diverges on one device: noticed, and brought back."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_async.algorithms.divergence import Absolute, History, Relative, Remedy
from lightning_async.callbacks.divergence import Alarm, DivergenceMonitor
from lightning_async.callbacks.divergence_signals import SamplingBudget, norm
from lightning_async.errors import TrainingDiverged
from lightning_async.trainer.namespace import pl, pytorch
from tests.callbacks.problem import Keeper, Line, batches, finite, trainer

NAN = math.nan
SHORT = History(window=20, warmup=5, cooldown=0)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("lightning_async.callbacks")]


def test_without_it_one_batch_disables_the_model_for_good():
    module = Line({7: NAN})
    trainer().fit(module, batches(10))
    assert not finite(module)


@pytest.mark.parametrize("wrong", [NAN, math.inf])
def test_a_gradient_that_is_not_finite_never_reaches_the_model(wrong: float, caplog: pytest.LogCaptureFixture):
    module, monitor = Line({7: wrong}), DivergenceMonitor()
    trainer(monitor).fit(module, batches(12))
    assert module.history[6] == module.history[5]  # parameters, and with them Adam's state, as they were
    assert all(module.history[i] != module.history[i - 1] for i in (5, 7, 8, 11))
    assert finite(module)
    (said,) = messages(caplog)
    assert "Rank 0, epoch 0, step 7" in said
    assert "gradient_norm/0: not finite" in said
    assert said.endswith("Remedy: skip.")
    assert monitor.clean_steps == 5


def test_what_is_not_finite_is_told_once_whether_all_of_it_was_looked_at_or_a_sample(caplog: pytest.LogCaptureFixture):
    trainer(DivergenceMonitor(remedies=["log", "skip"])).fit(Line(dict.fromkeys(range(20, 30), NAN)), batches(40))
    assert {said.count("gradient_norm/0") for said in messages(caplog)} == {1}


def test_a_loss_that_is_not_finite_in_an_accumulated_window_is_skipped_with_it():
    module, monitor = Line({6: NAN}), DivergenceMonitor(signals=["loss"])
    trainer(monitor, accumulate_grad_batches=4).fit(module, batches(16))
    assert module.history[7] == module.history[3]
    assert len({tuple(h) for h in module.history}) == 4  # three windows have moved it
    assert finite(module)


def test_without_skipping_it_goes_back_to_the_last_good_state(caplog: pytest.LogCaptureFixture):
    module = Line({33: NAN})
    monitor = DivergenceMonitor(remedies=["log", "roll_back", "stop"])
    keeper = Keeper(monitor)
    started = time.monotonic()
    trainer(monitor, keeper).fit(module, batches(60))
    assert time.monotonic() - started < 10
    assert keeper.rolled == [(33, 25)]  # of step 30, three clean steps had yet to come
    assert module.history[32] == module.history[24]
    assert all(all(map(math.isfinite, h)) for h in module.history)
    assert module.history[33] != module.history[32]  # and training goes on
    assert monitor.rollbacks == 1
    assert "rolled back from step 33 to the state of step 25" in messages(caplog)[-1]


def test_the_poisoned_state_never_becomes_good():
    module = Line(dict.fromkeys((23, 24, 41, 77), NAN))
    monitor = DivergenceMonitor(remedies=["roll_back", "stop"], max_rollbacks=5)
    kept = []

    class Watched(Keeper):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            if self.good is not None:
                kept.append(self.good[1]["model"])

    keeper = Watched(monitor, every=1, clean=2)
    trainer(monitor, keeper).fit(module, batches(100))
    assert len(keeper.rolled) == 4
    assert all(torch.isfinite(t).all() for state in kept for t in state.values())
    assert finite(module)


def test_rollbacks_are_limited_and_then_training_ends_with_an_error():
    module = Line(dict.fromkeys(range(23, 60), NAN))
    monitor = DivergenceMonitor(remedies=["roll_back", "stop"], max_rollbacks=2)
    keeper = Keeper(monitor)
    with pytest.raises(TrainingDiverged, match=r"Rank 0: training has diverged at step 25.*roll_back 2x, stop 1x"):
        trainer(monitor, keeper).fit(module, batches(60))
    assert [good for _, good in keeper.rolled] == [15, 15]


def test_where_there_is_no_good_state_yet_it_stops():
    monitor = DivergenceMonitor(remedies=["roll_back", "stop"])
    with pytest.raises(TrainingDiverged, match="at step 2 "):
        trainer(monitor, Keeper(monitor)).fit(Line({2: NAN}), batches(10))


def test_a_state_of_the_optimizer_that_is_not_finite_is_found_though_the_parameters_are():
    class Poisons(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 12:
                next(iter(trainer.optimizers[0].state.values()))["exp_avg_sq"][0] = math.inf

    monitor = DivergenceMonitor(remedies=["stop"], signals=["optimizer_state"])
    with pytest.raises(TrainingDiverged, match="optimizer_state: not finite"):
        trainer(Poisons(), monitor).fit(Line(), batches(150))


def test_spikes_of_the_loss_ask_for_more_each_time(caplog: pytest.LogCaptureFixture):
    alarms: list[Alarm] = []
    history = History(window=50, warmup=5, cooldown=2)
    monitor = DivergenceMonitor(
        signals=["loss"], history=history, alert=alarms.append, remedies=["log", "alert", "cut_lr", "skip", "stop"],
        skip_batches=2,
    )  # fmt: skip
    module = Line(dict.fromkeys((10, 13, 16, 19), 1e4), lambda ps: torch.optim.SGD(ps, lr=1e-6))
    fit = trainer(monitor)
    fit.fit(module, batches(25))
    assert [alarm.remedy for alarm in alarms] == [Remedy.ALERT, Remedy.CUT_LR, Remedy.SKIP]
    assert [alarm.step for alarm in alarms] == [13, 16, 19]
    assert alarms[0].findings[0].value > alarms[0].findings[0].limit > 0
    assert fit.optimizers[0].param_groups[0]["lr"] == 0.5e-6
    assert module.history[18] != module.history[17]
    assert module.history[18] == module.history[19] == module.history[20]  # two are skipped
    assert module.history[21] != module.history[20]
    assert "learning rates are cut, to 5e-07" in " ".join(messages(caplog))


def test_an_alert_that_fails_ends_nothing_and_the_loggers_hear(tmp_path: Any, caplog: pytest.LogCaptureFixture):
    def alert(alarm: Alarm) -> None:
        raise RuntimeError("no network")

    logger = pytorch("loggers").CSVLogger(tmp_path)
    monitor = DivergenceMonitor(alert_threshold={"loss": 0.0}, signals=["loss"], remedies=["alert"], alert=alert)
    trainer(monitor, logger=logger, log_every_n_steps=1).fit(Line(), batches(3))
    assert "training goes on" in messages(caplog)[0]
    assert "divergence/loss" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()


def test_learning_rates_stay_cut_under_a_scheduler():
    class Scheduled(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    monitor = DivergenceMonitor(signals=["loss"], history=SHORT, remedies=["cut_lr"], lr_factor=0.1)
    fit = trainer(monitor)
    fit.fit(Scheduled({10: 1e5}), batches(19))
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001 / 20)


def test_gradients_of_each_optimizer_are_looked_at_apart_in_manual_optimization():
    class Two(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Linear(4, 4)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            for i, layer in enumerate((self.layer, self.other)):
                optimizer = self.optimizers()[i]  # type: ignore[index]
                optimizer.zero_grad()
                loss = (layer(batch) - batch).square().mean() * (1e3 if i else 1.0)
                self.manual_backward(loss * NAN if i and batch_idx == 5 else loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=1e-5) for layer in (self.layer, self.other)]

    module, monitor = Two(), DivergenceMonitor()
    trainer(monitor).fit(module, batches(10))
    before, after = module.history[4], module.history[5]
    assert before[:20] != after[:20]
    assert before[20:] == after[20:]
    assert finite(module)
    assert {"gradient_norm/0", "gradient_norm/1"} <= set(monitor._observer._tracks)


def test_a_gradient_scaler_is_left_to_find_its_scale(caplog: pytest.LogCaptureFixture):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)  # type: ignore[attr-defined]
    precision = pytorch("plugins.precision").MixedPrecision("16-mixed", "cpu", scaler=scaler)
    module = Line({4: 1e38})  # the gradients overflow once scaled
    trainer(DivergenceMonitor(signals=["gradient_norm", "parameters"]), plugins=[precision]).fit(module, batches(8))
    assert scaler.get_scale() < 2.0**15
    assert module.history[3] == module.history[2]
    assert finite(module)
    assert messages(caplog) == []


def test_what_is_usual_is_no_alarm(caplog: pytest.LogCaptureFixture):
    monitor = DivergenceMonitor()
    trainer(monitor, max_epochs=3).fit(Line(), batches(80))
    assert messages(caplog) == []
    assert monitor.clean_steps == 240


def test_the_number_of_rollbacks_is_in_checkpoints(tmp_path: Any):
    monitor = DivergenceMonitor(remedies=["roll_back", "stop"])
    fit = trainer(monitor, Keeper(monitor))
    fit.fit(Line({30: NAN}), batches(40))
    fit.save_checkpoint(tmp_path / "a.ckpt")
    later = DivergenceMonitor(remedies=["stop"])
    trainer(later, max_epochs=2).fit(Line(), batches(40), ckpt_path=tmp_path / "a.ckpt")
    assert later.rollbacks == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"signals": ["los"]}, ValueError, "DivergenceMonitor(signals='los')` must be one of"),
        ({"remedies": ["pray"]}, ValueError, "DivergenceMonitor(remedies='pray')` must be one of"),
        ({"alert_threshold": "high"}, TypeError, "must be a number, a `Relative(...)` or an `Absolute(...)`"),
        ({"alert_threshold": {"spread": 1.0}}, ValueError, "alert_threshold='spread'"),
        ({"alert_threshold": NAN}, ValueError, "must be finite"),
        ({"rollback": 3}, TypeError, "rollback=3"),
        ({"max_rollbacks": -1}, ValueError, "max_rollbacks=-1"),
        ({"lr_factor": 1.0}, ValueError, "lr_factor=1.0"),
        ({"skip_batches": 0}, ValueError, "skip_batches=0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error) as raised:
        DivergenceMonitor(**arguments)
    assert text in str(raised.value)


def test_rolling_back_needs_something_to_go_back_to():
    with pytest.raises(ValueError, match="FaultTolerantCheckpoint"):
        trainer(DivergenceMonitor(remedies=["roll_back"])).fit(Line(), batches(1))


def test_a_threshold_of_ones_own():
    class Never:
        def limit(self, median: float, deviation: float) -> float:
            return 1e9

    module = Line({10: 1e4})
    monitor = DivergenceMonitor(alert_threshold=Never(), remedies=["stop"], history=SHORT)
    trainer(monitor).fit(module, batches(20))
    assert monitor._thresholds["loss"].limit(0.0, 0.0) == 1e9
    assert DivergenceMonitor(alert_threshold=3)._thresholds["loss"] == Absolute(3)
    assert DivergenceMonitor(alert_threshold={"loss": 3.0})._thresholds["gradient_norm"] == Relative()


def test_a_norm_is_of_all_elements_of_whatever_type():
    tensors = [torch.randn(7), torch.randn(3, 2).double(), torch.full((5,), 300.0).half(), torch.randn(2, 2).bfloat16()]
    complex_ = torch.randn(3, dtype=torch.complex64)
    everything = torch.cat([t.double().flatten() for t in tensors] + [torch.view_as_real(complex_).double().flatten()])
    found = norm([*tensors, complex_.conj(), torch.empty(0)])
    assert found is not None
    assert float(found) == pytest.approx(float(everything.norm()))
    assert float(norm([torch.full((2,), 65504.0).half()]) or 0.0) == pytest.approx(65504.0 * 2**0.5)
    assert not math.isfinite(float(norm([*tensors, torch.tensor([NAN])]) or 0.0))
    assert norm([]) is None


def test_looks_take_no_more_than_their_share():
    now = 0.0
    budget = SamplingBudget(0.01, lambda: now)
    assert budget.every == 1
    for _ in range(50):
        budget.step()
        now += 0.050
        budget.looked(0.0019)
    assert budget.every == 4
    budget.step()
    now += 30.0  # a validation
    budget.step()
    assert budget.every == 4


def test_it_takes_less_than_a_hundredth_of_a_step():
    class Heavy(Line):
        def __init__(self) -> None:
            super().__init__(optimizer=lambda ps: torch.optim.Adam(ps, lr=1e-5))
            self.body = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.body(batch).square().mean()

    spent, began = [0.0], [0.0]

    class Timed(DivergenceMonitor):
        """Adds up what its hooks take, once all is warm."""

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if not name.startswith(("on_train_batch", "on_before")):
                return found

            def timed(trainer: Any, *args: Any) -> None:
                if trainer.global_step == 20 and not began[0]:
                    began[0], spent[0] = time.thread_time(), 0.0
                started = time.thread_time()
                found(trainer, *args)
                spent[0] += time.thread_time() - started

            return timed

    data, threads = torch.randn(45, 2048, 256), torch.get_num_threads()
    loader: Any = torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]

    def share() -> float:
        began[0] = 0.0
        trainer(Timed()).fit(Heavy(), loader)
        return spent[0] / (time.thread_time() - began[0])

    torch.set_num_threads(1)
    try:  # the least counts: what else runs takes caches from looks, which last for much less than a step
        assert any(share() < 0.01 for _ in range(3))
    finally:
        torch.set_num_threads(threads)
