"""The trace of a real run: what its lanes show is what the stations were busy with."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from tests.process.runs import ASYNCHRONOUS, children, config

from polyrhythm.config.load import merge
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.plugins.timeline.observer import TraceObserver
from polyrhythm.plugins.timeline.trace import TraceWriter

#: Two simulators of two env batches of two slots, two generators.
BASE = merge(ASYNCHRONOUS, {"rollout": {"rows": 4, "sharding": "even:2"}})
RUNS = {
    "inline": {"launcher": "inline"},
    "inline-joined": {"launcher": "inline", "rollout": {"join": "all"}},
    "local": {"launcher": "local"},
}


@pytest.fixture(scope="module", params=RUNS, ids=str)
def traced(request, tmp_path_factory):
    """Busy seconds by station, threads of a simulator, and by lane its bars as (begin, end, name, slots)."""
    folder = tmp_path_factory.mktemp("run")
    pipeline = build_pipeline(RunContext(config(BASE, **RUNS[request.param]), folder=folder))
    loop, launcher = pipeline.loop, pipeline.launcher
    try:
        with TraceWriter(folder / "trace.json") as writer:
            timeline = TraceObserver(writer, launcher, loop.clock())
            loop.add_observers(timeline)
            loop.train_until(3)
            before, statistics = None, launcher.hosting.statistics(fresh=True)
            while statistics != before:  # nobody gives them anything to do any more
                before, statistics = statistics, launcher.hosting.statistics(fresh=True)
            timeline.finish(loop.clock())
    finally:
        pipeline.close()
    assert not children()
    threads = 1 if request.param.startswith("inline") else 2
    return {name: counts["busy_s"] for name, counts in statistics.items()}, threads, lanes(folder / "trace.json")


def lanes(path):
    events = json.loads(path.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert not [event for event in events if event["ph"] == "i"], "nothing is missing"
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            found[names[event["tid"]]].append((begin, end, event["name"], event.get("args", {}).get("slots", 1)))
    return {lane: sorted(bars) for lane, bars in found.items()}


def test_stepping_and_resetting_of_a_simulators_lanes_are_its_busy_seconds(traced):
    busy_s, threads, lanes = traced
    for simulator in ("simulator-0", "simulator-1"):
        own = [bar for lane, bars in lanes.items() if lane.startswith(f"{simulator}.") for bar in bars]
        worked = sum((end - begin) / slots for begin, end, name, slots in own if name in ("stepping", "resetting"))
        assert worked / threads == pytest.approx(busy_s[simulator], rel=1e-3)


def test_passes_and_optimizer_steps_are_the_busy_seconds_of_generators_and_trainer(traced):
    busy_s, _, lanes = traced
    for station in ("generator-0", "generator-1", "trainer"):
        worked = sum(end - begin for begin, end, *_ in lanes[station])
        assert worked <= busy_s[station] * (1 + 1e-3)
        assert worked >= busy_s[station] * 0.5, "first weights came before the timeline; publications are apart"


def test_a_slot_is_always_at_one_thing(traced):
    _, _, lanes = traced
    slots = {lane: bars for lane, bars in lanes.items() if lane.startswith("simulator-")}
    assert len(slots) == 8
    assert {name for bars in slots.values() for *_, name, _ in bars} == {
        *("stepping", "resetting", "tickets", "thread", "generator", "in_batch")
    }
    for bars in slots.values():
        assert [end for _, end, *_ in bars[:-1]] == pytest.approx([begin for begin, *_ in bars[1:]], abs=2e-9)
