"""How much is accumulated before a step: by epoch, by step, by the noise of gradients, by the share of communication.

An `AccumulationPolicy` says how large a window is, and `lr_factor` how the learning rate follows. `Noise` is the noise
scale of gradients: how large a batch may be before more samples add little. `BalancedWindows` and `batch_sizes` give
each replica as much work as it can do in the time of the others.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from lightning_async._checks import check_int, check_real

LrScaling = Literal["linear", "sqrt"]


def lr_factor(scaling: LrScaling | None, samples: float, base: float) -> float:
    r"""Return the factor of the learning rate, by the samples behind a step.

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


def estimate(small: float, big: float, small_size: float, big_size: float) -> tuple[float, float]:
    r"""Estimate, without bias, the gradient's squared length and its noise, from two sizes of batches.

    .. math::
        |G|^2 &= \frac{B_b |G_b|^2 - B_s |G_s|^2}{B_b - B_s} \\
        S &= \frac{|G_s|^2 - |G_b|^2}{1 / B_s - 1 / B_b}

    Args:
        small: :math:`|G_s|^2`, the squared norm of a gradient over :math:`B_s` samples (a mean over several such).
        big: :math:`|G_b|^2`, the same over :math:`B_b` samples.
        small_size: :math:`B_s`.
        big_size: :math:`B_b`, larger.

    Returns:
        :math:`|G|^2` and :math:`S`, the trace of the covariance of one sample's gradient. Either may be negative.

    Raises:
        ValueError: the sizes are not in this order.

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
    r"""The noise scale, of estimates that are smoothed each by itself.

    .. math:: B_\text{simple} = \frac{\bar S}{\overline{|G|^2}}

    The mean of a ratio is biased, the ratio of means much less: so :math:`S` and :math:`|G|^2` are averaged, both with
    the same weights.

    Source: as of `estimate`.

    >>> Noise().add(estimate(5.0, 2.0, 2, 8), decay=0.9).scale
    8.0
    """

    square: float = 0.0  # the mean of :math:`|G|^2`
    trace: float = 0.0  # the mean of :math:`S`
    weight: float = 0.0  # of the values in these means, 0 where there are none

    def add(self, estimated: tuple[float, float], decay: float) -> Noise:
        """Add one more estimate, see `estimate`; one that is not finite changes nothing."""
        if not all(map(math.isfinite, estimated)):
            return self
        weight = decay * self.weight + 1 - decay
        share = (1 - decay) / weight
        square, trace = estimated
        return Noise(self.square + share * (square - self.square), self.trace + share * (trace - self.trace), weight)

    @property
    def scale(self) -> float:
        """In samples: 0 where no noise is to be seen, infinite where nothing else is; NaN while unknown."""
        if self.weight == 0 or (self.square <= 0 and self.trace <= 0):
            return math.nan
        if self.trace <= 0:
            return 0.0
        return self.trace / self.square if self.square > 0 else math.inf


Unit = Literal["batches", "samples", "any"]
Measured = Literal["nothing", "noise", "times"]


class Times(NamedTuple):
    """The times of batches in recent windows."""

    batch_s: float  # seconds of a batch up to the end of its backward pass, without a step
    step_s: float  # seconds that the last batch of a window takes more, for communication that nothing hides


class WindowProgress(NamedTuple):
    """The state of training when a window begins."""

    step: int  # optimizer steps taken
    epoch: int  # epochs completed
    size: int = 0  # of the last window as it was planned; 0 where there was none
    unit: float = 1.0  # samples in one unit of ``size``, over all ranks that share a step; 1.0 where it counts samples
    noise: Noise | None = None  # the noise of gradients; None while unknown
    times: Times | None = None  # None while unknown


@runtime_checkable
class AccumulationPolicy(Protocol):
    """A choice of the windows' sizes: a pure function of the state of training."""

    unit: Unit = "any"
    """The unit of `size`: "batches", "samples", or "any": that of the argument that the policy is given to."""
    measures: Measured = "nothing"  # what it needs to know
    every: int = 1  # windows from one decision to the next

    @abstractmethod
    def size(self, progress: WindowProgress) -> int:
        """Return the size of the window that begins, and of those up to the next decision."""
        ...


@dataclass(frozen=True)
class Fixed(AccumulationPolicy):
    """Always the same.

    Args:
        n: of what the argument counts that it is given to.

    Raises:
        TypeError, ValueError: it is no int, or less than 1.

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
    r"""Another size from some epochs on.

    .. math:: n = n_e, \quad e = \max \{e \in E : e \le \mathit{epoch}\}

    Args:
        sizes: by the epoch that each begins with; before the first one it is 1.

    Raises:
        TypeError: not a mapping of ints.
        ValueError: empty, an epoch is negative, or a size less than 1.

    Source: as Lightning's `GradientAccumulationScheduler`.

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
    r"""Another size from some optimizer steps on.

    .. math:: n = n_t, \quad t = \max \{t \in T : t \le \mathit{step}\}

    Args:
        sizes: by the step, counted from 0, that each begins with; before the first one it is 1.

    Raises:
        TypeError, ValueError: as of `ByEpoch`.

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
    r"""Windows of gradients in proportion to speed: a slow replica has fewer batches in each.

    .. math:: n_i = \operatorname{clip}\Big(\Big[\, N n\, \frac{v_i}{\sum_j v_j} \Big],\; n_{\min},\; n_{\max}\Big)

    :math:`v_i` are the batches per second of each of :math:`N` replicas, as measured of late. So all fill their windows
    at once, and a step has about as many batches as with equal ones; each sample counts the same in its mean.

    Args:
        batches: :math:`n`, in a window on average. Default 4.
        minimum: :math:`n_{\min}`, of batches in a window. Default 1.
        maximum: :math:`n_{\max}`. Default 64.

    Raises:
        TypeError, ValueError: an argument is not an int of at least 1, or the bounds leave no room for ``batches``.

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
        """Return the next window of the replica ``me``, in batches; ``batches``, while a speed is not known (0.0)."""
        if not all(speed > 0.0 for speed in speeds):
            return self.batches
        wanted = round(len(speeds) * self.batches * speeds[me] / sum(speeds))
        return min(max(wanted, self.minimum), self.maximum)


def batch_sizes(total: int, speeds: Sequence[float], minimum: int, most: Sequence[int]) -> list[int]:
    r"""Divide the samples of a step among the replicas, so that all take equally long.

    .. math:: n_i = \operatorname{clip}(\lambda v_i,\; n_{\min},\; m_i), \qquad \sum_i n_i = n

    Rounded to whole samples, of which the sum is exact, so that the last replica is done as soon as can be. Where the
    bounds leave no room for it, the sum is as near to ``total`` as they allow.

    Args:
        total: :math:`n`, samples of a step.
        speeds: :math:`v_i`, samples per second; 0.0 where one is not known: as fast as the others are on average.
        minimum: :math:`n_{\min}`.
        most: :math:`m_i`, at least ``minimum``.

    >>> batch_sizes(128, [3.0, 3.0, 3.0, 1.0], 1, [128] * 4), batch_sizes(128, [3.0, 3.0, 3.0, 1.0], 1, [36] * 4)
    ([39, 39, 38, 12], [36, 36, 36, 20])
    """
    known = [speed for speed in speeds if speed > 0.0]
    usual = sum(known) / len(known) if known else 1.0
    weights = [Fraction(speed if speed > 0.0 else usual) for speed in speeds]
    total = min(max(total, minimum * len(most)), sum(most))
    fixed: dict[int, int] = {}
    while len(fixed) < len(most):
        free = [i for i in range(len(most)) if i not in fixed]
        share = (total - sum(fixed.values())) / sum(weights[i] for i in free)
        over = {i: most[i] for i in free if share * weights[i] > most[i]}
        under = {i: minimum for i in free if share * weights[i] < minimum}
        if not over and not under:
            break
        too_much = sum(share * weights[i] - bound for i, bound in over.items())
        too_little = sum(bound - share * weights[i] for i, bound in under.items())
        fixed |= over if too_much >= too_little else under
    free = [i for i in range(len(most)) if i not in fixed]
    rest = total - sum(fixed.values())
    quotas = {i: rest * weights[i] / sum(weights[j] for j in free) for i in free}
    whole = {i: int(quota) for i, quota in quotas.items()}
    for _ in range(rest - sum(whole.values())):
        soonest = min((i for i in free if whole[i] < most[i]), key=lambda i: ((whole[i] + 1) / weights[i], i))
        whole[soonest] += 1
    return [fixed[i] if i in fixed else whole[i] for i in range(len(most))]
