"""Replaces stations that have ended or are given up, without making the other stations wait.

    suspected   a rank has ended, exceeds a deadline, or refused a command; what it had sent is received, which may
                clear it
    ending      all its ranks are killed, and their lines are closed
    exited      the kernel has reaped them, so they write nowhere; what they had sent before is received
    lost        the conductor is told, and the next incarnation starts

`advance` takes every step that is due and never waits: events of other stations are received in between.

Invariant: a station is lost only after its processes have been reaped and their last messages have been received.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.processes.manager import ProcessManager
from polyrhythm.runtime.processes.rank_group import RankGroup

#: Seconds after which what a process had sent has arrived, if the inbox was empty then; and at the latest, where other
#: stations keep it from being empty.
_ARRIVED_S, _LONGEST_S = 0.05, 0.5
#: Seconds that the kernel may take to end a killed process.
_REAP_S = 10.0


@dataclass(slots=True)
class _Replacement:
    """Of one incarnation. suspected, killed, exited: when it was found to be so; reason: why it is replaced."""

    group: RankGroup
    suspected: float
    killed: float = math.inf
    exited: float = math.inf
    reason: str = ""


class Replacements:
    """The replacements under way, by station."""

    def __init__(self, manager: ProcessManager) -> None:
        self._manager = manager
        self._under_way: dict[str, _Replacement] = {}
        self._empty = -math.inf  # when the inbox was last found empty

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._under_way)

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
            if not self._received(replacement.suspected, now):
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
        return replacement.exited < math.inf and self._received(replacement.exited, now)

    def _received(self, since: float, now: float) -> bool:
        """Whether everything has been received that was sent by then."""
        return self._empty >= since + _ARRIVED_S or now >= since + _LONGEST_S
