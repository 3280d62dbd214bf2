"""Measures two checkouts in turn with four benchmarks, and says how much slower this one is than the other.

    python bench/scripts/same_speed.py --against ../before [--only conductor roundtrip] [--turns 5]

Each turn is one call in each checkout, by this Python; which comes first alternates. A figure's ratio is that of the
two calls of a turn, new to old, of what it costs (for a rate its inverse): below 1 is faster. Printed are the median of
the ratios, all of them, and the medians of both. Nothing else may run on the machine. Exit status 1 if a median is
above --limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[2]
#: Words of each benchmark: the smallest that its figures are steady with.
BENCHMARKS: dict[str, str] = {
    "conductor": "--slots 64,1024 --generators 16",
    "ceiling": "--env-batches 256 --processes 2 --seconds 8 --repeats 1",
    "roundtrip": "--steps 2000 --repeats 3",
    "overlap": "--versions 6 --repeats 1",
}


def figures(name: str, result: dict[str, Any]) -> dict[str, float]:
    """What the benchmark's result says of the cost."""
    if name == "conductor":
        sizes = {f"CPU of a request, {each['slots']} slots (us)": each["mean_us"] for each in result["sizes"]}
        drains = {f"in a drain, {each['generators']} generators (us)": each["waiting_us"] for each in result["drain"]}
        return {**sizes, **drains}
    if name == "ceiling":
        (size,) = result["sizes"]
        return {
            "main's CPU of a chunk step (us)": size["us_per_chunk_step"],
            "all CPU of a transition (ms)": size["cpu_ms_per_transition"],
            "time of a chunk step (us)": 1e6 / size["chunk_steps_per_s"],
        }
    if name == "roundtrip":
        return {"median (us)": result["p50_us"], "beside a bare one": result["ratio"]}
    modes = {mode: result["modes"][mode] for mode in ("lockstep", "full_async")}
    times = {f"time of a transition, {mode} (ms)": 1e3 / each["transitions_per_s"] for mode, each in modes.items()}
    costs = {f"CPU of a transition, {mode} (ms)": each["cpu_ms_per_transition"] for mode, each in modes.items()}
    return {**times, **costs}


def measure(name: str, checkout: Path) -> dict[str, float]:
    """The benchmark's figures in a checkout. Raises CalledProcessError if it fails."""
    path = os.pathsep.join((str(checkout / "src"), str(checkout / "bench" / "src")))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "polyrhythm", "bench", name, *BENCHMARKS[name].split(), "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)  # noqa: S603
    return figures(name, json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="the checkout of before")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.02)
    arguments = parser.parse_args()
    checkouts, slower = {"old": arguments.against.resolve(), "new": HERE}, False
    for name in arguments.only:
        turns: list[dict[str, dict[str, float]]] = []
        for turn in range(arguments.turns):
            order = sorted(checkouts, reverse=turn % 2 == 0)
            turns.append({which: measure(name, checkouts[which]) for which in order})
        for figure in turns[0]["old"]:
            ratios = [turn["new"][figure] / turn["old"][figure] for turn in turns]
            old, new = (median(turn[which][figure] for turn in turns) for which in ("old", "new"))
            slower = slower or median(ratios) > arguments.limit
            every = " ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"{name}: {figure}: {median(ratios):.3f} ({every}), {old:.4g} -> {new:.4g}", flush=True)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
