"""Writes bench/results/batching.md: `batching: auto` compared with the best fixed setting, scene by scene.

    python bench/scripts/batching.py [--seeds 2] [--only 3 7] [--out bench/results/batching.md]

The scenes and the grid are in `polyrhythm_bench.cases.batching`. The virtual clock makes the numbers the same on any
machine; all scenes take about half an hour of one core.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyrhythm_bench.cases.batching import TO_REACH, WAITS_MS, run
from polyrhythm_bench.harness.markdown import wrap_prose
from polyrhythm_bench.workloads.batching_scenario import WARM_UP_S

_FOREVER_MS = 1e6


def page(result: dict[str, Any], seeds: int, day: dt.date) -> str:
    """The page for the result of `run`."""
    ratios = sorted(row["ratio"] for row in result["scenes"])
    waits = ", ".join(f"{wait:g}" for wait in WAITS_MS[:-1])
    head = f"""# Automatic batching, simulated

`python bench/scripts/batching.py --seeds {seeds}`, {day}; means over the seeds.

Rows per second of virtual time after a warm-up of {WARM_UP_S:g} s; where something changes, {WARM_UP_S:g} s after the
change. Training and messages take no time. `best` is the fastest `dynamic` setting of a grid: max_rows of all rows, a
half, a quarter, 4, 16, 64 and 256; max_wait {waits} ms and unlimited (`for ever`). `at once` is all rows and no wait.
The last choice of `auto` is given in rows of full slots.

The worst ratio is **{result["ratio"]:.3f}** (target: {TO_REACH}), the median {ratios[len(ratios) // 2]:.3f}, the best
{ratios[-1]:.3f}: `auto` may choose waits that the grid does not have.

| | scene | auto/best | auto | best | at once | best: rows, wait | auto: rows, wait | choices |
|---|---|---|---|---|---|---|---|---|
"""
    return wrap_prose(head + "".join(_row(row) for row in result["scenes"]))


def _row(row: dict[str, Any]) -> str:
    best = f"{row['best_max_rows']}, {_wait(row['best_max_wait_ms'])}"
    auto = f"{row['auto_max_rows']}, {_wait(row['auto_max_wait_ms'])}" if row["auto_choices"] else "none"
    rates = f"{row['auto']:.0f} | {row['best']:.0f} | {row['served_at_once']:.0f}"
    return (
        f"| {row['number']} | {row['scene']} | {row['ratio']:.3f} | {rates} | {best} | {auto} | "
        f"{row['auto_choices']} |\n"
    )


def _wait(milliseconds: float) -> str:
    return "for ever" if milliseconds >= _FOREVER_MS else f"{milliseconds:.3g} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    text = page(run(given.seeds, given.only), given.seeds, dt.datetime.now(dt.UTC).date())
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
