"""Averaging rules with an outer optimizer, whose gradient is the replicas' mean progress since the last round."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async._checks import check_bool, check_protocol, check_real
from lightning_async.algorithms.averaging import AveragingRule, Round, RuleBase, RuleWrapper, copy_saved_
from lightning_async.flat import FlatLayout

_OUTER_LR = 0.7
_OUTER_MOMENTUM = 0.9
_NESTEROV = True


class DiLoCoState(NamedTuple):
    """The state of `DiLoCo` between rounds: the anchor, and the outer momentum or the outer optimizer."""

    anchor: Tensor  # the last agreed parameters, flat fp32
    momentum: Tensor  # the outer momentum, flat fp32; empty with an ``outer_optimizer``
    optimizer: torch.optim.Optimizer | None = None  # built by ``outer_optimizer``, over views of ``anchor``


class DiLoCoBase(RuleBase[DiLoCoState]):
    """A base for rules that move the anchor by the equations of `DiLoCo`; a subclass defines `outer_settings`."""

    nesterov: bool = _NESTEROV
    sends_difference = True

    @abstractmethod
    def outer_settings(self, round: Round) -> tuple[float, float]:
        """Return the outer learning rate and the outer momentum of a round."""
        ...

    def init(self, params: Tensor, layout: FlatLayout) -> DiLoCoState:
        anchor = params.detach().clone()
        return DiLoCoState(anchor, torch.zeros_like(anchor))

    def message_(self, out: Tensor, state: DiLoCoState) -> tuple[float, ...]:
        torch.sub(state.anchor, out, out=out)
        return ()

    def merge_(self, sent: Tensor | None, received: Tensor, state: DiLoCoState, round: Round) -> DiLoCoState:
        lr, momentum = self.outer_settings(round)
        ops.outer_merge_(state.anchor, state.momentum, received, sent, lr, momentum, self.nesterov)
        return state

    def state_dict(self, state: DiLoCoState) -> dict[str, Any]:
        return {"anchor": state.anchor, "momentum": state.momentum}


@dataclass(frozen=True)
class DiLoCo(DiLoCoBase):
    r"""Distributed low-communication training: Nesterov's method on the mean pseudo-gradient of all replicas.

    .. math::
        g &= \sum_j w_j (a - s_j) \\
        m &\leftarrow \mu m + g \\
        a &\leftarrow a - \eta\, (g + \mu m) \text{ with nesterov, else } a - \eta\, m \\
        x_i &\leftarrow x_i + (a - s_i)

    :math:`a` is the anchor (the last agreed parameters). :math:`s_i` is the snapshot of replica :math:`i`, :math:`x_i`
    are its parameters, and :math:`w_i` is its share of the round's work. With :math:`\eta = 1, \mu = 0` this is local
    SGD. The rule is meant for many local steps per round: with 32 or fewer, plain averaging tends to do better than a
    momentum of 0.9.

    Args:
        outer_lr: :math:`\eta`, the outer learning rate. Default: 0.7.
        outer_momentum: :math:`\mu`, the outer momentum. Default: 0.9.
        nesterov: Whether outer steps use Nesterov's momentum, see the equations. Default: True.
        outer_optimizer: Function that builds a `torch.optim.Optimizer` for the anchor; the optimizer must step without
            a closure. The function gets one fp32 tensor for each parameter, in its shape, and must use all of them. A
            checkpoint restores the optimizer's options, too, as in torch. Default: None, the equations above.
        mixing: :math:`\alpha`, for a replica that has taken steps during the round: the merge is
            :math:`x_i \leftarrow \alpha\, x_i + (1 - \alpha)\, a` instead of the last equation. Replicas stay closer
            together, but each of them loses the part :math:`1 - \alpha` of these steps, and of the compression error
            of its message. With `TopK` the compression error is most of the progress, so the strategy refuses `TopK`
            together with ``mixing``. An absent replica keeps all of its steps, because it has sent no message with
            them. Default: None, all local progress is kept.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``outer_lr`` is not positive, ``outer_momentum`` or ``mixing`` is not in [0, 1), or one of the
            first three arguments is set together with ``outer_optimizer``, which would ignore it.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    https://arxiv.org/abs/2311.08105; ``mixing``: Douillard et al., "Streaming DiLoCo with overlapping communication",
    2025, https://arxiv.org/abs/2501.18512

    >>> rule = DiLoCo(outer_lr=0.5, outer_momentum=0.5)
    >>> params = torch.tensor([1.0])
    >>> state = rule.init(params, FlatLayout([params]))
    >>> sent = torch.tensor([0.5])  # one replica, whose local steps moved it from 1.0 to 0.5
    >>> _ = rule.message_(sent, state)
    >>> received = sent.clone()  # the mean over one replica
    >>> state = rule.merge_(sent, received, state, Round(id=0, rank=0, work=(1.0,)))
    >>> sent, received, state.momentum
    (tensor([0.5000]), tensor([0.6250]), tensor([0.5000]))
    """

    outer_lr: float = _OUTER_LR
    outer_momentum: float = _OUTER_MOMENTUM
    nesterov: bool = _NESTEROV
    outer_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    mixing: float | None = None

    @property
    def mixes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mixing is not None

    def __post_init__(self) -> None:
        check_real(self, "outer_lr", above=0)
        check_real(self, "outer_momentum", at_least=0, below=1)
        if self.mixing is not None:
            check_real(self, "mixing", at_least=0, below=1)
        check_bool("DiLoCo", "nesterov", self.nesterov)
        if self.outer_optimizer is None:
            return
        if not callable(self.outer_optimizer):
            raise TypeError(f"`DiLoCo(outer_optimizer={self.outer_optimizer!r})` must be callable or None.")
        defaults = {"outer_lr": _OUTER_LR, "outer_momentum": _OUTER_MOMENTUM, "nesterov": _NESTEROV}
        for argument, default in defaults.items():
            if getattr(self, argument) != default:
                raise ValueError(
                    f"`DiLoCo({argument}={getattr(self, argument)!r})` has no effect together with "
                    "`outer_optimizer`; set it there."
                )

    def outer_settings(self, round: Round) -> tuple[float, float]:
        return self.outer_lr, self.outer_momentum

    def init(self, params: Tensor, layout: FlatLayout) -> DiLoCoState:
        if self.outer_optimizer is None:
            return super().init(params, layout)
        anchor = params.detach().clone()
        shaped: list[Tensor] = [torch.nn.Parameter(view) for view in layout.views(anchor)]
        optimizer = self.outer_optimizer(list(shaped))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"`DiLoCo(outer_optimizer=...)` must build a torch optimizer, got {type(optimizer)}.")
        taken = {id(p) for p in _parameters(optimizer)}
        if taken != {id(p) for p in shaped}:
            missing = [name for name, p in zip(layout.names, shaped, strict=True) if id(p) not in taken]
            raise ValueError(
                "`DiLoCo(outer_optimizer=...)` must build an optimizer over exactly the tensors that it is given; "
                f"it holds {len(taken)} tensors and left out {missing}."
            )
        return DiLoCoState(anchor, anchor.new_empty(0), optimizer)

    def merge_(self, sent: Tensor | None, received: Tensor, state: DiLoCoState, round: Round) -> DiLoCoState:
        if state.optimizer is None:
            return super().merge_(sent, received, state, round)
        if sent is not None:
            torch.sub(state.anchor, sent, out=sent)
        _step(state.optimizer, state.anchor, received)
        received.copy_(state.anchor)
        return state

    def mix_(self, live: Tensor, base: Tensor, target: Tensor, state: DiLoCoState, round: Round) -> DiLoCoState:
        if self.mixing is None or round.is_absent():
            return super().mix_(live, base, target, state, round)
        live.lerp_(target, 1 - self.mixing)
        return state

    def state_dict(self, state: DiLoCoState) -> dict[str, Any]:
        if state.optimizer is None:
            return super().state_dict(state)
        return {"anchor": state.anchor, "optimizer": state.optimizer.state_dict()}

    def load_state_dict(self, state: DiLoCoState, saved: dict[str, Any]) -> DiLoCoState:
        if ("optimizer" in saved) != (state.optimizer is not None):
            which = "has" if "optimizer" in saved else "lacks"
            raise ValueError(f"The saved state of `DiLoCo` {which} a torch optimizer, unlike this `outer_optimizer`.")
        if state.optimizer is None:
            return super().load_state_dict(state, saved)
        copy_saved_(self, {"anchor": state.anchor}, {key: v for key, v in saved.items() if key != "optimizer"})
        # Torch keeps references to the tensors that it loads: with a copy, two states may load the same dict.
        state.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        return state


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _step(optimizer: torch.optim.Optimizer, anchor: Tensor, gradient: Tensor) -> None:
    parameters = _parameters(optimizer)
    for p in parameters:  # their order may be another one, but views know their place in the anchor
        start = p.storage_offset() - anchor.storage_offset()
        p.grad = gradient[start : start + p.numel()].view(p.shape)
    optimizer.step()
    for p in parameters:
        p.grad = None


class SlowMoState(NamedTuple):
    """The state of `SlowMo` between rounds: the anchor and the slow momentum."""

    anchor: Tensor  # the last agreed parameters, flat fp32
    momentum: Tensor  # in units of gradients, so that it does not depend on the learning rate


@dataclass(frozen=True)
class SlowMo(RuleBase[SlowMoState]):
    r"""Slow momentum: heavy-ball momentum on the mean progress, divided by the inner learning rate.

    .. math::
        u &\leftarrow \beta u + \frac{1}{\gamma} \sum_j w_j (a - s_j) \\
        a &\leftarrow a - \alpha \gamma u \\
        x_i &\leftarrow x_i + (a - s_i)

    :math:`a` is the anchor (the last agreed parameters). :math:`s_i` is the snapshot of replica :math:`i`, :math:`x_i`
    are its parameters, and :math:`w_i` is its share of the round's work. :math:`\gamma` is the inner learning rate. If
    it differs between replicas, which may be at different steps of a learning rate schedule, it is the largest. As the
    learning rate decays, momentum from earlier, larger steps decays with it. With a constant learning rate, this is
    `DiLoCo` without ``nesterov``. If :math:`\gamma` is 0 on all replicas, :math:`a` moves by :math:`\alpha` times the
    mean progress, without momentum; this is the limit of the equations.

    Args:
        beta: :math:`\beta`, the slow momentum. The authors used 0.2 with 4 replicas, 0.5 with 8 and 0.6 with 16.
            Default: 0.5.
        alpha: :math:`\alpha`, the slow learning rate. Default: 1.0.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If ``beta`` is not in [0, 1), or ``alpha`` is not positive.

    Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", ICLR 2020,
    https://arxiv.org/abs/1910.00643

    >>> rule = SlowMo(beta=0.5)
    >>> params = torch.tensor([1.0])
    >>> state = rule.init(params, FlatLayout([params]))
    >>> sent = torch.tensor([0.75])
    >>> _ = rule.message_(sent, state)
    >>> state = rule.merge_(sent, sent.clone(), state, Round(id=0, rank=0, work=(1.0,), lr=(0.5,)))
    >>> state
    SlowMoState(anchor=tensor([0.7500]), momentum=tensor([0.5000]))
    >>> rule.merge_(None, torch.zeros(1), state, Round(id=1, rank=0, work=(1.0,), lr=(0.25,)))
    SlowMoState(anchor=tensor([0.6875]), momentum=tensor([0.2500]))
    """

    beta: float = 0.5
    alpha: float = 1.0

    sends_difference = True

    def __post_init__(self) -> None:
        check_real(self, "beta", at_least=0, below=1)
        check_real(self, "alpha", above=0)

    def init(self, params: Tensor, layout: FlatLayout) -> SlowMoState:
        return SlowMoState(params.detach().clone(), torch.zeros_like(params))

    def message_(self, out: Tensor, state: SlowMoState) -> tuple[float, ...]:
        torch.sub(state.anchor, out, out=out)
        return ()

    def merge_(self, sent: Tensor | None, received: Tensor, state: SlowMoState, round: Round) -> SlowMoState:
        if sent is not None:
            torch.sub(state.anchor, sent, out=sent)
        lr = max(round.lr)
        state.momentum.mul_(self.beta)
        if lr > 0.0:
            state.momentum.add_(received, alpha=1 / lr)
            state.anchor.sub_(state.momentum, alpha=self.alpha * lr)
        else:
            state.anchor.sub_(received, alpha=self.alpha)
        received.copy_(state.anchor)
        return state


_KNOWN = 10  # number of norms after which the statistics of a replica are known


class PenaltyState(NamedTuple):
    """The state of `PseudoGradientPenalty` between rounds: the wrapped rule's state, and statistics of norms."""

    inner: Any  # the state of the wrapped rule
    norms: Tensor  # count, mean and variance of the norms of this replica's messages, in float64


@dataclass(frozen=True)
class PseudoGradientPenalty(RuleWrapper):
    r"""A wrapper that gives messages with a large norm less weight, and messages with an anomalous norm none.

    .. math::
        z_i &= \frac{G_i - \mu_i}{\sigma_i}, \qquad G_i = \lVert u_i \rVert \\
        w_i &\propto n_i\, e^{-G_i} \text{ where } z_i \le \delta, \text{ else } 0 \\
        \bar u &\leftarrow \bar u\, \min\Big(1, \frac{\varphi}{\lVert \bar u \rVert}\Big),
        \qquad \bar u = \sum_i w_i u_i

    :math:`u_i` is the message of replica :math:`i`, and :math:`n_i` is the weight that the wrapped rule gives it.
    :math:`\mu_i` and :math:`\sigma_i` are the running mean and standard deviation of the norms of that replica's
    messages. The first ten messages of a replica never count as anomalous. An anomalous norm enters these statistics
    as :math:`\mu_i + \delta \sigma_i`, so if the norms stay larger, they cease to be anomalous. If all messages of a
    round are anomalous, :math:`\bar u` is 0. A replica whose message has the weight 0 loses the local steps in this
    message: it takes over the others' model, and keeps only its steps since the snapshot.

    Args:
        rule: Wrapped rule, which must send differences, as `DiLoCo` does.
        threshold: :math:`\delta`, number of deviations from which a norm is anomalous. Default: 3.0.
        clip: :math:`\varphi`, largest norm of the mean message. Default: 10.0.
        decay: Weight of a new norm in the running statistics, once these hold more than 1 / ``decay`` norms. Default:
            0.02.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``rule`` sends no differences, sends scalars, makes no common model, or keeps a residual, if
            ``threshold`` or ``clip`` is not positive, or if ``decay`` is not in (0, 1).

    Source: Cheng et al., "EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models",
    ICLR 2025, https://arxiv.org/abs/2412.07210

    >>> rule = PseudoGradientPenalty(DiLoCo(), clip=1.0)
    >>> usual, large, anomalous = (0.1, 0.0), (0.8, 0.0), (0.1, 3.5)
    >>> weights = rule.weights(Round(id=0, rank=0, work=(1.0, 1.0, 1.0), scalars=(usual, large, anomalous)))
    >>> [round(weight, 2) for weight in weights]
    [0.67, 0.33, 0.0]
    """

    rule: AveragingRule
    threshold: float = 3.0
    clip: float = 10.0
    decay: float = 0.02

    num_scalars = 2  # the norm, and its distance from the mean in deviations

    def __post_init__(self) -> None:
        check_protocol("PseudoGradientPenalty", "rule", self.rule, AveragingRule, "an averaging rule such as DiLoCo()")
        check_real(self, "threshold", above=0)
        check_real(self, "clip", above=0)
        check_real(self, "decay", above=0, below=1)
        rule = self.rule
        if not rule.sends_difference or rule.num_scalars or not rule.absent_follow:
            raise ValueError(
                f"`PseudoGradientPenalty(rule={rule!r})` must send differences, and no scalars, and make replicas one "
                "model, such as DiLoCo()."
            )
        if rule.keeps_residual:
            raise ValueError(
                f"`PseudoGradientPenalty(rule={rule!r})` must keep no residual of compression: where all messages are "
                "anomalous it would count as sent what is in no model, and lose it. Take a rule such as DiLoCo()."
            )

    @property
    def per_replica(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rule.per_replica | {"norms"}

    def init(self, params: Tensor, layout: FlatLayout) -> PenaltyState:
        return PenaltyState(self.rule.init(params, layout), torch.zeros(3, dtype=torch.float64))

    def message_(self, out: Tensor, state: PenaltyState) -> tuple[float, ...]:
        self.rule.message_(out, state.inner)
        norm = math.sqrt(ops.sq_norm(out))
        count, mean, variance = state.norms.tolist()
        known = count >= _KNOWN and variance > 0.0
        return norm, (norm - mean) / math.sqrt(variance) if known else 0.0

    def weights(self, round: Round) -> tuple[float, ...]:
        weights = self.rule.weights(round)
        usual = self._usual(weights, round) or [rank for rank, weight in enumerate(weights) if weight > 0.0]
        least = min(round.scalars[rank][0] for rank in usual)
        shares = [0.0] * len(weights)
        for rank in usual:
            shares[rank] = weights[rank] * math.exp(least - round.scalars[rank][0])
        total = sum(shares)
        return tuple(share / total for share in shares)

    def _usual(self, weights: tuple[float, ...], round: Round) -> list[int]:
        """Return the ranks whose messages in the round are not anomalous and have a positive weight in ``weights``."""
        return [rank for rank, w in enumerate(weights) if w > 0.0 and round.scalars[rank][1] <= self.threshold]

    def merge_(self, sent: Tensor | None, received: Tensor, state: PenaltyState, round: Round) -> PenaltyState:
        if not self._usual(self.rule.weights(round), round):
            received.zero_()
        elif (norm := math.sqrt(ops.sq_norm(received))) > self.clip:
            received.mul_(self.clip / norm)
        if sent is not None:
            self._learn_(state.norms, round.scalars[round.rank][0])
        return super().merge_(sent, received, state, self._heard(round))

    def _heard(self, round: Round) -> Round:
        """Return the round as the wrapped rule sees it: the work and the steps of ranks with anomalous messages are 0.

        If all messages are anomalous, return the round unchanged.
        """
        usual = self._usual(self.rule.weights(round), round)
        if not usual:
            return round
        work, steps = (
            tuple(each if rank in usual else 0.0 for rank, each in enumerate(counts))
            for counts in (round.work, round.steps)
        )
        return round._replace(work=work, steps=steps)

    def _learn_(self, norms: Tensor, norm: float) -> None:
        count, mean, variance = norms.tolist()
        if count >= _KNOWN and variance > 0.0:
            norm = min(norm, mean + self.threshold * math.sqrt(variance))
        rate = max(self.decay, 1 / (count + 1))  # at first all norms count the same
        change = norm - mean
        learned = count + 1, mean + rate * change, (1 - rate) * (variance + rate * change**2)
        norms.copy_(torch.tensor(learned, dtype=torch.float64))

    def chosen(self, round: Round) -> dict[str, float]:
        return self.rule.chosen(self._heard(round))
