"""Compares published throughputs with the simulated cluster (`bench papers`).

Stage times are printed or measured; one number of each workload is fitted to one marked row (`stages`), everything else
is predicted. Three rows of work beside other work are computed, not simulated. bench/results/papers-notes.md has the
limits of the model, bench/results/papers.md the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from polyrhythm_bench.papers import claims, one_gpu, roll, scaling, stages, turns, verl
from polyrhythm_bench.papers.published import PaperRow, published

#: Tables and figures of RL-VLA3, in the order of the result; and the groups of all rows.
TABLES = ("table 1", "table 2", "table 3", "table 4", "table 5", "figure 8")
GROUPS = (*TABLES, "figure 9", "ROLL Flash", "AcceRL", "verl", "H200")


def run(
    *,
    gpus: Sequence[int] = scaling.GPUS,
    rollouts: int = 4,
    chunk_steps: int = stages.CHUNK_STEPS,
    seed: int = 0,
    thorough: bool = True,
) -> dict[str, Any]:
    """Fit, predict and compare.

    gpus: of the scaling table; rollouts: of each setting of ROLL Flash's figure 9; chunk_steps: of the simulated
    episodes; thorough: with the rows and claims that take more than a second of CPU each. Returns rows: table, row,
    mode, fitted, published, predicted, error = predicted / published - 1, `again` where a row is printed a second time,
    and `computed` where it is not simulated; summary: errors by group and in total; claims: signs and rankings; times:
    the stage times of each workload, and which of them is fitted; batching: figure 8's grid; scaling: figure 7, and its
    first_bottleneck.
    """
    data = published()
    times = stages.fit(data)
    rows = [_row(row, times[row.setup.workload], chunk_steps, seed) for row in data.rows]
    rates = {row["row"]: row["predicted"] for row in rows}
    rows += [*turns.rows(data, rollouts=rollouts, seed=seed), *roll.rows(thorough), accerl(rates)]
    rows += [*verl.rows(verl.ROWS if thorough else verl.ROWS[:1]), *one_gpu.rows()]
    table = list(scaling.table(data, times["libero"], gpus, chunk_steps, seed))
    return {
        "rows": rows,
        "summary": summary(rows),
        "claims": [*claims.claims(data, times, rates), *(roll.table_1() if thorough else ())],
        "times": {
            row.setup.name.removesuffix(", 8 GPUs"): {
                **asdict(times[row.setup.workload]),
                "fitted": stages.unknown(row.setup.workload),
            }
            for row in data.rows
            if row.fitted
        },
        "batching": list(claims.batching(data, times["robocasa"])),
        "scaling": table,
        "first_bottleneck": first_bottleneck(table),
    }


def accerl(rates: Mapping[str, float]) -> dict[str, Any]:
    """AcceRL (arXiv 2603.18464): 2.4 times on LIBERO over synchronous training, with devices apart. Its abstract prints
    no sizes and no stage times; taken as RL-VLA3's LIBERO with OpenVLA-OFT on 8 GPUs. rates: by the row's name."""
    name = "LIBERO, OpenVLA-OFT, 8 GPUs: separate"
    predicted = rates[f"{name}, 4 batches, full"] / rates[f"{name}, 1 batch, baseline"]
    return {
        "table": "AcceRL",
        "row": "AcceRL, LIBERO: asynchronous over synchronous",
        "mode": "",
        "fitted": False,
        "published": 2.4,
        "predicted": predicted,
        "error": predicted / 2.4 - 1,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and largest |error| of the predicted rows of each group; of those of RL-VLA3, and of its fully
    asynchronous ones; of all simulated and of all computed ones. From RL-VLA3 on, rows printed twice count once."""
    predicted = [row for row in rows if not row["fitted"]]
    groups = {group: [row for row in predicted if row["table"] == group] for group in GROUPS}
    once = [row for row in predicted if not row.get("again")]
    groups["RL-VLA3"] = [row for row in once if row["table"] in TABLES]
    groups["RL-VLA3, full asynchrony"] = [row for row in groups["RL-VLA3"] if row["mode"] == "full"]
    groups["all simulated"] = [row for row in once if not row.get("computed")]
    groups["all computed"] = [row for row in once if row.get("computed")]
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


def _row(row: PaperRow, times: stages.Times, chunk_steps: int, seed: int) -> dict[str, Any]:
    predicted = stages.simulate(row, times, chunk_steps, seed).throughput
    again = {"again": True} if row.again else {}
    return {
        "table": row.table,
        "row": row.name,
        "mode": row.mode,
        "fitted": row.fitted,
        "published": row.published,
        "predicted": predicted,
        "error": predicted / row.published - 1,
        **again,
    }
