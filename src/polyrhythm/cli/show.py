"""Formats results as text for the terminal."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyrhythm.observe.intervals import at_in_words, deciding, rate_in_words
from polyrhythm.readable import counted, visible

if TYPE_CHECKING:
    from polyrhythm.conformance import Finding

_RATE = {"rate", "low", "high", "successes", "episodes"}


def result(found: Mapping[str, Any]) -> str:
    """A success rate with its interval: `73% [66, 79], 117 of 160 episodes, mean return 0.7`; without reported success
    the mean return alone. Episodes that failed are counted behind it."""
    mean, episodes = found.get("mean_return"), counted(found["episodes"], "episode")
    failed = f"; {counted(found['dropped'], 'more episode')} failed" if found.get("dropped") else ""
    if found["rate"] is None:
        earned = "" if mean is None else f"mean return {mean:.4g}, "
        return f"{earned}{episodes}{failed}; the environment does not report success"
    earned = "" if mean is None else f", mean return {mean:.4g}"
    return f"{rate_in_words(found)}, {found['successes']} of {episodes}{at_in_words(found)}{earned}{failed}"


def lines(found: Mapping[str, Any]) -> str:
    """One `name: value` line per entry, success rates last. A result that is itself a success rate is printed first."""
    first = [result(found)] if _is_rate(found) else []
    printed = _RATE | {"mean_return", "at", "dropped"} if first else set()
    rest = [
        f"{name}: {_value(value)}"
        for name, value in sorted(found.items(), key=lambda item: _is_rate(item[1]))
        if name not in printed
    ]
    return "\n".join(first + rest)


def columns(most: int) -> int:
    """Width of the terminal, between 60 and `most` columns."""
    return max(60, min(most, shutil.get_terminal_size((most, 24)).columns))


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """One line per name and value, values aligned."""
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return "\n".join(visible(f"{name.ljust(width)}  {value}") for name, value in listed)


def size_text(nbytes: int) -> str:
    """`7.02 GB`, `3.20 MB`, `0.5 kB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def samples(ledger: Mapping[str, Any]) -> str:
    """A ledger's sample counts by state, without empty states."""
    counts = {state: sum(count.values()) if isinstance(count, dict) else count for state, count in ledger.items()}
    return ", ".join(f"{count:,} {state.replace('_', ' ')}" for state, count in counts.items() if count)


def lag(summary: Mapping[str, Any]) -> str:
    return f"mean {summary['mean']:.2f}, largest {summary['max']}"


def shares(parts: Mapping[str, float]) -> str:
    """`simulator 25%, trainer 54%`."""
    return ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f}%" for name, share in parts.items())


def table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with one line per metric and a dash for a missing value.

    A metric that is a mapping has one line per entry. Lists are printed below the table, by column.
    """
    cells = {name: dict(_flat_metrics(own)) for name, own in columns.items()}
    names = dict.fromkeys(name for own in cells.values() for name in own)
    rows = [["", *cells], *([name, *(own.get(name, "-") for own in cells.values())] for name in names)]
    below = [
        f"{column}, {name}: {', '.join(map(_plain, value))}"
        for column, values in columns.items()
        for name, value in values.items()
        if isinstance(value, list)
    ]
    return "\n".join([*_grid(rows, right=True), "", *below]).rstrip()


def records(listed: Sequence[Mapping[str, Any]]) -> str:
    """A table with one line per record, one column per metric, and a dash for a missing value."""
    cells = [dict(_flat_metrics(record)) for record in listed]
    names = list(dict.fromkeys(name for record in cells for name in record))
    return "\n".join(_grid([names, *([record.get(name, "-") for name in names] for record in cells)]))


def _grid(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Lines of aligned columns; right: all but the first are aligned at their right end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = str.rjust if right else str.ljust
    return ["  ".join([row[0].ljust(widths[0]), *map(align, row[1:], widths[1:])]).rstrip() for row in rows]


def _flat_metrics(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat_metrics(value, f"{prefix}{name} ")
        elif not isinstance(value, list):
            yield prefix + name, _plain(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _value(value)


def flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """The result with its `suites` and `tasks`, if any, as top-level entries."""
    whole = {name: value for name, value in found.items() if name not in ("suites", "tasks")}
    return {**whole, **found.get("suites", {}), **found.get("tasks", {})}


def variants(found: Mapping[str, Any]) -> str:
    """A table of the result in the unchanged environment, in each variant, and by kind of variant."""
    cells = [("in distribution", result(found), "as in training")]
    cells += [(f"{one['kind']}: {name}", result(one), one["what"]) for name, one in found["variants"].items()]
    cells += [(f"{kind}, all", result(one), "") for kind, one in found.get("kinds", {}).items()]
    return "\n".join(_grid(cells))


def _is_rate(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) >= _RATE


def _value(value: Any) -> str:
    if _is_rate(value):
        return result(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(part)}" for name, part in value.items())
    if isinstance(value, list) and value:
        return ", ".join(_value(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


# ------------------------------------------------------------ the summary of a run

#: Maximum number of list entries that are named.
_NAMED = 3
_EVALUATIONS = {
    "before": "before",
    "after": "after",
    "before_sampled": "before, sampled",
    "after_sampled": "after, sampled",
    "swapped": "instructions swapped",
}


def run_lines(summary: Mapping[str, Any]) -> str:
    """The content of summary.json in aligned lines; phases that did not run are left out."""
    return aligned(_rows(summary))


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, label in _EVALUATIONS.items():
        if name in summary:
            yield label, result(summary[name])
    if best := summary.get("best"):
        chosen = f"version {best['version']}: {result(deciding(best))}"
        yield "best.pt", f"{chosen}; chosen by this result, which is therefore biased upward"
    yield from (("warning", sentence) for sentence in summary.get("warnings", ()))
    wall_s = summary["wall_s"]
    unit, by = ("min", 60.0) if wall_s["total"] >= 120 else ("s", 1.0)
    phases = (f"{name.replace('_', ' ')} {took / by:.1f}" for name, took in wall_s.items() if name != "total")
    yield "time", f"{wall_s['total'] / by:.1f} {unit}: {', '.join(phases)}"
    if "transitions_per_s" in summary:
        yield "throughput", f"{summary['transitions_per_s']:,.0f} transitions/s"
        yield "busy", shares(summary["utilisation"])
        if hosts := summary.get("hosts"):
            yield "hosts", "; ".join(_host(name, own) for name, own in hosts.items())
        yield "lag", lag(summary["lag"])
        if leased := {name: own for name, own in summary.get("stations", {}).items() if own.get("switches")}:
            told = (f"{name} {own['switches']:.0f} switches in {own['switch_s']:.1f} s" for name, own in leased.items())
            yield "leases", ", ".join(told)
        yield "samples", samples(summary["ledger"])
        stations = ", ".join(dict.fromkeys(fault["station"] for fault in summary["faults"]))
        yield "stations", f"{len(summary['faults'])} lost and replaced ({stations})" if stations else "none lost"
        if failed := summary.get("failed_samples"):
            yield "failed samples", ", ".join(f"{count} by {kind}" for kind, count in failed.items())
        if set_aside := summary.get("set_aside"):
            yield "set aside", _set_aside(set_aside)
        if dropped := summary.get("dropped_messages"):
            yield "dropped messages", ", ".join(f"{count} {kind}" for kind, count in dropped.items())


def _host(name: str, own: Mapping[str, Any]) -> str:
    return (
        f"{name} {100 * own['utilisation']:.0f}%, {counted(own['faults'], 'fault') if own['faults'] else 'no faults'}"
    )


def _set_aside(found: list[Mapping[str, Any]]) -> str:
    """`2: open-v3 with seed 7 (environment raised), …`."""
    named = [f"{one['task']} with seed {one['seed']} ({one['reason']})" for one in found[:_NAMED]]
    return f"{len(found)}: {', '.join(named)}{', …' if len(found) > _NAMED else ''}"


# ------------------------------------------------------------ findings of checks

_MARKS = {"ok": "✓", "note": "!", "missing": "?", "failed": "✗"}
_PLAIN_MARKS = {"ok": "+", "note": "!", "missing": "?", "failed": "x"}
_COLORS = {"ok": "\033[32m", "note": "\033[33m", "missing": "\033[33m", "failed": "\033[31m"}
_WIDTH = 110
_INDENT = 34


def finding_line(finding: Finding, *, color: bool = False, encoding: str | None = "utf-8") -> str:
    """`  ✗ act                          PR106: actions [2, 1, 4] …`, and below it the fix, if any."""
    try:
        "".join(_MARKS.values()).encode(encoding or "ascii")
        mark = _MARKS[finding.state]
    except (UnicodeEncodeError, LookupError):
        mark = _PLAIN_MARKS[finding.state]
    head = f"  {_COLORS[finding.state]}{mark}\033[0m" if color else f"  {mark}"
    code = f"{finding.code}: " if finding.code else ""
    text = [visible(code + finding.detail)] * bool(finding.detail) + [visible(f"fix: {finding.fix}")] * bool(
        finding.fix
    )
    lines = [part for one in text for part in textwrap.wrap(one, columns(_WIDTH) - _INDENT, break_long_words=False)]
    return (
        f"{head} {finding.name:{_INDENT - 5}} " + f"\n{'':{_INDENT}}".join(lines) if lines else f"{head} {finding.name}"
    )
