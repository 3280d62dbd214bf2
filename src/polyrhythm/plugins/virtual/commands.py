"""The command `simulate`, without what it needs to run, so that its help is quick; its docstring is its help."""

from __future__ import annotations

import argparse
from pathlib import Path


class Simulate:
    """Run the scheduler on a simulated cluster, in virtual time: throughput, utilisation, waiting, lag, ledger."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "file", type=Path, metavar="FILE", help="YAML description of the cluster and its workload, or a shipped one"
        )
        parser.add_argument("--trace", type=Path, metavar="PATH", help="write a timeline for ui.perfetto.dev")
        parser.add_argument("--json", action="store_true", help="print the summary as JSON")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        from polyrhythm.plugins.virtual.simulate import run

        return run(arguments)
