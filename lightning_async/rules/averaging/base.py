"""What most rules share, so that a rule is little more than its equations."""

from __future__ import annotations

from abc import ABC
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from lightning_async.flat import FlatLayout
from lightning_async.rules.averaging.protocol import AllMean, AveragingRule

__all__ = ["AveragingState", "RuleBase", "copy_saved_"]

S = TypeVar("S", bound=NamedTuple)


class AveragingState(NamedTuple):
    """Nothing is remembered between rounds."""


class RuleBase(AveragingRule[S], ABC):
    """An averaging rule over all replicas, without scalars, whose state is a ``NamedTuple`` of flat tensors.

    A rule states `message_` and `merge_`; `init` too, where it remembers anything.
    """

    # Without annotations: jsonargparse evaluates those of a dataclass's bases in the dataclass's own module.
    topology = AllMean()  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    num_scalars = 0
    overlappable = True
    per_replica = frozenset[str]()
    absent_follow = True
    restores_local = False
    mixes = False
    sends_difference = False

    def init(self, params: Tensor, layout: FlatLayout) -> S:
        """Nothing to remember: an `AveragingState`."""
        return cast(S, AveragingState())

    def state_dict(self, state: S) -> dict[str, Any]:
        """The state's tensors by name; references, not copies, as in torch."""
        return dict(state._asdict())

    def load_state_dict(self, state: S, saved: dict[str, Any]) -> S:
        """``state``, its tensors overwritten in place with the saved ones.

        Raises:
            ValueError: the saved names or sizes are those of another rule or model.
        """
        copy_saved_(self, state._asdict(), saved)
        return state


def copy_saved_(rule: object, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Copy ``saved`` into ``tensors`` in place, after a check that all of it fits."""
    name = type(rule).__name__
    if set(saved) != set(tensors):
        raise ValueError(f"The saved state of `{name}` holds {sorted(saved)}, this one {sorted(tensors)}.")
    for key, tensor in tensors.items():
        if saved[key].shape != tensor.shape:
            raise ValueError(
                f"The saved state of `{name}` has {tuple(saved[key].shape)} as the shape of {key}, "
                f"this model {tuple(tensor.shape)}."
            )
    with torch.no_grad():
        for key, tensor in tensors.items():
            tensor.copy_(saved[key])
