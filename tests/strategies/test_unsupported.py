"""What cannot work is refused by name; what the strategy can be called."""

from __future__ import annotations

import os
import resource
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async import (
    AdaptiveDiLoCo,
    AdaptivePeriod,
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    DeltaMean,
    DiLoCo,
    EveryNSteps,
    FaultTolerantCheckpoint,
    HorovodStrategy,
    Mean,
    ParameterServerStrategy,
    PeerMemory,
    PseudoGradientPenalty,
    SlowMo,
    SparseLoCo,
    Timeouts,
    TopK,
    TorchTransport,
    Warmup,
)
from lightning_async.algorithms.averaging import AveragingRule
from lightning_async.trainer.configuration_checks import warn_of_momentum
from lightning_async.trainer.environment.settings import check_saved
from lightning_async.trainer.namespace import pl, pytorch
from lightning_async.transports.torch import check_descriptors
from tests.strategies import problem
from tests.strategies.features import Gan
from tests.strategies.workers import Net, Outcomes, fit, loader, logged, make_trainer
from tests.support import run_ranks

SCENARIOS = "tests.strategies.unsupported"


@pytest.mark.parametrize(
    ("arguments", "error", "texts"),
    [
        ({"rule": "mean"}, TypeError, ("rule='mean'",)),
        ({"rule": EveryNSteps(3)}, TypeError, ("rule=EveryNSteps(n=3)",)),
        ({"rule": DeltaMean}, TypeError, ("rule=",)),
        ({"schedule": 32}, TypeError, ("schedule=32",)),
        ({"schedule": DeltaMean()}, TypeError, ("schedule=DeltaMean()",)),
        ({"schedule": EveryNSteps}, TypeError, ("schedule=",)),
        ({"overlap": 1}, TypeError, ("overlap=1",)),
        ({"rule": Mean()}, ValueError, ("rule=Mean()", "overlap=True", "overlap=False")),
        ({"buffers": "mean"}, ValueError, ("buffers='mean'", "recompute")),
        ({"optimizer_state": "drop"}, ValueError, ("optimizer_state='drop'", "reset")),
        ({"lr_clock": "mean"}, ValueError, ("lr_clock='mean'", "global")),
        ({"compression": "int4"}, ValueError, ("Strategy(compression='int4')", "'auto'", "int8", "TopK(0.02, bits=2)")),
        (
            {"rule": DeltaMean(), "compression": "int8"},
            ValueError,
            ("rule=DeltaMean()", "compression='int8'", "DiLoCo", "bf16"),
        ),
        ({"weighting": "loss"}, ValueError, ("weighting='loss'", "samples")),
        ({"transport": "mpi"}, ValueError, ("transport='mpi'", "'horovod'", "TorchTransport(backend='gloo')")),
        ({"transport": TorchTransport}, TypeError, ("transport=", "TorchTransport()")),
        ({"transport": 3}, TypeError, ("transport=3", "TorchTransport()", "'horovod'")),
        ({"min_replicas": 0}, ValueError, ("min_replicas=0", "at least 1")),
        ({"min_replicas": 1.0}, TypeError, ("min_replicas=1.0", "None")),
        ({"min_replicas": True}, TypeError, ("min_replicas=True",)),
        ({"max_replicas": 0}, ValueError, ("max_replicas=0", "at least 1")),
        ({"min_replicas": 3, "max_replicas": 2}, ValueError, ("min_replicas=3", "max_replicas=2")),
        (
            {"schedule": Warmup(AdaptivePeriod(), steps=100, warmup_sync_every=8)},
            ValueError,
            ("schedule=Warmup(schedule=AdaptivePeriod(", "warmup_sync_every"),
        ),
        ({"part_mb": 0.0}, ValueError, ("part_mb=0.0", "> 0")),
        ({"timeouts": timedelta(seconds=12)}, TypeError, ("timeouts=", "dead_after=timedelta(seconds=12)")),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], texts: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        AsyncAveragingStrategy(**arguments)
    assert all(text in str(raised.value) for text in texts), raised.value


@pytest.mark.parametrize(
    ("arguments", "compression"),
    [
        ({}, "int8"),
        ({"rule": DeltaMean()}, "none"),
        ({"rule": SparseLoCo()}, TopK(0.02, bits=2)),
        ({"rule": SparseLoCo(), "compression": "int8"}, "int8"),
        ({"compression": "topk"}, TopK(0.01)),
    ],
)
def test_compression_follows_from_the_rule(arguments: dict[str, Any], compression: object) -> None:
    assert AsyncAveragingStrategy(**arguments).config.compression == compression


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_the_loss_that_is_averaged_does_not_depend_on_how_many_batches_a_step_has() -> None:
    seen = []

    class Told(AsyncAveragingStrategy):
        def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append((float(closure_loss.detach()), float(self.loss_of_batch(closure_loss))))
            return super().backward(closure_loss, *args, **kwargs)

    class Eight(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = problem.network()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 0.0 * problem.loss_of(self.net, batch) + 8.0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    accumulates = pytorch("callbacks").GradientAccumulationScheduler({0: 1, 1: 4})
    trainer = make_trainer(Told(), devices=1, max_epochs=2, callbacks=[accumulates])
    trainer.fit(Eight(), loader(problem.batches(0, 4)))
    assert seen == [(8.0, 8.0)] * 4 + [(2.0, 8.0)] * 4


@pytest.mark.parametrize("strategy", [AsyncAveragingStrategy, AsyncGradientStrategy, ParameterServerStrategy])
@pytest.mark.parametrize("timeouts", [0, False, ""])
def test_deadlines_that_are_nothing_are_none(strategy: Any, timeouts: object) -> None:
    with pytest.raises(TypeError, match=f"`timeouts={timeouts!r}` must be Timeouts"):
        strategy(timeouts=timeouts)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every_n_train_steps": 0}, ValueError, "(every_n_train_steps=0)` must be >= 1."),
        ({"every_n_train_steps": 2.0}, TypeError, "(every_n_train_steps=2.0)` must be an int, got float."),
        ({"every_n_train_steps": True}, TypeError, "(every_n_train_steps=True)` must be an int, got bool."),
        ({"train_time_interval": 5}, TypeError, "(train_time_interval=5)` must be a timedelta."),
        (
            {"train_time_interval": timedelta(0)},
            ValueError,
            "(train_time_interval=datetime.timedelta(0))` must be > 0.",
        ),
    ],
)
def test_what_callbacks_refuse_is_named_as_it_was_written(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        FaultTolerantCheckpoint("runs/checkpoints", **arguments)
    assert str(raised.value) == f"`FaultTolerantCheckpoint{text}"
    if "every_n_train_steps" in arguments:
        with pytest.raises(error) as raised:
            PeerMemory(**arguments)
        assert str(raised.value) == f"`PeerMemory{text}"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"payload": 3}, TypeError, "payload=3"),
        ({"grace": timedelta(0)}, ValueError, "grace=datetime.timedelta(0)"),
        ({"replicas": 60}, TypeError, "replicas=60"),
        ({"replicas": timedelta(seconds=-1)}, ValueError, "must not be negative"),
        ({"dead_after": timedelta(seconds=0.1)}, ValueError, "four heartbeats"),
        ({"attempts": 0}, ValueError, "attempts=0"),
    ],
)
def test_wrong_deadlines_are_named(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        Timeouts(**arguments)
    assert text in str(raised.value)


def test_what_a_rule_of_a_users_own_lacks_is_named() -> None:
    class Half:
        init = message_ = merge_ = mix_ = common_model = state_dict = load_state_dict = lambda *_: None
        num_scalars, per_replica, overlappable, absent_follow = 0, frozenset[str](), True, True
        mixes = False

        def __repr__(self) -> str:
            return "Half()"

    rule: Any = Half()
    with pytest.raises(
        TypeError, match=r"Half\(\).*lacks \['sends_difference', 'keeps_residual', 'weights', 'chosen'\]"
    ):
        AsyncAveragingStrategy(rule)
    for nothing in (DeltaMean, 3):
        rule = nothing
        with pytest.raises(TypeError, match=r"must be 'auto', or an averaging rule such as DeltaMean\(\)\.$"):
            AsyncAveragingStrategy(rule)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"backend": "ucc"}, ("`TorchTransport(backend='ucc')`", "gloo")),
        ({"start": "thread"}, ("`TorchTransport(start='thread')`", "popen")),
        ({"backend": "mpi"}, ("`TorchTransport(backend='mpi')`", "this build of torch")),
    ],
)
def test_wrong_transports_are_named(
    arguments: dict[str, Any], texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_mpi_available", lambda: False)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        TorchTransport(**arguments)
    assert all(text in str(raised.value) for text in texts), raised.value


@pytest.mark.parametrize(
    ("suffix", "start"), [("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")]
)
def test_registered_names_say_how_ranks_are_started(suffix: str, start: str) -> None:
    strategy = pytorch("strategies").StrategyRegistry.get(f"async_averaging{suffix}")
    assert strategy.transport == TorchTransport(start=start)  # type: ignore[arg-type]


def test_ranks_of_horovodrun_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(ValueError, match=r"start='fork'.*has no effect under horovodrun"):
        pytorch("strategies").StrategyRegistry.get("async_averaging_notebook")


@pytest.mark.processes
def test_two_strategies_may_share_a_transport(ranks: Outcomes) -> None:
    for told in ranks("a_shared_transport"):
        assert told["one"] and told["alike"], told


@pytest.mark.processes
def test_a_registered_variant_serves_two_trainers_whose_settings_are_the_same_objects(ranks: Outcomes) -> None:
    for answer in ranks("a_registered_variant"):
        assert answer["shared"] == [True, True, False]
        assert answer["rule"] == repr(DiLoCo())
        first, second, own = answer["told"]
        assert first == second == own
        assert own["rounds"] > 1


def test_without_horovod_the_advice_can_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("horovod", *(name for name in sys.modules if name.startswith("horovod."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"`AsyncAveragingStrategy\(transport='torch'\)`") as raised:
        HorovodStrategy()
    assert "pass `transport=" not in str(raised.value), "HorovodStrategy has no such argument"
    AsyncAveragingStrategy(transport="torch")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("sync_batchnorm_argument", ("ValueError", "sync_batchnorm=True", "buffers=")),
        ("sync_batchnorm_module", ("ValueError", "SyncBatchNorm", "net.0")),
        ("recomputed_without_forward", ("ValueError", "buffers='recompute'", "`Bare.forward`", "'average'")),
        ("metric_on_step", ("ValueError", "`metric`", "dist_sync_on_step=True")),
        ("more_survivors_than_ranks", ("ValueError", "min_replicas=3", "2 ranks")),
        ("more_ranks_than_at_most", ("ValueError", "max_replicas=1", "2 ranks")),
        ("pruning", ("ValueError", "`ModelPruning` renames", "before training")),
        ("batch_size_finder", ("ValueError", "`BatchSizeFinder`", "devices=1")),
        ("lazy", ("ValueError", "net.0.weight", "lazy")),
        ("different_shapes", ("LayoutMismatch", "net.0.weight", "8, 6", "9, 6")),
        ("different_dtypes", ("LayoutMismatch", "net.0.weight", "bfloat16", "float32")),
        ("different_order", ("LayoutMismatch", "a.weight", "b.weight")),
        ("different_numbers", ("LayoutMismatch", "extra")),
        ("different_trainability", ("LayoutMismatch", "net.0.weight", "not trained")),
    ],
)
def test_refused_on_every_rank(ranks: Outcomes, name: str, texts: tuple[str, ...]) -> None:
    for error in ranks.errors(name):
        assert all(text in error for text in texts), error


@pytest.mark.processes
def test_without_statistics_nothing_is_recomputed(ranks: Outcomes) -> None:
    first, second = ranks("nothing_to_recompute")
    assert first["digest"] == second["digest"] and first["steps"] == 2


@pytest.mark.processes
def test_processes_that_saw_errors_still_train(ranks: Outcomes) -> None:
    first, second = ranks("after_all_these_errors")
    assert first["digest"] == second["digest"]
    assert first["samples_by_rank"] == [16, 16]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["cli", "cli_with_short_names", "cli_with_arguments"])
def test_lightning_cli(ranks: Outcomes, name: str) -> None:
    told = ranks(name)
    for rank in told:
        assert rank["is_diloco"] is True
        assert "outer_lr=0.5" in rank["rule"] and "outer_momentum=0.8" in rank["rule"]
        assert rank["schedule"] == "Warmup(schedule=EveryNSteps(n=3), steps=2, epochs=None, warmup_sync_every=None)"
        assert (rank["synchronous_steps"], rank["rounds"]) == (2, 2)
        assert rank["transport"] == "TorchTransport(backend='gloo', start='popen')"
        assert rank["timeouts"] == [20.0 if name == "cli_with_arguments" else 12.0, 3]
    assert told[0]["digest"] == told[1]["digest"]


@pytest.mark.processes
def test_lightning_cli_says_what_is_wrong(ranks: Outcomes) -> None:
    for told in ranks("cli_with_wrong_values"):
        assert "`DiLoCo(outer_lr=-1.0)` must be > 0." in told["outer_lr: -1.0"]
        assert "`EveryNSteps(n=0)` must be" in told["n: 0"]
        assert "Given value: some" in told["buffers: some"]
        assert "['average', 'keep', 'broadcast', 'recompute']" in told["buffers: some"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_a_world_of_one_says_so_and_trains_as_a_single_device() -> None:
    with logged() as messages:
        told = fit(None, loader(problem.batches(0, 6)), val=loader(problem.batches(1, 1)), devices=1)
    assert len({message for message in messages if "nothing to average" in message}) == 1
    assert problem.distance(told["flat"], problem.flat(problem.train_alone(problem.batches(0, 6)))) < 1e-7
    assert len(told["validations"]) == 1


@pytest.mark.parametrize(
    ("rule", "warns"),
    [
        (AdaptiveDiLoCo(), True),
        (DiLoCo(), True),
        (DiLoCo(outer_momentum=0.0), False),
        (DiLoCo(outer_optimizer=torch.optim.SGD), False),
        (SlowMo(), True),
        (SlowMo(beta=0.0), False),
        (PseudoGradientPenalty(DiLoCo()), True),
        (DeltaMean(), False),
        (SparseLoCo(), False),
    ],
)
def test_outer_momentum_is_warned_of(rule: AveragingRule, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_momentum(Gan(), 2, rule)
    assert len(caplog.messages) == int(warns)
    assert not warns or f"`Gan` steps 2 optimizers by itself, and `rule={rule!r}`" in caplog.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_the_rule_is_chosen_for_the_module_of_each_fit() -> None:
    trainer = make_trainer(AsyncAveragingStrategy(), devices=1)
    chosen = []
    for module in (Gan(), Net()):
        trainer.fit(module, loader(problem.batches(0, 1)))
        chosen.append((trainer.strategy.rule, trainer.strategy.automatic))
    mean = "the plain mean as rule for 2 optimizers that step manually"
    assert chosen == [
        (DiLoCo(outer_lr=1.0, outer_momentum=0.0), (mean, "schedule")),
        (AdaptiveDiLoCo(), ("rule", "schedule")),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_a_world_of_one_says_that_it_has_no_servers() -> None:
    with logged() as messages:
        told = fit("parameter_server", loader(problem.batches(0, 6)), devices=1)
    assert sum("without servers: nothing is pushed" in message for message in messages) == 1
    assert problem.distance(told["flat"], problem.flat(problem.train_alone(problem.batches(0, 6)))) < 1e-7


@pytest.mark.processes
def test_the_older_namespace() -> None:
    told = [result.value for result in run_ranks("tests.strategies.classic:train", timeout=150, fresh=True)]
    for rank in told:
        assert (rank["namespace"], rank["other"]) == ("pytorch_lightning", False)
        assert rank["samples_by_rank"] == [2 * 5 * 4, 2 * 9 * 4]
    assert told[0]["digest"] == told[1]["digest"]
    assert told[0]["validations"] == told[1]["validations"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "second"), [("lightning.pytorch", "pytorch_lightning"), ("pytorch_lightning", "lightning.pytorch")]
)
def test_where_both_namespaces_are_imported_the_first_works_and_the_other_says_what_to_do(
    first: str, second: str
) -> None:
    kwargs = {"first": first, "second": second}
    (result,) = run_ranks("tests.strategies.classic:both", 1, kwargs=kwargs, launched=False, fresh=True)
    told = result.value
    assert told["namespace"] == first and told["first"] == ["accepted"] * 2
    owners = ["AsyncAveragingStrategy", "AsyncGradientStrategy", "HorovodStrategy", "ParameterServerStrategy"]
    for said, owner in zip(told["second"], owners, strict=True):
        assert said.startswith(f"TypeError: `{owner}` works with the Trainer of `{first}`"), said
        assert f"Import `{second}` before everything else" in said


OPTIMIZERS: list[Any] = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.ASGD,
]


@pytest.mark.parametrize("saved", OPTIMIZERS)
@pytest.mark.parametrize("returned", OPTIMIZERS)
def test_another_optimizer_than_the_saved_one_is_refused_unless_it_can_go_on(saved: Any, returned: Any) -> None:
    def stepped(kind: Any) -> Any:
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        optimizer = kind([parameter], lr=0.1)
        optimizer.step()
        return optimizer

    state, optimizer = stepped(saved).state_dict(), stepped(returned)
    lacks = set(optimizer.defaults) - set(state["param_groups"][0])
    if lacks - {"decoupled_weight_decay"}:
        with pytest.raises(ValueError, match=f"`configure_optimizers` returns {returned.__name__} as optimizer 0"):
            check_saved([optimizer], [state])
        return
    check_saved([optimizer], [state])
    optimizer.load_state_dict(state)
    optimizer.step()
    if saved is returned:  # as an older torch saved it
        for name in ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            state["param_groups"][0].pop(name, None)
        check_saved([optimizer], [state])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_cannot_be_names_the_function_and_what_it_returned(weight: float) -> None:
    strategy = AsyncAveragingStrategy(weighting=lambda batch: weight)
    with pytest.raises(ValueError, match=rf"`AsyncAveragingStrategy\(weighting=<function .*>\)` returned {weight} for"):
        strategy.count([0])


def test_fewer_devices_than_ranks_of_a_host_are_named() -> None:
    devices = [torch.device("cpu")]
    assert TorchTransport().root_device(devices, 0) == devices[0]
    with pytest.raises(ValueError, match=r"`Trainer\(devices=1\)` is the number of ranks .* local rank 1 was started"):
        TorchTransport().root_device(devices, 1)


def test_a_low_limit_of_open_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (num_open + 20, 4096))
    check_descriptors(0, 2)
    with pytest.raises(
        ValueError, match=rf"Rank 3: this process may have {num_open + 20} open files.*`ulimit -n 1024`"
    ):
        check_descriptors(3, 4)
