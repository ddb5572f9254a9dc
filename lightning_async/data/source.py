"""A loader whose position can be saved, and which can begin at a saved one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from lightning_async.data.iterators import Here, Position, epoch_of, iterate
from lightning_async.data.random_states import Generators, generators_in
from lightning_async.data.tape import Tape
from lightning_async.data.workers import Resumed, resumable, stateful

__all__ = ["Source", "begin_at", "generators_of", "sources_of"]

log = logging.getLogger(__name__)


def sources_of(loaders: Sequence[Any]) -> list[Source]:
    """How the positions of a training's loaders, any iterables, are followed."""
    names = ["the train dataloader"] if len(loaders) == 1 else [f"train dataloader {i}" for i in range(len(loaders))]
    return [_source_of(loader, name) for loader, name in zip(loaders, names, strict=True)]


def generators_of(sources: Sequence[Source]) -> Generators:
    """All that draws random numbers: what everybody uses, and what these loaders have of their own."""
    named = {
        f"{index}.{path}": generator
        for index, source in enumerate(sources)
        for path, generator in source.generators().items()
    }
    return Generators(named, devices=True)


def begin_at(sources: Sequence[Source], positions: Sequence[Position]) -> None:
    """The next iteration of each begins at its position.

    Raises:
        ValueError: there are more, or fewer, loaders than then.
    """
    if len(sources) != len(positions):
        raise ValueError(
            f"the checkpoint is of a training with {len(positions)} train dataloaders, and this one has {len(sources)}."
        )
    for source, position in zip(sources, positions, strict=True):
        source.begin_at(position)


def _source_of(loader: Any, name: str) -> Source:
    own = isinstance(loader, DataLoader) and type(loader)._get_iterator is not DataLoader._get_iterator
    if isinstance(loader, DataLoader) and not own and not stateful(loader):
        return _OfDataLoader(loader, name)
    return _OfIterable(loader, name)


class Source:
    """One loader of a training.

    Args:
        loader: any iterable over batches.
        name: what messages call it.
    """

    stand_in: Any
    """What to iterate over in place of the loader."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader, self.name, self.stand_in = loader, name, loader
        self.idle = False
        """An iteration yields nothing: Lightning makes one at the start of fit that nobody reads."""
        self.ahead = True
        """Lightning fetches a batch ahead, as it does where it does not know the number of batches."""
        self._armed: Position | None = None

    def generators(self) -> dict[str, Any]:
        """The random generators that the loader holds, by path."""
        return {}

    def position(self, before: bool, ended: bool) -> Position:
        """Where the iteration stands.

        Args:
            before: before the last fetch, for Lightning holds the batch and has not trained on it.
            ended: nothing more of this iteration will be read.
        """
        raise NotImplementedError

    def keep(self, before: bool, ended: bool) -> Callable[[], Position]:
        """The same, put together when it is asked for, at most one fetch later."""
        position = self.position(before, ended)
        return lambda: position

    def begin_at(self, position: Position) -> None:
        """The next iteration begins there."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """What keeps the position from being saved, and what to do."""
        return []

    def detach(self) -> None:
        """Leave the loader as it was."""

    def _set_epoch(self, position: Position) -> None:
        """Tell the dataset its epoch, as a hook at the epoch's start has done, which is not called again within it."""
        if position.get("epoch") is not None and callable(getattr(self.loader.dataset, "set_epoch", None)):
            self.loader.dataset.set_epoch(position["epoch"])

    def _tell(self, taken: int) -> None:
        if taken:
            log.warning(
                "%s cannot save its position: its first %d batches are fetched again to find it. With `state_dict` and "
                "`load_state_dict` it could go on at once.", self.name, taken
            )  # fmt: skip


class _OfDataLoader(Source):
    """torch's own DataLoader, with an iterator of ours."""

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        super().__init__(loader, name)
        self._here: Here | None = None
        self._resumed: Resumed | None = None
        vars(loader)["_get_iterator"] = self._iterator
        loader._iterator = None  # workers that persist from an earlier fit were made without us

    def generators(self) -> dict[str, Any]:
        names = ["generator", "sampler", "batch_sampler"]
        if self.loader.num_workers == 0:
            names += ["dataset", "collate_fn"]
        return generators_in({name: getattr(self.loader, name) for name in names})

    def position(self, before: bool, ended: bool) -> Position:
        if self._here is None or (ended and not self._persists):
            return {"ended": ended, "dataset": self._dataset_state(), "epoch": epoch_of(self.loader)}
        return self._here.position(before)

    def keep(self, before: bool, ended: bool) -> Callable[[], Position]:
        if self._here is None or (ended and not self._persists):
            return super().keep(before, ended)
        return self._here.keep(before)

    def begin_at(self, position: Position) -> None:
        dataset: Any = self.loader.dataset
        self._set_epoch(position)
        if position.get("dataset") is not None and resumable(dataset):
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

    def problems(self) -> list[str]:
        loader, found = self.loader, []
        if not getattr(loader, "in_order", True):
            found.append(
                f"{self.name} yields batches in the order in which its workers are ready (in_order=False), which no "
                "resume can repeat: use in_order=True"
            )
        if type(loader).__iter__ is not DataLoader.__iter__:
            found.append(
                f"{self.name} is a {type(loader).__name__} with an `__iter__` of its own, of which no position is "
                "known: give it `state_dict` and `load_state_dict`, or yield one batch for each of the DataLoader's"
            )
        return found

    def detach(self) -> None:
        vars(self.loader).pop("_get_iterator", None)

    @property
    def _is_iterable(self) -> bool:
        return self.loader._dataset_kind == _DatasetKind.Iterable

    @property
    def _persists(self) -> bool:
        return self.loader.persistent_workers and self.loader.num_workers > 0

    def _dataset_state(self) -> Any:
        dataset = self.loader.dataset
        return copy.deepcopy(dataset.state_dict()) if not self.loader.num_workers and stateful(dataset) else None

    def _iterator(self) -> Iterator[Any]:
        if self.idle and not self._persists:
            return iter(())
        start, self._armed = self._armed, None
        if start and self._is_iterable and not resumable(self.loader.dataset):
            self._tell(start["taken"])
        self._here = Here(self.loader, Generators(self.generators()), start, self.ahead, self._resumed)
        return iterate(self.loader, self._here)


class _OfIterable(Source):
    """Any other iterable: by its ``state_dict``, or by fetching again."""

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__(loader, name)
        self.stand_in = _Followed(loader, self._iterator)
        self._now: Callable[[], Position] = lambda: {"taken": 0, "state": None}
        self._before: Position | None = None
        self._first: list[Position] = []
        """The position before the first fetch since `keep`."""
        self._tape: Tape | None = None

    def generators(self) -> dict[str, Any]:
        return generators_in({"loader": self.loader})

    def position(self, before: bool, ended: bool) -> Position:
        if ended:
            return {"ended": True, "state": self._now()["state"]}
        now = (self._before if before else None) or self._now()
        return {**now, "drawn": self._tape.drawn(now["made"]) if self._tape is not None else {}}

    def keep(self, before: bool, ended: bool) -> Callable[[], Position]:
        if before or ended:
            return super().keep(before, ended)
        first, tape = [], self._tape  # to ask the loader for its state may take long: it is asked before each fetch
        self._first = first

        def later() -> Position:
            now = {**first[0], "random": None} if first else self._now()
            return {**now, "drawn": tape.drawn(now["made"]) if tape is not None else {}}

        return later

    def begin_at(self, position: Position) -> None:
        if position.get("state") is not None and stateful(self.loader):
            self.loader.load_state_dict(copy.deepcopy(position["state"]))
        if "taken" in position:
            self._armed = position
        else:
            self.idle = position["ended"]

    def problems(self) -> list[str]:
        if isinstance(self.loader, DataLoader) and stateful(self.loader) and self.loader.num_workers > 0:
            return [
                f"{self.name} is a {type(self.loader).__name__}, which does not save its workers' random states: use "
                "torch's DataLoader, whose position and workers are saved here"
            ]
        if iter_is_itself(self.loader):
            return [
                f"{self.name} is an iterator ({type(self.loader).__name__}), which cannot begin again: pass what makes "
                "it, with `__iter__`"
            ]
        return []

    def _iterator(self) -> Iterator[Any]:
        if self.idle:
            yield from ()
            return
        start, self._armed = self._armed or {}, None
        again, generators = not stateful(self.loader), Generators(self.generators())
        self._tape = tape = Tape(generators, start.get("drawn") if again else None)
        taken, first = 0, start.get("random")

        def now(random: Any = None) -> Position:
            state = None if again else copy.deepcopy(self.loader.state_dict())
            return {"taken": taken, "made": tape.made, "random": random, "state": state}

        self._now, self._before = now, None
        batches = tape.call(lambda: iter(self.loader))
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
            if not self._first:
                self._first.append(self._before)
            try:
                batch = tape.call(lambda: next(batches))
            except StopIteration:
                return
            taken += 1
            yield batch


def iter_is_itself(loader: Any) -> bool:
    """Whether it is an iterator, and not what makes one."""
    return callable(getattr(loader, "__next__", None)) and not isinstance(loader, DataLoader)


class _Followed:
    """An iterable, with an iterator of ours; all else is its own."""

    def __init__(self, loader: Any, iterator: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._make = loader, iterator

    def __iter__(self) -> Iterator[Any]:
        return self._make()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
