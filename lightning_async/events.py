"""Events of a run, logged by ``lightning_async.events`` in lines that people read and programs parse.

    Rank 1 goes on as rank 0 of 2: ... [event=lost rank=0 generation=1 world_size=2 names=1,2]

Each line ends with the event's name and its facts. The log record holds them as a dictionary in its attribute
``event``, too, for formatters that write JSON.
"""

from __future__ import annotations

import json
import logging
import re

_log = logging.getLogger(__name__)
_PLAIN = re.compile(r"[^\s\"=\]]+")


def tell(event: str, level: int, words: str, **facts: object) -> None:
    """Log one event.

    Args:
        event: Name of the event.
        level: Level of the logging module, such as ``logging.INFO``.
        words: The event in full sentences, for people.
        facts: The event's values, for programs: numbers, strings, and lists of these.
    """
    if _log.isEnabledFor(level):
        shown = " ".join(f"{name}={_value(fact)}" for name, fact in {"event": event, **facts}.items())
        _log.log(level, "%s [%s]", words, shown, extra={"event": {"event": event, **facts}})


def _value(fact: object) -> str:
    """Return a fact as a short text for a log line.

    The text is JSON, without quotes where they are not needed. The items of a sequence are separated by commas.

    >>> _value("a b"), _value("ab"), _value(("1", "2")), _value(0.25), _value(None), _value(())
    ('"a b"', 'ab', '1,2', '0.25', 'null', '""')
    """
    if isinstance(fact, (list, tuple, set, frozenset)):
        fact = ",".join(map(str, fact))
    if isinstance(fact, str):
        return fact if _PLAIN.fullmatch(fact) else json.dumps(fact)
    return json.dumps(fact, default=str)
