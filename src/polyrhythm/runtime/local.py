"""The launcher `local`: each station in a process of its own on this machine, watched and replaced.

    main's inbox  ← events, reports, heartbeats of all stations
    each part's inbox ← commands from main, answers from generators

A station that ends, falls silent or exceeds a deadline is killed and reaped; what it had sent before is heard, then
`StationLost`; then the next incarnation starts.

A message that cannot be decoded, comes from nobody who is present, or answers nothing that was asked is dropped,
counted by kind, and warned about once. It ends neither the run nor a station.

Invariants: an event is passed on only if its station's present incarnation sent it; a command reaches only the
incarnation that the conductor knows; no block is given out while a process that may write to it lives.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import Resources, StationFactory
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.blocks import BlockPool
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.messages import Report, SaveTrainer, Spans, StartRowsInBlocks, sender_of
from polyrhythm.runtime.processes.expected import ExpectedEvents, Joined
from polyrhythm.runtime.processes.manager import ProcessManager
from polyrhythm.runtime.processes.process import ChildProcess
from polyrhythm.runtime.processes.supervision import SupervisionLimits
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.drops import DROPPED, DropCounter, UnfitMessage
from polyrhythm.runtime.transport.sockets import Sockets, Transport
from polyrhythm.scheduler import records
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)

#: Seconds between two looks at the processes and their deadlines.
_LOOK_S = 0.25
#: How long dead stations' last messages are waited for, at most so long while others talk on; and counters asked for.
_DRAIN_S, _LONGEST_DRAIN_S, _ANSWER_S = 0.05, 0.5, 2.0


class LocalLauncher:
    """Hosts `jobs`, each in its seat. The arena and the published weights lie in shared memory.

    folder: where memory and sockets lie, until `close`. check_report: raises ValueError for figures that the observers
    do not know. StartError: there is too little memory, an address cannot be had, or strangers could not be kept out;
    then nothing has been started.
    """

    def __init__(
        self,
        jobs: Sequence[tuple[StationFactory, Resources]],
        layout: ArenaLayout,
        weights: WeightsLayout,
        limits: SupervisionLimits,
        logs: Path,
        transport: Transport = "ipc",
        clock: Callable[[], float] = time.monotonic,
        check_report: Callable[[Mapping[str, float]], None] = lambda _: None,
    ) -> None:
        from polyrhythm.runtime.memory.weights import SharedWeights, shared_nbytes  # torch

        keys = make_keys() if transport == "tcp" else None
        self.clock, self.layout = clock, layout
        self._memory = SharedRunFolder({"arena": layout.nbytes, "weights": shared_nbytes(weights)})
        self.folder = self._memory.folder
        self._drops, self._expected, self._check_report = DropCounter("main"), ExpectedEvents(layout), check_report
        self._said: set[tuple[str, str]] = set()
        with ExitStack() as undo:
            undo.callback(self._memory.remove)
            self._sockets = Sockets(transport, str(self.folder), keys, self._drops.stranger, wire.LARGEST)
            undo.callback(self._sockets.close)
            self._inbox = self._sockets.inbox("main")
            undo.pop_all()
        self.pool = BlockPool(layout.blocks)
        self.arena = Arena(layout, memoryview(self._memory.segment("arena")))
        self.weights = SharedWeights(weights, memoryview(self._memory.segment("weights")), self.folder)
        self._crew = ProcessManager(
            jobs,
            layout,
            weights,
            self._sockets,
            main=self._inbox.endpoint,
            limits=limits,
            logs=logs,
        )
        self._known: dict[str, int] = {}
        self._events: deque[records.Event] = deque()
        self._reports: list[Report] = []
        self._spans: list[Spans] = []
        self._looked = clock()

    def start(self) -> list[records.Event]:
        """Start all stations and wait until each stands ready; their announcements, in the order of the jobs.

        RunHalted: one of them cannot be started.
        """
        self._crew.start(self.clock())
        while not self._crew.complete:
            self._wait(_LOOK_S)
        self._events.clear()
        processes = self._crew.processes
        self._known = {name: process.incarnation for name, process in processes.items()}
        return [process.joined for process in processes.values() if process.joined is not None]

    def processes(self) -> dict[str, int]:
        """The process id of each station."""
        return {name: process.pid for name, process in self._crew.processes.items()}

    # ------------------------------------------------------------ what goes out

    def send(self, command: records.Command | SaveTrainer) -> None:
        """Hand a command to the station that it addresses. One that is just being replaced gets none: what it was to
        do comes back with its `StationLost`."""
        match command:
            case records.ReleasePayloads(payload_ids):
                self.pool.release(payload_ids)
            case records.StartRows(simulator=station, slot=slot):
                if self._reaches(station):
                    self._tell(station, StartRowsInBlocks(command, tuple(self.pool.assign(command))), slot)
            case records.CancelRow(simulator=station, slot=slot) | records.RefuseRequest(simulator=station, slot=slot):
                self._tell(station, command, slot)
            case records.Serve(generator=station) | records.ApplyWeights(generator=station):
                self._tell(station, command)
            case (
                records.StartUpdate(trainer=station)
                | records.PublishWeights(trainer=station)
                | SaveTrainer(trainer=station)
            ):
                self._tell(station, command)
            case _:
                raise TypeError(f"{type(command).__name__} is not for a station")

    def _tell(self, station: str, message: wire.Message, slot: str = "") -> None:
        if self._reaches(station):
            self._expected.note(message)
            self._crew.tell(station, message, slot)

    def _reaches(self, station: str) -> bool:
        """Whether the conductor knows the present incarnation."""
        process = self._crew.processes[station]
        return process.vigil.present and self._known.get(station) == process.incarnation

    # ------------------------------------------------------------ what comes in

    def receive(self, timeout: float) -> records.Event | None:
        """The next event, or None after `timeout` seconds; with 0, None only if nothing that has come is an event.

        Consumes: messages to main, ends of processes. Waits for: either, or the next deadline of a station.
        Unblocked by: these. Produces: an event. RunHalted: failures end the run.
        """
        until = self.clock() + timeout
        while not self._events:
            rest = until - self.clock()
            heard = self._wait(min(max(rest, 0.0), _LOOK_S))
            if rest <= 0 and not heard:
                break
        return self._pass_on(self._events.popleft()) if self._events else None

    def _pass_on(self, event: records.Event) -> records.Event:
        """Note what the conductor is about to know of the stations."""
        if isinstance(event, records.StationLost):
            del self._known[event.station]
        elif isinstance(event, Joined):
            name, incarnation = sender_of(event) or ("", 0)
            self._known[name] = incarnation
        return event

    def _wait(self, seconds: float) -> bool:
        """Take what has come; if nothing has, wait for it. Looks after the stations now and then. True if it came."""
        content = self._inbox.receive(seconds)
        if content is not None:
            self._hear(content)
        if self.clock() >= self._looked + _LOOK_S:
            self._look_after()
        return content is not None

    def _hear(self, content: bytes) -> None:
        """One message. What is not from a station that is present, or cannot be true, is dropped."""
        try:
            self._believe(wire.decode(content))
        except UnfitMessage as unfit:
            self._drops.drop(unfit.kind, str(unfit))

    def _believe(self, message: object) -> None:
        """UnfitMessage: it cannot be true; then nothing has changed."""
        sender = sender_of(message)
        if sender is None:
            raise UnfitMessage("misdirected", f"{type(message).__name__} is not for the main process")
        self._crew.check_sender(*sender)
        match message:
            case wire.Heartbeat():
                self._crew.hear(message, self.clock())
                self._note_drops(message)
            case wire.Hello():
                self._greet(message)
            case wire.Failed(station=station):
                self._crew.processes[station].last_words = message
            case Report(values=values):
                self._expected.check_report(message)
                try:
                    self._check_report(values)
                except ValueError as error:
                    raise UnfitMessage("impossible", str(error)) from error
                self._reports.append(message)
            case Spans():
                self._expected.check_spans(message, self.clock())
                self._spans.append(message)
            case _:
                self._expected.accept(message)
                self._crew.updates += isinstance(message, records.UpdateDone)
                self.pool.hear(message)  # type: ignore[arg-type]
                self._events.append(message)  # type: ignore[arg-type]

    def _greet(self, hello: wire.Hello) -> None:
        """A station stands ready. UnfitMessage: it has said so before, or what it says of itself cannot be."""
        process = self._crew.processes[hello.station]
        if process.ended:
            return  # it came too late, its successor is about to start
        joined = wire.decode(hello.joined)
        if not isinstance(joined, Joined) or sender_of(joined) != (hello.station, hello.incarnation):
            raise UnfitMessage("impossible", f"{hello.station} greets with the announcement {joined}")
        if process.vigil.present or not all(map(self._sockets.could_be, hello.inboxes.values())):
            raise UnfitMessage("impossible", f"{hello.station} greets again, or from elsewhere: {hello.inboxes}")
        self._expected.join(joined, hello.inboxes.keys())
        self._crew.welcome(hello, joined, self.clock())
        self._events.append(joined)

    def _note_drops(self, beat: wire.Heartbeat) -> None:
        """Say once for each station and kind that it drops messages; its own log says which."""
        for name in beat.statistics:
            if name.startswith(DROPPED) and (beat.station, name) not in self._said:
                self._said.add((beat.station, name))
                log.warning("%s dropped a message (%s); its log says why", beat.station, name.removeprefix(DROPPED))

    # ------------------------------------------------------------ supervision

    def _look_after(self) -> None:
        """Replace every station that has ended or is to be given up."""
        self._looked = self.clock()
        self._crew.progress += not self._crew.complete
        suspects = self._crew.suspects(self._looked)
        if not suspects:
            return
        self._drain()  # what they said last; and it may have been we who did not listen
        complaints = [(process, self._crew.complaint(process, self.clock())) for process in suspects]
        lost = [(process, reason) for process, reason in complaints if reason]
        for process, _ in lost:
            self._crew.dismiss(process)
        self._drain()
        fates = [self._lose(process, reason) for process, reason in lost]
        for fate in fates:
            if isinstance(fate, RunHalted):
                raise fate
        for process, _ in lost:
            self._crew.start_next(process, self.clock())

    def _drain(self) -> None:
        """Hear what has been sent, the last messages of processes that have just ended included."""
        until = self.clock() + _LONGEST_DRAIN_S
        while self.clock() < until and (content := self._inbox.receive(_DRAIN_S)) is not None:
            self._hear(content)

    def _lose(self, process: ChildProcess, reason: str) -> str | RunHalted:
        """A station that was dismissed is lost: say so, and what becomes of it."""
        name, fate = process.station, self._crew.judge(process, reason, self.clock())
        self.pool.lose(name)
        if process.vigil.present:
            self._events.append(records.StationLost(name, process.incarnation, reason))
        if isinstance(fate, RunHalted) and process.last_words is not None and process.last_words.fatal:
            return fate  # its own sentence is all that there is to say
        said = "the run ends" if isinstance(fate, RunHalted) else fate
        log.error("%s %s; %s\n%s", name, reason, said, process.last_lines() or "(it has said nothing)")
        return fate

    # ------------------------------------------------------------ what is asked

    def reports(self) -> list[Report]:
        """The reports since the last call, oldest first."""
        reports, self._reports = self._reports, []
        return reports

    def measure_spans(self, on: bool) -> None:
        """Whether stations, those that are still to come included, say what they do."""
        self._crew.measure_spans(on)

    def take_spans(self) -> list[Spans]:
        """What stations said that they did since the last call; after `statistics`, all until then."""
        spans, self._spans = self._spans, []
        return spans

    def work_done(self) -> int:
        """Rises while a station does its work or is being started (each such wait has a deadline of its own)."""
        return self._crew.progress

    def outstanding(self) -> list[str]:
        """What is waiting, in words, for a stall report."""
        return self._crew.outstanding()

    def current_call(self, station: str) -> str:
        """What the station is at, and for how long, in words; "" between two units of work."""
        return self._crew.current_call(station, self.clock())

    def statistics(self) -> dict[str, dict[str, float]]:
        """Each station's counters with `busy_s`, over all its incarnations; as fresh as they can be had."""
        processes = self._crew.processes
        asked = {name: process.heartbeat for name, process in processes.items() if process.vigil.present}
        for name in asked:
            self._crew.tell(name, wire.Ping())
        until = self.clock() + _ANSWER_S
        while any(processes[name].heartbeat is before for name, before in asked.items()) and self.clock() < until:
            self._wait(_DRAIN_S)
        return self.latest()

    def latest(self) -> dict[str, dict[str, float]]:
        """The same as last heard, by the stations' heartbeats."""
        return self._crew.statistics()

    def dropped(self) -> dict[str, int]:
        """Messages that were dropped so far, by kind, here and in all stations as last heard."""
        counts = Counter(self._drops.counts())
        for station in self.latest().values():
            counts.update({n.removeprefix(DROPPED): int(c) for n, c in station.items() if n.startswith(DROPPED)})
        return dict(counts)

    def close(self) -> None:
        """End all stations and remove what they shared; a second call does nothing."""
        if self._sockets.closed:
            return
        try:
            self._crew.close()
        finally:
            try:
                self._inbox.close()
                self._sockets.close()
            finally:
                self._memory.remove()
