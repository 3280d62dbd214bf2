"""Placements of published rows on devices that are locks: live, in processes that sleep, beside the simulated cluster.

A device is held by one station at a time, for a pass, a chunk step or a rank's part of a gradient step; the others
stand in line (`workloads.device_lock`). The simulated cluster has the same rule (`sharing: exclusive`). The costs of a
setup are fitted under that rule to its published baseline and rollout-only rows (`papers.fit`), and scaled
(`workloads.placement_scene`). Three placements, each in lock-step and fully asynchronous, are ranked beside the paper.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from polyrhythm_bench.papers.fit import CHUNK_STEPS, fit
from polyrhythm_bench.papers.model import Costs, simulate
from polyrhythm_bench.papers.published import PaperData, published
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
#: Shares of the training time that are tried off the devices.
OFF_DEVICE = (0.0, 0.2, 0.4, 0.6, 0.8)


def run(
    only: Sequence[str] = SETUPS,
    repeats: int = 3,
    costs: Mapping[str, Costs] | None = None,
    cells: Sequence[tuple[Placement, Mode]] = tuple(itertools.product(PLACEMENTS, MODES)),
    *,
    chunk_step_s: float = CHUNK_STEP_S,
    counted_s: float = COUNTED_S,
    seeds: int = 5,
    shares: Sequence[float] = OFF_DEVICE,
) -> dict[str, Any]:
    """Every cell of the setups, live in interleaved turns, and simulated.

    costs: of each setup, in published seconds; by default they are fitted, in about a minute each. chunk_step_s,
    counted_s: scaled seconds of a chunk step in the colocated baseline, and of the counted part of a run. seeds:
    simulations of a cell, whose median is its rate; shares: those of `off_device`. Returns
    `parts`, by the setup's name: costs, misfit of the fit (None: given), scale, `cells` (what `_cell` returns),
    `rankings`, `off_device`; largest_error and within_limit of the cells of all setups.
    """
    data = published()
    parts: dict[str, Any] = {}
    for key in only:
        setup = next(setup for setup in data.setups if setup.key == key)
        found = fit(data.visible(setup), sharing="exclusive") if costs is None else None
        own = found.costs if found else (costs or {})[key]
        log.info("%s: %s", setup.name, own)
        baseline, rate = find_row(data, key, "colocated", "lockstep")
        assert rate is not None, "SETUPS have one"
        scale = chunk_step_s * rate / (baseline.envs * baseline.setup.chunk)
        made = {cell: PlacementScene(find_row(data, key, *cell)[0], own, scale) for cell in cells}
        rows = _measure(data, made, repeats, counted_s, seeds)
        parts[setup.name] = {
            "costs": asdict(own),
            "misfit": found.misfit if found else None,
            "scale": scale,
            "cells": rows,
            "rankings": rank(rows),
            "off_device": off_device(data, key, own, shares),
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
            median(simulate(scene.row, scene.costs, seed=n, sharing="exclusive").throughput for n in range(seeds)),
            [simulated(replace(scene, seed=seed), versions[cell]) for seed in range(seeds)],
            measured[cell],
        )
        for cell, scene in made.items()
    ]


def _cell(
    cell: tuple[Placement, Mode],
    value: float | None,
    full_size: float,
    expected: Sequence[CountedPart],
    measured: Sequence[CountedPart],
) -> dict[str, Any]:
    """The numbers of a cell, rates in transitions per second at the published size.

    published: None where nothing is; full_size: simulated without scaling; simulated: with it; live: median;
    live_to_simulated: of these; ratios_by_turn; seconds: counted in a live turn; busy, busy_simulated: mean share of
    the time in which a device was held; others_cores: most of a turn; and what `summarise_turns` returns.
    """
    rate, found = median(part.rate for part in expected), median(part.rate for part in measured)
    return {
        "placement": cell[0],
        "mode": cell[1],
        "published": value,
        "full_size": full_size,
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
    """By mode, the placements from fast to slow: published (those that are), simulated at full size and scaled, live;
    `agrees`: whether the live order of the published placements is theirs (None: less than two are)."""
    found = []
    for mode in dict.fromkeys(cell["mode"] for cell in cells):
        own = [cell for cell in cells if cell["mode"] == mode]
        order = {
            by: [cell["placement"] for cell in sorted(own, key=lambda cell: -(cell[by] or 0)) if cell[by] is not None]
            for by in ("published", "full_size", "simulated", "live")
        }
        same = order["published"] == [name for name in order["live"] if name in order["published"]]
        found.append({"mode": mode, **order, "agrees": same if len(order["published"]) > 1 else None})
    return found


def off_device(data: PaperData, key: str, costs: Costs, shares: Sequence[float]) -> list[dict[str, Any]]:
    """What asynchrony reaches, simulated at full size with short episodes, if a `share` of the training time is spent
    off the devices, after each gradient step: transitions per second of each placement. Lock-step does not change."""
    rows = {placement: find_row(data, key, placement, "asynchronous")[0] for placement in PLACEMENTS}
    found = []
    for share in shares:
        rates: dict[str, float] = {}
        for placement, row in rows.items():
            ranks = len(row.training)
            update_s = costs.train * row.envs / ranks * CHUNK_STEPS * row.setup.chunk
            # `synchronise` is for a rank, so that each exchange takes it times the ranks.
            exchange_s = share * update_s / row.gradient_steps(CHUNK_STEPS) / ranks
            own = replace(costs, train=(1 - share) * costs.train, synchronise=exchange_s)
            rates[placement] = simulate(row, own, CHUNK_STEPS, sharing="exclusive").throughput
        found.append({"share": share, **rates})
    return found
