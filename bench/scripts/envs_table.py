"""Writes `envs.md`, the page of `bench envs`, to bench/results or --out FOLDER.

polyrhythm bench envs --json > envs.json
python bench/scripts/envs_table.py envs.json
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm_bench.cases.envs_page import write
from polyrhythm_bench.harness.from_files import main_of_one

if __name__ == "__main__":
    main_of_one(write, __doc__ or "", Path(__file__).parents[1] / "results")
