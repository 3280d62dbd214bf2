"""Formats results as text for the terminal; `--json` prints all of them for programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from polyrhythm.observe.intervals import counted, measures_success, percent
from polyrhythm.readable import visible

_RATE = {"rate", "low", "high", "successes", "episodes"}


def rate(result: Mapping[str, Any]) -> str:
    """A success rate with its interval: `73% [66, 79], 117 of 160 episodes`."""
    low, high = (f"{100 * result[key]:.0f}" for key in ("low", "high"))
    mean = f", mean return {result['mean_return']:.4g}" if "mean_return" in result else ""
    counts = f"{result['successes']} of {counted(result['episodes'], 'episode')}"
    return f"{percent(result['rate'])}% [{low}, {high}], {counts}{mean}"


def mean_return(result: Mapping[str, Any]) -> str:
    """The mean return, for an environment that does not report success."""
    episodes = counted(result["episodes"], "episode")
    if result["rate"] is None:
        return f"mean return {result['mean_return']:.4g}, {episodes}; the environment does not report success"
    return f"mean return {result['mean_return']:.4g}, {episodes}, none of which reported success"


def lines(result: Mapping[str, Any], reported: bool | None = None) -> str:
    """One `name: value` line per entry, success rates last. If the result itself is a rate, it comes first.

    If the environment reports no success, mean returns replace the rates. reported: what its spec says of it.
    """
    rates = [value for value in (result, *result.values()) if _is_rate(value)]
    returns = (one.get("mean_return") for one in rates)
    succeeded = measures_success((one["successes"] for one in rates), returns, reported)
    first = [_value(result, succeeded)] if _is_rate(result) else []
    printed = _RATE | {"mean_return"} if first else set()
    rest = [
        f"{name}: {_value(value, succeeded)}"
        for name, value in sorted(result.items(), key=lambda item: _is_rate(item[1]))
        if name not in printed
    ]
    return "\n".join(first + rest)


def columns(most: int) -> int:
    """Width of a text: the terminal's, so that it breaks no word, but at most so many."""
    return max(60, min(most, shutil.get_terminal_size((most, 24)).columns))


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """One line per name and value, with the values aligned."""
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
    """Lag of the samples behind the trainer, in versions."""
    return f"mean {summary['mean']:.2f}, largest {summary['max']}"


def shares(parts: Mapping[str, float]) -> str:
    """`simulator 25%, trainer 54%`."""
    return ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f}%" for name, share in parts.items())


def table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with one line per metric and a dash for a missing value.

    A metric that is a mapping becomes one line per entry. Lists are printed below the table, by column.
    """
    cells = {name: dict(_flat_metrics(own)) for name, own in columns.items()}
    names = dict.fromkeys(name for own in cells.values() for name in own)
    rows = [["", *cells], *([name, *(own.get(name, "-") for own in cells.values())] for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([*aligned, "", *_below(columns)]).rstrip()


def records(listed: Sequence[Mapping[str, Any]]) -> str:
    """A table with one line per record, one column per metric, and a dash for a missing value."""
    cells = [dict(_flat_metrics(record)) for record in listed]
    names = list(dict.fromkeys(name for record in cells for name in record))
    rows = [names, *([record.get(name, "-") for name in names] for record in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _flat_metrics(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat_metrics(value, f"{prefix}{name} ")
        elif not isinstance(value, list):
            yield prefix + name, _plain(value)


def _below(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{column}, {name}: {', '.join(map(_plain, value))}"
        for column, values in columns.items()
        for name, value in values.items()
        if isinstance(value, list)
    ]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _value(value, succeeded=True)


def flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with each of its `suites` and `tasks`, if any, as a top-level entry."""
    whole = {name: value for name, value in result.items() if name not in ("suites", "tasks")}
    return {**whole, **result.get("suites", {}), **result.get("tasks", {})}


def variants(result: Mapping[str, Any]) -> str:
    """A table of the success in the usual environment, in each variant, and by kind of variant."""
    rows = [("in distribution", result, "as in training")]
    rows += [(f"{one['kind']}: {name}", one, one["what"]) for name, one in result["variants"].items()]
    rows += [(f"{kind}, all", one, "") for kind, one in result.get("kinds", {}).items()]
    found = [one for _, one, _ in rows]
    succeeded = result["rate"] is not None and measures_success(
        (one["successes"] for one in found), (one["mean_return"] for one in found), result["reports_success"]
    )
    cells = [(name, rate(one) if succeeded else mean_return(one), what) for name, one, what in rows]
    first, second = (max(len(row[place]) for row in cells) for place in (0, 1))
    return "\n".join(f"{name:{first}}  {value:{second}}  {what}".rstrip() for name, value, what in cells)


def _is_rate(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) >= _RATE


def _value(value: Any, succeeded: bool) -> str:
    if _is_rate(value):
        if value["rate"] is not None and (succeeded or "mean_return" not in value):
            return rate(value)
        return mean_return(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(part, succeeded)}" for name, part in value.items())
    if isinstance(value, list) and value:
        return ", ".join(_value(part, succeeded) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
