"""The processes of a run: each station's present incarnation, how it is reached, and what earlier ones had done."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import Resources, StationFactory, pack
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.expected import Joined
from polyrhythm.runtime.processes.process import ChildProcess
from polyrhythm.runtime.processes.supervision import Failure, FailureTracker, SupervisionLimits
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.scheduler import records
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)

#: How long stations are given to leave by themselves, and when those that have not are named.
_LEAVE_S, _NAMED_S = 5.0, 1.0


class ProcessManager:
    """Stations by name, in the order of `jobs`. main: the endpoint of main's inbox.

    progress: rises while a station works or is being started. updates: that the trainer has said it did.
    """

    def __init__(
        self,
        jobs: Sequence[tuple[StationFactory, Resources]],
        layout: ArenaLayout,
        weights: WeightsLayout,
        sockets: Sockets,
        *,
        main: str,
        limits: SupervisionLimits,
        logs: Path,
    ) -> None:
        self.processes: dict[str, ChildProcess] = {}
        self.progress = self.updates = 0
        self._jobs = {job.name: (job, seat) for job, seat in jobs}
        self._layout, self._weights, self._sockets, self._main = layout, weights, sockets, main
        self._limits, self._logs = limits, logs
        self._failures = FailureTracker()
        self._measuring = False
        self._parts: dict[str, int] = {}
        self._past: dict[str, Counter[str]] = {name: Counter() for name in self._jobs}

    # ------------------------------------------------------------ come and go

    def start(self, now: float) -> None:
        """Start the first incarnation of every station."""
        for name in self._jobs:
            self._spawn(name, 0, now)

    def _spawn(self, name: str, incarnation: int, now: float) -> None:
        job, seat = self._jobs[name]
        kind, content = pack(job)
        posting = ChildSpec(
            station=name,
            incarnation=incarnation,
            kind=kind,
            content=content,
            seat=seat,
            layout=self._layout,
            weights=self._weights,
            folder=self._sockets.folder,
            main=self._main,
            transport=self._sockets.transport,
            keys=self._sockets.keys,
            parent=os.getpid(),
        )
        self._logs.mkdir(parents=True, exist_ok=True)
        self.processes[name] = ChildProcess(posting, log_file(self._logs, name, incarnation), now)

    @property
    def complete(self) -> bool:
        """Every station stands ready."""
        return all(process.vigil.present for process in self.processes.values())

    def welcome(self, hello: wire.Hello, joined: Joined, now: float) -> None:
        """A station stands ready: know its parts and tell the generators where its slots are."""
        process = self.processes[hello.station]
        process.greet(self._sockets, hello.inboxes, joined)
        process.vigil.hear(now, "", 0.0)
        if self._measuring:
            process.tell_all(wire.MeasureSpans(True))  # before its first command
        if isinstance(joined, records.SimulatorJoined):
            for part, info in enumerate(joined.batches):
                self._parts |= {slot.slot: part for slot in info.slots}
            self._tell_generators(hello.inboxes)
        elif isinstance(joined, records.GeneratorJoined):
            for simulator in self._present(records.SimulatorJoined):
                for address, where in simulator.endpoints.items():
                    process.tell(wire.Connect(address, where))

    def _present(self, kind: type) -> list[ChildProcess]:
        """The processes that announced themselves so and can be told something."""
        return [p for p in self.processes.values() if p.reachable and isinstance(p.joined, kind)]

    def _tell_generators(self, inboxes: Mapping[str, str]) -> None:
        for generator in self._present(records.GeneratorJoined):
            for address, where in inboxes.items():
                generator.tell(wire.Connect(address, where))

    def measure_spans(self, on: bool) -> None:
        """Have all stations, the later ones included, say what they do, or no longer."""
        self._measuring = on
        for process in self.processes.values():
            process.tell_all(wire.MeasureSpans(on))

    def suspects(self, now: float) -> list[ChildProcess]:
        """The processes that have ended or are to be given up."""
        processes = self.processes.values()
        return [process for process in processes if process.exited or now >= process.vigil.deadline(self._limits)]

    def complaint(self, process: ChildProcess, now: float) -> str:
        """What is wrong with it, in words; "" if nothing is."""
        return process.how_it_ended() or process.vigil.complaint(now, self._limits)

    def dismiss(self, process: ChildProcess) -> None:
        """Kill and reap it, and close all lines to it: afterwards it writes nowhere."""
        process.end()
        if process.heartbeat is not None:
            self._past[process.station].update(process.heartbeat.statistics)
        if isinstance(process.joined, records.SimulatorJoined):
            self._tell_generators(dict.fromkeys(process.endpoints, ""))

    def judge(self, process: ChildProcess, reason: str, now: float) -> str | RunHalted:
        """What becomes of a station that was dismissed: another start, in words, or the end of the run."""
        name = process.station
        if process.last_words is not None and process.last_words.fatal:
            return RunHalted(f"{name}: {reason}")
        words = process.last_words.error if process.last_words is not None else ""
        vigil = process.vigil
        failure = Failure(name, vigil.began, vigil.present, process.killed, words, self.updates)
        self._failures.count(failure, now, self._limits)
        verdict = self._failures.verdict(name, self._limits)
        if verdict:
            file = log_file(self._logs, name, process.incarnation)
            return RunHalted(f"{verdict}; the last: {name} {reason}; its log: {file}")
        return f"starting it again (failure {self._failures.total})"

    def start_next(self, process: ChildProcess, now: float) -> None:
        """Start the next incarnation of a station that was dismissed."""
        self._spawn(process.station, process.incarnation + 1, now)

    def close(self) -> None:
        """Let all stations leave, and end those that do not; a second signal meanwhile ends them at once."""
        for process in self.processes.values():
            if process.vigil.present and not process.exited:
                process.tell_all(wire.Stop())
        try:
            self._wait_for_leaving()
        finally:
            errors = [error for process in self.processes.values() if (error := _ended(process)) is not None]
        if errors:
            raise errors[0]

    def _wait_for_leaving(self) -> None:
        """Until all that stood ready have left, or `_LEAVE_S` are over; those that take long are named."""
        begin = time.monotonic()
        waited = [process for process in self.processes.values() if process.vigil.present]
        slow = [process for process in waited if not process.wait(begin + _NAMED_S - time.monotonic())]
        if slow:
            names = ", ".join(_name_with_call(process, time.monotonic()) for process in slow)
            said = "waiting for %s to leave; killed after %g s, or at once by another signal"
            log.info(said, names, _LEAVE_S - _NAMED_S)
        for process in slow:
            process.wait(begin + _LEAVE_S - time.monotonic())

    # ------------------------------------------------------------ what is said and asked

    def check_sender(self, station: str, incarnation: int) -> None:
        """UnfitMessage unless this is the present incarnation of a station."""
        process = self.processes.get(station)
        if process is None or incarnation > process.incarnation:
            raise UnfitMessage("unknown_station", f"it is signed by {station!r}, incarnation {incarnation}")
        if incarnation < process.incarnation:
            raise UnfitMessage(
                "earlier_incarnation", f"{station} sent it in incarnation {incarnation}, {process.incarnation} is here"
            )

    def tell(self, station: str, message: wire.Message, slot: str = "") -> None:
        """Send to the station, or to its part that has the slot."""
        self.processes[station].tell(message, self._parts[slot] if slot else 0)

    def hear(self, beat: wire.Heartbeat, now: float) -> None:
        """A heartbeat of a present station. UnfitMessage: its numbers cannot be."""
        process = self.processes[beat.station]
        lasted = 0 <= beat.for_s <= now - process.vigil.began
        if not lasted or beat.units < 0 or not all(map(math.isfinite, beat.statistics.values())):
            raise UnfitMessage("impossible", f"a heartbeat of {beat.station} with {beat.for_s} s and {beat.statistics}")
        before = process.heartbeat
        if beat.doing or not process.vigil.present or before is None or beat.units != before.units:
            self.progress += 1
        process.heartbeat = beat
        process.vigil.hear(now, beat.doing, beat.for_s)

    def outstanding(self) -> list[str]:
        """What is waiting, in words."""
        beats = [process.heartbeat for process in self.processes.values() if process.heartbeat is not None]
        return [line for beat in beats for line in beat.outstanding]

    def current_call(self, station: str, now: float) -> str:
        """What the station is at, in words; "" between two units of work."""
        return self.processes[station].vigil.current_call(now)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Each station's counters as last heard, over all its incarnations."""
        found: dict[str, dict[str, float]] = {}
        for name, past in self._past.items():
            beat = self.processes[name].heartbeat if name in self.processes else None
            found[name] = dict(past + Counter(beat.statistics if beat is not None else {}))
        return found


def log_file(logs: Path, station: str, incarnation: int) -> Path:
    """Where the incarnation of a station writes what it logs."""
    return logs / f"{station}.{incarnation}.log"


def _name_with_call(process: ChildProcess, now: float) -> str:
    call = process.vigil.current_call(now)
    return f"{process.station} ({call})" if call else process.station


def _ended(process: ChildProcess) -> RunHalted | None:
    """End the process; what went wrong in it, so that the others are ended too."""
    try:
        process.end()
    except RunHalted as error:
        return error
    return None
