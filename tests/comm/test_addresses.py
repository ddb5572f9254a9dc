"""Where a server is, and which way leads there."""

from __future__ import annotations

import json

import pytest

from lightning_async.comm.p2p import ShmDial
from lightning_async.comm.p2p_gloo import PairDial, address_of, dial

HERE = address_of("it", "127.0.0.1", 29500)
ELSEWHERE = {**HERE, "machine": "another"}


@pytest.mark.parametrize(
    ("address", "via", "kind"),
    [
        (HERE, None, ShmDial),
        (HERE, "shm", ShmDial),
        (HERE, "gloo", PairDial),
        (ELSEWHERE, None, PairDial),
        (ELSEWHERE, "gloo", PairDial),
        (address_of("it"), None, ShmDial),
        (json.loads(json.dumps(HERE)), None, ShmDial),
    ],
)
def test_the_way_is_shared_memory_on_one_host_and_gloo_between_two(address: dict, via: str | None, kind: type):
    made = dial(address, 8, 16, via)
    assert type(made) is kind and vars(made)["name"] == "it"
    assert (made.outgoing.numel(), made.incoming.numel()) == (8, 16)
    made.close()


@pytest.mark.parametrize(
    ("address", "via", "match"),
    [
        ({}, None, "machine, name, host and port"),
        ("somewhere", None, "machine, name, host and port"),
        (HERE, "tcp", "'shm', 'gloo' or None"),
        (ELSEWHERE, "shm", "not on this host, or is another user's"),
        ({**address_of("it"), "machine": "another"}, None, "on its own host only.*host="),
        (address_of("it"), "gloo", "on its own host only"),
    ],
)
def test_where_no_way_leads_is_said(address: dict, via: str | None, match: str):
    with pytest.raises(ValueError, match=match):
        dial(address, 8, 8, via)
