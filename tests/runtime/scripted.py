"""A station that does as `PublishWeights` tells it: answers, raises, hangs, dies, refuses or answers in `handle`."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.messages import Report, Station, StationTraits
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import Published, PublishWeights, StartUpdate, TrainerJoined, UpdateDone

#: Versions that are not published: what the station does instead.
RAISES, HANGS, DIES, REFUSES, AT_ONCE = 1001, 1002, 1003, 1004, 1005
#: The same for the last of several ranks; the others notice it by a broken connection.
LAST_RAISES, LAST_DIES = 1006, 1007
#: Seconds after which they do.
_NOTICED_S = 1.0


class Scripted:
    traits = StationTraits()

    def __init__(self, name: str, incarnation: int, context: StationContext) -> None:
        self.name, self._incarnation, self._channels = name, incarnation, context.channels
        self._todo: deque[Any] = deque()
        self._doing = ("", 0.0)
        self._units = 0
        self._last = context.rank == context.ranks - 1

    def joined(self) -> TrainerJoined:
        return TrainerJoined(self.name, self._incarnation, 0)

    def handle(self, command: Any) -> None:
        if isinstance(command, PublishWeights) and command.version == REFUSES:
            raise UnfitMessage("impossible", "this version is refused")
        if isinstance(command, PublishWeights) and command.version == AT_ONCE:
            self._channels.emit(Published(self.name, self._incarnation, AT_ONCE))
            return
        self._todo.append(command)

    def work(self) -> bool:
        if not self._todo:
            return False
        command = self._todo.popleft()
        self._doing = ("publish", time.monotonic())
        if isinstance(command, StartUpdate):
            self._channels.report(Report(self.name, self._incarnation, "update", command.update, {}))
            self._channels.emit(UpdateDone(self.name, self._incarnation, command.update))
        elif command.version in (LAST_RAISES, LAST_DIES) and not self._last:
            time.sleep(_NOTICED_S)
            raise ValueError("a connection is broken")
        elif command.version in (RAISES, LAST_RAISES):
            raise ValueError("told to raise")
        elif command.version == HANGS:
            time.sleep(3600)
        elif command.version in (DIES, LAST_DIES):
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self._channels.emit(Published(self.name, self._incarnation, command.version))
        self._units += 1
        self._doing = ("", 0.0)
        return True

    def spans(self, begin: float, end: float) -> Sequence[Any]:
        return ()

    def current_call(self) -> tuple[str, float]:
        return self._doing

    def pending_work(self) -> list[str]:
        return [f"{self.name} has {len(self._todo)} to do"] if self._todo else []

    def statistics(self) -> dict[str, float]:
        return {"units": float(self._units)}

    def close(self) -> None: ...


@dataclass(frozen=True)
class ScriptedFactory:
    name: str

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        return [(f"{self.name}.{incarnation}.0", lambda: Scripted(self.name, incarnation, context))]

    def announcements(self, incarnation: int) -> Sequence[Any]:
        return []
