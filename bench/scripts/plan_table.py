"""Writes bench/results/plan.md: the search for a placement against all placements of random problems.

python bench/scripts/plan_table.py [PROBLEMS [SEED...]]

SEEDs: problems whose versions have MANY times as many samples, so that the search judges briefly first.
"""

from __future__ import annotations

import datetime as dt
import logging
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from polyrhythm_bench.cases import placements

SCRIPT = "bench/scripts/plan_table.py"
#: Factor of the samples of a version where a placement is judged briefly first.
MANY = 32
PAGE = Path(__file__).resolve().parents[1] / "results" / "plan.md"


def page(found: dict[str, Any], command: str) -> str:
    rows: list[dict[str, Any]] = found["problems"]
    groups: dict[tuple[int, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["devices"], bool(row["best"].simulator_devices)].append(row)
    lines = [
        "# The search for a placement",
        "",
        f"`{command}`, {dt.datetime.now(dt.UTC):%Y-%m-%d}: {len(rows)} random problems (`cases/placements.py`). Every",
        "placement of each is judged by the simulated cluster. Regret: the share of the best throughput that the",
        "search misses, which judges as many as `polyrhythm plan` does.",
        "",
        "| devices | simulators | problems | placements, mean | median regret | worst | search, s of CPU, mean |",
        "|---|---|---|---|---|---|---|",
    ]
    for (devices, on_device), own in sorted(groups.items()):
        regrets = [row["regret"] for row in own]
        where = "devices" if on_device else "hosts"
        sizes, seconds = fmean(row["placements"] for row in own), fmean(row["cpu_s"] for row in own)
        missed = f"{median(regrets):.1%} | {max(regrets):.1%}"
        lines.append(f"| {devices} | {where} | {len(own)} | {sizes:,.0f} | {missed} | {seconds:.2f} |")
    total = f"{found['median']:.1%} | {found['worst']:.1%} | {found['cpu_s']:.1f} in all"
    sizes = fmean(row["placements"] for row in rows)
    over = [f"{row['seed']}: {row['regret']:.1%}" for row in rows if row["regret"] > placements.LIMITS[1]]
    verdict = "Met" if found["within_limits"] else f"**Missed** (seeds above the limit: {', '.join(over) or 'none'})"
    lines += [
        f"| all | | {len(rows)} | {sizes:,.0f} | {total} |",
        "",
        f"The design allows {placements.LIMITS[0]:.0%} in the median and {placements.LIMITS[1]:.0%} in the worst.",
        f"{verdict}.",
        f"All searches took {found['seconds']:.0f} s on a machine that others used too.",
        "",
    ]
    return "\n".join(lines)


def many_page(rows: list[dict[str, Any]], command: str) -> str:
    """The second part of the page."""
    lines = [
        "## Versions of many samples",
        "",
        f"`{command}`, {dt.datetime.now(dt.UTC):%Y-%m-%d}: problems with {MANY} times the samples. From 256 samples on",
        "the search judges each placement by one version and only the best five in full, as for usual recipes; here",
        "every placement is judged in full beside it.",
        "",
        "| seed | devices | placements | regret | search, s of CPU |",
        "|---|---|---|---|---|",
    ]
    row_form = "| {seed} | {devices} | {placements} | {regret:.1%} | {cpu_s:.1f} |"
    lines += [row_form.format(**row) for row in rows]
    return "\n".join([*lines, ""])


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    problems, *seeds = [int(word) for word in sys.argv[1:]] or [60]
    rows: list[dict[str, Any]] = []
    few = ""
    for seed in range(problems):  # the page has every finished problem
        rows += placements.run(1, first=seed)["problems"]
        few = page(placements.summary(rows), f"python {SCRIPT} {seed + 1}")
        PAGE.write_text(few, encoding="utf-8")
    many: list[dict[str, Any]] = []
    for count, seed in enumerate(seeds, 1):
        many += placements.run(1, first=seed, times=MANY)["problems"]
        command = " ".join(["python", SCRIPT, *map(str, (problems, *seeds[:count]))])
        PAGE.write_text("\n".join([few, many_page(many, command)]), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
