"""Write the report of a run, or a comparison of several, as one self-contained HTML page."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.files import trouble
from polyrhythm.pipeline.hooks import RunHooks

log = logging.getLogger(__name__)


class ReportHooks(RunHooks):
    """Writes the report of a complete run."""

    def finish(self, folder: Path) -> None:
        try:
            self.write([folder])
        except OSError as error:
            log.error("%s; the run is complete; retry: polyrhythm report %s", trouble(error) or error, folder)
        except Exception:
            log.exception("no report was written; the run is complete; retry: polyrhythm report %s", folder)

    def write(self, folders: Sequence[Path], path: Path | None = None) -> Path:
        """See `page.write_report`."""
        from polyrhythm.plugins.report.page import write_report  # slow to import

        return write_report(folders, path)


HOOKS = ReportHooks()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run; several are compared")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: RUN/report.html; for several runs, comparison.html beside the first)",
    )


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.plugins.report.page import COMPARISON_FILE, write_report

    # `report runs/quickstart/*` also matches the page of an earlier call.
    runs = [path for path in arguments.runs if path.name != COMPARISON_FILE] or arguments.runs
    print(write_report(runs, arguments.out))
    return 0
