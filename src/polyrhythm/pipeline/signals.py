"""SIGINT, SIGTERM and SIGHUP: the first signal ends the run in order, the second one ends it at once.

The exit status is the shell's for that signal: 130, 143 and 129. Only the main process handles them; stations ignore
them, though a terminal sends them to all. A signal that was ignored at program start stays ignored: a shell script
starts `polyrhythm train … &` without SIGINT, and `nohup` starts it without SIGHUP. SIGTERM still ends such a run in
order.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInterrupt(KeyboardInterrupt):
    """A signal ends the command. status: exit status."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = exit_status(number)


def exit_status(number: int) -> int:
    """Exit status that a shell reports for a command ended by this signal."""
    return 128 + number


class Interrupts:
    """Handles the signals that stop a run. deferring: the run polls `requested`, so the first signal is only
    recorded."""

    def __init__(self) -> None:
        self.deferring = False
        self._noted: int | None = None
        self._held = False
        self._late: int | None = None

    def requested(self) -> bool:
        """Whether a signal has requested a stop."""
        return self._noted is not None

    def interruption(self) -> SignalInterrupt:
        """The exception that ends the command after a requested stop."""
        assert self._noted is not None, "nobody asked it to stop"
        return SignalInterrupt(self._noted)

    @contextmanager
    def handle_signals(self) -> Iterator[Interrupts]:
        """Handle the signals within this block, if this is the main thread; Python allows no other."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def defer_first(self) -> Iterator[None]:
        """Within this block the first signal only makes `requested` true."""
        self.deferring = True
        try:
            yield
        finally:
            self.deferring = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Delay a signal until the end of this block, which takes seconds at most."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._late is not None:
            raise SignalInterrupt(self._late)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._held:
            self._late = number
            log.info("%s: the stations are being ended; this takes some seconds", signal.Signals(number).name)
            return
        if self.deferring and self._noted is None:
            self._noted = number
            log.info("%s: shutting down; send it again to stop now", signal.Signals(number).name)
            return
        raise SignalInterrupt(number)
