"""Numbers that are not finite: they fail their sample, blame who gave them, and touch no other row."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import tries
from tests.stations.counting import Bench, Counting, ticket
from tests.stations.test_reset_ahead import settle

from polyrhythm.runtime.messages import ACTIONS, LOGPROB, VALUE
from polyrhythm.scheduler.records import RequestArrived, SampleFailed, SampleFinished
from polyrhythm.specs.finite import RecordCheck, is_finite
from polyrhythm.stations.simulator.reset_ahead import ResetAhead
from polyrhythm.stations.simulator.slot import StepSettings


class Diverging(Counting):
    """An episode whose seed is in `spoils` goes wrong after so many steps: its reward, its observation, or both are
    this number."""

    def __init__(self, rows, *, reward=0.0, shown=0.0, **settings):
        super().__init__(rows, **settings)
        self.reward, self.shown = reward, shown
        self.spoils = {}
        self.discarded = []

    def discard(self, row):
        self.discarded.append(row)

    def _gone(self, rows):
        return [self.spoils.get(int(seed), math.inf) <= done for seed, done, _ in self.state[np.asarray(rows)]]

    def step(self, rows, actions):
        result = super().step(rows, actions)
        wrong = self._gone(rows)
        return result._replace(reward=np.where(wrong, result.reward + np.float64(self.reward), result.reward))

    def observe(self, rows, out):
        super().observe(rows, out)
        for place, wrong in enumerate(self._gone(rows)):
            if wrong:
                out["x"][place, 2] += self.shown


def test_a_row_that_changed_places_is_discarded_by_its_own_number_and_a_policys_fault_is_none():
    env = Diverging(3, shown=math.nan)
    ahead = ResetAhead(env, 1)
    ahead.prepare([(0, 3)], [])
    settle(ahead, (0, 3))  # row 0 changes places with the spare row
    bench = Bench(2, env=ahead)
    env.spoils = {3: 0}
    bench.start((0, ticket(0, 3)), (1, ticket(1, 3)))
    events = bench.run()
    assert env.discarded == [2]
    bench.answer(events[-1], value=lambda i: math.nan)
    assert [reason for _, reason, _ in told(bench.events)][-1].startswith("policy: ")
    assert env.discarded == [2]


def test_a_discard_that_raises_costs_a_line_in_the_log(caplog):
    env = Diverging(1, shown=math.nan)
    env.spoils = {3: 0}
    env.discarded = None
    bench = Bench(1, env=env)
    bench.start((0, ticket(0, 3)))
    assert [number for number, *_ in told(bench.run())] == [0]
    assert "row 0: discard: AttributeError" in caplog.text
    bench.start((0, ticket(1, 3)))
    assert isinstance(bench.run()[-1], RequestArrived)


def told(events):
    """(ticket, reason, detail) of the samples that failed."""
    return [(e.ticket, e.error, e.detail) for e in events if isinstance(e, SampleFailed)]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [ACTIONS, LOGPROB, VALUE])
def test_an_answer_that_is_not_finite_fails_its_row_before_the_environment_is_given_it(number, field):
    bench = Bench(2)
    bench.start((0, ticket(0, 3)), (1, ticket(1, 3, task=1)))
    (request,) = bench.run()

    def spoil(found):
        found[field][1] = number

    bench.answer(request, version=4, spoil=spoil)
    assert told(bench.events) == [
        (1, f"policy: {field} is not finite", "task b, seed 103, env step 0, weights of version 4")
    ]
    (request,) = bench.run()
    assert bench.env.stepped.tolist() == [1, 0]
    assert bench.shown(request) == [[3, 1, 0]]
    bench.start((1, ticket(2, 3)))
    bench.answer(request)
    (request,) = bench.run()
    assert request.rows == 2, "the row is free again"


def test_an_answer_that_is_finite_for_nobody_steps_nothing():
    bench = Bench(2, sharding="even:2", settings=StepSettings(1, join=True))
    bench.start((0, ticket(0, 3)))
    bench.start((1, ticket(1, 3)), slot="e/1")
    first, second = bench.run()
    bench.answer(first, value=lambda i: math.nan)
    assert [number for number, *_ in told(bench.events)] == [0]
    bench.start((0, ticket(2, 3)))
    bench.run()
    bench.answer(second)
    bench.run()
    assert bench.env.stepped.tolist() == [0, 1], "the other slot does not wait for it"


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e39])
def test_a_reward_that_is_not_finite_as_float32_fails_its_row(number):
    bench = Bench(3, env=Diverging(3, reward=number))
    bench.env.spoils = {203: 2}
    bench.start(*((row, ticket(row + 1, 3)) for row in range(3)))
    events = bench.run()
    with np.errstate(over="ignore"):
        while isinstance(events[-1], RequestArrived):
            bench.answer(events[-1])
            found = told(events := bench.run())
            if found:
                assert found == [(2, "environment: reward is not finite", "task a, seed 203, env step 2")]
    assert [e.ticket for e in events if isinstance(e, SampleFinished)] == [1, 3]
    assert bench.env.discarded == [1], "what it keeps of the row"
    assert all(np.isfinite(bench.sample(e).rewards).all() for e in events)


@pytest.mark.parametrize("features", [3, 1200], ids=["small", "large"])
@pytest.mark.parametrize("after", [0, 1, 3], ids=["first", "middle", "last"])
def test_an_observation_that_is_not_finite_fails_its_row(features, after):
    bench = Bench(4, env=Diverging(4, shown=math.inf, features=features), blocks=9)
    bench.env.spoils = {103: after}
    bench.start((0, ticket(0, 3)), (1, ticket(1, 3)), (3, ticket(3, 3)))
    events, finished = bench.run(), []
    failed = told(events)
    while isinstance(events[-1], RequestArrived):
        bench.answer(events[-1])
        events = bench.run()
        failed += told(events)
        finished += [e for e in events if isinstance(e, SampleFinished)]
    assert failed == [(1, "environment: observation x is not finite", f"task a, seed 103, env step {after}")]
    assert [e.ticket for e in finished] == [0, 3]
    assert bench.env.discarded == [1]
    assert all(np.isfinite(bench.sample(e).obs["x"]).all() for e in finished)


def test_an_evaluations_episode_fails_likewise():
    bench = Bench(1, env=Diverging(1, reward=math.nan))
    bench.env.spoils = {-97: 1}
    bench.start((0, ticket(-1, 3, evaluation="before")))
    (request,) = bench.run()
    bench.answer(request)
    assert told(bench.run()) == [(-1, "environment: reward is not finite", "task a, seed -97, env step 1")]


def test_a_continuation_names_the_episode_that_it_goes_on_with():
    bench = Bench(1, env=Diverging(1, reward=math.nan), settings=StepSettings(1, segment_steps=2))
    bench.env.spoils = {5: 3}
    bench.start((0, ticket(0, 5, task=1)))
    events = bench.run()
    for _ in range(2):
        bench.answer(events[-1])
        events = bench.run()
    bench.start((0, ticket(9, 50)), resume=True)
    (request,) = bench.run()
    bench.answer(request)
    assert told(bench.run()) == [(9, "environment: reward is not finite", "task b, seed 5, env step 3")]


@given(st.data())
def test_whatever_is_not_finite_no_sample_holds_it_and_every_ticket_ends_once(data):
    """Four rows, answers and rewards that go wrong at random places: each ticket finishes, finite, or fails."""
    bench = Bench(4, sharding=data.draw(st.sampled_from(["whole", "even:2"])), env=Diverging(4, reward=math.nan))
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=4, max_size=4))
    bench.env.spoils = {
        lengths[n] + 100 * n: data.draw(st.integers(1, 5)) for n in data.draw(st.sets(st.integers(0, 3)))
    }
    slots = list(bench.simulator.slots)
    for number in range(4):
        slot = slots[number * len(slots) // 4]
        bench.start((number, ticket(number, lengths[number])), slot=slot)
    ended, events = [], bench.run()
    while asked := [event for event in events if isinstance(event, RequestArrived)]:
        for request in asked:
            wrong = data.draw(st.sets(st.integers(0, request.rows - 1), max_size=1))
            field = data.draw(st.sampled_from([ACTIONS, LOGPROB, VALUE]))

            def spoil(found, field=field, wrong=wrong):
                found[field][list(wrong)] = math.nan

            bench.events.clear()
            bench.answer(request, spoil=spoil)
            ended += bench.events
        events = bench.run()
        ended += [event for event in events if not isinstance(event, RequestArrived)]
    assert sorted(event.ticket for event in ended) == [0, 1, 2, 3]
    for event in ended:
        if isinstance(event, SampleFinished):
            sample = bench.sample(event)
            for array in (sample.actions, sample.logprob, sample.value, sample.rewards, sample.obs["x"]):
                assert np.isfinite(array).all()
            assert sample.steps == lengths[event.ticket]


@pytest.mark.parametrize("number", [1e25, 3e38])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_finite_numbers_are_finite_and_raise_nothing(number, dtype):
    with np.errstate(all="raise"):
        assert is_finite(np.array([number, -number], dtype))
        assert not is_finite(np.array([number, np.inf], dtype))
        assert not is_finite(np.array([number, np.nan], dtype))


def test_a_reward_beyond_float32_fails_its_row_and_raises_nothing():
    bench = Bench(1, env=Diverging(1, reward=1e300))
    bench.env.spoils = {5: 1}
    bench.start((0, ticket(0, 5)))
    (request,) = bench.run()
    with np.errstate(all="raise"):
        bench.answer(request)
        assert told(bench.run()) == [(0, "environment: reward is not finite", "task a, seed 5, env step 1")]


@pytest.mark.parametrize("count", [2, 64, 65, 5000])
def test_no_place_among_few_or_many_float32_is_overlooked(count):
    numbers = np.linspace(-3e38, 3e38, count, dtype=np.float32)
    assert is_finite(numbers)
    for place in range(count):
        spoilt = numbers.copy()
        spoilt[place] = (np.nan, np.inf, -np.inf)[place % 3]
        assert not is_finite(spoilt)
    assert not is_finite(np.array([np.inf, -np.inf], np.float32))  # their sum is no infinity


@settings(max_examples=tries(20, 60), deadline=None)
@given(st.data())
def test_records_are_looked_at_as_their_fields_are(data):
    dtypes = st.lists(st.sampled_from(["f2", "f4", "f8", "i4", "i8", "u1"]), min_size=1, max_size=4)
    fields = [(str(n), dtype, (n + 1,)) for n, dtype in enumerate(data.draw(dtypes))]
    dtype = np.dtype([*fields, ("version", "i8")], align=True)
    rows = data.draw(st.integers(1, 12))
    records = np.frombuffer(data.draw(st.binary(min_size=rows, max_size=rows)) * dtype.itemsize, dtype).copy()
    expected = {}
    for name, kind, _ in fields:
        if kind.startswith("f"):
            records[name] = np.arange(rows)[:, None]
            if data.draw(st.booleans()):
                row = data.draw(st.integers(0, rows - 1))
                records[name][row, -1] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
                expected.setdefault(row, name)
    assert RecordCheck(dtype).first_not_finite(records) == expected
