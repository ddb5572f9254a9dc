"""torch's two iterators over a DataLoader, extended so that they know their position and can begin at one.

A position is a dictionary of plain values:

    taken      number of batches that were yielded
    made       number of calls of the sampler, which runs ahead of the workers
    exhausted  whether the iteration has ended
    drawn      random states from which these calls of the sampler drew, see `Tape`
    dataset    the dataset's own state, if it has one
    random     random states before the last fetch; the fetch is repeated if Lightning had not trained on its batch
    epoch      the dataset's epoch, if the dataset has `set_epoch`
    share      the indices of this epoch, see `redistribution.describe`
    batch_size, length   batch size of the loader and length of its dataset, if known; they may differ at the resume
    num_workers   number of workers of an iterable dataset, which may divide its samples among them
    seed, turn, workers, first    of workers: their seed, the next one to yield, their states now and at the start
"""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, sampler
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from lightning_async.data.random_states import (
    Carried,
    Carrier,
    Generators,
    Indices,
    Resumed,
    Tape,
    WorkerStart,
    resumable,
    stateful,
)
from lightning_async.data.redistribution import Given, describe, is_of_torch, length_of, size_of, workers_of

Position = dict[str, Any]
# Largest number of times that workers are replaced at one batch.
_REPLACED = 3
_LOOK_S = 0.5  # seconds between two looks whether a silent worker lives; torch's own value is 5

_OF_TORCH = (
    DistributedSampler, sampler.RandomSampler, sampler.SequentialSampler, sampler.SubsetRandomSampler,
    sampler.WeightedRandomSampler,
)  # fmt: skip


class IterationPosition:
    """The position of one iteration over a loader.

    Args:
        loader: The loader.
        generators: Random generators of the process and of the loader.
        start: Saved position at which the iteration begins. Default: None, the beginning.
        ahead: Whether Lightning may hold a batch that it has fetched and not yet trained on. Default: True.
        resumed: The loader's dataset after a saved state was loaded into it. Default: None, there is no such state.
    """

    def __init__(
        self,
        loader: Any,
        generators: Generators,
        start: Position | None,
        ahead: bool = True,
        resumed: Resumed | None = None,
    ) -> None:
        self.generators = generators
        self.start = start or {}
        self._ahead = ahead
        self.told: Callable[[], bool] = lambda: False
        self.taken = 0
        self.exhausted = bool(self.start.get("exhausted"))
        # Workers derive their random states from it, so that a resumed iteration needs the same.
        self.seed: int | None = self.start.get("seed")
        self.turn = 0
        self.workers: dict[int, dict[str, Any]] = {}
        self.first: dict[int, dict[str, Any]] = self.start.get("first", {})
        # torch's samplers draw only from torch's generator, and NumPy's state takes long to read.
        batches = loader.batch_sampler
        is_usual = is_of_torch(batches, BatchSampler) and type(batches.sampler) in _OF_TORCH
        usual = ("torch",) if is_usual else None
        self._drawing = Generators(generators.named, usual=usual) if usual is not None else generators
        self.tape = Tape(self._drawing)
        self._loader = loader
        told = self.start.get("share") or {}
        is_given = told.get("kind") == "given"
        self.given: Tensor | None = told["indices"] if is_given else None
        self._size: int = told["batch_size"] if is_given else 0
        self.stream: Position | None = told if told.get("kind") == "stream" else None
        """Part of the samples of a stream that lost ranks have not trained on; None if there is none."""
        self._before: Position | None = None
        local = not getattr(loader, "num_workers", 0)
        self._dataset = loader.dataset if local and stateful(loader.dataset) else None
        self._first_random = self.start.get("random")
        self._local = local
        self._resumed = resumed
        self.by_state = resumable(loader.dataset)

    def begin(self) -> Tape:
        """Begin a `Tape` (record) of the sampler's calls, and return it.

        The tape repeats those calls that the start position has recorded, with the same random numbers.
        """
        self.tape = Tape(self._drawing, self.start.get("drawn"))
        return self.tape

    def start_over(self) -> None:
        """Forget the start position, for a new iteration with the same workers."""
        self.start = {}
        self.taken = 0
        self.turn = 0
        self.exhausted = False
        self._before = None
        self.given = None
        self._size = 0
        self.stream = None

    def begin_again(self) -> None:
        """Make the present position the start position, because new workers replace workers that have died."""
        # The random states of the process stay as they are: only the workers are new.
        self.start = self.position()
        self._first_random = None

    def fetching(self) -> None:
        """Record that the next batch is about to be fetched.

        Before the first fetch, restore the saved random states.
        """
        if self._first_random is not None:
            self.generators.put(self._first_random)
            self._first_random = None
        # Kept for a save that happens while Lightning holds the batch of this fetch.
        if self._ahead:
            self._before = self._now(random=True)

    def position(self, before: bool = False) -> Position:
        """Return the present position; with ``before``, the position before the last fetch."""
        return self.keep(before)()

    def keep(self, before: bool) -> Callable[[], Position]:
        """Return a function that, whenever it is called, returns the `position` as it was when `keep` was called.

        The function builds the position, because to build it takes longer than to keep its parts. With ``before``, the
        position is that before the batch that was fetched last.
        """
        now = (self._before if before else None) or self._now(random=before)
        tape = self.tape
        given = self.given
        size = self._size
        stream = self.stream
        return lambda: {**now, "drawn": tape.drawn(now["made"]), "share": stream or describe(self._loader, given, size)}

    def dataset(self) -> Any:
        """Return the dataset to iterate over.

        If the start position names a part of a stream that lost ranks have not trained on, return that part. Otherwise
        return the loader's dataset, with its saved state if one was loaded.
        """
        if self.stream is not None:
            return self._loader.dataset.rest(self.stream)
        return self._loader.dataset if self._resumed is None else self._resumed

    def sampler(self) -> Any:
        """Return the loader's batch sampler.

        If the start position lists the remaining indices of the epoch, return a batch sampler over these indices.
        """
        if self.given is None:
            return self._loader._index_sampler
        drops = getattr(self._loader.batch_sampler, "drop_last", self._loader.drop_last)
        return BatchSampler(Given(self.given), self._size, drops)

    def _now(self, random: bool) -> Position:
        return {
            "taken": self.taken,
            "exhausted": self.exhausted,
            "made": self.tape.made,
            "seed": self.seed,
            "turn": self.turn,
            "workers": dict(self.workers),
            "first": self.first,
            "dataset": copy.deepcopy(self._dataset.state_dict()) if self._dataset is not None else None,
            "epoch": epoch_of(self._loader),
            "batch_size": size_of(self._loader),
            "length": length_of(self._loader),
            "num_workers": workers_of(self._loader),
            "random": self.generators.take() if self._local and random else None,
        }


def epoch_of(loader: Any) -> int | None:
    """Return the epoch of a loader's dataset, or None if the dataset has no `set_epoch`."""
    dataset = getattr(loader, "dataset", None)
    epoch = getattr(dataset, "epoch", None) if callable(getattr(dataset, "set_epoch", None)) else None
    return epoch if isinstance(epoch, int) else None


class _View:
    """A view of a loader in which some attributes have other values. The loader itself does not change."""

    def __init__(self, loader: Any, **replaced: Any) -> None:
        self._loader = loader
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def iterate(loader: DataLoader[Any], here: IterationPosition) -> Any:
    """Return an iterator over ``loader`` that keeps ``here`` up to date, and begins at ``here.start``."""
    start = here.start
    fetches_again = _fetches_again(loader, here)
    if here.exhausted:
        here.taken = start["taken"]
        # Nothing of an iteration that has ended is read again.
        fetches_again = False
        if not loader.persistent_workers:
            return Nothing(here)
    if loader.num_workers == 0:
        iterator: Any = _Single(loader, here, fetches_again)
    else:
        iterator = _Multi(loader, here, fetches_again)
    _skip_taken(iterator, here, fetches_again)
    return iterator


def _fetches_again(loader: Any, here: IterationPosition) -> bool:
    """Return whether the start position can be reached only by fetching all batches before it again."""
    start = here.start
    told = not start.get("taken") or start.get("dataset") is not None or start.get("workers")
    return loader._dataset_kind == _DatasetKind.Iterable and not (here.by_state and told)


def _skip_taken(iterator: Any, here: IterationPosition, fetches_again: bool) -> None:
    """Bring the iterator to the start position, and count the batches before this position as taken.

    With ``fetches_again`` those batches are fetched and dropped. Otherwise the iterator already begins after them.
    """
    start = here.start
    if not start or not fetches_again:
        here.taken = start.get("taken", 0)
        return
    # The random states belong to the fetch that follows the skipped ones.
    random = here._first_random
    here._first_random = None
    for _ in range(start["taken"]):
        next(iterator, None)
    here._first_random = random


def _indices(loader: Any, here: IterationPosition) -> Any:
    """Return the object that replaces the loader's sampler.

    For an iterable dataset, return the loader's own sampler.
    """
    if loader._dataset_kind == _DatasetKind.Iterable:
        return loader._index_sampler
    start = here.start
    return Indices(here.sampler, here.begin, here.generators, start.get("taken", 0), start.get("made", 0))


class Nothing:
    """An iterator that replaces an ended iteration, so that the worker processes of the loader can end.

    It is for one of several loaders. While the other loaders have batches, Lightning still requests a batch of the
    ended iteration. This iterator then raises StopIteration.

    Args:
        here: Position of the iteration. Default: None, nobody reads the iteration.
    """

    _finished = False  # torchdata's loader asks its iterator

    def __init__(self, here: IterationPosition | None = None) -> None:
        self._here = here

    def __iter__(self) -> Nothing:
        return self

    def __next__(self) -> Any:
        if self._here is not None:
            self._here.fetching()
        raise StopIteration


class _Single(_SingleProcessDataLoaderIter):
    """torch's iterator without workers, which also knows its position in the data."""

    _finished = False

    def __init__(self, loader: Any, here: IterationPosition, fetches_again: bool) -> None:
        self._here = here
        self._taped = fetches_again
        view: Any = _View(loader, _index_sampler=_indices(loader, here), dataset=here.dataset())
        if fetches_again:
            # torch makes the dataset's iterator here, which may draw random numbers.
            here.begin().call(lambda: super(_Single, self).__init__(view))
        else:
            super().__init__(view)

    def __next__(self) -> Any:
        here = self._here
        here.fetching()
        try:
            batch = super().__next__()
        except StopIteration:
            here.exhausted = True
            raise
        here.taken += 1
        # A last batch that is not full has reached the dataset's end, where a dataset may have begun again already.
        here.exhausted = getattr(self._dataset_fetcher, "ended", False)
        return batch

    def _next_data(self) -> Any:
        fetch = super()._next_data
        return self._here.tape.call(fetch) if self._taped else fetch()


class _Multi(_MultiProcessingDataLoaderIter):
    """torch's iterator with workers, which also knows its position in the data.

    If SIGTERM has ended the workers, new workers continue at the position.
    """

    _finished = False
    _replaced = -1, 0

    def __init__(self, loader: Any, here: IterationPosition, fetches_again: bool) -> None:
        self._here = here
        self._loader = loader
        start = here.start
        self._indices = _indices(loader, here)
        states = start.get("first" if fetches_again else "workers", {})
        if here.exhausted:  # the workers are started for the next iteration only
            states = {worker: {**state, "ended": True} for worker, state in states.items()}
        here.workers = dict(states)
        # Two records: states of batches that were received, and (`here.workers`) of batches that were yielded.
        self._received = dict(states)
        # Workers yield in turn, so that the next batch must come from the one whose turn it was.
        self._turns = 0 if fetches_again else start.get("turn", 0)
        here.turn = self._turns
        dataset = here.dataset()
        if loader._dataset_kind == _DatasetKind.Iterable and any("dataset" in state for state in states.values()):
            dataset = Resumed(dataset, idle=here.exhausted)
        view: Any = _View(
            loader,
            _index_sampler=self._indices,
            dataset=dataset,
            collate_fn=Carrier(loader.collate_fn),
            worker_init_fn=WorkerStart(loader.worker_init_fn, states, loader.collate_fn),
        )
        super().__init__(view)

    @property
    def _base_seed(self) -> int:
        assert self._here.seed is not None
        return self._here.seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        if self._here.seed is None:  # a resumed iteration gives its workers the seed that they had
            self._here.seed = drawn

    def __next__(self) -> Any:
        here = self._here
        here.fetching()
        while True:
            try:
                batch = super().__next__()
            except StopIteration:
                here.exhausted = True
                raise
            except Exception:
                # An error of the dataset occurs again with new workers, so the number of attempts is limited.
                place, times = self._replaced
                times = times + 1 if place == here.taken else 1
                if times > _REPLACED or not self._were_told() or not here.told():
                    raise
                self._replaced = here.taken, times
                self._replace_workers()
            else:
                here.taken += 1
                return batch

    def _were_told(self) -> bool:
        """Return whether workers have ended because of SIGTERM.

        Either the signal has killed a worker, or a worker has ended with exit code 0, as torch's workers do if their
        parent sends them the signal.
        """
        return not self._shutdown and any(w.exitcode in (0, -signal.SIGTERM) for w in self._workers)

    def _replace_workers(self) -> None:
        """Start new workers, which begin at the present position.

        SIGTERM to the process group ends all workers, but this process must continue until the step at which all ranks
        save.
        """
        here = self._here
        loader = self._loader
        here.begin_again()
        self._shutdown_workers()
        fetches_again = _fetches_again(loader, here)
        # Counted again while batches are skipped below.
        here.taken = 0
        # New workers draw a seed, which must not move the random numbers of the process.
        with here.generators.kept():
            _Multi.__init__(self, loader, here, fetches_again)
            _skip_taken(self, here, fetches_again)

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        if not shutdown and self._workers[worker_id].exitcode is not None:
            # A worker that a signal ended may hold the lock of the shared event forever: use another event here.
            self._workers_done_event = threading.Event()
        super()._mark_worker_as_unavailable(worker_id, shutdown)

    def _shutdown_workers(self) -> None:
        if isinstance(getattr(self, "_workers_done_event", None), threading.Event):
            for worker in self._workers:  # they wait for the shared event, which is not set any more
                worker.terminate()
        super()._shutdown_workers()

    def _try_get_data(self, timeout: float = _LOOK_S) -> Any:
        return super()._try_get_data(timeout)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._here.start_over()
            if isinstance(self._indices, Indices):
                self._indices.start_over()
        super()._reset(loader, first_iter)
        if not first_iter:
            # The workers have drawn random numbers also for batches that nobody has taken.
            begun = {worker: {**state, "ended": True} for worker, state in self._received.items()}
            self._here.workers = begun
            self._here.first = {worker: {"random": state["random"]} for worker, state in begun.items()}

    def _get_data(self) -> Any:
        answer: Any = super()._get_data()
        if isinstance(answer[1], Carried):
            self._received[answer[1].worker] = _joined(self._received, answer[1])
        return answer

    def _try_put_index(self) -> None:
        if self._here.exhausted:
            return  # nothing is fetched for an iteration that has ended
        # Skip the workers that come before: torch would begin with worker 0.
        for _ in range(self._turns):
            next(self._worker_queue_idx_cycle)
        self._turns = 0
        super()._try_put_index()

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        carried = super()._process_data(data, worker_idx)
        if not isinstance(carried, Carried):
            return carried
        self._here.workers[carried.worker] = _joined(self._here.workers, carried)
        self._here.turn = (carried.worker + 1) % self._num_workers
        return carried.batch


def _joined(states: dict[int, dict[str, Any]], carried: Carried) -> dict[str, Any]:
    random = states.get(carried.worker, {}).get("random", {})
    return {**carried.state, "random": {**random, **carried.state["random"]}}
