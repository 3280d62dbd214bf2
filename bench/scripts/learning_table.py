"""Writes the page of `bench learning`: `learning.md` and `learning_TASK.svg` in bench/results, or in --out FOLDER.

    polyrhythm bench learning --json > learning.json
    python bench/scripts/learning_table.py learning.json

Parts measured separately (`--tasks`) are given as several files; of a part in two files the later one counts.
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm_bench.cases.learning_page import write
from polyrhythm_bench.harness.from_files import main

#: Folder of the pages.
RESULTS = Path(__file__).parents[1] / "results"

if __name__ == "__main__":
    main(write, __doc__ or "", RESULTS)
