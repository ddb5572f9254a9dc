"""Lightning lets only strategies on a list of its own train a module that `torch.compile` returned.

The Trainer looks at the module's mark of compilation after it has handed the module to the strategy, or asked the
strategy for it, and before it asks for the launcher. In between, the mark is off.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning_async.trainer.namespace import pl

__all__ = ["CompiledMark"]

_MARK = "_compiler_ctx"


class CompiledMark:
    """The mark of one strategy's module, and whether it is off."""

    def __init__(self) -> None:
        self._module: Any = None
        self._mark: Any = None

    def hide(self, module: Any) -> None:
        """The Trainer is about to look."""
        self.show()
        if getattr(module, _MARK, None) is not None:
            self._module, self._mark = module, getattr(module, _MARK)
            setattr(module, _MARK, None)

    def hide_from_trainer(self, module: Any) -> None:
        """`hide`, if `Trainer.validate`, `test` or `predict` is what asks the strategy for its module."""
        if getattr(module, _MARK, None) is not None:
            asks = {function.__code__ for function in (pl.Trainer.validate, pl.Trainer.test, pl.Trainer.predict)}
            frame = sys._getframe(2).f_back  # here, in the strategy's property, in the Trainer's, and who reads that
            if frame is not None and frame.f_code in asks:
                self.hide(module)

    def show(self) -> None:
        """It has looked."""
        if self._module is not None:
            setattr(self._module, _MARK, self._mark)
            self._module = self._mark = None
