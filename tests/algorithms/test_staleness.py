"""What policies of staleness say of a push, each against its equation in float64."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_async.algorithms import (
    NAMES,
    AdaptiveDelayCompensation,
    AdaptiveLr,
    Bounded,
    Buffered,
    Clipping,
    Dana,
    DelayCompensation,
    GapAware,
    NoCorrection,
    PushFacts,
    StalenessPolicy,
    Weight,
    WeightPrediction,
    auto,
    described,
    make_policy,
    momentum_warning,
    register_policy,
)
from tests.algorithms.catalogue import STALENESS
from tests.algorithms.replicas import fill

LAW = settings(max_examples=30, deadline=None)
LAGS = st.integers(0, 10_000)
NORMS = st.floats(0, 1e6)
SEEDS = st.integers(0, 2**31)
N = 33
ROWS = pytest.mark.parametrize("row", STALENESS, ids=lambda row: row.name)


def factor(weight: Weight | None) -> float:
    """0 for a push that is left out."""
    return 0.0 if weight is None else weight.rate * weight.gradient


@ROWS
@LAW
@given(typical=NORMS, norm=NORMS)
def test_a_push_that_is_not_late_counts_as_it_is(row, typical, norm) -> None:
    assert row.make().weigh(PushFacts(0, 0.0, typical, norm)) == Weight(1.0, 1.0)


@ROWS
@LAW
@given(lags=st.tuples(LAGS, LAGS), moved=st.tuples(NORMS, NORMS), typical=NORMS, norm=NORMS)
def test_what_is_later_never_counts_more(row, lags, moved, typical, norm) -> None:
    policy = row.make()
    (lag, later), (near, far) = sorted(lags), sorted(moved)
    before = factor(policy.weigh(PushFacts(lag, near if lag else 0.0, typical, norm)))
    after = factor(policy.weigh(PushFacts(later, far if later else 0.0, typical, norm)))
    assert 0 <= after <= before <= 1


@LAW
@given(lag=LAGS, f=st.floats(1e-3, 1))
def test_rates_fall_with_the_lag_as_their_form_says(lag, f) -> None:
    expected = {
        "exponential": (AdaptiveLr(f), math.exp(lag * math.log(f))),
        "linear": (AdaptiveLr(f, "linear"), 1 / (1 + f * lag)),
        "inverse": (AdaptiveLr(form="inverse"), 1 / max(1, lag)),
        "sqrt": (AdaptiveLr(form="sqrt"), (1 + lag) ** -0.5),
    }
    for policy, rate in expected.values():
        told = policy.weigh(PushFacts(lag))
        assert told.rate == pytest.approx(rate, rel=1e-9, abs=1e-300) and told.gradient == 1.0
    assert AdaptiveLr().weigh(PushFacts(2)).rate == pytest.approx(0.81)
    assert AdaptiveLr(form="linear").weigh(PushFacts(10)).rate == 0.5


@LAW
@given(lag=st.integers(1, 100), moved=NORMS, typical=st.floats(1e-6, 1e6))
def test_a_gap_counts_in_steps(lag, moved, typical) -> None:
    weight = typical / (typical + moved)
    assert GapAware().weigh(PushFacts(lag, moved, typical)).rate == pytest.approx(weight)
    assert GapAware("gradient").weigh(PushFacts(lag, moved, typical)) == (1.0, pytest.approx(weight))
    assert Dana(GapAware("gradient")).weigh(PushFacts(lag, moved, typical)) == (1.0, pytest.approx(weight))


@pytest.mark.parametrize(("lag", "applied"), [(0, True), (2, True), (3, False), (100, False)])
def test_what_is_beyond_the_bound_is_left_out(lag, applied) -> None:
    assert (Bounded(3).weigh(PushFacts(lag)) is not None) == applied
    assert (Buffered(8, Bounded(3)).weigh(PushFacts(lag)) is not None) == applied


@LAW
@given(lag=LAGS, norm=st.floats(1e-3, 1e6), bound=st.floats(1e-3, 1e3))
def test_no_gradient_is_longer_than_the_bound(lag, norm, bound) -> None:
    weight = Clipping(bound, AdaptiveLr(form="sqrt")).weigh(PushFacts(lag, norm=norm))
    assert weight is not None
    assert weight.gradient * norm == pytest.approx(min(norm, bound))
    assert weight.rate == AdaptiveLr(form="sqrt").weigh(PushFacts(lag)).rate


@LAW
@given(seed=SEEDS, strength=st.floats(0, 2), decay=st.floats(0, 0.99))
def test_adaptive_compensation_is_its_equation(seed, strength, decay) -> None:
    policy = AdaptiveDelayCompensation(strength, decay, eps=1e-4)
    square, state = torch.zeros(N, dtype=torch.float64), {"mean_square": torch.zeros(N)}
    for turn in range(3):
        gradient, moved = fill(N, seed + turn), fill(N, seed + 7 + turn)
        g, m = gradient.double(), moved.double()
        square = decay * square + (1 - decay) * g * g
        policy.adjust_(gradient, moved, state)
        expected = g + strength / (square + 1e-4).sqrt() * g * g * m
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state["mean_square"].double(), square, rtol=1e-5, atol=1e-6)


@ROWS
@LAW
@given(seed=SEEDS)
def test_where_nothing_moved_a_gradient_stays_as_it_is_to_the_bit(row, seed) -> None:
    policy, gradient = row.make(), fill(N, seed)
    before = gradient.clone()
    policy.adjust_(gradient, torch.zeros(N), {name: torch.zeros(N) for name in policy.fields})
    assert torch.equal(gradient, before)


@LAW
@given(seed=SEEDS, steps=st.floats(0, 3), late=st.floats(0, 30))
def test_a_prediction_goes_as_far_as_gradients_are_late(seed, steps, late) -> None:
    before, now = fill(N, seed), fill(N, seed + 1)
    expected = now.double() + steps * late * (now.double() - before.double())
    WeightPrediction(steps).look_ahead_(before, now, late)
    torch.testing.assert_close(before.double(), expected, rtol=1e-4, atol=1e-3)


@dataclass(frozen=True)
class Halved(StalenessPolicy):
    """A user's own: all that is late counts half."""

    part: float = 0.5
    inner: StalenessPolicy = NoCorrection()  # noqa: RUF009

    def weigh(self, late: PushFacts) -> Weight | None:
        return Weight(rate=self.part) if late.lag else Weight()


@ROWS
def test_another_process_makes_the_same_of_its_description(row) -> None:
    policy = row.make()
    assert make_policy(json.loads(json.dumps(described(policy)))) == policy


def test_a_policy_of_the_users_own_travels_by_its_module() -> None:
    policy = Halved(0.25, Bounded(7))
    told = described(policy)
    assert told["policy"] == "tests.algorithms.test_staleness:Halved"
    assert make_policy(json.loads(json.dumps(told))) == policy
    assert make_policy(policy) is policy


def test_what_another_process_could_not_make_is_refused() -> None:
    @dataclass(frozen=True)
    class Local(StalenessPolicy):
        pass

    class Plain(StalenessPolicy):
        pass

    for policy in (Local(), Plain(), type("Main", (Halved,), {"__module__": "__main__"})()):
        with pytest.raises(TypeError, match="of a module that a server's process can import"):
            described(policy)
    with pytest.raises(TypeError, match="arguments that JSON does not hold"):
        described(Halved(part=torch.ones(1)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="is not what it was"):
        described(Halved(part=(1.0, 2.0)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="no class that extends"):
        make_policy({"policy": "json:JSONDecoder", "arguments": {}})


@pytest.mark.parametrize(
    "name", ["Bounded2", "Bounded.nosuch", "nosuch:Bounded", "tests.algorithms.test_staleness:Nosuch", 3]
)
def test_a_description_of_no_class_says_what_it_names_and_what_is_known(name: Any) -> None:
    with pytest.raises(ValueError, match=rf"must be one of \['AdaptiveDela.*'Bounded'.*got {name!r}: "):
        make_policy({"policy": "Dana", "arguments": {"policy": {"policy": name, "arguments": {}}}})


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_policy(name) -> None:
    assert isinstance(make_policy(name), StalenessPolicy)


def test_a_name_is_of_one_module_only() -> None:
    for name in ("auto", "bounded"):
        with pytest.raises(ValueError, match=f"`register_policy\\('{name}'\\)` for Halved: another policy"):
            register_policy(name)(Halved)
    assert make_policy("bounded") == Bounded(16)


def test_a_name_is_of_one_class_only_which_may_be_defined_again(monkeypatch) -> None:
    monkeypatch.setattr("lightning_async.algorithms.staleness.NAMES", dict(NAMES))

    def define(number: int) -> type[StalenessPolicy]:
        @register_policy("own", number)
        @dataclass(frozen=True)
        class Own(StalenessPolicy):
            number: int

        return Own

    define(1)
    again = define(2)
    assert make_policy("own") == again(2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"`register_policy\('own'\)` for Halved: another policy"):
        register_policy("own")(Halved)


@pytest.mark.parametrize("name", [None, 1, "", Halved])
def test_what_is_registered_must_have_a_name(name) -> None:
    with pytest.raises(TypeError, match=r'must be given a name first: `@register_policy\("name"\)`'):
        register_policy(name)


@pytest.mark.parametrize("registered", [object, Bounded(1), len])
def test_what_is_registered_must_be_a_class_of_policies(registered) -> None:
    with pytest.raises(TypeError, match=r"`register_policy\('own'\)` must decorate a class that extends"):
        register_policy("own")(registered)


def test_arguments_that_a_registered_class_does_not_take_are_named(monkeypatch) -> None:
    monkeypatch.setattr("lightning_async.algorithms.staleness.NAMES", dict(NAMES))
    register_policy("own", 1, 2, 3)(Halved)
    with pytest.raises(TypeError, match=r"`staleness='own'` is Halved with the arguments \(1, 2, 3\)"):
        make_policy("own")


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"`staleness='dc'` must be a policy, or one of \('auto', 'none'"):
        make_policy("dc")
    with pytest.raises(ValueError, match="`staleness='auto'`"):
        make_policy("auto")  # of what optimizer?
    with pytest.raises(TypeError, match="`staleness=3` must be a name"):
        make_policy(3)  # pyright: ignore[reportArgumentType]


MOMENTUM = {"lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(
    ("optimizer", "arguments", "policy"),
    [
        ("SGD", MOMENTUM, Dana(GapAware("gradient"))),
        ("SGD", {**MOMENTUM, "nesterov": True, "weight_decay": 0.1}, Dana(GapAware("gradient"))),
        ("SGD", {**MOMENTUM, "dampening": 0.1}, GapAware("rate")),
        ("SGD", {"lr": 0.1}, GapAware("rate")),
        ("Adam", {}, GapAware("rate")),
        ("AdamW", {"lr": 0.1}, GapAware("rate")),
        ("RMSprop", {"momentum": 0.9}, GapAware("rate")),
        ("delta", {}, GapAware("rate")),
    ],
)
def test_what_suits_an_optimizer(optimizer, arguments, policy) -> None:
    assert auto(optimizer, arguments) == policy == make_policy("auto", optimizer, arguments)


@pytest.mark.parametrize(
    ("policy", "optimizer", "arguments", "warned"),
    [
        (NoCorrection(), "SGD", MOMENTUM, True),
        (NoCorrection(), "RMSprop", {"momentum": 0.5}, True),
        (NoCorrection(), "SGD", {"lr": 0.1}, False),
        (NoCorrection(), "SGD", {"momentum": 0.0}, False),
        (NoCorrection(), "Adam", None, False),
        (GapAware(), "SGD", MOMENTUM, False),
        (Dana(), "SGD", MOMENTUM, False),
    ],
)
def test_momentum_that_nothing_is_done_about_is_warned_of(policy, optimizer, arguments, warned) -> None:
    said = momentum_warning(policy, optimizer, arguments)
    assert (said is not None) == warned
    if said is not None:
        assert f"`{optimizer}(momentum={arguments['momentum']})`" in said


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: AdaptiveLr(0), ValueError, "factor=0"),
        (lambda: AdaptiveLr(1.5), ValueError, "factor=1.5"),
        (lambda: AdaptiveLr("0.5"), TypeError, "factor='0.5'"),  # pyright: ignore[reportArgumentType]
        (lambda: AdaptiveLr(0.5, "sqrt"), ValueError, "'sqrt' has none"),
        (lambda: AdaptiveLr(form="linearly"), ValueError, "form='linearly'"),  # pyright: ignore[reportArgumentType]
        (lambda: Bounded(0), ValueError, "max_staleness=0"),
        (lambda: Bounded(2.0), TypeError, "max_staleness=2.0"),  # pyright: ignore[reportArgumentType]
        (lambda: GapAware("lr"), ValueError, "scales='lr'"),  # pyright: ignore[reportArgumentType]
        (lambda: GapAware(decay=1.0), ValueError, "decay=1.0"),
        (lambda: Dana("gap_aware"), TypeError, "policy='gap_aware'"),  # pyright: ignore[reportArgumentType]
        (lambda: Dana(WeightPrediction()), ValueError, "neither looks ahead itself nor gathers"),
        (lambda: Dana(Buffered(4)), ValueError, "neither looks ahead itself nor gathers"),
        (lambda: Dana(Dana()), ValueError, "neither looks ahead itself nor gathers"),
        (lambda: Buffered(0), ValueError, "buffer_size=0"),
        (lambda: Buffered(4, "sqrt"), TypeError, "policy='sqrt'"),  # pyright: ignore[reportArgumentType]
        (lambda: Buffered(4, Dana()), ValueError, "each worker a momentum"),
        (lambda: Buffered(4, AdaptiveDelayCompensation()), ValueError, "a state of its own"),
        (lambda: Clipping(0.0), ValueError, "max_norm=0.0"),
        (lambda: Clipping(1.0, None), TypeError, "policy=None"),  # pyright: ignore[reportArgumentType]
        (lambda: DelayCompensation(-1), ValueError, "strength=-1"),
        (lambda: AdaptiveDelayCompensation(decay_square=1), ValueError, "decay_square=1"),
        (lambda: AdaptiveDelayCompensation(eps=0), ValueError, "eps=0"),
    ],
)
def test_arguments_that_cannot_be(make: Any, error, match) -> None:
    with pytest.raises(error, match=match):
        make()
