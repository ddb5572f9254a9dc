"""Sizes of windows and batches: how many samples a step takes, and how the learning rate follows from that.

An `AccumulationPolicy` sets the size of a window of gradients: by epoch, by step, by the noise of gradients, or by the
share of time that communication takes. `lr_factor` scales the learning rate. `Noise` is the noise scale of gradients,
the batch size beyond which more samples add little. `BalancedWindows` and `batch_sizes` give each replica the amount of
work that it can do in the same time as the others.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from lightning_async._checks import check_int, check_real

LrScaling = Literal["linear", "sqrt"]


def lr_factor(scaling: LrScaling | None, samples: float, base: float) -> float:
    r"""Return the factor of the learning rate for a step with ``samples`` samples.

    .. math:: \frac{n}{n_0} \text{ (linear)}, \qquad \sqrt{\frac{n}{n_0}} \text{ (sqrt)}, \qquad 1 \text{ (None)}

    Linear scaling is for SGD: the gradient of each sample counts as much as without accumulation. The square root is
    for optimizers that divide by the gradients' size, such as Adam.

    Args:
        scaling: Kind of scaling. None: the factor is 1.
        samples: :math:`n`, number of samples in this step.
        base: :math:`n_0`, number of samples in a step for which the learning rate was chosen.

    Source: Goyal et al., 2017, https://arxiv.org/abs/1706.02677 (linear); Malladi et al., 2022,
    https://arxiv.org/abs/2205.10287 (the square root, for Adam)

    >>> lr_factor("linear", 128, 32), lr_factor("sqrt", 128, 32), lr_factor(None, 128, 32)
    (4.0, 2.0, 1.0)
    """
    ratio = samples / base
    return {"linear": ratio, "sqrt": math.sqrt(ratio), None: 1.0}[scaling]


def estimate(small: float, big: float, small_size: float, big_size: float) -> tuple[float, float]:
    r"""Estimate the gradient's squared norm and its noise, without bias, from batches of two sizes.

    .. math::
        |G|^2 &= \frac{B_b |G_b|^2 - B_s |G_s|^2}{B_b - B_s} \\
        S &= \frac{|G_s|^2 - |G_b|^2}{1 / B_s - 1 / B_b}

    Args:
        small: :math:`|G_s|^2`, squared norm of a gradient over :math:`B_s` samples (or the mean of several such norms).
        big: :math:`|G_b|^2`, squared norm of a gradient over :math:`B_b` samples.
        small_size: :math:`B_s`, number of samples in a small batch.
        big_size: :math:`B_b`, number of samples in a large batch.

    Returns:
        :math:`|G|^2` and :math:`S`, the trace of the covariance of one sample's gradient. Either may be negative.

    Raises:
        ValueError: If the sizes are not positive and ascending.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1,
    https://arxiv.org/abs/1812.06162

    >>> estimate(small=1.0 + 8.0 / 2, big=1.0 + 8.0 / 8, small_size=2, big_size=8)
    (1.0, 8.0)
    """
    if not 0 < small_size < big_size:
        raise ValueError(
            f"`estimate(small_size={small_size!r}, big_size={big_size!r})` must be positive and ascending."
        )
    square = (big_size * big - small_size * small) / (big_size - small_size)
    return square, (small - big) / (1 / small_size - 1 / big_size)


class Noise(NamedTuple):
    r"""The gradient noise scale, as the ratio of two running means.

    .. math:: B_\text{simple} = \frac{\bar S}{\overline{|G|^2}}

    The mean of a ratio is biased, and the ratio of means is much less so. Therefore :math:`S` and :math:`|G|^2` are
    averaged separately, with the same weights.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, https://arxiv.org/abs/1812.06162

    >>> Noise().add(estimate(5.0, 2.0, 2, 8), decay=0.9).scale
    8.0
    """

    square: float = 0.0  # the mean of :math:`|G|^2`
    trace: float = 0.0  # the mean of :math:`S`
    weight: float = 0.0  # total weight of the values in these means; 0 for none

    def add(self, estimated: tuple[float, float], decay: float) -> Noise:
        """Return the noise with one more result of `estimate`, which is ignored if it is not finite."""
        if not all(map(math.isfinite, estimated)):
            return self
        weight = decay * self.weight + 1 - decay
        share = (1 - decay) / weight
        square, trace = estimated
        return Noise(self.square + share * (square - self.square), self.trace + share * (trace - self.trace), weight)

    @property
    def scale(self) -> float:
        """The noise scale in samples: 0 without noise, infinite if there is only noise, NaN while it is unknown."""
        if self.weight == 0 or (self.square <= 0 and self.trace <= 0):
            return math.nan
        if self.trace <= 0:
            return 0.0
        return self.trace / self.square if self.square > 0 else math.inf


Unit = Literal["batches", "samples", "any"]
Measured = Literal["nothing", "noise", "times"]


class Times(NamedTuple):
    """The times of a batch and of a step, as measured in recent windows."""

    batch_s: float  # seconds of a batch until the end of its backward pass
    step_s: float  # extra seconds of a window's last batch, for communication that is not hidden


class WindowProgress(NamedTuple):
    """The state of training when a window begins."""

    step: int  # number of optimizer steps taken
    epoch: int  # number of completed epochs
    size: int = 0  # planned size of the last window; 0 before the first one
    unit: float = 1.0  # samples in one unit of ``size`` over all ranks; 1.0 where the unit is samples
    noise: Noise | None = None  # the noise of gradients; None while unknown
    times: Times | None = None  # None while unknown


@runtime_checkable
class AccumulationPolicy(Protocol):
    """An interface for policies that choose how many batches are accumulated before a step (the size of a window).

    A policy is a pure function of the state of training.
    """

    unit: Unit = "any"
    """The unit of `size`: "batches", "samples", or "any" for the unit of the argument to which it is passed."""
    measures: Measured = "nothing"  # what must be measured for the policy
    every: int = 1  # number of windows from one decision to the next

    @abstractmethod
    def size(self, progress: WindowProgress) -> int:
        """Return the size of the window that begins now, in the unit that `unit` names.

        The size is used for all windows until the next call, `every` windows later.
        """
        ...


@dataclass(frozen=True)
class Fixed(AccumulationPolicy):
    """A policy whose windows all have the same size.

    Args:
        n: Size of each window, in batches or samples; the unit is that of the argument to which the policy is passed.

    Raises:
        TypeError: If ``n`` is no int.
        ValueError: If ``n`` is less than 1.

    >>> Fixed(4).size(WindowProgress(step=9, epoch=1))
    4
    """

    n: int

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def size(self, progress: WindowProgress) -> int:
        return self.n


@dataclass(frozen=True)
class ByEpoch(AccumulationPolicy):
    r"""A policy whose size changes at given epochs.

    .. math:: n = n_e, \quad e = \max \{e \in E : e \le \mathit{epoch}\}

    Args:
        sizes: Mapping from an epoch to the size that applies from this epoch on. Before the first of these epochs, the
            size is 1.

    Raises:
        TypeError: If ``sizes`` is not a mapping of ints.
        ValueError: If ``sizes`` is empty, an epoch is negative, or a size is less than 1.

    Source: Lightning's `GradientAccumulationScheduler`, https://lightning.ai/docs

    >>> [ByEpoch({0: 1, 4: 8}).size(WindowProgress(step=0, epoch=epoch)) for epoch in (0, 3, 4, 9)]
    [1, 1, 8, 8]
    """

    sizes: Mapping[int, int]

    def __post_init__(self) -> None:
        _check_sizes(self, self.sizes)

    def size(self, progress: WindowProgress) -> int:
        return _latest(self.sizes, progress.epoch)


@dataclass(frozen=True)
class ByStep(AccumulationPolicy):
    r"""A policy whose size changes at given optimizer steps.

    .. math:: n = n_t, \quad t = \max \{t \in T : t \le \mathit{step}\}

    Args:
        sizes: Mapping from a step, counted from 0, to the size that applies from this step on. Before the first of
            these steps, the size is 1.

    Raises:
        TypeError: If ``sizes`` is not a mapping of ints.
        ValueError: If ``sizes`` is empty, a step is negative, or a size is less than 1.

    Source: batch sizes that grow in place of learning rates that fall: Smith et al., 2018,
    https://arxiv.org/abs/1711.00489

    >>> [ByStep({100: 2, 1000: 8}).size(WindowProgress(step=step, epoch=0)) for step in (99, 100, 1000)]
    [1, 2, 8]
    """

    sizes: Mapping[int, int]

    def __post_init__(self) -> None:
        _check_sizes(self, self.sizes)

    def size(self, progress: WindowProgress) -> int:
        return _latest(self.sizes, progress.step)


@dataclass(frozen=True, kw_only=True)
class NoiseScale(AccumulationPolicy):
    r"""A policy that takes as many samples per step as the noise of the gradients makes worthwhile.

    .. math:: n = \min\big(n_\text{max}, \max(n_\text{min}, r\, B_\text{simple})\big), \quad
        n_\text{last} / g \le n \le g\, n_\text{last}

    :math:`n_\text{last}` is the size that was chosen last, and :math:`B_\text{simple}` is the gradient noise scale, see
    `Noise`. With far fewer samples than this scale, a step with twice the samples is worth nearly two steps. With far
    more samples, it is worth hardly more than one step.

    Args:
        maximum: :math:`n_\text{max}`, largest number of samples.
        minimum: :math:`n_\text{min}`, smallest number of samples, with which training begins.
        ratio: :math:`r`, number of samples as a multiple of the noise scale. Default 1.
        decay: Decay of the running means in the noise scale. Default 0.9.
        growth: :math:`g`, largest factor by which one decision changes the size. Default 2.
        every: Number of windows from one decision to the next, over which the noise is estimated. Default 16.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, https://arxiv.org/abs/1812.06162

    >>> policy, now = NoiseScale(minimum=16, maximum=1024), WindowProgress(step=0, epoch=0, size=64)
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

    def size(self, progress: WindowProgress) -> int:
        last = progress.size or self.minimum
        scale = math.nan if progress.noise is None else progress.noise.scale
        if math.isnan(scale):
            return last
        wanted = max(last / self.growth, min(self.ratio * scale, last * self.growth))
        return round(max(self.minimum, min(wanted, self.maximum)))


@dataclass(frozen=True, kw_only=True)
class CommunicationShare(AccumulationPolicy):
    r"""A policy whose windows have so many batches that communication takes at most a given share of the time.

    .. math:: n = \Big\lceil \frac{(1 - s)\, t_c}{s\, t_b} \Big\rceil

    :math:`t_b` is the time of a batch. :math:`t_c` is the extra time that a window's last batch takes, until gradients
    are averaged. To measure both, a window needs at least one batch before its last one, so it has at least two.
    Measured times differ from run to run: a resumed run may choose other sizes than a run that was not interrupted.

    Args:
        share: :math:`s`, largest share of communication in the time. Default 0.1.
        maximum: Largest number of batches. Default 64.
        minimum: Smallest number of batches, with which training begins. Default 2.
        every: Number of windows from one decision to the next, over which the times are measured. Default 16.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Source: the ratio of computation to communication, as for local steps in Stich, 2019,
    https://arxiv.org/abs/1805.09767

    >>> CommunicationShare(share=0.2).size(WindowProgress(step=0, epoch=0, times=Times(batch_s=0.05, step_s=0.1)))
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

    def size(self, progress: WindowProgress) -> int:
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


@dataclass(frozen=True)
class BalancedWindows:
    r"""A policy whose window sizes are proportional to replicas' speeds: a slow replica's windows have fewer batches.

    .. math:: n_i = \operatorname{clip}\Big(\Big[\, N n\, \frac{v_i}{\sum_j v_j} \Big],\; n_{\min},\; n_{\max}\Big)

    :math:`v_i` are the recent batches per second of each of :math:`N` replicas. All replicas fill their windows in
    about the same time, and an optimizer step averages about as many batches as with equal windows. Every sample has
    the same weight in the mean gradient.

    Args:
        batches: :math:`n`, average number of batches in a window. Default 4.
        minimum: :math:`n_{\min}`, smallest number of batches in a window. Default 1.
        maximum: :math:`n_{\max}`, largest number of batches in a window. Default 64.

    Raises:
        TypeError: If an argument is no int.
        ValueError: If ``minimum`` is less than 1, or ``batches`` is not between ``minimum`` and ``maximum``.

    Source: dynamic local updates of Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024,
    https://arxiv.org/abs/2401.09135, for windows of gradients

    >>> BalancedWindows(4).size([3.0, 3.0, 3.0, 1.0], 0), BalancedWindows(4).size([3.0, 3.0, 3.0, 1.0], 3)
    (5, 2)
    """

    batches: int = 4
    minimum: int = 1
    maximum: int = 64

    def __post_init__(self) -> None:
        check_int(self, "minimum", at_least=1)
        check_int(self, "batches", at_least=self.minimum)
        check_int(self, "maximum", at_least=self.batches)

    def size(self, speeds: Sequence[float], me: int) -> int:
        """Return the number of batches in the next window of replica ``me``.

        ``speeds`` are the batches per second of all replicas. While one of them is unknown (0.0), return ``batches``.
        """
        if not all(speed > 0.0 for speed in speeds):
            return self.batches
        wanted = round(len(speeds) * self.batches * speeds[me] / sum(speeds))
        return min(max(wanted, self.minimum), self.maximum)
