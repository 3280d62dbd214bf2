"""The simulator station: what it asks, what it records, and in which order it says so."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stations.counting import MAX_STEPS, Bench, Counting, ticket

from polyrhythm.envs.base import RowsFailed
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.scheduler.records import (
    CancelRow,
    DropReason,
    RefuseRequest,
    RequestArrived,
    SampleEnd,
    SampleFailed,
    SampleFinished,
)
from polyrhythm.specs import INSTRUCTION, PROGRESS
from polyrhythm.specs.hashing import mix
from polyrhythm.stations.simulator.slot import StepSettings


def kinds(events):
    return [type(event).__name__ for event in events]


def test_granted_rows_ask_together_with_what_a_policy_needs():
    bench = Bench(3)
    bench.start((2, ticket(1, 5, task=1)), (0, ticket(0, 5)))
    (request,) = bench.run()
    assert (request.rows, request.sequence, request.version, request.evaluation) == (2, 0, 0, False)
    assert bench.shown(request) == [[5, 0, 0], [105, 0, 0]]
    assert bench.shown(request, INSTRUCTION) == [0, 1]
    assert bench.shown(request, PROGRESS) == [0, 0]
    assert request.reply_to == "s.0.0", "where answers go"
    assert bench.view(request).noise_key.tolist() == [mix(7000, 0), mix(7001, 0)]
    assert bench.view(request).greedy.tolist() == [False, False]


class Indexing(Counting):
    """Looks each task up in an array, as `TARGETS[tasks]`: a tuple of tasks would be one index of many dimensions."""

    def reset(self, rows, tasks, seeds):
        assert [type(given) for given in (rows, tasks, seeds)] == [list] * 3
        super().reset(rows, tasks, seeds)


@pytest.mark.parametrize(("sharding", "reset_rows"), [("whole", True), ("even:2", True), ("even:2", False)])
def test_reset_gets_lists(sharding, reset_rows):
    bench = Bench(4, sharding=sharding, env=Indexing(4, reset_rows=reset_rows))
    bench.start((1, ticket(0, 5, task=1)), (0, ticket(1, 5)))
    assert kinds(bench.run()) == ["RequestArrived"]
    begun = [(0, 0, 105), (1, 1, 5)]
    assert bench.env.resets == (begun if reset_rows else [*begun, (2, 0, 0), (3, 0, 0)])


def test_a_finished_sample_is_complete_and_comes_before_the_next_request():
    bench = Bench(2)
    bench.start((0, ticket(0, 2)), (1, ticket(1, 4)))
    (request,) = bench.run()
    bench.answer(request, version=3, value=lambda i: i + 1)
    (request,) = bench.run()
    assert bench.shown(request) == [[2, 1, 1], [104, 1, 2]]
    assert np.allclose(bench.shown(request, PROGRESS), 1 / MAX_STEPS)
    assert bench.view(request).noise_key.tolist() == [mix(7000, 1), mix(7001, 1)]
    bench.answer(request, version=4, value=lambda i: i + 3)
    finished, request = bench.run()
    assert finished == SampleFinished("s", 0, 0, 1, finished.payload_id, SampleEnd.TERMINATED, 2, 2, 3, 4, True, 4.0)
    assert isinstance(request, RequestArrived)
    assert bench.shown(request) == [[104, 2, 6]]

    sample = bench.sample(finished)
    assert sample.obs["x"].tolist() == [[2, 0, 0], [2, 1, 1], [2, 2, 4]]
    assert sample.obs[PROGRESS].tolist() == pytest.approx([0, 1 / MAX_STEPS, 2 / MAX_STEPS])
    assert sample.actions.tolist() == [[[1]], [[3]]]
    assert sample.logprob.tolist() == [[[-1]], [[-3]]]
    assert sample.value.tolist() == [10, 30]
    assert sample.forward_inputs["k"].tolist() == [0, 0]
    assert sample.rewards.tolist() == [[1], [3]]
    assert sample.valid.all()
    assert sample.version.tolist() == [3, 4]
    assert (sample.terminated, sample.truncated, sample.success, sample.env_steps) == (True, False, True, 2)
    assert (sample.ticket, sample.group, sample.task) == (0, 0, 0)


def test_a_row_that_is_granted_again_joins_the_very_next_request():
    bench = Bench(2)
    bench.start((0, ticket(0, 1)), (1, ticket(1, 4)))
    (request,) = bench.run()
    bench.answer(request)
    bench.events.clear()
    assert bench.simulator.work()
    assert kinds(bench.events) == ["SampleFinished"]
    bench.start((0, ticket(2, 4)))
    (request,) = bench.run()
    assert request.rows == 2
    assert bench.shown(request) == [[204, 0, 0], [104, 1, 1]]


def test_a_row_granted_while_a_request_is_out_waits_for_the_next_one():
    bench = Bench(2)
    bench.start((0, ticket(0, 4)))
    (first,) = bench.run()
    bench.start((1, ticket(1, 4)))
    assert bench.run() == []
    bench.answer(first, value=lambda i: 5)
    (second,) = bench.run()
    assert bench.shown(second) == [[4, 1, 5], [104, 0, 0]]


def test_many_episodes_of_all_lengths_in_blocks_that_are_used_again():
    """Whatever a block held before, each sample must be the run of its own observations."""
    bench = Bench(20, blocks=30)
    lengths = {number: 1 + number * 7 % 11 for number in range(200)}
    following = iter(range(20, 200))
    bench.start(*((row, ticket(row, lengths[row])) for row in range(20)))
    row_of = {row: row for row in range(20)}
    done, kept = 0, deque()
    while done < 200:
        events = bench.run()
        for event in events:
            if isinstance(event, SampleFinished):
                done += 1
                kept.append(event)
                if len(kept) > 10:
                    check(bench, kept.popleft(), lengths)
                row = row_of.pop(event.ticket)
                number = next(following, None)
                # Some rows rest, so that the active ones are scattered.
                if number is not None:
                    row_of[number] = row
                    bench.start((row, ticket(number, lengths[number])))
        for event in events:
            if isinstance(event, RequestArrived):
                bench.answer(event, value=lambda i: 1)
    for event in kept:
        check(bench, event, lengths)
    assert bench.pool.describe() == "30 blocks free, 0 being written, 0 finished"


def check(bench, event, lengths):
    """The sample is whole; afterwards its block is free."""
    sample = bench.sample(event)
    length = lengths[event.ticket]
    assert sample.ticket == event.ticket
    assert sample.steps == length == event.chunk_steps
    assert sample.obs["x"][:, 0].tolist() == [length + 100 * event.ticket] * (length + 1)
    assert sample.obs["x"][:, 1].tolist() == list(range(length + 1))
    assert sample.obs["x"][:, 2].tolist() == list(range(length + 1))
    bench.pool.release([event.payload_id])


class InOrder(InFlight):
    """Gives out blocks in the order given, each once."""

    def __init__(self, blocks):
        super().__init__(ArenaLayout(len(blocks), 1, 1, {}, {}, {}))
        self._left = list(blocks)

    def assign(self, command):
        return replace(command, grants=tuple(replace(grant, block=self._left.pop(0)) for grant in command.grants))

    def on_event(self, event):
        """Blocks are not taken back."""


@given(st.permutations(range(8)), st.lists(st.integers(1, 6), min_size=4, max_size=4), st.integers(0, 3))
def test_a_sample_does_not_depend_on_where_its_block_lies(blocks, lengths, late):
    """Rows that go abreast in blocks side by side are written in one piece, others one by one: the same samples.

    One row begins `late` requests after the others, and versions go up and down as if several generators answered.
    """
    whole, scattered = Bench(4), Bench(4)
    scattered.pool = InOrder(blocks)
    samples = []
    for bench in (whole, scattered):
        bench.start(*((row, ticket(row, lengths[row])) for row in range(3)))
        events, found = bench.run(), {}
        for turn in range(20):
            if turn == late:
                bench.start((3, ticket(3, lengths[3])))
                events += bench.run()
            for event in [event for event in events if isinstance(event, SampleFinished)]:
                found[event.ticket] = (event, bench.sample(event))
            asked = [event for event in events if isinstance(event, RequestArrived)]
            if not asked:
                events = []
                continue
            bench.answer(asked[-1], version=(0, 0, 3, 3, 1, 1)[turn % 6])
            events = bench.run()
        samples.append(found)
    assert samples[0].keys() == samples[1].keys() == {0, 1, 2, 3}
    for number, (event, sample) in samples[0].items():
        other, twin = samples[1][number]
        assert replace(event, payload_id="") == replace(other, payload_id="")
        assert (event.oldest, event.newest) == (sample.version.min(), sample.version.max())
        assert sample.steps == lengths[number]
        assert all(np.array_equal(sample.obs[name], twin.obs[name]) for name in sample.obs)
        for field in ("actions", "logprob", "value", "rewards", "valid", "version"):
            assert np.array_equal(getattr(sample, field), getattr(twin, field)), field


@pytest.mark.parametrize(("features", "calls"), [(3, 1), (1200, 20)], ids=["small", "large"])
def test_small_observations_are_made_in_one_call_and_large_ones_in_place(features, calls):
    bench = Bench(40, env=Counting(40, features=features))
    bench.start(*((row, ticket(row, 3)) for row in range(0, 40, 2)))
    (request,) = bench.run()
    assert bench.env.observe_calls == calls
    assert [shown[:3] for shown in bench.shown(request)] == [[3 + 100 * row, 0, 0] for row in range(0, 40, 2)]
    bench.answer(request, value=lambda i: i)
    (request,) = bench.run()
    assert [shown[:3] for shown in bench.shown(request)] == [[3 + 200 * i, 1, i] for i in range(20)]


def test_rows_that_go_abreast_are_observed_in_one_call_however_large():
    bench = Bench(40, env=Counting(40, features=1200))
    bench.start(*((row, ticket(row, 3)) for row in range(40)))
    (request,) = bench.run()
    assert bench.env.observe_calls == 40, "each first observation goes to its place"
    bench.answer(request, value=lambda i: i)
    (request,) = bench.run()
    assert bench.env.observe_calls == 41
    assert [shown[:3] for shown in bench.shown(request)] == [[3 + 100 * row, 1, row] for row in range(40)]


@pytest.mark.parametrize("length", [7, 99])
def test_progress_counts_the_steps_that_were_done(length):
    """A chunk that the end cuts counts as far as it went."""
    bench = Bench(1, settings=StepSettings(5))
    bench.start((0, ticket(0, length)))
    events = bench.run()
    while isinstance(events[-1], RequestArrived):
        bench.answer(events[-1])
        events = bench.run()
    sample, steps = bench.sample(events[-1]), min(length, MAX_STEPS)
    done = [0, 5, steps] if steps < 10 else [0, 5, 10, steps]
    assert sample.obs[PROGRESS].tolist() == pytest.approx([step / MAX_STEPS for step in done])
    assert sample.env_steps == steps


def test_the_time_limit_truncates_whatever_the_environment_says():
    bench = Bench(1)
    bench.start((0, ticket(0, 99)))
    events = bench.run()
    while kinds(events) == ["RequestArrived"]:
        bench.answer(events[0])
        events = bench.run()
    (finished,) = events
    assert (finished.end, finished.env_steps, finished.success) == (SampleEnd.TRUNCATED, MAX_STEPS, False)
    assert bench.sample(finished).truncated


def test_a_chunk_is_held_and_its_tail_masked():
    bench = Bench(2, settings=StepSettings(chunk=2, action_repeat=3))
    bench.start((0, ticket(0, 2)), (1, ticket(1, 5)))
    (request,) = bench.run()
    bench.answer(request, value=lambda i: i + 1)
    short, long = bench.run()
    sample = bench.sample(short)
    assert sample.valid.tolist() == [[True, False]]
    assert sample.rewards.tolist() == [[2, 0]]
    assert (short.env_steps, short.chunk_steps) == (2, 1)
    sample = bench.sample(long)
    assert sample.valid.tolist() == [[True, True]]
    assert sample.rewards.tolist() == [[6, 4]]
    assert bench.env.stepped.tolist() == [2, 5]
    assert bench.simulator.statistics()["env_steps"] == 7


def test_a_segment_goes_on_where_it_was_cut():
    bench = Bench(1, settings=StepSettings(chunk=1, segment_steps=2))
    bench.start((0, ticket(0, 3, task=1)))
    (request,) = bench.run()
    bench.answer(request)
    (request,) = bench.run()
    bench.answer(request)
    (cut,) = bench.run()
    assert cut.end is SampleEnd.SEGMENT
    assert cut.env_steps == 2
    segment = bench.sample(cut)
    assert segment.truncated
    assert not segment.terminated
    bench.start((0, ticket(9, 50, version=1)), resume=True)
    (request,) = bench.run()
    assert len(bench.env.resets) == 1
    assert bench.shown(request) == [segment.obs["x"][-1].tolist()]
    assert bench.shown(request, PROGRESS) == pytest.approx([2 / MAX_STEPS])
    assert bench.shown(request, INSTRUCTION) == [1], "the episode keeps its task, whatever the new ticket says"
    assert bench.view(request).noise_key.tolist() == [mix(7009, 0)]
    bench.answer(request)
    (finished,) = bench.run()
    rest = bench.sample(finished)
    assert (finished.ticket, finished.end, rest.env_steps, rest.task) == (9, SampleEnd.TERMINATED, 1, 1)


def test_an_evaluation_episode_is_neither_cut_nor_kept():
    bench = Bench(1, settings=StepSettings(chunk=1, segment_steps=2))
    bench.start((0, ticket(-1, 5, evaluation="before")))
    events = bench.run()
    for step in range(5):
        (request,) = events
        assert request.evaluation
        assert bench.shown(request) == [[5 - 100, step, 2 * step]], "its block has 3 entries, and it goes around them"
        assert bench.view(request).noise_key.tolist() == [mix(6999, step)]
        bench.answer(request, version=6, value=lambda i: 2)
        events = bench.run()
    (finished,) = events
    assert (finished.payload_id, finished.chunk_steps, finished.episode_return) == ("", 5, 10.0)
    assert (finished.oldest, finished.newest) == (6, 6)
    assert bench.pool.describe() == "2 blocks free, 0 being written, 0 finished"


# ---------------------------------------------------------------- what goes wrong


def test_rows_of_a_step_that_raises_are_lost_and_the_others_go_on(caplog):
    bench = Bench(4, sharding="even:2")
    bench.env.broken = {104}
    bench.start((0, ticket(0, 4)), (1, ticket(1, 4)))
    bench.start((2, ticket(2, 4)), slot="e/1")
    first, second = bench.run()
    bench.answer(first)
    bench.answer(second)
    first, second = bench.run()
    with caplog.at_level(logging.ERROR):
        bench.answer(first)
        bench.answer(second)
        events = bench.run()
    assert [(e.ticket, e.error) for e in events if isinstance(e, SampleFailed)] == [
        (0, "step: RuntimeError: row 1 fell over"),
        (1, "step: RuntimeError: row 1 fell over"),
    ]
    told = r"task ., seed \d+, or another of the 2 rows of that call \(.*counting.py, line \d+\)"
    assert all(re.fullmatch(told, e.detail) for e in events if isinstance(e, SampleFailed))
    assert [e.slot for e in events if isinstance(e, RequestArrived)] == ["e/1"]
    assert "Traceback" in caplog.text
    bench.start((1, ticket(3, 4)))
    (request,) = bench.run()
    assert bench.shown(request) == [[304, 0, 0]]


class Separate(Counting):
    """Rows fail alone: one that fell over cannot be observed before its next reset."""

    def __init__(self, rows, **options):
        super().__init__(rows, **options)
        self.down = set()

    def reset(self, rows, tasks, seeds):
        failed = {}
        for row, task, seed in zip(rows, tasks, seeds, strict=True):
            self.down.discard(int(row))
            try:
                super().reset([row], [task], [seed])
            except RuntimeError as error:
                failed[int(row)] = error
                self.down.add(int(row))
        if failed:
            raise RowsFailed(failed)

    def step(self, rows, actions):
        broken = [row for row in map(int, rows) if int(self.state[row, 0]) in self.broken and self.state[row, 1] >= 1]
        fine, self.broken = self.broken, set()
        result = super().step(rows, actions)
        self.broken = fine
        if broken:
            self.down |= set(broken)
            raise RowsFailed({row: RuntimeError(f"row {row} fell over") for row in broken}, result)
        return result

    def observe(self, rows, out):
        assert not self.down & set(map(int, rows)), "a row that failed is not observed"
        super().observe(rows, out)


@pytest.mark.parametrize("action_repeat", [1, 3])
def test_a_row_that_fails_alone_is_lost_and_its_neighbours_go_on(caplog, action_repeat):
    bench = Bench(3, env=Separate(3), settings=StepSettings(1, action_repeat))
    bench.env.broken = {108}
    bench.start((0, ticket(0, 8)), (1, ticket(1, 8)), (2, ticket(2, 8)))
    for _ in range(2 if action_repeat == 1 else 1):
        (request,) = bench.run()
        bench.answer(request)
    with caplog.at_level(logging.ERROR):
        failed, request = bench.run()
    assert (failed.ticket, failed.reason) == (1, DropReason.ENVIRONMENT_RAISED)
    assert failed.error == "step: RuntimeError: row 1 fell over"
    assert "row 1 fell over" in caplog.text
    done = 2 if action_repeat == 1 else 3
    assert [row[:2] for row in bench.shown(request)] == [[8, done], [208, done]]
    bench.start((1, ticket(3, 8)))
    bench.answer(request)
    (request,) = bench.run()
    assert [row[0] for row in bench.shown(request)] == [8, 308, 208]


def test_a_row_whose_reset_fails_alone_does_not_begin():
    bench = Bench(3, env=Separate(3))
    bench.env.unborn = {104}
    bench.start((0, ticket(0, 4)), (1, ticket(1, 4)), (2, ticket(2, 4)))
    failed, request = bench.run()
    assert (failed.ticket, failed.error) == (1, "reset: RuntimeError: no state for seed 104")
    assert [row[0] for row in bench.shown(request)] == [4, 204]
    bench.start((1, ticket(5, 4)))
    bench.answer(request)
    (request,) = bench.run()
    assert [row[0] for row in bench.shown(request)] == [4, 504, 204]


def test_a_reset_that_raises_fails_the_rows_it_was_for(caplog):
    bench = Bench(2)
    bench.env.unborn = {4}
    bench.start((0, ticket(0, 4)))
    (failed,) = bench.run()
    assert (failed.ticket, failed.reason, failed.error) == (
        0,
        DropReason.ENVIRONMENT_RAISED,
        "reset: RuntimeError: no state for seed 4",
    )
    assert re.fullmatch(r"task a, seed 4 \(.*counting.py, line \d+\)", failed.detail), "where the user's code raised"
    bench.start((0, ticket(1, 4)))
    assert kinds(bench.run()) == ["RequestArrived"]


def test_a_long_error_is_told_in_part(monkeypatch):
    def broken(rows, tasks, seeds):
        raise RuntimeError("x" * 10**6)

    bench = Bench(1)
    monkeypatch.setattr(bench.env, "reset", broken)
    bench.start((0, ticket(0, 4)))
    (failed,) = bench.run()
    assert re.fullmatch("reset: RuntimeError: x+", failed.error)
    assert len(failed.error) == 2000


def test_cancelling_frees_the_row_and_its_answer_is_not_used():
    bench = Bench(2)
    bench.start((0, ticket(0, 4)), (1, ticket(1, 4)))
    (request,) = bench.run()
    bench.simulator.handle(CancelRow("s", "e/0", 0, 1))
    assert bench.events[-1] == SampleFailed("s", 0, 0, 1, DropReason.CANCELLED, detail="task a, seed 4")
    bench.start((0, ticket(2, 4)))
    bench.run()
    bench.answer(request, value=lambda i: i + 1)
    (request,) = bench.run()
    assert bench.shown(request) == [[204, 0, 0], [104, 1, 2]]
    bench.simulator.handle(CancelRow("s", "e/0", 2, 2))
    assert kinds(bench.events) == ["RequestArrived"], "an attempt that is not here was answered already"


@pytest.mark.parametrize(("join", "queued"), [(False, 1), (True, 3)])
def test_cancelling_looks_again_at_other_slots_only_if_they_step_together(join: bool, queued: int):
    bench = Bench(3, sharding="rows", settings=StepSettings(1, join=join))
    bench.start((0, ticket(0, 4)), slot="e/0")
    bench.run()
    bench.simulator.handle(CancelRow("s", "e/0", 0, 1))
    assert len(bench.simulator._todo) == queued


def test_cancelling_before_the_row_has_begun():
    bench = Bench(1)
    bench.start((0, ticket(0, 4)))
    bench.simulator.handle(CancelRow("s", "e/0", 0, 1))
    assert bench.run() == []
    assert bench.env.resets == []


def test_an_answer_for_rows_that_were_all_cancelled_is_dropped():
    bench = Bench(1)
    bench.start((0, ticket(0, 4)))
    (request,) = bench.run()
    bench.simulator.handle(CancelRow("s", "e/0", 0, 1))
    bench.start((0, ticket(1, 4)))
    (again,) = bench.run()
    assert bench.shown(again) == [[104, 0, 0]], "whoever comes next does not wait for an answer that nobody wants"
    bench.answer(request)
    assert bench.run() == []
    assert bench.env.stepped.tolist() == [0]


def test_a_late_answer_does_not_reach_the_next_owner_of_a_cancelled_rows_block():
    bench = Bench(3, sharding=(2, 1))
    bench.start((0, ticket(0, 4)), (1, ticket(1, 4)))
    (late,) = bench.run()
    bench.simulator.handle(CancelRow("s", "e/0", 0, 1))
    bench.start((2, ticket(2, 1)), slot="e/1")
    (request,) = bench.run()
    assert bench.view(request).entries[0] == 0, "it has the cancelled row's block"
    bench.answer(request, value=lambda i: 3)
    bench.answer(late, value=lambda i: 9 - i)
    events = bench.run()
    (finished,) = (event for event in events if isinstance(event, SampleFinished))
    assert bench.sample(finished).actions.tolist() == [[[3]]]
    (request,) = (event for event in events if isinstance(event, RequestArrived))
    assert bench.shown(request) == [[104, 1, 8]], "the row that was not cancelled got its own answer"


def test_a_refused_request_fails_its_samples():
    bench = Bench(1)
    bench.start((0, ticket(0, 4)))
    (request,) = bench.run()
    bench.simulator.handle(RefuseRequest("s", "e/0", request.sequence + 5, "somebody else's"))
    assert bench.run() == []
    bench.simulator.handle(RefuseRequest("s", "e/0", request.sequence, "nobody can serve it"))
    assert bench.events[-1] == SampleFailed("s", 0, 0, 1, DropReason.REFUSED, "nobody can serve it", "task a, seed 4")


def test_an_answer_that_nobody_waits_for_is_ignored_and_said_so(caplog):
    bench = Bench(1)
    bench.start((0, ticket(0, 4)))
    (request,) = bench.run()
    bench.answer(request)
    bench.answer(request)
    assert "ignored" in caplog.text
    assert kinds(bench.run()) == ["RequestArrived"]


# ---------------------------------------------------------------- environments that step or reset as a whole


def step_of_two_joined_slots(bench):
    """A row of each begins; the first is answered and waits for the second; both move, and ask again."""
    bench.start((0, ticket(0, 4)))
    bench.start((2, ticket(1, 4)), slot="e/1")
    first, second = bench.run()
    bench.answer(first, value=lambda i: 3)
    assert bench.run() == []
    bench.answer(second, value=lambda i: 5)
    first, second = bench.run()
    assert (bench.shown(first), bench.shown(second)) == ([[4, 1, 3]], [[104, 1, 5]])


def test_slots_of_a_whole_stepping_batch_join_and_parked_rows_idle():
    bench = Bench(4, sharding="even:2", env=Counting(4, step_rows=False))
    step_of_two_joined_slots(bench)
    assert bench.env.stepped.tolist() == [1, 1, 1, 1]
    assert bench.env.state[1].tolist() == [0, 1, 0], "a parked row got a no-op"


def test_joined_slots_step_together_though_their_rows_could_step_alone():
    bench = Bench(4, sharding="even:2", settings=StepSettings(1, join=True))
    step_of_two_joined_slots(bench)
    assert bench.env.stepped.tolist() == [1, 0, 1, 0], "parked rows are left alone"


def test_slots_that_do_not_join_step_on_their_own():
    bench = Bench(4, sharding="even:2")
    bench.start((0, ticket(0, 4)))
    bench.start((2, ticket(1, 4)), slot="e/1")
    first, _ = bench.run()
    bench.answer(first, value=lambda i: 3)
    (first,) = bench.run()
    assert bench.env.stepped.tolist() == [1, 0, 0, 0]


def test_a_row_that_begins_late_is_not_moved_by_the_others_steps():
    bench = Bench(3, sharding=(2, 1), env=Counting(3, step_rows=False))
    bench.start((0, ticket(0, 4)))
    (first,) = bench.run()
    bench.start((1, ticket(1, 4)))
    bench.answer(first)
    bench.start((2, ticket(2, 4)), slot="e/1")
    events = bench.run()
    assert sorted(bench.shown(event) for event in events) == [[[4, 1, 0], [104, 0, 0]], [[204, 0, 0]]]


def test_slots_of_a_whole_stepping_batch_begin_by_one_reset():
    bench = Bench(6, sharding="even:3", env=Counting(6, step_rows=False))
    for slot in range(3):
        bench.start(*((2 * slot + row, ticket(2 * slot + row, 1 + slot)) for row in range(2)), slot=f"e/{slot}")
    requests = bench.run()
    assert (bench.env.reset_calls, kinds(requests)) == (1, ["RequestArrived"] * 3)
    for request in requests:
        bench.answer(request)
    done = [event for event in bench.run() if type(event).__name__ == "SampleFinished"]
    assert [event.ticket for event in done] == [0, 1]
    bench.start((0, ticket(6, 4)), (1, ticket(7, 4)))
    assert kinds(bench.run()) == ["RequestArrived"], "beside the requests of the other slots"
    assert bench.env.reset_calls == 2


@pytest.mark.parametrize("flags", [{"step_rows": False}, {"reset_rows": False}])
def test_segments_need_rows_that_step_and_reset_on_their_own(flags):
    with pytest.raises(ValueError, match="set segment_steps to 0"):
        Bench(1, env=Counting(1, **flags), settings=StepSettings(1, segment_steps=4))


def test_episodes_of_a_whole_resetting_batch_begin_together():
    bench = Bench(4, sharding="even:2", env=Counting(4, reset_rows=False))
    bench.start((0, ticket(0, 1)), (1, ticket(1, 2)))
    bench.start((2, ticket(2, 1)), slot="e/1")
    first, second = bench.run()
    assert len(bench.env.resets) == 4
    bench.answer(first)
    bench.answer(second)
    events = bench.run()
    assert sorted(kinds(events)) == ["RequestArrived", "SampleFinished", "SampleFinished"]
    bench.start((2, ticket(3, 2)), slot="e/1")
    assert bench.run() == [], "row 1 still runs"
    bench.answer(next(event for event in events if isinstance(event, RequestArrived)))
    finished, request = bench.run()
    assert (finished.ticket, request.slot, bench.shown(request)) == (1, "e/1", [[302, 0, 0]])
    assert len(bench.env.resets) == 8


def test_the_station_reaches_neither_torch_nor_transformers():
    heavy = "{'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys, polyrhythm.stations.simulator.station; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
