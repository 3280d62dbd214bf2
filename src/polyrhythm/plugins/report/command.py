"""Write the report of a run, or a comparison of several, as one self-contained HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run; several are compared")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: RUN/report.html; for several runs, comparison.html beside the first)",
    )


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.plugins.report.write import COMPARISON_FILE, write_report

    # `report runs/quickstart/*` also matches the page of an earlier call.
    runs = [path for path in arguments.runs if path.name != COMPARISON_FILE] or arguments.runs
    print(write_report(runs, arguments.out))
    return 0
