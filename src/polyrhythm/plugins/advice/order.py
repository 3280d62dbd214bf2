"""All findings of a run in the order in which to act: stability before throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.hooks import Alarm
from polyrhythm.plugins.advice import speed, stability
from polyrhythm.plugins.advice.findings import Change, Finding, worthwhile
from polyrhythm.plugins.advice.measures import Line, shares_of
from polyrhythm.plugins.memory_estimate.plan import with_settings

#: Findings under which older samples would make it worse.
DRIFTS = ("mismatch", "stale", "large-updates", "collapse", "entropy")


def advice(
    config: RunConfig, utilisation: Mapping[str, float], lines: Sequence[Line], alarms: Sequence[Alarm]
) -> list[Finding]:
    """The findings; empty if the run did not train. Changes that do not go with the other settings are left out, and
    what would make samples older while the policy drifts, and what gains nothing. utilisation: by station; lines: of
    metrics.jsonl; alarms: of these lines."""
    shares = shares_of(utilisation, lines)
    if shares is None:
        return []
    first, limit = stability.unstable(lines, alarms, config), speed.limit(shares, config)
    drifting = [finding.name for finding in first if finding.name in DRIFTS]
    if drifting and any(change.unstable for change in limit.changes):
        kept = tuple(change for change in limit.changes if not change.unstable)
        limit = replace(limit, changes=kept, remedy=f"raise freshness.max_lag once {drifting[0]} is over")
    valid = [replace(finding, changes=tuple(_valid(config, finding.changes))) for finding in (*first, limit)]
    return [worthwhile(finding) for finding in valid]


def with_setting(config: RunConfig, change: Change) -> RunConfig:
    """The settings with one changed. ConfigError: it does not go with the others."""

    changed = with_settings(config, {change.setting: change.to})
    return validate(changed.model_dump(mode="json", warnings=False))


def _valid(config: RunConfig, changes: Sequence[Change]) -> Iterator[Change]:
    for change in changes:
        with suppress(ConfigError):
            with_setting(config, change)
            yield change
