"""Counters and time integrals of a running simulation; `summary.summarise` turns them into metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from polyrhythm.observe.activity import Utilisation
from polyrhythm.plugins.virtual.clustersim.clock import Causes, Level, Presence

#: States of a slot: waits for tickets, resets, waits for a generator, is in a batch, waits for its thread, steps.
TICKETS, RESET, QUEUED, IN_BATCH, THREAD, STEP = "tickets", "resetting", "generator", "in_batch", "thread", "stepping"
#: States of a generator. `batch_clock`: idle while requests wait; `no_requests`: idle while none does.
SERVE, APPLY, NO_REQUESTS, BATCH_CLOCK = "serving", "applying_weights", "no_requests", "batch_clock"
#: States of a trainer; its ranks exchange gradients (separate from training only on shared devices).
TRAIN, EXCHANGE, SAMPLES = "training", "synchronising", "samples"

#: track, name, begin and end in seconds of virtual time.
Span = Callable[[str, str, float, float], None]


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

    waiting: requests that no generator serves yet; present: time with at least one of them. rows_local: rows served on
    their simulator's host. evaluated, evaluations_dropped: episodes of the finished evaluations. scored,
    scoring_failed: tries of scorers by outcome. tokens: generated, in answers that reached their slots; tokens_aborted:
    by aborted streams. lags: lag → samples of completed updates; updates_since: the same by lag in updates; down:
    seconds that stations of a kind were dead; devices: seconds of occupation of each shared device; publishing: seconds
    in which versions were sent to the generators. switches: of leased devices, each take and each yield; switching:
    their seconds.
    """

    simulator: Busy = field(default_factory=Busy)
    generator: Busy = field(default_factory=Busy)
    trainer: Busy = field(default_factory=Busy)
    scorer: Busy = field(default_factory=Busy)
    slot_states: Causes = field(default_factory=lambda: Causes(TICKETS, RESET, QUEUED, IN_BATCH, THREAD, STEP))
    generator_states: Causes = field(default_factory=lambda: Causes(SERVE, APPLY, NO_REQUESTS, BATCH_CLOCK))
    trainer_states: Causes = field(default_factory=lambda: Causes(TRAIN, EXCHANGE, SAMPLES))
    waiting: Level = field(default_factory=Level)
    present: Presence = field(default_factory=Presence)
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
