r"""The tensors of one replica, their layout in a flat bucket, and the merge of a mean that arrives late.

`Replica` packs tensors into a bucket and merges a bucket into them. `ModuleTensors` says which tensors a module has,
and which of them are averaged or compared.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_async import ops
from lightning_async.engine.fingerprint import digest, is_finite, real
from lightning_async.engine.running_means import RunningMean, count, merge_late_
from lightning_async.errors import AsyncTrainingError
from lightning_async.flat import FlatLayout

BufferPolicy = Literal["average", "keep", "broadcast", "recompute"]
BufferPolicies = BufferPolicy | Mapping[str, BufferPolicy]
"""One policy for all floating-point buffers, or policies by patterns of buffers' names, see `policy_of`."""
OptimizerPolicy = Literal["keep", "average", "reset"]
Updates = tuple[Sequence[Tensor], Sequence[Tensor]]
"""How often the buffers and the optimizers' state have been updated, see `count`."""
FLAGS = 48  # flags of buffers in one number of a header
_KINDS = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    }
)  # fmt: skip


@dataclass
class _Section:
    """A sequence of neighbouring tensors in the bucket, which are packed and merged together."""

    plan: ops.Plan
    start: int

    @property
    def tensors(self) -> list[Tensor]:
        return self.plan.tensors

    @property
    def end(self) -> int:
        return self.start + self.plan.layout.numel

    def of(self, bucket: Tensor) -> Tensor:
        return bucket[self.start : self.end]


class Replica:
    """The tensors of one replica that are averaged, and their layout in a bucket.

    The bucket contains, in this order: the parameters, to which the averaging rule applies; the floating-point buffers
    of the module's ``state_dict``, unless each replica keeps its own; and the optimizers' state, where it is averaged.
    Buffers and optimizer state always take the plain work-weighted mean, or, with ``"broadcast"``, buffers take one
    replica's values. Their updates since the snapshot are added to the mean, see `RunningMean`. A complex number counts
    as two real ones. Buffers and optimizer state may be assigned anew while training. A round sends only those buffers
    that have changed on some replica since replicas last agreed.

    The parameters are divided into ``fragments`` of about equal size in bytes; each round sends one fragment, in turn.
    Buffers and optimizer state are sent with the last fragment. So each element is sent once in as many rounds as there
    are fragments.

    Other tensors are made equal at a consensus only, and only if replicas differ. Integer and bool buffers become the
    maximum over replicas. Frozen parameters become the mean. Float64 tensors become the mean, too, in float64: the fp32
    bucket would round them.

    Buckets are on ``device``, preferably the parameters' device; on the CPU they are pinned if parameters are on a GPU.
    Only the training thread packs and merges. Raises as `ModuleTensors` does, and ValueError for more ``fragments``
    than parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: BufferPolicies = "average",
        device: torch.device | str = "cpu",
        fragments: int = 1,
    ) -> None:
        self.num_fragments = fragments
        self.tensors = ModuleTensors(module, buffers)
        self.policy: BufferPolicies = buffers
        self.device = torch.device(device)
        self.watched: Callable[[], Iterable[Tensor]] = tuple
        """Returns further tensors that must be finite for the replica to be healthy: the state that optimizers keep."""
        self.version = 0  # how often the layout has changed since training began
        self.remainders: dict[str, Tensor] = {}  # by name, the fp32 value of a 16-bit parameter minus its rounded value
        self._state: Callable[[], Sequence[Tensor]] = tuple
        self._state_means: Callable[[], Sequence[RunningMean]] | None = None
        self.reference = torch.empty(0)
        """The buffers when replicas last held one model. Rounds send buffers as differences from these values, so that
        buffers that never change keep their bits."""
        self._infinite: dict[int, int] = {}
        """By number of a buffer, a digest of its infinite values when replicas last held one model."""
        self._fragments: list[_Section] = []
        self.build()

    def build(
        self,
        optimizer_state: Callable[[], Sequence[Tensor]] | None = None,
        running_means: Callable[[], Sequence[RunningMean]] | None = None,
    ) -> None:
        """Lay out the bucket anew. The tensors that ``optimizer_state`` returns come last in it.

        ``running_means`` returns, for each of these tensors, which running mean it is (its decay and its number of
        updates). Default: unknown. Without arguments, the functions of the last call are used again.
        """
        if optimizer_state is not None:
            self._state = optimizer_state
            self._state_means = running_means
        names = list(self.tensors.trained)
        tensors = [real(p) for p in self.tensors.trained.values()]
        for name, x in zip(names, tensors, strict=True):
            if x.dtype in (torch.bfloat16, torch.float16) and name not in self.remainders:
                self.remainders[name] = torch.zeros_like(x, dtype=torch.float32)
        self.layout = FlatLayout(tensors, names)
        if self.num_fragments > max(1, len(names)):
            raise ValueError(
                f"`fragments={self.num_fragments}` must be at most the number of parameters that are trained, "
                f"{len(names)}: a fragment holds at least one."
            )
        self._fragments = []
        start = 0
        for place in self.layout.cut(self.num_fragments):
            rests = [self.remainders.get(name) for name in names[place]]
            plan = ops.Plan(FlatLayout(tensors[place], names[place]), tensors[place], rests)
            self._fragments.append(_Section(plan, start))
            start = self._fragments[-1].end
        mean, state = self._mean_buffers(), list(self._state())
        self._buffers = _Section(ops.Plan(FlatLayout(mean), mean), start)
        self._averages = _Section(ops.Plan(FlatLayout(state), state), self._buffers.end)
        self.note_agreed()
        rest = (self._buffers.plan.layout, self._averages.plan.layout)
        described = [line for layout in (self.layout, *rest) for line in layout.describe()]
        self.fingerprint = FlatLayout([torch.empty(0)] * len(described), described).fingerprint()
        """A fingerprint of the layout, equal on all ranks whose messages have the same layout."""

    def note_agreed(self) -> None:
        """Record that all replicas hold one model now.

        Infinite values that this replica's buffers and frozen parameters have by now, such as masks, pass later checks.
        """
        self.refresh()
        self.tensors.accept_infinite()
        buffers = self._buffers
        self.reference = torch.empty(buffers.plan.layout.numel, device=self.device)
        buffers.plan.pack_(self.reference)
        finite = self.reference.nan_to_num(0.0, 0.0, 0.0)
        views = buffers.plan.layout.views(self.reference - finite)
        self._infinite = {i: digest([views[i]]) for i, judged in enumerate(self.tensors.judged) if not judged}
        self.reference = finite

    def take_thawed(self) -> None:
        self.tensors.take_thawed()
        self.version += 1
        self.build()

    def refresh(self) -> None:
        """Use the new tensors where others were assigned to buffers or to the optimizers' state.

        Raises AsyncTrainingError if a new tensor does not fit into the layout.
        """
        if any(p.is_complex() for p in self.tensors.trained.values()):  # real views do not follow new memory
            left = iter(self.tensors.trained.values())
            for i, fragment in enumerate(self._fragments):
                tensors = [real(p) for p in itertools.islice(left, len(fragment.tensors))]
                plan = ops.Plan(fragment.plan.layout, tensors, fragment.plan.remainders)
                self._fragments[i] = _Section(plan, fragment.start)
        if self.tensors.follow_buffers():
            mean = self._mean_buffers()
            self._buffers = _Section(ops.Plan(FlatLayout(mean), mean), self._buffers.start)
        if not same(now := list(self._state()), self._averages.tensors):
            if [t.shape for t in now] != [t.shape for t in self._averages.tensors]:
                raise AsyncTrainingError(
                    "The optimizers' state changed its shape after training began, so it cannot be averaged. Pass "
                    '`optimizer_state="keep"`.'
                )
            self._averages = _Section(ops.Plan(FlatLayout(now), now), self._averages.start)

    def _mean_buffers(self) -> list[Tensor]:
        return [real(b) for b in self.tensors.averaged.values()]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that rounds send, as real numbers: those that require gradients, shared ones once."""
        return [tensor for fragment in self._fragments for tensor in fragment.tensors]

    @property
    def numel(self) -> int:
        return self._averages.end

    @property
    def last_fragment(self) -> int:
        """The number of the fragment with which buffers and the optimizers' state are sent."""
        return self.num_fragments - 1

    def layout_of(self, fragment: int) -> FlatLayout:
        return self._fragments[fragment].plan.layout

    def digests(self) -> tuple[int, int]:
        """Return two digests: of the parameters that rounds send, and of all other tensors that replicas share."""
        self.refresh()
        rest = [*self._buffers.tensors, *self._averages.tensors, *self.tensors.apart.values()]
        return digest([*self.parameters, *self.remainders.values()]), digest(rest)

    def judge(self) -> tuple[bool, bool]:
        """Return whether parameters and optimizer state are finite, and whether buffers and frozen parameters are.

        Buffers and frozen parameters may be infinite where they were so when replicas last agreed.
        """
        self.refresh()
        rest = [*self._judged(self._buffers.tensors), *self.tensors.judged_frozen]
        return is_finite([*self.parameters, *self._averages.tensors, *self.watched()]), is_finite(rest)

    def judge_packed(self, bucket: Tensor, fragment: int) -> tuple[bool, bool]:
        """Return whether a packed snapshot of ``fragment`` is finite.

        The first result is for the parameters and the optimizer state, the second one for the buffers.
        """
        if ops.all_finite(self.of_round(bucket, fragment)):
            return True, True
        if fragment != self.last_fragment:
            return False, True
        buffers = self._buffers
        views = buffers.plan.layout.views(buffers.of(bucket))
        parameters = self.of_rule(bucket, fragment)
        return is_finite([parameters, self._averages.of(bucket)]), is_finite(self._judged(views))

    @property
    def no_buffers(self) -> tuple[int, ...]:
        """The result of `changed_buffers` where no buffer has changed: a flag for each buffer, `FLAGS` in a number."""
        return (0,) * -(-len(self._buffers.tensors) // FLAGS)

    def changed_buffers(self, bucket: Tensor, fragment: int) -> tuple[int, ...]:
        """Return flags of the buffers in a packed snapshot that differ from those of the last agreement."""
        if fragment != self.last_fragment or not self._buffers.tensors:
            return self.no_buffers
        views = self._buffers.plan.layout.views(self._buffers.of(bucket))  # differences from `reference`
        differ = torch.stack([view.any() for view in views]).tolist()
        for i, infinite in self._infinite.items():
            differ[i] = digest([views[i]]) != infinite
        words = range(0, len(differ), FLAGS)
        return tuple(sum(1 << i for i, changed in enumerate(differ[k : k + FLAGS]) if changed) for k in words)

    def sum_round_(
        self,
        target: Tensor,
        sent: Tensor,
        fragment: int,
        changed: Sequence[int],
        sum_: Callable[[Tensor], None],
        of_rule: bool = True,
    ) -> int:
        """Sum what a round of ``fragment`` sends over all ranks, in ``target``; all ranks call this together.

        Buffers that are not ``changed`` on any rank are not sent, because all ranks hold the same values: each copies
        its own from its message ``sent``. Without ``of_rule``, parameters are not sent either. Returns the number of
        bytes of unchanged buffers.
        """
        moved = self.of_round(target, fragment)
        parameters = self.layout_of(fragment).numel if fragment == self.last_fragment else moved.numel()
        sizes = self._buffers.plan.layout.sizes if fragment == self.last_fragment else ()
        pairs = zip(*(self._buffers.of(bucket).split(sizes) for bucket in (target, sent)), strict=True) if sizes else ()
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i, (mean, own) in enumerate(pairs):
            is_sent = bool(changed[i // FLAGS] >> i % FLAGS & 1)
            parts[is_sent].append(mean)
            if not is_sent:
                mean.copy_(own)
        if not parts[False]:
            sum_(moved if of_rule else moved[parameters:])
            return 0
        if of_rule:
            sum_(moved[:parameters])
        together = torch.cat([moved[:0], *parts[True]])
        sum_(together)
        sum_(self._averages.of(target))
        for mean, whole in zip(parts[True], together.split([mean.numel() for mean in parts[True]]), strict=True):
            mean.copy_(whole)
        return sum(mean.nbytes for mean in parts[False])

    def _judged(self, buffers: Iterable[Tensor]) -> list[Tensor]:
        return [b for b, judged in zip(buffers, self.tensors.judged, strict=True) if judged]

    def of_rule(self, bucket: Tensor, fragment: int | None = None) -> Tensor:
        """Return the part of a bucket to which the rule applies: the parameters, or one fragment of them."""
        return bucket[: self.layout.numel] if fragment is None else self._fragments[fragment].of(bucket)

    def beyond_rule(self, bucket: Tensor) -> Tensor:
        return bucket[self.layout.numel :]

    def of_round(self, bucket: Tensor, fragment: int) -> Tensor:
        """Return the part of a bucket that is sent in a round of ``fragment``.

        The last fragment's part also contains the buffers and the optimizer state.
        """
        section = self._fragments[fragment]
        return bucket[section.start : self.numel if fragment == self.last_fragment else section.end]

    def pack_(self, bucket: Tensor, fragment: int | None = None) -> None:
        """Pack all tensors into ``bucket`` as fp32, or only those that are sent in a round of ``fragment``.

        With ``fragment``, buffers are packed as differences from `reference`.
        """
        self.refresh()
        self.pack_parameters_(self.of_rule(bucket), None if fragment is None else (fragment,))
        if fragment not in (None, self.last_fragment):
            return
        for section in (self._buffers, self._averages):
            section.plan.pack_(section.of(bucket))
        if fragment is not None:
            self._buffers.of(bucket).sub_(self.reference)

    def updates(self) -> Updates:
        """Return how often the buffers and the optimizers' state have been updated by now."""
        return (
            count(self.tensors.running_means()) if self._buffers.tensors else (),
            count(self._running_means_of_state()) if self._averages.tensors else (),
        )

    def _running_means_of_state(self) -> Sequence[RunningMean]:
        known = () if self._state_means is None else self._state_means()
        return known or [RunningMean()] * len(self._averages.tensors)

    def pack_parameters_(self, part: Tensor, fragments: Iterable[int] | None = None) -> None:
        """Pack the parameters, or some fragments of them, into their places in the rule's ``part`` of a bucket."""
        for section in self._chosen(fragments):
            section.plan.pack_(section.of(part))

    def _chosen(self, fragments: Iterable[int] | None) -> list[_Section]:
        return self._fragments if fragments is None else [self._fragments[each] for each in fragments]

    def scale_(
        self, out: Tensor, source: Tensor, shares: Mapping[int, float], is_source: bool, of_rule: bool = True
    ) -> None:
        """Write this rank's term of the mean, ``share * source``, into ``out``, for the fragments in ``shares``.

        Args:
            out: Bucket to write to.
            source: Bucket with this rank's snapshot.
            shares: Share of this rank in the mean, by fragment.
            is_source: Whether buffers come from this rank, with the policy "broadcast". All other ranks then write
                zeros for them.
            of_rule: Whether to write the parameters, too. Default: True. Buffers and optimizer state are always
                written.
        """
        for fragment, share in shares.items():
            here, there = (self.of_round(bucket, fragment) for bucket in (out, source))
            start = 0 if of_rule else self.layout_of(fragment).numel
            self.scaled_(here[start:], there[start:], share)
        if self.last_fragment in shares:
            views = (self._buffers.of(bucket).split(self._buffers.plan.layout.sizes) for bucket in (out, source))
            for name, here, there in zip(self.tensors.averaged, *views, strict=True):
                if policy_of(self.policy, name) == "broadcast":
                    self.scaled_(here, there, float(is_source))

    @staticmethod
    def scaled_(out: Tensor, source: Tensor, weight: float) -> None:
        """Write ``weight * source`` into ``out``; a weight of zero gives zeros even where ``source`` is NaN."""
        if weight == 0.0:
            out.zero_()
        else:
            ops.scale_(out, source, weight)

    @torch.no_grad()
    def merge_(
        self,
        target: Tensor,
        base: Tensor | None,
        with_state: bool,
        buffers_too: bool = True,
        still: bool = False,
        of_round: bool = False,
        fragments: Iterable[int] | None = None,
    ) -> None:
        """Move the parameters by ``target - base``, or copy ``target`` if ``base`` is None.

        Args:
            target: Bucket with the target of a round, or with the model of a consensus.
            base: Bucket with the values from which the parameters move to ``target``; this call overwrites it.
            with_state: Whether to overwrite buffers and optimizer state, too.
            buffers_too: False if ``target`` has no buffers, because the rank that broadcasts them was absent.
                Default: True.
            still: True if the parameters have not changed since they were packed. Then float64 parameters keep the
                digits that fp32 does not have. Default: False.
            of_round: Whether ``target`` is a round's result, whose buffers are differences from `reference`. Default:
                False.
            fragments: Fragments of the parameters to move. Default: all.
        """
        self.refresh()
        buffers = self._buffers
        if of_round and with_state and buffers_too and self.reference.numel():
            self._merge_buffers(buffers.of(target) + self.reference)
            buffers_too = False
        chosen = self._chosen(fragments)
        moved = (p for section in chosen for p in section.tensors)
        finer = [(p, p - p.float()) for p in moved if still and p.dtype is torch.float64]
        for section in chosen:
            section.plan.apply_(section.of(target), None if base is None else section.of(base))
        if with_state and buffers_too and buffers.tensors:
            buffers.plan.apply_(buffers.of(target))
        if with_state and self._averages.tensors:
            self._averages.plan.apply_(self._averages.of(target))
        for p, rest in finer:
            p.add_(rest)

    def merge_late_(self, target: Tensor, snapshot: Tensor, updates: Updates, buffers_too: bool = True) -> None:
        """Merge a round's mean into the buffers and the optimizer state, and keep their updates since the snapshot.

        Args:
            target: Bucket with the round's mean.
            snapshot: Bucket with this rank's snapshot.
            updates: Numbers of updates at the snapshot, from the method `updates`.
            buffers_too: Whether buffers are merged. Default: True.
        """
        self.refresh()
        buffers = self._buffers
        state = self._averages
        if buffers.tensors and buffers_too:
            merge_late_(
                buffers.tensors, buffers.of(target), buffers.of(snapshot), self.tensors.running_means(), updates[0],
                self.reference,
            )  # fmt: skip
        if state.tensors:
            means = self._running_means_of_state()
            merge_late_(state.tensors, state.of(target), state.of(snapshot), means, updates[1])

    def _merge_buffers(self, mean: Tensor) -> None:
        section = self._buffers
        before = [(b, b.clone()) for b in section.tensors if b.dtype is torch.float64]
        section.plan.apply_(mean)
        for buffer, old in before:  # one that equals the mean in fp32 keeps its further digits
            buffer.copy_(torch.where(buffer == old.float(), old, buffer))


class ModuleTensors:
    """The parameters and buffers of a module by name, in groups by how replicas make them equal.

    Rounds average the group `trained` and the group `averaged`. Only a consensus makes the group `apart` equal. Shared
    tensors count once. Buffers that are not in the module's ``state_dict`` are in no group: the module makes them by
    itself, such as masks. Raises ValueError for an unknown policy for buffers, for a pattern that matches no buffer,
    for tensors that are not materialised yet (lazy modules), and for tensors that can be neither averaged nor compared.
    """

    def __init__(self, module: nn.Module, policy: BufferPolicies) -> None:
        patterns = policy if isinstance(policy, Mapping) else {}
        if isinstance(policy, str) and policy not in get_args(BufferPolicy):
            raise ValueError(f"`buffers={policy!r}` must be one of {get_args(BufferPolicy)}.")
        names = list(persistent_buffers(module))
        if idle := [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]:
            raise ValueError(
                f"`buffers={policy!r}`: {idle} match no buffer of the module's `state_dict`. There are {names}; "
                "buffers with `persistent=False` are each replica's own in any case."
            )
        _check_materialised(module)
        _check_kinds(module, policy)
        self._module = module
        self._policy: BufferPolicies = policy
        self.parameters = dict(module.named_parameters())
        self._buffers = _shared_buffers(module, policy)
        norms = [m for m in module.modules() if isinstance(m, _BatchNorm | _InstanceNorm)]
        self._layers = [norm for norm in norms if norm.track_running_stats]
        self._shapes = {name: p.shape for name, p in self.parameters.items()}
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}  # what the rule applies to
        self._infinite: frozenset[str] = frozenset()

    @property
    def averaged(self) -> dict[str, Tensor]:
        return {name: b for name, b in self._buffers.items() if b.is_floating_point() or b.is_complex()}

    def running_means(self) -> list[RunningMean]:
        """Return a description for each buffer in `averaged`: its decay as a running mean, and its number of updates.

        Both are known for the statistics of normalization layers, such as BatchNorm. Other buffers get the default.
        """
        found: dict[int, RunningMean] = {}
        for layer in self._layers:
            for buffer, positive in ((layer.running_mean, False), (layer.running_var, True)):
                if buffer is not None:
                    found[id(buffer)] = _running_mean(layer, buffer, positive)
        return [found.get(id(buffer), RunningMean()) for buffer in self.averaged.values()]

    @property
    def apart(self) -> dict[str, Tensor]:
        """The tensors that a consensus moves in their own precision: frozen parameters, integer buffers, float64."""
        frozen = {name: p for name, p in self.parameters.items() if name not in self.trained}
        counters = {n: b for n, b in self._buffers.items() if not (b.is_floating_point() or b.is_complex())}
        wide = {n: t for n, t in {**self.trained, **self.averaged}.items() if real(t).dtype is torch.float64}
        return {name: real(t) for name, t in {**frozen, **counters, **wide}.items()}

    @torch.no_grad()
    def set_apart(self, values: Mapping[str, Tensor]) -> None:
        mine = self.apart if values else {}
        for name, value in values.items():
            mine[name].copy_(value)

    def follow_buffers(self) -> bool:
        """Use the new tensor where the module has assigned another one to a buffer; return whether there were any.

        Raises AsyncTrainingError if a buffer was added or removed, or changed its shape or type.
        """
        known = self._buffers
        now = _shared_buffers(self._module, self._policy)
        if known.keys() == now.keys() and same(known.values(), now.values()):
            return False
        wrong = [n for n in {**known, **now} if n not in known or n not in now or not alike(known[n], now[n])]
        if wrong:
            raise AsyncTrainingError(
                f"Buffers {wrong} of the `state_dict` were added or removed, or changed their shape or type, after "
                "training began, so replicas cannot be compared. Register them with `persistent=False` if the module "
                "can make them anew (masks, caches), or in `__init__` with the shape that they keep. Or let each "
                f"replica keep its own: `buffers={dict.fromkeys(wrong, 'keep')}`."
            )
        odd = [name for name, b in now.items() if b is not known.get(name) and _is_odd(b)]
        if odd:
            raise AsyncTrainingError(
                f"Buffers {odd} were assigned tensors that cannot be written in place (expanded, sparse, conjugated, "
                "or made in inference mode). Assign a copy: `self.name = tensor.clone()`."
            )
        self._buffers = {name: now[name] for name in (*known, *now) if name in now}  # in the order of the bucket
        return True

    def check_unchanged(self, thawed_too: bool = True) -> None:
        """Check that the module still has the parameters that it had when training began.

        Raises AsyncTrainingError where parameters were added, removed, replaced or resized, and, with ``thawed_too``,
        where frozen parameters are trained now.
        """
        now = dict(self._module.named_parameters())
        changed = [n for n in {**now, **self.parameters} if now.get(n) is not self.parameters.get(n)]
        changed += [n for n, p in now.items() if n not in changed and p.shape != self._shapes[n]]
        if changed:
            raise AsyncTrainingError(
                f"Parameters {changed} were added, removed, replaced or resized after training began, so they are not "
                "averaged. Create all parameters in `__init__`, `configure_model` or `setup`."
            )
        if thawed_too and (thawed := self.thawed()):
            raise AsyncTrainingError(
                f"Parameters {thawed} were frozen at the last sync point, so they are not averaged, and require "
                "gradients now. Unfreeze parameters where an epoch starts (`on_train_epoch_start`), on all ranks alike."
            )

    def thawed(self) -> list[str]:
        """Return the names of parameters that were frozen at the last sync point and are trained now."""
        return [name for name, p in self.parameters.items() if p.requires_grad and name not in self.trained]

    def take_thawed(self) -> None:
        names = {*self.trained, *self.thawed()}
        self.trained = {name: p for name, p in self.parameters.items() if name in names}

    @property
    def _frozen(self) -> dict[str, Tensor]:
        real_ones = {n: p for n, p in self.parameters.items() if p.is_floating_point() or p.is_complex()}
        return {n: p for n, p in real_ones.items() if n not in self.trained and p.dtype in _KINDS}

    def accept_infinite(self) -> None:
        """Record which buffers and frozen parameters have infinite values.

        This is called when all replicas agree, so these values are intended, as in attention masks.
        """
        fp32 = {name: b.float() if b.dtype is torch.float64 else b for name, b in self.averaged.items()}
        self._infinite = frozenset(name for name, t in {**fp32, **self._frozen}.items() if not is_finite([t]))

    @property
    def judged_frozen(self) -> list[Tensor]:
        return [p for name, p in self._frozen.items() if name not in self._infinite]

    @property
    def judged(self) -> list[bool]:
        """For each buffer in `averaged`, whether it must be finite."""
        return [name not in self._infinite for name in self.averaged]


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the module's ``state_dict`` holds, by name; a shared one once."""
    held: dict[int, tuple[str, Tensor]] = {}
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                held.setdefault(id(buffer), (f"{path}.{name}" if path else name, buffer))
    return dict(held.values())


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a module by name, detached; a shared one once."""
    return {n: t.detach() for n, t in (*module.named_parameters(), *persistent_buffers(module).items())}


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that no ``state_dict`` holds, by name, without those that cannot be written in place."""
    persistent = {id(buffer) for buffer in persistent_buffers(module).values()}
    return {n: b for n, b in module.named_buffers() if id(b) not in persistent and not _is_odd(b)}


def policy_of(policies: BufferPolicies, name: str) -> BufferPolicy:
    """Return the policy for the buffer ``name``: that of the first pattern that matches, else "average".

    >>> [policy_of({"queue*": "keep"}, name) for name in ("queue", "norm.running_mean")]
    ['keep', 'average']
    """
    if not isinstance(policies, Mapping):
        return policies
    for pattern, policy in policies.items():
        if fnmatch.fnmatchcase(name, pattern):
            return policy
    return "average"


def kept_buffers(module: nn.Module, policies: BufferPolicies) -> dict[str, Tensor]:
    """Return the persistent buffers of which each replica keeps its own; integer ones only if a pattern names them."""
    return {
        name: buffer
        for name, buffer in persistent_buffers(module).items()
        if policy_of(policies, name) == "keep"
        and (isinstance(policies, Mapping) or buffer.is_floating_point() or buffer.is_complex())
    }


def _shared_buffers(module: nn.Module, policies: BufferPolicies) -> dict[str, Tensor]:
    kept = kept_buffers(module, policies)
    return {name: buffer for name, buffer in persistent_buffers(module).items() if name not in kept}


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return [id(each) for each in left] == [id(each) for each in right]


def alike(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same shape, type and device."""
    return left.shape == right.shape and left.dtype == right.dtype and left.device == right.device


def with_statistics(module: nn.Module) -> list[_BatchNorm]:
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def _running_mean(layer: _BatchNorm | _InstanceNorm, buffer: Tensor, positive: bool) -> RunningMean:
    if isinstance(layer, _InstanceNorm):
        # This layer does not count its updates, but torch counts writes to the buffer, one for each update.
        return RunningMean(1.0 - (layer.momentum or 0.0), float(buffer._version), positive=positive)
    if layer.num_batches_tracked is None:
        return RunningMean(positive=positive)
    decay = None if layer.momentum is None else 1.0 - layer.momentum
    return RunningMean(decay, layer.num_batches_tracked, positive=positive)


def _check_kinds(module: nn.Module, policy: BufferPolicies) -> None:
    tensors = [*module.named_parameters(), *_shared_buffers(module, policy).items()]
    sparse = [n for n, t in tensors if _is_odd(t)]
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    odd = [f"{n} ({t.dtype})" for n, t in tensors if t.dtype not in _KINDS and n not in {*sparse, *frozen}]
    if sparse or odd:
        raise ValueError(
            f"{[*sparse, *odd]}: a replica holds dense tensors of real, complex, integer or bool numbers; sparse, "
            "quantised, expanded, lazily conjugated and 8-bit floating ones can be neither averaged nor compared. Keep "
            "them as plain attributes of the module, or convert them."
        )


def _is_odd(t: Tensor) -> bool:
    if t.layout is not torch.strided or t.is_quantized or t.is_conj() or t.is_neg() or t.is_inference():
        return True
    return any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True))


def _check_materialised(module: nn.Module) -> None:
    lazy = [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
    ]
    if lazy:
        raise ValueError(
            f"{lazy} are lazy: they have no shape yet, so replicas cannot be compared or averaged. Run one batch "
            "through the module in `configure_model` or `setup` to materialise them."
        )


def describe(module: nn.Module) -> list[str]:
    """Return a line with name, shape and type for each parameter and persistent buffer, frozen ones included.

    Replicas of one model have equal lines.
    """
    _check_materialised(module)
    named = [*module.named_parameters(), *persistent_buffers(module).items()]
    lines = FlatLayout([t for _, t in named], [n for n, _ in named]).describe()
    return [
        f"{line}, {'trained' if t.requires_grad else 'not trained'}" for line, (_, t) in zip(lines, named, strict=True)
    ]
