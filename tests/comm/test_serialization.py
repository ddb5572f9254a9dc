"""Values taken apart and put together again: what comes back equals what went in, and nothing is lost in silence."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_async.comm.collectives import as_bytes
from lightning_async.comm.serialization import DTYPES, decode, encode, flatten, unflatten


def through_json(value: object) -> Any:
    plain, tensors = flatten(value)
    return unflatten(json.loads(json.dumps(plain, allow_nan=False)), tensors)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert torch.equal(*(as_bytes(each.resolve_conj().contiguous()) for each in (one, other)))
    elif isinstance(one, numpy.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        for left, right in zip(one.items(), other.items(), strict=True):
            assert_same(left, right)
    elif isinstance(one, list | tuple):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, complex):
        assert_same([one.real, one.imag], [other.real, other.imag])
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other)
    else:
        assert one == other
        assert isinstance(one, set | frozenset) or repr(one) == repr(other)  # -0.0 is not 0.0


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 200), 1 << 200), st.floats(), st.text(),
    st.binary(), st.complex_numbers(), st.datetimes(), st.timedeltas(),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))
TENSORS = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: st.sampled_from([(), (0,), (3,), (2, 0, 2), (2, 3)]).map(
        lambda shape: torch.zeros(shape, dtype=DTYPES[name])
    )
)
VALUES = st.recursive(
    ATOMS | TENSORS,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict) | st.sets(st.integers()) | st.frozensets(st.text())
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_what_comes_back_equals_what_went_in(value: Any):
    assert_same(through_json(value), value)
    assert_same(decode(encode(value)), value)


OTHERS = [
    torch.Size([2, 3]),
    torch.float16,
    torch.qint8,
    torch.device("cuda", 1),
    Path("a/b"),
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone(timedelta(hours=-3))),
    numpy.float64(0.1),
    numpy.bool_(True),
    numpy.datetime64("2026-01-01"),
    numpy.str_("word"),
    numpy.zeros((2, 0, 3), dtype=">i2"),
    numpy.arange(6, dtype=numpy.float32).reshape(2, 3).T,
    numpy.array(3.5),
    numpy.array(["a", "bcd"]),
    [float("nan"), float("-inf"), -0.0],
    [complex(0.0, float("nan")), complex(float("nan"), -0.0)],
    torch.tensor([1 + 2j, 3j]).conj(),
    {(1, "a"): {0: {"step": torch.tensor(3.0)}}, torch.float32: b"\xff\x00", None: -1},
]


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: f"{type(value).__name__}")
def test_other_values(value: Any):
    assert_same(through_json(value), value)
    assert_same(decode(encode(value)), value)


def test_state_dicts_keep_order_versions_and_what_is_tied():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    first, _, last = module
    last.weight = first.weight
    state = module.state_dict()
    tensors = flatten(state)[1]
    assert len(tensors) == len(state) - 1  # the tied weight once
    assert tensors[0].data_ptr() == module.get_parameter("0.weight").data_ptr()  # by reference
    back = through_json(state)
    assert type(back) is OrderedDict
    assert back._metadata == state._metadata  # pyright: ignore[reportAttributeAccessIssue]
    assert back["0.weight"] is back["2.weight"]
    module.load_state_dict(back)


def test_an_optimizer_goes_on_from_what_comes_back():
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, betas=(0.8, 0.9))
    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    back = through_json(state)
    assert list(back["state"]) == [0, 1]
    assert_same(back, state)
    optimizer.load_state_dict(back)


def test_what_comes_back_as_its_base():
    class Name(str): ...

    class Count(int):
        def __repr__(self) -> str:
            return "?"

    value = {
        "name": Name("x"), "count": Count(3), "of": defaultdict(list, a=[1]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    assert_same(through_json(value), {"name": "x", "count": 3, "of": {"a": [1]}, "parameter": torch.ones(2)})
    for each in value.values():
        with pytest.raises(TypeError, match="cannot travel"):
            encode(each)  # the wire brings what was sent, or says that it cannot


class Colour(enum.IntEnum):
    RED = 1


class Tagged(str):
    def __init__(self, text: str) -> None:
        self.more = 1


class Sub(torch.Tensor): ...


REFUSED = [
    (object(), "builtins.object"),
    (Colour.RED, "Colour"),
    (Tagged("x"), "Tagged"),
    (namedtuple("Point", "x")(1), "Point"),
    (Counter("aab"), "Counter"),
    (numpy.array([None, {}]), "ndarray"),
    (numpy.zeros(1, dtype=[("a", "f4")]), "ndarray"),
    (numpy.ma.masked_array([1], [True]), "MaskedArray"),
    (torch.ones(2, 2).to_sparse(), "torch.sparse_coo"),
    (torch.ones(2, device="meta"), "meta"),
    (torch.ones(2).as_subclass(Sub), "a Sub"),
    (print, "builtin_function"),
    (torch.nn.Linear, "type"),
]


@pytest.mark.parametrize(("value", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_what_cannot_travel_is_named_with_its_place(value: object, name: str):
    with pytest.raises(TypeError) as caught:
        flatten({"callbacks": {"X": [0, {"y": value}]}})
    assert str(caught.value).startswith("callbacks['X'][1]['y'] is a ") and name in str(caught.value)
    with pytest.raises(TypeError, match="the value is a"):
        flatten(value)


def test_what_holds_itself_is_refused():
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="in itself"):
        flatten(value)
    with pytest.raises(TypeError, match="a key of a is a tensor"):
        flatten({"a": {torch.ones(1): 1}})


MALFORMED = [
    {}, {"tensor": 1}, {"tensor": -1}, {"tensor": "0"}, {"nobody": 1}, {"dict": [1]}, {"dict": [[[], 1]]}, {"int": "x"},
    {"array": ["|O", [1], 0]}, {"scalar": ["|O", "AAAAAAAAAAA="]}, {"device": "moon"}, {"dtype": "save"}, {"tuple": 3},
    {"array": ["<f4", [7], 0]},
]  # fmt: skip


@pytest.mark.parametrize("plain", MALFORMED, ids=str)
def test_malformed_trees_raise_one_kind_of_error(plain: Any):
    with pytest.raises(ValueError, match="no flattened value"):
        unflatten(plain, [torch.zeros(8, dtype=torch.uint8)])


def test_malformed_bytes_raise_one_kind_of_error():
    data = encode({"a": torch.arange(5), "b": (1, None)})
    for cut in (0, 7, 20, data.numel() - 1):
        with pytest.raises(ValueError, match="no encoded value"):
            decode(data[:cut])
    with pytest.raises(ValueError, match="ends after"):
        decode(torch.cat([data, data[:1]]))
