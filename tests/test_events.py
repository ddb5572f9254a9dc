"""Events are lines for people that programs can parse."""

from __future__ import annotations

import logging

import pytest

from lightning_async.events import tell


def test_a_line_ends_with_its_facts_which_the_record_has_too(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "lightning_async.events")
    facts = {"rank": 1, "names": ("0", "2"), "why": 'it "said"\nno', "share": 0.5, "all": True, "none": ()}
    tell("lost", logging.WARNING, "100% of it is gone.", **facts)
    tell("saved", logging.INFO, "It is saved.", number=3)
    first, second = caplog.records
    assert first.getMessage() == (
        '100% of it is gone. [event=lost rank=1 names=0,2 why="it \\"said\\"\\nno" share=0.5 all=true none=""]'
    )
    assert (first.name, first.levelname) == ("lightning_async.events", "WARNING")
    assert vars(first)["event"] == {"event": "lost", **facts}
    assert second.getMessage() == "It is saved. [event=saved number=3]"


def test_what_nobody_wants_to_hear_costs_nothing(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "lightning_async.events")
    tell("saved", logging.INFO, "It is saved.", number=object())
    assert caplog.records == []
