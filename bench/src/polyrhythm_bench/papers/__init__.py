"""Compares published throughputs with the simulated cluster (`bench papers`).

Cost models are fitted to baselines and rollout-only rows; everything else is predicted. bench/results/papers-notes.md
has the limits of the model, bench/results/papers.md the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from polyrhythm_bench.papers import scaling, turns
from polyrhythm_bench.papers.fit import CHUNK_STEPS, ITERATIONS, Fit, fit
from polyrhythm_bench.papers.model import Costs, simulate
from polyrhythm_bench.papers.published import PaperData, PaperRow, published

#: Tables and figures of the papers, in the order of the result.
TABLES = ("table 1", "table 2", "table 3", "table 4", "table 5", "figure 8", "figure 9")
#: Most chunk steps of an episode in predictions.
LONGEST = 24
#: Latencies and numbers of env batches of figure 8.
WAITS_MS, BATCHES = (0.0, 100.0, 200.0, 300.0, 500.0, 1000.0), (2, 3)
#: Costs under which its threshold matters: a pass has a fixed part, and generators are neither idle nor saturated.
UNSATURATED, MORE_BATCHES = Costs(step=2.5, spread=0.11, generate=0.001, train=0.010, fixed=0.4), (2, 3, 6)


def run(
    tables: Sequence[str] = TABLES,
    *,
    gpus: Sequence[int] = scaling.GPUS,
    rollouts: int = 4,
    chunk_steps: int = CHUNK_STEPS,
    iterations: int = ITERATIONS,
    seed: int = 0,
    seeds: int = 5,
) -> dict[str, Any]:
    """Fit, predict and compare.

    tables: which of TABLES; gpus: of the scaling table (with table 4 only); rollouts: of each setting of figure 9;
    chunk_steps, iterations: of the fits; seeds: fits of each setup, with seeds from `seed` on, as a simulation's noise
    moves the optimum: a prediction is the median of theirs. Raises ValueError for an unknown table. Returns
    rows: table, row, mode, fitted, published, predicted, error = predicted / published - 1, and `again` where a row is
    printed a second time; summary: errors by table and over all; full_by_seed: median error of full asynchrony by each
    seed alone; fits: the costs of each setup in seconds, by the first seed; batching, unsaturated: figure 8's grid with
    the fitted costs and with UNSATURATED; scaling: figure 7, and its first_bottleneck, with the fitted costs.
    """
    unknown = [table for table in tables if table not in TABLES]
    if unknown:
        raise ValueError(f"table {unknown[0]!r} is not one of {', '.join(TABLES)}")
    data = published()
    chosen = [row for row in data.rows if row.table in tables]
    setups = list(dict.fromkeys(row.setup for row in chosen))
    every = {
        setup.key: [fit(data.fitted(setup), seed + number, chunk_steps, iterations) for number in range(seeds)]
        for setup in setups
    }
    rows = [
        _row(row, [_predict(row, found, seed + n) for n, found in enumerate(every[row.setup.key])]) for row in chosen
    ]
    fits = {key: found[0] for key, found in every.items()}
    if "figure 9" in tables:
        rows += turns.rows(data, rollouts=rollouts, seed=seed)
    result: dict[str, Any] = {"rows": rows, "summary": summary(rows), "full_by_seed": _full_by_seed(rows, seeds)}
    result["fits"] = {
        setup.name: {**asdict(fits[setup.key].costs), "misfit": fits[setup.key].misfit} for setup in setups
    }
    if "figure 8" in tables:
        result["batching"] = list(_batching(data, fits["robocasa"].costs, BATCHES, seed))
        result["unsaturated"] = list(_batching(data, UNSATURATED, MORE_BATCHES, seed))
    if "table 4" in tables:
        result["scaling"] = list(scaling.table(data, fits["libero"].costs, gpus, seed=seed))
        result["first_bottleneck"] = first_bottleneck(result["scaling"])
    return result


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and largest |error| of the predicted rows of each table; and, of the tables and figure 8 together, of all
    predicted rows, of the fully asynchronous ones, and of the fitted ones. There, rows printed twice count once."""
    predicted = [row for row in rows if not row["fitted"]]
    groups = {table: [row for row in predicted if row["table"] == table] for table in TABLES}
    ours = _each_once(rows)
    groups["all but figure 9"] = [row for row in ours if not row["fitted"]]
    groups["full asynchrony"] = [row for row in ours if row["mode"] == "full"]
    groups["fitted rows"] = [row for row in ours if row["fitted"]]
    return {
        name: {
            "rows": len(own),
            "median_error": median(abs(row["error"]) for row in own),
            "largest_error": max(abs(row["error"]) for row in own),
        }
        for name, own in groups.items()
        if own
    }


def first_bottleneck(table: Sequence[dict[str, Any]]) -> str:
    """The busiest station at the first size at which it differs from the smallest cluster's, fully asynchronous. For
    the trainer: its part that grew most, or at the smallest size the larger part."""
    full = [row for row in table if row["mode"] == "full"]
    first = full[0]
    other = next((row for row in full if row["busiest"] != first["busiest"]), first)
    name = other["busiest"]
    if name == "trainer":
        before = {} if other is first else first
        name = max(("training", "synchronisation"), key=lambda part: other[part] - before.get(part, 0.0))
    return f"{name}, from {other['gpus']} GPUs on"


def _predict(row: PaperRow, found: Fit, seed: int) -> float:
    """The row's transitions per second with the fitted costs."""
    return simulate(row, found.costs, min(LONGEST, row.setup.chunk_steps), seed).throughput


def _each_once(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the tables and of figure 8."""
    return [row for row in rows if row["table"] != "figure 9" and not row.get("again")]


def _full_by_seed(rows: Sequence[dict[str, Any]], seeds: int) -> list[float]:
    """Median |error| of full asynchrony by each seed alone."""
    full = [row for row in _each_once(rows) if row["mode"] == "full"]
    return [median(abs(row["by_seed"][n] / row["published"] - 1) for row in full) for n in range(seeds if full else 0)]


def _row(row: PaperRow, by_seed: list[float]) -> dict[str, Any]:
    predicted = median(by_seed)
    again = {"again": True} if row.again else {}
    return {
        "table": row.table,
        "row": row.name,
        "mode": row.mode,
        "fitted": row.fitted,
        "published": row.published,
        "predicted": predicted,
        "by_seed": by_seed,
        "error": predicted / row.published - 1,
        **again,
    }


def _batching(data: PaperData, costs: Costs, most: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    """Throughput of RoboCasa, hybrid, fully asynchronous, by most env batches of a pass and longest wait for them."""
    example = next(row for row in data.rows if row.table == "figure 8" and not row.wait_ms)
    steps = min(LONGEST, example.setup.chunk_steps)
    for batches in most:
        for wait_ms in WAITS_MS:
            row = replace(example, max_batches=batches, wait_ms=wait_ms)
            throughput = simulate(row, costs, steps, seed).throughput
            yield {"max_batches": batches, "wait_ms": wait_ms, "throughput": throughput}
