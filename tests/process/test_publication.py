"""A version that is announced after the next update has ended, and the loss of the trainer between the two."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.process.runs import ASYNCHRONOUS, PATIENCE_S
from tests.process.test_supervision import lost, run

from polyrhythm.pipeline.build import Pipeline
from polyrhythm.scheduler.records import Event, Published, TrainerJoined, UpdateDone


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def ahead_of_its_publication(pipeline: Pipeline, act: Callable[[], None]) -> None:
    """Do something once the update behind a version has ended that the trainer cannot write: both buffers are read."""
    versions = pipeline.loop.conductor.versions
    wait_for(lambda: versions.updates >= 2)
    with ExitStack() as reading:
        for index in range(2):
            reading.enter_context(pipeline.weights._memory.lock(index, fcntl.LOCK_SH))  # type: ignore[attr-defined]
        wait_for(lambda: versions.trained >= versions.published + 2)
        act()


@pytest.mark.parametrize(("ranks", "killed"), [(1, False), (1, True), (2, True)])
def test_the_update_behind_a_version_may_end_first_and_its_loss_is_made_good(
    ranks: int, killed: bool, tmp_path: Path
) -> None:
    def during(pipeline: Pipeline) -> None:
        trainer = pipeline.launcher.processes()["trainer"]
        ahead_of_its_publication(pipeline, lambda: os.kill(trainer, signal.SIGKILL) if killed else None)

    pipeline = run(
        tmp_path,
        versions=8,
        base=ASYNCHRONOUS,
        during=during,
        freshness={"max_lag": 2},
        training={"versions": 8},
        placement={"trainer": {"ranks": ranks}},
    )
    said = [decision.event for decision in pipeline.loop.trace]
    ahead = [version for version in range(1, 8) if _ended_first(said, version)]
    ledger, versions = pipeline.loop.conductor.ledger, pipeline.loop.conductor.versions
    assert ahead
    assert versions.trained == versions.applied == 8
    assert (ledger.imbalance, ledger.dropped, ledger.trained) == (0, {}, 64)
    assert [event.station for event in lost(pipeline)] == ["trainer"] * killed
    if killed:
        assert Published("trainer", 0, ahead[-1]) not in said
        assert TrainerJoined("trainer", 1, ahead[-1]) in said, "the state of that version was there"
        assert Published("trainer", 1, ahead[-1]) in said
        assert ledger.rolled_back == 8


def _ended_first(said: list[Event], version: int) -> bool:
    """Whether the first trainer's update behind this version ended before the version was announced, if that ever
    was."""
    ended, announced = UpdateDone("trainer", 0, version), Published("trainer", 0, version)
    return ended in said and (announced not in said or said.index(ended) < said.index(announced))
