"""The only access to Lightning: its namespace, patches of its objects, and queries of a Trainer or module.

``lightning.pytorch`` and ``pytorch_lightning`` hold the same code under different names, and objects of one do not work
with the other. This module chooses one: the one that the program has imported first, else the installed one,
``lightning`` first. If both are imported, the other one's Trainer explains why it refuses a strategy, and the remedy.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.replica import describe, own_buffers, persistent_buffers
from lightning_async.errors import LayoutMismatch
from lightning_async.flat import FlatLayout

log = logging.getLogger(__name__)

_NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def _choose() -> str:
    # `sys.modules` is in the order of imports.
    for module in list(sys.modules):
        if module in _NAMESPACES:
            return module
    for candidate in _NAMESPACES:
        if importlib.util.find_spec(candidate.partition(".")[0]) is not None:
            return candidate
    raise ModuleNotFoundError(
        "lightning_async needs PyTorch Lightning: `pip install lightning` (or pytorch-lightning)."
    )


name = _choose()
"""The chosen namespace: ``"lightning.pytorch"`` or ``"pytorch_lightning"``."""

_OTHER = next(each for each in _NAMESPACES if each != name)

pl = importlib.import_module(name)
"""The chosen namespace's package."""


@functools.cache
def pytorch(module: str) -> ModuleType:
    """Return a module below ``lightning.pytorch`` (or ``pytorch_lightning``), by its path there."""
    return importlib.import_module(f"{name}.{module}")


if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    Callback = pytorch("callbacks").Callback


@functools.cache
def fabric(module: str) -> ModuleType:
    """Return a module below ``lightning.fabric`` (or ``lightning_fabric``), by its path there."""
    root = "lightning.fabric" if name == "lightning.pytorch" else "lightning_fabric"
    return importlib.import_module(f"{root}.{module}")


def readers_of_files() -> list[ModuleType]:
    """Return the imported modules, of both namespaces, whose function ``pl_load`` reads checkpoint files."""
    saving = [f"{each}.core.saving" for each in _NAMESPACES]
    plugins = [f"{each}.plugins.io.torch_io" for each in ("lightning.fabric", "lightning_fabric")]
    return [sys.modules[each] for each in (*saving, *plugins) if each in sys.modules]


def refuse_elsewhere(strategy: type, names: Iterable[str]) -> None:
    """Make the Trainer of the other namespace explain why it refuses ``strategy``.

    The namespaces are `lightning.pytorch` and `pytorch_lightning`; the other one is that which this package does not
    use. This does nothing unless the other namespace is imported. Then its registry of strategies gets ``names`` with a
    function that raises an explanation. ``strategy`` also counts as a subclass of its Strategy class. So its Trainer
    accepts an object of ``strategy`` until `check_object` raises the explanation, and does not raise "invalid strategy
    name".
    """
    other = sys.modules.get(f"{_OTHER}.strategies")
    if other is None:
        return

    def refuse(**_: Any) -> NoReturn:
        raise TypeError(_refusal(strategy.__name__))

    for each in names:
        other.StrategyRegistry.register(each, refuse, description=f"not from {_OTHER}", override=True)
    other.Strategy.register(strategy)


def check_object(owner: object, thing: object) -> None:
    """Raise TypeError if ``thing``, a Trainer or a part of one, is of the namespace that this package does not use.

    The namespaces are `lightning.pytorch` and `pytorch_lightning`. The error names the class of ``owner``.
    """
    roots = {"lightning"} if name == "pytorch_lightning" else {"pytorch_lightning", "lightning_fabric"}
    if any(kind.__module__.partition(".")[0] in roots for kind in type(thing).__mro__):
        raise TypeError(_refusal(type(owner).__name__))


def _refusal(owner: str) -> str:
    return (
        f"`{owner}` works with the Trainer of `{name}`, and was given to that of `{_OTHER}`. "
        "This program imports both, and the one that is imported first is taken. "
        f"Import `{_OTHER}` before everything else, or lightning_async right after it; or use `{name}.Trainer`."
    )


Undo = Callable[[], None]
"""A function that undoes a patch."""


def set_for_now(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute; return a function that restores it."""
    had = name in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old) if had else delattr(owner, name)


def take_back(undo: list[Undo]) -> None:
    """Undo patches in reverse order, and empty the list."""
    while undo:
        undo.pop()()


def override(owner: Any, name: str, call: Callable[..., Any]) -> Undo:
    """Replace a method by ``call``, whose first argument is the method; return a function that restores it."""
    return set_for_now(owner, name, _before(getattr(owner, name), call))


def _before(original: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    # A plain function becomes a method when it is set on a class, with `self` after the original. A partial would not.
    # It has the method's name, by which Python pickles bound methods.
    return functools.wraps(original, updated=())(lambda *args, **kwargs: call(original, *args, **kwargs))


class _InPlaceOf:
    """A temporary replacement of a method. Pickles and deep copies contain ``had``, the original method, instead."""

    def __init__(self, had: Any, call: Callable[..., Any]) -> None:
        self._had = had
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        # The pickle must load without this package, so it names a function of the standard library.
        return operator.itemgetter(0), ((self._had,),)


class _InPlaceOfAll(_InPlaceOf):
    """A temporary replacement of a plain function, which has no ``self``.

    Pickles contain the original function instead. Deep copies contain the same replacement.
    """

    def __deepcopy__(self, memo: Any) -> _InPlaceOfAll:
        return self


def override_for_users(owner: Any, name: str, call: Callable[..., Any]) -> Undo:
    """Replace a method as `override` does, on an object that a user may pickle or copy, such as a callback."""
    original = getattr(owner, name)
    return set_for_now(owner, name, _InPlaceOf(original, _before(original, call)))


def sync_metrics_through(world: Callable[[], LightningCollectives | None], module: Any) -> list[Undo]:
    """Make torchmetrics use the collectives of ``world()``, or none while replicas are asynchronous.

    Returns functions that undo this for each metric of ``module``.
    """

    def available() -> bool:
        there = world()
        return there is not None and not there.asynchronous

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        there = world()
        return [tensor] if there is None else [each.to(tensor.device) for each in there.gather_objects(tensor)]

    def sync(metric: Metric, *args: Any, **kwargs: Any) -> None:
        """Sync all states that are lists of tensors by one gather, and the other states as torchmetrics does.

        torchmetrics gathers the entries of a list one by one, and ranks may have unequal numbers of them.
        """
        there = world()
        assert there is not None
        reductions = metric._reductions
        states = {name: getattr(metric, name) for name in reductions}
        lists = {
            # As torchmetrics does, so that an entry is not gathered for each batch.
            name: [dim_zero_cat(state)] if state and reductions[name] is dim_zero_cat else state
            for name, state in states.items()
            if isinstance(state, list) and all(isinstance(entry, Tensor) for entry in state)
        }
        everyones = there.gather_objects(lists, f"list states of {type(metric).__name__}")
        # Other entries, such as tuples, are for the metric's own method.
        shared = set.intersection(*map(set, everyones))
        metric._reductions = {name: reduction for name, reduction in reductions.items() if name not in shared}
        try:
            type(metric)._sync_dist(metric, *args, **kwargs)
        finally:
            metric._reductions = reductions
        for name in shared:
            device = lists[name][0].device if lists[name] else metric.device
            entries = [entry.to(device) for of_rank in everyones for entry in of_rank[name]]
            reduction: Any = reductions[name]
            setattr(metric, name, entries if reduction is None or not entries else reduction(entries))

    # Pickles and copies of a metric then name or bind the method of the copy.
    sync.__name__ = "_sync_dist"
    # A module may hold metrics in its hyper-parameters, which checkpoints pickle during training.
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    undo = [set_for_now(metric, "_sync_dist", MethodType(sync, metric)) for metric in metrics]
    return undo + [
        set_for_now(metric, name, _InPlaceOfAll(getattr(metric, name), function))
        for metric in metrics
        for name, function in (("dist_sync_fn", gather), ("distributed_available_fn", available))
    ]


def callbacks_of(trainer: Any, kind: str) -> list[Any]:
    """Return the Trainer's callbacks of one of Lightning's classes; none if this Lightning lacks the class."""
    wanted = getattr(pytorch("callbacks"), kind, ())
    return [callback for callback in trainer.callbacks if isinstance(callback, wanted)]


def validation_interval(trainer: Any) -> int | float | timedelta:
    """Return ``val_check_interval``: a number of batches, a share of an epoch, or a time."""
    # The Trainer keeps a time in another attribute.
    seconds = getattr(trainer, "_val_check_time_interval", None)
    return trainer.val_check_interval if seconds is None else timedelta(seconds=seconds)


def searches_lr(trainer: Any) -> bool:
    """Return whether Lightning's learning-rate finder is running, and not the user's own training."""
    callback = pytorch("tuner.lr_finder")._LRCallback
    return trainer is not None and any(isinstance(c, callback) for c in trainer.callbacks)


def pulls(module: Any) -> bool:
    """Return whether `training_step` takes an iterator of batches (``dataloader_iter``), and reads from it by itself.

    The batch is then not known before `training_step` runs.
    """
    signature = pytorch("utilities.signature_utils")
    return signature.is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def pulled(trainer: Any) -> Any:
    """Return the last batch that a `training_step` has read by itself."""
    return trainer.fit_loop._data_fetcher._batch


def changes_gradients(module: Any, until_step: bool = False) -> bool:
    """Return whether a hook of the module, or of a callback, may change gradients after the backward pass.

    Such a change may leave no trace (``p.grad.data``), so gradients can be sent only after the hook. With
    ``until_step``, later hooks before the optimizer's step count, too.
    """
    is_overridden = pytorch("utilities.model_helpers").is_overridden
    hooks = ("on_after_backward", *(("on_before_optimizer_step",) if until_step else ()))
    own = ("backward", *(("optimizer_step", "configure_gradient_clipping") if until_step else ()))
    return any(is_overridden(name, module) for name in own) or any(
        is_overridden(name, each) for name in hooks for each in (module, *module.trainer.callbacks)
    )


def scaler_of(precision: Any) -> Any:
    """Return the gradient scaler of a precision plugin; None if losses and gradients are not scaled."""
    scaler = getattr(precision, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def loss_scale(precision: Any) -> float:
    """Return the factor by which a precision plugin multiplies losses."""
    scaler = scaler_of(precision)
    return 1.0 if scaler is None else float(scaler.get_scale())


def scaled_zero(precision: Any, device: torch.device) -> Tensor:
    """Return a loss of zero that was passed through the gradient scaler, if there is one.

    The scaler creates its scale at the first loss that it gets, and cannot unscale gradients before. On a rank that has
    not trained on a batch yet, this is the first loss.
    """
    zero = torch.zeros((), device=device)
    scaler = scaler_of(precision)
    return zero if scaler is None else scaler.scale(zero)


def rank_zero_info(text: str) -> None:
    """Log one INFO line by Lightning's logger, on rank 0."""
    pytorch("utilities.rank_zero").rank_zero_info(text)


def in_words(exception: BaseException) -> str:
    """Return the text by which other ranks learn why this rank has ended."""
    if isinstance(exception, KeyboardInterrupt):
        return "it was interrupted by hand (KeyboardInterrupt), which is no error of the program"
    try:
        return f"{type(exception).__name__}: {exception}"
    # An exception of the user's class may fail in `__str__`.
    except Exception:
        return f"{type(exception).__name__}, which does not say why"


def shorten(exception: BaseException) -> None:
    """Remove the traceback and the causes of an exception, after logging them."""
    log.debug("Where it was noticed:", exc_info=exception)
    exception.__cause__ = exception.__context__ = None
    exception.__suppress_context__ = True
    exception.__traceback__ = None


def batch_size(batch: Any) -> float:
    """Return the number of samples in ``batch``, as Lightning counts them for its logs; 1 if it cannot tell."""
    try:
        return float(pytorch("utilities.data").extract_batch_size(batch))
    # Lightning raises various exceptions for types that it does not know.
    except Exception:
        _warn(type(batch).__name__)
        return 1.0


@functools.cache
def _warn(kind: str) -> None:
    log.warning("The number of samples in a batch of type %s is unknown; each counts as one sample.", kind)


def counting(owner: str, function: Callable[[Any], float]) -> Callable[[Any], float]:
    """Wrap a user's function that returns the weight of a batch.

    The returned function raises ValueError, which names ``owner``, unless the weight is a finite number >= 0.
    """

    def count(batch: Any) -> float:
        counted = float(function(batch))
        if not 0.0 <= counted < math.inf:
            raise ValueError(
                f"`{owner}(weighting={function!r})` returned {counted} for a batch: a weight must be a number >= 0."
            )
        return counted

    return count


def make_equal(world: LightningCollectives, module: Any) -> None:
    """Copy rank 0's model to all replicas. All ranks call this together.

    Buffers that no ``state_dict`` holds are copied if all ranks have them with the same shape and type: the module may
    have drawn them at random. Later, each replica's module changes them by itself.

    Raises:
        LayoutMismatch: The ranks' models have different layouts. The message has the first difference.
    """
    mine = describe(module)
    own = own_buffers(module)
    lines = FlatLayout(list(own.values()), list(own)).describe()
    told = world.gather_objects([mine, lines])
    for rank, (theirs, _) in enumerate(told):
        difference = FlatLayout.first_difference(mine, theirs)
        if difference is not None:
            raise LayoutMismatch(
                f"Rank {world.rank} and rank {rank} hold different models; the first difference is "
                f"{difference} (rank {world.rank} | rank {rank}). Build the same model on every rank."
            )
    everywhere = set(lines).intersection(*(others for _, others in told))
    by_line = dict(zip(lines, own.values(), strict=True))
    alike = [by_line[line] for line in sorted(everywhere)]
    world.make_equal_([*module.parameters(), *persistent_buffers(module).values(), *alike])


class OwnSteps:
    """The optimizer steps that a module takes by itself, and the batches that it skips.

    A raw ``optimizer.step()`` would bypass the strategy: replicas would diverge, and Lightning would not count the
    step. After `install`, the ``step`` of each optimizer calls Lightning's step, unless Lightning itself calls it. A
    reference to the ``step`` method from before `install` (``step = optimizer.step``, or a compiled one) cannot be
    redirected. torch's hook notices a call of such a reference, and `_check` raises RuntimeError.

    A module skips a batch if its `training_step` returns None.
    """

    _strategy: Any  # from `install` on

    def __init__(self) -> None:
        self._under_way: set[int] = set()
        """The `id` of each optimizer with which Lightning is taking a step."""
        self._unstepped: list[Optimizer] = []
        """The optimizers with which Lightning has not taken any step yet."""
        self.skipped = False
        """Whether `training_step` has returned None for the batch under way."""

    def install(self, trainer: Any) -> list[Undo]:
        self._strategy = trainer.strategy
        epoch = trainer.fit_loop.epoch_loop
        loop = epoch.automatic_optimization
        undo = [override(loop, "_training_step", functools.partial(self._let_skip, loop.output_result_cls))]
        undo.append(override(loop, "_optimizer_step", self._find_unseen_step))
        undo.append(override(epoch.manual_optimization, "advance", self._find_unseen_step))
        self._unstepped = list(self._strategy.optimizers)
        for optimizer in self._strategy.optimizers:
            undo.append(optimizer.register_step_pre_hook(self._check).remove)
            undo.append(set_for_now(optimizer, "step", self.led(optimizer, optimizer.step)))
        return undo

    def _let_skip(self, result: Any, original: Callable[[Any], Any], kwargs: Any) -> Any:
        """Let `training_step` return None, for a batch that the module skips.

        With several ranks, Lightning refuses None, because the other ranks would wait forever for this rank's
        gradients. Under this package's strategies no rank waits.
        """
        self.skipped = False
        try:
            return original(kwargs)
        except RuntimeError:
            # Lightning raises this for None with several ranks. Any other error is the user's.
            if not self.skipped:
                raise
            return result(None)

    def _find_unseen_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run the module's code, and find optimizers that step by another method than `step`, such as SAM's.

        Such an optimizer has never taken a step of Lightning's, and most of its parameters were written to. Code that
        leaves a step out, as in accumulation, writes to none, and code that normalises a weight writes to few.

        Raises:
            RuntimeError: the other ranks cannot take part in such a step.
        """
        before = [(optimizer, _versions(optimizer)) for optimizer in self._unstepped]
        original(*args, **kwargs)
        waiting = {id(optimizer) for optimizer in self._unstepped}
        # Parameters that several optimizers have may have been stepped by another one.
        stepped = {key for o in self._strategy.optimizers if id(o) not in waiting for key in _versions(o)}
        for optimizer, versions in before:
            now = _versions(optimizer)
            changed = [now[key] != versions[key] for key in now.keys() & versions.keys() - stepped]
            if id(optimizer) not in waiting or 2 * sum(changed) <= len(changed):
                continue
            if not self._strategy.step_runner.count_unseen_step():
                raise RuntimeError(
                    f"Rank {self._strategy.global_rank}: the parameters of `{type(optimizer).__name__}` have changed "
                    f"without its `step` (by another method, such as SAM's `second_step`, or an optimizer inside of "
                    f"it). `{type(self._strategy).__name__}` shares what `step` does. Call `step` of what "
                    "`self.optimizers()` returns, or use `AsyncAveragingStrategy()` with manual optimization, whose "
                    "rounds share every change."
                )
            manual = self._strategy.module.trainer.fit_loop.epoch_loop.manual_optimization
            manual.optim_step_progress.increment_ready()
            manual.optim_step_progress.increment_completed()

    @contextmanager
    def taking(self, optimizer: Optimizer) -> Iterator[None]:
        """Record, within the block, that Lightning takes a step of this optimizer."""
        self._unstepped = [each for each in self._unstepped if each is not optimizer]
        new = {id(optimizer)} - self._under_way
        self._under_way |= new
        try:
            yield
        finally:
            self._under_way -= new

    def led(self, optimizer: Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of ``step``, the step method of ``optimizer``.

        If a user calls it, it calls Lightning's step, which counts it. If Lightning calls it, it calls ``step``.
        """

        @functools.wraps(getattr(step, "__func__", step))
        def stepped(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if id(optimizer) in self._under_way:
                return step(*args, **kwargs)
            number = self._number_of(optimizer)
            counted = step if number is None else self._strategy._lightning_optimizers[number].step
            return counted(*args, **kwargs)

        # A bound method, because schedulers that are made later read its `__func__`.
        return MethodType(stepped, optimizer)

    def _number_of(self, optimizer: Optimizer) -> int | None:
        return next((i for i, each in enumerate(self._strategy.optimizers) if each is optimizer), None)

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise RuntimeError for a step of an optimizer that does not go through Lightning."""
        number = self._number_of(optimizer)
        # Another optimizer: a copy is the user's, and torch also calls the hook for Lightning's wrapper once that was
        # copied. The wrapper then steps the optimizer itself.
        if id(optimizer) in self._under_way or number is None:
            return
        raise RuntimeError(
            f"`{type(optimizer).__name__}.step` (optimizer {number}) was called in a way that "
            f"`{type(self._strategy).__name__}` cannot see before: as a bound method that was taken from the optimizer "
            "before training, or compiled. Replicas would part without notice. Call `step()` of what "
            "`self.optimizers()` returns, or `optimizer.step()` itself."
        )


def _versions(optimizer: Optimizer) -> dict[int, int]:
    """Return how often each of the optimizer's trained parameters was written to, by the parameter's `id`."""
    return {id(p): p._version for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


_MARK = "_compiler_ctx"


class CompiledMark:
    """The attribute by which `torch.compile` marks a module, hidden while the Trainer looks for it.

    Lightning lets only its own listed strategies train a compiled module. The Trainer looks for the mark after it has
    given the module to the strategy, or asked the strategy for the module, and before it asks for the launcher.
    """

    def __init__(self) -> None:
        self._module: Any = None
        self._mark: Any = None

    def hide(self, module: Any) -> None:
        """Remove the attribute that marks ``module`` as compiled, because the Trainer is about to look for it.

        The Trainer would refuse the module. `show` puts the attribute back.
        """
        self.show()
        if getattr(module, _MARK, None) is not None:
            self._module = module
            self._mark = getattr(module, _MARK)
            setattr(module, _MARK, None)

    def hide_from_trainer(self, module: Any) -> None:
        """Remove the attribute that marks ``module`` as compiled, if the Trainer is about to look for it.

        The Trainer looks for it in `validate`, `test` and `predict`, after it has asked the strategy for the module.
        The caller of this method is the strategy's property that returns the module.
        """
        if getattr(module, _MARK, None) is not None:
            asks = {function.__code__ for function in (pl.Trainer.validate, pl.Trainer.test, pl.Trainer.predict)}
            # The frames are: this one, the strategy's property, the Trainer's property, and the reader of that.
            frame = sys._getframe(2).f_back
            if frame is not None and frame.f_code in asks:
                self.hide(module)

    def show(self) -> None:
        """Put back the attribute that marks a compiled module, after the Trainer has looked for it."""
        if self._module is not None:
            setattr(self._module, _MARK, self._mark)
            self._module = self._mark = None
