"""A generator that serves by streams, with the native engine of a causal language model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.plugins.language.engines import ENV, policy, prompt
from tests.stations.generators import generator_of, inline_weights

from polyrhythm.pipeline.array_specs import answer_specs, shown
from polyrhythm.plugins.language.causal_lm.policy import CausalLmSettings
from polyrhythm.runtime.memory.arena import ArenaLayout, RequestView, in_memory
from polyrhythm.runtime.messages import ACTIONS, LOGPROB, NEWER, VERSION, Channels, Reply, newest_version
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import (
    AbortStream,
    ApplyWeights,
    Request,
    Serve,
    StartStream,
    Stream,
    StreamDone,
    WeightsApplied,
)
from polyrhythm.stations.streaming import StreamingEngine

SPEC = ENV.spec()
ROWS = {"a": 1, "b": 1, "c": 3, "d": 1}
LENGTH = SPEC.observation["tokens"].shape[0]


class Stand:
    """The station with five places, everything that it says, and prompts in the arena."""

    def __init__(self, *, resumes: bool = False, seed: int = 1) -> None:
        form = CausalLmSettings(layers=2, width=32, heads=2, hidden=64).form(SPEC)
        self.policy = policy(seed)
        layout = ArenaLayout(16, 2, SPEC.chunk, shown(SPEC), answer_specs(form, SPEC), ROWS, streamed=True)
        self.arena, self.weights = in_memory(layout), inline_weights(self.policy)
        for entry in range(48):
            tokens = prompt(entry)
            self.arena.obs["tokens"][entry, : len(tokens)] = tokens
            self.arena.obs["length"][entry] = len(tokens)
        self.said: list[Any] = []
        channels = Channels(self.said.append, self.said.extend, self.said.append)
        own = policy(9), self.arena, self.weights, channels
        self.station = generator_of(*own, engine=StreamingEngine, places=5, resumes=resumes)
        self.weights.publish(0, self.policy.state_dict())
        self.do(ApplyWeights("g", 0))

    def do(self, *commands: Any, steps: int = 1) -> list[Any]:
        """What it says while it obeys these and does so many units of work."""
        self.said.clear()
        for command in commands:
            self.station.handle(command)
        for _ in range(steps):
            self.station.work()
        return list(self.said)

    def start(self, number: int, slot: str, *entries: int) -> StartStream:
        keys = np.array([7919 * entry + number for entry in entries])
        self.arena.post(slot, RequestView(np.array(entries), keys, np.zeros(len(entries), bool)))
        return StartStream("g", Stream(number, "g", Request(slot, "s", 5, len(entries), 0, f"to {slot}", 0.0)))

    def expected(self, number: int, *entries: int) -> Any:
        """What the policy acts in one pass."""
        obs = {name: torch.from_numpy(array[list(entries)]) for name, array in self.arena.obs.items()}
        keys = torch.tensor([7919 * entry + number for entry in entries])
        return self.policy.act(obs, torch.zeros(len(entries), dtype=torch.bool), keys)

    def finish(self) -> list[Any]:
        said: list[Any] = []
        while self.station.pending_work():
            said += self.do()
        return said


def replies(said: list[Any]) -> dict[str, Reply]:
    return {one.slot: one for one in said if isinstance(one, Reply)}


def test_streams_that_come_and_go_are_answered_as_one_pass_would_answer_them() -> None:
    stand = Stand()
    said = stand.do(stand.start(1, "a", 0), stand.start(2, "c", 1, 2, 3), steps=2)
    said += stand.do(stand.start(3, "b", 4)) + stand.finish()
    found = replies(said)
    for number, slot, entries in ((1, "a", [0]), (2, "c", [1, 2, 3]), (3, "b", [4])):
        act, answers = stand.expected(number, *entries), found[slot].answers
        assert np.array_equal(answers[ACTIONS], act.actions.numpy())
        assert np.allclose(answers[LOGPROB], act.logprob.numpy(), atol=1e-5)
        assert answers[VERSION].tolist() == [0] * len(entries)
        assert (found[slot].reply_to, found[slot].sequence) == (f"to {slot}", 5)
    done = [one for one in said if isinstance(one, StreamDone)]
    assert sorted(one.stream for one in done) == [1, 2, 3]
    assert all(one.tokens > 0 == one.version and not one.aborted for one in done)
    order = [one.stream if isinstance(one, StreamDone) else {"a": 1, "c": 2, "b": 3}[one.slot] for one in said]
    assert all(order.index(n) < len(order) - 1 - order[::-1].index(n) for n in (1, 2, 3)), "the reply comes first"


def test_an_aborted_stream_says_what_it_cost_and_answers_nobody() -> None:
    stand = Stand()
    said = stand.do(stand.start(1, "a", 0), stand.start(2, "c", 1, 2, 3), steps=1)
    assert not said
    (done,) = stand.do(AbortStream("g", 2), AbortStream("g", 7))
    assert done == StreamDone("g", 0, 2, 0, 3, aborted=True)
    said = stand.do(stand.start(3, "b", 4), AbortStream("g", 3))
    assert said == [StreamDone("g", 0, 3, -1, 0, aborted=True)], "no version has answered before its first token"
    assert list(replies(stand.finish())) == ["a"]


def test_a_run_shows_which_prompts_were_computed_once() -> None:
    stand = Stand()
    stand.do(stand.start(1, "c", 2, 2, 3))
    counts = stand.station.statistics()
    assert counts["prompt_tokens"] == 2 * len(prompt(2)) + len(prompt(3))
    assert counts["shared_tokens"] == len(prompt(2))


def test_decode_steps_that_follow_one_another_are_one_span() -> None:
    """Units of 40 ms, 1 ms apart, but for a pause of a second after the third and new weights after the fifth."""
    stand = Stand()
    stand.station.handle(stand.start(1, "a", 0))
    stand.station.handle(stand.start(2, "b", 4))
    stand.weights.publish(3, policy(5).state_dict())
    now = 0.0
    units: list[tuple[float, float]] = []
    spans: list[Any] = []
    while stand.station.pending_work():
        stand.station.work()
        spans += stand.station.spans(now, now + 0.04)
        units.append((now, now + 0.04))
        now += 1.0 if len(units) == 3 else 0.041
        if len(units) == 5:
            stand.station.handle(ApplyWeights("g", 3))
    passes = [span for span in spans if span.kind == "pass"]
    assert [(span.begin, span.end) for span in passes[:2]] == [(0.0, units[2][1]), (units[3][0], units[4][1])]
    assert [(span.begin, span.number) for span in spans if span.kind == "apply"] == [(units[5][0], 3)]
    assert (passes[2].begin, passes[-1].end) == (units[6][0], units[-1][1])
    assert all(span.end - span.begin <= 0.5 for span in passes)
    assert len(passes) <= 3 + len(units) // 12
    assert passes[0].number == 2, "the most requests in a step"


@pytest.mark.parametrize("resumes", [False, True])
def test_weights_change_between_two_tokens_and_a_reply_has_its_oldest_version(resumes: bool) -> None:
    stand = Stand(resumes=resumes)
    stand.do(stand.start(1, "a", 0), stand.start(2, "b", 4), steps=1)
    newer = policy(5)
    stand.weights.publish(3, newer.state_dict())
    assert stand.do(ApplyWeights("g", 3)) == [WeightsApplied("g", 0, 3)]
    said = stand.do(stand.start(3, "d", 6)) + stand.finish()
    found = replies(said)
    assert {slot: one.answers[VERSION].tolist() for slot, one in found.items()} == {"a": [0], "b": [0], "d": [3]}
    for slot, first in (("a", 1), ("b", 1), ("d", 0)):
        answers = found[slot].answers
        length = int(np.isin(answers[ACTIONS][0, :, 0], SPEC.action.stops).argmax()) + 1
        after = [0] * first + [3 if first else 0] * (length - first)
        assert answers[NEWER][0, :length].tolist() == after, "one token of version 0, the others of version 3"
        assert not answers[NEWER][0, length:].any()
        assert newest_version(answers) == 3
    assert stand.station.statistics()["resumed"] == (2 if resumes else 0)
    old, new = stand.policy, newer
    for number, slot, entry in ((1, "a", 0), (2, "b", 4)):
        answers = found[slot].answers
        obs = {name: torch.from_numpy(array[[entry]]) for name, array in stand.arena.obs.items()}
        message = {"message": torch.from_numpy(answers["forward_inputs.message"].copy())}
        with torch.no_grad():
            by_old, by_new = (made.evaluate(obs, message).logprob[0, :, 0].numpy() for made in (old, new))
        logprob = answers[LOGPROB][0, :, 0]
        assert logprob[0] == pytest.approx(by_old[0], abs=1e-5), number
        if resumes:
            assert np.allclose(logprob[1:], by_new[1:], atol=1e-5), "the rest, with nothing kept of the older weights"


def test_what_it_cannot_mean_is_refused() -> None:
    stand = Stand()
    first = stand.start(1, "a", 0)
    stand.do(first, steps=1)
    for command in (
        first,
        Serve("g", None),  # type: ignore[arg-type]
        AbortStream("h", 1),
        ApplyWeights("g", 9),
        ApplyWeights("g", 0, pinned=True),
        StartStream("g", Stream(4, "g", Request("c", "s", 0, 4, 0, "", 0.0))),
    ):
        with pytest.raises(UnfitMessage):
            stand.station.handle(command)
