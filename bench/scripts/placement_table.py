"""Writes `placement.md`, the page of `bench placement`, to bench/results or --out FOLDER.

    polyrhythm bench placement --json > placement.json
    python bench/scripts/placement_table.py placement.json

Setups that were run apart (`--only`) may be given as several files.
"""

from __future__ import annotations

from pathlib import Path

from polyrhythm_bench.cases.placement_page import write
from polyrhythm_bench.harness.from_files import main

if __name__ == "__main__":
    main(write, __doc__ or "", Path(__file__).parents[1] / "results")
