"""Writes `weights.md`, the page of `bench weights`, to bench/results or --out FOLDER.

polyrhythm bench weights --json > weights.json
python bench/scripts/weights_table.py weights.json
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm_bench.cases.weights_page import write
from polyrhythm_bench.harness.from_files import main_of_one

if __name__ == "__main__":
    main_of_one(write, __doc__ or "", Path(__file__).parents[1] / "results")
