"""FlatLayout: places without gaps or overlap, cuts that ignore them, and comparison between machines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_async.flat import FlatLayout
from tests.support import run_ranks

SHAPES = st.lists(st.sampled_from([(), (0,), (1,), (5,), (2, 3), (0, 4), (3, 1, 2)]), max_size=8)


@given(shapes=SHAPES)
def test_places_cover_the_bucket_once_and_in_order(shapes) -> None:
    layout = FlatLayout([torch.zeros(shape) for shape in shapes])
    bucket = layout.empty()
    bucket.copy_(torch.arange(layout.numel))
    views = layout.views(bucket)
    assert len(views) == len(layout) == len(shapes)
    assert [tuple(view.shape) for view in views] == shapes
    assert [value for view in views for value in view.flatten().tolist()] == list(range(layout.numel))
    for view in views:
        view.add_(1)
    assert bucket.tolist() == [value + 1.0 for value in range(layout.numel)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.integers(1, len(sizes)))
))  # fmt: skip
def test_cuts_hold_every_tensor_once_and_are_balanced(case: tuple[list[int], int]) -> None:
    sizes, number = case
    runs = [sizes[place] for place in FlatLayout([torch.zeros(size) for size in sizes]).cut(number)]
    assert len(runs) == number
    assert [size for run in runs for size in run] == sizes, "in order"
    assert all(runs), "none is empty"
    assert max(map(sum, runs)) <= sum(sizes) / number + max(sizes)


@given(numel=st.integers(0, 50), part_bytes=st.integers(1, 64))
def test_parts_cover_every_element_even_of_a_tensor_larger_than_a_part(numel, part_bytes) -> None:
    bucket = torch.arange(float(numel))
    parts = FlatLayout.parts(bucket, part_bytes)
    assert all(0 < part.numel() * 4 <= max(4, part_bytes) for part in parts)
    assert [value for part in parts for value in part.tolist()] == bucket.tolist()
    for part in parts:
        part.zero_()
    assert bucket.abs().sum() == 0


def test_layout_keeps_no_tensor() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    layout = FlatLayout([tensor])
    assert not any(value is tensor for value in vars(layout).values())
    assert layout.dtypes == (torch.bfloat16,)
    assert layout.empty().dtype == torch.float32


def test_names_must_match_the_tensors() -> None:
    assert FlatLayout([torch.zeros(1), torch.zeros(2)]).names == ("0", "1")
    with pytest.raises(ValueError, match="has 1 entries for 2 tensors"):
        FlatLayout([torch.zeros(1), torch.zeros(2)], ["weight"])


def test_fingerprint_fits_a_double_and_tells_layouts_apart() -> None:
    def prints(*tensors, names=None) -> int:
        return FlatLayout(tensors, names).fingerprint()

    base = prints(torch.zeros(2, 3), torch.zeros(4))
    assert int(float(base)) == base < 2**52
    assert base == prints(torch.ones(2, 3), torch.ones(4))
    others = {
        prints(torch.zeros(3, 2), torch.zeros(4)),
        prints(torch.zeros(4), torch.zeros(2, 3)),
        prints(torch.zeros(2, 3), torch.zeros(4).half()),
        prints(torch.zeros(2, 3), torch.zeros(4), names=["a", "b"]),
        prints(torch.zeros(2, 3)),
    }
    assert len(others) == 5
    assert base not in others


def fingerprint() -> int:
    return FlatLayout([torch.zeros(2, 3), torch.zeros(())], ["weight", "bias"]).fingerprint()


@pytest.mark.processes
def test_fingerprint_is_the_same_in_another_process() -> None:
    """In each of them strings have other hashes."""
    assert [result.value for result in run_ranks("tests.test_flat:fingerprint", 2)] == [fingerprint()] * 2


def test_first_difference_names_the_tensor_on_both_sides() -> None:
    one = FlatLayout([torch.zeros(2), torch.zeros(3)], ["weight", "bias"]).describe()
    two = FlatLayout([torch.zeros(2), torch.zeros(4)], ["weight", "bias"]).describe()
    assert FlatLayout.first_difference(one, one) is None
    assert FlatLayout.first_difference(one, two) == (
        "tensor 1: bias: shape (3,), torch.float32 | bias: shape (4,), torch.float32"
    )
    assert FlatLayout.first_difference(one, one[:1]) == "tensor 1: bias: shape (3,), torch.float32 | nothing"
    assert FlatLayout.first_difference([], one) == "tensor 0: nothing | weight: shape (2,), torch.float32"
