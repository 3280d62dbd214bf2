"""The benchmark of objectives as a page with figures: `algorithms.md` and `algorithms_TASK.svg` beside this script.

    polyrhythm bench algorithms --json > algorithms.json
    python benchmarks/algorithms_table.py algorithms.json

Tasks may be measured apart (`--tasks`): give all the files, a later one counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from polyrhythm.benchmarks.algorithms_page import write


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE", help="what the benchmark printed, as JSON")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER")
    arguments = parser.parse_args()
    parts: dict[str, Any] = {}
    for file in arguments.results:
        parts |= json.loads(file.read_text(encoding="utf-8"))["parts"]
    for path in write(parts, arguments.out):
        print(path)


if __name__ == "__main__":
    main()
