"""Measures what limited a run, for the sentence of `observe.bottleneck`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.observe.bottleneck import Load, bottleneck, idle_shares

_KINDS = ("simulator", "generator", "scorer", "trainer")


def limit_of(config: RunConfig, summary: Mapping[str, Any], updates: Sequence[Mapping[str, Any]]) -> str | None:
    """The sentence on a run that trained, None if it did not. summary: the content of summary.json; updates: of
    metrics.jsonl."""
    shares: Mapping[str, float] = summary.get("utilisation", {})
    idle = idle_shares(updates)
    by_kind = {
        kind: [share for name, share in shares.items() if name.startswith(kind) and not name.endswith("-evaluation")]
        for kind in _KINDS
    }
    busy = {kind: fmean(own) for kind, own in by_kind.items() if own}
    if not idle or not busy:
        return None
    rollout, batching = config.rollout, config.batching
    count = {kind: len(own) for kind, own in by_kind.items()} | {"trainer": config.placement.trainer.ranks or 1}
    return bottleneck(
        Load(
            busy,
            count,
            **idle,
            max_lag=config.freshness.max_lag,
            one_thread=config.launcher == "inline",
            one_slot=rollout.simulators * rollout.env_batches == 1 and rollout.sharding == "whole",
            rows=rollout.rows,
            all_rows=config.all_rows,
            max_rows=getattr(batching, "max_rows", 0),
            max_wait_ms=getattr(batching, "max_wait_ms", 0.0),
            fires_when_all_wait=getattr(batching, "fire_when_all_wait", True),
        )
    )
