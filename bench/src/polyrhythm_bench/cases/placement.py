"""Placements of published rows on devices that are locks: live, in processes that sleep, beside the simulated cluster.

A device is held by one station at a time, for a pass, a chunk step or a rank's part of a gradient step; the others
stand in line (`workloads.device_lock`). The simulated cluster has the same rule (`sharing: exclusive`). The stage times
are those of `bench papers` (`papers.stages`), scaled (`workloads.placement_scene`). Three placements, each in lock-step
and fully asynchronous, are ranked beside the paper.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from polyrhythm_bench.papers.published import PaperData, published
from polyrhythm_bench.papers.stages import Times, fit
from polyrhythm_bench.workloads.placement_run import (
    CountedPart,
    choose_versions,
    live,
    simulated,
    summarise_turns,
)
from polyrhythm_bench.workloads.placement_scene import (
    MODES,
    PLACEMENTS,
    SETUPS,
    Mode,
    Placement,
    PlacementScene,
    find_row,
)

log = logging.getLogger(__name__)

#: The largest difference between live and simulated rates that is allowed.
LIMIT = 0.05
#: Scaled seconds of a chunk step of all environments in the colocated baseline, and of the counted part of a run.
CHUNK_STEP_S, COUNTED_S = 1.2, 12.0


def run(
    only: Sequence[str] = SETUPS,
    repeats: int = 3,
    times: Mapping[str, Times] | None = None,
    cells: Sequence[tuple[Placement, Mode]] = tuple(itertools.product(PLACEMENTS, MODES)),
    *,
    chunk_step_s: float = CHUNK_STEP_S,
    counted_s: float = COUNTED_S,
    seeds: int = 5,
) -> dict[str, Any]:
    """Every cell of the setups, live in interleaved turns, and simulated.

    times: stage times of each setup; by default those of `bench papers`. chunk_step_s, counted_s: scaled seconds of a
    chunk step in the colocated baseline, and of the counted part of a run. seeds: simulations of a cell, whose median
    is its rate. Returns `parts`, by the setup's name: times, scale, `cells` (what `_cell` returns), `rankings`;
    largest_error and within_limit of the cells of all setups.
    """
    data = published()
    times = times or fit(data)
    parts: dict[str, Any] = {}
    for key in only:
        setup = next(setup for setup in data.setups if setup.key == key)
        own = times[key]
        log.info("%s: %s", setup.name, own)
        baseline, rate = find_row(data, key, "colocated", "lockstep")
        assert rate is not None, "SETUPS have one"
        scale = chunk_step_s * rate / (baseline.envs * baseline.setup.chunk)
        made = {cell: PlacementScene(find_row(data, key, *cell)[0], own, scale) for cell in cells}
        rows = _measure(data, made, repeats, counted_s, seeds)
        parts[setup.name] = {
            "times": asdict(own),
            "scale": scale,
            "cells": rows,
            "rankings": rank(rows),
        }
    largest = max(abs(cell["live_to_simulated"] - 1) for part in parts.values() for cell in part["cells"])
    return {
        "repeats": repeats,
        "limit": LIMIT,
        "largest_error": largest,
        "within_limit": largest <= LIMIT,
        "others_cores": median(cell["others_cores"] for part in parts.values() for cell in part["cells"]),
        "parts": parts,
    }


def _measure(
    data: PaperData,
    made: Mapping[tuple[Placement, Mode], PlacementScene],
    repeats: int,
    counted_s: float,
    seeds: int,
) -> list[dict[str, Any]]:
    versions = {cell: choose_versions(scene, counted_s) for cell, scene in made.items()}
    measured: dict[tuple[Placement, Mode], list[CountedPart]] = {cell: [] for cell in made}
    for turn in range(repeats):
        for cell, scene in made.items():
            measured[cell].append(live(replace(scene, seed=turn), versions[cell]))
            log.info("turn %d, %s %s: %.4g transitions/s", turn + 1, *cell, measured[cell][-1].rate)
    return [
        _cell(
            cell,
            find_row(data, scene.row.setup.key, *cell)[1],
            [simulated(replace(scene, seed=seed), versions[cell]) for seed in range(seeds)],
            measured[cell],
        )
        for cell, scene in made.items()
    ]


def _cell(
    cell: tuple[Placement, Mode],
    value: float | None,
    expected: Sequence[CountedPart],
    measured: Sequence[CountedPart],
) -> dict[str, Any]:
    """The numbers of a cell, rates in transitions per second at the published size.

    published: None where nothing is; simulated, live: medians; live_to_simulated: of these; ratios_by_turn; seconds:
    counted in a live turn; busy, busy_simulated: mean share of the time in which a device was held; others_cores: most
    of a turn; and what `summarise_turns` returns.
    """
    rate, found = median(part.rate for part in expected), median(part.rate for part in measured)
    return {
        "placement": cell[0],
        "mode": cell[1],
        "published": value,
        "simulated": rate,
        "live": found,
        "live_to_simulated": found / rate,
        "ratios_by_turn": [part.rate / rate for part in measured],
        "seconds": median(part.seconds for part in measured),
        "busy": median(part.busy for part in measured),
        "busy_simulated": median(part.busy for part in expected),
        "others_cores": max(part.others_cores for part in measured),
        **summarise_turns([part.turns for part in measured]),
    }


def rank(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By mode, the placements from fast to slow: published (those that are), simulated, live;
    `agrees`: whether the live order of the published placements is theirs (None: less than two are)."""
    found = []
    for mode in dict.fromkeys(cell["mode"] for cell in cells):
        own = [cell for cell in cells if cell["mode"] == mode]
        order = {
            by: [cell["placement"] for cell in sorted(own, key=lambda cell: -(cell[by] or 0)) if cell[by] is not None]
            for by in ("published", "simulated", "live")
        }
        same = order["published"] == [name for name in order["live"] if name in order["published"]]
        found.append({"mode": mode, **order, "agrees": same if len(order["published"]) > 1 else None})
    return found
