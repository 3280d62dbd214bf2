"""Run a recipe while its stations are killed, stopped and slowed, and check that nothing is lost and all recover.

With --nodes 3 it runs on a Ray cluster of three nodes of this machine, of which each has a network and a memory of its
own; then two of five faults are of nodes: partition takes a node's link down for 2 to 20 s; loss kills all that is on
it, and a new node comes 5 s later. That needs root. With --gpus-per-node 2 each node has two simulated devices, over
which the recipe's `placement` spreads stations and trainer ranks; ranks are lost with their nodes, but for the first,
whose node the run needs.

Of a trainer of several ranks any rank is hit. kill is SIGKILL. stop is SIGSTOP for good, detected by the missing
heartbeat. slow is SIGSTOP, then SIGCONT before the heartbeat's deadline. Exit status 1 if a guarantee was broken.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from polyrhythm.cli import show
from polyrhythm.cli.arguments import whole
from polyrhythm.errors import ConfigError

#: CPUs of each node of --nodes.
_CPUS = 2
#: Columns of the table with their descriptions.
_COLUMNS = {
    "at_s": "seconds from the start of the run to the fault",
    "station": "which station it hit, or which rank of the trainer; or which node, and the stations there",
    "kind": "kill, stop or slow; of a node: partition or loss",
    "slowed_s": "seconds that a slowed station stood still; until a node was there again",
    "noticed_s": "seconds from the fault until its loss was noticed",
    "joined_s": "seconds from the fault until its successor was ready; of a node: until all stations were",
    "recovered_s": "seconds from the fault until the throughput of the last 2 s was 0.9 of the usual one",
    "usual_pace": "usual throughput before the fault, chunk steps/s",
    "cpu_share": "fraction of its usual CPU that other processes left to the run at recovery; lowers what is expected",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [-h] --faults N [--seed S] [--nodes K [--gpus-per-node G]] [--json] recipe [section.key=value ...]"
    )
    parser.add_argument("recipe", help="name of a recipe, or path of a YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="settings that differ")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--faults", type=int, metavar="N", help="number of faults; a third of each kind")
    asked.add_argument("--kills", type=int, metavar="N", help=argparse.SUPPRESS)  # its name until --faults
    parser.add_argument("--seed", type=whole, default=0, metavar="S", help="which faults, and when (0)")
    parser.add_argument(
        "--nodes", type=whole, default=0, metavar="K", help="on a Ray cluster of K nodes, which fail too"
    )
    parser.add_argument(
        "--gpus-per-node", type=whole, default=0, metavar="G", help="simulated devices of each node of --nodes"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.pipeline.validation.check import validate_run
    from polyrhythm.plugins.cluster.ray.reach import check_ray_installed
    from polyrhythm_bench.chaos.run import chaos, chaos_config

    faults = arguments.faults
    if faults is None:
        print("--kills is now called --faults, and will be removed", file=sys.stderr)
        faults = arguments.kills
    if arguments.gpus_per_node and not arguments.nodes:
        raise ConfigError(f"--gpus-per-node = {arguments.gpus_per_node}: there are no nodes; add --nodes K")
    with ExitStack() as undo:
        nodes = None
        if arguments.nodes:
            check_ray_installed()
            from polyrhythm_bench.chaos.nodes import RayNodes  # ray

            nodes = RayNodes(arguments.nodes, _CPUS, arguments.gpus_per_node)
            undo.callback(nodes.close)
        checked = validate_run(chaos_config(arguments.recipe, faults, arguments.overrides, nodes))
        folder = Path(tempfile.mkdtemp(prefix="polyrhythm-chaos-"))
        try:
            result = chaos(checked, folder, faults, arguments.seed, nodes=nodes)
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
    """The faults, one a line; descriptions of the columns; and totals."""
    rows: list[tuple[str, ...]] = [("", *_COLUMNS)]
    for number, fault in enumerate(result["faults"], 1):
        rows.append((str(number), *("-" if fault[name] is None else str(fault[name]) for name in _COLUMNS)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, "", show.aligned(_COLUMNS.items()), "", show.aligned(_totals(result["totals"]))])


def _totals(totals: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    noticed, recovered = totals["noticed_s"], totals["recovered_s"]
    yield "faults", f"{totals['faults']}: " + ", ".join(f"{own['faults']} {k}" for k, own in totals["by_kind"].items())
    yield "noticed", f"after {noticed['p50']} s (median), {noticed['max']} s at most"
    within = f"{totals['recovered_in_time']} of {totals['faults']} in time"
    yield "recovered", f"after {recovered['p50']} s (median), {recovered['max']} s at most; {within}"
    yield "throughput", f"{totals['pace']['first']:,} chunk steps/s at first, {totals['pace']['last']:,} in the end"
    yield "samples", show.samples(totals["ledger"])
    yield "lag", show.lag(totals["lag"])
    yield "violations", "; ".join(totals["violations"]) or "none"
