"""Results in words, for people; `--json` has all of it, for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from polyrhythm.observe.intervals import counted, measures_success

_RATE = {"rate", "low", "high", "successes", "episodes"}


def rate(result: Mapping[str, Any]) -> str:
    """A success rate with its interval: `73% [66, 79], 117 of 160 episodes`."""
    low, high = (f"{100 * result[key]:.0f}" for key in ("low", "high"))
    mean = f", mean return {result['mean_return']:.4g}" if "mean_return" in result else ""
    counts = f"{result['successes']} of {counted(result['episodes'], 'episode')}"
    return f"{100 * result['rate']:.0f}% [{low}, {high}], {counts}{mean}"


def earned(result: Mapping[str, Any]) -> str:
    """The same where the environment measures no success."""
    episodes = counted(result["episodes"], "episode")
    return f"mean return {result['mean_return']:.4g}, {episodes}, none of which reported success"


def lines(result: Mapping[str, Any]) -> str:
    """One `name: value` line for each entry, rates last and in words. A result that is itself a rate comes first.

    Where the environment measures no success the return leads.
    """
    rates = [value for value in (result, *result.values()) if _is_rate(value)]
    succeeded = measures_success((one["successes"] for one in rates), (one.get("mean_return") for one in rates))
    first = [_value(result, succeeded)] if _is_rate(result) else []
    said = _RATE | {"mean_return"} if first else set()
    rest = [
        f"{name}: {_value(value, succeeded)}"
        for name, value in sorted(result.items(), key=lambda item: _is_rate(item[1]))
        if name not in said
    ]
    return "\n".join(first + rest)


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, a line each, the values below each other."""
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in listed)


def samples(ledger: Mapping[str, Any]) -> str:
    """Where a ledger's samples went: the states that have some."""
    counts = {state: sum(count.values()) if isinstance(count, dict) else count for state, count in ledger.items()}
    return ", ".join(f"{count:,} {state.replace('_', ' ')}" for state, count in counts.items() if count)


def lag(summary: Mapping[str, Any]) -> str:
    """How far behind the trainer the samples were, in versions."""
    return f"mean {summary['mean']:.2f}, largest {summary['max']}"


def shares(parts: Mapping[str, float]) -> str:
    """`simulator 25%, trainer 54%`."""
    return ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f}%" for name, share in parts.items())


def table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Columns side by side, a line for each figure; a column that lacks one has a dash there.

    A figure that is itself a mapping becomes a line for each of its entries. Lists stand below, by column: they are
    wider than any column.
    """
    cells = {name: dict(_figures(own)) for name, own in columns.items()}
    figures = dict.fromkeys(figure for own in cells.values() for figure in own)
    rows = [["", *cells], *([figure, *(own.get(figure, "-") for own in cells.values())] for figure in figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([*aligned, "", *_below(columns)]).rstrip()


def records(listed: Sequence[Mapping[str, Any]]) -> str:
    """A line for each record, its figures under their names; one that a record lacks is a dash there."""
    cells = [dict(_figures(record)) for record in listed]
    names = list(dict.fromkeys(name for record in cells for name in record))
    rows = [names, *([record.get(name, "-") for name in names] for record in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _figures(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{name} ")
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
    """The result with its `tasks`, if it has any, as entries of their own: a line each."""
    return {**{name: value for name, value in result.items() if name != "tasks"}, **result.get("tasks", {})}


def _is_rate(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) >= _RATE


def _value(value: Any, succeeded: bool) -> str:
    if _is_rate(value):
        if succeeded or "mean_return" not in value:
            return rate(value)
        return earned(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(part, succeeded)}" for name, part in value.items())
    if isinstance(value, list) and value:
        return ", ".join(_value(part, succeeded) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
