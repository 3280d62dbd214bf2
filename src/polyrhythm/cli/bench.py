"""Measure a part of the system, beside what it is held against.

conductor: CPU time per request, by number of slots. roundtrip: from an observation to its action through processes.
throughput: whole runs beside a plain loop, and the memory of sixteen simulators. weights: a model over the weights bus.
metaworld: the quickstart in lock-step, with asynchronous rollout, with asynchronous training, and with both: seconds of
wall clock per version, and what limits them (some ten minutes on two cores; needs the metaworld extra).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from polyrhythm.cli import show
from polyrhythm.cli.numbers import count

SLOTS = (16, 64, 256, 1024, 4096)
NAMES = ("conductor", "roundtrip", "throughput", "weights", "metaworld")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=NAMES, metavar="NAME", help=f"what to measure: {', '.join(NAMES)}")
    parser.add_argument("--slots", type=_counts, default=SLOTS, metavar="N,N", help="conductor: numbers of slots")
    parser.add_argument("--rows", type=_counts, default=(16, 256), metavar="N,N", help="throughput: numbers of rows")
    parser.add_argument("--steps", type=count, default=1000, metavar="N", help="roundtrip: round trips of a turn")
    parser.add_argument("--megabytes", type=count, default=500, metavar="N", help="weights: size of the model")
    parser.add_argument("--versions", type=count, default=6, metavar="N", help="metaworld: versions of a turn")
    parser.add_argument("--repeats", type=count, metavar="N", help="interleaved turns (5; metaworld: 3; not conductor)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    result = _measure(arguments, arguments.repeats or (3 if arguments.name == "metaworld" else 5))
    print(json.dumps(result, indent=2) if arguments.json else words(result))
    return 0


def words(result: dict[str, Any]) -> str:
    """The result for people: a table of its `modes`, if it has any, under a line for each of its other entries."""
    rest = show.lines({name: value for name, value in result.items() if name != "modes"})
    return f"{rest}\n\n{show.table(result['modes'])}" if "modes" in result else rest


def _measure(arguments: argparse.Namespace, repeats: int) -> dict[str, Any]:
    if arguments.name == "conductor":
        from polyrhythm.clustersim import bench_conductor

        return bench_conductor.run(arguments.slots)
    if arguments.name == "roundtrip":
        from polyrhythm.benchmarks import roundtrip

        return roundtrip.run(arguments.steps, repeats)
    if arguments.name == "weights":
        from polyrhythm.benchmarks import weights

        return weights.run(arguments.megabytes, repeats)
    if arguments.name == "metaworld":
        from polyrhythm.benchmarks import metaworld

        return metaworld.run(arguments.versions, repeats)
    from polyrhythm.benchmarks import throughput

    return throughput.run(arguments.rows, repeats=repeats)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))
