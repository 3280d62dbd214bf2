"""CPU time of the conductor per request, from few slots to many, and while a version waits to be applied (drain).

A simulated cluster of the given size runs once and its events are recorded; then a fresh conductor takes the same
events while its CPU time is measured, without stations or queues. A request is charged with
everything it causes: its arrival, its share of its batch's report, the samples that its step ended and the tickets
granted in their place; what belongs to no request (updates, publications, joining) is spread over all.

While a version waits, requests and reports of batches are timed alone, by the number of generators: with the same
slots, a request must not cost more because there are more generators.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import (
    BatchDone,
    Decision,
    RequestArrived,
    SampleFailed,
    SampleFinished,
    Serve,
    StartRows,
    Wake,
)
from polyrhythm.scheduler.settings import SchedulerSettings

#: Largest median of CPU microseconds per request that the design allows.
LIMIT_US = 50.0
_ROWS = 4
_ROWS_PER_GENERATOR = 64
_CALIBRATIONS = 1001
_DRAIN_SLOTS = 128


def run(slots: Sequence[int] = (16, 64, 256, 1024, 4096), generators: Sequence[int] = (1, 4, 16, 64)) -> dict[str, Any]:
    """Measure each number of slots, and the drain with each number of generators.

    Returns `sizes` (one entry per number of slots: requests, events, events_per_s, p50_us, p99_us, mean_us, and
    event_cost, for `conductor.event` of a cluster file), the worst `p50_us` and `p99_us` over them, and whether they
    stay within the limit and grow no faster than log of the slots;
    `drain` (one entry per number of generators: see `_measure_drain`).
    """
    sizes = [_measure(count) for count in sorted(slots)]
    first, last = sizes[0], sizes[-1]
    growth = last["p50_us"] / first["p50_us"]
    log_growth = math.log2(max(2, last["slots"])) / math.log2(max(2, first["slots"]))
    p50 = max(size["p50_us"] for size in sizes)
    return {
        "p50_us": p50,
        "p99_us": max(size["p99_us"] for size in sizes),
        "limit_us": LIMIT_US,
        "within_limit": p50 <= LIMIT_US,
        "growth": growth,
        "log_growth": log_growth,
        "within_log": growth <= log_growth,
        "sizes": sizes,
        "drain": [_measure_drain(count) for count in generators],
    }


def cluster_of(slots: int) -> ClusterSettings:
    """Busy and fully asynchronous: four rows per slot, about 10 chunk steps per episode, 64 rows per generator."""
    rows = slots * _ROWS
    env_batches = math.gcd(slots, 16)
    return ClusterSettings.model_validate(
        {
            "versions": max(2, 2048 // rows),
            "scheduler": SchedulerSettings(
                batch_size=max(16, rows // 2), sync_interval=2, max_rows=_ROWS_PER_GENERATOR
            ),
            "simulators": [
                {
                    "count": slots // env_batches,
                    "env_batches": env_batches,
                    "rows": _ROWS,
                    "step": "lognormal:10ms:0.8",
                    "reset": "20ms",
                    "steps": "lognormal:10steps:0.4",
                }
            ],
            "generators": [{"count": max(1, rows // _ROWS_PER_GENERATOR), "serve": "5ms+0.1ms", "apply": "20ms"}],
            "trainer": {"update": "50ms", "publish": "50ms"},
        }
    )


def _measure(slots: int) -> dict[str, Any]:
    settings = cluster_of(slots)
    cluster = VirtualCluster(settings, record=True)
    cluster.run()
    trace = cluster.driver.steps
    spent = _time(build_conductor(settings.scheduler), trace)
    per_request = _charge(trace, spent)
    cuts = statistics.quantiles(per_request, n=100)
    return {
        "slots": slots,
        "requests": len(per_request),
        "events": len(trace),
        "events_per_s": len(trace) / (sum(spent) * 1e-9),
        "p50_us": cuts[49] * 1e-3,
        "p99_us": cuts[98] * 1e-3,
        "mean_us": statistics.fmean(per_request) * 1e-3,
        "event_cost": _event_cost(trace, spent),
    }


def _event_cost(trace: Sequence[Decision], spent: Sequence[int]) -> str:
    """CPU of an event and of each command that it gives, by least squares: as `conductor.event` of a cluster file."""
    counts = [len(step.commands) for step in trace]
    found = statistics.linear_regression(counts, spent)
    return f"{max(0.0, found.intercept) * 1e-3:.1f}us+{max(0.0, found.slope) * 1e-3:.1f}us"


def drain_cluster(generators: int) -> ClusterSettings:
    """128 slots of one row and so many generators, which wait for the end of all episodes to take a new version."""
    return ClusterSettings.model_validate(
        {
            "versions": 12,
            "scheduler": SchedulerSettings(batch_size=_DRAIN_SLOTS, max_lag=1.0, on_update="drain", max_rows=4),
            "simulators": [
                {
                    "env_batches": _DRAIN_SLOTS,
                    "step": "lognormal:10ms:0.8",
                    "steps": "lognormal:20steps:0.6",
                }
            ],
            "generators": [{"count": generators, "serve": "1ms", "apply": "5ms"}],
            "trainer": {"update": "20ms", "publish": "5ms"},
        }
    )


def _measure_drain(generators: int) -> dict[str, Any]:
    """Requests that arrived while a version waited, and the CPU of a request and its share of its batch's report: then
    (waiting_us) and otherwise (else_us)."""
    settings = drain_cluster(generators)
    cluster = VirtualCluster(settings, record=True)
    cluster.run()
    trace = cluster.driver.steps
    waiting = _waiting(build_conductor(settings.scheduler), trace)
    spent = _time(build_conductor(settings.scheduler), trace)
    cost, count = {True: 0, False: 0}, {True: 0, False: 0}
    for step, then, nanoseconds in zip(trace, waiting, spent, strict=True):
        if isinstance(step.event, RequestArrived | BatchDone):
            cost[then] += nanoseconds
            count[then] += isinstance(step.event, RequestArrived)
    return {
        "generators": generators,
        "requests": count[True],
        "waiting_us": cost[True] / count[True] * 1e-3,
        "else_us": cost[False] / max(1, count[False]) * 1e-3,
    }


def _waiting(conductor: AnyConductor, trace: Sequence[Decision]) -> list[bool]:
    """Of each event, whether a version waited to be applied before it."""
    found = []
    for step in trace:
        found.append(conductor.versions.waiting)
        conductor.handle(step.event, step.now)
        conductor.deadline()
    return found


def _time(conductor: AnyConductor, trace: Sequence[Decision]) -> list[int]:
    """CPU nanoseconds of each event, the call of `deadline` that follows it included."""
    clock, handle, deadline = time.process_time_ns, conductor.handle, conductor.deadline
    spent: list[int] = []
    gc.collect()
    gc.freeze()  # the recorded trace would not be there in a live run
    try:
        overhead = _overhead()
        for step in trace:
            event, now = step.event, step.now
            began = clock()
            handle(event, now)
            deadline()
            spent.append(clock() - began - overhead)
    finally:
        gc.unfreeze()
    return spent


def _overhead() -> int:
    """Nanoseconds that reading the clock twice takes."""
    clock = time.process_time_ns
    return int(statistics.median(-(clock() - clock()) for _ in range(_CALIBRATIONS)))


def _charge(trace: Sequence[Decision], spent: Sequence[int]) -> list[float]:
    """Nanoseconds per request."""
    costs: list[float] = []
    shared = 0
    latest: dict[str, int] = {}
    slot_of: dict[int, str] = {}
    batches: dict[int, list[int]] = {}
    for step, cost in zip(trace, spent, strict=True):
        event = step.event
        if isinstance(event, RequestArrived):
            latest[event.slot] = len(costs)
            costs.append(0.0)
        _follow(step, latest, slot_of, batches)
        charged: Sequence[int] = ()
        if isinstance(event, RequestArrived):
            charged = (latest[event.slot],)
        elif isinstance(event, BatchDone):
            charged = batches[event.batch]
        elif isinstance(event, SampleFinished | SampleFailed):
            charged = (latest[slot_of[event.ticket]],)
        elif isinstance(event, Wake):
            charged = [
                index
                for command in step.commands
                if isinstance(command, Serve)
                for index in batches[command.batch.number]
            ]
        if not charged:
            shared += cost
        for index in charged:
            costs[index] += cost / len(charged)
    return [cost + shared / len(costs) for cost in costs]


def _follow(step: Decision, latest: dict[str, int], slot_of: dict[int, str], batches: dict[int, list[int]]) -> None:
    """Update the tables: the slot of each ticket, the requests of each batch."""
    for command in step.commands:
        if isinstance(command, StartRows):
            slot_of.update((grant.ticket.number, command.slot) for grant in command.grants)
        elif isinstance(command, Serve):
            batches[command.batch.number] = [latest[request.slot] for request in command.batch.requests]
