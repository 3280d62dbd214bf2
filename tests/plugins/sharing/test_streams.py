"""Generator and trainer in one process: the same run, and one unit of failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.long import long
from tests.process.runs import ASYNCHRONOUS, LOCKSTEP, closed, config

from polyrhythm.checks import CheckContext
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.placed import place
from polyrhythm.plugins.sharing import CHECKS
from polyrhythm.runtime.hosting import dropped_messages, process_ids
from polyrhythm.runtime.memory.published import choose_way

TOGETHER: dict[str, Any] = {"rollout": {"generators": 1}, "placement": {"sharing": "process"}}
ON_ONE = {"simulated_devices": 1, "generators": {"devices": "0"}, "trainer": {"devices": "0"}}


def run(folder: Path, placement: dict[str, Any]) -> tuple[dict[str, int], dict[str, torch.Tensor], dict[str, Any]]:
    """The process ids of a lock-step run of two versions, its last weights, and its counters."""
    folder.mkdir()
    settings = config(LOCKSTEP, rollout={"generators": 1}, placement=placement)
    with closed(build_pipeline(RunContext(settings, folder=folder))) as pipeline:
        pids = process_ids(pipeline.launcher.hosting)
        pipeline.loop.train_until(2)
        assert not dropped_messages(pipeline.launcher.hosting)
        counters = pipeline.launcher.hosting.statistics(fresh=True)
        return pids, dict(pipeline.weights.read(2)[1]), counters


def test_one_process_trains_to_the_bit_as_two(tmp_path: Path) -> None:
    apart, before, _ = run(tmp_path / "apart", {})
    together, after, counters = run(tmp_path / "together", {"sharing": "process", **ON_ONE})
    assert apart["generator-0"] != apart["trainer"]
    assert together["generator-0"] == together["trainer"] != together["simulator-0"]
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert counters["generator-0"]["weights/reference/versions"] >= 2, "from the publication on the device"
    logs = tmp_path / "together" / "logs"
    assert "works in the process of trainer, see its log" in (logs / "generator-0.0.log").read_text()


@pytest.mark.parametrize(
    "ended_by", ["signal", pytest.param("hang", marks=long(10, "a process of two that is stopped"))]
)
def test_a_process_of_two_is_replaced_as_one(ended_by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(ASYNCHRONOUS, **TOGETHER, supervision={"heartbeat_s": 5.0, "max_failures": 1})

    def fail(pipeline: Pipeline) -> None:
        pid = process_ids(pipeline.launcher.hosting)["trainer"]
        os.kill(pid, signal.SIGKILL if ended_by == "signal" else signal.SIGSTOP)

    with closed(build_pipeline(RunContext(settings, folder=tmp_path))) as pipeline:
        before = process_ids(pipeline.launcher.hosting)
        pipeline.loop.train_until(1)
        fail(pipeline)
        pipeline.loop.train_until(3)
        after = process_ids(pipeline.launcher.hosting)
        assert set(dropped_messages(pipeline.launcher.hosting)) <= {"earlier_incarnation"}
    assert after["generator-0"] == after["trainer"] != before["trainer"]
    assert after["simulator-0"] == before["simulator-0"]
    assert "(failure 1 of 1 that supervision.max_failures allows)" in caplog.text, "it counts once"
    assert "works in one process with" in caplog.text
    assert "both are started again" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"generators": 2}}, "2 generators and 1 ranks of the trainer, and one process takes one of each"),
        ({"placement": {"trainer": {"ranks": 2}}}, "1 generators and 2 ranks"),
        (
            {"placement": {"simulated_devices": 1, "trainer": {"devices": "0"}}},
            "the generator is on cpu, the trainer on sim:0; place both on one device",
        ),
        (
            {
                "evaluation": {"episodes": 2, "every": 1, "rows": 2, "weights": "own_generator"},
                "placement": {},
            },
            "2 generators and 1 ranks",
        ),
    ],
)
def test_other_stations_than_one_of_each_are_refused(changes: dict[str, Any], message: str) -> None:
    base = {**ASYNCHRONOUS, "rollout": {**ASYNCHRONOUS["rollout"], "generators": 1}}
    changes = {**changes, "placement": {"sharing": "process", **changes.get("placement", {})}}
    with pytest.raises(ConfigError, match=f"placement.sharing = process: .*{message}"):
        place(config(base, **changes))


def test_what_cannot_be_in_one_process_is_refused_before_the_start() -> None:
    (check,) = CHECKS
    assert check.run(CheckContext(config(**TOGETHER))) is None
    for launcher in ("inline", "ray"):
        with pytest.raises(ConfigError, match=f"process: with launcher = {launcher} the run does not start its"):
            check.run(CheckContext(config(**TOGETHER, launcher=launcher)))


def test_an_evaluation_has_no_trainer_to_share_with() -> None:
    placed = place(config(**TOGETHER), trainer=False)
    assert not placed.seats["generator-0"].process
    assert not placed.ends.one_process


def test_seats_of_one_process_have_the_larger_number_of_threads() -> None:
    threads = {"generators": {"threads": 2}, "trainer": {"threads": 1}}
    placed = place(config(ASYNCHRONOUS, **{**TOGETHER, "placement": {"sharing": "process", **threads}}))
    assert {placed.seats[name].threads for name in ("generator-0", "trainer")} == {2}
    assert placed.ends.one_process
    assert choose_way(placed.ends, "cpu", lambda _, __: True).way == "host"
