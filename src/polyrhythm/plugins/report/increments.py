"""Differences between two states of a page's data, so that a page that is open is sent only what has changed.

A change is {"at": [key…], "set": value}, {"at": [key…], "keep": n, "append": [value…]} (of a list, its first n values
and these) or {"at": [key…], "drop": true}; keys are names and indices. Invariant: apply(old, changes(old, new)) == new,
here and in live.js.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Change = dict[str, Any]
_SCALARS = (str, int, float, bool, type(None))


def changes(old: Any, new: Any) -> list[Change]:
    """The changes that turn `old` into `new`, both plain data with text keys."""
    return list(_changes(old, new, []))


def _changes(old: Any, new: Any, at: list[str | int]) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict) and old.get("id") == new.get("id"):
        yield from ({"at": [*at, key], "drop": True} for key in old if key not in new)
        for key, value in new.items():
            if key not in old:
                yield {"at": [*at, key], "set": value}
            else:
                yield from _changes(old[key], value, [*at, key])
    elif isinstance(old, list) and isinstance(new, list) and old and new:
        yield from _list_changes(old, new, at)
    elif type(old) is not type(new) or old != new:
        yield {"at": at, "set": new}


def _list_changes(old: Sequence[Any], new: Sequence[Any], at: list[str | int]) -> Iterator[Change]:
    """Those of a list: numbers and texts are kept as far as they are equal, other values one by one."""
    if all(isinstance(value, _SCALARS) for value in old):
        pairs = enumerate(zip(old, new, strict=False))
        kept = next((place for place, (a, b) in pairs if type(a) is not type(b) or a != b), min(len(old), len(new)))
    else:
        kept = min(len(old), len(new))
        for place in range(kept):
            yield from _changes(old[place], new[place], [*at, place])
    if kept < max(len(old), len(new)):
        yield {"at": at, "keep": kept, "append": list(new[kept:])}


def apply(data: Any, found: Sequence[Mapping[str, Any]]) -> Any:
    """The data after these changes, which may alter it in place."""
    whole: Any = [data]
    for change in found:
        keys = [0, *change["at"]]
        last, holder = keys.pop(), whole
        for key in keys:
            holder = holder[key]
        if "append" in change:
            holder[last][change["keep"] :] = change["append"]
        elif "drop" in change:
            del holder[last]
        else:
            holder[last] = change["set"]
    return whole[0]
