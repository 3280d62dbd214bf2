"""A simulator that has joined can say of its samples only what agrees with what the run has sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.plugins.join.test_hostile_join import FAILED, FINISHED, LAYOUT, POSTED, REPLY, START
from tests.plugins.join.test_reception import SPEC

from polyrhythm.plugins.join.joined_samples import JoinedSamples
from polyrhythm.runtime.memory.arena import Arena, in_memory
from polyrhythm.runtime.messages import VERSION
from polyrhythm.scheduler import records as r
from polyrhythm.specs.hashing import mix_array
from polyrhythm.stations.simulator.slot import StepSettings

DECLARED = replace(SPEC, metrics={"height": "last"})
NOISE = np.array([grant.ticket.noise for grant in START.grants])
Pieces = dict[str, Any]


def asked(step: int = 0) -> Pieces:
    return {
        "entries": np.array([2, 3]) + 4 * step,
        "keys": mix_array(NOISE, step),
        "greedy": np.zeros(2, np.uint8),
        "state": np.ones((2, 4), np.float32),
    }


def rest(steps: int = 1) -> Pieces:
    return {
        "rewards": np.ones((steps, 1), np.float32),
        "valid": np.ones((steps, 1), np.uint8),
        "state": np.ones((1, 4), np.float32),
    }


def sent(pieces: Pieces) -> list[bytes]:
    return [np.ascontiguousarray(piece).tobytes() for piece in pieces.values()]


def begun() -> tuple[Arena, JoinedSamples]:
    arena = in_memory(LAYOUT)
    samples = JoinedSamples(arena, DECLARED, StepSettings(1))
    samples.start(START)
    return arena, samples


def answered() -> tuple[Arena, JoinedSamples]:
    """One step of both rows was answered, by version 0."""
    arena, samples = begun()
    samples.request(POSTED, sent(asked()))
    answers = np.zeros(2, LAYOUT.answer_dtype)
    answers["value"] = 3.5
    samples.answer(REPLY._replace(answers=answers))
    return arena, samples


def test_what_agrees_is_written_with_the_answers_that_the_run_sent() -> None:
    arena, samples = answered()
    samples.finish(replace(FINISHED, metrics=(("height", 2.0),)), sent(rest()))
    sample = arena.read("2")
    assert (sample.ticket, sample.env_steps, sample.terminated, sample.success) == (0, 1, True, True)
    assert sample.value.tolist() == [3.5]
    assert (sample.obs["state"] == 1.0).all()
    assert sample.rewards.tolist() == [[1.0]]
    assert len(samples) == 1


NAN = np.full((1, 4), np.nan, np.float32)
REQUESTS: dict[str, tuple[dict[str, Any], Pieces, str]] = {
    "NaN": ({}, {"state": np.full((2, 4), np.nan, np.float32)}, "state is not finite"),
    "infinity": ({}, {"state": np.full((2, 4), np.inf, np.float32)}, "state is not finite"),
    "others' blocks": ({}, {"entries": np.array([0, 1])}, "not the next ones"),
    "one twice": ({}, {"entries": np.array([2, 2])}, "not the next ones"),
    "a later step": ({}, {"entries": np.array([6, 7])}, "not the next ones"),
    "far entries": ({}, {"entries": np.array([2**62, -5])}, "not the next ones"),
    "other noise": ({}, {"keys": np.array([1, 2])}, "noise keys"),
    "greedy": ({}, {"greedy": np.ones(2, np.uint8)}, "greedy flags"),
    "a flag of 7": ({}, {"greedy": np.full(2, 7, np.uint8)}, "neither true nor false"),
    "another version": ({"version": 1}, {}, "than its tickets"),
    "an evaluation": ({"evaluation": True}, {}, "than its tickets"),
    "fewer rows": ({"rows": 1}, {}, "not the next ones"),
}


@pytest.mark.parametrize(("event", "pieces", "words"), REQUESTS.values(), ids=REQUESTS)
def test_a_request_that_contradicts_the_run_is_not_written(event: dict[str, Any], pieces: Pieces, words: str) -> None:
    arena, samples = begun()
    with pytest.raises(ValueError, match=words):
        samples.request(POSTED._replace(**event), sent(asked() | pieces))
    assert not arena.obs["state"].any()
    assert not any(area.any() for area in arena.requests.values())


ENDS: dict[str, tuple[dict[str, Any], Pieces, str]] = {
    "NaN reward": ({}, {"rewards": np.full((1, 1), np.nan, np.float32)}, "reward is not finite"),
    "infinite reward": ({}, {"rewards": np.full((1, 1), -np.inf, np.float32)}, "reward is not finite"),
    "NaN last": ({}, {"state": NAN}, "state is not finite"),
    "NaN return": ({"episode_return": float("nan")}, {}, "return or a metric is not finite"),
    "another return": ({"episode_return": 1e30}, {}, "its rewards sum up to 1"),
    "another shape": ({}, {"state": np.ones(3, np.float32)}, "reshape|size"),
    "flags of 255": ({}, {"valid": np.full((1, 1), 255, np.uint8)}, "neither true nor false"),
    "no action": ({}, {"valid": np.zeros((1, 1), np.uint8)}, "without an action"),
    "more steps": ({"chunk_steps": 2, "env_steps": 2}, rest(2), "1 were answered"),
    "no env step": ({"env_steps": 0}, {}, "0 env steps"),
    "many env steps": ({"env_steps": 2**70}, {}, "env steps in 1 chunk steps"),
    "another version": ({"oldest": 1, "newest": 1}, {}, "versions 1 to 1"),
    "a newer version": ({"newest": 5}, {}, "versions 0 to 5"),
    "a segment": ({"end": r.SampleEnd.SEGMENT}, {}, "a segment of 1"),
    "a metric": ({"metrics": (("\x1b[2J" * 100, 1.0),)}, {}, "declared are"),
    "a metric twice": ({"metrics": (("height", 1.0), ("height", 1.0))}, {}, "declared are"),
    "NaN metric": ({"metrics": (("height", float("nan")),)}, {}, "metric is not finite"),
}


@pytest.mark.parametrize(("event", "pieces", "words"), ENDS.values(), ids=ENDS)
def test_an_end_that_contradicts_the_run_is_not_written(event: dict[str, Any], pieces: Pieces, words: str) -> None:
    arena, samples = answered()
    before = bytes(arena.head.tobytes() + arena.rewards.tobytes())
    with pytest.raises(ValueError, match=words):
        samples.finish(replace(FINISHED, **event), sent(rest() | pieces))
    assert arena.head.tobytes() + arena.rewards.tobytes() == before
    assert (arena.obs["state"][6] == 0).all()


def test_a_slot_has_one_open_request_until_it_is_answered_or_refused() -> None:
    _, samples = begun()
    samples.request(POSTED, sent(asked()))
    again: Callable[[], None] = lambda: samples.request(POSTED._replace(sequence=1), sent(asked()))  # noqa: E731
    with pytest.raises(ValueError, match="open request"):
        again()
    samples.refuse("s.0/0", 0)
    again()


@pytest.mark.parametrize("reason", [r.DropReason.SURPLUS, r.DropReason.ROLLBACK, r.DropReason.SIMULATOR_LOST])
def test_a_failure_has_a_reason_of_a_simulators(reason: r.DropReason) -> None:
    _, samples = begun()
    with pytest.raises(ValueError, match="which is for the run to decide"):
        samples.fail(replace(FAILED, reason=reason))
    assert len(samples) == 2
    samples.fail(replace(FAILED, reason=r.DropReason.EPISODE_REFUSED))
    assert len(samples) == 1


def test_an_answer_is_not_written_to_a_block_that_another_attempt_has_by_then() -> None:
    arena, samples = begun()
    samples.request(POSTED, sent(asked()))
    samples.fail(replace(FAILED, ticket=0))
    (grant,) = START.grants[:1]
    other = replace(grant, ticket=replace(grant.ticket, number=9), block=2)
    samples.start(replace(START, grants=(other,)))
    answers = np.zeros(2, LAYOUT.answer_dtype)
    answers[VERSION] = 4
    samples.answer(REPLY._replace(answers=answers))
    assert arena.answers[VERSION][:4].tolist() == [0, 0, 0, 4]
