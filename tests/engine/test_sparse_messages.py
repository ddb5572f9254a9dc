"""Messages of which a part travels: bytes are as promised, nothing is lost, and residuals are in checkpoints."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_async.algorithms import DeltaMean, DiLoCo, EveryNSteps, Mean, SparseLoCo, TopK
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.compressed_mean import mean_of
from lightning_async.engine.shared_state import Arrival
from tests.algorithms.test_sparse_loco import sparse
from tests.comm.faulty import Fail, Fault, Kill
from tests.comm.simulated import InProcessWorld
from tests.engine.fault_ranks import PAYLOAD, FaultyRank, outcomes, values
from tests.engine.ranks import Rank, bits, rank_of, run
from tests.engine.test_compressed import LOCAL_SGD, messages
from tests.engine.test_faults import train_and_meet
from tests.engine.test_feedback import Counted

CODES = [TopK(0.1), TopK(0.1, bits=2)]
every_code = pytest.mark.parametrize("code", CODES, ids=str)
RULE = SparseLoCo(outer_lr=0.7, decay=0.9)


def residual(rank: Rank) -> Tensor:
    return rank.averager.clocks()["rule_state"]["error"]


@every_code
@pytest.mark.parametrize(("world_size", "numel", "part_bytes"), [(2, 1000, 400), (3, 257, 1 << 20), (6, 5000, 3000)])
def test_the_mean_is_that_of_what_was_sent(code: TopK, world_size: int, numel: int, part_bytes: int) -> None:
    sent: list[Any] = messages(world_size, numel)
    sent[1] = None
    weights = [float(rank != 1) * (rank + 1) for rank in range(world_size)]
    weights = [w / sum(weights) for w in weights]

    def body(collectives: Any) -> Any:
        mine, out = sent[collectives.rank], torch.full((numel,), torch.nan)
        each = mean_of(collectives, lambda pending: pending.result(), code, numel, part_bytes, torch.device("cpu"))
        assert not each.move_(out, mine if mine is None else mine.clone(), weights).numel()
        return out

    found = InProcessWorld(world_size).run(body, timedelta(seconds=20))
    assert all(torch.equal(bits(mean), bits(found[0])) for mean in found)
    expected = torch.zeros(numel, dtype=torch.float64)
    for weight, message in zip(weights, sent, strict=True):
        if message is not None:
            expected += weight * torch.cat([sparse(code, part)[0] for part in message.split(part_bytes // 4)]).double()
    torch.testing.assert_close(found[0].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("compression", [*CODES, "int8", "bf16"], ids=str)
def test_reports_count_the_bytes_that_collectives_were_given(compression: Any) -> None:
    """Of two ranks, one of which takes no steps: three rounds, and the model of a sync point."""

    def body(rank: Rank) -> Any:
        transfer, number = rank.averager.control.transfer, rank.averager.summary.rank
        counted: Any = Counted(transfer.large)
        transfer.large = counted
        rank.averager.component.average.follow_layout()  # as it is before anything has moved
        begin.wait()
        rank.train(6 if number else 0)
        rank.meet()
        return counted.bytes, rank.averager.summary

    begin = threading.Barrier(2, timeout=60)
    config = {"overlap": False, "compression": compression, "part_bytes": 4096}
    options: Any = {"schedule": EveryNSteps(2), "numel": 3000, "goals": messages(2, 3000), "config": config}
    expected = {
        "int8": 3000 + 4 * 12, "bf16": 6000,
        CODES[0]: 2 * (4 + 6 * 103 + 2) + (4 + 6 * 96),  # in parts of 1024, 1024 and 952 elements
        CODES[1]: 2 * (4 + 8 + 2 * 103 + 26) + (4 + 8 + 2 * 96 + 24),
    }  # fmt: skip
    for counted, summary in run(2, body, rule=DiLoCo(), **options):
        assert (summary.rounds, summary.consensuses) == (3, 1)
        assert counted == summary.payload_bytes == 3 * expected[compression] + 4 * 3000


def reference(code: TopK, goals: list[Tensor], work: list[float], rounds: int, steps: int) -> Any:
    """`SparseLoCo` in fp64, on squares: the anchor, and each replica's residual."""
    a = torch.ones(goals[0].numel(), dtype=torch.float64)
    errors = [torch.zeros_like(a) for _ in goals]
    for _ in range(rounds):
        mean = torch.zeros_like(a)
        for error, goal, w in zip(errors, goals, work, strict=True):
            x = goal.double() + (a - goal.double()) * 0.9**steps
            error.mul_(RULE.decay).add_(a - x)
            chosen = error.abs().topk(code.count(len(a))).indices.sort().values
            q = error[chosen]
            if code.bits == 2:
                large = q.abs() > q.abs().mean()
                q = q.sign() * torch.where(large, q.abs()[large].mean(), q.abs()[~large].mean())
            mean[chosen] += w / sum(work) * q
            error[chosen] -= q
        a = a - RULE.outer_lr * mean
    return a, errors


@every_code
def test_sparse_loco_is_its_equations(code: TopK) -> None:
    goals, work = messages(3, 300, seed=4), [1.0, 2.0, 5.0]

    def body(rank: Rank) -> Any:
        rank.train(5 * 4, samples=work[rank.averager.summary.rank])
        return rank.x.clone(), rank.averager.state_dict()["rule_state"]["anchor"], residual(rank)

    config = {"overlap": False, "compression": code}
    found = run(3, body, rule=RULE, schedule=EveryNSteps(4), goals=goals, numel=300, config=config)
    a, errors = reference(code, goals, work, 5, 4)
    assert all(torch.equal(bits(anchor), bits(found[0][1])) for _, anchor, _ in found)
    for (x, anchor, error), expected in zip(found, errors, strict=True):
        torch.testing.assert_close(anchor.double(), a, atol=2e-6, rtol=0)
        torch.testing.assert_close(x[0].double(), a, atol=2e-6, rtol=0)
        torch.testing.assert_close(error.double(), RULE.decay * expected, atol=2e-6, rtol=0)
        assert error.abs().max() > 0.05


@every_code
@pytest.mark.parametrize(("world_size", "steps"), [(2, 1), (3, 4)])
def test_nothing_is_lost(code: TopK, world_size: int, steps: int) -> None:
    """Without a residual in the rule it stays in the parameters, and a sync point brings all of it."""
    goals = messages(world_size, 300, seed=3)

    def body(rank: Rank) -> Any:
        rank.train(40)
        apart = rank.x.clone()
        assert rank.meet() is Arrival.OPEN
        return rank.x.clone(), apart

    config = {"overlap": False, "compression": code, "part_bytes": 256}
    found = run(world_size, body, rule=LOCAL_SGD, schedule=EveryNSteps(steps), goals=goals, numel=300, config=config)
    assert all(torch.equal(bits(x), bits(found[0][0])) for x, _ in found)
    assert (found[0][1] - found[1][1]).abs().max() > 0.05, "most was not sent"
    x = torch.ones((), dtype=torch.float64)
    for _ in range(40):
        x = x - 0.1 * (x - torch.stack(goals).double().mean(0))
    torch.testing.assert_close(found[0][0][0].double(), x, atol=2e-6, rtol=0)


@every_code
def test_at_a_sync_point_what_was_not_sent_weighs_as_what_is_new(code: TopK) -> None:
    """A replica with a step since the last round does not outweigh what the other one has yet to send."""

    def body(rank: Rank) -> Any:
        rank.train(4, samples=2.0)
        sent.wait()
        rank.train(1 - rank.averager.summary.rank, samples=3.0)
        apart = rank.x.clone()
        assert rank.meet() is Arrival.OPEN
        return rank.x.clone(), apart

    sent = threading.Barrier(2, timeout=60)
    options: Any = {"schedule": EveryNSteps(4), "goals": messages(2, 300), "numel": 300}
    found = run(2, body, rule=LOCAL_SGD, config={"overlap": False, "compression": code}, **options)
    for x, _ in found:
        torch.testing.assert_close(x, (11 * found[0][1] + 8 * found[1][1]) / 19, atol=1e-6, rtol=0)


@every_code
def test_what_was_not_sent_weighs_as_before_where_training_goes_on_from_a_save_between_sync_points(code: TopK) -> None:
    options: Any = {"schedule": EveryNSteps(4), "goals": messages(2, 300), "numel": 300}
    config = {"overlap": False, "compression": code}

    def save(rank: Rank) -> Any:
        rank.train(4, samples=2.0)
        averager = rank.averager
        saved = copy.deepcopy((rank.x, averager.state_dict(), averager.clocks(), averager.marks.replica()))
        sent.wait()
        return *saved, go_on(rank)

    def resume(rank: Rank) -> Any:
        x, shared, clocks, replica, _ = first[rank.averager.summary.rank]
        rank.averager.load_state_dict(shared, clocks)
        rank.averager.marks.part(replica, {"weight": x}, rank.module)
        sent.wait()
        return go_on(rank)

    def go_on(rank: Rank) -> Tensor:
        rank.train(1 - rank.averager.summary.rank, samples=3.0)
        assert rank.meet() is Arrival.OPEN
        return rank.x.clone()

    sent = threading.Barrier(2, timeout=60)
    first = run(2, save, rule=LOCAL_SGD, config=config, **options)
    for x, told in zip(run(2, resume, rule=LOCAL_SGD, config=config, **options), first, strict=True):
        torch.testing.assert_close(x, told[-1], atol=1e-6, rtol=0)


def test_with_the_residual_in_the_rule_replicas_hold_one_model_after_a_round() -> None:
    """To the bit, so that a sync point moves nothing."""

    def body(rank: Rank) -> Any:
        rank.train(8)
        apart = rank.x.clone()
        assert rank.meet() is Arrival.OPEN
        assert torch.equal(bits(rank.x), bits(apart)) and residual(rank).any()
        return apart, rank.averager.state_dict()["rule_state"]["anchor"], rank.averager.summary

    config = {"overlap": False, "compression": CODES[1]}
    found = run(2, body, rule=RULE, schedule=EveryNSteps(4), goals=messages(2, 300), numel=300, config=config)
    for x, anchor, summary in found:
        assert torch.equal(bits(x[0]), bits(anchor)) and torch.equal(bits(x), bits(found[0][0]))
        assert (summary.rounds, summary.consensuses) == (2, 0)


@every_code
@pytest.mark.parametrize("nth", [1, 4])
def test_a_round_that_fails_is_repeated_to_the_bit(code: TopK, nth: int) -> None:
    """In the first part of a message, or a later one: what was encoded already is the same again."""

    def body(rank: FaultyRank) -> dict[str, Any]:
        rank.goal = messages(2, 3000)[rank.number]  # pyright: ignore[reportAttributeAccessIssue]
        return {**train_and_meet(rank), "residual": residual(rank)}

    options: Any = {"rule": RULE, "numel": 3000, "part_bytes": 1024, "compression": code}
    smooth = values(2, body, **options)
    for after in (False, True):
        script = [Fault(op="all_gather", nth=nth, action=Fail(after=after), name=PAYLOAD)]
        for mine, expected in zip(values(2, body, scripts={1: script}, **options), smooth, strict=True):
            assert mine["summary"].failed_rounds == 1 and mine["summary"].rounds == 3
            assert torch.equal(bits(mine["x"]), bits(expected["x"]))
            assert torch.equal(bits(mine["state"]["anchor"]), bits(expected["state"]["anchor"]))
            assert torch.equal(bits(mine["residual"]), bits(expected["residual"])) and mine["residual"].any()


def test_those_that_are_left_go_on_with_their_residuals() -> None:
    """Of three ranks one dies within a round: the two others repeat it among themselves."""

    def body(rank: FaultyRank) -> Any:
        rank.goal = messages(3, 300, seed=4)[rank.number]  # pyright: ignore[reportAttributeAccessIssue]
        rank.train(12)
        return rank.rule_state["anchor"], residual(rank)

    fault = Fault(op="all_gather", nth=1, action=Kill(), name=PAYLOAD)
    options: Any = {"rule": RULE, "numel": 300, "compression": CODES[0], "schedule": EveryNSteps(4)}
    found = outcomes(3, body, scripts={2: [fault]}, dead_after=timedelta(seconds=0.5), min_replicas=1, **options)
    assert found[2].error is not None
    a, errors = reference(CODES[0], messages(3, 300, seed=4)[:2], [1.0, 1.0], 3, 4)
    for outcome, expected in zip(found[:2], errors, strict=True):
        torch.testing.assert_close(outcome.value[0].double(), a, atol=2e-6, rtol=0)
        torch.testing.assert_close(outcome.value[1].double(), RULE.decay * expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("fragments", [1, 2])
def test_training_goes_on_from_a_checkpoint_to_the_bit_with_residuals_and_without_begins_them_at_zero(
    fragments: int,
) -> None:
    goals = messages(2, 300, seed=5)
    config = {"overlap": False, "compression": TopK(0.05, bits=2), "fragments": fragments}
    options: Any = {"rule": RULE, "schedule": EveryNSteps(4), "config": config}

    def fits(body: Any, start: Tensor) -> list[Any]:
        world = InProcessWorld(2)

        def on_rank(collectives: Any) -> Any:
            module = nn.Linear(300, 1, bias=fragments > 1)  # the other fragment
            with torch.no_grad():
                for param in module.parameters():
                    param.zero_()
                module.weight.copy_(start)
            with rank_of(collectives, world.store, goals[collectives.rank], module=module, **options) as rank:  # pyright: ignore
                return body(rank)

        return world.run(on_rank, timedelta(seconds=60))

    def whole(rank: Rank) -> Any:
        rank.train(14)
        assert rank.meet() is Arrival.OPEN
        saved = copy.deepcopy((rank.x, rank.averager.state_dict(), rank.averager.clocks()))
        rank.averager.sync_points.resume()
        rank.train(14)
        assert rank.meet() is Arrival.OPEN
        return saved, rank.x.clone(), residual(rank)

    first = fits(whole, torch.ones(1, 300))

    def resumed(keep: bool) -> Any:
        def body(rank: Rank) -> Any:
            _, shared, clocks = first[rank.averager.summary.rank][0]
            rank.averager.load_state_dict(shared, clocks if keep else {**clocks, "rule_state": {}})
            began = residual(rank)
            rank.averager.ledger.start()
            rank.train(14)
            assert rank.meet() is Arrival.OPEN
            return began, rank.x.clone(), residual(rank)

        return fits(body, first[0][0][0])

    for (began, x, left), (saved, expected, error) in zip(resumed(True), first, strict=True):
        assert torch.equal(began, saved[2]["rule_state"]["error"]) and began.any()
        assert torch.equal(bits(x), bits(expected))
        assert torch.equal(bits(left), bits(error))
    for (began, x, _), (_, expected, _) in zip(resumed(False), first, strict=True):
        assert not began.any()
        assert not torch.equal(x, expected)


@every_code
def test_a_part_of_the_parameters_themselves_is_refused(code: TopK) -> None:
    config = AveragerConfig(compression=code, overlap=False)
    for rule in (DeltaMean(), Mean()):
        with pytest.raises(ValueError, match=r"Mean\(\), compression=TopK\(.*a part says too little for replicas"):
            config.check_rule("Owner", rule)
    with pytest.raises(ValueError, match=r"mixing=0\.5.*compression=TopK\(.*Use a rule without mixing"):
        config.check_rule("Owner", DiLoCo(mixing=0.5))
    config.check_rule("Owner", RULE)
