"""Compares modes of one recipe: the best settings of each, then interleaved turns with these.

Worked example, two cores: a version takes 2.0 s in one mode and 1.6 s in another, whose processes use 2.9 CPU seconds
for it. Its speed-up is 1.25; a version cannot take less than 2.9 s / 2 = 1.45 s on these cores, and 1.45/1.6 = 0.91 of
that speed is reached: the cores are the limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from polyrhythm_bench.harness.version_cost import VersionCost

log = logging.getLogger(__name__)

#: From this share on, cores and stations count as used up.
FULL = 0.9

#: Settings over the recipe (section.key=value), and how many versions are timed.
Measure = Callable[[Sequence[str], int], VersionCost]


@dataclass(frozen=True, slots=True)
class Mode:
    """settings: section.key=value words that make it; choices: further words, of which the fastest are found first."""

    settings: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...] = ((),)


def compare(
    modes: Mapping[str, Mode], measure: Measure, *, tries: int, versions: int, repeats: int, cores: int
) -> dict[str, Any]:
    """Find each mode's best choice by `tries` versions of each, then let the modes take `repeats` turns of `versions`.

    The first mode is the one that the others are compared with. Returns `modes`: for each what `summarise` returns,
    with its `settings`; and `first_pass`: seconds per version of every choice that was tried, where there was a choice.
    """
    best, tried = {}, {}
    for name, mode in modes.items():
        best[name], seconds = _choose(name, mode, measure, tries)
        if seconds:
            tried[name] = seconds
    turns: dict[str, list[VersionCost]] = {name: [] for name in modes}
    for turn in range(repeats):
        for name, settings in best.items():
            turns[name].append(measure(settings, versions))
            log.info("turn %d, %s: %.2f s a version", turn + 1, name, turns[name][-1].seconds_per_version)
    first = turns[next(iter(modes))]
    found = {name: {"settings": best[name], **summarise(own, first, cores)} for name, own in turns.items()}
    return {"modes": found, "first_pass": tried}


def _choose(name: str, mode: Mode, measure: Measure, tries: int) -> tuple[list[str], dict[str, float]]:
    """The mode's settings with the fastest choice; seconds per version of each choice, if there are several."""
    if len(mode.choices) == 1:
        return [*mode.settings, *mode.choices[0]], {}
    seconds: dict[str, float] = {}
    for choice in mode.choices:
        words = " ".join(choice)
        seconds[words] = measure([*mode.settings, *choice], tries).seconds_per_version
        log.info("first pass, %s, %s: %.2f s a version", name, words, seconds[words])
    best = min(mode.choices, key=lambda choice: seconds[" ".join(choice)])
    return [*mode.settings, *best], seconds


def summarise(turns: Sequence[VersionCost], others: Sequence[VersionCost], cores: int) -> dict[str, Any]:
    """Medians over the turns of one mode; `others`: the turns of the mode that it is compared with.

    Returns seconds_per_version, speedup (theirs over its own in the same turn), transitions_per_s,
    transitions_per_version, lag_mean, cpu_s_per_version, cores_busy, others_cores, least_seconds_per_version (that its
    CPU seconds allow on so many cores), reached (that over the seconds it took, in the same turn), limited_by; by
    station `busy` and `cpu_s_by`; `seconds_by_turn` and `speedup_by_turn`.
    """
    speedups = [other.seconds_per_version / own.seconds_per_version for own, other in zip(turns, others, strict=True)]
    same = ("transitions_per_s", "transitions_per_version", "lag_mean", "cpu_s_per_version")
    cores_busy, others_cores = (median(getattr(t, name) for t in turns) for name in ("cores_busy", "others_cores"))
    busy = _by_station([turn.busy for turn in turns])
    return {
        "seconds_per_version": median(turn.seconds_per_version for turn in turns),
        "speedup": median(speedups),
        **{name: median(getattr(turn, name) for turn in turns) for name in same},
        "cores_busy": cores_busy,
        "others_cores": others_cores,
        "least_seconds_per_version": median(turn.cpu_s_per_version for turn in turns) / cores,
        "reached": median(turn.cpu_s_per_version / cores / turn.seconds_per_version for turn in turns),
        "limited_by": limited_by(cores_busy, others_cores, cores, busy),
        "busy": busy,
        "cpu_s_by": _by_station([turn.cpu_s_by for turn in turns]),
        "seconds_by_turn": [turn.seconds_per_version for turn in turns],
        "speedup_by_turn": speedups,
    }


def limited_by(cores_busy: float, others_cores: float, cores: int, busy: Mapping[str, float]) -> str:
    """The bottleneck of a version.

    `cores`: they are used up, by the run and by others. Else the stations that always have work, which more of their
    kind would help. Else `waiting`: stations wait for each other, and cores for them.
    """
    if cores_busy + others_cores >= FULL * cores:
        return "cores"
    return ", ".join(sorted(name for name, share in busy.items() if share >= FULL)) or "waiting"


def _by_station(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(turn[name] for turn in turns) for name in turns[0]}
