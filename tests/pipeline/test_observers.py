"""What is told of the training episodes: whole ones, whoever paid for their parts, and no others."""

from __future__ import annotations

import json
import logging

import pytest
from tests.pipeline.runs import config
from tests.pipeline.test_loop import ASYNCHRONOUS

from polyrhythm.flow.ledger import SampleLedger
from polyrhythm.flow.records import (
    CancelRow,
    End,
    Grant,
    SampleFailed,
    SampleFinished,
    StartRows,
    StationLost,
    Ticket,
    TrainerJoined,
    Wake,
)
from polyrhythm.observe import MetricsWriter
from polyrhythm.pipeline.account import Account, Stations
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.episodes import held_out
from polyrhythm.pipeline.observers import Episodes, Progress, UpdateMetrics
from polyrhythm.runtime.messages import Report

REPORT = Report("trainer", 0, "update", 0, {"staleness/lag_mean": 0.5})


def test_an_update_that_a_lost_trainer_takes_with_it_is_written_once(tmp_path):
    account, ledger = Account(), SampleLedger()
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.log(0, {"evaluation/greedy/rate": 0.5}, time_s=0)
        stations = Stations(None)  # nobody looks
        metrics = UpdateMetrics(writer, ledger, Episodes(tasks=1), account, stations, began=0.0, now=0.0)
        metrics.decided(0.0, TrainerJoined("trainer", 0, 0), [])
        for step, now in ((0, 1.0), (1, 2.0), (2, 3.0)):
            metrics.reported(now, Report("trainer", 0, "update", step, {"train/actor/lr": now}))
        metrics.decided(3.5, TrainerJoined("trainer", 1, 2), [])
        metrics.reported(4.0, Report("trainer", 1, "update", 2, {"train/actor/lr": 4.0}))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("train/actor/lr")) for line in lines] == [(0, None), (0, 1.0), (1, 2.0), (2, 4.0)]


def start(number, row, *, task=0, resume=False, attempt=1, evaluation=""):
    ticket = Ticket(number, number, task, task, 1, 1, 0, attempt=attempt, evaluation=evaluation)
    return StartRows("s", "e/0", (Grant(row, ticket, resume),))


def finish(number, reward, steps, *, end=End.TERMINATED, success=False, attempt=1):
    return SampleFinished("s", 0, number, attempt, "h", end, steps, steps, 0, 0, success, reward)


def told(episodes, *heard):
    for thing in heard:
        if isinstance(thing, StartRows | CancelRow):
            episodes.decided(0.0, Wake(), [thing])
        else:
            episodes.decided(0.0, thing, [])
    episodes.reported(0.0, REPORT)
    return episodes.figures


def test_segments_are_put_together_and_counted_where_the_episode_ends():
    episodes = Episodes(tasks=2)
    segment = (start(0, 0, task=1), finish(0, 2.0, 8, end=End.SEGMENT))
    assert told(episodes, *segment) == {}
    # The ticket that pays for the continuation is of another task; the episode keeps its own.
    last = (start(5, 0, task=0, resume=True), finish(5, 1.0, 3, success=True))
    assert told(episodes, *last) == {
        "env/episodes": 1.0,
        "env/return": 3.0,
        "env/success_once": 1.0,
        "env/episode_len": 11.0,
        "env/success_once/task_1": 1.0,
    }
    assert told(episodes) == {}


def test_means_are_over_episodes_and_by_task_where_there_are_several():
    heard = (
        start(0, 0),
        start(1, 1),
        start(2, 2),
        finish(0, 1.0, 4, success=True),
        finish(2, 0.0, 10),
        finish(1, 2.0, 4),
    )
    assert told(Episodes(tasks=1), *heard) == {
        "env/episodes": 3.0,
        "env/return": 1.0,
        "env/success_once": pytest.approx(1 / 3),
        "env/episode_len": 6.0,
    }


@pytest.mark.parametrize(
    "heard",
    [
        (start(-1, 0, evaluation="before"), finish(-1, 9.0, 9)),
        (start(0, 0), CancelRow("s", "e/0", 0, 1), finish(0, 9.0, 9)),
        (start(0, 0), SampleFailed("s", 0, 0, 1, "fell over"), finish(0, 9.0, 9)),
        (start(0, 0), StationLost("s", 0, "died"), finish(0, 9.0, 9)),
        (start(0, 0), finish(0, 9.0, 9, attempt=2)),
    ],
    ids=["evaluation", "cancelled", "failed", "lost", "another attempt"],
)
def test_what_is_not_a_training_episode_is_left_out(heard):
    assert told(Episodes(tasks=1), *heard) == {}


class Kept(Episodes):
    """Forgets no episode at an update."""

    def reported(self, now, report):
        pass


def test_a_live_run_in_segments_reports_whole_episodes():
    """In CartPole an episode's return is its length; nearly all are longer than a segment of 8."""
    episodes = Kept(tasks=1)
    pipeline = build_pipeline(config(**ASYNCHRONOUS), record=True)
    pipeline.loop.observers.append(episodes)
    pipeline.loop.evaluate("before", held_out(5, 1, 1, greedy=True))
    pipeline.loop.train_until(2)
    ended = [episode for episode, _ in episodes._ended]
    pipeline.close()
    samples = [d.event for d in pipeline.loop.trace if isinstance(d.event, SampleFinished) and d.event.ticket >= 0]
    assert len(ended) == sum(sample.end is not End.SEGMENT for sample in samples)
    assert max(episode.env_steps for episode in ended) > 8
    assert all(episode.reward == episode.env_steps for episode in ended)


def test_the_progress_line_does_without_episodes(caplog):
    episodes = Episodes(tasks=1)
    progress = Progress(1, episodes, 0.0)
    with caplog.at_level(logging.INFO):
        progress.reported(0.0, REPORT)
        told(episodes, start(0, 0), finish(0, 3.0, 4))
        progress.reported(0.0, REPORT)
    assert caplog.messages == [
        "update 1 of 1: no episode ended, lag 0.5",
        "update 1 of 1: return 3.00, success 0.00, lag 0.5",
    ]
