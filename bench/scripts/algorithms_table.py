"""Writes `algorithms.md` and `algorithms_TASK.svg`, the page of `bench algorithms`, to bench/results or --out FOLDER;
with --out FOLDER/NAME.md that page, and NAME_TASK.svg.

    polyrhythm bench algorithms --json > algorithms.json
    python bench/scripts/algorithms_table.py algorithms.json

Tasks measured separately (`--tasks`) are given as several files; of a task in two files the later one counts.
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm_bench.cases.algorithms_page import write
from polyrhythm_bench.harness.from_files import main

#: Folder of the pages.
RESULTS = Path(__file__).parents[1] / "results"

if __name__ == "__main__":
    main(write, __doc__ or "", RESULTS)
