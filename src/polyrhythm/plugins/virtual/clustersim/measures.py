"""Counters and time integrals of a running simulation, and its summary as JSON-able metrics.

Times are seconds of virtual time. Waiting times are by cause, summed over the slots (generators, the trainer); the
shares of each kind add up to 1.

Invariant: every change of a level is recorded when it happens; nothing is inferred from counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyrhythm.observe.activity import Utilisation

if TYPE_CHECKING:
    from polyrhythm.plugins.virtual.clustersim.driver import VirtualDriver

#: States of a slot: waits for tickets, resets, waits for a generator, is in a batch, waits for its thread, steps.
TICKETS, RESET, QUEUED, IN_BATCH, THREAD, STEP = "tickets", "resetting", "generator", "in_batch", "thread", "stepping"
#: States of a generator. `batch_clock`: idle while requests wait; `no_requests`: idle while none does.
SERVE, APPLY, NO_REQUESTS, BATCH_CLOCK = "serving", "applying_weights", "no_requests", "batch_clock"
#: States of a trainer; its ranks exchange gradients (separate from training only on shared devices).
TRAIN, EXCHANGE, SAMPLES = "training", "synchronising", "samples"

#: track, name, begin and end in seconds of virtual time.
Span = Callable[[str, str, float, float], None]


class Level:
    """A number that changes at known times, with its time integral ∫ level dt and the time with a positive level."""

    __slots__ = ("_present", "_since", "_total", "level")

    def __init__(self) -> None:
        self.level = 0
        self._since = self._total = self._present = 0.0

    def add(self, now: float, delta: int) -> None:
        self._total, self._present = self.integral(now), self.present(now)
        self._since = now
        self.level += delta

    def integral(self, now: float) -> float:
        return self._total + self.level * (now - self._since)

    def present(self, now: float) -> float:
        """∫ [level > 0] dt."""
        return self._present + (self.level > 0) * (now - self._since)


class Busy:
    """Utilisation (guarantee 9) over all stations of one kind; dead stations are not counted."""

    __slots__ = ("begin", "end", "meter", "slots")

    def __init__(self) -> None:
        self.meter = Utilisation(0.0, 0)
        self.begin, self.end = self.meter.begin, self.meter.end
        self.slots = 0

    def join(self, now: float, slots: int) -> None:
        self.slots += slots
        self.meter.offer(now, self.slots)

    def leave(self, now: float, slots: int, active: int) -> None:
        """Remove a station that died, with its `active` pieces of work."""
        if active:
            self.meter.end(now, active)
        self.join(now, -slots)


@dataclass(slots=True)
class Measures:
    """The counters and time integrals of one run.

    busy: of the stations by kind; states: seconds in each state, summed over slots, generators and the trainer.
    waiting: requests that no generator serves yet. rows_local: rows served on their simulator's host. evaluated,
    evaluations_dropped: episodes of the finished evaluations. scored, scoring_failed: tries of scorers by outcome.
    tokens: generated, in answers that reached their slots; tokens_aborted: by aborted streams. lags: lag → samples of
    completed updates; updates_since: the same by lag in updates; down: seconds that stations of a kind were dead;
    devices: seconds of occupation of each shared device; publishing: seconds in which versions were sent to the
    generators. switches: of leased devices, each take and each yield; switching: their seconds.
    """

    busy: dict[str, Busy] = field(
        default_factory=lambda: {kind: Busy() for kind in ("simulator", "generator", "trainer", "scorer")}
    )
    states: dict[str, dict[str, float]] = field(
        default_factory=lambda: {
            "slots": dict.fromkeys((TICKETS, RESET, QUEUED, IN_BATCH, THREAD, STEP), 0.0),
            "generators": dict.fromkeys((SERVE, APPLY, NO_REQUESTS, BATCH_CLOCK), 0.0),
            "trainer": dict.fromkeys((TRAIN, EXCHANGE, SAMPLES), 0.0),
        }
    )
    waiting: Level = field(default_factory=Level)
    lags: Counter[int] = field(default_factory=Counter)
    updates_since: Counter[int] = field(default_factory=Counter)
    down: dict[str, float] = field(default_factory=lambda: {"simulator": 0.0, "generator": 0.0, "trainer": 0.0})
    devices: dict[int, float] = field(default_factory=dict)
    publishing: float = 0.0
    switches: int = 0
    switching: float = 0.0
    switched_bytes: int = 0
    requests: int = 0
    requests_served: int = 0
    rows_served: int = 0
    rows_local: int = 0
    batches: int = 0
    waited: float = 0.0
    tokens: int = 0
    tokens_aborted: int = 0
    transitions: int = 0
    chunk_steps: int = 0
    samples: int = 0
    failed: int = 0
    scored: int = 0
    scoring_failed: int = 0
    updates: int = 0
    trained_samples: int = 0
    trained_transitions: int = 0
    evaluated: int = 0
    evaluations_dropped: int = 0
    lost: int = 0
    span: Span | None = None


def summarise(
    driver: VirtualDriver, ledger: dict[str, Any], gpus: float = 0.0, groups: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Summary of the run so far. ledger: the conductor's; groups: its `RolloutScheduler.summary`."""
    now, measures = driver.clock.now, driver.measures
    return {
        "virtual_s": now,
        "versions": driver.reached,
        "halted": driver.halted,
        "gpus": gpus,
        "events": driver.events,
        "throughput": _throughput(measures, now),
        "utilisation": {
            kind: busy.meter.value(now) for kind, busy in measures.busy.items() if driver.scored or kind != "scorer"
        },
        "time": {name: _shares(seconds) for name, seconds in measures.states.items()},
        "devices": {str(number): seconds / (now or 1.0) for number, seconds in measures.devices.items()},
        "switches": {"count": measures.switches, "s": measures.switching, "bytes": measures.switched_bytes},
        "publishing_s": measures.publishing,
        "down_s": dict(measures.down),
        "stations_lost": measures.lost,
        "requests": _requests(measures, now),
        "lag": _lag(measures),
        **({"links": driver.network.summary()} if driver.network else {}),
        **({"conductor": driver.cpu.summary()} if driver.cpu else {}),
        **({"scoring": {"scored": measures.scored, "failed": measures.scoring_failed}} if driver.scored else {}),
        "evaluations": {"episodes": measures.evaluated, "dropped": measures.evaluations_dropped},
        "ledger": ledger,
        "groups": groups or {},
    }


def _throughput(measures: Measures, now: float) -> dict[str, float]:
    """transitions: primitive env steps of active rows; trained_transitions: of completed updates. tokens: in answers
    that reached their slots; tokens_aborted: of aborted streams."""
    seconds = now or 1.0
    return {
        "transitions": measures.transitions,
        "transitions_per_s": measures.transitions / seconds,
        "chunk_steps": measures.chunk_steps,
        "chunk_steps_per_s": measures.chunk_steps / seconds,
        "tokens": measures.tokens,
        "tokens_per_s": measures.tokens / seconds,
        "tokens_aborted": measures.tokens_aborted,
        "samples": measures.samples,
        "trained_samples": measures.trained_samples,
        "trained_samples_per_s": measures.trained_samples / seconds,
        "trained_transitions": measures.trained_transitions,
        "trained_transitions_per_s": measures.trained_transitions / seconds,
        "updates": measures.updates,
    }


def _shares(states: Mapping[str, float]) -> dict[str, dict[str, float]]:
    total = sum(states.values()) or 1.0
    return {state: {"s": seconds, "share": seconds / total} for state, seconds in states.items()}


def _requests(measures: Measures, now: float) -> dict[str, float]:
    """waiting_mean: mean number in the queue; wait_s: mean time from arrival to the batch. Little's law ties them.
    local: share of the rows that were served on their host."""
    return {
        "arrived": measures.requests,
        "served": measures.requests_served,
        "batches": measures.batches,
        "rows_per_batch": measures.rows_served / max(1, measures.batches),
        "waiting_mean": measures.waiting.integral(now) / (now or 1.0),
        "local": measures.rows_local / max(1, measures.rows_served),
        "wait_s": measures.waited / max(1, measures.requests_served),
    }


def _lag(measures: Measures) -> dict[str, Any]:
    """histogram: lag → samples trained on; updates_mean, updates_max: lag in updates."""
    count = sum(measures.lags.values())
    since = measures.updates_since
    return {
        "histogram": {str(lag): samples for lag, samples in sorted(measures.lags.items())},
        "mean": sum(lag * samples for lag, samples in measures.lags.items()) / max(1, count),
        "max": max(measures.lags, default=0),
        "updates_mean": sum(lag * samples for lag, samples in since.items()) / max(1, count),
        "updates_max": max(since, default=0),
    }
