"""Limits on dropped samples: by faults, after which the run halts, and by the filter of returns, per update.

Faults (`max_dropped`) do not include episodes that the environment refuses. If most samples are refused, the run halts
too, as it would not end.

Filter: a complete group whose mean return lies outside the bounds is dropped and replaced. If all members of a group
fail, or all succeed, GRPO's advantages are all zero and the group carries no gradient. The number of groups dropped per
update is bounded; beyond it the run keeps them or halts, as configured, and reports it.

Invariants: samples that an earlier part of a resumed run dropped never halt it again; at most `max_filtered` groups are
dropped between two updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import Command, DropReason, FilterExhausted, Halt, SampleFailed, ScoringFailed
from polyrhythm.scheduler.samples.groups import Group, SampleLedger
from polyrhythm.scheduler.settings import SchedulerSettings

#: Number of reasons that the message names.
_NAMED = 3
#: Minimum number of refused samples before their share is checked.
_REFUSED = 1000
_FIX = "correct what fails, then resume the run"
_FIX_POLICY = (
    "correct the policy, then resume the run; if its weights have diverged, begin another run with a lower "
    "learning rate (init_from takes an earlier checkpoint)"
)


class FaultLimit:
    """forgiven, refused, started: counts from before the run was resumed. Keeps the last failure for the message."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self.forgiven = self._refused = self._started = 0
        self._last_reason: DropReason | None = None
        self._last_failure = ""

    def on_failure(self, event: SampleFailed | ScoringFailed) -> None:
        """Remember the failure of a sample or of its score; confirmed cancellations are ignored."""
        if isinstance(event, ScoringFailed):
            self._last_reason, what = DropReason.SCORING_FAILED, event.error
        elif event.reason == DropReason.CANCELLED:
            return
        else:
            self._last_reason, what = event.reason, event.what
        self._last_failure = f"{what} ({event.detail})" if event.detail else what

    def forgive(self, ledger: SampleLedger) -> None:
        """The run was resumed: samples dropped before do not count."""
        self.forgiven = ledger.dropped_by_faults
        self._refused, self._started = ledger.dropped.get(DropReason.EPISODE_REFUSED, 0), ledger.started

    def check(self, ledger: SampleLedger) -> list[Halt]:
        """Halt, with the reasons and the last failure, if more samples were dropped than allowed."""
        if not ledger.dropped:
            return []
        settings, dropped = self._settings, ledger.dropped_by_faults - self.forgiven
        refused = ledger.dropped.get(DropReason.EPISODE_REFUSED, 0) - self._refused
        started = ledger.started - self._started
        if refused > _REFUSED and 2 * refused > started:
            return [
                Halt(
                    f"the environment refuses most episodes, {refused} of {started}; the last one: {self._last_failure}"
                )
            ]
        if dropped <= settings.max_dropped:
            return []
        reasons = sorted(ledger.dropped_for_faults().items(), key=lambda item: -item[1])
        counts = "; ".join(f"{count} x {reason}" for reason, count in reasons[:_NAMED])
        more = f"; {len(reasons) - _NAMED} more reasons" if len(reasons) > _NAMED else ""
        last = f"; the last failure: {self._last_failure}" if self._last_failure else ""
        since, in_all = (" since the run was resumed", "in all ") if self.forgiven else ("", "")
        limit, scoring = f"rollout.max_attempts = {settings.max_attempts}", settings.scoring
        if scoring is not None and self._last_reason is DropReason.SCORING_FAILED:
            limit = f"scoring.max_attempts = {scoring.max_attempts}"
        fix = _FIX_POLICY if self._last_reason is DropReason.POLICY_NOT_FINITE else _FIX
        return [
            Halt(
                f"rollout.max_dropped = {settings.max_dropped}: {dropped} samples were dropped{since} after "
                f"{limit} attempts each ({in_all}{counts}{more}){last}; {fix}"
            )
        ]


@dataclass(slots=True)
class ReturnFilter:
    """filtered: groups dropped since the last update was lent; accepted: total groups kept out of bounds. exhausted:
    `FilterExhausted` was sent for this update."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    filtered: int = 0
    accepted: int = 0
    exhausted: bool = False

    def check(self, group: Group) -> tuple[bool, list[Command]]:
        """Whether the complete group is kept, and commands that report the decision."""
        settings = self.settings
        if settings.min_return <= group.returns / group.size <= settings.max_return:
            return True, []
        if self.filtered < settings.max_filtered:
            self.filtered += 1
            return False, []
        bounds = f"[{settings.min_return:g}, {settings.max_return:g}]"
        if settings.on_max_filtered == "stop":
            count = f"more than max_filtered {settings.max_filtered} groups of one"
            remedy = "widen the bounds, raise max_filtered, or make on_max_filtered accept"
            return False, [Halt(f"{count} update had a mean return outside {bounds}; {remedy}")]
        self.accepted += 1
        said, self.exhausted = self.exhausted, True
        return True, [] if said else [FilterExhausted(self.filtered)]

    def next_update(self) -> None:
        """An update starts: reset its counts."""
        self.filtered, self.exhausted = 0, False
