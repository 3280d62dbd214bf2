"""Run a recipe while its stations are killed, stopped and slowed, and check that nothing is lost and all recover."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyrhythm.cli import show
from polyrhythm.cli.numbers import whole

_COLUMNS = ("at_s", "station", "kind", "slowed_s", "noticed_s", "joined_s", "recovered_s", "usual_pace", "cpu_share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [-h] --faults N [--seed S] [--json] recipe [section.key=value ...]"
    parser.add_argument("recipe", help="name of a recipe, or path of a YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="settings that differ")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--faults", type=int, metavar="N", help="how many: kill, stop and slow together")
    asked.add_argument("--kills", type=int, metavar="N", help=argparse.SUPPRESS)  # its name until --faults
    parser.add_argument("--seed", type=whole, default=0, metavar="S", help="which faults, and when (0)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.pipeline.validation.check import validate_run
    from polyrhythm_bench.chaos.run import chaos, chaos_config

    faults = arguments.faults
    if faults is None:
        print("--kills is now called --faults, and will be removed", file=sys.stderr)
        faults = arguments.kills
    checked = validate_run(chaos_config(arguments.recipe, faults, arguments.overrides))
    folder = Path(tempfile.mkdtemp(prefix="polyrhythm-chaos-"))
    try:
        result = chaos(checked, folder, faults, arguments.seed)
    except BaseException:
        print(f"its logs: {folder / 'logs'}", file=sys.stderr)
        raise
    print(json.dumps(result, indent=2) if arguments.json else table(result))
    if result["totals"]["violations"]:
        print(f"its logs: {folder / 'logs'}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def table(result: Mapping[str, Any]) -> str:
    """The faults, one a line, and what they come to."""
    rows: list[tuple[str, ...]] = [("", *_COLUMNS)]
    for number, fault in enumerate(result["faults"], 1):
        rows.append((str(number), *("-" if fault[name] is None else str(fault[name]) for name in _COLUMNS)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, "", show.aligned(_totals(result["totals"]))])


def _totals(totals: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    noticed, recovered = totals["noticed_s"], totals["recovered_s"]
    yield "faults", ", ".join(f"{own['faults']} {kind}" for kind, own in totals["by_kind"].items())
    yield "noticed", f"after {noticed['p50']} s (median), {noticed['max']} s at most"
    within = f"{totals['recovered_within_15_s']} of {totals['faults']} within 15 s"
    yield "recovered", f"after {recovered['p50']} s (median), {recovered['max']} s at most; {within}"
    yield "pace", f"{totals['pace']['first']:,} rows/s at first, {totals['pace']['last']:,} in the end"
    yield "samples", show.samples(totals["ledger"])
    yield "lag", show.lag(totals["lag"])
    yield "violations", "; ".join(totals["violations"]) or "none"
