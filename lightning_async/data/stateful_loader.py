"""Loaders whose position can be saved, and that can begin at a saved position."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torch.utils.data.dataloader import _DatasetKind

from lightning_async.data.iterators import IterationPosition, Nothing, Position, epoch_of, iterate
from lightning_async.data.random_states import Generators, Resumed, Tape, generators_in, resumable, stateful
from lightning_async.data.redistribution import is_of_torch, is_plain, kept, length_of, share, size_of, workers_of

log = logging.getLogger(__name__)


def sources_of(loaders: Sequence[Any]) -> list[Source]:
    names = ["the train dataloader"] if len(loaders) == 1 else [f"train dataloader {i}" for i in range(len(loaders))]
    return [_source_of(loader, name) for loader, name in zip(loaders, names, strict=True)]


def generators_of(sources: Sequence[Source]) -> Generators:
    """Return the random generators of this process, of its devices, and of these loaders."""
    named = {
        f"{index}.{path}": generator
        for index, source in enumerate(sources)
        for path, generator in source.generators().items()
    }
    return Generators(named, devices=True)


def recounted(sources: Sequence[Source], positions: Sequence[Position]) -> list[Position]:
    """Return saved positions, converted to these loaders.

    Batch sizes, lengths of datasets, or numbers of workers may have changed since the save. A single loader's position
    is converted by counting samples. Several loaders continue after the same numbers of batches as at the save. A
    warning names what cannot be continued exactly.
    """
    found = list(positions)
    if len(sources) == len(positions):
        for i, (source, each) in enumerate(zip(sources, positions, strict=True)):
            if source.differs(each):
                # Several loaders take their batches together: to count samples would move them against each other.
                found[i] = source.recount(each) if len(sources) == 1 else source.behind_as_many(each, len(sources))
    return found


def _sizes(batch_size: int | None, length: int | None, workers: int | None) -> str:
    told = f"batches of {batch_size}" + (f" of {length} samples" if length is not None else "")
    return told if workers is None else f"{told} by {workers} workers"


def begin_at(sources: Sequence[Source], positions: Sequence[Position]) -> None:
    """Make the next iteration of each loader begin at its position.

    Raise ValueError if the number of positions is not the number of loaders.
    """
    if len(sources) != len(positions):
        raise ValueError(
            f"the checkpoint is of a training with {len(positions)} train dataloaders, and this one has {len(sources)}."
        )
    for source, position in zip(sources, positions, strict=True):
        source.begin_at(position)


def _source_of(loader: Any, name: str) -> Source:
    # A DataLoader that makes its own iterator is treated as any iterable.
    own = isinstance(loader, DataLoader) and type(loader)._get_iterator is not DataLoader._get_iterator
    if is_plain(loader) or (isinstance(loader, DataLoader) and not own and not stateful(loader)):
        return _OfDataLoader(loader, name)
    return _OfIterable(loader, name)


class Source:
    """A loader of a training, which may be any iterable over batches, with its position.

    Args:
        loader: The loader.
        name: Name of the loader, for messages.
    """

    stand_in: Any
    """Object to iterate over in place of the loader."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self.name = name
        self.stand_in = loader
        self.idle = False
        """Whether the next iteration yields nothing. Lightning makes one at the start of a fit that nobody reads."""
        self.ahead = True
        self.told: Callable[[], bool] = lambda: False
        """Returns whether this process was told to stop. Only then, workers that SIGTERM has ended are replaced."""
        self._armed: Position | None = None

    def generators(self) -> dict[str, Any]:
        """Return the random generators of the loader, by the path of attributes at which each one is found."""
        return {}

    def position(self, before: bool, ended: bool) -> Position:
        """Return the present position.

        Args:
            before: Whether to return the position before the last fetch, because Lightning holds the fetched batch, on
                which it has not trained yet.
            ended: Whether nothing more of this iteration will be read.
        """
        raise NotImplementedError

    def keep(self, before: bool, ended: bool) -> Callable[[], Position]:
        """Return a function that returns the `position` as it is now.

        The function is valid for one more fetch of a batch.

        Args:
            before: Whether the function returns the position before the batch that was fetched last.
            ended: Whether the loader has no more batches.
        """
        position = self.position(before, ended)
        return lambda: position

    def begin_at(self, position: Position) -> None:
        """Make the next iteration begin at this position."""
        raise NotImplementedError

    def differs(self, position: Position) -> bool:
        """Return whether the batch size, the dataset's length, or a stream's number of workers has changed.

        ``position`` has the values at the save.
        """
        return False

    def recount(self, position: Position) -> Position:
        """Return the saved position, converted to this loader's batches; called if `differs` returns True."""
        return position

    def behind_as_many(self, position: Position, loaders: int) -> Position:
        """Return the position to resume from if this loader is one of several and has changed since the save.

        It is after as many batches as the saved ``position``. A warning says that these may be other samples.
        ``loaders`` is the number of loaders.
        """
        loader = self.loader
        workers = position.get("num_workers")
        log.warning(
            "%s has %s, and had %s when the checkpoint was made. It is one of %d train dataloaders, so it continues "
            "after the same number of batches (%d): samples of this epoch are skipped or repeated.",
            self.name, _sizes(size_of(loader), length_of(loader), workers_of(loader)),
            _sizes(position["batch_size"], position.get("length"), workers), loaders, position["taken"],
        )  # fmt: skip
        return _without_states(position, loader) if self._has_other_workers(position) else position

    def _has_other_workers(self, position: Position) -> bool:
        then = position.get("num_workers")
        return then is not None and workers_of(self.loader) not in (None, then)

    def _begun_anew(self, position: Position) -> Position:
        """Return the position of the epoch's beginning, and warn that the epoch begins again.

        This is for a position from which it is unknown which samples were left.
        """
        loader = self.loader
        taken = position["taken"]
        size = position["batch_size"]
        workers = loader.num_workers if position["num_workers"] is None else position["num_workers"]
        if taken:
            log.warning(
                "%s has num_workers=%d and batch_size=%s, and had num_workers=%d and batch_size=%s when the checkpoint "
                "was made. It is unknown which samples were left, so this epoch begins again: %d batches (%d "
                "samples) that were trained on come again. With num_workers=%d and batch_size=%s it could continue.",
                self.name, loader.num_workers, size_of(loader), workers, size,
                taken, taken * (size or 1), workers, size,
            )  # fmt: skip
        return {**_without_states(position, loader), "taken": 0, "made": 0, "drawn": {}, "state": None}

    def problems(self) -> list[str]:
        """Return the reasons why the position cannot be saved, each with a remedy."""
        return []

    def detach(self) -> None:
        """Restore the loader to its state before this object was made."""

    def _set_epoch(self, position: Position) -> None:
        """Set the dataset's epoch number. Lightning's hook for this is called at an epoch's start only."""
        tell = getattr(getattr(self.loader, "dataset", None), "set_epoch", None)
        if position.get("epoch") is not None and callable(tell):
            tell(position["epoch"])

    def _tell(self, taken: int) -> None:
        if taken:
            log.warning(
                "%s cannot save its position: its first %d batches are fetched again to find it. With `state_dict` and "
                "`load_state_dict` it could continue at once.", self.name, taken
            )  # fmt: skip


def _without_states(position: Position, loader: Any) -> Position:
    """Return the position without the states of random generators, dataset and workers, which do not fit this loader.

    To reach such a position, the batches before it are fetched again.
    """
    states = {"dataset": None, "random": None, "seed": None, "turn": 0, "workers": {}, "first": {}}
    sizes = {"batch_size": size_of(loader), "length": length_of(loader), "num_workers": workers_of(loader)}
    return {**position, **states, **sizes}


class _OfDataLoader(Source):
    """A source for torch's DataLoader, whose iterator is replaced by one that knows its position."""

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        super().__init__(loader, name)
        self._here: IterationPosition | None = None
        self._resumed: Resumed | None = None
        # On this object only: other loaders of its class keep torch's iterator.
        vars(loader)["_get_iterator"] = _IteratorsOf(self)
        loader._iterator = None  # persistent workers of an earlier fit would not report their states
        if stateful(loader):
            # Lightning asks for states and loads them, which would move the loader a second time.
            vars(loader).update(state_dict=dict, load_state_dict=self._leave_out)

    def generators(self) -> dict[str, Any]:
        names = ["generator", "sampler", "batch_sampler"]
        if self.loader.num_workers == 0:
            # With workers, these two are copied into other processes, whose states travel with the batches.
            names += ["dataset", "collate_fn"]
        return generators_in({name: getattr(self.loader, name) for name in names})

    def position(self, before: bool, ended: bool) -> Position:
        if self._here is None or (ended and not self._persists):
            dataset = self.loader.dataset
            local = not self.loader.num_workers and stateful(dataset)
            state = copy.deepcopy(dataset.state_dict()) if local else None
            return {"ended": ended, "dataset": state, "epoch": epoch_of(self.loader)}
        return self._here.position(before)

    def keep(self, before: bool, ended: bool) -> Callable[[], Position]:
        if self._here is None or (ended and not self._persists):
            return super().keep(before, ended)
        return self._here.keep(before)

    def begin_at(self, position: Position) -> None:
        dataset: Any = self.loader.dataset
        self._set_epoch(position)
        if position.get("dataset") is not None and resumable(dataset):
            # A copy, because the dataset may keep and change the object, and another attempt may need it.
            state = copy.deepcopy(position["dataset"])
            if self._is_iterable:
                self._resumed = Resumed(dataset, ended="taken" not in position or position.get("exhausted", False))
                self._resumed.load_state_dict(state)
            else:
                dataset.load_state_dict(state)
        if "taken" in position:
            self._armed = position
        else:
            self.idle = position["ended"]

    def differs(self, position: Position) -> bool:
        if "taken" not in position or "batch_size" not in position or position.get("exhausted"):
            return False
        sizes = size_of(self.loader), length_of(self.loader)
        return (position["batch_size"], position["length"]) != sizes or self._has_other_workers(position)

    def recount(self, position: Position) -> Position:
        then = position["batch_size"]
        now = size_of(self.loader)
        if self._is_iterable:
            if self._has_other_workers(position):
                if max(position["num_workers"], self.loader.num_workers) > 1:  # samples were, or are, divided
                    return self._begun_anew(position)
                position = self._of_one_reader(position)
            return self._refetched(position, then, now) if then and now and then != now else position
        if not position["taken"] and not position["made"]:  # the epoch has not begun
            return self._undrawn(position)
        if not is_of_torch(self.loader.batch_sampler, BatchSampler) or (order := self._order(position)) is None:
            log.warning(
                "%s has %s, and had %s when the checkpoint was made. It is unknown which samples its batches had, so "
                "it continues after the same number of batches (%d): samples of this epoch may be skipped or repeated.",
                self.name, _sizes(now, length_of(self.loader), None), _sizes(then, position["length"], None),
                position["taken"],
            )  # fmt: skip
            return position
        return self._behind(position, order)

    def _undrawn(self, position: Position) -> Position:
        """Return ``position``, from which nothing was fetched yet, converted to the dataset's present length.

        If the position is the start of a normal epoch, it is returned unchanged. If it lists the rest of an epoch,
        which was divided among another number of ranks, then indices that the dataset no longer has are removed. The
        rest keeps the batch size of the save, and a warning says so.
        """
        told = position.get("share") or {}
        then = position["batch_size"]
        now = size_of(self.loader)
        if told.get("kind") != "given":
            return position
        if then != now:
            log.warning(
                "%s has batches of %s, and %s when the checkpoint was made. The rest of this epoch was divided "
                "among another number of ranks, and is trained on in batches of %s, later epochs in batches of %s.",
                self.name, now, then, then, now,
            )  # fmt: skip
        if position["length"] == (length := length_of(self.loader)):
            return position
        left = told["indices"].tolist()
        found = self._still_there(position, left, as_many=told.get("left", len(left)) != len(left))
        if told.get("full_batches"):
            # The division has promised full batches only.
            found = found[: len(found) - len(found) % told["batch_size"]]
        given = {**told, "length": length, "indices": torch.tensor(found, dtype=torch.int64)}
        return {**position, "batch_size": now, "length": length, "share": given}

    def _still_there(self, position: Position, left: list[int], as_many: bool = False) -> list[int]:
        """Return the indices in ``left`` that the dataset still has; warn if the dataset's length has changed.

        Args:
            position: Saved position, which has the dataset's length at the save.
            left: Indices that were not trained on.
            as_many: Whether lost indices are replaced, so that there are as many as before; see `kept`. Default: False.
        """
        length = len(self.loader.dataset)
        sampler = getattr(self.loader.batch_sampler, "sampler", None)
        if length != position["length"]:
            gone = len(left) - len(kept(left, length, as_many=False))
            log.warning(
                "The dataset of %s has %d samples, and had %d when the checkpoint was made. This epoch continues with "
                "the %d samples that were left%s. Each index is assumed to be the same sample as before.",
                self.name, length, position["length"], len(left) - gone,
                f", and without the {gone} that are gone" if gone else "; new samples come in the next epoch",
            )  # fmt: skip
        return kept(left, length, as_many=as_many or isinstance(sampler, DistributedSampler))

    def _order(self, position: Position) -> list[int] | None:
        """Return all indices of the present epoch, in the order of the epoch; None if they cannot be known."""
        if position.get("share") is not None:
            return share(position)
        batches = self.loader.batch_sampler
        size = position["batch_size"]
        if size is None or not is_of_torch(batches, BatchSampler) or not hasattr(batches.sampler, "__len__"):
            return None
        sampler: Any = batches.sampler
        generators = Generators(self.generators())
        tape = Tape(generators, position["drawn"])
        order = list[int]()
        with generators.kept():
            drawn = tape.call(lambda: iter(BatchSampler(sampler, size, False)))
            for _ in range(-(-len(sampler) // size)):
                order += tape.call(lambda: next(drawn, []))
        return order

    def _behind(self, position: Position, order: list[int]) -> Position:
        """Return a position from which the remaining indices of ``order`` come next, in batches of the present size.

        The remaining indices are those that training had not reached at ``position``.
        """
        told = position.get("share") or {}
        size = size_of(self.loader) or 1
        batches: Any = self.loader.batch_sampler
        length, drops = len(self.loader.dataset), batches.drop_last  # pyright: ignore[reportArgumentType]
        left = order[position["taken"] * told.get("batch_size", position["batch_size"]) :]
        found = self._still_there(position, left)
        if length == position["length"]:
            log.info(
                "%s has batches of %s, and of %s when the checkpoint was made: %d samples of this epoch are left.",
                self.name, size, position["batch_size"], len(found),
            )  # fmt: skip
        if drops:
            found = found[: len(found) - len(found) % size]
        given = {
            "kind": "given", "length": length, "batch_size": size, "full_batches": drops,
            "indices": torch.tensor(found, dtype=torch.int64),
        }  # fmt: skip
        sizes = {"batch_size": size_of(self.loader), "length": length}
        return {**position, **sizes, "taken": 0, "made": 0, "drawn": {}, "share": given}

    def _refetched(self, position: Position, then: int, now: int) -> Position:
        """Return the position in an iterable dataset after the batch size has changed from ``then`` to ``now``.

        If the dataset has no saved state, the position is rounded down to whole batches of each worker.
        """
        samples = position["taken"] * then
        if resumable(self.loader.dataset):  # the dataset's own state holds its place
            return {**position, "batch_size": now, "taken": samples // now}
        workers = max(1, self.loader.num_workers)
        # Rounded down for each worker: to repeat samples is better than to skip some.
        taken = position["taken"] // workers * then // now * workers
        if taken * now != samples:
            log.warning(
                "%s has batches of %d, and of %d when the checkpoint was made: of the %d samples that were trained on "
                "in this epoch the last %d come again. With `state_dict` and `load_state_dict` its dataset could go on "
                "at once.", self.name, now, then, samples, samples - taken * now,
            )  # fmt: skip
        return {**position, "batch_size": now, "taken": taken}

    def _of_one_reader(self, position: Position) -> Position:
        """Convert a position after a change between reading in this process and reading in one worker.

        At the save, the dataset was read in one of the two ways. This loader reads it in the other way.
        """
        workers = position["workers"]
        state = workers.get(0, {}).get("dataset") if position["num_workers"] else position["dataset"]
        moved = _without_states(position, self.loader)
        loader = self.loader
        if state is not None and resumable(loader.dataset):
            into = {"workers": {0: {"random": {}, "dataset": state}}} if loader.num_workers else {"dataset": state}
            return {**moved, **into, "batch_size": position["batch_size"]}
        if position["taken"]:
            log.warning(
                "%s has num_workers=%d, and had num_workers=%d when the checkpoint was made. It continues after %d "
                "batches (%d samples) of this epoch. If its dataset draws the order from the process, and not from "
                "a seed of its own, these are not the ones that were trained on; with num_workers=%d they are.",
                self.name, loader.num_workers, position["num_workers"], position["taken"],
                position["taken"] * (position["batch_size"] or 1), position["num_workers"],
            )  # fmt: skip
        return {**moved, "drawn": {}, "batch_size": position["batch_size"]}

    def problems(self) -> list[str]:
        loader = self.loader
        found = []
        if not getattr(loader, "in_order", True):
            found.append(
                f"{self.name} yields batches in the order in which its workers are ready (in_order=False), which no "
                "resume can repeat: use in_order=True"
            )
        if not is_plain(loader) and type(loader).__iter__ is not DataLoader.__iter__:
            found.append(
                f"{self.name} is a {type(loader).__name__} with an `__iter__` of its own, of which no position is "
                "known: give it `state_dict` and `load_state_dict`, or yield one batch for each of the DataLoader's"
            )
        return found

    def detach(self) -> None:
        for name in ("_get_iterator", "state_dict", "load_state_dict"):
            vars(self.loader).pop(name, None)
        if stateful(self.loader):
            self.loader._iterator = None  # has no state that the loader could return

    def _leave_out(self, state: dict[str, Any]) -> None:
        if state:
            log.warning(
                "%s begins the epoch anew: the checkpoint holds its position as its own `state_dict` had it, without "
                "the order of samples and random states, and is not one of FaultTolerantCheckpoint.", self.name
            )  # fmt: skip

    @property
    def _is_iterable(self) -> bool:
        return self.loader._dataset_kind == _DatasetKind.Iterable

    @property
    def _persists(self) -> bool:
        return self.loader.persistent_workers and self.loader.num_workers > 0

    def _iterator(self) -> Iterator[Any]:
        # Persistent workers are started even so: they stay for the iterations that follow.
        if self.idle and not self._persists:
            return Nothing()
        start = self._armed
        self._armed = None
        if start and self._is_iterable and not resumable(self.loader.dataset):
            self._tell(start["taken"])
        self._here = IterationPosition(self.loader, Generators(self.generators()), start, self.ahead, self._resumed)
        self._here.told = lambda: self.told()
        return iterate(self.loader, self._here)


class _IteratorsOf:
    """A function that replaces a loader's `_get_iterator`, and makes iterators that know their position.

    A pickle or a deep copy of the loader has torch's `_get_iterator`, and not this one.
    """

    def __init__(self, source: _OfDataLoader) -> None:
        self._loader = source.loader
        self.source = source

    def __call__(self) -> Iterator[Any]:
        return self.source._iterator()

    def __reduce__(self) -> Any:
        return getattr, (self._loader, "_get_iterator")


class _OfIterable(Source):
    """A source for an iterable that is not a plain DataLoader of torch.

    It resumes with the iterable's ``load_state_dict``, or by fetching batches again.
    """

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__(loader, name)
        self.stand_in = _Followed(loader, self._iterator)
        self._now: Callable[[], Position] = lambda: {"taken": 0, "state": None}
        self._before: Position | None = None
        self._first: list[Position] = []
        self._tape: Tape | None = None
        self._iterates = loader
        self._dataset: Any = None
        self._loaded = self._loaded_before = False

    def generators(self) -> dict[str, Any]:
        return generators_in({"loader": self.loader})

    def position(self, before: bool, ended: bool) -> Position:
        if ended:
            return {"ended": True, "state": self._now()["state"], "epoch": epoch_of(self.loader)}
        now = (self._before if before else None) or self._now()
        return {**now, "drawn": self._tape.drawn(now["made"]) if self._tape is not None else {}}

    def keep(self, before: bool, ended: bool) -> Callable[[], Position]:
        if before or ended:
            return super().keep(before, ended)
        first = []
        tape = self._tape  # the state may take long to read, and is read before the next fetch anyway
        self._first = first

        def later() -> Position:
            now = {**first[0], "random": None} if first else self._now()
            return {**now, "drawn": tape.drawn(now["made"]) if tape is not None else {}}

        return later

    def begin_at(self, position: Position) -> None:
        self._set_epoch(position)
        if position.get("state") is not None and self._by_state:
            ended = "taken" not in position
            loader = self.loader
            if not isinstance(loader, DataLoader):
                self._iterates = Resumed(loader, ended)
            elif loader._dataset_kind == _DatasetKind.Iterable and stateful(loader.dataset):
                # Kept for `detach`, which restores it.
                self._dataset = loader.dataset
                vars(loader)["dataset"] = Resumed(loader.dataset, ended)  # the loader loads its state
            self._iterates.load_state_dict(copy.deepcopy(position["state"]))
            self._loaded = True
            if ended:
                # The iteration is started only to be over, so it must not draw random numbers.
                with Generators(self.generators()).kept():
                    self._begin()  # the ended iteration must be over before the next one
        if "taken" in position:
            self._armed = position
        else:
            self.idle = position["ended"]

    def differs(self, position: Position) -> bool:
        if "taken" not in position or "batch_size" not in position or not isinstance(self.loader, DataLoader):
            return False
        return position["batch_size"] != size_of(self.loader) or self._has_other_workers(position)

    def recount(self, position: Position) -> Position:
        return self._begun_anew(position)

    def detach(self) -> None:
        if self._dataset is not None:
            vars(self.loader)["dataset"] = self._dataset

    @property
    def _by_state(self) -> bool:
        dataset = getattr(self.loader, "dataset", None)
        return stateful(self.loader) and (not stateful(dataset) or resumable(dataset))

    def _begin(self) -> Iterator[Any]:
        loaded = self._loaded
        self._loaded = False
        if self._loaded_before and getattr(self.loader, "restore", False) is True:
            # litdata's loader begins at a loaded state until an iteration has reached its end, as none may do here.
            self.loader.restore = False
        self._loaded_before = loaded
        return iter(self._iterates)

    def problems(self) -> list[str]:
        if isinstance(self.loader, DataLoader) and hasattr(self.loader, "restore"):  # litdata's
            return [
                f"{self.name} is a {type(self.loader).__name__}, which does not go on in the same order within a "
                "later epoch than the first: use torch's DataLoader, which reads its dataset again up to its place"
            ]
        if isinstance(self.loader, DataLoader) and stateful(self.loader) and self.loader.num_workers > 0:
            return [
                f"{self.name} is a {type(self.loader).__name__}, which does not save its workers' random states: use "
                "torch's DataLoader, whose position and workers are saved here"
            ]
        if callable(getattr(self.loader, "__next__", None)) and not isinstance(self.loader, DataLoader):
            return [
                f"{self.name} is an iterator ({type(self.loader).__name__}), which cannot begin again: pass what makes "
                "it, with `__iter__`"
            ]
        return []

    def _iterator(self) -> Iterator[Any]:
        generators = Generators(self.generators())
        if self.idle:
            return
        start = self._armed or {}
        self._armed = None
        again = not self._by_state
        self._tape = tape = Tape(generators, start.get("drawn") if again else None)
        taken = 0
        first = start.get("random")
        sizes = {}
        if again and isinstance(self.loader, DataLoader):
            # A loader with a state of its own converts its position itself.
            sizes = {"batch_size": size_of(self.loader), "num_workers": workers_of(self.loader)}

        def now(random: Any = None) -> Position:
            # Before the first fetch, the loaded state is the present one; litdata's loader would change it if asked.
            loaded = start.get("state") if tape.made <= 1 else None
            state = None if again else copy.deepcopy(loaded or self.loader.state_dict())
            epoch = epoch_of(self.loader)
            return {"taken": taken, "made": tape.made, "random": random, "state": state, "epoch": epoch, **sizes}

        self._now = now
        self._before = None
        batches = tape.call(self._begin)
        if start and (again or start.get("state") is None):
            self._tell(start["taken"])
            with generators.kept():
                for _ in range(start["taken"]):
                    tape.call(lambda: next(batches, None))
        taken = start.get("taken", 0)
        while True:
            if first is not None:
                generators.put(first)
                first = None
            self._before = now(generators.take())
            # Kept for a position that was asked for after the last fetch, see `keep`.
            if not self._first:
                self._first.append(self._before)
            try:
                batch = tape.call(lambda: next(batches))
            except StopIteration:
                return
            taken += 1
            yield batch


class _Followed:
    """A loader that stands in for another loader.

    Its iterations keep the position of the loader's `Source` up to date.
    """

    def __init__(self, loader: Any, iterator: Callable[[], Iterator[Any]]) -> None:
        self._loader = loader
        self._make = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._make()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __reduce__(self) -> Any:
        return operator.itemgetter(0), ((self._loader,),)  # a copy is a copy of the loader, and keeps no position
