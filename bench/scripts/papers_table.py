"""Writes the page bench/results/papers.md from the result of `polyrhythm bench papers --json`.

polyrhythm bench papers --json > papers.json
python bench/scripts/papers_table.py papers.json [--out bench/results/papers.md]
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyrhythm_bench.harness.markdown import wrap_prose

#: Folder of the tables.
RESULTS = Path(__file__).parents[1] / "results"

INTRODUCTION = """\
# Published throughputs and the simulated cluster

`polyrhythm bench papers --json`, {date}; the page is `bench/scripts/papers_table.py`'s. Transitions per second
(figure 9: as the rows say); an error is predicted / published - 1. Cost models see the fitted rows alone. The model,
its limits and other forms that were tried: [papers-notes.md](papers-notes.md#the-model-and-its-limits).
"""
ASSUMED = """\
The same cluster where a pass takes 0.4 s and 1 ms a row, a chunk step 2.5 s and training 10 ms a transition (assumed,
not fitted):"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def percent(value: float) -> str:
    return f"{100 * value:+.1f}%"


def summary(found: dict[str, dict[str, float]]) -> list[str]:
    rows = [
        [name, f"{own['rows']:.0f}", f"{100 * own['median_error']:.1f}%", f"{100 * own['largest_error']:.1f}%"]
        for name, own in found.items()
    ]
    return table(["", "rows", "median of the amount of the error", "largest"], rows)


def comparison(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One Markdown table for each of the papers' tables; errors of predicted rows in bold."""
    for name in dict.fromkeys(row["table"] for row in rows):
        cells = []
        for row in (row for row in rows if row["table"] == name):
            mark = "" if row["fitted"] else "**"
            error = f"{mark}{percent(row['error'])}{mark}"
            cells.append([row["row"], f"{row['published']:g}", f"{row['predicted']:.4g}", error])
        yield from ("", f"## {name.capitalize()}", "", *table(["row", "published", "simulated", "error"], cells))


def fits(found: dict[str, dict[str, float]]) -> list[str]:
    """Markdown table of the fitted costs; misfit: the sum of squared residuals."""
    rows = [
        [
            name,
            f"{own['step']:.3g} s",
            f"{own['spread']:.2f}",
            f"{1000 * own['generate']:.3g} ms",
            f"{1000 * own['train']:.3g} ms",
            f"{own['misfit']:.1f}",
        ]
        for name, own in found.items()
    ]
    return table(["setup", "step", "its spread", "generate, a row", "train, a transition", "misfit"], rows)


def batching(found: Sequence[dict[str, float]]) -> list[str]:
    waits = list(dict.fromkeys(each["wait_ms"] for each in found))
    rows = [
        [f"{batches:g}", *(f"{each['throughput']:.0f}" for each in found if each["max_batches"] == batches)]
        for batches in dict.fromkeys(each["max_batches"] for each in found)
    ]
    return table(["most env batches of a pass", *(f"{wait:g} ms" for wait in waits)], rows)


def scaling(found: Sequence[dict[str, Any]]) -> list[str]:
    shares = ("simulation", "generation", "training", "synchronisation", "publication", "devices")
    rows = [
        [
            str(each["gpus"]),
            each["mode"],
            f"{each['throughput']:.0f}",
            f"{each['efficiency']:.2f}",
            *(f"{each[share]:.2f}" for share in shares),
            each["busiest"],
        ]
        for each in found
    ]
    return table(["GPUs", "mode", "transitions/s", "efficiency", *shares, "busiest"], rows)


def page(result: dict[str, Any]) -> str:
    lines = [
        INTRODUCTION.format(date=dt.datetime.now(tz=dt.UTC).date()),
        *summary(result["summary"]),
        *comparison(result["rows"]),
        "",
        "## Costs, as fitted",
        "",
        *fits(result["fits"]),
        "",
        "## Figure 8: RoboCasa, hybrid, fully asynchronous, by latency threshold (simulated; it prints no numbers)",
        "",
        *batching(result["batching"]),
        "",
        ASSUMED,
        "",
        *batching(result["unsaturated"]),
        "",
        "## Figure 7: LIBERO + GR00T N1.5 from 8 to 256 GPUs (simulated; it prints no numbers)",
        "",
        "Shares of their time that the stations (the devices) were at work; the trainer trains and synchronises.",
        "",
        *scaling(result["scaling"]),
        "",
        f"First bottleneck, fully asynchronous: {result['first_bottleneck']}.",
    ]
    return wrap_prose("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="output of `polyrhythm bench papers --json`")
    parser.add_argument("--out", type=Path, default=RESULTS / "papers.md")
    arguments = parser.parse_args()
    text = page(json.loads(arguments.result.read_text(encoding="utf-8")))
    arguments.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
