"""Parameters that somebody writes to beside the optimizer (a callback, the module): servers do not hear of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_async.engine.digest import real

__all__ = ["Written"]


class Written:
    """What has become of one worker's parameters since weights were pulled into them.

    Args:
        names: of the parameters.
        params: themselves.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._names, self._params = names, params
        self._seen = self._versions()
        self._overwritten: set[int] = set()
        self.base: Literal["pulled", "pushed", "gone"] = "gone"
        """What the parameters held last, and what is where it came: something else, where it is ``"gone"``."""

    def begin(self) -> None:
        """Weights are about to be written to the parameters: what others wrote is lost by that."""
        self._overwritten |= self._changed()

    def end(self, base: Literal["pulled", "pushed"]) -> None:
        """The parameters hold what was pulled, or pushed."""
        self._seen, self.base = self._versions(), base

    def since(self, pulled: Sequence[Sequence[tuple[slice, Tensor]]] | None, every: bool) -> list[str]:
        """The names of parameters that hold something else than was pulled, or did, and were overwritten since.

        Args:
            pulled: the pieces of each parameter, where they came; None while newer ones are coming. A parameter that
                was written to, and back again, counts as one that was not; where nothing can be compared, too.
            every: look at all, and not only at those that autograd has seen a change of: ``.data`` hides it.
        """
        found = self._changed()
        if pulled is not None and self.base != "pushed":
            looked_at = set(range(len(self._params))) if every else found
            found = {i for i in looked_at if self.base == "pulled" and not _same(self._params[i], pulled[i])}
            self._seen = self._versions()
        found |= self._overwritten
        self._overwritten = set()
        return [self._names[i] for i in sorted(found)]

    def _changed(self) -> set[int]:
        pairs = zip(self._versions(), self._seen, strict=True)
        return {i for i, (now, seen) in enumerate(pairs) if now != seen}

    def _versions(self) -> list[int]:
        return [p._version for p in self._params]


def _same(param: Tensor, pieces: Sequence[tuple[slice, Tensor]]) -> bool:
    """To the bit: what is not a number is equal to itself."""
    flat = real(param.detach()).reshape(-1).to("cpu", torch.float32)
    return all(torch.equal(flat[part].view(torch.int32), piece.view(torch.int32)) for part, piece in pieces)
