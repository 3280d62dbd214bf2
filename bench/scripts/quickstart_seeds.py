"""Runs the quickstart with several seeds and writes bench/results/quickstart_seeds.md.

    python bench/scripts/quickstart_seeds.py --seeds 0 1 2 3 4       # runs them, some nine minutes each on two cores
    python bench/scripts/quickstart_seeds.py --runs RUN RUN ...      # uses finished runs

The summaries of the runs go to `quickstart_seeds.json` in the same folder. --recipe is a variant of the quickstart,
such as quickstart_pi0, whose page is `quickstart_pi0_seeds.md`. --out is the folder of the runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from polyrhythm_bench.harness.markdown import wrap_prose

#: Folder of the tables.
RESULTS = Path(__file__).parents[1] / "results"

_TEXT = """# {title} over seeds

By `python bench/scripts/quickstart_seeds.py{option}`, {date}; [{recipe}_seeds.json]({recipe}_seeds.json) has the
summary of each run. Seed N is `polyrhythm train {recipe} seed=N demonstrations.seed=N`, seed 0 the recipe as it is: the
whole job from demonstrations to the last evaluation. Success in percent on {episodes} held-out episodes, the same
before and after, with Wilson 95% intervals{swapped}. {note}

| {names} |
|{lines}|
{rows}

Greedy success rises by at least 25 points with separate intervals on {risen} of {count} seeds; the median rise is
{median:.0f} points.{followed} The longest run took {minutes:.1f} minutes.
"""
#: Of recipes that evaluate with the instructions of the tasks exchanged.
_SWAPPED = "; swapped: the same episodes with the instructions of the tasks exchanged"
_FOLLOWED = """ With swapped instructions success is at most half of `after`, its upper end below `after`'s lower one,
on {followed} of {count} seeds."""
_SHARES = {
    "greedy before": "before",
    "greedy after": "after",
    "sampled before": "before_sampled",
    "sampled after": "after_sampled",
    "swapped": "swapped",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="N")
    parser.add_argument("--recipe", default="quickstart", help="quickstart, or a variant of it")
    parser.add_argument("--runs", type=Path, nargs="+", metavar="RUN", help="folders of finished runs to use instead")
    parser.add_argument("--note", default="", help="a sentence about the measurement, for the page")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"), help="folder of new runs")
    arguments = parser.parse_args()
    runs = arguments.runs or [_run(arguments.recipe, seed, arguments.out / str(seed)) for seed in arguments.seeds]
    summaries = [_read(run) for run in runs]
    page = RESULTS / f"{arguments.recipe}_seeds.md"
    page.with_suffix(".json").write_text(json.dumps(summaries, indent=1) + "\n", encoding="utf-8")
    page.write_text(table(summaries, arguments.note, arguments.recipe), encoding="utf-8")
    sys.stdout.write(page.read_text(encoding="utf-8"))


def _run(recipe: str, seed: int, folder: Path) -> Path:
    words = [f"seed={seed}", f"demonstrations.seed={seed}"] if seed else []
    command = [sys.executable, "-m", "polyrhythm", "train", recipe, "--out", str(folder), *words]
    subprocess.run(command, check=False)  # noqa: S603 - the table names runs that failed
    return folder


def _read(run: Path) -> dict[str, Any]:
    file = run / "summary.json"
    summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    summary["seed"] = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["seed"]
    return summary


def table(summaries: list[dict[str, Any]], note: str, recipe: str = "quickstart") -> str:
    """The page: a row for each run, and the totals, in which an unfinished run counts as failed."""
    ended = [summary for summary in summaries if "after" in summary]
    rows = sorted(ended, key=lambda summary: summary["seed"])
    lost = [summary["seed"] for summary in summaries if "after" not in summary]
    note += f" Seeds {lost} did not finish." if lost else ""
    gains = [100 * (row["after"]["rate"] - row["before"]["rate"]) for row in rows]
    apart = [row["after"]["low"] > row["before"]["high"] for row in rows]
    shares = {name: key for name, key in _SHARES.items() if key in rows[0]}
    swaps = "swapped" in shares
    follows = [
        row["swapped"]["rate"] <= row["after"]["rate"] / 2 and row["swapped"]["high"] < row["after"]["low"]
        for row in rows
        if swaps
    ]
    own = recipe == "quickstart"
    names = ["seed", *shares, "gain", "lag mean, max", "transitions/s", "minutes"]
    page = _TEXT.format(
        recipe=recipe,
        title="The quickstart" if own else recipe,
        option="" if own else f" --recipe {recipe}",
        date=datetime.now(UTC).date().isoformat(),
        note=note.strip(),
        episodes=rows[0]["after"]["episodes"],
        swapped=_SWAPPED if swaps else "",
        names=" | ".join(names),
        lines="|".join(["---"] * len(names)),
        rows="\n".join(_row(row, shares.values(), gain) for row, gain in zip(rows, gains, strict=True)),
        risen=sum(gain >= 25 and is_apart for gain, is_apart in zip(gains, apart, strict=True)),
        count=len(summaries),
        median=statistics.median(gains),
        followed=_FOLLOWED.format(followed=sum(follows), count=len(summaries)) if swaps else "",
        minutes=max(row["wall_s"]["total"] for row in rows) / 60,
    )
    return wrap_prose(page)


def _row(summary: dict[str, Any], shares: Iterable[str], gain: float) -> str:
    cells = [str(summary["seed"]), *(_share(summary[key]) for key in shares), f"{gain:+.0f}"]
    cells += [f"{summary['lag']['mean']:.2f}, {summary['lag']['max']}", f"{summary['transitions_per_s']:.0f}"]
    cells.append(f"{summary['wall_s']['total'] / 60:.1f}")
    return f"| {' | '.join(cells)} |"


def _share(found: dict[str, Any]) -> str:
    return f"{100 * found['rate']:.0f} [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


if __name__ == "__main__":
    main()
