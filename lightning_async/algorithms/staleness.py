"""Corrections of staleness, on a parameter server for each push, and on replicas for windows that are one step late.

A server's policy is a frozen dataclass that extends `StalenessPolicy`. The server calls it once for each push, with the
`PushFacts` that it has measured; the policy itself keeps no state. `register_policy` gives a policy a short name.
`make_policy` returns a policy by its name, by the optimizer that it suits, or by its description.

Replicas with a delay use a `GradientCorrection`, which changes the late gradient, or a `Prediction`, which predicts the
parameters for which gradients are computed. `DelayCompensation` is a policy and a `GradientCorrection`, and
`WeightPrediction` is a policy and a `Prediction`, so both can be used on a server and on replicas.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args, runtime_checkable

import torch
from torch import Tensor

from lightning_async._checks import check_choice, check_int, check_real

Form = Literal["exponential", "inverse", "sqrt", "linear"]


class PushFacts(NamedTuple):
    """The facts of a push that a server knows before it applies the push. Each server measures them for its own shard.

    Args:
        lag: Staleness: number of updates since the worker pulled the weights for which it computed the gradient.
        moved: Norm of the weights' change since that pull; 0 where ``lag`` is 0. Default 0.
        typical: Running mean of the norm of an update; 0 before the first update. Default 0.
        norm: Norm of the gradient. Default 0.
    """

    lag: int
    moved: float = 0.0
    typical: float = 0.0
    norm: float = 0.0


class Weight(NamedTuple):
    """The weight of a push.

    Args:
        rate: Factor of the learning rate of the update. Default 1.
        gradient: Factor of the gradient, before the optimizer sees it. Default 1.
    """

    rate: float = 1.0
    gradient: float = 1.0


class StalenessPolicy:
    """A base for policies by which a server treats stale pushes; this base applies every push unchanged.

    A policy of your own extends this class and overrides `weigh`. It must be a frozen dataclass in a module that the
    server's process can import, and its fields must be values that JSON can hold, or policies.
    """

    measures: frozenset[str] = frozenset()
    """The fields of `PushFacts` that must be measured: ``"moved"`` (with ``"typical"``) and ``"norm"``. With
    ``"moved"``, the server keeps the weights that each worker has pulled."""
    decay: float = 0.99  # decay of the running mean ``typical``
    adjusts: bool = False
    """Whether `adjust_` is called; then the server keeps the weights that each worker has pulled."""
    fields: tuple[str, ...] = ()  # names of tensors in the state of `adjust_`, zeros at first, in the parameters' size
    predicts: bool = False  # whether workers pull the result of `look_ahead_`
    momentum_by_worker: bool = False  # whether each worker has its own momentum, see `Dana`
    buffer_size: int = 1  # number of pushes that one update averages

    def weigh(self, late: PushFacts) -> Weight | None:
        """Return the weight of a push, or None to drop it."""
        return Weight()

    def adjust_(self, gradient: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        """Correct a gradient in place.

        The correction of an element must not depend on other elements, because a server may call this method for
        pieces of a gradient.

        Args:
            gradient: Gradient or a piece of it, flat and fp32.
            moved: Present parameters minus those for which the gradient was computed; may be overwritten.
            state: Tensors of `fields`, by name, to be updated in place.
        """

    def look_ahead_(self, before: Tensor, now: Tensor, late: float) -> None:
        """Overwrite ``before`` with predicted parameters, which workers then pull.

        Args:
            before: Parameters before the last update.
            now: Parameters after the last update.
            late: Running mean of the lag of pushes.
        """


@runtime_checkable
class GradientCorrection(Protocol):
    """An interface for corrections of gradients that are one step late: the parameters have changed since."""

    def correct_(self, gradient: Tensor, moved: Tensor) -> None:
        """Correct a late gradient in place.

        Args:
            gradient: Mean of all replicas' gradients, flat and fp32.
            moved: Present parameters minus those for which the gradient was computed; may be overwritten.
        """


@runtime_checkable
class Prediction(Protocol):
    """An interface for predictions of the parameters to which a gradient will be applied."""

    def predict_(self, before: Tensor, now: Tensor) -> None:
        """Overwrite ``before`` with a prediction of the parameter at the time when the gradient arrives.

        Args:
            before: Parameter before the last optimizer step, in its own dtype.
            now: The same parameter after that step.
        """


DelayCorrection: TypeAlias = GradientCorrection | Prediction


AUTO = "auto"
NAMES: dict[str, partial[StalenessPolicy]] = {}
"""The registered short names, each with a constructor of its policy."""
PolicyClass = TypeVar("PolicyClass", bound=type[StalenessPolicy])


def register_policy(name: str, *arguments: Any) -> Callable[[PolicyClass], PolicyClass]:
    """Register the decorated class under a short name, which is then valid for ``staleness=`` of the strategy.

    Args:
        name: Short name that no other class has. To define the same class again, as in a notebook, is allowed.
        *arguments: Arguments with which the class is called to make the policy of this name.

    Raises:
        TypeError: If the name is no str, or the decorated object is no class that extends `StalenessPolicy`.
        ValueError: If another policy has the name.

    >>> register_policy("auto")(NoCorrection)
    Traceback (most recent call last):
    ValueError: `register_policy('auto')` for NoCorrection: another policy has this name.
    """
    shown = f"`register_policy({name!r})`"
    if not isinstance(name, str) or not name:
        raise TypeError(f'{shown} must be given a name first: `@register_policy("name")`, above the class.')

    def register(cls: PolicyClass) -> PolicyClass:
        if not (isinstance(cls, type) and issubclass(cls, StalenessPolicy)):
            raise TypeError(f"{shown} must decorate a class that extends `StalenessPolicy`, got {cls!r}.")
        named = NAMES[name].func if name in NAMES else cls
        if name == AUTO or _place(named) != _place(cls):
            raise ValueError(f"{shown} for {cls.__qualname__}: another policy has this name.")
        NAMES[name] = partial(cls, *arguments)
        return cls

    return register


def _place(cls: Any) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


@register_policy("none")
@dataclass(frozen=True)
class NoCorrection(StalenessPolicy):
    r"""A policy that applies every push as it is.

    .. math:: x_{t+1} = \mathrm{Opt}(x_t,\; g(x_{t-\tau}))

    Source: Dean et al., "Large Scale Distributed Deep Networks", 2012; Recht et al., "Hogwild!", 2011,
    https://arxiv.org/abs/1106.5730

    >>> NoCorrection().weigh(PushFacts(lag=100))
    Weight(rate=1.0, gradient=1.0)
    """


UNCORRECTED = NoCorrection()


def _of_policy(name: str) -> Any:
    return property(lambda self: getattr(self.policy, name))


class PolicyWrapper(StalenessPolicy):
    """A base for policies that wrap another policy, ``policy``.

    A subclass takes each attribute and method that it does not override from the wrapped policy.
    """

    policy: StalenessPolicy

    measures = _of_policy("measures")
    decay = _of_policy("decay")
    adjusts = _of_policy("adjusts")
    fields = _of_policy("fields")
    predicts = _of_policy("predicts")
    momentum_by_worker = _of_policy("momentum_by_worker")
    buffer_size = _of_policy("buffer_size")

    def __post_init__(self) -> None:
        if not isinstance(self.policy, StalenessPolicy):
            raise TypeError(f"`{type(self).__name__}(policy={self.policy!r})` must be a staleness policy.")

    def weigh(self, late: PushFacts) -> Weight | None:
        return self.policy.weigh(late)

    def adjust_(self, gradient: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        self.policy.adjust_(gradient, moved, state)

    def look_ahead_(self, before: Tensor, now: Tensor, late: float) -> None:
        self.policy.look_ahead_(before, now, late)


@register_policy("adaptive_lr")
@dataclass(frozen=True)
class AdaptiveLr(StalenessPolicy):
    r"""A policy whose learning rate falls with the lag of a push.

    .. math::
        \eta_\tau = \eta \cdot \begin{cases}
            f^{\tau} & \text{exponential} \\
            1 / \max(1, \tau) & \text{inverse} \\
            1 / \sqrt{1 + \tau} & \text{sqrt} \\
            1 / (1 + f\, \tau) & \text{linear}
        \end{cases}

    Args:
        factor: :math:`f`. Default: 0.9 for the exponential form, 0.1 for the linear form; the other forms have none.
        form: Form of the equation above. Default: ``"exponential"``.

    Raises:
        TypeError: If ``factor`` is not a number.
        ValueError: If ``factor`` is not in (0, 1], the form takes no factor, or there is no such form.

    Source: Chan and Lane, "Distributed Asynchronous Optimization of Convolutional Neural Networks", 2014 (exponential);
    Zhang et al., "Staleness-aware Async-SGD", 2016, https://arxiv.org/abs/1511.05950 (inverse); Nguyen et al.,
    "FedBuff", 2022, https://arxiv.org/abs/2106.06639 (sqrt); Xie et al., "Asynchronous Federated Optimization", 2019,
    https://arxiv.org/abs/1903.03934 (linear)

    >>> AdaptiveLr(0.5).weigh(PushFacts(lag=2)).rate, AdaptiveLr(form="sqrt").weigh(PushFacts(lag=3)).rate
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

    def weigh(self, late: PushFacts) -> Weight:
        if self.form == "exponential":
            return Weight(rate=(0.9 if self.factor is None else self.factor) ** late.lag)
        if self.form == "inverse":
            return Weight(rate=1 / max(1, late.lag))
        if self.form == "sqrt":
            return Weight(rate=1 / math.sqrt(1 + late.lag))
        return Weight(rate=1 / (1 + (0.1 if self.factor is None else self.factor) * late.lag))


@register_policy("bounded", 16)
@dataclass(frozen=True)
class Bounded(StalenessPolicy):
    r"""A policy that drops a push whose lag reaches a bound; its worker goes on from the newest weights.

    .. math:: x_{t+1} = \begin{cases} \mathrm{Opt}(x_t,\; g) & \tau < R \\ x_t & \text{else} \end{cases}

    To bound staleness without dropped pushes, use the strategy with ``mode="ssp"``, in which workers wait instead.
    Between two pushes of one worker, there is about one push of each other worker, so a bound below the number of
    workers drops many pushes.

    Args:
        max_staleness: :math:`R`, lag from which a push is dropped, in updates.

    Raises:
        TypeError: If ``max_staleness`` is no int.
        ValueError: If ``max_staleness`` is less than 1.

    Source: Maranjyan et al., "Ringmaster ASGD", 2025, https://arxiv.org/abs/2501.16168

    >>> Bounded(2).weigh(PushFacts(lag=1)), Bounded(2).weigh(PushFacts(lag=2))
    (Weight(rate=1.0, gradient=1.0), None)
    """

    max_staleness: int

    def __post_init__(self) -> None:
        check_int(self, "max_staleness", at_least=1)

    def weigh(self, late: PushFacts) -> Weight | None:
        return Weight() if late.lag < self.max_staleness else None


@register_policy("fedbuff", 10, AdaptiveLr(form="sqrt"))
@register_policy("rennala", 10, Bounded(1))
@dataclass(frozen=True)
class Buffered(PolicyWrapper):
    r"""A policy whose updates are means of several pushes, of any workers.

    .. math:: x_{t+1} = \mathrm{Opt}\Big(x_t,\; \frac{1}{K} \sum_{k=1}^{K} w_k\, g_k\Big)

    ``Buffered(K, AdaptiveLr(form="sqrt"))`` is FedBuff. ``Buffered(K, Bounded(1))`` is Rennala SGD, which takes only
    gradients of the newest weights. The lag counts updates and not pushes, so it is :math:`K` times smaller.

    Args:
        buffer_size: :math:`K`, number of pushes in an update. Default: 10.
        policy: Policy that gives each push its weight, :math:`w`. Default: weight 1.

    Raises:
        TypeError: If ``buffer_size`` is no int, or ``policy`` is no policy.
        ValueError: If ``buffer_size`` is less than 1, or ``policy`` buffers pushes itself, keeps a momentum for each
            worker, or has other state.

    Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022,
    https://arxiv.org/abs/2106.06639; Tyurin and Richtárik, "Optimal Time Complexities of Parallel Stochastic
    Optimization Methods", 2023, https://arxiv.org/abs/2305.12387

    >>> Buffered(4).buffer_size
    4
    """

    buffer_size: int = 10  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    policy: StalenessPolicy = UNCORRECTED

    def __post_init__(self) -> None:
        check_int(self, "buffer_size", at_least=1)
        super().__post_init__()
        if self.policy.buffer_size > 1 or self.policy.momentum_by_worker or self.policy.fields:
            raise ValueError(
                f"`Buffered(policy={self.policy!r})` must be a policy that neither gathers pushes itself, nor gives "
                "each worker a momentum, nor has a state of its own."
            )


@register_policy("clipping")
@dataclass(frozen=True)
class Clipping(PolicyWrapper):
    r"""A policy that scales large gradients down to a given norm, because a late large gradient can do much harm.

    .. math:: w = w_{\text{policy}} \cdot \min(1,\; c / \lVert g \rVert)

    Each server clips its own shard of the gradient, so :math:`\lVert g \rVert` is the norm of the shard.

    Args:
        max_norm: :math:`c`, largest norm. Default: 1.
        policy: Policy that gives a push its weight :math:`w_{\text{policy}}`. Default: weight 1.

    Raises:
        TypeError: If ``max_norm`` is not a number, or ``policy`` is no policy.
        ValueError: If ``max_norm`` is not above 0.

    Source: Pascanu et al., "On the Difficulty of Training Recurrent Neural Networks", 2013,
    https://arxiv.org/abs/1211.5063

    >>> Clipping(0.5).weigh(PushFacts(lag=0, norm=2.0))
    Weight(rate=1.0, gradient=0.25)
    """

    max_norm: float = 1.0
    policy: StalenessPolicy = UNCORRECTED

    def __post_init__(self) -> None:
        check_real(self, "max_norm", above=0)
        super().__post_init__()

    @property
    def measures(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.measures | {"norm"}

    def weigh(self, late: PushFacts) -> Weight | None:
        weight = self.policy.weigh(late)
        if weight is None or late.norm <= self.max_norm:
            return weight
        return weight._replace(gradient=weight.gradient * self.max_norm / late.norm)


Scales = Literal["rate", "gradient"]


@register_policy("gap_aware")
@dataclass(frozen=True)
class GapAware(StalenessPolicy):
    r"""A policy that gives a push less weight the farther the weights have moved since its worker pulled them.

    .. math::
        w = \frac{1}{1 + \lVert x_t - x_{t-\tau} \rVert / C}, \qquad
        C \leftarrow d\, C + (1 - d) \lVert x_{t+1} - x_t \rVert

    Args:
        scales: What is multiplied by :math:`w`: ``"rate"`` for the learning rate of the update, or ``"gradient"`` for
            the gradient, as in the paper. The latter helps only with optimizers whose steps are proportional to the
            gradient, which Adam's are not. Default: ``"rate"``.
        decay: :math:`d`, decay of the running mean of an update's norm. Default: 0.99.

    Raises:
        TypeError: If ``decay`` is not a number.
        ValueError: If ``decay`` is not in [0, 1), or ``scales`` is neither of the two.

    Source: Barkai et al., "Gap-Aware Mitigation of Gradient Staleness", 2020, https://arxiv.org/abs/1909.10802

    >>> GapAware().weigh(PushFacts(lag=5, moved=0.75, typical=0.25))
    Weight(rate=0.25, gradient=1.0)
    """

    scales: Scales = "rate"
    decay: float = 0.99

    measures = frozenset({"moved"})

    def __post_init__(self) -> None:
        check_choice("GapAware", "scales", self.scales, get_args(Scales))
        check_real(self, "decay", at_least=0, below=1)

    def weigh(self, late: PushFacts) -> Weight:
        near = late.lag == 0 or late.moved == 0 or late.typical == 0
        weight = 1.0 if near else 1 / (1 + late.moved / late.typical)
        return Weight(rate=weight) if self.scales == "rate" else Weight(gradient=weight)


@register_policy("dana")
@register_policy("dana_gap_aware", GapAware("gradient"))
@dataclass(frozen=True)
class Dana(PolicyWrapper):
    r"""A policy that keeps a momentum for each worker, and lets workers pull weights predicted by all momenta.

    .. math::
        v_i &\leftarrow \mu\, v_i + w\, g_i, \qquad x \leftarrow x - \eta\, v_i \\
        \hat x &= x - \eta \mu \sum_j v_j

    Worker :math:`i` pulls :math:`\hat x`, which is about where the weights will be when its gradient arrives. With one
    worker, this is SGD with Nesterov's momentum. The policy is for SGD with momentum; :math:`\mu` is the optimizer's
    ``momentum``. It takes as much memory as two copies of the parameters for each worker.

    Args:
        policy: Policy that gives a push its weight, :math:`w`. Default: weight 1. With ``GapAware("gradient")``, this
            is DANA with gap-awareness.

    Raises:
        TypeError: If ``policy`` is no policy.
        ValueError: If ``policy`` predicts weights itself, or averages several pushes in one update.

    Source: Hakimi et al., "Taming Momentum in a Distributed Asynchronous Environment", 2019,
    https://arxiv.org/abs/1907.11612

    >>> Dana(GapAware("gradient")).measures
    frozenset({'moved'})
    """

    policy: StalenessPolicy = UNCORRECTED

    momentum_by_worker = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy.momentum_by_worker or self.policy.predicts or self.policy.buffer_size > 1:
            raise ValueError(
                f"`Dana(policy={self.policy!r})` must be a policy that neither looks ahead itself nor gathers pushes."
            )


@register_policy("delay_compensation")
@dataclass(frozen=True)
class DelayCompensation(StalenessPolicy, GradientCorrection):
    r"""A first-order Taylor correction of a late gradient, with the gradient's square in place of the Hessian.

    .. math:: g \leftarrow g + \lambda\, g \odot g \odot (x_{\text{now}} - x_{\text{then}})

    Args:
        strength: :math:`\lambda`, factor of the correction. Default 0.04, the constant value in the paper.

    Raises:
        TypeError: If ``strength`` is not a number.
        ValueError: If ``strength`` is negative or not finite.

    Source: DC-ASGD (Zheng et al., ICML 2017), https://arxiv.org/abs/1609.08326

    >>> gradient = torch.tensor([2.0, -1.0])
    >>> DelayCompensation(0.5).correct_(gradient, torch.tensor([1.0, 3.0]))
    >>> gradient
    tensor([4.0000, 0.5000])
    """

    strength: float = 0.04

    adjusts = True

    def __post_init__(self) -> None:
        check_real(self, "strength", at_least=0)

    @torch.no_grad()
    def correct_(self, gradient: Tensor, moved: Tensor) -> None:
        gradient.add_(moved.mul_(gradient).mul_(gradient), alpha=self.strength)

    def adjust_(self, gradient: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        self.correct_(gradient, moved)


@register_policy("adaptive_delay_compensation")
@dataclass(frozen=True)
class AdaptiveDelayCompensation(StalenessPolicy):
    r"""A `DelayCompensation` with a strength for each element, which is smaller where gradients are larger.

    .. math::
        s &\leftarrow m\, s + (1 - m)\, g \odot g, \qquad \lambda = \lambda_0 / \sqrt{s + \epsilon} \\
        g &\leftarrow g + \lambda \odot g \odot g \odot (x_{\text{now}} - x_{\text{then}})

    Args:
        strength: :math:`\lambda_0`. Default 2.0, as in the paper.
        decay_square: :math:`m`, decay of the mean square of gradients. Default 0.95.
        eps: :math:`\epsilon`. Default 1e-7.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is negative or not finite, ``decay_square`` is not below 1, or ``eps`` is 0.

    Source: DC-ASGD-a (Zheng et al., ICML 2017), https://arxiv.org/abs/1609.08326

    >>> gradient, state = torch.tensor([2.0]), {"mean_square": torch.zeros(1)}
    >>> AdaptiveDelayCompensation(1.0, decay_square=0.0).adjust_(gradient, torch.tensor([0.5]), state)
    >>> gradient
    tensor([3.])
    """

    strength: float = 2.0
    decay_square: float = 0.95
    eps: float = 1e-7

    adjusts = True
    fields = ("mean_square",)

    def __post_init__(self) -> None:
        check_real(self, "strength", at_least=0)
        check_real(self, "decay_square", at_least=0, below=1)
        check_real(self, "eps", above=0)

    @torch.no_grad()
    def adjust_(self, gradient: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        square = state["mean_square"]
        square.mul_(self.decay_square).addcmul_(gradient, gradient, value=1 - self.decay_square)
        moved.mul_(gradient).mul_(gradient).div_((square + self.eps).sqrt_())
        gradient.add_(moved, alpha=self.strength)


@register_policy("weight_prediction")
@dataclass(frozen=True)
class WeightPrediction(StalenessPolicy, Prediction):
    r"""A prediction of the parameters to which a late gradient will be applied, by repeating the last step.

    .. math:: \hat x = x_t + s\,\tau\,(x_t - x_{t-1})

    The last step :math:`x_t - x_{t-1}` is that of the optimizer: :math:`-\eta v` with momentum, as in SpecTrain, and
    :math:`-\eta\, \hat m / (\sqrt{\hat v} + \epsilon)` with Adam, as in XPipe, with weight decay. :math:`\tau` is the
    number of steps by which a gradient is late: 1 for windows of gradients, and the running mean of the lag on a
    parameter server.

    Args:
        steps: :math:`s`, number of predicted steps for each step by which a gradient is late. Default 1.0.

    Raises:
        TypeError: If ``steps`` is not a number.
        ValueError: If ``steps`` is negative or not finite.

    Source: SpecTrain (Chen et al., 2018), https://arxiv.org/abs/1809.02839, and XPipe (Guan et al., 2019),
    https://arxiv.org/abs/1911.04610

    >>> there = torch.tensor([1.0, 2.0])
    >>> WeightPrediction(2.0).predict_(there, torch.tensor([1.5, 1.0]))
    >>> there
    tensor([ 2.5000, -1.0000])
    """

    steps: float = 1.0

    predicts = True

    def __post_init__(self) -> None:
        check_real(self, "steps", at_least=0)

    def predict_(self, before: Tensor, now: Tensor) -> None:
        self.look_ahead_(before, now, 1.0)

    @torch.no_grad()
    def look_ahead_(self, before: Tensor, now: Tensor, late: float) -> None:
        torch.sub(now, before, out=before)
        torch.add(now, before, alpha=self.steps * late, out=before)


def auto(optimizer: str, arguments: Mapping[str, Any] | None = None) -> StalenessPolicy:
    """Return the policy that suits an optimizer: gap-aware DANA for SGD with momentum, gap-aware rates for all others.

    Args:
        optimizer: Name of the optimizer's class, or ``"delta"`` for a server that adds pushes to the weights.
        arguments: Arguments of the optimizer's constructor. Default: None, none are known.

    >>> auto("SGD", {"lr": 0.1, "momentum": 0.9})
    Dana(policy=GapAware(scales='gradient', decay=0.99))
    >>> auto("Adam")
    GapAware(scales='rate', decay=0.99)
    """
    given = arguments or {}
    if optimizer == "SGD" and given.get("momentum") and not given.get("dampening"):
        return Dana(GapAware("gradient"))
    return GapAware("rate")


def momentum_warning(policy: StalenessPolicy, optimizer: str, arguments: Mapping[str, Any] | None = None) -> str | None:
    """Return a warning if an optimizer has momentum and the policy does not correct staleness; otherwise None.

    Args:
        policy: Policy of the server.
        optimizer: Name of the optimizer's class.
        arguments: Arguments of the optimizer's constructor. Default: None, none are known.

    >>> momentum_warning(NoCorrection(), "SGD", {"momentum": 0.9})
    "`SGD(momentum=0.9)` with `staleness='none'`: ..."
    """
    momentum = (arguments or {}).get("momentum")
    if not momentum or type(policy) is not NoCorrection:
        return None
    return (
        f"`{optimizer}(momentum={momentum!r})` with `staleness='none'`: late gradients go on in the momentum, so that "
        "training with several workers is slower, or diverges. Take `staleness='auto'`, or no momentum."
    )


def make_policy(
    policy: str | StalenessPolicy | Mapping[str, Any],
    optimizer: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> StalenessPolicy:
    """Return a policy by its short name, or from its description.

    If ``policy`` is a policy already, return it unchanged.

    Args:
        policy: A name in `NAMES`; ``"auto"`` for the policy that `auto` chooses for the optimizer; a policy; or a
            description that `described` has returned.
        optimizer: Name of the optimizer's class, needed for ``"auto"`` only. Default: None.
        arguments: Arguments of the optimizer's constructor, used for ``"auto"`` only. Default: None, none are known.

    Raises:
        ValueError: If no policy has this name.
        TypeError: If ``policy`` is none of these, or the policy's arguments are wrong.

    >>> make_policy("fedbuff").buffer_size
    10
    >>> make_policy(described(Dana(GapAware("gradient"))))
    Dana(policy=GapAware(scales='gradient', decay=0.99))
    """
    if isinstance(policy, StalenessPolicy):
        return policy
    if isinstance(policy, Mapping) and {"policy", "arguments"} <= policy.keys():
        return _from_description(policy)
    if not isinstance(policy, str):
        raise TypeError(f"`staleness={policy!r}` must be a name, or a policy that extends `StalenessPolicy`.")
    if policy == AUTO and optimizer is not None:
        return auto(optimizer, arguments)
    if policy not in NAMES:
        raise ValueError(
            f"`staleness={policy!r}` must be a policy, or one of {(AUTO, *NAMES)}. A name of your own is known once "
            "the module that registers it is imported, on every rank."
        )
    registered = NAMES[policy]
    try:
        return registered()
    except TypeError as error:
        raise TypeError(
            f"`staleness={policy!r}` is {registered.func.__qualname__} with the arguments {registered.args} of "
            f"`register_policy`: {error}"
        ) from error


def described(policy: StalenessPolicy) -> dict[str, Any]:
    """Describe a policy by values that JSON can hold: its class and its arguments.

    Raises:
        TypeError: If another process could not make an equal policy from the description.

    >>> described(Bounded(8))
    {'policy': 'Bounded', 'arguments': {'max_staleness': 8}}
    """
    cls = type(policy)
    name = cls.__qualname__ if cls.__module__ == __name__ else f"{cls.__module__}:{cls.__qualname__}"
    if not is_dataclass(policy) or cls.__module__ == "__main__" or "<locals>" in name:
        raise TypeError(
            f"`staleness={policy!r}` must be a frozen dataclass of a module that a server's process can import, which "
            f"{cls.__module__}:{cls.__qualname__} is not."
        )
    given = {field.name: getattr(policy, field.name) for field in fields(policy)}
    plain = {key: described(each) if isinstance(each, StalenessPolicy) else each for key, each in given.items()}
    try:
        description = {"policy": name, "arguments": json.loads(json.dumps(plain))}
        same = _from_description(description) == policy
    except (TypeError, ValueError) as error:
        raise TypeError(f"`staleness={policy!r}` has arguments that JSON does not hold: {error}.") from error
    if not same:
        raise TypeError(f"`staleness={policy!r}` is not what it was when made of its arguments in JSON's terms.")
    return description


def _from_description(description: Mapping[str, Any]) -> StalenessPolicy:
    name = description["policy"]
    given = description["arguments"]
    module, _, path = str(name).rpartition(":")
    try:
        cls: Any = reduce(getattr, path.split("."), importlib.import_module(module or __name__))
    except (ImportError, AttributeError) as error:
        known = sorted({each.func.__qualname__ for each in NAMES.values()})
        raise ValueError(
            f"the policy of a description must be one of {known}, or 'module:class' of a module that can be imported, "
            f"got {name!r}: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, StalenessPolicy)):
        raise TypeError(f"{name} is no class that extends `StalenessPolicy`.")
    described_ = {key: isinstance(each, Mapping) and "policy" in each for key, each in given.items()}
    return cls(**{key: _from_description(each) if described_[key] else each for key, each in given.items()})
