"""Sharding: divides an env batch into slots and assigns their generators.

Invariant: the slots of an env batch are consecutive, not empty, and together cover its rows exactly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from polyrhythm.scheduler.records import EnvBatchInfo, SlotInfo
from polyrhythm.scheduler.settings import load_function


class EnvBatchShape(NamedTuple):
    """Argument of a user's strategy: an env batch, named `simulator.number`."""

    name: str
    rows: int


#: Instead of a generator's name: whichever is free.
ANY = "any"

#: A user's strategy: (env batch, generator names) → [(rows, generator name or "any")], slot by slot.
Strategy = Callable[[EnvBatchShape, Sequence[str]], Sequence[tuple[int, str | None]]]


class StrategyFailure(ValueError):
    """A user's strategy raised; the cause is chained."""


def shard(
    name: str, rows: int, strategy: str | Sequence[int], generators: Sequence[str], *, reset_rows: bool = True
) -> EnvBatchInfo:
    """Divide env batch `name` into slots `name/0`, `name/1`, …

    strategy: `whole`; `rows` (a slot for each); `even:n` (sizes differ by one at most, larger first); a list of sizes;
    or `module:function`. Raises ValueError with what, value and remedy.
    """
    shares = _shares(name, rows, strategy, generators)
    for size, generator in shares:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"sharding of {name}: a slot has {size!r} rows; give a whole number, 1 or more")
        if generator not in (None, ANY, *generators):
            names = ", ".join(generators)
            raise ValueError(f"sharding of {name}: there is no generator {generator!r}; there are {names}, and any")
    total = sum(size for size, _ in shares)
    if total != rows:
        raise ValueError(
            f"sharding of {name}: the slots have {total} rows together, the env batch has {rows}; make them equal"
        )
    slots, first = [], 0
    for index, (size, generator) in enumerate(shares):
        bound = None if generator == ANY else generator
        slots.append(SlotInfo(slot=f"{name}/{index}", first=first, rows=size, generator=bound))
        first += size
    return EnvBatchInfo(name=name, slots=tuple(slots), reset_rows=reset_rows)


def _shares(
    name: str, rows: int, strategy: str | Sequence[int], generators: Sequence[str]
) -> Sequence[tuple[int, str | None]]:
    if not isinstance(strategy, str):
        return [(size, None) for size in strategy]
    if strategy == "whole":
        return [(rows, None)]
    if strategy == "rows":
        return [(1, None)] * rows
    if strategy.startswith("even:"):
        count = int(strategy[5:]) if strategy[5:].isdigit() else 0
        if not 1 <= count <= rows:
            raise ValueError(
                f"sharding {strategy!r}: n must be a whole number from 1 to the {rows} rows of an env batch"
            )
        return [(rows // count + (index < rows % count), None) for index in range(count)]
    if strategy.partition(":")[2].isidentifier():
        function = cast(Strategy, load_function(strategy, "sharding"))
        try:
            result = function(EnvBatchShape(name, rows), generators)
        except Exception as error:
            raise StrategyFailure(
                f"sharding {strategy!r} raised {type(error).__name__}: {error}; fix it there"
            ) from error
        if not isinstance(result, Sequence) or not all(isinstance(one, tuple) and len(one) == 2 for one in result):
            raise ValueError(
                f"sharding {strategy!r} returned {result!r}; it must return a list of (rows, generator or 'any')"
            )
        return [(_as_whole(rows), generator) for rows, generator in result]
    raise ValueError(f"sharding {strategy!r} is unknown; use whole, rows, even:n, a list of sizes, or module:function")


def _as_whole(rows: Any) -> Any:
    """Whole numbers of other libraries as int; anything else as it is."""
    return operator.index(rows) if hasattr(rows, "__index__") and not isinstance(rows, bool) else rows
