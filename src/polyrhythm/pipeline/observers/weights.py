"""Observer of weight transfers: transport to each generator, the reason for it, and its rate, for log and summary."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.memory.published import (
    APPLY,
    ONE_PROCESS,
    PUBLISHED,
    Choice,
    Ends,
    Moved,
    choose_way,
    read_traffic,
)

log = logging.getLogger(__name__)

#: Seconds between two readings of the stations' counters, which arrive twice a second.
_LOOK_S = 0.5
#: Versions after which the rate is logged: the first transfer alone includes page faults.
_FIRST = 3


class WeightsTraffic(Observer):
    """Polls the weights that generators received, and logs a line for each after its first versions.

    ends: devices where weights are published and used; devices: by station.
    """

    tick_s: ClassVar[float] = _LOOK_S

    def __init__(self, launcher: Launcher, ends: Ends, devices: Mapping[str, str]) -> None:
        self._launcher, self._ends, self._devices = launcher, ends, devices
        self._silent = {name for name in devices if name.startswith("generator")}

    def on_tick(self, now: float) -> None:  # noqa: ARG002
        if self._silent:
            self._say(self._launcher.hosting.statistics(), _FIRST)

    def _say(self, counters: Mapping[str, Mapping[str, float]], versions: int) -> None:
        for name in sorted(self._silent & counters.keys()):
            moved = read_traffic(counters[name])
            if moved.get(APPLY, Moved()).versions >= versions:
                self._silent.discard(name)
                for way in sorted(moved.keys() - {APPLY, PUBLISHED}):
                    log.info("%s", self._sentence(name, way, moved[way]))

    def _sentence(self, name: str, way: str, moved: Moved) -> str:
        return (
            f"{name}: weights come by {way}, because {self._why(name, way)}; {moved.mb:.3g} MB in {moved.ms:.3g} ms, "
            f"{moved.gb_per_s:.2g} GB/s (mean of {moved.versions})"
        )

    def _why(self, name: str, way: str) -> str:
        if way == ONE_PROCESS.way:
            return ONE_PROCESS.why
        if way == "tcp":
            return "the trainer is on another host"
        choice: Choice = choose_way(self._ends, self._devices[name], lambda *_: way == "peer")
        return choice.why if choice.way == way else f"{choice.way} could not serve at once (its log says why)"

    def summary(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By station and kind (a transport, published, apply): versions, mb of one, mean ms of one, gb_per_s. Logs the
        generators that were not logged yet."""
        found, statistics = {}, self._launcher.hosting.statistics(fresh=True)
        self._say(statistics, 1)
        for name, counts in statistics.items():
            if moved := read_traffic(counts):
                found[name] = {kind: _as_dict(one) for kind, one in moved.items() if one.versions}
        return found


def _as_dict(moved: Moved) -> dict[str, Any]:
    return {"versions": moved.versions, "mb": moved.mb, "ms": moved.ms, "gb_per_s": moved.gb_per_s}
