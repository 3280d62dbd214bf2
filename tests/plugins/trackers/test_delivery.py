"""Sinks that fail: each is repeated by the rule, logged once, and holds up nothing."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.plugins.trackers.own_sinks import FaultySettings

from polyrhythm.plugins.trackers.delivery import Patience, QueuedDelivery
from polyrhythm.plugins.trackers.process import SinkProcess
from polyrhythm.plugins.trackers.sink import TrackedRun

QUICK = Patience(retry_s=(0.01, 0.01, 0.01), close_s=60.0, failing_close_s=60.0)
STEPS = 4


def record(tmp_path: Path, faults: str, patience: Patience = QUICK) -> list[list[Any]]:
    """Deliver `STEPS` lines of metrics to a sink with these faults; return what it has recorded."""
    settings = FaultySettings(file=str(tmp_path / "lines"))
    (tmp_path / "lines.fault").write_text(faults)
    run = TrackedRun("run", tmp_path, {"seed": 1})
    delivery = QueuedDelivery(settings, run, SinkProcess(settings, tmp_path / "tracker.log"), lambda _: None, patience)
    for step in range(STEPS):
        delivery.send("metrics", step, {"env/return": step})
    file, until = tmp_path / "lines", time.monotonic() + 60
    while faults.startswith("close:hang") and time.monotonic() < until:  # only the end is slow
        if file.exists() and file.read_text().count("metrics") == STEPS:
            break
        time.sleep(0.05)
    delivery.end(True)
    delivery.close()
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps(recorded: list[list[Any]]) -> list[int]:
    return [content[1] for content in recorded if content[0] == "metrics"]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "polyrhythm")
    return caplog


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        ("metrics:raise", "ConnectionError: the service is gone"),
        ("metrics:raise metrics:raise", "ConnectionError: the service is gone"),
        ("open:raise", "ConnectionError: the service is gone"),
        ("close:raise", "ConnectionError: the service is gone"),
        ("metrics:full", "OSError: [Errno 28] No space left on device"),
        ("metrics:ask", "EOFError: EOF when reading a line"),
        ("metrics:exit", "SystemExit: 3"),
        ("metrics:die", "its process ended (status -9); see FOLDER/tracker.log"),
    ],
)
def test_a_fault_that_passes_loses_nothing(
    faults: str, problem: str, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    recorded = record(tmp_path, faults)
    assert steps(recorded) == [*range(STEPS)]
    assert recorded[-1] == ["close", True]
    (said,) = warnings.messages
    assert f"failed ({problem.replace('FOLDER', str(tmp_path))})" in said
    assert "the run goes on" in said
    assert {content[1] for content in recorded if content[0] == "open"} == {"id-of-run"}


def test_what_a_library_prints_is_in_the_log_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert steps(record(tmp_path, "metrics:print")) == [*range(STEPS)]
    assert (tmp_path / "tracker.log").read_text() == "a library prints this\n"
    assert capfd.readouterr() == ("", "")


@long(6, "waits five seconds for a reply")
def test_a_call_that_hangs_is_ended_and_repeated(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    hasty = Patience(retry_s=(0.01, 0.01), reply_s=5.0, failing_close_s=60.0)
    assert steps(record(tmp_path, "metrics:hang", hasty)) == [*range(STEPS)]
    (said,) = warnings.messages
    assert "it did not return within 5 s" in said


@pytest.mark.parametrize("fault", ["metrics:raise!", pytest.param("open:raise!", marks=long(2, "at its opening"))])
def test_a_service_that_stays_away_is_counted_at_the_end(
    fault: str, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    patience = Patience(retry_s=(0.05, 0.05), close_s=120.0, failing_close_s=120.0)
    assert steps(record(tmp_path, fault, patience)) == []
    failed, lost = warnings.messages
    assert "ConnectionError: the service is gone" in failed
    missing = STEPS if fault.startswith("metrics") else STEPS + 1
    assert f"lacks {missing} records" in lost


def test_the_end_of_a_run_waits_for_a_bounded_time(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    recorded = record(tmp_path, "close:hang!", Patience(retry_s=(0.01,), reply_s=60.0, close_s=0.5))
    assert steps(recorded) == [*range(STEPS)]
    assert ["close", True] not in recorded
    assert "did not close in time" in warnings.messages[0]


def test_a_slow_opening_is_not_cut_short(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    recorded = record(tmp_path, "open:slow", Patience(close_s=1.0))
    assert recorded[-1] == ["close", True]
    assert warnings.messages == []


def test_a_full_queue_drops_records_and_holds_up_nobody(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    settings = FaultySettings(file=str(tmp_path / "lines"))
    (tmp_path / "lines.fault").write_text("open:hang!")
    patience = Patience(start_s=0.5, queue=10, failing_close_s=0.5)
    process = SinkProcess(settings, tmp_path / "tracker.log")
    delivery = QueuedDelivery(settings, TrackedRun("run", tmp_path, {}), process, lambda _: None, patience)
    for step in range(1000):
        delivery.send("metrics", step, {"env/return": step})
    delivery.end(True)
    delivery.close()
    assert "lacks 1001 records" in warnings.messages[-1]


KILLED = """
import sys, time
from pathlib import Path
from polyrhythm.plugins.trackers.delivery import QueuedDelivery
from polyrhythm.plugins.trackers.process import SinkProcess
from polyrhythm.plugins.trackers.sink import TrackedRun
from tests.plugins.trackers.own_sinks import LinesSettings
folder = Path(sys.argv[1])
settings = LinesSettings(file=str(folder / "lines"))
delivery = QueuedDelivery(
    settings, TrackedRun("run", folder, {}), SinkProcess(settings, folder / "log"), lambda _: print("open", flush=True)
)
delivery.send("metrics", 0, {"env/return": 1.0})
time.sleep(600)
"""


def test_a_killed_run_closes_its_sink_as_unfinished(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"open\n"
        run.send_signal(signal.SIGKILL)
    until, lines = time.monotonic() + 60, tmp_path / "lines"
    while '["close", false]' not in lines.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_records_lost_in_two_threads_are_all_counted(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    settings = FaultySettings(file=str(tmp_path / "lines"))
    (tmp_path / "lines.fault").write_text("metrics:raise!")
    patience = Patience(retry_s=(0.0,), queue=2, close_s=60.0, failing_close_s=60.0)
    process = SinkProcess(settings, tmp_path / "tracker.log")
    delivery = QueuedDelivery(settings, TrackedRun("run", tmp_path, {}), process, lambda _: None, patience)
    for step in range(2000):
        delivery.send("metrics", step, {})
    delivery.end(True)
    delivery.close()
    assert "lacks 2000 records" in warnings.messages[-1]
