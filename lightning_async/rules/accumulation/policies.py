"""Policies of accumulation: by epoch, by step, by the noise of gradients, by the share of communication."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_async.arguments import check_int, check_real
from lightning_async.rules.accumulation.protocol import AccumulationPolicy, Progress

__all__ = ["ByEpoch", "ByStep", "CommunicationShare", "Fixed", "NoiseScale"]


@dataclass(frozen=True)
class Fixed(AccumulationPolicy):
    """Always the same.

    Args:
        n: of what the argument counts that it is given to.

    Raises:
        TypeError, ValueError: it is no int, or less than 1.

    >>> Fixed(4).size(Progress(step=9, epoch=1))
    4
    """

    n: int

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def size(self, progress: Progress) -> int:
        return self.n


@dataclass(frozen=True)
class ByEpoch(AccumulationPolicy):
    r"""Another size from some epochs on.

    .. math:: n = n_e, \quad e = \max \{e \in E : e \le \mathit{epoch}\}

    Args:
        sizes: by the epoch that each begins with; before the first one it is 1.

    Raises:
        TypeError: not a mapping of ints.
        ValueError: empty, an epoch is negative, or a size less than 1.

    Source: as Lightning's `GradientAccumulationScheduler`.

    >>> [ByEpoch({0: 1, 4: 8}).size(Progress(step=0, epoch=epoch)) for epoch in (0, 3, 4, 9)]
    [1, 1, 8, 8]
    """

    sizes: Mapping[int, int]

    def __post_init__(self) -> None:
        _check_sizes(self, self.sizes)

    def size(self, progress: Progress) -> int:
        return _latest(self.sizes, progress.epoch)


@dataclass(frozen=True)
class ByStep(AccumulationPolicy):
    r"""Another size from some optimizer steps on.

    .. math:: n = n_t, \quad t = \max \{t \in T : t \le \mathit{step}\}

    Args:
        sizes: by the step, counted from 0, that each begins with; before the first one it is 1.

    Raises:
        TypeError, ValueError: as of `ByEpoch`.

    Source: batch sizes that grow in place of learning rates that fall: Smith et al., 2018,
    https://arxiv.org/abs/1711.00489

    >>> [ByStep({100: 2, 1000: 8}).size(Progress(step=step, epoch=0)) for step in (99, 100, 1000)]
    [1, 2, 8]
    """

    sizes: Mapping[int, int]

    def __post_init__(self) -> None:
        _check_sizes(self, self.sizes)

    def size(self, progress: Progress) -> int:
        return _latest(self.sizes, progress.step)


@dataclass(frozen=True, kw_only=True)
class NoiseScale(AccumulationPolicy):
    r"""As many samples as the noise of the gradients asks for.

    .. math:: n = \min\big(n_\text{max}, \max(n_\text{min}, r\, B_\text{simple})\big), \quad
        n_\text{last} / g \le n \le g\, n_\text{last}

    :math:`B_\text{simple}` is the gradient noise scale: below it twice the samples are worth nearly twice the steps,
    above it nearly nothing.

    Args:
        maximum: :math:`n_\text{max}`, in samples.
        minimum: :math:`n_\text{min}`; with it training begins.
        ratio: :math:`r`. Default 1.
        decay: of the running means behind the noise scale. Default 0.9.
        growth: :math:`g`: no window is larger or smaller than the last one by more than this. Default 2.
        every: windows that an estimate is made of, and from one decision to the next. Default 16.

    Raises:
        TypeError, ValueError: a number of the wrong kind or out of range.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, https://arxiv.org/abs/1812.06162

    >>> from lightning_async.rules.accumulation.noise import Noise
    >>> policy, now = NoiseScale(minimum=16, maximum=1024), Progress(step=0, epoch=0, size=64)
    >>> [policy.size(now._replace(noise=Noise(1.0, scale, 1.0))) for scale in (8.0, 100.0, 5000.0)]
    [32, 100, 128]
    """

    maximum: int
    minimum: int
    ratio: float = 1.0
    decay: float = 0.9
    growth: float = 2.0
    every: int = 16

    unit = "samples"
    measures = "noise"

    def __post_init__(self) -> None:
        _check_range(self, at_least=1)
        check_int(self, "every", at_least=1)
        check_real(self, "ratio", above=0)
        check_real(self, "decay", at_least=0, below=1)
        check_real(self, "growth", above=1)

    def size(self, progress: Progress) -> int:
        last = progress.size or self.minimum
        scale = math.nan if progress.noise is None else progress.noise.scale
        if math.isnan(scale):
            return last
        wanted = max(last / self.growth, min(self.ratio * scale, last * self.growth))
        return round(max(self.minimum, min(wanted, self.maximum)))


@dataclass(frozen=True, kw_only=True)
class CommunicationShare(AccumulationPolicy):
    r"""So many batches that communication, where nothing hides it, takes at most a share of the time.

    .. math:: n = \Big\lceil \frac{(1 - s)\, t_c}{s\, t_b} \Big\rceil

    :math:`t_b` is the time of a batch and :math:`t_c` what a step adds until gradients are averaged. It needs batches
    without a step to tell one from the other: a window has at least two. Measured times differ from run to run, so a
    run that is resumed need not decide as one that was not interrupted.

    Args:
        share: :math:`s`. Default 0.1.
        maximum: of batches. Default 64.
        minimum: of batches, with which training begins. Default 2.
        every: windows that times are taken of, and from one decision to the next. Default 16.

    Raises:
        TypeError, ValueError: a number of the wrong kind or out of range.

    Source: the ratio of computation to communication, as for local steps in Stich, 2019, https://arxiv.org/abs/1805.09767

    >>> from lightning_async.rules.accumulation.protocol import Times
    >>> CommunicationShare(share=0.2).size(Progress(step=0, epoch=0, times=Times(batch_s=0.05, step_s=0.1)))
    8
    """

    share: float = 0.1
    maximum: int = 64
    minimum: int = 2
    every: int = 16

    unit = "batches"
    measures = "times"

    def __post_init__(self) -> None:
        check_real(self, "share", above=0, below=1)
        _check_range(self, at_least=2)
        check_int(self, "every", at_least=1)

    def size(self, progress: Progress) -> int:
        if progress.times is None or progress.times.batch_s <= 0:
            return progress.size or self.minimum
        batch_s, step_s = progress.times
        wanted = (1 - self.share) * max(step_s, 0.0) / (self.share * batch_s)
        return max(self.minimum, math.ceil(min(wanted - 1e-9, self.maximum)))


def _check_range(owner: NoiseScale | CommunicationShare, at_least: int) -> None:
    check_int(owner, "minimum", at_least=at_least)
    check_int(owner, "maximum", at_least=at_least)
    if owner.maximum < owner.minimum:
        raise ValueError(f"`{type(owner).__name__}(maximum={owner.maximum})` must be >= minimum={owner.minimum}.")


def _check_sizes(owner: object, sizes: object) -> None:
    shown = f"`{type(owner).__name__}({sizes!r})`"
    if not isinstance(sizes, Mapping) or not all(type(n) is int for pair in sizes.items() for n in pair):
        raise TypeError(f"{shown} must be a mapping of ints, such as {{0: 1, 100: 4}}.")
    if not sizes or min(sizes) < 0 or min(sizes.values()) < 1:
        raise ValueError(f"{shown} must have sizes >= 1, from epochs or steps >= 0 on.")


def _latest(sizes: Mapping[int, int], now: int) -> int:
    return sizes[begin] if (begin := max((each for each in sizes if each <= now), default=-1)) in sizes else 1
