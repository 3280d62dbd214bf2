"""A generator that serves by streams is stopped or killed in mid-answer: its requests begin anew elsewhere."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.long import long
from tests.pipeline.test_streams import LANGUAGE
from tests.process.runs import PATIENCE_S, children, orphaned_folders

from polyrhythm.config.load import merge, validate
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.observers.ticket_audit import TicketAudit
from polyrhythm.scheduler.records import (
    Command,
    DropReason,
    SampleFailed,
    SampleFinished,
    StartRows,
    StartStream,
    StationLost,
    StreamDone,
)

#: Versions at most, and after the fault.
VERSIONS, AFTER = 60, 4
HIT = "generator-0"


def asked(command: Command) -> tuple[str, int] | None:
    """The slot and the number of the request that a stream answers."""
    return (command.stream.request.slot, command.stream.request.sequence) if isinstance(command, StartStream) else None


class Fault(threading.Thread):
    """Stops the generator once it has streams under way, after two updates. under_way: what these were for."""

    def __init__(self, pipeline: Pipeline, *, kill: bool) -> None:
        super().__init__(daemon=True)
        self.under_way: set[tuple[str, int]] = set()
        self._pipeline, self._kill = pipeline, kill

    def run(self) -> None:
        """Consumes: nothing. Waits for: updates, and streams under way. Unblocked by: the run. Produces: the fault."""
        until = time.monotonic() + PATIENCE_S
        while self._pipeline.loop.conductor.versions.updates < 2 and time.monotonic() < until:
            time.sleep(0.01)
        process = psutil.Process(self._pipeline.launcher.processes()[HIT])
        while time.monotonic() < until:
            process.suspend()
            time.sleep(0.1)  # what it has said until now is heard meanwhile
            self.under_way = self._streams()
            if self.under_way:
                break
            process.resume()
            time.sleep(0.003)
        if self._kill:
            process.kill()

    def _streams(self) -> set[tuple[str, int]]:
        found = {}
        for decision in list(self._pipeline.loop.trace):
            if isinstance(decision.event, StreamDone) and decision.event.generator == HIT:
                found.pop(decision.event.stream, None)
            for command in decision.commands:
                if isinstance(command, StartStream) and command.generator == HIT:
                    found[command.stream.number] = asked(command)
        return {request for request in found.values() if request is not None}


@pytest.mark.parametrize(
    ("on_update", "kill"),
    [
        ("continue", True),
        pytest.param("abort", False, marks=long(10, "stopped, under abort")),
        pytest.param("continue", False, marks=long(10, "stopped, under continue")),
        pytest.param("abort", True, marks=long(10, "killed, under abort")),
    ],
)
def test_a_generator_that_is_lost_in_mid_answer_loses_no_sample(on_update: str, kill: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "launcher": "local",
        "env": {"max_new_tokens": 64},
        "freshness": {"on_update": on_update},
        "training": {"versions": VERSIONS},
        "supervision": {"heartbeat_s": 60.0 if kill else 3.0},
    }
    pipeline = build_pipeline(validate(merge(LANGUAGE, changes)), folder=tmp_path, record=True)
    audit, fault = TicketAudit(1.0, "sample"), Fault(pipeline, kill=kill)
    pipeline.loop.add_observers(audit)
    try:
        fault.start()
        versions, left = 0, AFTER
        while left and versions < VERSIONS:
            versions += 1
            pipeline.loop.train_until(versions)
            left -= not fault.is_alive()
        fault.join(PATIENCE_S)
        trace, ledger = list(pipeline.loop.trace), pipeline.loop.conductor.ledger
    finally:
        pipeline.close()
    assert not children()
    assert not orphaned_folders()

    events = [decision.event for decision in trace]
    lost = [i for i, event in enumerate(events) if isinstance(event, StationLost) and event.station == HIT]
    assert lost, "it was noticed"
    assert fault.under_way, "in mid-answer"
    after = [c for d in trace[lost[0] :] for c in d.commands]
    assert fault.under_way <= {asked(command) for command in after}, "each answer begins anew"
    finished = {event.ticket for event in events[: lost[0]] if isinstance(event, SampleFinished)}
    granted = {grant.ticket.number for command in after if isinstance(command, StartRows) for grant in command.grants}
    assert finished, "before the loss"
    assert not finished & granted, "they are kept"
    failed = {event.reason for event in events if isinstance(event, SampleFailed)}
    assert failed <= {DropReason.CANCELLED}, "slots waited"
    assert (ledger.imbalance, ledger.dropped, ledger.trained) == (0, {}, 8 * versions)
    audit.settle(ledger, may_roll_back=False)
    assert audit.violations == [], "no sample was trained twice"
