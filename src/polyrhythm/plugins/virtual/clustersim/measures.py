"""Counters and time integrals of a running simulation.

Times are seconds of virtual time. Waiting times are by cause, summed over the slots (generators, the trainer); the
shares of each kind add up to 1.

Invariant: every change of a level is recorded when it happens; nothing is inferred from counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from polyrhythm.observe.activity import Utilisation

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
