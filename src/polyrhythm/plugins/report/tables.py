"""Makes the tables and tiles of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyrhythm.observe.intervals import deciding, rate_in_words
from polyrhythm.plugins.report import parts
from polyrhythm.plugins.report.parts import Part, table, text
from polyrhythm.plugins.report.read import Run
from polyrhythm.readable import counted

#: Labels of the summary's evaluation results.
RESULTS = {
    "before": "before, greedy",
    "after": "after, greedy",
    "before_sampled": "before, sampled",
    "after_sampled": "after, sampled",
    "swapped": "after, instructions swapped",
}
#: Tasks and seeds set aside that are listed.
_SET_ASIDE = 100
_LEDGER = ("started", "trained", "lent", "buffered", "scoring", "running", "reissuing", "rolled_back", "dropped")


def interval(result: Mapping[str, Any], *, counts: bool = True) -> str:
    """`73% [66, 79], 117 of 160`, with no-break spaces in the interval; a dash if no success was reported."""
    if result["rate"] is None:
        return "–"
    return f"{share(result)}, {result['successes']} of {_episodes(result)}" if counts else share(result)


def share(one: Mapping[str, Any]) -> str:
    """`73% [66, 79]`, with no-break spaces."""
    return rate_in_words(one).replace(" ", "\u00a0")


def results(runs: Sequence[Run]) -> list[Part]:
    """Evaluations: success with its interval, and mean return; one column per run."""
    found = [(words, [run.summary.get(name) for run in runs]) for name, words in RESULTS.items()]
    found = [(words, own) for words, own in found if any(own)]
    if not found:
        return []
    success = any(run.measures_success for run in runs)
    if len(runs) > 1:
        rows = [[words, *(_result(result, success=success) for result in own)] for words, own in found]
        return [table(["evaluation", *labels(runs)], rows, _caption(success=success))]
    head = ["evaluation", *(["success", "95% interval", "succeeded"] if success else []), "episodes", "mean return"]
    rows = [[words, *_cells(result, success=success)] for words, own in found for result in own if result]
    return [table(head, rows, _caption(success=success))]


def _caption(*, success: bool) -> str:
    what = "Success on held-out seeds with its Wilson 95% interval" if success else "Mean return on held-out seeds"
    return f"{what}; the same seeds before and after."


def _cells(result: Mapping[str, Any], *, success: bool) -> list[str]:
    rate = ["–"] * 3 if success else []
    if result["rate"] is not None:
        low, high = (f"{100 * result[key]:.0f}%" for key in ("low", "high"))
        rate = [f"{100 * result['rate']:.0f}%", f"{low} to {high}", str(result["successes"])]
    return [*rate, _episodes(result), f"{result['mean_return']:.4g}"]


def _episodes(result: Mapping[str, Any]) -> str:
    """`160`, or `158 (2 dropped)`: episodes that count, and episodes that failed."""
    dropped = f" ({result['dropped']} dropped)" if result.get("dropped") else ""
    return f"{result['episodes']}{dropped}"


def _result(result: Mapping[str, Any] | None, *, success: bool) -> str:
    if result is None:
        return "–"
    if success and result["rate"] is not None:
        return interval(result)
    return f"{result['mean_return']:.4g} over {counted(result['episodes'], 'episode')}"


def labels(runs: Sequence[Run]) -> list[str]:
    return [run.label for run in runs] if len(runs) > 1 else ["result"]


def by_task(run: Run) -> list[Part]:
    """Success by task, if several tasks report it."""
    if not run.measures_success:
        return []
    names = [name for name in RESULTS if "tasks" in (run.summary.get(name) or {})]
    tasks = list(dict.fromkeys(task for name in names for task in run.summary[name]["tasks"]))
    rows = [
        [
            task,
            *(interval(own, counts=False) if (own := run.summary[name]["tasks"].get(task)) else "–" for name in names),
        ]
        for task in tasks
    ]
    return [table(["task", *(RESULTS[name] for name in names)], rows, "Success by task.")] if rows else []


def by_samples(run: Run) -> list[Part]:
    """mean@n and pass@k of evaluations with several samples of each initial state."""
    found = {name: run.summary[name]["at"] for name in RESULTS if "at" in (run.summary.get(name) or {})}
    rows = [
        [name, *(share(own[name]) if name in own else "–" for own in found.values())]
        for name in dict.fromkeys(name for own in found.values() for name in own)
    ]
    caption = "Success in the mean of n samples of an initial state, and in at least one of k, with 95% intervals."
    return [table(["samples", *(RESULTS[name] for name in found)], rows, caption)] if rows else []


def by_metric(run: Run) -> list[Part]:
    """Means of the environment's own metrics in the evaluations, if it has any."""
    found = {name: run.summary[name]["metrics"] for name in RESULTS if "metrics" in (run.summary.get(name) or {})}
    metrics = list(dict.fromkeys(metric for own in found.values() for metric in own))
    rows = [[metric, *(_mean(own.get(metric)) for own in found.values())] for metric in metrics]
    head = ["metric", *(RESULTS[name] for name in found)]
    return [table(head, rows, "Means of the environment's own metrics.")] if rows else []


def _mean(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def ledger(runs: Sequence[Run]) -> list[Part]:
    """Counts of samples by final state."""
    ledgers = [run.summary.get("ledger") for run in runs]
    if not any(ledgers):
        return []
    states = [state for state in _LEDGER if state != "scoring" or any(own and own.get(state) for own in ledgers)]
    rows = [[state.replace("_", " "), *(_count(own, state) for own in ledgers)] for state in states]
    caption = "Where every sample went: those that were started are the sum of all the others."
    return [table(["samples", *(labels(runs) if len(runs) > 1 else ["count"])], rows, caption)]


def _count(own: Mapping[str, Any] | None, state: str) -> str:
    if own is None:
        return "–"
    count = own.get(state, 0) if state == "scoring" else own[state]
    if not isinstance(count, dict):
        return f"{count:,}"
    reasons = ", ".join(f"{reason} {number}" for reason, number in count.items())
    return f"{sum(count.values()):,}{f' ({reasons})' if reasons else ''}"


def faults(run: Run) -> list[Part]:
    """Stations that were lost and replaced."""
    if "faults" not in run.summary:
        return []
    if not run.faults:
        return [text("No station was lost.")]
    several = any("host" in fault for fault in run.faults)
    rows = [
        [fault["station"], *([fault.get("host", "–")] if several else []), fault["reason"], f"{fault['transitions']:,}"]
        for fault in run.faults
    ]
    head = ["station", *(["on host"] if several else []), "it …", "after transitions"]
    return [table(head, rows, "Stations that were lost and replaced.")]


def set_aside(run: Run) -> list[Part]:
    """The first tasks and seeds whose episodes kept failing or are refused."""
    found = run.summary.get("set_aside", [])
    rows = [[one["task"], str(one["seed"]), one["reason"]] for one in found[:_SET_ASIDE]]
    caption = (
        "Tasks and seeds whose episodes kept failing (rollout.quarantine_after) or are refused by the environment "
        f"({len(found)} in all); they were not started again."
    )
    return [table(["task", "seed", "last failure"], rows, caption)] if rows else []


def weights(run: Run) -> list[Part]:
    """Means of publishing, taking and applying a version's weights, by station and transport."""
    rows = [
        [station, kind, f"{one['versions']:,}", f"{one['mb']:.3g}", f"{one['ms']:.3g}", f"{one['gb_per_s']:.2g}"]
        for station, kinds in run.summary.get("weights", {}).items()
        for kind, one in kinds.items()
    ]
    caption = (
        "Weights: published by the trainer, taken by generators over a way (reference, host, ipc, peer) and applied; "
        "a generator serves nothing while it applies, which on the CPU is when it takes them. Means of a version."
    )
    return [table(["station", "what", "versions", "MB", "ms", "GB/s"], rows, caption)] if rows else []


def changes(run: Run) -> list[Part]:
    """Settings that were changed when the run was resumed."""
    rows = [
        [change.setting, str(change.before), str(change.after), f"{change.update:,}", change.time]
        for change in run.changes
    ]
    caption = "The run was resumed with other settings, which hold from the given update on."
    return [table(["setting", "before", "from then on", "from update", "when"], rows, caption)] if rows else []


def tiles(run: Run) -> list[Part]:
    """The key numbers of the run."""
    summary = run.summary
    found: list[tuple[str, str, str]] = []
    for name, words in (("before", "before"), ("after", "after"), ("swapped", "swapped")):
        if name in summary:
            found.append(_tile(words, summary[name]))
    if "best" in summary:
        _, value, unit = _tile("", deciding(summary["best"]))
        found.append((f"best.pt, version {summary['best']['version']}", value, f"{unit}; chosen by it: biased upward"))
    if "transitions_per_s" in summary:
        found.append(("throughput", f"{summary['transitions_per_s']:,.0f}", "transitions/s"))
    if "lag" in summary:
        found.append(("lag", f"{summary['lag']['mean']:.2f}", f"largest {summary['lag']['max']}"))
    if "faults" in summary:
        found.append(("faults", str(len(run.faults)), "stations replaced"))
    if run.finished and (wall := summary.get("wall_s")):  # before, that of the phases that have ended
        total = wall.get("total", sum(wall.values()))
        found.append(("wall time", f"{total / 60:.1f}", "minutes"))
    return [parts.tiles(found)] if found else []


def _tile(words: str, result: Mapping[str, Any]) -> tuple[str, str, str]:
    if result["rate"] is not None:
        return (
            f"success {words}",
            f"{100 * result['rate']:.0f}%",
            f"[{100 * result['low']:.0f}, {100 * result['high']:.0f}], {result['successes']} of {result['episodes']}",
        )
    return f"return {words}", f"{result['mean_return']:.4g}", counted(result["episodes"], "episode")
