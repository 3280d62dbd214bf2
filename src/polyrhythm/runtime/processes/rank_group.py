"""One incarnation of a station: its processes, one for each rank. Most stations have one rank.

It is ready when all ranks are, and to be replaced as soon as one is; then all are killed, and it has ended when the
last of them has been reaped. Commands go to all ranks, in the same order.

The reason for replacing it is that of the rank that failed first. Where one rank ends, the others see their
connections to it break and fail too, so a rank that was killed comes before one that aborted without a word (NCCL does,
when another rank is gone), and that before one that said why it ends; of those counts the one that failed first by the
clock of their host; then a rank that refused a command, then one that is silent or takes too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from polyrhythm.runtime.hosts import Departure
from polyrhythm.runtime.messages import Joined
from polyrhythm.runtime.processes.process import ChildProcess
from polyrhythm.runtime.processes.supervision import Failure, SupervisionLimits
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import DROPPED, UnfitMessage


class RankGroup:
    """The processes of an incarnation, by rank. culprit: the one for which it is replaced, once `complaint` found it;
    ended: `kill` was called. leaves: why it has to, though nothing is wrong with it; hosts: of the run, that its
    processes were told of at their start."""

    def __init__(self, station: str, incarnation: int, hosts: Collection[str] = ()) -> None:
        self.station, self.incarnation, self.hosts = station, incarnation, hosts
        self.leaves: Departure | None = None
        self.processes: list[ChildProcess] = []
        self.culprit: ChildProcess | None = None
        self.ended = False

    def __iter__(self) -> Iterator[ChildProcess]:
        return iter(self.processes)

    @property
    def first(self) -> ChildProcess:
        """Rank 0, which speaks for the station."""
        return self.processes[0]

    def rank(self, number: int) -> ChildProcess:
        """The process of this rank. UnfitMessage: there is none."""
        if not 0 <= number < len(self.processes):
            raise UnfitMessage("unknown_station", f"it is signed by rank {number} of {self.station}")
        return self.processes[number]

    @property
    def joined(self) -> Joined | None:
        """The station's announcement, once rank 0 is ready."""
        return self.first.joined

    @property
    def present(self) -> bool:
        """All ranks have announced themselves."""
        return all(process.monitor.present for process in self.processes)

    @property
    def is_starting(self) -> bool:
        """Whether a rank is not ready yet, and does not wait for somebody to join."""
        return not all(process.monitor.present or process.monitor.awaits for process in self.processes)

    @property
    def reachable(self) -> bool:
        """All ranks are ready, and have not been killed here."""
        return all(process.reachable for process in self.processes)

    @property
    def exited(self) -> bool:
        """Every rank has been reaped."""
        return all(process.exited for process in self.processes)

    @property
    def any_exited(self) -> bool:
        """A rank has been reaped."""
        return any(process.exited for process in self.processes)

    @property
    def alive(self) -> list[int]:
        """The ids of its processes that have not been reaped."""
        return [process.pid for process in self.processes if not process.exited]

    # ------------------------------------------------------------ messages

    def tell(self, message: wire.Message, part: int = 0) -> None:
        """Send to one part of every rank."""
        for process in self.processes:
            process.tell(message, part)

    def tell_all(self, message: wire.Message) -> None:
        """Send to all parts of every rank."""
        for process in self.processes:
            process.tell_all(message)

    def stop(self) -> None:
        """Have the ranks leave that are ready."""
        for process in self.processes:
            if process.monitor.present and not process.exited:
                process.tell_all(wire.Stop())

    def note_failure(self, failed: wire.Failed) -> None:
        """A rank says why it ends. UnfitMessage: there is no such rank."""
        self.rank(failed.rank).failure = failed

    # ------------------------------------------------------------ supervision

    def is_suspect(self, now: float, limits: SupervisionLimits) -> bool:
        """Whether a rank has ended, refused a command, or is to be given up, or all are to leave."""
        return self.leaves is not None or any(
            p.exited or p.refusal or now >= p.monitor.deadline(limits) for p in self.processes
        )

    def is_silent(self, now: float, limits: SupervisionLimits) -> bool:
        """Whether heartbeats of a rank are missing, and that is all that may be wrong."""
        told = self.leaves is not None or any(p.exited or p.refusal for p in self.processes)
        return not told and any(p.monitor.is_silent(now, limits) for p in self.processes)

    def was_heard(self, since: float) -> bool:
        """Whether a heartbeat of a rank has come since then."""
        return any(process.monitor.last_heartbeat >= since for process in self.processes)

    def note_pause(self, seconds: float) -> None:
        """Main did not listen for so long."""
        for process in self.processes:
            process.monitor.note_pause(seconds)

    def complaint(self, now: float, limits: SupervisionLimits) -> str:
        """The reason for replacing it, in words; "" if nothing is wrong with any rank."""
        wrong = {p: words for p in self.processes if (words := _complaint(p, now, limits))}
        if not wrong:
            return self.leaves.reason if self.leaves is not None else ""
        self.culprit = min(wrong, key=self._precedence)
        words = wrong[self.culprit]
        return words if len(self.processes) == 1 else f"rank {self.culprit.rank}: {words}"

    def moves_for(self, reason: str) -> bool:
        """Whether it is replaced, for this reason of `complaint`, because a node that came has room for it."""
        return self.leaves is not None and self.leaves.moves and reason == self.leaves.reason

    def _precedence(self, process: ChildProcess) -> tuple[int, float]:
        """The lower, the earlier it failed, as far as can be told."""
        if process.failure is not None:
            return 2, process.failure.at
        if process.exited:
            return int(process.aborted), process.rank
        return 3 if process.refusal else 4, process.rank

    def failure(self, updates: int) -> Failure:
        """What its loss counts as, after `complaint`. updates: of the run so far."""
        culprit = self.culprit or self.first
        error = culprit.failure.error if culprit.failure is not None else ""
        return Failure(self.station, self.first.monitor.began, self.present, culprit.killed, error, updates)

    @property
    def awaits(self) -> bool:
        """Whether it waits for somebody to join."""
        return self.first.monitor.awaits and not self.ended

    @property
    def departed(self) -> wire.Failed | None:
        """How it told that who had joined is gone, if that is why it is replaced."""
        failure = self.culprit.failure if self.culprit is not None else None
        return failure if failure is not None and failure.departed else None

    @property
    def fatal(self) -> bool:
        """Whether the next incarnation would fail in the same way."""
        return self.culprit is not None and self.culprit.failure is not None and self.culprit.failure.fatal

    def kill(self) -> None:
        """Kill every rank that has not ended, and close the lines to them, without waiting."""
        self.ended = True
        for process in self.processes:
            process.kill()

    # ------------------------------------------------------------ what it has done

    def current_call(self, now: float) -> str:
        """The call under way of the rank that has been at it longest, in words; "" between two units of work."""
        called = [process for process in self.processes if process.monitor.current_call(now)]
        return min(called, key=lambda p: p.monitor.since).monitor.current_call(now) if called else ""

    def statistics(self) -> Counter[str]:
        """The counters as last heard: rank 0's, as all ranks do the same work; `busy_s` is the mean over the ranks,
        and messages that any of them dropped count."""
        beats: list[Mapping[str, float]] = [p.heartbeat.statistics if p.heartbeat else {} for p in self.processes]
        found: Counter[str] = Counter(beats[0])
        for beat in beats[1:]:
            found.update({name: count for name, count in beat.items() if name == "busy_s" or name.startswith(DROPPED)})
        if "busy_s" in found:
            found["busy_s"] /= len(beats)  # type: ignore[assignment] # seconds among counts
        return found


def _complaint(process: ChildProcess, now: float, limits: SupervisionLimits) -> str:
    return process.how_it_ended() or process.refusal or process.monitor.complaint(now, limits)
