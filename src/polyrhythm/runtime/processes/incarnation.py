"""One incarnation of a station as a state machine, without I/O: facts about its processes in, the next step out; the
limits by which it is given up; and when failures end the run.

    starting   its ranks are being made, or wait for a simulator that joins
    ready      all ranks have announced themselves
    suspect    a rank has ended, exceeds a deadline or refused a command, or all have to leave; what it had sent is
               received, which may clear it; one that is silent gets time for one heartbeat more
    dying      its processes are killed, and their lines are closed
    gone       the kernel has reaped them, so they write nowhere, and what they had sent before has been received

A station has a process for each rank; most have one. It is ready when all ranks are, and suspect as soon as one is. The
reason for replacing it is that of the rank that failed first. Where one rank ends, the others see their connections to
it break and fail too, so a rank that was killed comes before one that aborted without a word (NCCL does, when another
rank is gone), and that before one that said why it ends; of those counts the one that failed first by the clock of
main's host; then a rank that refused a command, then one that is silent or takes too long.

The end of a process is seen by its parent at once; the limits find stations that hang. A stopped station sends no
heartbeat; one that hangs in a call names the call in its heartbeats. All times are of listening: time in which main did
not look at its inbox is nobody's silence (`pause`).

Stations may share a process (`Resources.process`), which ends as one: the failure is that of the station which said
why, or took too long; the others follow it and do not count as failed.

Invariants: an incarnation dies only after everything that had come by then has been received. It is gone only after its
processes have been reaped and their last messages have been received.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.hosts import Departure
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import DROPPED, UnfitMessage


class SupervisionLimits(Protocol):
    """Seconds after which a station is given up, by its call under way; and the number of failures a run survives."""

    @property
    def heartbeat_s(self) -> float: ...
    @property
    def start_s(self) -> float: ...
    @property
    def reset_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def pass_s(self) -> float: ...
    @property
    def update_s(self) -> float: ...
    @property
    def score_s(self) -> float: ...
    @property
    def max_failures(self) -> int: ...
    @property
    def max_start_failures(self) -> int: ...
    @property
    def forgive_s(self) -> float: ...


#: The call under way of a station that nobody has joined yet (`runtime.messages.StationTraits.attend`).
AWAITING = "join"
#: That of one whose simulator is to come back by another connection; `join.reconnect_s` limits it.
RECONNECTING = "reconnect"
#: A station that fails so often in a row with the same error text, while no update is done, ends the run.
MAX_SAME_WORDS = 5


#: Setting that limits a call, by its name; every other call is the trainer's (update_s).
_SETTING = {
    "reset": "reset_s",
    "discard": "reset_s",
    "step": "step_s",
    "observe": "step_s",
    "texts": "step_s",
    "pass": "pass_s",
    "score": "score_s",
}


def limiting_setting(doing: str) -> str:
    return _SETTING.get(doing, "update_s")


def call_limit(doing: str, limits: SupervisionLimits) -> float:
    if doing == RECONNECTING:
        return math.inf
    limit: float = getattr(limits, limiting_setting(doing))
    return limit


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of a station. began: when that incarnation was started; was_present: it had announced itself.

    killed: a signal from outside ended it, so its program is not the cause. error: that its program raised,
    "" if it ended otherwise. updates: of the run so far.
    """

    station: str
    began: float
    was_present: bool
    killed: bool = False
    error: str = ""
    updates: int = 0


@dataclass(slots=True)
class FailureTracker:
    """Counts failures; `verdict` decides whether they end the run.

    total: failures of the run. recent: failures since the last quiet period, which is `forgive_s` without a failure and
    with at least one update; a start that fails is not quiet, however long it takes. starts: by station, failures in a
    row before it was ready, by its own fault. repeats: by station, (error, updates of the run, failures in a row with
    both). last, updates: time of the latest failure, and the updates done by then.
    """

    total: int = 0
    recent: int = 0
    starts: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    last: float = math.inf
    updates: int = 0

    def count(self, failure: Failure, now: float, limits: SupervisionLimits) -> None:
        station = failure.station
        quiet_s = (now if failure.was_present else failure.began) - self.last
        if quiet_s >= limits.forgive_s and failure.updates > self.updates:
            self.recent = 0
            self.starts.clear()
        self.last, self.updates = now, failure.updates
        self.total += 1
        self.recent += 1
        if failure.was_present:
            self.starts[station] = 0
        elif not failure.killed:
            self.starts[station] = self.starts.get(station, 0) + 1
        error, updates = failure.error, failure.updates
        before, done, times = self.repeats.get(station, ("", 0, 0))
        again = times if (error, updates) == (before, done) else 0
        self.repeats[station] = (error, updates, again + 1 if error else 0)

    def verdict(self, station: str, limits: SupervisionLimits) -> str:
        """The reason for ending the run; "" if it goes on."""
        starts = self.starts.get(station, 0)
        if starts > limits.max_start_failures:
            times = "once" if starts == 1 else f"{starts} times in a row"
            return (
                f"{station} failed {times} before it was ready, {limits.max_start_failures} are allowed "
                "(supervision.max_start_failures)"
            )
        if self.repeats[station][2] >= MAX_SAME_WORDS:
            return f"{station} failed {MAX_SAME_WORDS} times in a row in the same way, and no update was done meanwhile"
        if self.recent > limits.max_failures:
            return f"{self.recent} failures, {limits.max_failures} are allowed (supervision.max_failures)"
        return ""


State = Literal["starting", "ready", "suspect", "dying", "gone"]
#: What has to be done with its processes: nothing, kill them, or report the station as lost.
Step = Literal["", "kill", "lost"]

#: Signals that come from somebody else: a person, the kernel for want of memory, a machine that shuts down.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
#: Seconds after which what a process had sent has arrived, if the inbox is empty then: from main's host (a busy machine
#: lets ZeroMQ's thread wait), and from another one (three of its packets may be lost).
_ARRIVED_S, _ARRIVED_FROM_AFAR_S = 0.25, 1.5
#: Seconds for a silent process to speak once more: a heartbeat (`runtime.processes.child`).
_SPEAKS_S = 0.5
#: Seconds that the kernel, or the cluster whose node is gone, may take to end a killed process.
_REAP_S = 30.0


@dataclass(slots=True, eq=False)
class Rank:
    """Facts about the process of a rank. pid: its process id, 0 while that is not known; began: when it was started;
    present: it has announced itself. heartbeat, heard: its last one, and when that came; doing, since: its call under
    way; place: where in user code that is, in words. paused: seconds in which main did not listen; heard and since are
    later by those that came after them. turns: stations of its process, which are made one after another. status: its
    exit status once it has been reaped, negative for a signal; failure: its report of the error that ended it; refusal:
    why it refused a command; killed: by somebody else, before main did."""

    number: int
    pid: int
    began: float
    present: bool = False
    heartbeat: wire.Heartbeat | None = None
    heard: float = field(default=-math.inf)
    doing: str = ""
    since: float = 0.0
    place: str = ""
    paused: float = 0.0
    turns: int = 1
    status: int | None = None
    failure: wire.Failed | None = None
    refusal: str = ""
    killed: bool = False

    @property
    def exited(self) -> bool:
        return self.status is not None

    @property
    def awaits(self) -> bool:
        """Whether it waits for somebody to join, for as long as that takes."""
        return not self.present and self.doing == AWAITING

    def on_heartbeat(self, now: float, doing: str, for_s: float, place: str = "") -> None:
        self.heard, self.doing, self.since, self.place = now, doing, now - for_s, place

    def pause(self, seconds: float) -> None:
        self.heard += seconds
        self.since += seconds
        self.paused += seconds

    def current_call(self, now: float) -> str:
        """The call under way and its duration, in words; "" between two units of work."""
        if self.awaits:
            return f"open to a simulator that joins for {now - self.since:.1f} s"
        if not self.present:
            return f"being started for {now - self.began:.1f} s"
        return f"in one {self.doing} for {now - self.since:.1f} s" if self.doing else ""

    def deadline(self, limits: SupervisionLimits) -> float:
        """The time at which it is given up, if no heartbeat comes before."""
        if self.awaits:
            return self.heard + limits.heartbeat_s
        if not self.present:
            return self.began + self.paused + self.turns * limits.start_s
        due = self.heard + limits.heartbeat_s
        return min(due, self.since + call_limit(self.doing, limits)) if self.doing else due

    def is_silent(self, now: float, limits: SupervisionLimits) -> bool:
        """Whether heartbeats are missing; there need be none before it is ready."""
        return (self.present or self.awaits) and now >= self.heard + limits.heartbeat_s

    def is_suspect(self, now: float, limits: SupervisionLimits) -> bool:
        return self.exited or bool(self.refusal) or now >= self.deadline(limits)

    def failure_reason(self, now: float, limits: SupervisionLimits) -> str:
        """The reason for giving it up now, in words; "" if there is none."""
        if self.status is not None and self.failure is not None:
            return self.failure.error
        if self.status is not None and self.status < 0:
            known = {number.value: number.name for number in signal.Signals}
            return f"was ended by {known.get(-self.status, f'signal {-self.status}')}"
        if self.status is not None:
            return f"ended with status {self.status}"
        if self.refusal or now < self.deadline(limits):
            return self.refusal
        if not self.present and not self.awaits:
            each = f" for each of the {self.turns} stations of its process" if self.turns > 1 else ""
            return f"was not ready within {self.turns * limits.start_s:g} s (supervision.start_s{each})"
        if self.is_silent(now, limits):
            return f"sent no heartbeat for {limits.heartbeat_s:g} s (supervision.heartbeat_s)"
        call = f"{self.doing} for {now - self.since:.1f} s{self.place}"
        return f"has been in one {call} (supervision.{limiting_setting(self.doing)})"

    def precedence(self) -> tuple[int, float]:
        """The lower, the earlier it failed, as far as can be told."""
        if self.failure is not None:
            return 2, self.failure.at
        if self.exited:
            return int(self.status == -signal.SIGABRT), self.number
        heard = not self.present and self.heartbeat is not None  # it works, and may wait for one that does not
        return 3 if self.refusal else 5 if heard else 4, self.number


@dataclass(slots=True, eq=False)
class Incarnation:
    """far: it works on another host than main's. reason, culprit: why it dies, and the rank that failed first, if one
    did; leaves: why it has to, though nothing is wrong with it. suspected, killed, exited: when it was found to be
    so. beside: incarnations of other stations in its process; follows: the one of them that failed and ended it, ""
    if none did."""

    station: str
    number: int
    ranks: list[Rank]
    far: bool = False
    state: State = "starting"
    reason: str = ""
    culprit: Rank | None = None
    leaves: Departure | None = None
    suspected: float = math.inf
    killed: float = math.inf
    exited: float = math.inf
    beside: list[Incarnation] = field(default_factory=list)
    follows: str = ""

    def rank(self, number: int) -> Rank:
        """UnfitMessage: there is no such rank."""
        if not 0 <= number < len(self.ranks):
            raise UnfitMessage("unknown_station", f"it is signed by rank {number} of {self.station}")
        return self.ranks[number]

    def announce(self, number: int) -> None:
        """A rank is ready."""
        self.rank(number).present = True
        if self.state == "starting" and self.announced:
            self.state = "ready"

    def pause(self, seconds: float) -> None:
        for rank in self.ranks:
            rank.pause(seconds)
        self.suspected += seconds
        self.killed += seconds
        self.exited += seconds

    def advance(self, now: float, empty: float, limits: SupervisionLimits) -> Step:
        """The next step that is due. empty: when main's inbox was last found empty. RunHalted: a killed process does
        not end."""
        if self.state in ("starting", "ready") and (
            self.leaves is not None or any(rank.is_suspect(now, limits) for rank in self.ranks)
        ):
            self.state, self.suspected = "suspect", now
        if all(rank.exited for rank in self.ranks):
            self.exited = min(self.exited, now)
        if self.state == "suspect" and empty >= self.suspected + self._may_clear_s(now, limits):
            return self._kill_or_clear(now, limits)
        if self.state != "dying":
            return ""
        if self.exited == math.inf and now >= self.killed + _REAP_S:
            pids = ", ".join(str(rank.pid) for rank in self.ranks if not rank.exited)
            raise RunHalted(
                f"{self.station}: its process {pids} has not ended {_REAP_S:g} s after SIGKILL, so its "
                "blocks cannot be reused; check its device or file system, then start again with resume"
            )
        if empty < self.exited + self._arrived_s:
            return ""
        self.state = "gone"
        return "lost"

    def _kill_or_clear(self, now: float, limits: SupervisionLimits) -> Step:
        wrong = {rank.number: words for rank in self.ranks if (words := rank.failure_reason(now, limits))}
        self.follows = self._cause_beside() if wrong else ""
        if self.follows:
            self.reason = f"works in one process with {self.follows}, which failed"
        elif wrong:
            self.culprit = min((self.ranks[number] for number in wrong), key=Rank.precedence)
            words = wrong[self.culprit.number]
            self.reason = words if len(self.ranks) == 1 else f"rank {self.culprit.number}: {words}"
        elif self.leaves is not None:
            self.reason = self.leaves.reason
        else:
            self.state = "ready" if self.announced else "starting"
            return ""
        self.state, self.killed = "dying", now
        for rank in self.ranks:
            rank.killed = rank.status is not None and -rank.status in _FROM_OUTSIDE
        return "kill"

    def _cause_beside(self) -> str:
        """The station of its process whose failure ended it; "" if that is its own. One says why it fails; else, as
        after a signal, the first that is looked at counts as the cause."""
        if any(rank.failure is not None or rank.refusal for rank in self.ranks):
            return ""
        for other in self.beside:
            named = any(rank.failure is not None or rank.refusal for rank in other.ranks)
            if named or not (other.alive or other.follows):
                return other.station
        return ""

    def _may_clear_s(self, now: float, limits: SupervisionLimits) -> float:
        """Seconds in which a message may still clear it, or give the reason of its end. A refusal, and a call that
        takes too long by its own heartbeats, need none."""
        if any(rank.exited for rank in self.ranks):
            return self._arrived_s
        told = self.leaves is not None or any(rank.refusal for rank in self.ranks)
        return _SPEAKS_S if not told and any(rank.is_silent(now, limits) for rank in self.ranks) else 0.0

    @property
    def _arrived_s(self) -> float:
        return _ARRIVED_FROM_AFAR_S if self.far else _ARRIVED_S

    @property
    def announced(self) -> bool:
        return all(rank.present for rank in self.ranks)

    @property
    def alive(self) -> bool:
        return self.state not in ("dying", "gone")

    @property
    def is_starting(self) -> bool:
        """Whether a rank is not ready yet, and does not wait for somebody to join."""
        return not all(rank.present or rank.awaits for rank in self.ranks)

    @property
    def awaits(self) -> bool:
        """Whether it waits for somebody to join."""
        return self.ranks[0].awaits and self.alive

    @property
    def moves(self) -> bool:
        """Whether it is replaced because a node that came has room for it."""
        return self.leaves is not None and self.leaves.moves and self.reason == self.leaves.reason

    @property
    def departed(self) -> wire.Failed | None:
        """Its report that the simulator that had joined is gone, if that is why it is replaced."""
        failure = self.culprit.failure if self.culprit is not None else None
        return failure if failure is not None and failure.departed else None

    @property
    def fatal(self) -> bool:
        """Whether the next incarnation would fail in the same way."""
        return self.culprit is not None and self.culprit.failure is not None and self.culprit.failure.fatal

    def failure(self, updates: int) -> Failure:
        """What its loss counts as. updates: of the run so far."""
        culprit = self.culprit or self.ranks[0]
        error = culprit.failure.error if culprit.failure is not None else ""
        return Failure(self.station, self.ranks[0].began, self.announced, culprit.killed, error, updates)

    def current_call(self, now: float) -> str:
        """The call under way of the rank that has been at it longest, in words; "" between two units of work."""
        called = [rank for rank in self.ranks if rank.current_call(now)]
        return min(called, key=lambda rank: rank.since).current_call(now) if called else ""

    def statistics(self) -> Counter[str]:
        """The counters as last heard: rank 0's, as all ranks do the same work; `busy_s` is the mean over the ranks,
        and messages that any of them dropped count."""
        beats: list[Mapping[str, float]] = [r.heartbeat.statistics if r.heartbeat else {} for r in self.ranks]
        found: Counter[str] = Counter(beats[0])
        for beat in beats[1:]:
            found.update({name: count for name, count in beat.items() if name == "busy_s" or name.startswith(DROPPED)})
        if "busy_s" in found:
            found["busy_s"] /= len(beats)  # type: ignore[assignment] # seconds among counts
        return found
