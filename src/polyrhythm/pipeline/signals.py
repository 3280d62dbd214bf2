"""Ctrl-C, SIGTERM and a terminal that is closed: the first asks the run to stop in good order, the second stops it now.

Only the main process listens; stations ignore these signals, though a terminal sends them to all.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class Interrupts:
    """Counts signals. `patient`: the run will ask `requested` soon, so the first signal is only noted."""

    def __init__(self) -> None:
        self.patient = False
        self._noted = False

    def requested(self) -> bool:
        """Whether the run is asked to stop."""
        return self._noted

    @contextmanager
    def listening(self) -> Iterator[Interrupts]:
        """Listen within this block (in the main thread; elsewhere there is nothing to listen to)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def asked_politely(self) -> Iterator[None]:
        """Within this block the first signal waits to be asked for."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.patient and not self._noted:
            self._noted = True
            log.info("%s: stopping in good order; once more stops at once", signal.Signals(number).name)
            return
        raise KeyboardInterrupt
