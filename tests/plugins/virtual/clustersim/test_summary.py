"""Identities that hold in every run: shares, bounds, Little's law, the ledger."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.long import tries
from tests.oracles.arbitrary import arbitrary_cluster
from tests.plugins.virtual.clustersim.clusters import run, settings

from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm.plugins.virtual.clustersim.measures import Measures
from polyrhythm.plugins.virtual.simulate import SpanWriter, simulate
from polyrhythm.runtime import spans

BUSY = settings(
    scheduler={"batch_size": 16, "max_lag": 1.0, "on_update": "continue", "max_rows": 6, "max_wait_s": 0.004},
    simulators={"count": 2, "env_batches": 2, "slots": 2, "rows": 2, "step": "lognormal:10ms:0.8", "steps": 12},
    generators={"count": 2, "serve": "lognormal:8ms:0.5+1ms"},
    versions=8,
)


def test_utilisation_and_shares_are_shares() -> None:
    for seed in range(tries(12, 40)):
        _, summary = run(arbitrary_cluster(random.Random(seed)))
        assert all(0 <= value <= 1 + 1e-9 for value in summary["utilisation"].values())
        for kind in summary["time"].values():
            shares = sum(state["share"] for state in kind.values())
            assert shares == pytest.approx(1.0) or shares == 0.0


def test_every_slot_generator_and_trainer_is_somewhere_all_the_time() -> None:
    _, summary = run(BUSY)
    for kind, stations in (("slots", 8), ("generators", 2), ("trainer", 1)):
        seconds = sum(state["s"] for state in summary["time"][kind].values())
        assert seconds == pytest.approx(stations * summary["virtual_s"]), kind


def test_utilisation_is_the_busy_share_when_nobody_dies() -> None:
    _, summary = run(BUSY)
    time = summary["time"]
    assert summary["utilisation"]["generator"] == pytest.approx(time["generators"]["serving"]["share"])
    assert summary["utilisation"]["trainer"] == pytest.approx(time["trainer"]["training"]["share"])
    slots = time["slots"]
    assert summary["utilisation"]["simulator"] == pytest.approx(
        slots["stepping"]["share"] + slots["resetting"]["share"]
    )


def test_littles_law_ties_the_queue_to_the_waiting_time() -> None:
    _, summary = run(BUSY)
    requests = summary["requests"]
    assert requests["arrived"] == requests["served"] > 200
    rate = requests["arrived"] / summary["virtual_s"]
    assert requests["waiting_mean"] == pytest.approx(rate * requests["wait_s"])
    # A slot that resets rows while its request waits is counted as resetting.
    assert summary["time"]["slots"]["generator"]["s"] <= requests["waiting_mean"] * summary["virtual_s"]


def test_what_is_trained_was_simulated() -> None:
    _, summary = run(BUSY)
    throughput = summary["throughput"]
    assert throughput["trained_samples"] == summary["ledger"]["trained"] == 8 * 16
    assert throughput["trained_transitions"] == throughput["transitions"] == 8 * 16 * 12
    assert sum(summary["lag"]["histogram"].values()) == throughput["trained_samples"]
    assert summary["lag"]["max"] <= 1


def test_the_same_seed_gives_the_same_summary_and_another_seed_another() -> None:
    assert simulate(BUSY) == simulate(BUSY)
    assert simulate(BUSY) != simulate(BUSY.model_copy(update={"seed": 1}))
    assert json.loads(json.dumps(simulate(BUSY))) == simulate(BUSY)


def test_max_time_cuts_the_run() -> None:
    summary = simulate(BUSY.model_copy(update={"max_time": 0.3}))
    assert summary["virtual_s"] == 0.3
    assert summary["versions"] < 8


def test_the_trace_shows_the_first_slots_all_generators_and_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        summary = simulate(BUSY, SpanWriter(trace, slots=3).span)
    events = json.loads(path.read_text(encoding="utf-8"))
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"generator-0", "generator-1", "trainer"} < tracks
    assert len([track for track in tracks if "/" in track]) == 3
    updates = [event["dur"] for event in events if event["name"] == "update"]
    assert sum(updates) * 1e-6 == pytest.approx(summary["time"]["trainer"]["training"]["s"], rel=1e-6)


def test_a_simulated_slot_is_at_what_a_real_one_can_be_at() -> None:
    real = {spans.STEPPING, spans.RESETTING, spans.TICKETS, spans.THREAD, spans.GENERATOR, spans.IN_BATCH}
    assert set(Measures().states["slots"]) == real


def test_what_was_thrown_away_is_compared_with_what_was_trained() -> None:
    redundant = BUSY.model_copy(
        update={"scheduler": replace(BUSY.scheduler, batch_size=8, group_size=2, extra_groups=2, extra_members=1)}
    )
    _, summary = run(redundant)
    selection = summary["groups"]["selection"]
    surplus = sum(selection[fate]["samples"] for fate in ("released", "cancelled", "waiting"))
    assert summary["ledger"]["dropped"]["surplus"] == surplus > 0
    assert selection["trained"]["samples"] == summary["ledger"]["trained"]
    assert selection["trained"]["chunk_steps"] == selection["trained"]["env_steps"] == 12
    assert selection["cancelled"]["seconds"] < selection["trained"]["seconds"], "cut before the end"
    assert run(BUSY)[1]["groups"] == {}


def test_samples_of_a_version_with_several_updates_are_behind_by_updates() -> None:
    """K = 4 at max_lag 0: update i of a version gets samples of the weights before its first one: i updates."""
    lockstep = {"batch_size": 16, "sync_interval": 4, "max_lag": 0.0, "on_update": "drain"}
    _, summary = run(BUSY.model_copy(update={"scheduler": replace(BUSY.scheduler, **lockstep)}))
    assert (summary["lag"]["mean"], summary["lag"]["max"]) == (0, 0)
    assert (summary["lag"]["updates_mean"], summary["lag"]["updates_max"]) == (1.5, 3)
