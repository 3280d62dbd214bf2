"""Replaces stations that have ended or are given up, without making the other stations wait.

    suspected   a rank has ended, exceeds a deadline, or refused a command; what it had sent is received, which may
                clear it; one that is silent gets time for one heartbeat more
    ending      all its ranks are killed, and their lines are closed
    exited      the kernel has reaped them, so they write nowhere; what they had sent before is received
    lost        the conductor is told, and the next incarnation starts

`advance` takes every step that is due and never waits: events of other stations are received in between. All times are
of listening: between two looks at the inbox little of the time counts, however long main was busy or stopped, since
what has come meanwhile is not known yet.

Invariants: a station is given up only after everything that had come by then has been received. It is lost only after
its processes have been reaped and their last messages have been received.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.processes.manager import ProcessManager
from polyrhythm.runtime.processes.rank_group import RankGroup

#: Seconds after which what a process had sent has arrived, if the inbox is empty then: from main's host (a busy machine
#: lets ZeroMQ's thread wait), and from another one (three of its packets may be lost).
_ARRIVED_S, _ARRIVED_FROM_AFAR_S = 0.25, 1.5
#: Seconds for a silent process to speak once more: a heartbeat (`runtime.processes.child`).
_SPEAKS_S = 0.5
#: The most seconds between two looks at the inbox that count; and while a station is being replaced, when main looks
#: more often.
_LONGEST_S, _LONGEST_STEP_S = 1.0, 0.1
#: Seconds that the kernel, or the cluster whose node is gone, may take to end a killed process.
_REAP_S = 30.0


@dataclass(slots=True)
class _Replacement:
    """Of one incarnation. suspected, killed, exited: when it was found to be so; reason: why it is replaced."""

    group: RankGroup
    suspected: float
    killed: float = math.inf
    exited: float = math.inf
    reason: str = ""

    def note_pause(self, seconds: float) -> None:
        """Main did not listen for so long."""
        self.suspected += seconds
        self.killed += seconds
        self.exited += seconds


class Replacements:
    """The replacements under way, by station. now: main's clock."""

    def __init__(self, manager: ProcessManager, now: float) -> None:
        self._manager = manager
        self._under_way: dict[str, _Replacement] = {}
        self._listened = now
        self._empty = -math.inf  # when the inbox was last found empty

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._under_way)

    def listen(self, now: float) -> None:
        """Main looks at its inbox now; called before it takes note of what came."""
        pause = now - self._listened - (_LONGEST_STEP_S if self._under_way else _LONGEST_S)
        self._listened = now
        if pause > 0:
            self._manager.note_pause(pause)
            for replacement in self._under_way.values():
                replacement.note_pause(pause)

    def note_empty_inbox(self, now: float) -> None:
        """Everything that had arrived by now has been received."""
        self._empty = now

    def advance(self, now: float) -> list[tuple[RankGroup, str]]:
        """Take all steps that are due; the stations that are lost now, each with the reason.

        RunHalted: a killed process does not end in time.
        """
        for group in self._manager.suspects(now):
            self._under_way.setdefault(group.station, _Replacement(group, now))
        lost = [(r.group, r.reason) for r in list(self._under_way.values()) if self._is_lost(r, now)]
        for group, _ in lost:
            del self._under_way[group.station]
        return lost

    def _is_lost(self, replacement: _Replacement, now: float) -> bool:
        """Take the next steps of one replacement."""
        group = replacement.group
        if group.exited:
            replacement.exited = min(replacement.exited, now)
        if not group.ended:
            if self._empty < replacement.suspected + self._may_clear_s(group, now):
                return False
            replacement.reason = self._manager.complaint(group, now)
            if not replacement.reason:
                del self._under_way[group.station]
                return False
            self._manager.dismiss(group)
            replacement.killed = now
        if replacement.exited == math.inf and now >= replacement.killed + _REAP_S:
            pids = ", ".join(map(str, group.alive))
            raise RunHalted(
                f"{group.station}: its process {pids} has not ended {_REAP_S:g} s after SIGKILL, so its "
                "blocks cannot be reused; check its device or file system, then start again with resume"
            )
        return self._empty >= replacement.exited + self._arrived_s(group)

    def _may_clear_s(self, group: RankGroup, now: float) -> float:
        """Seconds in which it may say what clears it, or why it has ended. A refusal, and a call that takes too long by
        its own heartbeats, need none."""
        if group.any_exited:
            return self._arrived_s(group)
        return _SPEAKS_S if self._manager.is_silent(group, now) else 0.0

    def _arrived_s(self, group: RankGroup) -> float:
        return _ARRIVED_FROM_AFAR_S if self._manager.is_far(group) else _ARRIVED_S
