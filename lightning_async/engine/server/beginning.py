"""How a server comes to have weights: a worker brings them, with the optimizer's state, and says what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.server.quorum import Terms, told_staleness
from lightning_async.engine.server.refused import Refused
from lightning_async.engine.server.store import Store

__all__ = ["Beginning"]


class Beginning:
    """Of one server; used under its lock.

    Args:
        store: its shard.
        terms: see there.
    """

    def __init__(self, store: Store, terms: Terms) -> None:
        self._store, self._terms = store, terms
        self._brought: dict[str, Tensor] = {}

    def check_plan(self, worker: str, fingerprint: str) -> None:
        """Whether a worker has the plan that the weights are of; Refused, where it has not."""
        if self._store.ready and fingerprint != (mine := self._store.contents["fingerprint"]):
            raise Refused("settings", f"worker {worker!r} comes with plan {fingerprint}, the server has {mine}.")

    def bring(self, field: str, memory: Tensor) -> None:
        """A field of the optimizer's state, for `begin`."""
        self._brought[field] = memory.view(torch.float32).clone()

    def begin(self, header: Mapping[str, Any], memory: Tensor) -> None:
        """Take these weights, where there are none, or where others are to begin ``anew``.

        Raises:
            Refused: there is no such optimizer, or another one, or what was brought for it is not there.
        """
        state = {name: self._brought.pop(name, None) for name in header["fields"]}
        if header["anew"] or not self._store.ready:
            self._begin(header, memory.view(torch.float32), state)
        self._check(header)

    def _begin(self, header: Mapping[str, Any], params: Tensor, state: dict[str, Tensor | None]) -> None:
        if missing := [name for name, field in state.items() if field is None]:
            raise Refused("uninitialised", f"{missing} were brought to the server that was here before: start again.")
        terms = header["optimizer"], header["arguments"], header["fingerprint"]
        try:
            policy = self._terms.policy(header["optimizer"], header["arguments"])
            before = self._store.incarnation if self._store.ready else None
            if self._store.ready:
                self._store.clear()
            self._store.initialise(params, *terms, policy, state, header["scalars"])  # pyright: ignore
            self._store.note(warmup_steps=header.get("warmup_steps"), replaced=before)
        except (TypeError, ValueError) as error:
            raise Refused("settings", str(error)) from error

    def _check(self, header: Mapping[str, Any]) -> None:
        mine, theirs = self._store.contents, header
        for name in ("optimizer", "arguments", "fingerprint"):
            if mine[name] != theirs[name]:
                raise Refused("settings", f"`{name}` is {theirs[name]!r} there and {mine[name]!r} on the server.")
        policy = theirs.get("staleness")
        if policy not in (None, told := told_staleness(self._terms.staleness), mine["staleness"]):
            raise Refused("settings", f"`staleness` is {policy!r} there and {told!r} on the server.")
