"""The benchmark of objectives as a page with figures: `algorithms.md` and `algorithms_TASK.svg` beside this script.

    polyrhythm bench algorithms --json > algorithms.json
    python benchmarks/algorithms_table.py algorithms.json

Tasks may be measured apart (`--tasks`): give all the files, a later one counts.
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm.benchmarks.algorithms_page import write
from polyrhythm.benchmarks.from_files import main

if __name__ == "__main__":
    main(write, __doc__ or "", Path(__file__).parent)
