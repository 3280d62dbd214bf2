"""Writes the HTML report on a run, or the comparison of several, from their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write
from polyrhythm.observe.run_folder import REPORT_FILE, find_run
from polyrhythm.plugins.report.page import page
from polyrhythm.plugins.report.read import read_run

COMPARISON_FILE = "comparison.html"


def write_report(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page on these runs and return its path: the run's report.html, or comparison.html next to the first.

    RunFolderError: a folder is not a run's, or the page cannot be written.
    """
    folders = [find_run(folder) for folder in folders]
    runs = [read_run(folder) for folder in folders]
    try:
        text = page(runs)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        names = " or ".join(str(folder) for folder in folders)
        raise RunFolderError(
            f"a file in {names} has invalid content ({type(error).__name__}: {error}); if it was not edited, "
            "please report this with the folder"
        ) from error
    if path is None:
        first = folders[0].resolve()
        path = folders[0] / REPORT_FILE if len(runs) == 1 else first.parent / COMPARISON_FILE
    try:
        with atomic_write(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error.strerror}); name another with --out") from error
    return path
