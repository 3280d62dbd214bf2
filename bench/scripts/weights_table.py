"""Writes `weights.md`, the page of `bench weights`, to bench/results or --out FOLDER.

    polyrhythm bench weights --json > weights.json
    python bench/scripts/weights_table.py weights.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from polyrhythm_bench.cases.weights_page import write

RESULTS = Path(__file__).parents[1] / "results"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path, metavar="FILE", help="JSON output of the benchmark")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    given = parser.parse_args()
    for path in write(json.loads(given.result.read_text(encoding="utf-8")), given.out):
        print(path)
