"""What a run on several hosts leaves: logs, utilisation and faults by host, and one timeline by one clock."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.long import long
from tests.process.networks import memory
from tests.process.runs import children, config, orphaned_folders

from polyrhythm.errors import HostLost
from polyrhythm.pipeline.callbacks import Callbacks
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.cluster.hosts.agent import LocalNode
from polyrhythm.plugins.cluster.launching import launch_on

#: Seconds by which the monotonic clock of the second host is ahead.
AHEAD_S = 1000


def other_clock(seconds: int) -> tuple[str, ...]:
    """The words before a command whose monotonic clock is so many seconds ahead; none where the system forbids it."""
    words = ("unshare", "--time", "--monotonic", str(seconds))
    ask = (sys.executable, "-c", "import time; print(time.monotonic())")
    try:
        found = float(subprocess.run([*words, *ask], capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return words if found > time.monotonic() + seconds / 2 else ()


def kill(station: str) -> None:
    (process,) = [p for p in children() if p.cmdline()[-1:] == [station]]
    os.kill(process.pid, signal.SIGKILL)


@long(12, "a run on two hosts, by host")
def test_a_run_on_two_hosts_says_by_host_what_was_where(tmp_path: Path) -> None:
    """The generator alone is on the second."""
    clock = other_clock(AHEAD_S)
    nodes = [
        LocalNode("here", environment=memory(tmp_path, "0")),
        LocalNode("there", prefix=clock, environment=memory(tmp_path, "1")),
    ]
    seen: list[int] = []

    def note(metrics: object) -> None:
        seen.append(len(seen))
        if len(seen) == 3:
            kill("generator-0")

    folder = tmp_path / "run"
    folder.mkdir()
    checked = validate_run(config(training={"versions": 12}, rollout={"simulators": 1, "generators": 1}))
    began = time.monotonic()
    summary = train(checked, folder, callbacks=Callbacks([note]), launch=launch_on(nodes))
    took_s = time.monotonic() - began
    assert not children()
    assert not orphaned_folders()

    logs = {str(path.relative_to(folder / "logs")) for path in (folder / "logs").rglob("*.log")}
    assert logs == {
        *("host-1/simulator-0.0.log", "host-1/trainer.0.log"),
        *("host-2/generator-0.0.log", "host-2/generator-0.1.log"),
    }
    hosts = summary["hosts"]
    assert {host: (own["faults"], sorted(own["stations"])) for host, own in hosts.items()} == {
        "host-1": (0, ["simulator-0", "trainer"]),
        "host-2": (1, ["generator-0"]),
    }
    assert all(0 < own["utilisation"] < 1 for own in hosts.values())
    assert [fault["host"] for fault in summary["faults"]] == ["host-2"]
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["hosts/faults/host-1"], last["hosts/faults/host-2"]) == (0, 1)
    assert {"hosts/utilisation/host-1", "hosts/utilisation/host-2"} <= last.keys()
    assert '"heading":"Hosts"' in (folder / "report.html").read_text()
    check_timeline(folder / "trace.json", took_s, AHEAD_S if clock else 0)


@long(20, "a run that loses its trainer's host")
def test_the_loss_of_the_trainers_host_is_told_after_the_resume(tmp_path: Path) -> None:
    """With what else has happened since the run was saved: here the generator, on the host that is left, was lost."""
    first, second, third = (LocalNode(name, environment=memory(tmp_path, name)) for name in ("a", "b", "c"))
    seen: list[int] = []

    def disturb(metrics: object) -> None:
        seen.append(len(seen))
        if len(seen) == 2:
            kill("generator-0")
        if len(seen) == 4:
            kill("host-1")  # its agent

    folder = tmp_path / "run"
    folder.mkdir()
    changes = {"rollout": {"simulators": 1, "generators": 1}, "checkpoint": {"run_every_s": 3600}}
    checked = validate_run(config(training={"versions": 8}, **changes))
    with pytest.raises(HostLost, match=r"host host-1 is lost \(its agent has ended with status -9\), .* with resume,"):
        train(checked, folder, callbacks=Callbacks([disturb]), launch=launch_on([first, second]))
    assert not children()
    summary = train(checked, folder, launch=launch_on([second, third]))
    assert [(fault["station"], fault["host"], fault["reason"]) for fault in summary["faults"]] == [
        ("generator-0", "host-2", "was ended by SIGKILL"),
        ("simulator-0", "host-1", "is on host host-1, which is lost"),
        ("trainer", "host-1", "is on host host-1, which is lost"),
    ]
    assert {host: own["faults"] for host, own in summary["hosts"].items()} == {
        "host-1": 2,
        "host-2": 1,
        "host-3": 0,
        "host-4": 0,
    }
    assert summary["ledger"]["trained"] == 64, "from the beginning, as nothing was saved"
    assert not children()
    assert not orphaned_folders()


def check_timeline(path: Path, took_s: float, ahead_s: int) -> None:
    """The bars of the host whose clock is so far ahead are within the run, and the offset is said."""
    events = json.loads(path.read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    (mark,) = [event for event in events if "clock of host-2" in event["name"]]
    found_s, uncertainty_ms = re.findall(r"([\d.e+-]+) m?s", mark["name"])
    assert abs(float(found_s) - ahead_s) < 1.1 * float(uncertainty_ms) / 1000 + 1e-6
    assert mark["args"]["stations"] == "generator-0"
    bars = [event for event in events if event["ph"] == "X"]
    passes = [bar for bar in bars if lanes[bar["tid"]] == "generator-0"]
    served = [bar for bar in bars if bar["name"] == "in_batch"]
    assert passes
    assert served, "what the generator measured cuts what slots of the other host waited"
    assert all(bar["ts"] >= 0 and bar["ts"] + bar["dur"] < 1e6 * took_s for bar in passes + served)
