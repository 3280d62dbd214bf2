"""The shared command line of scripts that write a page from a benchmark's JSON output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Writes the page and plots of these parts of results into a folder and returns the paths.
Write = Callable[[Mapping[str, Mapping[str, Any]], Path], list[Path]]


def main(write: Write, about: str, folder: Path) -> None:
    """Merge the parts of all files, later ones first, and write the page. folder: the default of --out."""
    arguments = _parse(about, folder, files="+")
    parts: dict[str, Any] = {}
    for file in arguments.results:
        parts |= json.loads(file.read_text(encoding="utf-8"))["parts"]
    _print(write(parts, arguments.out))


def main_of_one(write: Callable[[dict[str, Any], Path], list[Path]], about: str, folder: Path) -> None:
    """The same for one file, whose whole content is written."""
    arguments = _parse(about, folder, files=1)
    _print(write(json.loads(arguments.results[0].read_text(encoding="utf-8")), arguments.out))


def _parse(about: str, folder: Path, files: int | str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("results", type=Path, nargs=files, metavar="FILE", help="JSON output of the benchmark")
    parser.add_argument("--out", type=Path, default=folder, metavar="FOLDER")
    return parser.parse_args()


def _print(paths: list[Path]) -> None:
    for path in paths:
        print(path)  # noqa: T201 (a script's output)
