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

`polyrhythm bench papers --json`, {date}; the page is `bench/scripts/papers_table.py`'s. Transitions per second (others:
as the rows say); an error is predicted / published - 1. A star marks a fitted row, all others are predicted: a workload
of RL-VLA3 has one, ROLL Flash's figures 7 and 10 one each, verl one; the H200 three, one for a chunk step and two for
what work takes longer beside other work. The H200's rows of work beside other work are arithmetic: they are not
simulated, and have a total of their own. The model, its limits and other forms that were tried:
[papers-notes.md](papers-notes.md#the-model-and-its-limits).
"""
#: Errors above this are listed first, with their reasons.
LARGE = 0.15
#: Medians above this, of more than so many rows, are named as missed.
FAR, MEDIAN_OF = 0.1, 2


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


def how(row: dict[str, Any]) -> str:
    return "computed" if row.get("computed") else "simulated"


def misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown list of the predicted rows that are further off than LARGE, the worst first."""
    found = [row for row in rows if not row["fitted"] and not row.get("again") and abs(row["error"]) > LARGE]
    found.sort(key=lambda row: -abs(row["error"]))
    return [
        f"- {row['row']}: {row['published']:g}, {how(row)} {row['predicted']:.4g} ({percent(row['error'])})"
        for row in found
    ]


def missed(result: dict[str, Any]) -> str:
    """What falls short: rows, claims, and the workloads whose median is further off than 10%."""
    wrong = "; ".join(each["claim"] for each in result["claims"] if not each["holds"])
    far = [
        f"{name} {100 * own['median_error']:.1f}%"
        for name, own in result["summary"].items()
        if own["rows"] > MEDIAN_OF and own["median_error"] > FAR
    ]
    return (
        f"**Missed:** {len(misses(result['rows']))} rows are further off than 15%, with reasons in the notes. These "
        f"claims do not hold: {wrong}. Medians above 10%: {', '.join(far)}."
    )


def claims(found: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [each["claim"], ", ".join(f"{value:.4g}" for value in each["simulated"]), "yes" if each["holds"] else "**no**"]
        for each in found
    ]
    return table(["the papers say", "simulated", "so"], rows)


def comparison(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One Markdown table for each group; errors of predicted rows in bold, fitted rows with a star."""
    for name in dict.fromkeys(row["table"] for row in rows):
        cells = []
        for row in (row for row in rows if row["table"] == name):
            error = f"{percent(row['error'])} \\*" if row["fitted"] else f"**{percent(row['error'])}**"
            own = f"{row['predicted']:.4g}" + " (computed)" * bool(row.get("computed"))
            cells.append([row["row"], f"{row['published']:g}", own, error])
        title = name[0].upper() + name[1:]
        yield from ("", f"## {title}", "", *table(["row", "published", "simulated", "error"], cells))


def times(found: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown table of the stage times; the fitted one in bold."""
    units = {"step": 1000.0, "contention": 1.0, "generate": 1000.0, "train": 1000.0}
    rows = [
        [
            name,
            *(
                f"**{scale * own[key]:.3g}**" if own["fitted"] == key else f"{scale * own[key]:.3g}"
                for key, scale in units.items()
            ),
        ]
        for name, own in found.items()
    ]
    return table(["workload", "step, ms a row", "contention", "generate, ms a row", "train, ms a row"], rows)


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
        missed(result),
        "",
        "## Further off than 15%",
        "",
        *misses(result["rows"]),
        "",
        "The reasons: [papers-notes.md](papers-notes.md#further-off-than-15).",
        "",
        "## Summary",
        "",
        *summary(result["summary"]),
        "",
        "## Signs and rankings",
        "",
        *claims(result["claims"]),
        *comparison(result["rows"]),
        "",
        "## Stage times",
        "",
        "Bold: fitted. The others are printed, measured or carried over.",
        "",
        *times(result["times"]),
        "",
        "## Figure 8: RoboCasa, hybrid, fully asynchronous, by latency threshold (simulated; it prints no numbers)",
        "",
        *batching(result["batching"]),
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
