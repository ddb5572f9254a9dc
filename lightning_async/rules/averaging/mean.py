"""Rules whose message is the parameters themselves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_async.rules.averaging.base import AveragingState, RuleBase
from lightning_async.rules.averaging.protocol import Round

__all__ = ["DeltaMean", "Mean"]


class _ParameterMean(RuleBase[AveragingState]):
    """The snapshot is the message and the mean message is the target: there is nothing to compute."""

    def message_(self, out: Tensor, state: AveragingState) -> tuple[float, ...]:
        return ()

    def merge_(self, sent: Tensor | None, received: Tensor, state: AveragingState, round: Round) -> AveragingState:
        return state


@dataclass(frozen=True)
class Mean(_ParameterMean):
    r"""Local SGD: every replica waits for the round and takes the work-weighted mean of the parameters.

    .. math:: x_i \leftarrow \bar x = \sum_j w_j x_j

    A round stands between two steps; use `DeltaMean` to go on training while it travels.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, https://arxiv.org/abs/1805.09767

    >>> import torch
    >>> rule = Mean()
    >>> received = torch.tensor([2.0])
    >>> rule.merge_(torch.tensor([1.0]), received, AveragingState(), Round(id=0, rank=0, work=(1.0, 1.0)))
    AveragingState()
    >>> received, rule.overlappable
    (tensor([2.]), False)
    """

    overlappable = False


@dataclass(frozen=True)
class DeltaMean(_ParameterMean):
    r"""Averaging that overlaps with training: parameters move by what the others did, and keep their own progress.

    .. math:: x_i \leftarrow x_i + (\bar s - s_i), \qquad \bar s = \sum_j w_j s_j

    :math:`s_i` is the snapshot that replica :math:`i` sent. With no step since the snapshot this is the plain
    mean; with steps it conserves the work-weighted mean of the replicas.

    Source: delayed parameter averaging with the delta rule, as in Bagua's asynchronous model averaging,
    https://github.com/BaguaSys/bagua, and in hivemind, https://github.com/learning-at-home/hivemind

    >>> import torch
    >>> rule, x, sent = DeltaMean(), torch.tensor([1.5]), torch.tensor([1.0])  # 0.5 was learned meanwhile
    >>> received = torch.tensor([2.0])
    >>> _ = rule.merge_(sent, received, AveragingState(), Round(id=0, rank=0, work=(1.0, 1.0)))
    >>> x + (received - sent)
    tensor([2.5000])
    """
