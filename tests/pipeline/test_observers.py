"""What is told of the training episodes: whole ones, whoever paid for their parts, and no others."""

from __future__ import annotations

import json
import logging
import re

import pytest
import yaml
from tests.pipeline.runs import LOCKSTEP, config
from tests.pipeline.test_loop import ASYNCHRONOUS

from polyrhythm.cli.main import main
from polyrhythm.conductors import build_conductor
from polyrhythm.config.load import merge
from polyrhythm.observe.metrics import MetricsWriter, documented
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.observers.idle import IdleMeter, PassMeter
from polyrhythm.pipeline.observers.metrics import EpisodeTracker, LagHistogram, ProgressLogger, UpdateMetrics
from polyrhythm.pipeline.observers.totals import RunTotals, StationActivity
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.runtime.launcher import build_inline_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler.records import (
    Batch,
    BatchDone,
    CancelRow,
    DropReason,
    GeneratorJoined,
    Grant,
    Request,
    SampleEnd,
    SampleFailed,
    SampleFinished,
    Serve,
    SimulatorJoined,
    StartRows,
    StartUpdate,
    StationLost,
    Ticket,
    TrainerJoined,
    TrainUntil,
    UpdateDone,
    Wake,
    WeightsOffered,
)
from polyrhythm.scheduler.rollout.rows import shard
from polyrhythm.scheduler.samples.groups import SampleLedger
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.specs import WeightsLayout

REPORT = Report("trainer", 0, "update", 0, {"staleness/lag_mean": 0.5})


def test_an_update_that_a_lost_trainer_takes_with_it_is_written_once(tmp_path):
    account, ledger = RunTotals(), SampleLedger()
    with MetricsWriter(tmp_path) as writer:
        writer.log(0, {"evaluation/greedy/rate": 0.5}, time_s=0)
        stations = StationActivity(build_inline_launcher([], ArenaLayout(1, 1, 1, {}, {}, {}), WeightsLayout.of({})))
        sources = (ledger, EpisodeTracker(tasks=1), account, stations)
        idle = IdleMeter(build_conductor(SchedulerSettings(batch_size=1)), 0.0)
        metrics = UpdateMetrics(writer, *sources, (idle, PassMeter(())), began=0.0, now=0.0)
        metrics.on_decision(0.0, TrainerJoined("trainer", 0, 0), [])
        for step, now in ((0, 1.0), (1, 2.0), (2, 3.0)):
            metrics.on_report(now, Report("trainer", 0, "update", step, {"train/actor/lr": now}))
        metrics.on_decision(3.5, TrainerJoined("trainer", 1, 2), [])
        metrics.on_report(4.0, Report("trainer", 1, "update", 2, {"train/actor/lr": 4.0}))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("train/actor/lr")) for line in lines] == [(0, None), (0, 1.0), (1, 2.0), (2, 4.0)]


def start(number, row, *, task=0, resume=False, attempt=1, evaluation=""):
    ticket = Ticket(number, number, task, task, 1, 1, 0, attempt=attempt, evaluation=evaluation)
    return StartRows("s", "e/0", (Grant(row, ticket, resume),))


def finish(number, reward, steps, *, end=SampleEnd.TERMINATED, success=False, attempt=1, metrics=()):
    return SampleFinished("s", 0, number, attempt, "h", end, steps, steps, 0, 0, success, reward, metrics)


def told(episodes, *heard):
    for thing in heard:
        if isinstance(thing, StartRows | CancelRow):
            episodes.on_decision(0.0, Wake(), [thing])
        else:
            episodes.on_decision(0.0, thing, [])
    episodes.on_report(0.0, REPORT)
    return episodes.metrics


def test_segments_are_put_together_and_counted_where_the_episode_ends():
    episodes = EpisodeTracker(tasks=2)
    segment = (start(0, 0, task=1), finish(0, 2.0, 8, end=SampleEnd.SEGMENT))
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
    assert told(EpisodeTracker(tasks=1), *heard) == {
        "env/episodes": 3.0,
        "env/return": 1.0,
        "env/success_once": pytest.approx(1 / 3),
        "env/episode_len": 6.0,
    }


def test_a_resumed_run_knows_which_tasks_have_reported_success():
    silent = (start(1, 0), finish(1, 1.0, 4, success=None))
    whole = EpisodeTracker(tasks=1)
    line = told(whole, start(0, 0), finish(0, 1.0, 4, success=True))
    expected = told(whole, *silent)
    assert expected["env/success_once"] == 0.0
    assert told(EpisodeTracker(tasks=1, earlier=[{"step": 0}, line]), *silent) == expected
    assert told(EpisodeTracker(tasks=1), *silent)["env/success_once"] is None


def test_the_environments_own_metrics_are_means_over_the_episodes_that_have_them():
    heard = (
        start(0, 0),
        start(1, 1),
        start(2, 2),
        finish(0, 1.0, 4, metrics=(("push", 1.0), ("slip", 4.0))),
        finish(1, 1.0, 4, metrics=(("push", 2.0),)),
        finish(2, 1.0, 4, end=SampleEnd.SEGMENT),
    )
    figures = told(EpisodeTracker(tasks=1), *heard)
    assert {name: value for name, value in figures.items() if name.startswith("env/metrics/")} == {
        "env/metrics/push": 1.5,
        "env/metrics/slip": 4.0,
    }


@pytest.mark.parametrize(
    "heard",
    [
        (start(-1, 0, evaluation="before"), finish(-1, 9.0, 9)),
        (start(0, 0), CancelRow("s", "e/0", 0, 1), finish(0, 9.0, 9)),
        (start(0, 0), SampleFailed("s", 0, 0, 1, DropReason.ENVIRONMENT_RAISED), finish(0, 9.0, 9)),
        (start(0, 0), StationLost("s", 0, "died"), finish(0, 9.0, 9)),
        (start(0, 0), finish(0, 9.0, 9, attempt=2)),
    ],
    ids=["evaluation", "cancelled", "failed", "lost", "another attempt"],
)
def test_what_is_not_a_training_episode_is_left_out(heard):
    assert told(EpisodeTracker(tasks=1), *heard) == {}


class Unreported(EpisodeTracker):
    """Hears of no update, so that one report of ours has all episodes."""

    def on_report(self, now, report):
        pass


def test_a_live_run_in_segments_reports_whole_episodes():
    """In CartPole an episode's return is its length; nearly all are longer than a segment of 8."""
    episodes = Unreported(tasks=1)
    pipeline = build_pipeline(RunContext(config(**ASYNCHRONOUS)), record=True)
    pipeline.loop.add_observers(episodes)
    pipeline.loop.evaluate("before", held_out(5, 1, 1, greedy=True))
    pipeline.loop.train_until(2)
    pipeline.close()
    EpisodeTracker.on_report(episodes, 0.0, REPORT)
    found = episodes.metrics
    samples = [d.event for d in pipeline.loop.trace if isinstance(d.event, SampleFinished) and d.event.ticket >= 0]
    assert found["env/episodes"] == sum(sample.end is not SampleEnd.SEGMENT for sample in samples)
    assert max(reward for _, reward in episodes.recent) > 8
    assert found["env/return"] == found["env/episode_len"]


def test_the_progress_line_does_without_episodes(caplog):
    episodes = EpisodeTracker(tasks=1)
    progress = ProgressLogger(1, episodes, 0.0)
    with caplog.at_level(logging.INFO):
        progress.on_report(0.0, REPORT)
        told(episodes, start(0, 0), finish(0, 3.0, 4, success=None))
        progress.on_report(0.0, REPORT)
    assert caplog.messages == [
        "update 1 of 1: no episode has ended, lag 0.5",
        "update 1 of 1: return 3 in the last episode, lag 0.5",
    ]


def named():
    """Patterns of the documented names."""
    names = [name for metric in documented() for name in metric.names]
    return [re.compile(re.sub(r"<\w+>", "[^/]+", name)) for name in names]


def test_every_metric_of_a_run_is_documented(tmp_path):
    path = tmp_path / "recipe.yaml"
    changes = {**ASYNCHRONOUS, "evaluation": {"episodes": 4, "sampled": True}}
    path.write_text(yaml.safe_dump(merge(LOCKSTEP, changes)))
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} - {"step", "time_s"}
    patterns = named()
    assert {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)} == set()
    updates = [line for line in lines if "time/actor/update" in line]
    assert len(updates) == 6
    assert all(0 < line["time/actor/update"] < 60 for line in updates)
    assert all(0 <= line[f"{who}/idle_ratio"] <= 1 for line in updates for who in ("rollouter", "trainer"))
    assert all(0 <= line["staleness/max_partial_span"] <= line["staleness/lag_max"] for line in updates)


def test_a_stream_off_policy_run_reports_its_lag_in_updates(tmp_path):
    """K = 4 at max_lag 0: update i of a version trains samples that are i updates behind its weights."""
    changes = {"freshness": {"sync_interval": 4}, "training": {"versions": 2, "epochs": 1}}
    train(validate_run(config(**changes)), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "staleness/lag_max" in line]
    assert [line["staleness/lag_max"] for line in updates] == [0] * 8
    assert [line["staleness/updates_mean"] for line in updates] == [0, 1, 2, 3] * 2
    assert [line["staleness/updates_max"] for line in updates] == [0, 1, 2, 3] * 2


def test_idle_times_are_those_of_the_decisions():
    conductor = build_conductor(SchedulerSettings(batch_size=2, max_lag=0.0, on_update="drain"))
    tempo = IdleMeter(conductor, 0.0)

    def tell(event, at):
        tempo.on_decision(at, event, conductor.handle(event, at))

    tell(SimulatorJoined("s", 0, (shard("e", 2, "whole", []),)), 0.0)
    tell(GeneratorJoined("g", 0, 0), 0.0)
    tell(WeightsOffered(0), 0.0)
    tell(TrainerJoined("t", 0, 0), 0.0)
    tell(TrainUntil(2), 0.0)
    tell(finish(0, 1.0, 4), 2.0)
    tell(finish(1, 1.0, 4), 4.0)
    tell(UpdateDone("t", 0, 0), 7.0)
    assert tempo.take(8.0) == {
        "rollouter/idle_ratio": pytest.approx(1 - (4 + 2) / 16),
        "trainer/idle_ratio": pytest.approx(1 - (3 + 1) / 8),
    }
    tell(StationLost("t", 0, "killed"), 10.0)
    assert tempo.take(12.0) == {"rollouter/idle_ratio": 1.0, "trainer/idle_ratio": pytest.approx(0.5)}
    assert tempo.take(16.0, worked_s=3.0)["trainer/idle_ratio"] == pytest.approx(0.25), "an update in parts"


def test_how_full_passes_were():
    passes = PassMeter(buckets=(4,))

    def serve(*rows, evaluation=False):
        requests = tuple(Request("e", "s", 0, count, 0, "h", 0.0, evaluation=evaluation) for count in rows)
        return Serve("g", Batch(0, "g", requests))

    passes.on_decision(1.0, Wake(), [serve(1, 2), serve(1), serve(4, evaluation=True)])
    passes.on_decision(2.0, Wake(), [serve(4)])
    found = passes.take(3.0)
    assert found["rollouter/batch_rows"] == pytest.approx(8 / 3)
    assert found["rollouter/padding_ratio"] == pytest.approx(1 - 8 / 12)
    assert "rollouter/batch_wait_ratio" not in found
    assert passes.take(4.0) == {}


def test_how_long_passes_waited_for_more_requests():
    passes = PassMeter((), max_wait_s=2.0, now=0.0)

    def serve(event, now, arrived, name="g"):
        passes.on_decision(now, event, [Serve(name, Batch(0, name, (Request("e", "s", 0, 1, 0, "h", arrived),)))])

    serve(Wake(), 3.0, 1.0)
    serve(Wake(), 4.1, 2.0, "another")  # of which 1 s with the one before
    serve(BatchDone("g", 0, 0, 0), 9.0, 5.0)  # waited for its generator
    serve(Wake(), 9.5, 9.0)  # due for another reason
    assert passes.take(10.0)["rollouter/batch_wait_ratio"] == pytest.approx(0.3)
    serve(BatchDone("g", 0, 0, 0), 11.0, 10.0)
    assert passes.take(12.0)["rollouter/batch_wait_ratio"] == 0.0


def test_a_lag_counts_when_it_was_trained_not_when_it_was_lent():
    lags = LagHistogram()
    lags.on_decision(0.0, Wake(), [StartUpdate("t", 0, 2, (0, 1), ("0", "1"), (1, 2))])
    assert lags.counts == {}
    lags.on_decision(1.0, StationLost("t", 0, "killed"), [])
    lags.on_decision(2.0, TrainerJoined("t", 1, 0), [StartUpdate("t", 0, 3, (0, 1), ("0", "1"), (1, 2))])
    lags.on_decision(3.0, UpdateDone("t", 1, 0), [StartUpdate("t", 1, 3, (2,), ("2",), (3,))])
    assert lags.counts == {2: 1, 1: 1}
