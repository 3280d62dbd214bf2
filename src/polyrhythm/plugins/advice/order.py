"""All findings of a run in the order in which to act: stability before throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.hooks import Alarm
from polyrhythm.plugins.advice import speed, stability
from polyrhythm.plugins.advice.findings import Finding
from polyrhythm.plugins.advice.measures import Line, shares_of

#: Findings under which older samples would make it worse.
DRIFTS = ("mismatch", "stale", "large-updates", "collapse", "entropy")


def advice(
    config: RunConfig, utilisation: Mapping[str, float], lines: Sequence[Line], alarms: Sequence[Alarm]
) -> list[Finding]:
    """The findings; empty if the run did not train. What would make samples older is left out while the
    policy drifts. utilisation: by station; lines: of metrics.jsonl; alarms: of these lines."""
    shares = shares_of(utilisation, lines)
    if shares is None:
        return []
    first, limit = stability.unstable(lines, alarms, config), speed.limit(shares, config)
    drifting = [finding.name for finding in first if finding.name in DRIFTS]
    if drifting and any(change.unstable for change in limit.changes):
        kept = tuple(change for change in limit.changes if not change.unstable)
        limit = replace(limit, changes=kept, remedy=f"raise freshness.max_lag once {drifting[0]} is over")
    return [*first, limit]
