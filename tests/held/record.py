"""Records the traces of this folder anew: `python -m tests.held.record [KIND …]`, from the root of the repository.

Recorded on 2026-11-28 at commit cab4a14d, by that command. Another commit's decisions are compared with these, so they
are recorded anew only where a change of the decisions is meant, and then the reason goes into that commit.

The stations are those of the cluster simulation, with everything that may go wrong. What these never say is added at
random on the way: conversations, rows to reset ahead, stations that leave in good order, samples lost with their host,
several targets. `live` has small runs, whose times are of a clock, so it comes out differently every time; everything
else is a function of the seeds.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

from tests.held.conductors import build_conductor, outcome, plain_record, plain_settings, restore_conductor
from tests.held.traces import FOLDER, Trace, difference, write
from tests.oracles.arbitrary import arbitrary_cluster, arbitrary_hosts, arbitrary_scored, arbitrary_streams
from tests.pipeline.runs import LOCKSTEP
from tests.pipeline.test_streams import LANGUAGE
from tests.plugins.lease.test_simulated import leased

from polyrhythm.config.load import merge, validate
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.driver import Deadlock
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.conductor import AnyConductor

#: More versions than a trace is long.
VERSIONS = 200
#: Traces with fewer decisions are not kept.
SHORTEST = 80
WORDS = ("an étude", "12 + 7 = ?", "19", "…", "")


class Full(Exception):
    """The trace is as long as it shall be."""


class Recorder:
    """The conductor as the driver of a cluster sees it; what it hears, some of it changed on the way, and what it says.

    adds: which additions this trace has. updates: of the newest checkpoint; before: those of the run that it resumes.
    """

    def __init__(
        self, conductor: AnyConductor, trace: Trace, rng: random.Random, limit: int, adds: set[str], before: int = 0
    ) -> None:
        self.conductor, self.trace, self.adds = conductor, trace, adds
        self.updates = before
        self.payloads: dict[str, None] = {}
        self._rng, self._limit, self._before = rng, limit, before
        self._generators: list[str] = []
        self._changes: dict[type, Callable[[Any], r.Event]] = {
            r.GeneratorJoined: self._joined,
            r.SimulatorJoined: self._placed,
            r.TrainerJoined: self._resumed,
            r.StationLost: self._left,
            r.SampleFailed: self._failed,
            r.SampleFinished: self._finished,
            r.SampleScored: self._scored,
            r.Evaluate: self._asked,
            r.TrainUntil: self._target,
            r.UpdateDone: self._updated,
        }
        self._saves = {rng.randint(limit // 4, limit - 20)} if "saves" in adds else set[int]()

    def handle(self, event: r.Event, now: float) -> list[r.Command]:
        commands: list[r.Command] = []
        for each in self._said(self._changed(event)):
            found = self._decide(each, now)
            commands += found
            if "targets" in self.adds and any(isinstance(command, r.TargetReached) for command in found):
                commands += self._decide(r.TrainUntil(VERSIONS), now)
        return commands

    def deadline(self) -> float:
        return self.conductor.deadline()

    def _decide(self, event: r.Event, now: float) -> list[r.Command]:
        steps = self.trace["steps"]
        if len(steps) in self._saves:
            self.trace["saved"][str(len(steps))] = json.loads(json.dumps(self.conductor.save()))
        commands = self.conductor.handle(event, now)
        said = [plain_record(command) for command in commands]
        steps.append([now, plain_record(event), said, plain_record(self.conductor.deadline())])
        for command in commands:
            if isinstance(command, r.ReleasePayloads):
                for payload_id in command.payload_ids:
                    self.payloads.pop(payload_id, None)
        if isinstance(event, r.SampleFinished):
            self.payloads[event.payload_id] = None
        elif isinstance(event, r.Checkpointed):
            self.updates = event.updates
        if len(steps) >= self._limit:
            raise Full
        return commands

    def _said(self, event: r.Event) -> Iterator[r.Event]:
        """The event, and at times another one before it."""
        rng = self._rng
        if "saved" in self.adds and rng.random() < 0.01:
            yield r.SaveRequested()
        if "lost" in self.adds and self.payloads and rng.random() < 0.04:
            waiting = list(self.payloads)
            yield r.PayloadsLost("far", tuple(rng.sample(waiting, rng.randint(0, len(waiting)))))
        yield event

    def _changed(self, event: r.Event) -> r.Event:
        """The event with what the simulation never says of such."""
        change = self._changes.get(type(event))
        return event if change is None else change(event)

    def _joined(self, event: r.GeneratorJoined) -> r.Event:
        self._generators.append(event.generator)
        return event

    def _placed(self, event: r.SimulatorJoined) -> r.Event:
        return replace(event, batches=tuple(self._batch(batch) for batch in event.batches))

    def _resumed(self, event: r.TrainerJoined) -> r.Event:
        return replace(event, updates=max(event.updates, self._before))

    def _left(self, event: r.StationLost) -> r.Event:
        if "leaves" not in self.adds or self._rng.random() > 0.4:
            return event
        return replace(event, blame=False, reason="left", moves=self._rng.random() < 0.5)

    def _failed(self, event: r.SampleFailed) -> r.Event:
        if "reasons" not in self.adds or event.reason is not r.DropReason.ENVIRONMENT_RAISED:
            return event
        reason = self._rng.choice((r.DropReason.EPISODE_REFUSED, r.DropReason.POLICY_NOT_FINITE, event.reason))
        error = self._rng.choice(("", "it fell"))
        return replace(event, reason=reason, error=error, detail="task 0, seed 3, step 2")

    def _finished(self, event: r.SampleFinished) -> r.Event:
        if "texts" in self.adds:
            success = self._rng.choice((event.success, None))
            texts = tuple(self._rng.choices(WORDS, k=self._rng.randint(0, 2)))
            event = replace(event, success=success, metrics=(("steps", float(event.env_steps)),), texts=texts)
        return replace(event, episode_return=self._rng.gauss(0.5, 1.0)) if "returns" in self.adds else event

    def _scored(self, event: r.SampleScored) -> r.Event:
        return replace(event, score=self._rng.gauss(0.5, 0.4)) if "returns" in self.adds else event

    def _asked(self, event: r.Evaluate) -> r.Event:
        if "episodes" not in self.adds:
            return event
        return replace(event, episodes=tuple(self._episode(episode) for episode in event.episodes))

    def _target(self, event: r.TrainUntil) -> r.Event:
        return r.TrainUntil(1) if "targets" in self.adds else event

    def _updated(self, event: r.UpdateDone) -> r.Event:
        halts = "halts" in self.adds and self._rng.random() < 0.1
        return replace(event, halt="the loss is not finite") if halts else event

    def _batch(self, batch: r.EnvBatchInfo) -> r.EnvBatchInfo:
        rng, slots = self._rng, batch.slots
        if "pinned" in self.adds and self._generators:
            slots = tuple(replace(slot, generator=rng.choice((None, *self._generators))) for slot in slots)
        spares = rng.randint(0, 2) if "ahead" in self.adds and not batch.reserved else 0
        return replace(batch, slots=slots, spares=spares)

    def _episode(self, episode: r.Episode) -> r.Episode:
        rng = self._rng
        task = rng.randrange(self.conductor.settings.tasks)
        changes: dict[str, Any] = {
            "instruction": rng.randrange(3),
            "greedy": rng.random() < 0.5,
            "shown": rng.random() < 0.5,
        }
        return replace(episode, task=task, sample=rng.randrange(2), **changes)


# ---------------------------------------------------------------- simulated clusters


def varied(rng: random.Random, cluster: ClusterSettings, **changes: Any) -> ClusterSettings:
    """The cluster with a long run and settings of the scheduler that random clusters lack. Raises ValueError if they do
    not fit together."""
    scheduler = cluster.scheduler
    more: dict[str, Any] = {
        "buckets": rng.choice(((), (), (2, 4, 16), (64,))),
        "queue_key": rng.choice(("", "", "", "tests.held.keys:fewest_rows")),
        "training_states": rng.choice((0, 0, 3, 7)),
        "max_dropped": rng.choice((1_000_000, 1_000_000, 1_000_000, 20)),
        "on_max_filtered": rng.choice(("accept", "accept", "stop")),
        **changes,
    }
    if rng.random() < 0.3:
        more["seed"] = rng.randint(0, 2**40)
    return cluster.model_copy(update={"scheduler": replace(scheduler, **more), "versions": VERSIONS})


def faults(rng: random.Random) -> ClusterSettings:
    return varied(rng, arbitrary_cluster(rng, redundant=rng.random() < 0.2), quarantine_after=rng.choice((0, 1, 2, 5)))


def groups(rng: random.Random) -> ClusterSettings:
    cluster = arbitrary_cluster(rng, redundant=rng.random() < 0.6)
    low, high = rng.choice(((0.0, 0.5), (0.1, inf), (0.5, 0.9), (0.2, 3.0)))
    filtered = {} if cluster.scheduler.segments or rng.random() < 0.4 else {"min_return": low, "max_return": high}
    return varied(rng, cluster, **filtered)


def lease(rng: random.Random) -> ClusterSettings:
    base = rng.choice((arbitrary_cluster, arbitrary_cluster, arbitrary_streams, arbitrary_scored, arbitrary_hosts))(rng)
    return varied(rng, leased(rng, base))


def scoring(rng: random.Random) -> ClusterSettings:
    return varied(rng, arbitrary_scored(rng))


def streams(rng: random.Random) -> ClusterSettings:
    return varied(rng, arbitrary_streams(rng))


def batching(rng: random.Random) -> ClusterSettings:
    cluster = arbitrary_cluster(rng)
    changes = {"batching": rng.choice(("dynamic", "lockstep")), "buckets": rng.choice(((), (1, 2, 4, 8), (4, 6)))}
    return varied(rng, cluster.model_copy(update={"faults": ()}), **changes, parts=False)


def auto(rng: random.Random) -> ClusterSettings:
    return varied(rng, arbitrary_cluster(rng), batching="auto", max_requests=1_000_000)


def evaluation(rng: random.Random) -> ClusterSettings:
    return varied(rng, arbitrary_cluster(rng))


def anything(rng: random.Random) -> ClusterSettings:
    return rng.choice((faults, groups, lease, scoring, streams))(rng)


def locality(rng: random.Random) -> ClusterSettings:
    return varied(rng, arbitrary_hosts(rng))


KINDS: dict[str, tuple[int, Callable[[random.Random], ClusterSettings], dict[str, int]]] = {
    # kind: number of traces, clusters, what each trace has at least so often
    "faults": (40, faults, {"StationLost": 2}),
    "groups": (40, groups, {"StartUpdate": 3}),
    "lease": (40, lease, {"TakeDevice": 4, "YieldDevice": 3}),
    "scoring": (40, scoring, {"ScoreSample": 8}),
    "streams": (40, streams, {"StartStream": 15}),
    "batching": (12, batching, {"Serve": 15}),
    "auto": (8, auto, {"BatchingChosen": 1}),
    "evaluation": (12, evaluation, {"SampleEvaluated": 4}),
    "locality": (10, locality, {"Serve": 10}),
    "lost": (10, scoring, {"PayloadsLost": 2}),
    "resumed": (20, anything, {}),
}
ADDITIONS = ("saved", "leaves", "reasons", "texts", "returns", "episodes", "targets", "halts", "pinned", "ahead")


def additions(kind: str, rng: random.Random, settings: ClusterSettings) -> set[str]:
    """What this trace has beside the simulation's own events."""
    adds = {name for name in ADDITIONS if rng.random() < (0.05 if name == "halts" else 0.25)}
    if settings.scheduler.evaluator:
        adds.discard("pinned")
    if kind == "lost" or rng.random() < 0.1:
        adds.add("lost")
    if rng.random() < 0.25:
        adds.add("saves")
        adds.discard("ahead")  # what was forecast is not saved: a run that goes on has other stations
    return adds


def empty(settings: ClusterSettings, origin: str) -> Trace:
    plain = plain_settings(settings.scheduler)
    return {"name": "", "origin": origin, "settings": plain, "start": None, "detached": False, "steps": [], "saved": {}}


def drive(cluster: ClusterSettings, recorder: Recorder, payloads: dict[str, Any] | None = None, bus: int = -1) -> Any:
    """Run the cluster until the trace is full or the run has ended; its driver."""
    run = VirtualCluster(cluster, recorder)
    run.driver.payloads.update(payloads or {})
    run.driver.bus = bus
    if bus >= 0:
        run.driver.submit(r.WeightsOffered(bus))
    with suppress(Full):
        run.run()
    recorder.trace["outcome"] = outcome(recorder.conductor)
    return run.driver


def simulated(kind: str, seed: int) -> Trace | None:
    """The trace of this seed; None if it lacks what its kind is to show."""
    _, make, wanted = KINDS[kind]
    rng = random.Random(f"{kind}/{seed}")
    try:
        settings = make(rng)
    except ValueError:
        return None  # settings that do not fit together
    adds = additions(kind, rng, settings)
    limit = {"auto": 1500}.get(kind, rng.choice((200, 300, 400)))
    trace = empty(settings, f"{kind}, seed {seed}, {' '.join(sorted(adds))}")
    recorder = Recorder(build_conductor(trace["settings"]), trace, rng, limit, adds)
    try:
        driver = drive(settings, recorder)
        if kind == "resumed":
            return resumed(settings, recorder, driver, rng)
    except Deadlock:
        return None  # generators that a slot waits for do not come back, for one
    return trace if enough(trace, wanted) else None


def resumed(settings: ClusterSettings, first: Recorder, driver: Any, rng: random.Random) -> Trace | None:
    """The run goes on elsewhere, with the newest state of its trainer and other stations."""
    if not first.updates or settings.evaluations:
        return None
    trace = empty(settings, first.trace["origin"])
    trace["start"], trace["detached"] = json.loads(json.dumps(first.conductor.save())), True
    conductor = restore_conductor(trace["settings"], trace["start"], detached=True)
    again = settings.model_copy(update={"seed": settings.seed + 1, "faults": ()})
    adds = first.adds - {"saves", "targets"}
    recorder = Recorder(conductor, trace, rng, 250, adds, before=first.updates)
    drive(again, recorder, driver.payloads, first.updates // settings.scheduler.sync_interval)
    return trace if enough(trace, {"StartUpdate": 1}) else None


def enough(trace: Trace, wanted: dict[str, int]) -> bool:
    found = tally(trace)
    return len(trace["steps"]) >= SHORTEST and all(found[name] >= times for name, times in wanted.items())


def tally(trace: Trace) -> Counter[str]:
    """How often each kind of event and command is in the trace."""
    found: Counter[str] = Counter()
    for _, event, commands, _ in trace["steps"]:
        found.update(record["$"] for record in (event, *commands))
    return found


# ---------------------------------------------------------------- live runs

ASYNCHRONOUS: dict[str, Any] = {
    "rollout": {"rows": 4, "env_batches": 2, "generators": 2},
    "batching": {"type": "dynamic", "max_rows": 4, "max_wait_ms": 1},
    "freshness": {"max_lag": 1.5, "on_update": "continue"},
    "training": {"order": "arrival"},
}
LIVE: dict[str, dict[str, Any]] = {
    "lock-step": LOCKSTEP,
    "asynchronous": merge(LOCKSTEP, ASYNCHRONOUS),
    "leased": merge(LOCKSTEP, {**ASYNCHRONOUS, "placement": {"sharing": "lease", "lease": {"min_hold_s": 0.01}}}),
    "scored": merge(LOCKSTEP, {**ASYNCHRONOUS, "scoring": {"function": "tests.process.rewards:by_seed"}}),
    "streams": LANGUAGE,
    "groups": merge(LANGUAGE, {"groups": {"extra_groups": 1, "max_return": 0.9}, "freshness": {"on_update": "drain"}}),
}


def live(name: str) -> Trace:
    """A run in this process, an evaluation before it."""
    pipeline = build_pipeline(validate(LIVE[name]), record=True)
    try:
        pipeline.loop.evaluate("before", held_out(7, 4, 1, greedy=True))
        pipeline.loop.train_until(3)
        decisions, settings = list(pipeline.loop.trace), pipeline.loop.conductor.settings
    finally:
        pipeline.close()
    trace: Trace = {"name": f"live-{name}", "origin": "a run of one process", "settings": plain_settings(settings)}
    trace |= {"start": None, "detached": False, "steps": [], "saved": {}}
    conductor = build_conductor(trace["settings"])
    for decision in decisions[:600]:
        commands = conductor.handle(decision.event, decision.now)
        assert tuple(commands) == decision.commands
        said = [plain_record(command) for command in commands]
        deadline = plain_record(conductor.deadline())
        trace["steps"].append([decision.now, plain_record(decision.event), said, deadline])
    return {**trace, "outcome": outcome(conductor)}


# ---------------------------------------------------------------- all of them


def kept(kind: str) -> Iterator[Trace]:
    """The traces of a kind, each of which replays."""
    if kind == "live":
        yield from map(live, LIVE)
        return
    number, seeds = KINDS[kind][0], count()
    for index in range(number):
        trace = next(trace for trace in (simulated(kind, seed) for seed in seeds) if trace is not None)
        yield {**trace, "name": f"{kind}-{index:02}"}


def main(kinds: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for kind in kinds or [*KINDS, "live"]:
        traces, found = list(kept(kind)), Counter[str]()
        for trace in traces:
            assert not (words := difference(trace)), words
            found.update(tally(trace))
        write(file := FOLDER / f"{kind}.jsonl.xz", traces)
        steps = sum(len(trace["steps"]) for trace in traces)
        saved = sum(len(trace["saved"]) + (trace["start"] is not None) for trace in traces)
        sys.stdout.write(f"{kind}: {len(traces)} traces, {steps} steps, {saved} states, {file.stat().st_size} bytes\n")
        sys.stdout.write(f"  {dict(found.most_common())}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
