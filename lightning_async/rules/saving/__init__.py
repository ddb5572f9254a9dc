"""When to save, and what to keep."""

from lightning_async.rules.saving.keep import Best, EveryNth, KeepAny, KeepPolicy, LastGood, Latest, Saved
from lightning_async.rules.saving.when import (
    Adaptive,
    AnySave,
    AtEpochEnd,
    EveryInterval,
    EveryNTrainSteps,
    Progress,
    SavePolicy,
)

__all__ = [
    "Adaptive",
    "AnySave",
    "AtEpochEnd",
    "Best",
    "EveryInterval",
    "EveryNTrainSteps",
    "EveryNth",
    "KeepAny",
    "KeepPolicy",
    "LastGood",
    "Latest",
    "Progress",
    "SavePolicy",
    "Saved",
]
