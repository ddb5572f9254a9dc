"""A smaller learning rate for what is late."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_async.arguments import check_choice, check_real
from lightning_async.rules.staleness.protocol import Late, StalenessPolicy, Weight

__all__ = ["AdaptiveLr"]

Form = Literal["exponential", "inverse", "sqrt", "linear"]


@dataclass(frozen=True)
class AdaptiveLr(StalenessPolicy):
    r"""The learning rate of a push falls with its lag.

    .. math::
        \eta_\tau = \eta \cdot \begin{cases}
            f^{\tau} & \text{exponential} \\
            1 / \max(1, \tau) & \text{inverse} \\
            1 / \sqrt{1 + \tau} & \text{sqrt} \\
            1 / (1 + f\, \tau) & \text{linear}
        \end{cases}

    Args:
        factor: :math:`f`. Default: 0.9 for the exponential form, 0.1 for the linear one; the others have none.
        form: as above. Default: ``"exponential"``.

    Raises:
        TypeError: ``factor`` is not a number.
        ValueError: ``factor`` is not in (0, 1], or the form has none; there is no such form.

    Source: Chan and Lane, "Distributed Asynchronous Optimization of Convolutional Neural Networks", 2014 (exponential);
    Zhang et al., "Staleness-aware Async-SGD", 2016, https://arxiv.org/abs/1511.05950 (inverse); Nguyen et al.,
    "FedBuff", 2022, https://arxiv.org/abs/2106.06639 (sqrt); Xie et al., "Asynchronous Federated Optimization", 2019,
    https://arxiv.org/abs/1903.03934 (linear)

    >>> AdaptiveLr(0.5).weigh(Late(lag=2)).rate, AdaptiveLr(form="sqrt").weigh(Late(lag=3)).rate
    (0.25, 0.5)
    """

    factor: float | None = None
    form: Form = "exponential"

    def __post_init__(self) -> None:
        check_choice("AdaptiveLr", "form", self.form, get_args(Form))
        if self.factor is None:
            return
        check_real(self, "factor", above=0)
        if self.factor > 1:
            raise ValueError(f"`AdaptiveLr(factor={self.factor!r})` must be <= 1.")
        if self.form in ("inverse", "sqrt"):
            raise ValueError(f"`AdaptiveLr(factor={self.factor!r})`: the form {self.form!r} has none.")

    def weigh(self, late: Late) -> Weight:
        """See `StalenessPolicy`."""
        if self.form == "exponential":
            return Weight(rate=(0.9 if self.factor is None else self.factor) ** late.lag)
        if self.form == "inverse":
            return Weight(rate=1 / max(1, late.lag))
        if self.form == "sqrt":
            return Weight(rate=1 / math.sqrt(1 + late.lag))
        return Weight(rate=1 / (1 + (0.1 if self.factor is None else self.factor) * late.lag))
