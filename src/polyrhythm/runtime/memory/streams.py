"""Streams and events of a device. On the CPU the same calls do nothing: there work is done when a call returns."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class CopyStream:
    """A stream for copies that go on beside the computation of `device`, which is on the thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._api: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()

    def active(self) -> AbstractContextManager[Any]:
        """What is queued within goes to this stream."""
        context: AbstractContextManager[Any] = self._api.stream(self.stream)
        return context

    def event(self, *, blocking: bool = False) -> Any:
        """An event that has not been recorded: waiting for it returns at once. blocking: a thread that waits for it
        sleeps instead of holding its core."""
        return torch.cuda.Event(blocking=blocking) if self.device.type == "cuda" else torch.cpu.Event()

    def record(self, event: Any) -> None:
        """The event happens when this stream has come here."""
        event.record(self.stream)

    def wait(self, event: Any) -> None:
        """This stream goes on after the event."""
        self.stream.wait_event(event)

    def wait_for_computation(self) -> None:
        """This stream goes on after what the computation has queued so far."""
        self.stream.wait_stream(self._computation())

    def record_computation(self, event: Any) -> None:
        """The event happens when the computation has come here."""
        event.record(self._computation())

    def computation_waits(self, event: Any) -> None:
        """The computation goes on after the event."""
        self._computation().wait_event(event)

    def _computation(self) -> Any:
        return self._api.current_stream(self.device)
