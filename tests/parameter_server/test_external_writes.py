"""What somebody writes to parameters between two pulls is seen, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_async.parameter_server.worker import ExternalWrites


def hide(p: Tensor) -> None:
    p.data.mul_(2.0)


def write(p: Tensor) -> None:
    p.detach().mul_(2.0)


def write_and_take_back(p: Tensor) -> None:
    p.detach().mul_(2.0)
    p.detach().div_(2.0)


@pytest.mark.parametrize(
    ("act", "coming", "every", "found"),
    [
        (write, False, False, ["b"]),
        (write, True, False, ["b"]),
        (hide, False, False, []),
        (hide, False, True, ["b"]),
        (write_and_take_back, False, True, []),
    ],
)
def test_who_was_written_to(act: Callable[[Tensor], None], coming: bool, every: bool, found: list[str]) -> None:
    params = [torch.tensor([1.0, float("nan")]), torch.tensor([3.0, 4.0], dtype=torch.bfloat16)]
    pulled = [[(slice(0, 1), p[:1].float()), (slice(1, 2), p[1:].float())] for p in params]
    written = ExternalWrites(["a", "b"], params)
    written.end("pulled")
    act(params[1])
    assert written.since(None if coming else pulled, every) == found


def test_what_was_overwritten_by_a_pull_is_told_once() -> None:
    p = torch.zeros(2)
    written = ExternalWrites(["p"], [p])
    written.end("pulled")
    write(p)
    written.begin()
    p.copy_(torch.ones(2))
    written.end("pulled")
    pulled = [[(slice(0, 2), torch.ones(2))]]
    assert written.since(pulled, every=True) == ["p"]
    assert written.since(pulled, every=True) == []


def test_nothing_is_told_where_nothing_can_be_compared() -> None:
    p = torch.zeros(2)
    written = ExternalWrites(["p"], [p])
    written.end("pulled")
    written.base = "gone"
    write(p)
    assert written.since([[(slice(0, 2), torch.ones(2))]], every=True) == []
