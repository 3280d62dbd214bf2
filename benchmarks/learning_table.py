"""The learning benchmark as a page with figures: `learning.md` and `learning_TASK.svg` beside this script.

    polyrhythm bench learning --json > learning.json
    python benchmarks/learning_table.py learning.json

Parts may be measured apart (`--tasks`): give all the files, a later one counts.
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm.benchmarks.from_files import main
from polyrhythm.benchmarks.learning_page import write

if __name__ == "__main__":
    main(write, __doc__ or "", Path(__file__).parent)
