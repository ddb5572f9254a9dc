"""Manifests come back as they were, or not at all."""

from __future__ import annotations

import json
import math
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_async.checkpoint.storage import FileRecord, seal, unseal
from lightning_async.checkpoint.store import Manifest, RankManifest
from lightning_async.errors import CheckpointError, DamagedCheckpoint

WHOLE = Manifest(
    number=17,
    step=1200,
    round=37,
    epoch=3,
    generation=2,
    world_size=4,
    ranks=(0, 2, 3),
    reason="every 100 steps",
    created=1789000000.25,
    metrics={"val_loss": 0.1, "spread": math.inf},
    versions={"torch": "2.13.0", "lightning_async": "0.1.0"},
    notes={"absent": [1], "größe": None},
    files={"rank-0.bin": FileRecord(1 << 40, 0xFFFFFFFF), "rank-0.json": FileRecord(0, 0)},
)
RANK = RankManifest(2, {"rank-2.bin": FileRecord(5, 7)})

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_they_come_back_as_they_were():
    assert Manifest.from_bytes(WHOLE.to_bytes()) == WHOLE
    assert RankManifest.from_bytes(RANK.to_bytes()) == RANK
    assert Manifest.from_bytes(Manifest(1, 2).to_bytes()) == Manifest(1, 2)
    assert math.isnan(Manifest.from_bytes(Manifest(1, 2, metrics={"x": math.nan}).to_bytes()).metrics["x"])


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_whatever_is_sealed_comes_back_and_is_json(value: object):
    data = seal(value)
    assert unseal(data, "path") == value
    assert json.loads(data)["sealed"] == value


@pytest.mark.parametrize(("kind", "data"), [(Manifest, WHOLE.to_bytes()), (RankManifest, RANK.to_bytes())])
def test_every_changed_bit_and_every_lost_byte_is_noticed(kind: type[Manifest | RankManifest], data: bytes):
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedCheckpoint, match="a/path"):
            kind.from_bytes(bytes(changed), "a/path")
    for length in range(len(data)):
        for shorter in (data[:length], data[:length] + bytes(len(data) - length)):
            with pytest.raises(DamagedCheckpoint):
                kind.from_bytes(shorter)
    with pytest.raises(DamagedCheckpoint):
        kind.from_bytes(data + b"\n")


def test_what_is_sealed_but_no_manifest_is_damage():
    for kind, other in ((Manifest, RANK.to_bytes()), (RankManifest, WHOLE.to_bytes()), (Manifest, seal([1]))):
        with pytest.raises(DamagedCheckpoint, match="a/path does not hold what a manifest must"):
            kind.from_bytes(other, "a/path")


STRANGE = {
    "format": ["x", math.nan, None, True],
    "number": ["x", -1, 1.5, None],
    "step": [[], -1],
    "world_size": [None, "2"],
    "ranks": [3, "ab", [], [0, "1"], [-1], {"0": 0}],
    "reason": [None, 1],
    "created": ["x", 1e300, math.nan, -1.0],
    "metrics": [[1], {"loss": "x"}, {"loss": None}],
    "versions": [None],
    "notes": [[]],
    "pickles": [0, 1, None, "yes"],
    "files": [
        *([], {"rank-0.bin": 7}, {"rank-0.bin": {"size": 1}}, {"rank-0.bin": {"size": "1", "crc32": 1}}),
        {"rank-0.bin": {"size": -1, "crc32": 1}},
        *({name: {"size": 1, "crc32": 1}} for name in ("../x", "/dev/zero", "..", ".", "", "a\0b", "a\ud800b")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_a_sealed_field_of_another_kind_is_damage(name: str):
    value = unseal(WHOLE.to_bytes(), "path")
    for strange in STRANGE[name]:
        with pytest.raises(DamagedCheckpoint, match="a/path does not hold what a manifest must"):
            Manifest.from_bytes(seal({**value, name: strange}), "a/path")


@pytest.mark.parametrize("body", [b"[" * 200_000 + b"]" * 200_000, b'"\xff"', b"{", b"9" * 10_000])
def test_what_is_sealed_but_no_json_is_damage(body: bytes):
    with pytest.raises(DamagedCheckpoint, match="a/path does not hold what a manifest must"):
        unseal(b'{"crc32": "%08x",\n"sealed": %s}\n' % (zlib.crc32(body), body), "a/path")


def test_what_a_later_version_adds_is_passed_over():
    value = unseal(WHOLE.to_bytes(), "path")
    assert Manifest.from_bytes(seal({**value, "added": 1})) == WHOLE


def test_a_newer_format_is_not_taken_for_damage():
    data = seal({**unseal(WHOLE.to_bytes(), "path"), "format": 3})
    with pytest.raises(
        CheckpointError, match=r"manifest.json is of format 3, this version reads up to 1: update"
    ) as raised:
        Manifest.from_bytes(data)
    assert not isinstance(raised.value, DamagedCheckpoint)
