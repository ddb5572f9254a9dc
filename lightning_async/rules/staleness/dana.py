"""A momentum for each worker, and weights from where all of them lead."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_async.rules.staleness.protocol import UNCORRECTED, StalenessPolicy, Wrapper

__all__ = ["Dana"]


@dataclass(frozen=True)
class Dana(Wrapper):
    r"""Each worker has its own momentum, and pulls where the momenta of all of them are about to lead.

    .. math::
        v_i &\leftarrow \mu\, v_i + w\, g_i, \qquad x \leftarrow x - \eta\, v_i \\
        \hat x &= x - \eta \mu \sum_j v_j

    What worker :math:`i` pulls is :math:`\hat x`: about where the weights will be when its gradient comes back. With
    one worker that is SGD with Nesterov's momentum. It is for SGD with momentum, whose ``momentum`` is :math:`\mu`, and
    takes the room of two copies of the parameters for each worker.

    Args:
        policy: that says how much a push counts, :math:`w`. Default: all of it; with ``GapAware("gradient")`` it is
            DANA with gap-awareness.

    Raises:
        TypeError: ``policy`` is no policy.
        ValueError: ``policy`` looks ahead itself, or gathers pushes of several workers.

    Source: Hakimi et al., "Taming Momentum in a Distributed Asynchronous Environment", 2019,
    https://arxiv.org/abs/1907.11612

    >>> from lightning_async.rules.staleness.gap_aware import GapAware
    >>> Dana(GapAware("gradient")).measures
    frozenset({'moved'})
    """

    policy: StalenessPolicy = UNCORRECTED

    momentum_by_worker = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        if not isinstance(self.policy, StalenessPolicy):
            raise TypeError(f"`Dana(policy={self.policy!r})` must be a staleness policy.")
        if self.policy.momentum_by_worker or self.policy.predicts or self.policy.buffer_size > 1:
            raise ValueError(
                f"`Dana(policy={self.policy!r})` must be a policy that neither looks ahead itself nor gathers pushes."
            )
