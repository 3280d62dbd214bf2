"""How fast everybody is, learned from what the conductor hears anyway: passes by their rows, slots by their absence.

Times are as the conductor sees them, messages included, for that is what batching can change nothing about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: How much of what was known is forgotten with a pass: the mean by twenty passes, the slope by a hundred.
_FORGET, _FORGET_SLOPE = 0.05, 0.01
#: A pass that takes so many times what was expected counts no more than that (a machine that hangs once).
_OUTLIER = 4.0
#: Passes after which outliers are known from what is usual.
_USUAL = 8
#: Below this variance of the rows, as a share of their mean squared, passes say nothing about the slope.
_SPREAD = 0.003


@dataclass(slots=True)
class ServiceTime:
    """Seconds of a pass by its rows (padded ones included): a line through the recent mean, exponentially forgotten.

    rows, seconds: means over recent passes; share: the part of the mean pass that is proportional to its rows (a half
    until passes of several sizes were seen, then kept where sizes no longer vary). spread, together: variance of the
    rows and their covariance with the seconds, both relative to the means.
    """

    passes: int = 0
    rows: float = 0.0
    seconds: float = 0.0
    share: float = 0.5
    spread: float = 0.0
    together: float = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        self.passes += 1
        if self.passes > _USUAL:
            seconds = min(seconds, _OUTLIER * self.of(rows))
        weight = max(_FORGET, 1.0 / self.passes)
        self.rows += weight * (rows - self.rows)
        self.seconds += weight * (seconds - self.seconds)
        if not self.seconds > 0.0:
            return
        more, longer = rows / self.rows - 1.0, seconds / self.seconds - 1.0
        weight = max(_FORGET_SLOPE, 1.0 / self.passes)
        self.spread += weight * (more * more - self.spread)
        self.together += weight * (more * longer - self.together)
        if self.spread > _SPREAD:
            self.share = min(1.0, max(0.0, self.together / self.spread))

    @property
    def per_row(self) -> float:
        return self.share * self.seconds / self.rows if self.rows else 0.0

    @property
    def base(self) -> float:
        return (1.0 - self.share) * self.seconds

    def of(self, rows: float) -> float:
        """Expected seconds of a pass of so many rows."""
        return self.base + self.per_row * rows


@dataclass(slots=True)
class SlotPace:
    """generator: that has to answer it, "" for any. rows: of its last request; most: of any, as rows end and begin.

    away: seconds between an answer and the next request, the last ones, in a ring whose next place is `turn`; since:
    when the last answer went out, or the request came in that is not answered yet; is_served: a pass for it is under
    way.
    """

    generator: str = ""
    rows: int = 0
    most: int = 0
    away: list[float] = field(default_factory=list)
    turn: int = 0
    is_away: bool = False
    is_served: bool = False
    since: float = 0.0

    def answered(self, now: float) -> None:
        self.is_away, self.is_served, self.since = True, False, now

    def asked(self, rows: int, now: float, kept: int) -> None:
        """A request of so many rows is in. kept: absences to keep."""
        was_away, seconds = self.is_away, now - self.since
        self.rows, self.is_away, self.since = rows, False, now
        self.most = max(self.most, rows)
        if not was_away:
            return
        if len(self.away) < kept:
            self.away.append(seconds)
        else:
            self.away[self.turn] = seconds
            self.turn = (self.turn + 1) % len(self.away)

    def absences(self) -> list[float]:
        """The last ones, oldest first."""
        return [*self.away[self.turn :], *self.away[: self.turn]]
