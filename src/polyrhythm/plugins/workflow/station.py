"""A worker as a station (`runtime.messages.Station`): every hosting of the pipeline's stations can host workers.

In a process of its own, the station's thread runs the methods and receives messages while a method waits. With `inline`
a call that waits is paused, and the other workers run.

A worker that takes turns on its device is made on it, by its first call. It leaves its device, when told to, between
two calls or where a call waits; the call goes on once the worker is back.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from polyrhythm.plugin import import_address
from polyrhythm.plugins.cluster.parcels import Parcels, SharedParcels
from polyrhythm.plugins.workflow import protocol as p
from polyrhythm.plugins.workflow.channel import Channel, PendingPuts, Reply
from polyrhythm.plugins.workflow.protocol import Parcel, WorkerFailed, WorkflowError
from polyrhythm.plugins.workflow.shipments import Shipping
from polyrhythm.plugins.workflow.values import Carrier
from polyrhythm.plugins.workflow.worker import MOVES, Worker, WorkerContext, is_public
from polyrhythm.plugins.workflow.worker_device import SwitchFailed, WorkerDevice
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.messages import FromWorker, Order, Station, StationTraits, StopWork, ToWorker, WorkerJoined
from polyrhythm.runtime.spans import Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import DeviceCommand, DeviceTaken, DeviceYielded, TakeDevice

log = logging.getLogger(__name__)

#: Seconds within which a call that is ended has to leave.
_LEAVE_S = 5.0


class Turn:
    """Runs `body` in a thread that executes only during `resume`, so that only one thread works at a time. Invariant:
    the body and the caller of `resume` never run simultaneously."""

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self._body, self._over, self._ended = body, False, False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resume(self) -> bool:
        """Run the body until it pauses or ends; True if it has ended."""
        self._go.release()
        self._back.acquire()
        return self._over

    def pause(self) -> None:
        """Called by the body: wait for `resume`. StopWork: the body must end."""
        self._back.release()
        self._go.acquire()
        if self._ended:
            raise StopWork

    def end(self) -> None:
        """Make the paused body raise StopWork, and wait until it ends."""
        self._ended = True
        self._go.release()
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():
            log.warning("%s does not leave; its thread ends with this process", self._thread.name)

    def _run(self) -> None:
        """Consumes: turns. Waits for: one. Unblocked by: `resume` or `end`. Produces: the effects of the body."""
        self._go.acquire()
        try:
            if not self._ended:
                self._body()
        except StopWork:
            pass
        finally:
            self._over = True
            self._back.release()


#: Longest wait for a message at a time; nothing depends on it.
_WAIT_S = 60.0
#: Characters of a trace and of an error that are sent.
_TRACE_CHARS, _ERROR_CHARS = 6000, 1000


@dataclass(frozen=True)
class WorkerFactory:
    """Makes one rank of a group. worker: class as module:name; arguments: packed; sizes: number of ranks by group.
    in_turn: whether it may share its device in turn, so that it is made by its first call; preload: slow modules that
    its class needs."""

    name: str
    group: str
    rank: int
    worker: str
    arguments: Parcel
    sizes: Mapping[str, int]
    wait_s: float
    in_turn: bool = False
    preload: tuple[str, ...] = ()

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        memory = context.memory
        assert memory is not None, "in one process a worker is made by a `WorkerBeside`"
        parcels = SharedParcels(memory.folder, f"{self.name}.{incarnation}", memory.host, memory.clients)
        return [(f"{self.name}.{incarnation}.0", partial(WorkerStation, self, context, incarnation, parcels))]

    def announcements(self, incarnation: int) -> Sequence[WorkerJoined]:
        return [WorkerJoined(self.name, incarnation)]


class WorkerBeside:
    """Makes a worker in the driver's process; both share `parcels`."""

    def __init__(self, factory: WorkerFactory, parcels: Parcels) -> None:
        self.name, self.announcements = factory.name, factory.announcements
        self._factory, self._parcels = factory, parcels

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        make = partial(WorkerStation, self._factory, context, incarnation, self._parcels)
        return [(f"{self.name}.{incarnation}.0", make)]


class WorkerStation:
    """One rank of a worker, and its `Port`. WorkerFailed: its constructor failed."""

    def __init__(self, factory: WorkerFactory, context: StationContext, incarnation: int, parcels: Parcels) -> None:
        self.name, self._incarnation, self._emit = factory.name, incarnation, context.channels.emit
        self._calls: deque[p.Call] = deque()
        self._answers: dict[int, p.Answer] = {}
        self._open: set[int] = set()  # requests that have no answer yet
        self._given: list[p.Given] = []  # parts of an answer that have come
        self._asked = self._sent = self._done = 0
        self._work_s = 0.0  # within calls, without waits
        self._since: float | None = None  # the present call works
        self._doing = ("", 0.0)
        self._resumes: Callable[[], bool] = lambda: True  # inline: whether the call that has paused can go on
        self._receive: Callable[[float], None] | None = None
        self._turn: Turn | None = None
        self.carrier = Carrier(parcels, lambda name, on_device: Channel(name, self, on_device), context.device)
        self._folder = context.memory.folder if context.memory is not None else None
        self.wait_s, self.puts = factory.wait_s, PendingPuts()
        self._device = WorkerDevice(context.device, in_turn=factory.in_turn)
        self._context = WorkerContext(factory.group, factory.rank, factory.sizes, self._device, self)
        self._factory = factory
        self._worker: Worker | None = None
        with self._making():
            self._kind: type[Worker] = import_address(factory.worker)
        if not factory.in_turn:
            self._make(factory.arguments)

    def _make(self, arguments: Parcel) -> None:
        positional, named = self.carrier.unpack(arguments)
        with self._making():
            worker = self._kind.__new__(self._kind)
            worker._context = self._context
            worker.__init__(*positional, **named)  # type: ignore[misc]
        self._worker = worker

    @contextmanager
    def _making(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = f"{self._factory.worker} cannot be made: {type(error).__name__}: {error}"
            raise WorkerFailed(self._factory.group, self._factory.rank, why) from error

    @property
    def traits(self) -> StationTraits:
        return StationTraits(listen_by=self.listen_by)

    def listen_by(self, receive: Callable[[float], None]) -> None:
        self._receive = receive

    def handle(self, command: Order) -> None:
        if not isinstance(command, ToWorker | DeviceCommand) or command.station != self.name:
            raise UnfitMessage("misdirected", f"{self.name} received {type(command).__name__}, which is not for it")
        if isinstance(command, DeviceCommand):
            if not self._device.accepts(command):
                raise UnfitMessage("impossible", f"{self.name} cannot execute {command}")
            self._device.order = command
            return
        try:
            message = p.decode_to(command.content)
        except (ValueError, RecursionError) as error:
            raise UnfitMessage("undecodable", f"what {self.name} is told cannot be decoded ({error})") from error
        match message:
            case p.Call() if self._can_be_called(message.method):
                self._calls.append(message)
            case p.Answered() if message.number in self._open:
                self._on_answer(message)
            case p.OnDevice():
                self._device.place(in_turn=message.in_turn)
                if message.beside and self._folder is not None and not message.device.endswith(CPU):
                    owner = f"{self.name}.{self._incarnation}"
                    self.carrier.ship_by(Shipping(message, self._device.name, self._folder, owner))
            case _:
                raise UnfitMessage("impossible", f"{self.name} can neither be called so nor has it asked for {message}")

    def _can_be_called(self, method: str) -> bool:
        if self._worker is None:
            return method == p.MAKE and not self._calls
        return is_public(self._kind, method)

    def _on_answer(self, message: p.Answered) -> None:
        answer = message.answer
        if isinstance(answer, p.Given):
            self._given.append(answer)
            if answer.more:
                return
            answer = p.Given(tuple(item for part in self._given for item in part.items))
        self._given.clear()
        self._open.discard(message.number)
        self._answers[message.number] = answer

    def _send(self, message: p.From) -> None:
        self._emit(FromWorker(self.name, self._incarnation, self._sent, p.encode(message)))
        self._sent += 1

    def begin(self, request: p.Request) -> Reply:
        if self._worker is None:
            raise WorkflowError("a constructor cannot wait for others; do that in a method that the driver calls")
        self._asked += 1
        self._open.add(self._asked)
        self._send(p.Asked(self._asked, request))
        number = self._asked

        def is_done() -> bool:
            """After receiving new messages. With `inline` other workers run meanwhile. The worker leaves its device
            if told to, so that it may ask until it is done."""
            if number in self._open:
                self._listen(0.0, lambda: True)
                self._wait_until(lambda: True)
            return number not in self._open

        def wait() -> p.Answer:
            if number in self._open and self._device.in_turn and not self._device.locks:
                self._send(p.Waits(number))
            self._wait_until(lambda: number not in self._open)
            return self._answers.pop(number)

        return Reply(is_done, wait)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Receive messages until it is ready, and the worker on its device, which it leaves if told to.

        Consumes: messages. Waits for: the answer, and the device. Unblocked by: these. Produces: switches. StopWork:
        the station must stop. SwitchFailed: offload or onload raised.
        """
        self._count()
        try:
            while True:
                if self._device.must_switch:
                    self._switch()
                elif ready() and self._device.is_on:
                    return
                else:
                    self._listen(_WAIT_S, lambda: self._device.must_switch or (ready() and self._device.is_on))
        finally:
            self._since = time.perf_counter()

    def _count(self) -> None:
        """Account for the work of a call so far."""
        if self._since is not None:
            now = time.perf_counter()
            self._work_s += now - self._since
            self._since = now

    def _listen(self, seconds: float, resumes: Callable[[], bool]) -> None:
        """Receive what comes within `seconds`; with `inline`, let others run until `resumes`."""
        if self._receive is not None:
            self._receive(seconds)
        else:
            assert self._turn is not None
            self._resumes = resumes
            self._turn.pause()

    def _switch(self) -> None:
        """Leave the device or come onto it, as told. SwitchFailed: offload or onload raised."""
        command, worker = self._device.order, self._worker
        assert command is not None
        self.carrier.free_received()
        if worker is None:
            freed, seconds = self._device.obey(lambda: 0, lambda: None)
        else:
            freed, seconds = self._device.obey(worker.offload, worker.onload)
        if isinstance(command, TakeDevice):
            self._emit(DeviceTaken(self.name, self._incarnation, command.device, seconds))
        else:
            self._emit(DeviceYielded(self.name, self._incarnation, command.device, freed, seconds))

    def work(self) -> bool:
        """Consumes: calls, and orders to leave the device. Waits for: answers, within a call. Unblocked by: answers.
        Produces: results, switches."""
        if self._turn is None:
            if not self._calls:
                return self._leave()
            if self._receive is not None:
                self._call(self._calls.popleft())
                return True
            call = self._calls.popleft()
            self._turn = Turn(f"{self.name}.{call.method}", lambda: self._call(call))
        elif not self._resumes():
            return False
        if self._turn.resume():
            self._turn = None
        return True

    def _leave(self) -> bool:
        """Leave the device between two calls, if told to."""
        if not self._device.must_switch:
            return False
        try:
            self._switch()
        except SwitchFailed as failed:
            self._device.order = None
            self._raise(p.NO_CALL, str(failed))
        return True

    def _call(self, call: p.Call) -> None:
        """Execute one call and send its result or error. StopWork: the station must stop."""
        self._doing = (call.method, time.monotonic())
        before = self._work_s
        self._context.seconds.clear()
        try:
            self._wait_until(lambda: True)
            begin = time.perf_counter()
            found = None
            if self._worker is None:
                self._make(call.arguments)
            else:
                if self._device.is_away and call.method not in MOVES:
                    self._worker.onload()
                positional, named = self.carrier.unpack(call.arguments)
                found = getattr(self._worker, call.method)(*positional, **named)
            self.puts.finish()
            seconds = {**self._context.seconds, call.method: time.perf_counter() - begin}
            (result,) = self.carrier.pack(found, f"what {call.method} returns")
            self._send(p.Returned(call.number, result, seconds))
        except StopWork:
            raise
        except SwitchFailed as failed:
            self._raise(call.number, str(failed))
        except BaseException as error:  # noqa: BLE001 - the driver is told
            why = f"{call.method} raised {type(error).__name__}: {error}"
            if call.method == p.MAKE and isinstance(error, WorkerFailed):
                why = error.cause
            self._raise(call.number, why)
        finally:
            self._count()
            self._since, self._doing = None, ("", 0.0)
            if call.method == p.MAKE:
                self._work_s = before
            self._done += 1
            self.carrier.free_received()

    def _raise(self, number: int, text: str) -> None:
        self._send(p.Raised(number, text[:_ERROR_CHARS], traceback.format_exc()[-_TRACE_CHARS:]))
        self.puts.clear()

    def joined(self) -> WorkerJoined:
        return WorkerJoined(self.name, self._incarnation)

    def spans(self, begin: float, end: float) -> Iterable[Span]:  # noqa: ARG002
        return ()

    def current_call(self) -> tuple[str, float]:
        return self._doing

    def pending_work(self) -> list[str]:
        return [f"{self.name} has {len(self._calls)} calls to do"] if self._calls else []

    def statistics(self) -> dict[str, float]:
        """calls: finished calls; work_s: seconds within calls, without waits; parcels/...: parcels received, by way;
        switches, switch_s, offloaded_bytes: of its device."""
        ways = {f"parcels/{way}": float(count) for way, count in dict(self.carrier.ways).items()}
        return {"calls": float(self._done), "work_s": self._work_s, **ways, **self._device.statistics()}

    def close(self) -> None:
        if self._turn is not None:
            self._turn.end()
            self._turn = None
        try:
            if self._worker is not None:
                if self._kind.close is not Worker.close:
                    self._device.onload()
                self._worker.close()
        finally:
            self._device.close()
