"""The page of `bench algorithms`: `algorithms.md` and `algorithms_TASK.svg` in bench/results, or in --out FOLDER.

    polyrhythm bench algorithms --json > algorithms.json
    python bench/scripts/algorithms_table.py algorithms.json

Tasks may be measured apart (`--tasks`): give all the files, a later one counts.
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm_bench.cases.algorithms_page import write
from polyrhythm_bench.harness.from_files import main

#: Where the tables lie.
RESULTS = Path(__file__).parents[1] / "results"

if __name__ == "__main__":
    main(write, __doc__ or "", RESULTS)
