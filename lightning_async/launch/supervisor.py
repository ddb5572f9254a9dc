"""The supervisor of a job: it hands events to `state_machine.decide`, and performs the actions."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

from lightning_async.launch import state_machine
from lightning_async.launch.environment import LaunchedJob
from lightning_async.launch.event_loop import EventLoop
from lightning_async.launch.process import HUNG, Ending, how, report, signal_name
from lightning_async.launch.ranks import Ranks
from lightning_async.launch.registry import Registry
from lightning_async.launch.state_machine import LaunchState, Phase, Policy
from lightning_async.membership.launcher_channel import Death
from lightning_async.membership.signing import SECRET

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


class Supervisor:
    """A supervisor that starts the ranks of a job, and ends them.

    Args:
        job: The program.
        policy: Settings of the launcher.
        logs: Directory for one file for each rank. Default: None.
    """

    def __init__(self, job: LaunchedJob, policy: Policy, logs: Path | None = None) -> None:
        self._job = job
        self._policy = policy
        self._logs = logs
        self._state = LaunchState()
        self._loop = EventLoop()
        self._told: dict[int, int] = {}
        self._living: dict[int, tuple[int, float]] = {}  # process id and start time of each rank that lives
        self._endings: list[Ending] = []
        self._waits: set[int | None] = set()
        self._port = self._attempt = 0
        self._code: int | None = None
        self._hung: frozenset[int] = frozenset()
        self._registry = Registry(job.base.get(SECRET, ""), tuple(job.program))

    def run(self) -> int:
        self._ranks = ranks = Ranks(self._job, self._policy, self._logs, self._loop, self)
        try:
            with self._loop.signals(self._signalled):
                try:
                    self._state, actions = state_machine.begin(self._policy)
                    self._perform(actions)
                    while self._code is None:
                        self._loop.step(ranks.outputs)
                except OSError as error:
                    self._say(f"{error}: all ranks end")
                    self._code = state_machine.CANNOT_START
                ranks.leave()  # not after other errors: ranks then save, as if the launcher had been killed
            return self._code
        finally:
            self._registry.remove()
            ranks.close()
            self._loop.close()

    def started(self, rank: int, pid: int) -> None:
        self._living[rank] = pid, time.monotonic()

    def told(self, rank: int, number: int, members: tuple[str, ...]) -> None:
        """Handle a rank's report that it is in a generation with these members."""
        numbers = {str(number): number for number in self._policy.all}
        if numbers.keys() >= set(members):
            generation = state_machine.LaunchGeneration(number, frozenset(numbers[name] for name in members))
            self._follow(state_machine.RankReported(rank, generation))

    def ended(self, ending: Ending) -> None:
        """Record that a rank has ended, and do what the state machine decides."""
        self._living.pop(ending.rank, None)
        self._endings.append(replace(ending, told=self._told.get(ending.rank)))
        status = HUNG if ending.rank in self._hung else ending.status
        self._follow(state_machine.Ended(ending.rank, status, ending.failure))

    def unkept(self, how: str) -> None:
        """Log that the process that holds the store has ended, and do what the state machine decides.

        ``how`` says how the process ended.
        """
        self._say(f"The process that keeps the store has ended ({how}).")
        self._follow(state_machine.StoreEnded())

    def hung(self, words: str) -> None:
        """Kill all ranks, because none takes steps any more; their ends are then handled like those of dead ranks."""
        if self._state.phase is Phase.RUNNING and self._state.asked is None:
            self._say(f"{words}\nAll are killed.")
            self._hung = self._state.living
            self._perform([state_machine.Send(signal.SIGKILL, self._hung)])

    def _signalled(self, number: int) -> None:
        self._say(f"{signal_name(number)} has come.")
        self._follow(state_machine.Signalled(number, time.monotonic()))

    def _say(self, text: str) -> None:
        self._ranks.outputs.say(text)

    def _due(self, rank: int | None) -> None:
        self._waits.discard(rank)
        self._follow(state_machine.Due(rank))

    def _follow(self, event: state_machine.Event) -> None:
        before = self._state
        self._state, actions = state_machine.decide(self._policy, before, event)
        if self._state.repeated and not before.repeated:
            self._tell_of_the_repeated(*self._state.repeated)
        if self._state.phase is Phase.RUNNING and before.trains:
            self._tell_of_the_lost(before, actions)
        if self._state.phase is not before.phase:
            self._tell(before, actions)
        self._perform(actions)

    def _perform(self, actions: list[state_machine.Action]) -> None:
        for action in actions:
            if isinstance(action, state_machine.StartRanks):
                self._start(action.ranks)
            elif isinstance(action, state_machine.Send):
                if action.number in _ENDS:
                    self._told.update(dict.fromkeys(action.ranks, action.number))
                self._ranks.send(action.number, action.ranks)
            elif isinstance(action, state_machine.Announce):
                self._announce(action.dead, action.ranks)
            elif isinstance(action, state_machine.Finish):
                self._code = action.code
            elif isinstance(action, state_machine.Rejoin):
                self._start_again(action)
            else:
                self._waits.add(action.rank)
                self._loop.after(action.seconds, (self, action.rank), lambda rank=action.rank: self._due(rank))

    def _announce(self, dead: int, ranks: frozenset[int]) -> None:
        ending = next(each for each in reversed(self._endings) if each.rank == dead)
        self._ranks.tell(Death(dead, ending.pid, f"died: its process {how(ending)}"), ranks)

    def _start(self, ranks: frozenset[int]) -> None:
        self._port = self._ranks.open_store()
        self._attempt = self._state.restarts
        self._registry.write(self._port)
        self._endings.clear()
        self._hung = frozenset()
        for rank in self._waits:
            self._loop.cancel((self, rank))
        self._waits.clear()
        for rank in sorted(ranks):
            self._start_rank(rank)

    def _start_again(self, action: state_machine.Rejoin) -> None:
        """Start one rank alone, while others train.

        If it cannot be started, record that it has ended; the others continue.
        """
        try:
            self._start_rank(action.rank, action.count)
        except OSError as error:
            self._say(f"rank {action.rank} cannot be started again: {error}")
            self.ended(Ending(action.rank, 0, state_machine.CANNOT_START, 0.0, tail=(str(error).encode(),)))

    def _start_rank(self, rank: int, rejoins: int = 0) -> None:
        self._told.pop(rank, None)
        self._ranks.start(rank, self._port, self._attempt, rejoins)

    def _tell_of_the_lost(self, before: LaunchState, actions: list[state_machine.Action]) -> None:
        state = self._state
        left = len(state.agreed.members) if state.agreed is not None else 0
        goes_on = f"training goes on with {left} of {self._policy.ranks} ranks."
        last = {ending.rank: ending for ending in self._endings}
        if lost := state.lost - before.lost:
            self._say(f"{report([ending for rank, ending in last.items() if rank in lost], None, None)}: {goes_on}")
        for rank in sorted(before.lost - state.lost):
            self._say(f"rank {rank} has joined the others: {goes_on}")
        for rank in sorted(before.lost & before.living - state.living):
            self._say(f"{report([last[rank]], None, None)}, before it had joined the others.")
        waits = [action for action in actions if isinstance(action, state_machine.Wait) and action.rank is not None]
        for restart, action in enumerate(waits, start=before.restarts + len(before.pausing) + 1):
            number = f"restart {restart} of {self._policy.max_restarts}"
            self._say(f"Rank {action.rank} starts again in {action.seconds:g} s, to join the others ({number}).")

    def _tell_of_the_repeated(self, last: state_machine.Ended, before: state_machine.Ended) -> None:
        failure = last.failure
        assert failure is not None and before.failure is not None
        common = sorted(set(failure.samples).intersection(before.failure.samples))
        samples = f", one of the samples {common}" if common else ""
        self._say(
            f"rank {last.rank} has failed in epoch {failure.epoch}, batch {failure.batch}{samples}, by the same "
            f"exception as rank {before.rank} before: {failure.text}\nAnother start would fail, too, so the job ends. "
            f"{self._policy.max_restarts - self._state.restarts} of {self._policy.max_restarts} restarts are left."
        )

    def _tell(self, before: LaunchState, actions: list[state_machine.Action]) -> None:
        state = self._state
        say = self._say
        for rank in sorted((state.lost - before.lost) & state.living) if state.phase is Phase.STOPPING else ():
            process = f"rank {rank} (process {self._living[rank][0]})"
            say(f"{process} lives, and the others went on without it: in {self._policy.grace_s:g} s it is killed.")
        if state.phase is Phase.STOPPING and state.first is not None:
            first = [ending for ending in self._endings if ending.rank == state.first][-1:]
            say(f"{report(first, None, None)}: the others end too.")
        elif state.phase is Phase.STOPPING and state.living <= before.lost and not state.asked and not state.store_lost:
            say("All others are done: those that have not joined them end too.")
        elif state.phase is Phase.BACKING_OFF:
            say(report(self._endings, state.first, None, state.lost))
            pause = self._policy.pause_s(state.anew)
            number = f"restart {state.restarts + 1} of {self._policy.max_restarts}"
            say(f"All ranks start again in {pause:g} s ({number}).")
        elif state.phase is Phase.FINISHED:
            code = next(action.code for action in actions if isinstance(action, state_machine.Finish))
            if code or state.lost or state.rejoins:
                say(report(self._endings, state.first, code, state.lost))
