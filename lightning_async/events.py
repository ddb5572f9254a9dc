"""Events of a run, in lines that people read and programs parse: the logger ``lightning_async.events``.

    Rank 1 goes on as rank 0 of 2: ... [event=lost rank=0 generation=1 world_size=2 names=1,2]

Each line ends with its event and its facts. A formatter of JSON finds the same in the record's attribute ``event``.
"""

from __future__ import annotations

import json
import logging
import re

_log = logging.getLogger(__name__)
_PLAIN = re.compile(r"[^\s\"=\]]+")


def tell(event: str, level: int, words: str, **facts: object) -> None:
    """Log one event: its name, the same for people in whole sentences, and facts.

    Facts are numbers, words, and lists of these.
    """
    if _log.isEnabledFor(level):
        shown = " ".join(f"{name}={_value(fact)}" for name, fact in {"event": event, **facts}.items())
        _log.log(level, "%s [%s]", words, shown, extra={"event": {"event": event, **facts}})


def _value(fact: object) -> str:
    """As JSON, without the quotes of what needs none.

    >>> _value("a b"), _value("ab"), _value(("1", "2")), _value(0.25), _value(None), _value(())
    ('"a b"', 'ab', '1,2', '0.25', 'null', '""')
    """
    if isinstance(fact, (list, tuple, set, frozenset)):
        fact = ",".join(map(str, fact))
    if isinstance(fact, str):
        return fact if _PLAIN.fullmatch(fact) else json.dumps(fact)
    return json.dumps(fact, default=str)
