"""Sinks of one's own for tests: one that records all calls in a file, and one that fails as a file tells it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyrhythm.plugins.trackers.sink import Sink, Table, TrackedRun, TrackerSettings

MODULE = "tests.plugins.trackers.own_sinks"


class LinesSettings(TrackerSettings):
    """JSON lines: one for each call."""

    type: str = f"{MODULE}:LinesSettings"
    file: str
    """File that gets the lines."""

    def open(self, run: TrackedRun) -> Sink:
        return LinesSink(Path(self.file), run)


class LinesSink(Sink):
    """Appends each call to a file."""

    def __init__(self, file: Path, run: TrackedRun) -> None:
        self.file, self.id = file, run.id or f"id-of-{run.name}"
        self.write("open", self.id, run.name, dict(run.config))

    def write(self, *content: Any) -> None:
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(content) + "\n")

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.write("metrics", step, values)

    def log_table(self, name: str, step: int, table: Table) -> None:
        self.write("table", name, step, table.columns, table.rows)

    def log_video(self, name: str, step: int, file: Path) -> None:
        self.write("video", name, step, len(file.read_bytes()))

    def log_artifact(self, name: str, file: Path) -> None:
        self.write("artifact", name, file.read_text())

    def close(self, finished: bool) -> None:
        self.write("close", finished)


class FaultySettings(LinesSettings):
    """Before each call it does what the first word of the file `<file>.fault` says, and takes the word away."""

    type: str = f"{MODULE}:FaultySettings"

    def open(self, run: TrackedRun) -> Sink:
        fail(Path(self.file), at="open")
        return FaultySink(Path(self.file), run)


class FaultySink(LinesSink):
    """Fails by words: raise, hang, slow, die, ask, print, full, exit."""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        fail(self.file, at="metrics")
        super().log_metrics(step, values)

    def close(self, finished: bool) -> None:
        fail(self.file, at="close")
        super().close(finished)


def fail(file: Path, at: str) -> None:
    """Words are `CALL:FAULT`; `CALL:FAULT!` stays for all later calls."""
    faults = file.with_suffix(".fault")
    words = faults.read_text().split() if faults.exists() else []
    if not words or not words[0].startswith(f"{at}:"):
        return
    word = words[0].partition(":")[2]
    if not word.endswith("!"):
        faults.write_text(" ".join(words[1:]))
    match word.rstrip("!"):
        case "raise":
            raise ConnectionError("the service is gone")
        case "hang" | "slow" as how:
            time.sleep(600 if how == "hang" else 1.5)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "ask":
            input("your key: ")
        case "full":
            Path("/dev/full").write_text("no room")
        case "print":
            print("a library prints this")  # noqa: T201
