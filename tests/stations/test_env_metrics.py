"""The environment's own metrics: aggregated over whole episodes, of the rows that step, and only if there are any."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tests.stations.counting import Bench, Counting, ticket

from polyrhythm.envs.base import StepResult
from polyrhythm.errors import RunHalted
from polyrhythm.scheduler.records import SampleEnd, SampleFinished
from polyrhythm.stations.simulator.chunk import EpisodeMetrics
from polyrhythm.stations.simulator.guard import GuardedEnv
from polyrhythm.stations.simulator.slot import StepSettings

ALL = {"latest": "last", "total": "sum", "average": "mean", "highest": "max"}


class Measuring(Counting):
    """Each of its metrics is the number of steps done in the row, but NaN at the first step."""

    def __init__(self, rows, metrics=ALL, **settings):
        super().__init__(rows, metrics=metrics, **settings)

    def step(self, rows, actions):
        result = super().step(rows, actions)
        done = self.state[np.asarray(rows), 1].astype(np.float64)
        number = np.where(done == 1, np.nan, done)
        return result._replace(metrics=dict.fromkeys(self.spec.metrics, number))


def finished(bench, versions=20):
    """Answer until nobody asks any more; what finished, by ticket."""
    ended, asked = {}, bench.run()
    for _ in range(versions):
        for event in asked:
            if isinstance(event, SampleFinished):
                ended[event.ticket] = event
        requests = [event for event in asked if not isinstance(event, SampleFinished)]
        if not requests:
            return ended
        for request in requests:
            bench.answer(request)
        asked = bench.run()
    raise AssertionError("it asks for ever")


@pytest.mark.parametrize("step_rows", [True, False])
@pytest.mark.parametrize("chunk", [1, 3])
def test_every_step_of_an_episode_counts_once(chunk, step_rows):
    bench = Bench(3, env=Measuring(3, step_rows=step_rows), settings=StepSettings(chunk))
    bench.start((0, ticket(0, 4)), (1, ticket(1, 7)))
    ended = finished(bench)
    assert dict(ended[0].metrics) == {"latest": 4, "total": 2 + 3 + 4, "average": 3, "highest": 4}
    assert dict(ended[1].metrics) == {"latest": 7, "total": sum(range(2, 8)), "average": 4.5, "highest": 7}
    bench.start((0, ticket(2, 3)))
    assert dict(finished(bench)[2].metrics) == {"latest": 3, "total": 5, "average": 2.5, "highest": 3}


def test_an_episode_in_segments_is_one_episode():
    bench = Bench(1, env=Measuring(1), settings=StepSettings(1, segment_steps=2), blocks=3)
    bench.start((0, ticket(0, 5)))
    assert finished(bench)[0].metrics == ()
    bench.start((0, ticket(1, 5)), resume=True)
    second = finished(bench)[1]
    assert (second.end, second.metrics) == (SampleEnd.SEGMENT, ())
    bench.start((0, ticket(2, 5)), resume=True)
    assert dict(finished(bench)[2].metrics) == {"latest": 5, "total": 14, "average": 3.5, "highest": 5}


def test_a_number_that_is_not_finite_is_left_out_and_said_once(caplog):
    bench = Bench(1, env=Measuring(1, {"latest": "last"}))
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            bench.start((0, ticket(number, 1)))
            assert finished(bench)[number].metrics == ()
    assert caplog.messages == [
        "env/metrics/latest: an episode gave nan, excluded from the mean (logged once)",
    ]


def measured(number):
    """What a step of two rows gives."""
    nothing = np.zeros(2, bool)
    return StepResult(np.zeros(2, np.float32), nothing, nothing, nothing, metrics={"x": np.array([number, 2.0])})


@pytest.mark.parametrize("aggregate", ["last", "sum", "mean", "max"])
def test_infinity_is_not_a_metric(aggregate):
    metrics = EpisodeMetrics({"x": aggregate}, 2)
    metrics.begin(np.arange(2))
    for number in (-np.inf, 1e308, 1e308, np.inf):
        metrics.wrap(lambda rows, actions, number=number: measured(number))(np.arange(2), np.zeros((2, 1)))
    assert metrics.summarize(0) == ()
    assert metrics.summarize(1) == (("x", {"sum": 8.0}.get(aggregate, 2.0)),)


def test_an_environment_without_metrics_has_none():
    bench = Bench(1)
    bench.start((0, ticket(0, 2)))
    assert finished(bench)[0].metrics == ()


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({}, r"returned the metrics \[\], the spec declares \['x'\]"),
        ({"y": np.zeros(2)}, r"returned the metrics \['y'\]"),
        ({"x": [0.0, 0.0]}, r"returned metrics\[x\] as list"),
        ({"x": np.zeros(3)}, r"returned metrics\[x\] as ndarray of shape \[3\]"),
        ({"x": np.array(["a", "b"])}, r"metrics\[x\] .* return an array of shape \[2\]"),
    ],
)
def test_metrics_that_the_spec_does_not_announce_end_the_run(metrics, told):
    class Odd(Counting):
        def step(self, rows, actions):
            return super().step(rows, actions)._replace(metrics=metrics)

    env = GuardedEnv(Odd(2, metrics={"x": "last"}))
    env.reset([0, 1], [0, 0], [5, 5])
    with pytest.raises(RunHalted, match=told):
        env.step([0, 1], np.zeros((2, 1), np.float32))
