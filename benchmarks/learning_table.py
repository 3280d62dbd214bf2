"""The learning benchmark as a page with figures: `learning.md` and `learning_TASK.svg` beside this script.

    polyrhythm bench learning --json > learning.json
    python benchmarks/learning_table.py learning.json

Parts may be measured apart (`--tasks`): give all the files, a later one counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from polyrhythm.benchmarks.learning_page import write


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
