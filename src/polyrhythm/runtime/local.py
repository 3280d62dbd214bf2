"""The launcher `local`: each station in a process of its own on this machine, watched and replaced.

    main's inbox  ← events, reports, heartbeats of all stations
    each part's inbox ← commands from main, answers from generators

A station that ends, falls silent or exceeds a deadline is killed and reaped; what it had sent before is heard, then
`StationLost`; then the next incarnation starts. What still arrives from an earlier one is refused.

Invariants: an event is passed on only if its station's present incarnation sent it; a command reaches only the
incarnation that the conductor knows; no block is given out while a process that may write to it lives.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zmq

from polyrhythm.errors import RunHalted
from polyrhythm.flow import records
from polyrhythm.runtime import wire
from polyrhythm.runtime.arena import Arena, ArenaLayout
from polyrhythm.runtime.blocks import BlockPool
from polyrhythm.runtime.child import Posting
from polyrhythm.runtime.jobs import Job, Seat, pack
from polyrhythm.runtime.messages import Reply, Report, SaveTrainer, Start
from polyrhythm.runtime.process import Process
from polyrhythm.runtime.run_memory import RunMemory
from polyrhythm.runtime.sockets import Inbox, Transport, endpoint
from polyrhythm.runtime.supervision import Failures, Limits

log = logging.getLogger(__name__)

#: Seconds between two looks at the processes and their deadlines.
_LOOK_S = 0.25
#: How long a dead station's last messages are waited for (while others talk on), its farewell, and counters asked for.
_DRAIN_S, _LONGEST_DRAIN_S, _LEAVE_S, _ANSWER_S = 0.05, 0.5, 5.0, 2.0


class LocalLauncher:
    """Hosts `jobs`, each in its seat. The arena and the bus (of `weights_nbytes`) lie in shared memory.

    StartError: there is too little of it, or an address cannot be had; then nothing has been started.
    """

    def __init__(
        self,
        jobs: Sequence[tuple[Job, Seat]],
        layout: ArenaLayout,
        weights_nbytes: int,
        limits: Limits,
        logs: Path,
        transport: Transport = "ipc",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self.layout = clock, layout
        self.failures = Failures()
        self._jobs = {job.name: (job, seat) for job, seat in jobs}
        self._limits, self._logs, self._transport = limits, logs, transport
        self._memory = RunMemory({"arena": layout.nbytes, "weights": weights_nbytes})
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._inbox = Inbox(self._context, endpoint(transport, str(self._memory.folder), "main"))
        except BaseException:
            self._memory.remove()
            raise
        self.pool = BlockPool(layout.blocks)
        self.arena = Arena(layout, memoryview(self._memory.segment("arena")))
        self.weights_memory = memoryview(self._memory.segment("weights"))
        self._processes: dict[str, Process] = {}
        self._parts: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._events: deque[records.Event] = deque()
        self._reports: deque[Report] = deque()
        self._past: dict[str, Counter[str]] = {name: Counter() for name in self._jobs}
        self._progress = 0
        self._looked = clock()

    # ------------------------------------------------------------ start

    def start(self) -> list[records.Event]:
        """Start all stations and wait until each stands ready; their announcements, in the order of the jobs.

        RunHalted: one of them cannot be started.
        """
        for name in self._jobs:
            self._spawn(name, epoch=0)
        while not all(process.vigil.present for process in self._processes.values()):
            self._wait(_LOOK_S)
        self._events.clear()
        self._known = {name: process.epoch for name, process in self._processes.items()}
        return [process.joined for process in self._processes.values() if process.joined is not None]

    def _spawn(self, name: str, epoch: int) -> None:
        job, seat = self._jobs[name]
        kind, content = pack(job)
        posting = Posting(
            station=name,
            epoch=epoch,
            kind=kind,
            content=content,
            seat=seat,
            layout=self.layout,
            folder=str(self._memory.folder),
            main=self._inbox.endpoint,
            transport=self._transport,
            parent=os.getpid(),
        )
        self._logs.mkdir(parents=True, exist_ok=True)
        process = Process(posting, self._logs / f"{name}.{epoch}.log", self.clock())
        self._processes[name] = process

    @property
    def folder(self) -> Path:
        """Where the shared memory and the sockets lie, until `close`."""
        return self._memory.folder

    def processes(self) -> dict[str, int]:
        """The process id of each station."""
        return {name: process.pid for name, process in self._processes.items()}

    # ------------------------------------------------------------ what goes out

    def send(self, command: records.Command | SaveTrainer) -> None:
        """Hand a command to the station that it addresses. One that is just being replaced gets none: what it was to
        do comes back with its `StationLost`."""
        match command:
            case records.ReleasePayloads(handles):
                self.pool.release(handles)
            case records.StartRows(simulator=station, slot=slot):
                if self._reaches(station):
                    self._processes[station].tell(Start(command, tuple(self.pool.assign(command))), self._parts[slot])
            case records.CancelRow(simulator=station, slot=slot) | records.RefuseRequest(simulator=station, slot=slot):
                self._tell(station, command, self._parts[slot])
            case records.Serve(generator=station) | records.ApplyWeights(generator=station):
                self._tell(station, command)
            case (
                records.LendSamples(trainer=station)
                | records.PublishWeights(trainer=station)
                | SaveTrainer(trainer=station)
            ):
                self._tell(station, command)
            case _:
                raise TypeError(f"{type(command).__name__} is not for a station")

    def _tell(self, station: str, message: wire.Message, part: int = 0) -> None:
        if self._reaches(station):
            self._processes[station].tell(message, part)

    def _reaches(self, station: str) -> bool:
        """Whether the conductor knows the present incarnation."""
        process = self._processes[station]
        return process.vigil.present and self._known.get(station) == process.epoch

    # ------------------------------------------------------------ what comes in

    def receive(self, timeout: float) -> records.Event | None:
        """The next event, or None after `timeout` seconds.

        Consumes: messages to main, ends of processes. Waits for: either, or the next deadline of a station.
        Unblocked by: these. Produces: an event. RunHalted: failures end the run.
        """
        until = self.clock() + timeout
        while not self._events:
            rest = until - self.clock()
            self._wait(min(max(rest, 0.0), _LOOK_S))
            if rest <= 0:
                break
        return self._pass_on(self._events.popleft()) if self._events else None

    def _pass_on(self, event: records.Event) -> records.Event:
        """Note what the conductor is about to know of the stations."""
        if isinstance(event, records.StationLost):
            del self._known[event.station]
        elif isinstance(event, _JOINING):
            name, epoch = _sender(event) or ("", 0)
            self._known[name] = epoch
        return event

    def _wait(self, seconds: float) -> None:
        """Take what has come; if nothing has, wait for it. Looks after the stations now and then."""
        frames = self._inbox.receive(seconds)
        if frames is not None:
            self._hear(frames)
        if self.clock() >= self._looked + _LOOK_S:
            self._look_after()

    def _hear(self, frames: Sequence[wire.Frame]) -> None:
        message = wire.decode(frames)
        match message:
            case wire.Heartbeat(station=station, epoch=epoch):
                self._hear_heartbeat(station, epoch, message)
            case wire.Hello(station=station, epoch=epoch):
                if self._is_present(station, epoch):
                    self._welcome(station, message)
            case wire.Failed(station=station, epoch=epoch):
                if self._is_present(station, epoch):
                    self._processes[station].last_words = message
            case Report(station=station, epoch=epoch):
                if self._is_present(station, epoch):
                    self._reports.append(message)
            case Reply():
                raise AssertionError("a reply came to main")
            case _:
                self._hear_event(message)  # type: ignore[arg-type]

    def _hear_event(self, event: records.Event) -> None:
        sender = _sender(event)
        if sender is not None and not self._is_present(*sender):
            return
        self.pool.hear(event)
        self._events.append(event)

    def _hear_heartbeat(self, station: str, epoch: int, beat: wire.Heartbeat) -> None:
        if not self._is_present(station, epoch):
            return
        process = self._processes[station]
        before = process.heartbeat
        if beat.doing or not process.vigil.present or before is None or beat.units != before.units:
            self._progress += 1
        process.heartbeat = beat
        process.vigil.hear(self.clock(), beat.doing, beat.for_s)

    def _is_present(self, station: str, epoch: int) -> bool:
        return self._processes[station].epoch == epoch

    def _welcome(self, station: str, hello: wire.Hello) -> None:
        """A station stands ready: know its parts, tell the generators where its slots are, and pass the news on."""
        process = self._processes[station]
        process.greet(self._context, hello)
        process.vigil.hear(self.clock(), "", 0.0)
        joined = process.joined
        if isinstance(joined, records.SimulatorJoined):
            for part, info in enumerate(joined.batches):
                self._parts |= {slot.slot: part for slot in info.slots}
            for generator in self._of(records.GeneratorJoined):
                for address, where in hello.inboxes.items():
                    generator.tell(wire.Connect(address, where))
        elif isinstance(joined, records.GeneratorJoined):
            for simulator in self._of(records.SimulatorJoined):
                for address, where in simulator.endpoints.items():
                    process.tell(wire.Connect(address, where))
        assert joined is not None
        self._events.append(joined)

    def _of(self, kind: type) -> list[Process]:
        """The present processes that announced themselves so."""
        return [p for p in self._processes.values() if p.vigil.present and isinstance(p.joined, kind)]

    # ------------------------------------------------------------ supervision

    def _look_after(self) -> None:
        """Replace every station that has ended or is to be given up."""
        now = self._looked = self.clock()
        self._progress += not all(process.vigil.present for process in self._processes.values())
        for process in list(self._processes.values()):
            complaint = ""
            if process.exited:
                self._drain()
                complaint = process.how_it_ended()
            elif now >= process.vigil.deadline(self._limits):
                self._drain()  # it may have been we who did not listen
                complaint = process.vigil.complaint(self.clock(), self._limits)
            if complaint:
                self._replace(process, complaint)

    def _drain(self) -> None:
        """Hear what has been sent, the last messages of a process that has just ended included."""
        until = self.clock() + _LONGEST_DRAIN_S
        while self.clock() < until and (frames := self._inbox.receive(_DRAIN_S)) is not None:
            self._hear(frames)

    def _replace(self, process: Process, reason: str) -> None:
        name, epoch = process.station, process.epoch
        was_present = process.vigil.present
        self._forget(process)
        self._drain()
        self.pool.lose(name)
        if was_present:
            self._events.append(records.StationLost(name, epoch, reason))
        self.failures.count(name, was_present=was_present)
        last_lines = process.last_lines()
        said = f"{name} {reason}"
        if process.last_words is not None and process.last_words.fatal:
            raise RunHalted(f"{name}: {reason}")
        verdict = self.failures.verdict(name, self._limits)
        log.error(
            "%s; %s\n%s",
            said,
            "the run ends" if verdict else f"starting it again (failure {self.failures.total})",
            last_lines or "(it has said nothing)",
        )
        if verdict:
            raise RunHalted(f"{verdict}; the last: {said}; its log: {self._logs / f'{name}.{epoch}.log'}")
        self._spawn(name, epoch + 1)

    def _forget(self, process: Process) -> None:
        """Kill and reap it, and close all lines to it."""
        process.end()
        if process.heartbeat is not None:
            self._past[process.station].update(process.heartbeat.statistics)
        if isinstance(process.joined, records.SimulatorJoined):
            for generator in self._of(records.GeneratorJoined):
                for address in process.endpoints:
                    generator.tell(wire.Connect(address, ""))

    # ------------------------------------------------------------ what is asked

    def reports(self) -> list[Report]:
        """The reports since the last call, oldest first."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def work_done(self) -> int:
        """Rises while a station does its work or is being started (each such wait has a deadline of its own)."""
        return self._progress

    def outstanding(self) -> list[str]:
        """What is waiting, in words, for a stall report."""
        beats = [process.heartbeat for process in self._processes.values() if process.heartbeat is not None]
        return [line for beat in beats for line in beat.outstanding]

    def statistics(self) -> dict[str, dict[str, float]]:
        """Each station's counters with `busy_s`, over all its incarnations; as fresh as they can be had."""
        asked = {name: process.heartbeat for name, process in self._processes.items() if process.vigil.present}
        for name in asked:
            self._processes[name].tell(wire.Ping())
        until = self.clock() + _ANSWER_S
        while any(self._processes[name].heartbeat is before for name, before in asked.items()):
            if self.clock() >= until:
                break
            self._wait(_DRAIN_S)
        return self.latest()

    def latest(self) -> dict[str, dict[str, float]]:
        """The same as last heard, by the stations' heartbeats."""
        return {name: dict(self._past[name] + Counter(self._present_statistics(name))) for name in self._jobs}

    def _present_statistics(self, name: str) -> Mapping[str, float]:
        beat = self._processes[name].heartbeat
        return beat.statistics if beat is not None else {}

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """End all stations and remove what they shared; a second call does nothing."""
        if self._context.closed:
            return
        for process in self._processes.values():
            if process.vigil.present and not process.exited:
                process.tell_all(wire.Stop())
        until = self.clock() + _LEAVE_S
        try:
            for process in self._processes.values():
                if process.vigil.present:
                    process.wait(until - self.clock())
            for process in self._processes.values():
                process.end()
        finally:
            self._inbox.close()
            self._context.destroy(linger=0)
            self._memory.remove()


_JOINING = (records.SimulatorJoined, records.GeneratorJoined, records.TrainerJoined)


def _sender(event: records.Event) -> tuple[str, int] | None:
    """The station and epoch that signed an event."""
    epoch = getattr(event, "epoch", None)
    if epoch is None:
        return None
    for role in ("simulator", "generator", "trainer"):
        if (name := getattr(event, role, None)) is not None:
            return name, epoch
    return None
