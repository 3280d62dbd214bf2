"""Figures of ROLL Flash, live with engines and environments that sleep, beside the scheduler on the virtual clock."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from statistics import median
from typing import Any

from polyrhythm_bench.harness.version_cost import measure
from polyrhythm_bench.workloads.answers import run_cluster
from polyrhythm_bench.workloads.roll_figures import FigureCell

log = logging.getLogger(__name__)

#: Versions that are simulated before counting begins, and those that are counted.
_WARM_UP, _COUNTED = 10, 60


def run(cells: Sequence[FigureCell], versions: int, repeats: int) -> dict[str, Any]:
    """Every cell, `versions` versions at a time, in interleaved turns: what `summarise` returns."""
    seconds: list[list[float]] = [[] for _ in cells]
    others: list[float] = []
    load = os.getloadavg()[0]
    for turn in range(repeats):
        for own, cell in zip(seconds, cells, strict=True):
            timed = cell.times * versions
            cost = measure(cell.live(timed, turn), timed, validated=False)
            own.append(cost.seconds_per_version)
            others.append(cost.others_cores)
            log.info("turn %d, %s, %s: %.2f s per version", turn + 1, cell.row, cell.way, own[-1])
    table = summarise(cells, seconds, simulated(cells))
    return {
        "versions": versions,
        "repeats": repeats,
        "load_before": load,
        "others_cores": max(others),
        "median_difference": median(abs(row["difference"]) for row in table),
        "rows": table,
    }


def simulated(cells: Sequence[FigureCell], counted: int = _COUNTED) -> list[float]:
    """Virtual seconds per version of every cell."""
    return [run_cluster(cell.cluster(_WARM_UP + counted), counted)[1] / counted for cell in cells]


def summarise(
    cells: Sequence[FigureCell], seconds: Sequence[Sequence[float]], expected: Sequence[float]
) -> list[dict[str, Any]]:
    """A row for each cell: seconds per version, live (median over the turns) and simulated, and the relative difference
    of the first from the second; gain over the first way of the same row, live in the same turn, simulated, and
    published (0: not given)."""
    rows = []
    first: dict[str, int] = {}
    for number, cell in enumerate(cells):
        base = first.setdefault(cell.row, number)
        live = median(seconds[number])
        rows.append(
            {
                "row": cell.row,
                "way": cell.way,
                "seconds": live,
                "simulated": expected[number],
                "difference": live / expected[number] - 1,
                "gain": median(other / own for other, own in zip(seconds[base], seconds[number], strict=True)),
                "simulated_gain": expected[base] / expected[number],
                "published_gain": cell.published,
                "seconds_by_turn": list(seconds[number]),
            }
        )
    return rows
