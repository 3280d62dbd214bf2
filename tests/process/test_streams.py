"""A generator that serves by streams is stopped or killed in mid-answer: its requests begin anew elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.long import long
from tests.pipeline.test_streams import LANGUAGE
from tests.process.runs import children, orphaned_folders

from polyrhythm.config.load import merge, validate
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.scheduler.records import (
    AbortStream,
    Decision,
    DropReason,
    Event,
    RefuseRequest,
    RequestArrived,
    SampleFailed,
    SampleFinished,
    StartRows,
    StartStream,
    StationLost,
    StreamDone,
)
from polyrhythm_bench.chaos.ticket_audit import TicketAudit

#: Versions at most, and after the fault.
VERSIONS, AFTER = 60, 4
HIT = "generator-0"
#: Seconds after which a run from which nothing came stands still.
QUIET_S = 0.3


def is_loss(event: Event) -> bool:
    """Whether the generator is lost."""
    return isinstance(event, StationLost) and event.station == HIT


def under_way(trace: Sequence[Decision]) -> set[tuple[str, int]]:
    """The requests that the generator answers: of streams begun there since it was lost last that are neither done nor
    aborted, and whose slots have not asked anew. A slot does so before the stream is said to be done, at times."""
    found: dict[int, tuple[str, int]] = {}
    for event, commands in ((decision.event, decision.commands) for decision in trace):
        match event:
            case StreamDone(generator=name, stream=number) if name == HIT:
                found.pop(number, None)
            case RequestArrived(slot=slot):
                found = {number: request for number, request in found.items() if request[0] != slot}
            case StationLost(station=name) if name == HIT:
                found = {}
        for command in commands:
            if isinstance(command, AbortStream) and command.generator == HIT:
                found.pop(command.stream, None)
            if isinstance(command, StartStream) and command.generator == HIT:
                found[command.stream.number] = (command.stream.request.slot, command.stream.request.sequence)
    return set(found.values())


def needless(trace: Sequence[Decision]) -> set[tuple[str, int]]:
    """The requests that are refused, as their rows were cancelled, or are known to be answered, as their slots ask
    anew."""
    commands = [command for decision in trace for command in decision.commands]
    refused = {(c.slot, c.sequence) for c in commands if isinstance(c, RefuseRequest)}
    arrived = [decision.event for decision in trace if isinstance(decision.event, RequestArrived)]
    return refused | {(event.slot, event.sequence - 1) for event in arrived}


class Fault(threading.Thread):
    """Stops the generator once it has streams under way, after two updates, and kills it or leaves it so; once more if
    main has heard late that it had answered them all.

    lost: where in the trace its loss is (-1: nowhere yet); begun: what it was answering then; over: ends the thread.
    """

    def __init__(self, pipeline: Pipeline, *, kill: bool) -> None:
        super().__init__(daemon=True)
        self.lost, self.begun, self.over = -1, set[tuple[str, int]](), threading.Event()
        self._pipeline, self._kill = pipeline, kill

    def run(self) -> None:
        """Consumes: nothing. Waits for: updates, streams under way, the loss. Unblocked by: the run, or `over`.
        Produces: the fault."""
        while self._pipeline.loop.conductor.versions.updates < 2 and not self.over.wait(0.01):
            pass
        while not self.begun and not self.over.is_set():
            before = len(self._losses())
            stopped_in = self._hit()
            while len(self._losses()) == before and not self.over.wait(0.01):
                pass
            if not self.over.is_set():
                self.lost = self._losses()[-1]
                self.begun = stopped_in & under_way(self._pipeline.loop.trace[: self.lost])

    def _hit(self) -> set[tuple[str, int]]:
        """Stop it in mid-answer: what it was answering when the run stood still, as it does while that is missing."""
        process = psutil.Process(process_ids(self._pipeline.launcher.hosting)[HIT])
        trace, found = self._pipeline.loop.trace, set[tuple[str, int]]()
        while not self.over.is_set():
            process.suspend()
            heard = -1
            while (found := under_way(list(trace))) and len(trace) > heard:
                heard = len(trace)
                self.over.wait(QUIET_S)
            if found:
                break
            process.resume()
            self.over.wait(0.003)
        if self._kill:
            process.kill()
        return found

    def _losses(self) -> list[int]:
        trace = list(self._pipeline.loop.trace)
        return [i for i, decision in enumerate(trace) if is_loss(decision.event)]


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
        "supervision": {"heartbeat_s": 60.0 if kill else 10.0},
    }
    pipeline = build_pipeline(RunContext(validate(merge(LANGUAGE, changes)), folder=tmp_path), record=True)
    audit, fault = TicketAudit(1.0, "sample"), Fault(pipeline, kill=kill)
    pipeline.loop.add_observers(audit)
    try:
        fault.start()
        versions, left = 0, AFTER
        while left and versions < VERSIONS:
            versions += 1
            pipeline.loop.train_until(versions)
            left -= not fault.is_alive()
        trace, ledger = list(pipeline.loop.trace), pipeline.loop.conductor.ledger
    finally:
        fault.over.set()
        pipeline.close()
    assert not children()
    assert not orphaned_folders()

    assert fault.begun, "lost in mid-answer"
    before, after = trace[: fault.lost], trace[fault.lost :]
    requests = [command.stream.request for d in after for command in d.commands if isinstance(command, StartStream)]
    anew = {(request.slot, request.sequence) for request in requests}
    assert fault.begun & anew, "an answer begins anew"
    assert under_way(before) <= anew | needless(after), "each does"
    finished = {decision.event.ticket for decision in before if isinstance(decision.event, SampleFinished)}
    granted = {grant.ticket.number for d in after for c in d.commands if isinstance(c, StartRows) for grant in c.grants}
    assert finished, "before the loss"
    assert not finished & granted, "they are kept"
    failed = {decision.event.reason for decision in trace if isinstance(decision.event, SampleFailed)}
    assert failed <= {DropReason.CANCELLED}, "slots waited"
    assert (ledger.imbalance, ledger.dropped, ledger.trained) == (0, {}, 8 * versions)
    audit.settle(ledger, may_roll_back=False)
    assert audit.violations == [], "no sample was trained twice"
