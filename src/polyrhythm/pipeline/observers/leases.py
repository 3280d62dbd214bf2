"""Counts how often stations change places on leased devices, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.scheduler import records


@dataclass(slots=True)
class _Switches:
    count: int = 0
    seconds: float = 0.0
    freed_bytes: int = 0


class LeaseMeter(Observer):
    """Switches by station, since this part of the run began. A station of several ranks counts once, as its slowest."""

    hears: ClassVar[tuple[type, ...]] = (records.DeviceTaken, records.DeviceYielded)

    def __init__(self) -> None:
        self._stations: dict[str, _Switches] = {}

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if not isinstance(event, records.DeviceTaken | records.DeviceYielded):
            return
        own = self._stations.setdefault(event.station, _Switches())
        own.count += 1
        own.seconds += event.seconds
        if isinstance(event, records.DeviceYielded):
            own.freed_bytes = max(own.freed_bytes, event.freed_bytes)

    def summary(self) -> dict[str, dict[str, Any]]:
        """By station: switches (taking and leaving each count), seconds in them, and the most bytes that one freed."""
        return {
            name: {"switches": own.count, "seconds": own.seconds, "freed_bytes": own.freed_bytes}
            for name, own in sorted(self._stations.items())
        }
