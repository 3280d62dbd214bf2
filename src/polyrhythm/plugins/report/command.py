"""Write the report of a run as one self-contained HTML page."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.errors import ConfigError
from polyrhythm.files import trouble
from polyrhythm.pipeline.hooks import RunHooks

log = logging.getLogger(__name__)


class ReportHooks(RunHooks):
    """Writes the report of a complete run."""

    def finish(self, folder: Path) -> None:
        try:
            self.write(folder)
        except OSError as error:
            log.error("%s; the run is complete; retry: polyrhythm report %s", trouble(error) or error, folder)
        except Exception:
            log.exception("no report was written; the run is complete; retry: polyrhythm report %s", folder)

    def write(self, folder: Path, path: Path | None = None) -> Path:
        """See `page.write_report`."""
        from polyrhythm.plugins.report.page import write_report  # slow to import

        return write_report(folder, path)

    def compare(self, folders: Sequence[Path], path: Path | None = None) -> Path:
        """See `page.write_comparison`."""
        from polyrhythm.plugins.report.compare import run_folders
        from polyrhythm.plugins.report.page import write_comparison
        from polyrhythm.plugins.report.read import read_run

        return write_comparison([read_run(folder) for folder in run_folders(folders)], path)


HOOKS = ReportHooks()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="folder of a run, or of runs, of which the newest is taken"
    )
    parser.add_argument("more", type=Path, nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: RUN/report.html)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.more:
        runs = " ".join(shlex.quote(str(path)) for path in (arguments.run, *arguments.more))
        raise ConfigError(f"report: it is of one run; compare several: polyrhythm compare {runs}")
    print(HOOKS.write(arguments.run, arguments.out))
    return 0
