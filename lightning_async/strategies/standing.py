"""What a replica that trains says of itself for ``lightning-async status``."""

from __future__ import annotations

import os
import time

from lightning_async.comm.membership.standing import Standing
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.header import Gate
from lightning_async.rules.pace import Pace, straggler
from lightning_async.strategies.survivors import Survivors

__all__ = ["standing_of"]


def standing_of(averager: BackgroundAverager, survivors: Survivors | None, run: int) -> Standing:
    """Where this replica stands: read without locks, as nothing depends on it.

    Args:
        averager: of the run.
        survivors: who is left, where ranks may be lost.
        run: its number.
    """
    control, summary, ledger = averager.control, averager.summary, averager.ledger
    generation = control.membership.generation if survivors is None else survivors.generation
    gate = control.mailbox.gate
    if control.reforming:
        state = "re-forms"
    elif gate is not Gate.NONE:
        state = f"waits ({gate.name.lower().replace('_', ' ')})"
    elif survivors is not None and survivors.are_short:
        state = "waits (replicas)"
    else:
        state = "trains"
    exchanges = summary.rounds + summary.consensuses + summary.synchronous_steps
    names = generation.members if survivors is None else survivors.names
    mine, paces = averager.gates.name, averager.gates.paces
    found = straggler({name: Pace(*pace) for name, pace in paces.items()})
    return Standing(
        name=names[generation.rank] if generation.rank < len(names) else generation.name,
        rank=generation.rank,
        members=names,
        run=run,
        generation=generation.number,
        state=state,
        epoch=averager.epoch,
        step=averager.step,
        samples=summary.samples,
        rounds=summary.exchanges,
        round_ago_s=time.monotonic() - ledger.last_round if exchanges else -1.0,
        round_s=summary.each_s,
        failed_rounds=control.mailbox.failed,
        hidden_share=summary.hidden_share,
        idle_s=summary.idle_s,
        slow=f"{found.slower:.1f} times slower: {found.reason}" if found is not None and found.name == mine else "",
        sent_bytes=summary.sent_bytes,
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
    )
