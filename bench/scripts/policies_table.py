"""Writes `policies.md`, the page of `bench policies`, to bench/results or --out FOLDER.

polyrhythm bench policies --json > policies.json
python bench/scripts/policies_table.py policies.json
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm_bench.cases.policies_page import write
from polyrhythm_bench.harness.from_files import main_of_one

if __name__ == "__main__":
    main_of_one(write, __doc__ or "", Path(__file__).parents[1] / "results")
