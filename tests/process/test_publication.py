"""A version that is announced after the next update has ended, and the loss of the trainer between the two."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.long import long
from tests.process.runs import ASYNCHRONOUS, LOCKSTEP, wait_until
from tests.process.test_supervision import lost, run

from polyrhythm.pipeline.build import Pipeline
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.memory.weights import SharedWeights
from polyrhythm.scheduler.records import Event, Published, TrainerJoined, UpdateDone


@contextmanager
def reading(pipeline: Pipeline) -> Iterator[None]:
    """Both buffers of the weights are read, so no version can be written."""
    assert isinstance(pipeline.weights, SharedWeights)
    with ExitStack() as locks:
        for index in range(2):
            locks.enter_context(pipeline.weights.lock(index, fcntl.LOCK_SH))
        yield


def ahead_of_its_publication(pipeline: Pipeline, act: Callable[[], None]) -> None:
    """Do something once the update behind a version has ended that the trainer cannot write."""
    versions = pipeline.loop.conductor.versions
    wait_until(lambda: versions.updates >= 2)
    with reading(pipeline):
        wait_until(lambda: versions.trained >= versions.published + 2)
        act()


@pytest.mark.parametrize(
    ("ranks", "killed"),
    [(1, True), *(pytest.param(*rest, marks=long(15, "publications overtaken")) for rest in ((1, False), (2, True)))],
)
def test_the_update_behind_a_version_may_end_first_and_its_loss_is_made_good(
    ranks: int, killed: bool, tmp_path: Path
) -> None:
    def during(pipeline: Pipeline) -> None:
        trainer = process_ids(pipeline.launcher.hosting)["trainer"]
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


@long(4, "a publication that hangs")
def test_a_publication_that_hangs_while_nothing_else_is_to_do_is_the_loss_of_the_trainer(tmp_path: Path) -> None:
    """In lock-step the next update waits for it, so it is under way by itself."""

    def during(pipeline: Pipeline) -> None:
        versions = pipeline.loop.conductor.versions
        wait_until(lambda: versions.updates >= 2)
        with reading(pipeline):
            wait_until(lambda: bool(lost(pipeline)))

    limits = {"update_s": 2.0, "heartbeat_s": 60.0}
    pipeline = run(tmp_path, versions=4, base=LOCKSTEP, during=during, launcher="local", supervision=limits)
    (event,) = lost(pipeline)
    assert event.station == "trainer"
    assert re.fullmatch(r"has been in one publish for \d+\.\d s \(supervision\.update_s\)", event.reason)
    assert pipeline.loop.conductor.ledger.imbalance == 0


def _ended_first(said: list[Event], version: int) -> bool:
    """Whether the first trainer's update behind this version ended before the version was announced, if that ever
    was."""
    ended, announced = UpdateDone("trainer", 0, version), Published("trainer", 0, version)
    return ended in said and (announced not in said or said.index(ended) < said.index(announced))
