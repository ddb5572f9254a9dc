"""Windows of accumulation on one device: against sums by hand, to the bit where nothing is unequal."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_async import (
    AdaptiveGradientAccumulation,
    AsyncGradientStrategy,
    BalancedWindows,
    DelayCompensation,
    DivergenceMonitor,
    FaultTolerantCheckpoint,
    WeightPrediction,
)
from lightning_async.algorithms import ByEpoch, ByStep, CommunicationShare, NoiseScale, estimate, lr_factor
from lightning_async.trainer.namespace import pl, pytorch
from tests.callbacks.accumulation_ranks import Steps
from tests.callbacks.problem import Line, trainer, values

ROWS = torch.randn(43, 4, generator=torch.Generator().manual_seed(1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def line(optimizer: Any = sgd, kind: Callable[..., Line] = Line) -> Line:
    torch.manual_seed(0)
    return kind(optimizer=optimizer)


def loader(rows: Tensor = ROWS, size: int = 4) -> torch.utils.data.DataLoader[Tensor]:
    return torch.utils.data.DataLoader(rows, batch_size=size)  # type: ignore[arg-type]


class Uneven(torch.utils.data.IterableDataset[Tensor]):
    """Batches of these sizes, in each epoch."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Tensor]:
        yield from ROWS.split([*self.sizes, len(ROWS) - sum(self.sizes)])[: len(self.sizes)]


def by_hand(
    batches: Sequence[Tensor], windows: Sequence[int], scaling: Any = None, base: int = 4, clip: float = math.inf
) -> list[float]:
    """SGD in float64 over windows of so many batches, each on the mean over its samples."""
    module = line().double()
    left = iter(batches)
    for n in windows:
        rows = torch.cat([next(left) for _ in range(n)]).double()
        gradients = torch.autograd.grad((module.layer(rows) - 2 * rows).square().mean(), list(module.parameters()))
        length = float(torch.cat([g.flatten() for g in gradients]).norm())
        with torch.no_grad():
            for p, g in zip(module.parameters(), gradients, strict=True):
                p -= 0.1 * lr_factor(scaling, len(rows), base) * g * min(1.0, clip / length)
    assert next(left, None) is None
    return values(module)


def test_windows_change_where_the_last_one_ends_and_the_rest_of_an_epoch_has_its_own_mean():
    steps, module = Steps(), line()
    fit = trainer(AdaptiveGradientAccumulation(ByStep({0: 4, 1: 3, 2: 1})), steps)
    fit.fit(module, loader())
    assert steps.at == [3, 6, 7, 8, 9, 10]
    assert values(module) == pytest.approx(by_hand(ROWS.split(4), [4, 3, 1, 1, 1, 1]), rel=1e-5)
    module = line()
    trainer(AdaptiveGradientAccumulation(4)).fit(module, loader())
    assert values(module) == pytest.approx(by_hand(ROWS.split(4), [4, 4, 3]), rel=1e-5)  # 11 samples, of 4, 4 and 3
    module = line()
    trainer(accumulate_grad_batches=4).fit(module, loader())  # Lightning alone divides them by 4
    assert values(module) != pytest.approx(by_hand(ROWS.split(4), [4, 4, 3]), rel=1e-2)


def test_equal_batches_and_full_windows_are_lightnings_to_the_bit():
    ours, theirs = line(torch.optim.Adam), line(torch.optim.Adam)
    trainer(AdaptiveGradientAccumulation(3), max_epochs=3).fit(ours, loader(ROWS[:36]))
    trainer(accumulate_grad_batches=3, max_epochs=3).fit(theirs, loader(ROWS[:36]))
    assert ours.history == theirs.history
    ours, theirs = line(), line()
    trainer(AdaptiveGradientAccumulation(ByEpoch({1: 3, 2: 1})), max_epochs=3).fit(ours, loader(ROWS[:36]))
    scheduler = pytorch("callbacks").GradientAccumulationScheduler({1: 3, 2: 1})
    trainer(scheduler, max_epochs=3).fit(theirs, loader(ROWS[:36]))
    assert ours.history == theirs.history


def test_a_target_is_met_to_the_sample_by_whatever_batches_there_are():
    sizes = [4, 4, 2, 2, 4, 4, 3, 1, 4, 5, 3, 4]
    steps, module = Steps(), line()
    accumulation = AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=8)
    trainer(accumulation, steps).fit(module, torch.utils.data.DataLoader(Uneven(sizes), batch_size=None))
    windows = [2, 3, 3, 2, 2]  # of 8, 8, 8 and 9 samples, as no batch is cut, and what is left
    assert steps.at == [1, 4, 7, 9, 11]
    assert values(module) == pytest.approx(by_hand(ROWS[:40].split(sizes), windows), rel=1e-5)


def test_what_a_batch_counts_may_be_the_users():
    module = line()
    accumulation = AdaptiveGradientAccumulation(2, count=lambda batch: 3.0 if batch[0, 0] > 0 else 1.0)
    trainer(accumulation).fit(module, loader(ROWS[:8]))
    weights = [3.0 if batch[0, 0] > 0 else 1.0 for batch in ROWS[:8].split(4)]
    other = line().double()
    losses = [(other.layer(rows) - 2 * rows).square().mean() for rows in ROWS[:8].double().split(4)]
    loss = sum(w * each for w, each in zip(weights, losses, strict=True)) / sum(weights)
    gradients = torch.autograd.grad(loss, list(other.parameters()))  # type: ignore[arg-type]
    expected = [p - 0.1 * g for p, g in zip(other.parameters(), gradients, strict=True)]
    assert values(module) == pytest.approx([x for p in expected for x in p.flatten().tolist()], rel=1e-5)


@pytest.mark.parametrize("weights", [[0.0, 3.0, 1.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
def test_a_batch_may_count_nothing(weights: list[float]):
    """Nor may a window: the optimizer then steps with zeros."""
    module, left = line(), iter(weights)
    trainer(AdaptiveGradientAccumulation(2, count=lambda batch: next(left))).fit(module, loader(ROWS[:16]))
    counted = [batch for batch, weight in zip(ROWS.split(4), weights, strict=False) if weight]
    assert values(module) == pytest.approx(by_hand(counted, [1] * len(counted)), rel=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1])
def test_a_count_that_cannot_be_is_an_error(wrong: float):
    accumulation = AdaptiveGradientAccumulation(2, count=lambda batch: wrong)
    with pytest.raises(ValueError, match=rf"Rank 0: `count` said {float(wrong)} of a batch"):
        trainer(accumulation).fit(line(), loader(ROWS[:16]))


class Scheduled(Line):
    """Its learning rate falls with every step."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rates: list[float] = []
        self.stepped: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        optimizer.register_step_post_hook(lambda each, *_: self.stepped.append(each.param_groups[0]["lr"]))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.total = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.rates.append(optimizer.param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_learning_rates_are_scaled_by_samples_and_only_while_the_optimizer_steps(scaling: Any, tmp_path: Path):
    module: Any = line(kind=Scheduled)
    fit = trainer(AdaptiveGradientAccumulation(4, lr_scaling=scaling))
    fit.fit(module, loader())
    samples = [16, 16, 11]
    expected = [0.1 / (1 + i) * lr_factor(scaling, n, 4) for i, n in enumerate(samples)]
    assert module.stepped == pytest.approx(expected)
    assert module.rates == pytest.approx([0.1] * 4 + [0.05] * 4 + [0.1 / 3] * 3)
    assert module.total == 3
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 4)
    plain = line()
    trainer(AdaptiveGradientAccumulation(4, lr_scaling=scaling)).fit(plain, loader())
    assert values(plain) == pytest.approx(by_hand(ROWS.split(4), [4, 4, 3], scaling), rel=1e-5)


def test_an_optimizer_that_fails_leaves_the_learning_rate_as_it_was():
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                closure()
            assert self.param_groups[0]["lr"] == 0.2
            raise RuntimeError("no step")

    accumulation = AdaptiveGradientAccumulation(2, lr_scaling="linear")
    fit = trainer(accumulation)
    with pytest.raises(RuntimeError, match="no step"):
        fit.fit(line(lambda ps: Fails(ps, lr=0.1)), loader())
    assert fit.optimizers[0].param_groups[0]["lr"] == 0.1
    assert fit.accumulate_grad_batches == 1
    module = line()
    fit.fit(module, loader(ROWS[:16]))  # and the same Trainer goes on
    assert values(module) == pytest.approx(by_hand(ROWS[:16].split(4), [2, 2], "linear"), rel=1e-5)


def test_clipping_is_of_the_mean_and_a_gradient_scaler_changes_nothing():
    clip: dict[str, Any] = {"gradient_clip_val": 0.3}
    module = line()
    trainer(AdaptiveGradientAccumulation(4), **clip).fit(module, loader())
    assert values(module) == pytest.approx(by_hand(ROWS.split(4), [4, 4, 3], clip=0.3), rel=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # type: ignore[attr-defined]
    precision = pytorch("plugins.precision").MixedPrecision("16-mixed", "cpu", scaler=scaler)
    scaled = line()
    trainer(AdaptiveGradientAccumulation(4), plugins=[precision], **clip).fit(scaled, loader())
    assert values(scaled) == pytest.approx(values(module), rel=2e-2)


def test_gradients_that_a_remedy_drops_begin_a_window_anew():
    module = line()
    module.wrong = {2: math.nan}
    steps = Steps()
    monitor = DivergenceMonitor(signals=["gradient_norm"], remedies=["skip"])
    trainer(monitor, AdaptiveGradientAccumulation(2), steps).fit(module, loader(ROWS[:40]))
    assert values(module) == pytest.approx(by_hand(ROWS[8:40].split(4), [2] * 4), rel=1e-5)

    class Drops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.optimizers[0].zero_grad()

    module, steps = line(), Steps()
    trainer(AdaptiveGradientAccumulation(3), Drops(), steps).fit(module, loader(ROWS[:40]))
    assert steps.at == [2, 7, 9]


class Probed(Line):
    """What `NoiseScale` has to go on, by autograd."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.parts: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        gradients = torch.autograd.grad(loss, list(self.parameters()), retain_graph=True)
        self.parts.append(torch.cat([g.flatten() for g in gradients]).double())
        return loss


def test_the_noise_scale_is_that_of_the_gradients_and_windows_follow_it():
    module: Any = line(lambda ps: torch.optim.SGD(ps, lr=1e-3), Probed)
    policy = NoiseScale(minimum=8, maximum=40, every=2, decay=0.5)
    accumulation, steps = AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=policy), Steps()
    trainer(accumulation, steps).fit(module, loader(ROWS[:40]))
    pairs = [torch.stack(module.parts[i : i + 2]) for i in (0, 2)]
    small = sum(float(pair.square().sum(1).mean()) for pair in pairs) / 2
    big = sum(float(pair.mean(0).square().sum()) for pair in pairs) / 2
    square, trace = estimate(small, big, 4, 8)
    noise = accumulation.state_dict()["seen"]["noise"]
    assert noise[:2] == pytest.approx([square, trace], rel=1e-4)
    wanted = min(max(trace / square, 4), 16, 40)  # from 8: at most half and twice
    batches = max(2, round(wanted / 4))
    assert steps.at[:3] == [1, 3, 3 + batches]


def test_communication_that_takes_no_time_needs_no_long_windows():
    accumulation, steps = AdaptiveGradientAccumulation(CommunicationShare(share=0.9, minimum=2, every=2)), Steps()
    trainer(accumulation, steps).fit(line(), loader(ROWS[:40]))
    assert steps.at == [1, 3, 5, 7, 9]
    assert accumulation.state_dict()["seen"]["times"][0] > 0


class Greedy(Line):
    """Has memory for so many rows: in its forward pass, or in its backward pass, when the gradients of one layer are
    there already."""

    def __init__(self, most: int, place: str, optimizer: Any = sgd) -> None:
        super().__init__(optimizer=optimizer)
        self.most, self.place, self.sizes = most, place, list[int]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch))
        if len(batch) <= self.most:
            return super().training_step(batch, batch_idx)
        if self.place == "forward":
            raise torch.OutOfMemoryError("no memory")
        loss = super().training_step(batch, batch_idx)
        return loss + _Spent.apply(self.layer.weight).sum()  # pyright: ignore[reportOperatorIssue]


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return weight.detach() * 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_batch_that_is_too_large_is_trained_on_in_pieces(place: str, caplog: pytest.LogCaptureFixture):
    torch.manual_seed(0)
    module, steps = Greedy(3, place), Steps()
    trainer(AdaptiveGradientAccumulation(2, split_on_oom=True), steps).fit(module, loader(ROWS, 8))
    assert module.sizes == [8, 4, 2, 2, 2, 2] + [2] * 16 + [2, 1]  # 43 rows
    assert steps.at == [1, 3, 5]
    assert values(module) == pytest.approx(by_hand(ROWS.split(8), [2, 2, 2]), rel=1e-5)
    said = [r.getMessage() for r in caplog.records if "not enough memory" in r.getMessage()]
    assert [text.partition("for ")[2].partition(" of a batch")[0] for text in said] == [
        "8 of the 8 samples",
        "4 of the 8 samples",
    ]
    torch.manual_seed(0)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        trainer(AdaptiveGradientAccumulation(2)).fit(Greedy(3, place), loader(ROWS, 8))
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        trainer(AdaptiveGradientAccumulation(2, split_on_oom=True)).fit(Greedy(0, place), loader(ROWS, 8))


def test_a_backward_pass_that_fails_late_in_a_window_leaves_the_mean_of_what_comes_after(
    caplog: pytest.LogCaptureFixture,
):
    """The gradients before it are spoilt, too, as nobody knows what it has added to them."""

    class Later(Greedy):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.most = 100 if batch_idx == 0 else 4
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    module = Later(0, "backward")
    trainer(AdaptiveGradientAccumulation(2, split_on_oom=True)).fit(module, loader(ROWS[:16], 8))
    assert values(module) == pytest.approx(by_hand([ROWS[8:16]], [1]), rel=1e-5)
    assert "the gradients of 8 samples that came before in this window are lost" in caplog.text


class Dies(pl.Callback):
    def __init__(self, at: int) -> None:
        self.at, self.batches = at, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        if self.batches == self.at:
            raise KeyError("dies")


@pytest.mark.processes
@pytest.mark.parametrize("at", [3, 7, 15])
def test_a_resume_within_a_window_is_equal_to_the_bit(at: int, tmp_path: Path):
    def callbacks() -> list[Any]:
        policy = NoiseScale(minimum=8, maximum=40, every=2)
        return [AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=policy, lr_scaling="sqrt")]

    whole, steps = line(torch.optim.Adam), Steps()
    trainer(*callbacks(), steps, max_epochs=2).fit(whole, loader())
    saves = FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1)
    with pytest.raises(KeyError, match="dies"):
        trainer(*callbacks(), saves, Dies(at), max_epochs=2, enable_checkpointing=True).fit(
            line(torch.optim.Adam), loader()
        )
    resumed = line(torch.optim.Adam)
    saves = FaultTolerantCheckpoint(tmp_path, every_n_train_steps=100)
    trainer(*callbacks(), saves, max_epochs=2, enable_checkpointing=True).fit(resumed, loader())
    assert len(resumed.history) == 22 - at + 1
    assert resumed.history == whole.history[at - 1 :]


def test_a_checkpoint_of_lightnings_goes_on_with_what_it_holds(tmp_path: Path):
    """Between windows all; within one its gradients are lost, and a window begins anew."""

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (4, 5):
                trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    whole = line(torch.optim.Adam)
    trainer(AdaptiveGradientAccumulation(3), Saves()).fit(whole, loader(ROWS[:40]))
    for saved, windows in ((5, [8, 9]), (4, [7, 9])):
        resumed, steps = line(torch.optim.Adam), Steps()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
            trainer(AdaptiveGradientAccumulation(3), steps).fit(
                resumed, loader(ROWS[:40]), ckpt_path=tmp_path / f"{saved}.ckpt", weights_only=False
            )
        assert steps.at == windows


class Normed(Line):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.norm = torch.nn.BatchNorm1d(4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.norm(batch), batch_idx)


def test_averages_over_time_have_their_epoch_without_steps():
    def fit(accumulation: Any, **options: Any) -> tuple[list[float], int]:
        swa = pytorch("callbacks").StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)
        module, steps = line(kind=Normed), Steps()
        trained = trainer(swa, *accumulation, steps, max_epochs=3, **options)
        trained.fit(module, loader(ROWS[:40]))
        return [*values(module), *module.norm.running_mean.tolist()], trained.global_step

    assert fit([AdaptiveGradientAccumulation(2)]) == fit([], accumulate_grad_batches=2)


def test_a_search_for_a_learning_rate_runs_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    class WithRate(Line):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    finder = pytorch("callbacks").LearningRateFinder(num_training_steps=5, update_attr=False)
    module, steps = line(kind=WithRate), Steps()
    trainer(finder, AdaptiveGradientAccumulation(4), steps, enable_checkpointing=True).fit(module, loader())
    assert steps.at == [3, 7, 10]


def test_a_search_for_a_batch_size_takes_as_many_steps_as_it_says(tmp_path: Path):
    class Sized(Line):
        batch_size, tried = 2, 0

        def train_dataloader(self) -> Any:
            return loader(ROWS[:40], self.batch_size)

        def val_dataloader(self) -> Any:
            return loader(ROWS[:2], 1)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.tried += 1
            return super().training_step(batch, batch_idx)

    finder = pl.callbacks.BatchSizeFinder(max_trials=2, steps_per_trial=2)
    module, steps = line(kind=Sized), Steps()
    trainer(finder, AdaptiveGradientAccumulation(3), steps, default_root_dir=tmp_path).fit(module)
    assert (module.batch_size, steps.at) == (4, [2, 5, 8, 9])
    assert module.tried == 2 * 2 * 3 + 10


def test_it_ends_with_the_fit_and_tells_the_progress_bar():
    class Shown(pl.Callback):
        def __init__(self) -> None:
            self.metrics: list[float] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.metrics.append(float(trainer.progress_bar_metrics.get("accumulation/batches", 0.0)))

    shown = Shown()
    fit = trainer(AdaptiveGradientAccumulation(ByStep({0: 2, 1: 3})), shown)
    fit.fit(line(), loader(ROWS[:32]))
    assert {2.0, 3.0} <= set(shown.metrics)
    assert fit.accumulate_grad_batches == 1
    assert "_make_closure" not in vars(fit.fit_loop.epoch_loop.automatic_optimization)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "exactly one of `accumulation_steps` and `target_batch_size`"),
        ({"accumulation_steps": 2, "target_batch_size": 8}, ValueError, "exactly one of"),
        ({"target_batch_size": 8}, ValueError, "base_batch_size=None, target_batch_size=8)`: the two go together"),
        ({"accumulation_steps": 2, "base_batch_size": 8}, ValueError, "the two go together"),
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps=0)` must be >= 1"),
        ({"accumulation_steps": True}, TypeError, "accumulation_steps=True)` must be an int"),
        ({"accumulation_steps": {0: 1}}, TypeError, "accumulation_steps={0: 1})` must be an int or a policy"),
        ({"base_batch_size": 2.5, "target_batch_size": 8}, TypeError, "base_batch_size=2.5"),
        ({"accumulation_steps": NoiseScale(minimum=1, maximum=2)}, ValueError, "counts samples, not batches"),
        ({"base_batch_size": 1, "target_batch_size": CommunicationShare()}, ValueError, "counts batches, not samples"),
        ({"accumulation_steps": 2, "lr_scaling": "cubic"}, ValueError, "lr_scaling='cubic'"),
        ({"accumulation_steps": 2, "split_on_oom": 1}, TypeError, "split_on_oom=1)` must be True or False"),
        ({"accumulation_steps": 2, "count": 3}, TypeError, "count=3)` must be a function"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error) as raised:
        AdaptiveGradientAccumulation(**arguments)
    assert text in str(raised.value)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("strategy", "callback", "text"),
    [
        ({"accumulate": "until_reduced"}, {}, "(accumulate='until_reduced')` beside `AdaptiveGradientAccumulation`"),
        ({"accumulate": BalancedWindows()}, {}, "one says how large a window is. Leave `accumulate` out, or"),
        ({"accumulate": 2}, {}, "`AsyncGradientStrategy(accumulate=2)` beside"),
        ({}, {"split_on_oom": True}, "(split_on_oom=True)` is for other strategies than `AsyncGradientStrategy`"),
        ({"correction": WeightPrediction()}, {"lr_scaling": "linear"}, "steps at the rates that optimizers have"),
        ({"compression": "int8"}, {"noise": True}, "compression='int8', correction=None)`: noise is measured of the"),
        ({"correction": DelayCompensation()}, {"noise": True}, "is not what arrives there"),
        ({}, {"accumulation_steps": CommunicationShare()}, "`AsyncGradientStrategy(delay=1)`: behind the next window"),
    ],
)
def test_a_strategy_that_accumulates_by_itself_refuses_what_it_cannot_be_told(
    strategy: dict[str, Any], callback: dict[str, Any], text: str
):
    options: dict[str, Any] = {"accumulation_steps": 2, **callback}
    if options.pop("noise", False):
        options = {"base_batch_size": 4, "target_batch_size": NoiseScale(minimum=8, maximum=16)}
    fit = trainer(AdaptiveGradientAccumulation(**options), strategy=AsyncGradientStrategy(**strategy))
    with pytest.raises(ValueError, match=re.escape(text)):
        fit.fit(line(), loader())


@pytest.mark.usefixtures("alone")
def test_alone_windows_in_the_background_are_those_of_the_callback():
    steps, module = Steps(), line()
    sizes = AdaptiveGradientAccumulation(ByStep({0: 4, 1: 3, 2: 1}))
    trainer(sizes, steps, strategy=AsyncGradientStrategy(), use_distributed_sampler=False).fit(module, loader())
    assert steps.at == [3, 6, 7, 8, 9, 10]
    assert values(module) == pytest.approx(by_hand(ROWS.split(4), [4, 3, 1, 1, 1, 1]), rel=1e-5)


def test_what_cannot_be_is_refused_by_name():
    two = AdaptiveGradientAccumulation(2)
    with pytest.raises(ValueError, match=r"Trainer\(accumulate_grad_batches=3\)` beside `AdaptiveGradientAccum"):
        trainer(two, accumulate_grad_batches=3).fit(line(), loader())
    with pytest.raises(ValueError, match="has a `GradientAccumulationScheduler` beside"):
        trainer(two, pytorch("callbacks").GradientAccumulationScheduler({0: 2})).fit(line(), loader())
    manual = line()
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match="with manual optimization the module decides"):
        trainer(two).fit(manual, loader())

    class Pulls(Line):
        def training_step(self, dataloader_iter: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of an experiment
        with pytest.raises(ValueError, match="must know a batch before it is trained on"):
            trainer(two).fit(line(kind=Pulls), loader())
    odd = AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=10)
    with pytest.raises(ValueError, match=r"multiples of 4 samples, 4 on each of 1 ranks .* Take 8 or 12, or another"):
        trainer(odd).fit(line(), loader())
    other = AdaptiveGradientAccumulation(base_batch_size=8, target_batch_size=16)
    with pytest.raises(ValueError, match=r"Rank 0: .*base_batch_size=8.*first batch has 4 samples"):
        trainer(other).fit(line(), loader())
