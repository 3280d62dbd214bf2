"""Decision traces of the conductor: events at times, and the commands that were the answers.

A file `decisions/KIND.jsonl.xz` has one trace a line:

    name, origin       which trace, and where its events come from
    settings           those of the scheduler, every field
    start              the saved state that it begins with, or null for a fresh conductor
    detached           whether the conductor then forgot its stations, as one of a resumed run does
    steps              [time, event, commands, deadline afterwards], …
    saved              {number of steps taken: the state as it was saved then}
    outcome            what a run reads of the conductor at its end
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.held.conductors import (
    Plain,
    build_conductor,
    outcome,
    plain_record,
    read_record,
    restore_conductor,
    saved_again,
)

Trace = dict[str, Any]
FOLDER = Path(__file__).parent / "decisions"


def write(file: Path, traces: list[Trace]) -> None:
    """Write a file of traces."""
    lines = "".join(json.dumps(trace, separators=(",", ":")) + "\n" for trace in traces)
    file.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(file: Path) -> Iterator[Trace]:
    """The traces of a file."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def difference(trace: Trace, begin: int = 0, save_before: int = -1) -> str:
    """Where the conductor of today first decides otherwise than the trace says, in words; "" if nowhere.

    begin: number of steps after which it begins with the state that was saved there. save_before: number of the step
    before which its state goes through JSON.
    """
    settings = trace["settings"]
    if begin:
        conductor = restore_conductor(settings, trace["saved"][str(begin)], detached=False)
    elif trace["start"] is not None:
        conductor = restore_conductor(settings, trace["start"], detached=trace["detached"])
    else:
        conductor = build_conductor(settings)
    for index, (now, event, recorded, deadline) in enumerate(trace["steps"][begin:], begin):
        if index == save_before:
            conductor = saved_again(conductor)
        decided = [plain_record(command) for command in conductor.handle(read_record(event), now)]
        due = plain_record(conductor.deadline())  # asked after every event, as a run does: asking may tidy up
        # A command may have got fields since, which then have their defaults.
        same = decided == recorded or decided == [plain_record(read_record(command)) for command in recorded]
        if not same or due != deadline:
            return _words(trace["name"], index, now, event, (recorded, deadline), (decided, due))
    found = outcome(conductor)
    if begin or found == trace["outcome"]:  # a saved state has not what was refused before
        return ""
    return f"{trace['name']}, after the last step:\n  recorded  {trace['outcome']}\n  found     {found}"


def _words(name: str, index: int, now: float, event: Plain, recorded: Any, found: Any) -> str:
    lines = [f"{name}, step {index} at {now!r} s: {event}"]
    (expected, deadline), (decided, due) = recorded, found
    lines += [f"  recorded  {command}" for command in expected if command not in decided]
    lines += [f"  decided   {command}" for command in decided if command not in expected]
    if expected != decided and len(lines) == 1:
        lines += ["  the same commands in another order", f"  recorded  {expected}", f"  decided   {decided}"]
    if deadline != due:
        lines.append(f"  deadline  recorded {deadline}, found {due}")
    return "\n".join(lines)
