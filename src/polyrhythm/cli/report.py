"""Write the report on a run, or on several side by side: one page, for a browser, that needs nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run; several are compared")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where it goes (default: RUN/report.html; of several, comparison.html beside the first)",
    )


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.observe.report import COMPARISON_FILE, write_report

    # `report runs/quickstart/*` finds the page that it wrote the last time.
    runs = [path for path in arguments.runs if path.name != COMPARISON_FILE] or arguments.runs
    print(write_report(runs, arguments.out))
    return 0
