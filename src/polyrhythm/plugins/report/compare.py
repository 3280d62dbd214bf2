"""Compare runs: those that differ only in their seed are aggregated, with 95% intervals over seeds.

Prints a table, and writes one page with curves over transitions and over time, and the settings that differ.
The interval is Student's over the seeds, where there are several, so it says how another seed would do; that of a
success rate is at least as wide as Wilson's of all episodes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyrhythm.errors import ConfigError
from polyrhythm.observe.run_folder import CONFIG_FILE, refuse_no_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_ = "folders of runs, or folders that hold runs, of which all are taken"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=help_)
    where = "page to write (default: comparison.html beside the first run; with --json none)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=where)
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.plugins.report.page import write_comparison
    from polyrhythm.plugins.report.read import read_run
    from polyrhythm.plugins.report.seeds import comparison

    runs = [read_run(folder) for folder in run_folders(arguments.runs)]
    found = comparison(runs, curves=False)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print(as_text(found))
    if arguments.out or not arguments.json:
        page = write_comparison(runs, arguments.out)
        if not arguments.json:
            print(f"\n{page}")
    return 0


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Folders of the runs that are named; a folder of runs is all of its runs.

    RunFolderError: one is not a run's. ConfigError: they are fewer than two.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if path.suffix == ".html":  # `compare runs/quickstart/*` also matches the page of an earlier call
            continue
        inner = [] if (path / CONFIG_FILE).is_file() else sorted(_inner(path))
        for folder in inner or [path]:
            refuse_no_run(folder)
            found.setdefault(folder.resolve(), folder)
    if len(found) < 2:
        named = ", ".join(map(str, found.values())) or ", ".join(map(str, paths))
        raise ConfigError(f"compare = {named}: one run is not a comparison; name two or more, or: polyrhythm report")
    return list(found.values())


def _inner(path: Path) -> Iterator[Path]:
    for depth in ("*", "*/*"):
        yield from (file.parent for file in path.glob(f"{depth}/{CONFIG_FILE}"))


def as_text(found: Mapping[str, Any]) -> str:
    """The comparison as tables for the terminal."""
    from polyrhythm.cli import show
    from polyrhythm.plugins.report.seed_sections import groups_table, notes, settings_table

    tables = [groups_table(found), settings_table(found)]
    texts = [show.records([dict(zip(head, row, strict=True)) for row in rows]) for head, rows in tables if rows]
    return "\n\n".join([*texts, *notes(found)])
