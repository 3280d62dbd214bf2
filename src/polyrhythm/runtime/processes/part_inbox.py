"""How what reaches a station process gets to its parts: one inbox for the process, and a queue for each part.

The only part of a process reads the inbox itself, so that no other thread has to wake up first. Where there are more
parts, one thread reads the inbox and hands each part its messages.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.runtime.transport.sockets import Inbox, SocketsClosed, wait_for
from polyrhythm.runtime.transport.wire import Content, unframe

#: Longest wait of the reading thread; nothing depends on it.
_WAIT_S = 60.0


class PartInbox(Protocol):
    """Where a part gets its messages, encoded."""

    def receive(self, seconds: float = 0.0, or_ready: Any = None) -> Content | None:
        """The next message; None if none has come within `seconds`, or before something came to `or_ready`, a socket of
        ZeroMQ's or a descriptor."""
        ...

    def close(self) -> None: ...


class FrameReader:
    """Takes the frames of an inbox apart. parts: of this process; what is for another one is dropped and counted."""

    def __init__(self, inbox: Inbox, drops: DropCounter, largest: int, parts: int) -> None:
        self.inbox = inbox
        self._drops, self._largest, self._parts = drops, largest, parts

    def messages(self, content: bytes) -> Iterable[tuple[int, Content]]:
        """The messages of a frame, each with its part."""
        try:
            found = unframe(content, self._largest)
        except UnfitMessage as unfit:
            self._drops.drop(unfit.kind, str(unfit))
            return
        for part, message in found:
            if 0 <= part < self._parts:
                yield part, message
            else:
                self._drops.drop("misdirected", f"a message for part {part} of {self._parts}")


class OwnInbox:
    """The inbox of a process with one part, which reads it."""

    def __init__(self, reader: FrameReader) -> None:
        self._reader = reader
        self._waiting: deque[Content] = deque()

    def receive(self, seconds: float = 0.0, or_ready: Any = None) -> Content | None:
        while not self._waiting:
            if or_ready is not None and seconds > 0:
                wait_for([self._reader.inbox.socket, or_ready], seconds)
                seconds = 0.0
            content = self._reader.inbox.receive(seconds)
            if content is None:
                return None
            self._waiting.extend(message for _, message in self._reader.messages(content))
        return self._waiting.popleft()

    def close(self) -> None:
        self._reader.inbox.close()


class PartQueue:
    """The messages for one of several parts."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Content] = SimpleQueue()
        self._filled = -1  # event descriptor, once somebody waits for a message or something else
        self._open = threading.Lock()

    def put(self, content: Content) -> None:
        self._queue.put(content)
        with self._open:
            if self._filled >= 0:
                os.eventfd_write(self._filled, 1)

    def receive(self, seconds: float = 0.0, or_ready: Any = None) -> Content | None:
        if seconds > 0 and or_ready is not None:
            self._wait(seconds, or_ready)
            seconds = 0.0
        if seconds <= 0 and self._queue.empty():
            return None
        try:
            return self._queue.get(timeout=seconds) if seconds > 0 else self._queue.get_nowait()
        except Empty:
            return None

    def _wait(self, seconds: float, or_ready: Any) -> None:
        if self._filled < 0:
            self._filled = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if self._queue.empty():  # asked after it was opened: who puts a message from now on writes to it
            wait_for([self._filled, or_ready], seconds)
        with suppress(BlockingIOError):
            os.eventfd_read(self._filled)

    def close(self) -> None:
        """The inbox is the reading thread's."""
        with self._open:
            filled, self._filled = self._filled, -1
            if filled >= 0:
                os.close(filled)


class InboxThread:
    """Reads the inbox of a process with several parts. error: what ended it, if anything did; `on_end` follows."""

    def __init__(self, reader: FrameReader, queues: list[PartQueue], on_end: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._reader, self._queues, self._on_end = reader, queues, on_end
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        """Consumes: frames. Waits for: one. Unblocked by: one, or the closing of the sockets, which ends the thread.
        Produces: the messages in them, each in its part's queue."""
        reader, queues = self._reader, self._queues
        try:
            while True:
                content = reader.inbox.receive(_WAIT_S)
                if content is not None:
                    for part, message in reader.messages(content):
                        queues[part].put(message)
        except SocketsClosed:
            pass
        except BaseException as error:  # noqa: BLE001 - the process ends with it
            self.error = error
            self._on_end()
        finally:
            reader.inbox.close()
