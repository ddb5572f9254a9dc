"""What runs in a DataLoader's worker processes: each batch brings the worker's random states along.

Everything here is pickled where workers are spawned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_async.data.random_states import Generators, generators_in

__all__ = ["Carried", "Carrier", "Start", "stateful"]


def stateful(value: Any) -> bool:
    """Whether it can save and load its state, as torchdata's datasets and loaders do."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Carried:
    """A batch, and the state of the worker that made it.

    Args:
        batch: what the loader yields.
        worker: who made it.
        state: what has changed since the worker's last batch: its random states, its dataset's state.
    """

    def __init__(self, batch: Any, worker: int, state: dict[str, Any]) -> None:
        self.batch, self.worker, self.state = batch, worker, state

    def pin_memory(self) -> Carried:
        """As torch asks of batches of types that it does not know."""
        self.batch = pin_memory(self.batch)
        return self


class Carrier:
    """A loader's ``collate_fn``, which is the last that happens to a batch in a worker.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._generators: Generators | None = None
        self._sent: dict[str, Any] = {}

    def __call__(self, samples: Any) -> Carried:
        batch, info = self._collate(samples), get_worker_info()
        assert info is not None, "runs in workers"
        dataset: Any = info.dataset
        if self._generators is None:
            self._generators = _generators(dataset, self._collate)
        states = self._generators.take()
        changed = {name: state for name, state in states.items() if self._sent.get(name) != state}
        self._sent = states
        state: dict[str, Any] = {"random": changed}
        if stateful(dataset):
            # The queue pickles it later, in a thread, when the dataset is elsewhere already.
            state["dataset"] = copy.deepcopy(dataset.state_dict())
        return Carried(batch, info.id, state)


class Start:
    """A loader's ``worker_init_fn``: then puts the worker where it was.

    Args:
        init: the loader's own.
        states: by worker; one that is not there begins as any new worker.
        collate: may hold generators.
    """

    def __init__(
        self, init: Callable[[int], Any] | None, states: dict[int, dict[str, Any]], collate: Callable[[Any], Any]
    ) -> None:
        self._init, self._states, self._collate = init, states, collate

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        info, state = get_worker_info(), self._states.get(worker)
        if state is None or info is None:
            return
        dataset: Any = info.dataset
        if "dataset" in state and stateful(dataset):
            dataset.load_state_dict(state["dataset"])
        _generators(dataset, self._collate).put(state["random"])


def _generators(dataset: Any, collate: Any) -> Generators:
    return Generators(generators_in({"dataset": dataset, "collate_fn": collate}))
