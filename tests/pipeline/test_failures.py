"""Samples that fail in their environment are told of, and not one by one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from polyrhythm.pipeline.observers.alarms import SampleFailureLog
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler.records import DropReason, EpisodeSetAside, SampleFailed


def told(
    failures: SampleFailureLog,
    errors: list[str],
    caplog: pytest.LogCaptureFixture,
    reason: DropReason = DropReason.ENVIRONMENT_RAISED,
) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for ticket, error in enumerate(errors):
            failures.on_decision(0.0, SampleFailed("simulator-0", 2, ticket, 0, reason, error), [])
    return caplog.messages


def test_the_first_of_a_kind_is_told_with_the_file_that_has_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    failures = SampleFailureLog(Path("run/logs"))
    first = "simulator-0: a sample failed: step: ValueError: {}; the traceback: run/logs/simulator-0.2.log"
    assert told(failures, ["step: ValueError: seed 3"], caplog) == [first.format("seed 3")]
    assert told(failures, ["step: ValueError: seed 4", "reset: ValueError: seed 4"], caplog) == [
        "simulator-0: a sample failed: reset: ValueError: seed 4; the traceback: run/logs/simulator-0.2.log"
    ]


def test_the_tenth_and_the_hundredth_are_told_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    found = told(SampleFailureLog(None), ["step: OSError: x"] * 150, caplog)
    assert [line.partition("(")[2].partition(")")[0] for line in found] == ["", "10 times so far", "100 times so far"]


def test_a_refusal_is_told_once_for_its_group_and_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    failures = SampleFailureLog(Path("run/logs"), tasks=("spell",))
    why = "env.max_prompt_tokens = 8: the prompt of task spell, seed 7, has 9 tokens; raise it"
    refused = SampleFailed("simulator-0", 2, 7, 1, DropReason.EPISODE_REFUSED, why)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            aside = EpisodeSetAside(0, number, 1, DropReason.EPISODE_REFUSED, background=False)
            failures.on_decision(0.0, refused, [aside])
            failures.on_decision(0.0, refused, [])  # of another member
    assert caplog.messages == [f"an episode is set aside: {why}", f"an episode is set aside (10 times so far): {why}"]
    assert not failures.counts


def test_who_gave_what_is_not_finite_is_named_by_its_setting_with_task_and_seed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = SampleFailureLog(Path("run/logs"), {"policy": "policy.type = mine:Mine"})
    error, detail = "policy: logprob is not finite", "task reach, seed 3, env step 0, weights of version 2"
    with caplog.at_level(logging.WARNING):
        failures.on_decision(0.0, SampleFailed("simulator-0", 2, 7, 1, DropReason.POLICY_NOT_FINITE, error, detail), [])
    said = "policy.type = mine:Mine: logprob is not finite (task reach, seed 3, env step 0, weights of version 2)"
    assert caplog.messages == [f"simulator-0: a sample failed: {said}"]
    assert failures.last == said
    assert failures.counts == {error: 1}


def test_updates_with_skipped_steps_are_told_and_not_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    failures = SampleFailureLog(Path("run/logs"))
    with caplog.at_level(logging.WARNING):
        for step in range(30):
            failures.on_report(0.0, Report("trainer", 1, "update", step, {"train/actor/skipped_steps": step % 3}))
    first = "update {}: {} optimizer steps were skipped, their gradient is not finite{}; why: run/logs/trainer.1.log"
    assert caplog.messages == [first.format(2, 1, ""), first.format(15, 2, " (10 times so far)")]


def test_what_was_cancelled_did_not_fail(caplog: pytest.LogCaptureFixture) -> None:
    assert told(SampleFailureLog(None), [""] * 3, caplog, DropReason.CANCELLED) == []


def test_a_log_is_found_on_whichever_host_the_station_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same incarnation may have been elsewhere in an earlier part of the run."""
    for age, host in ((100, "host-1"), (0, "host-2")):
        (tmp_path / host).mkdir()
        file = tmp_path / host / "simulator-0.2.log"
        file.touch()
        os.utime(file, (1e9 - age, 1e9 - age))
    (line,) = told(SampleFailureLog(tmp_path), ["step: ValueError: seed 3"], caplog)
    assert line.endswith(f"the traceback: {tmp_path}/host-2/simulator-0.2.log")
