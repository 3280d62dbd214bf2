"""Run the scheduler on a simulated cluster, in virtual time: throughput, utilisation, waiting, lag, ledger."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from polyrhythm.cli import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML description of the cluster and its workload")
    parser.add_argument("--trace", type=Path, metavar="PATH", help="write a timeline for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.errors import ConfigError

    if not arguments.file.is_file():
        raise ConfigError(f"file {str(arguments.file)!r} is not there; name a YAML description of a cluster")
    from polyrhythm.clustersim.file import simulate_file

    summary = simulate_file(arguments.file, trace_path=arguments.trace)
    print(json.dumps(summary, indent=2) if arguments.json else show.lines(summary))
    return 0
