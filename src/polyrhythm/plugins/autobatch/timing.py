"""Measured times that batching depends on: seconds of a pass by its rows, and each slot's absences.

All times are seconds on the conductor's clock, from command to report, so message latency is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.scheduler.inference.batching import padded
from polyrhythm.scheduler.records import Request

#: Least weight of the newest pass in the means of rows and seconds: a memory of about 1 / 0.05 = 20 passes.
MEAN_WEIGHT = 0.05
#: The same for variance and covariance: 100 passes, because the slope needs passes of different sizes.
SLOPE_WEIGHT = 0.01
#: A pass counts at most this multiple of its predicted seconds, so that one hang of the machine moves the mean little.
MAX_OVERRUN = 4.0
#: Passes after which predictions are good enough to limit outliers by.
PASSES_BEFORE_LIMIT = 8
#: Least relative variance of the rows (a standard deviation of 5.5% of their mean) from which a slope is estimated.
MIN_ROWS_VARIANCE = 0.003
#: First passes of a generator that are not measured: they compile and warm up.
WARM_UP_PASSES = 3
#: Absences kept over all slots, and at least of each: few slots need a longer memory each for the same certainty.
ABSENCES_KEPT, ABSENCES_KEPT_PER_SLOT = 512, 16


@dataclass(slots=True)
class PassTimeModel:
    """Predicted seconds of a pass of n rows (padding included): base_s + per_row_s · n.

    A regression line through the exponentially weighted means. With the relative deviations x = rows / mean_rows - 1
    and y = seconds / mean_s - 1:

        row_share = E[x·y] / E[x²], limited to 0..1     the part of the mean pass that grows with the rows
        per_row_s = row_share · mean_s / mean_rows
        base_s    = (1 - row_share) · mean_s

    row_share begins at a half, and keeps its value while all passes have about the same size.
    """

    passes: int = 0
    mean_rows: float = 0.0
    mean_s: float = 0.0
    row_share: float = 0.5
    rows_variance: float = 0.0
    covariance: float = 0.0

    def record(self, rows: int, seconds: float) -> None:
        self.passes += 1
        if self.passes > PASSES_BEFORE_LIMIT:
            seconds = min(seconds, MAX_OVERRUN * self.predict(rows))
        weight = max(MEAN_WEIGHT, 1.0 / self.passes)
        self.mean_rows += weight * (rows - self.mean_rows)
        self.mean_s += weight * (seconds - self.mean_s)
        if not self.mean_s > 0.0:
            return
        x, y = rows / self.mean_rows - 1.0, seconds / self.mean_s - 1.0
        weight = max(SLOPE_WEIGHT, 1.0 / self.passes)
        self.rows_variance += weight * (x * x - self.rows_variance)
        self.covariance += weight * (x * y - self.covariance)
        if self.rows_variance > MIN_ROWS_VARIANCE:
            self.row_share = min(1.0, max(0.0, self.covariance / self.rows_variance))

    @property
    def per_row_s(self) -> float:
        return self.row_share * self.mean_s / self.mean_rows if self.mean_rows else 0.0

    @property
    def base_s(self) -> float:
        return (1.0 - self.row_share) * self.mean_s

    def predict(self, rows: float) -> float:
        return self.base_s + self.per_row_s * rows


@dataclass(slots=True)
class SlotTiming:
    """One slot's size, state and last absences. An absence: seconds from an answer to the slot's next request.

    generator: the only one that may serve it, "" for any. rows: of its last request; max_rows: of its largest one (a
    request is smaller while a row of the slot has no episode). absences_s: a ring whose oldest entry is at `oldest`.
    is_away: its last request is answered. in_pass: a pass that answers it is under way; both hold if an answer that may
    have been lost with its generator is computed again. since: time of its last answer while it is away, else of its
    request.
    """

    generator: str = ""
    rows: int = 0
    max_rows: int = 0
    absences_s: list[float] = field(default_factory=list)
    oldest: int = 0
    is_away: bool = False
    in_pass: bool = False
    since: float = 0.0

    def record_answer(self, now: float) -> None:
        self.is_away, self.in_pass, self.since = True, False, now

    def record_request(self, rows: int, now: float, capacity: int) -> None:
        """A request of `rows` rows arrived. capacity: number of absences to keep."""
        was_away, absence = self.is_away, now - self.since
        self.rows, self.is_away, self.since = rows, False, now
        self.max_rows = max(self.max_rows, rows)
        if not was_away:  # it repeats the request after a fault, without an answer
            return
        if len(self.absences_s) < capacity:
            self.absences_s.append(absence)
        else:
            self.absences_s[self.oldest] = absence
            self.oldest = (self.oldest + 1) % len(self.absences_s)

    def list_absences(self) -> list[float]:
        """Absences in seconds, oldest first."""
        return [*self.absences_s[self.oldest :], *self.absences_s[: self.oldest]]

    def predict_return(self) -> float:
        """Time of its next request if this absence is as long as the oldest recorded one."""
        return self.since + self.absences_s[self.oldest % len(self.absences_s)]


@dataclass(frozen=True, slots=True)
class RunningPass:
    """A current pass: its start, its rows without padding, its slots."""

    started: float
    rows: int
    slots: tuple[str, ...]


@dataclass(slots=True)
class ClusterTiming:
    """Measured passes and slots of training. running: generator → its current pass; passes: → number of its passes."""

    pass_time: PassTimeModel = field(default_factory=PassTimeModel)
    slots: dict[str, SlotTiming] = field(default_factory=dict)
    running: dict[str, RunningPass] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)

    def record_request(self, request: Request, now: float) -> None:
        slot = self.slots.get(request.slot)
        if slot is None:
            slot = self.slots[request.slot] = SlotTiming(generator=request.generator or "")
        if slot.in_pass:  # the slot had its answer before the generator's report arrived here
            slot.record_answer(now)
        slot.record_request(request.rows, now, max(ABSENCES_KEPT // len(self.slots), ABSENCES_KEPT_PER_SLOT))

    def start_pass(self, generator: str, requests: Sequence[Request], now: float) -> None:
        rows = sum(request.rows for request in requests)
        self.running[generator] = RunningPass(now, rows, tuple(request.slot for request in requests))
        for request in requests:
            if request.slot in self.slots:
                self.slots[request.slot].in_pass = True

    def finish_pass(self, generator: str, answered: Sequence[str], now: float, buckets: Sequence[int]) -> int:
        """End the generator's pass; returns its rows. answered: slots that are away now; buckets: of the padding."""
        finished = self.running.pop(generator)
        passes = self.passes[generator] = self.passes.get(generator, 0) + 1
        if passes > WARM_UP_PASSES:
            self.pass_time.record(padded(finished.rows, buckets), now - finished.started)
        for slot in answered:
            if slot in self.slots:
                self.slots[slot].record_answer(now)
        return finished.rows

    def remove_slot(self, slot: str) -> None:
        self.slots.pop(slot, None)

    def remove_generator(self, generator: str) -> None:
        """Remove a lost generator; the slots of its pass wait again."""
        lost = self.running.pop(generator, None)
        for slot in lost.slots if lost else ():
            if slot in self.slots:
                self.slots[slot].in_pass = False
        self.passes.pop(generator, None)
