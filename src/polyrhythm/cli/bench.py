"""Measure a part of the system. `conductor`: events per second and CPU time per request, by number of slots."""

from __future__ import annotations

import argparse
import json

from polyrhythm.cli import show
from polyrhythm.cli.numbers import count

SLOTS = (16, 64, 256, 1024, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=["conductor"], metavar="NAME", help="what to measure: conductor")
    parser.add_argument("--slots", type=_counts, default=SLOTS, metavar="N,N", help="numbers of slots (16,64,…,4096)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.clustersim import bench_conductor

    result = bench_conductor.run(arguments.slots)
    print(json.dumps(result, indent=2) if arguments.json else show.lines(result))
    return 0


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))
