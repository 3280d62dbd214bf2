"""A run's own records on a full disk: one warning that says what and where, whole records, and the run goes on."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.observe.log_file import LogFile

FULL = Path("/dev/full")
GOES_ON = "the run goes on, and what cannot be written there is lost"

#: A limit of the system on the size of a file is met here, in a process of its own.
UNDER_A_LIMIT = """
import logging, pathlib, resource, signal, sys
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm.plugins.trackers.sink import TrackedRun
from polyrhythm.plugins.trackers.sinks.tensorboard import TensorBoardSink
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
folder = pathlib.Path(sys.argv[1])
board = TensorBoardSink(TrackedRun("run", folder, {}), flush_s=0.0) if sys.argv[2] == "tensorboard" else None
trace = TraceWriter(folder / "trace.json")
receivers = [board.log_metrics] if board else []
with MetricsWriter(folder, receivers) as metrics, trace:
    for step in range(2000):
        metrics.log(step, {"env/return": 0.5, "throughput/transitions": 1.0}, float(step))
        trace.complete("generators", "generator-0", "1 requests", float(step), step + 0.5)
    metrics.rewind(3)
    metrics.log(3, {"env/return": 0.25}, 2001.0)
if board:
    board.close(True)
print("went on")
"""


def under_a_limit(folder: Path, tensorboard: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", UNDER_A_LIMIT, str(folder), tensorboard]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        file = LogFile(FULL)
        for _ in range(3):
            file.write("a line\n")
        file.close()
    assert caplog.messages == [
        f"{FULL} could not be written (No space left on device); make room on that disk; {GOES_ON}",
    ]
    assert file.failed


def test_metrics_and_timeline_under_a_limit_keep_whole_records(tmp_path: Path) -> None:
    done = under_a_limit(tmp_path, "none")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "went on\n"
    warnings = done.stderr.splitlines()
    assert sorted(line.partition(" could not")[0] for line in warnings) == [
        str(tmp_path / "metrics.jsonl"),
        str(tmp_path / "trace.json"),
    ]
    assert all("File too large" in line for line in warnings)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["env/return"]) for line in lines] == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.25)]
    assert json.loads((tmp_path / "trace.json").read_text()) == [], "not one buffer fits"


def test_tensorboard_under_a_limit_is_warned_of_once_and_its_file_can_be_read(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = under_a_limit(tmp_path, "tensorboard")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "went on\n"
    (events,) = (tmp_path / "tensorboard").iterdir()
    warnings = done.stderr.splitlines()
    assert len(warnings) == 3, "one sentence for each file"
    assert sum(line.startswith(str(events)) and line.endswith(GOES_ON) for line in warnings) == 1
    read = EventAccumulator(str(events), size_guidance={"tensors": 0})
    read.Reload()
    steps = [event.step for event in read.Tensors("env/return")]
    assert steps[:100] == [*range(100)]


def test_what_was_cut_short_is_cut_off_and_later_pieces_follow(tmp_path: Path) -> None:
    """Room comes back: here a descriptor that takes no more than it is let."""
    path = tmp_path / "lines"
    code = """
import logging, pathlib, resource, sys
from polyrhythm.observe.log_file import LogFile
logging.basicConfig(format="%(message)s")
file = LogFile(pathlib.Path(sys.argv[1]))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
file.write("first\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (9, hard))
file.write("second\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
file.write("third\\n")
file.close()
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert path.read_text() == "first\nthird\n"
    assert done.stderr.count("could not be written") == 1
