"""The catalogue is complete, every row meets its interface, and every entry documents itself."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import json
import sys
from typing import Any, NamedTuple

import pytest
import torch

from lightning_async import algorithms
from lightning_async.algorithms import AveragingRule, DelayCorrection, Schedule, StalenessPolicy
from lightning_async.algorithms.averaging import RuleWrapper
from tests.algorithms.catalogue import CORRECTIONS, RULES, SCHEDULES, STALENESS

EQUATIONS = ("merge_", "next", "correct_", "predict_", "combine_", "weigh")
PUBLIC = [
    cls
    for cls in (getattr(algorithms, name) for name in algorithms.__all__)
    if inspect.isclass(cls) and dataclasses.is_dataclass(cls) and any(hasattr(cls, name) for name in EQUATIONS)
]
ROWS = [*RULES, *SCHEDULES, *CORRECTIONS, *STALENESS]
INTERFACES: dict[int, Any] = {
    **{id(row): AveragingRule for row in RULES},
    **{id(row): Schedule for row in SCHEDULES},
    **{id(row): DelayCorrection for row in CORRECTIONS},
    **{id(row): StalenessPolicy for row in STALENESS},
}


def test_every_public_rule_schedule_correction_and_policy_has_a_row() -> None:
    assert set(PUBLIC) == {type(row.make()) for row in ROWS}
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_is_an_immutable_value_of_its_interface(row) -> None:
    assert isinstance(row.make(), INTERFACES[id(row)])
    value: Any = row.make()
    assert value == row.make()
    assert hash(value) == hash(row.make())
    for field in dataclasses.fields(type(value)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


class OnlyEquations(AveragingRule[Any]):
    """A user's rule, straight from the interface, with nothing but what that asks for."""

    num_scalars, per_replica, overlappable, absent_follow = 0, frozenset[str](), True, True
    mixes = sends_difference = keeps_residual = False

    def init(self, params: Any, layout: Any) -> Any:
        return (params.clone(),)

    def message_(self, out: Any, state: Any) -> tuple[float, ...]:
        return ()

    def merge_(self, sent: Any, received: Any, state: Any, round: Any) -> Any:
        return state

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {"anchor": state[0]}

    def load_state_dict(self, state: Any, saved: dict[str, Any]) -> Any:
        return (saved["anchor"],)


def test_what_a_rule_inherits_from_the_interface_answers() -> None:
    rule, mean = OnlyEquations(), torch.ones(2)
    state = rule.init(mean, None)
    assert rule.weights(algorithms.Round(id=0, rank=1, work=(1.0, 3.0))) == (0.25, 0.75)
    assert rule.common_model(mean, state) is mean
    live = torch.tensor([3.0, 4.0])
    facts = algorithms.Round(id=0, rank=0, work=(1.0,))
    assert rule.mix_(live, torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]), state, facts) is state
    assert live.tolist() == [4.0, 3.0]


class AroundState(NamedTuple):
    inner: Any


class Around(RuleWrapper):
    """A wrapper that says nothing of its own."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def init(self, params: Any, layout: Any) -> AroundState:
        return AroundState(self.rule.init(params, layout))


class Noted:
    """A rule that answers to each hook with its name, and notes what it was given."""

    def __init__(self) -> None:
        self.given: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, hook: str) -> Any:
        def answer(*given: Any) -> dict[str, str]:
            self.given[hook] = given
            return {"answer": hook}

        return answer if callable(getattr(AveragingRule, hook)) else hook


HOOKS = [name for name in {**AveragingRule.__annotations__, **vars(AveragingRule)} if not name.startswith("_")]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_wrapper_forwards_every_hook_of_the_interface(hook: str) -> None:
    rule = Noted()
    found = getattr(Around(rule), hook)
    if not callable(found):
        assert found == hook
        return
    names = [name for name in inspect.signature(getattr(AveragingRule, hook)).parameters if name != "self"]
    given: dict[str, Any] = {**{name: name for name in names}, "saved": {}, "state": AroundState("state")}
    answer = found(*(given[name] for name in names))
    assert answer in ({"answer": hook}, AroundState({"answer": hook}))
    assert rule.given == {hook: tuple({**given, "state": "state"}[name] for name in names)}


@pytest.mark.parametrize("interface", [AveragingRule, Schedule])
def test_a_class_that_leaves_out_an_equation_is_refused(interface) -> None:
    class Bare(interface):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Bare()


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_docstring_has_equation_arguments_source_and_a_passing_doctest(cls) -> None:
    text = inspect.cleandoc(cls.__doc__)
    assert text.splitlines()[0].endswith(".")
    assert ".. math::" in text
    source = text[text.index("Source:") :]
    assert "https://" in source
    arguments = text[text.index("Args:") :] if dataclasses.fields(cls) else ""
    for field in dataclasses.fields(cls):
        assert f"\n    {field.name}: " in arguments, f"`Args:` of {cls.__name__} lacks {field.name}"
    if dataclasses.fields(cls):
        assert "\nRaises:" in text
    module = sys.modules[cls.__module__]
    (example,) = doctest.DocTestFinder(recurse=False).find(cls, cls.__name__, module=module)
    assert example.examples
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example)
    assert result.failed == 0


@pytest.mark.parametrize(
    ("interface", "config"),
    [
        (AveragingRule, {"class_path": "lightning_async.algorithms.Mean"}),
        (AveragingRule, {"class_path": "lightning_async.algorithms.DeltaMean"}),
        (AveragingRule, {"class_path": "lightning_async.algorithms.DiLoCo", "init_args": {"outer_lr": 0.5}}),
        (DelayCorrection, {"class_path": "lightning_async.algorithms.DelayCompensation"}),
        (DelayCorrection, {"class_path": "lightning_async.algorithms.WeightPrediction", "init_args": {"steps": 2.0}}),
        (StalenessPolicy, {"class_path": "lightning_async.algorithms.Bounded", "init_args": {"max_staleness": 4}}),
        (StalenessPolicy, {"class_path": "lightning_async.algorithms.Dana"}),
        (Schedule, {"class_path": "lightning_async.algorithms.EverySeconds", "init_args": {"seconds": 2}}),
        (
            Schedule,
            {
                "class_path": "lightning_async.algorithms.Warmup",
                "init_args": {
                    "steps": 3,
                    "schedule": {"class_path": "lightning_async.algorithms.EveryNSteps", "init_args": {"n": 2}},
                },
            },
        ),
    ],
    ids=lambda value: value["class_path"].rsplit(".")[-1] if isinstance(value, dict) else "",
)
def test_can_be_built_from_a_config_file(interface, config) -> None:
    value = _parse(interface, config)
    assert type(value).__name__ == config["class_path"].rsplit(".")[-1]
    for name, given in config.get("init_args", {}).items():
        assert getattr(value, name) == (algorithms.EveryNSteps(2) if name == "schedule" else given)


def test_outer_optimizer_can_be_built_from_a_config_file() -> None:
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.25}}
    rule = _parse(
        AveragingRule, {"class_path": "lightning_async.algorithms.DiLoCo", "init_args": {"outer_optimizer": sgd}}
    )
    optimizer = rule.outer_optimizer([torch.zeros(2, requires_grad=True)])
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.25


def _parse(interface, config):
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=interface)
    parsed = parser.parse_object({"value": json.loads(json.dumps(config))})
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.49
    return instantiate(parsed).value
