"""What a learning rate is multiplied by where a step has more samples than the one that it was chosen for."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["LrScaling", "lr_factor"]

LrScaling = Literal["linear", "sqrt"]


def lr_factor(scaling: LrScaling | None, samples: float, base: float) -> float:
    r"""By the samples behind a step.

    .. math:: \frac{n}{n_0} \text{ (linear)}, \qquad \sqrt{\frac{n}{n_0}} \text{ (sqrt)}, \qquad 1 \text{ (None)}

    Linear scaling is for SGD: the gradients of each sample count as much as without accumulation. The square root is
    for optimizers that divide by the gradients' size, such as Adam.

    Args:
        scaling: the way.
        samples: :math:`n`, behind this step.
        base: :math:`n_0`, behind the step that the learning rate was chosen for.

    Source: Goyal et al., 2017, https://arxiv.org/abs/1706.02677 (linear); Malladi et al., 2022,
    https://arxiv.org/abs/2205.10287 (the square root, for Adam)

    >>> lr_factor("linear", 128, 32), lr_factor("sqrt", 128, 32), lr_factor(None, 128, 32)
    (4.0, 2.0, 1.0)
    """
    ratio = samples / base
    return {"linear": ratio, "sqrt": math.sqrt(ratio), None: 1.0}[scaling]
