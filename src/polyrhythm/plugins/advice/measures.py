"""Shares of a run's time by station and by cause of waiting, from its utilisation and its lines of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Line = Mapping[str, Any]

_KINDS = ("simulator", "generator", "scorer", "trainer")
#: Shares by field, with their metrics.
_SHARES = {
    "rows_idle": "rollouter/idle_ratio",
    "trainer_idle": "trainer/idle_ratio",
    "batch_wait": "rollouter/batch_wait_ratio",
    "cores": "cpu/own",
}


@dataclass(frozen=True, slots=True)
class Shares:
    """Measured shares of training's time, 0..1.

    busy: mean of each kind of station; count: stations of each kind; rows_idle: rows without a ticket; trainer_idle:
    the trainer neither trained nor published; batch_wait: a pass waited out batching.max_wait_ms; cores: of the
    main machine's processor cores, in use by this run; proximal: part of the trainer's work that recomputes log-probs.
    """

    busy: Mapping[str, float]
    count: Mapping[str, int]
    rows_idle: float
    trainer_idle: float
    batch_wait: float = 0.0
    cores: float = 0.0
    proximal: float = 0.0


def shares_of(utilisation: Mapping[str, float], lines: Sequence[Line]) -> Shares | None:
    """The shares; None if the run did not train. utilisation: by station, without evaluation's; lines: of metrics."""
    training = {name: share for name, share in utilisation.items() if not name.endswith("-evaluation")}
    by_kind = {kind: [share for name, share in training.items() if name.startswith(kind)] for kind in _KINDS}
    busy = {kind: fmean(own) for kind, own in by_kind.items() if own}
    means = time_means(lines)
    if not means or not busy:
        return None
    work = sum(line.get("time/actor/update") or 0.0 for line in lines)
    proximal = sum(line.get("time/actor/proximal") or 0.0 for line in lines)
    return Shares(
        busy, {kind: len(own) for kind, own in by_kind.items()}, **means, proximal=proximal / work if work else 0.0
    )


def newest_utilisation(line: Line) -> dict[str, float]:
    """Utilisation by station in the last seconds before an update."""
    prefix = "stations/utilisation/"
    return {name.removeprefix(prefix): share for name, share in line.items() if name.startswith(prefix)}


def time_means(lines: Iterable[Line]) -> dict[str, float]:
    """Means of `_SHARES` over the lines that have the first two, weighted by the seconds since the line before; empty
    if there are none. The cores' is over the lines that have it, and passes that did not wait have no share."""
    sums, seconds, before = dict.fromkeys(_SHARES, 0.0), dict.fromkeys(_SHARES, 0.0), 0.0
    for line in lines:
        if None not in (line.get("rollouter/idle_ratio"), line.get("trainer/idle_ratio")):
            passed = max(0.0, line["time_s"] - before)
            for field, metric in _SHARES.items():
                if field != "cores" or line.get(metric) is not None:
                    sums[field] += passed * (line.get(metric) or 0.0)
                    seconds[field] += passed
        before = line.get("time_s", before)
    return {field: sums[field] / (seconds[field] or 1.0) for field in sums} if seconds["rows_idle"] else {}


def newest_mean(lines: Sequence[Line], name: str, newest: int = 10) -> float | None:
    """Mean of a metric over its newest updates; None with fewer than that."""
    found = [float(line[name]) for line in lines if line.get(name) is not None]
    return fmean(found[-newest:]) if len(found) >= newest else None
