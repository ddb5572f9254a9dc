"""The positions of a list of tensors in one flat fp32 bucket. No other module computes such positions."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROOM = 16
"""Elements in front of a bucket, which `with_tag` uses. They are 64 bytes: other offsets make copies slower."""


class FlatLayout:
    """The positions of a list of tensors in one flat bucket, one after the other, without gaps.

    `parts` cuts a bucket into parts for transport and ignores where tensors begin and end, so a tensor may be larger
    than a part.

    Args:
        tensors: The tensors; only their shapes and dtypes are kept.
        names: One name for each tensor, for error messages and `moved`. Default: ``"0"``, ``"1"``, ...

    >>> layout = FlatLayout([torch.zeros(2, 3), torch.zeros(())], ["weight", "bias"])
    >>> layout.numel
    7
    >>> [tuple(view.shape) for view in layout.views(layout.empty())]
    [(2, 3), ()]
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
        self.names = tuple(names) if names is not None else tuple(str(i) for i in range(len(tensors)))
        if len(self.names) != len(tensors):
            raise ValueError(f"`FlatLayout(names=...)` has {len(self.names)} entries for {len(tensors)} tensors.")
        self.shapes = tuple(t.shape for t in tensors)
        self.dtypes = tuple(t.dtype for t in tensors)
        self.sizes = tuple(math.prod(shape) for shape in self.shapes)
        self.numel = sum(self.sizes)

    def __len__(self) -> int:
        return len(self.shapes)

    def empty(self, device: torch.device | str = "cpu", pin_memory: bool = False) -> Tensor:
        """Return a new zeroed fp32 bucket for this layout."""
        return torch.zeros(self.numel, dtype=torch.float32, device=device, pin_memory=pin_memory)

    def views(self, bucket: Tensor) -> list[Tensor]:
        """Return one view into ``bucket`` for each tensor, in the tensor's shape."""
        return [part.view(shape) for part, shape in zip(bucket.split(self.sizes), self.shapes, strict=True)]

    def moved(self, bucket: Tensor, to: FlatLayout) -> Tensor:
        """Copy ``bucket``, which has this layout, into a new bucket with the layout ``to``, and return the new bucket.

        A tensor is copied if the layout ``to`` has a tensor with its name and shape. All other elements of the new
        bucket are zero.
        """
        held = dict(zip(self.names, self.views(bucket), strict=True))
        new = to.empty(bucket.device)
        for name, view in zip(to.names, to.views(new), strict=True):
            if name in held and held[name].shape == view.shape:
                view.copy_(held[name])
        return new

    def cut(self, number: int) -> list[slice]:
        """Cut the list of tensors into ``number`` groups of consecutive tensors, of about equal size.

        Return the groups as slices. No group is empty, and none is larger than an equal share plus the largest tensor.
        There must be at least ``number`` tensors.

        >>> FlatLayout([torch.zeros(numel) for numel in (4, 2, 2, 3, 1)]).cut(3)
        [slice(0, 1, None), slice(1, 3, None), slice(3, 5, None)]
        """
        ends = list(itertools.accumulate(self.sizes, initial=0))
        borders = [0]
        for k in range(1, number):
            possible = range(borders[-1] + 1, len(self) - (number - k) + 1)
            borders.append(min(possible, key=lambda border, k=k: abs(number * ends[border] - k * self.numel)))
        return [slice(*pair) for pair in itertools.pairwise([*borders, len(self)])]

    @staticmethod
    def parts(bucket: Tensor, part_bytes: int) -> list[Tensor]:
        """Split ``bucket`` into consecutive pieces of at most ``part_bytes`` bytes."""
        return list(bucket.split(max(1, part_bytes // bucket.element_size()))) if bucket.numel() else []

    def describe(self) -> list[str]:
        """Return one line for each tensor, with its name, shape and dtype. Layouts with equal lines are equal."""
        return [
            f"{name}: shape {tuple(shape)}, {dtype}"
            for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True)
        ]

    def fingerprint(self) -> int:
        """Return a 52-bit hash of the lines that `describe` returns.

        A float64 can hold it exactly. Equal layouts have equal hashes on all machines.
        """
        digest = hashlib.sha256("\n".join(self.describe()).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 12

    @staticmethod
    def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> str | None:
        """Return the first difference between two results of `describe`, as ``"mine | theirs"``; None without one."""
        for i, (left, right) in enumerate(itertools.zip_longest(mine, theirs, fillvalue="nothing")):
            if left != right:
                return f"tensor {i}: {left} | {right}"
        return None


def with_tag(part: Tensor) -> Tensor:
    """Return ``part`` with the `ROOM` elements in front of it, in which a number can be sent together with the part.

    ``part`` must be the beginning of a bucket whose memory has `ROOM` more elements in front of it.

    >>> bucket = torch.zeros(ROOM + 3)[ROOM:]
    >>> with_tag(bucket[:2])[0] = 7.0
    >>> with_tag(bucket).tolist() == [7.0, *[0.0] * (ROOM - 1 + 3)]
    True
    """
    return part.as_strided((ROOM + part.numel(),), (1,), part.storage_offset() - ROOM)
