"""The items of one channel, without any waiting: what is there, in which order it goes, and whether there is room.

Invariant: an item that was put is there until it is taken, once; there are never more than `capacity`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from polyrhythm.workflow.carrier import Parcel
from polyrhythm.workflow.protocol import Key


@dataclass(frozen=True, slots=True)
class Entry:
    """An item as its order sees it. number: of items put into the channel before; key, weight: as it was put."""

    number: int
    key: Key
    weight: float


#: What items are sorted by; the smallest goes first, equals as they came.
Order = Callable[[Entry], Any]


def _by_arrival(entry: Entry) -> int:
    return entry.number


@dataclass(slots=True)
class Queue:
    """The items of a channel. order: what they are sorted by."""

    capacity: int
    order: Order = _by_arrival
    _items: list[tuple[Any, int, Entry, Parcel]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        return len(self._items) >= self.capacity

    @property
    def weight(self) -> float:
        """Of all items together."""
        return math.fsum(entry.weight for _, _, entry, _ in self._items)

    def count(self, key: Key) -> int:
        """Items of this key; of all for None."""
        return sum(key is None or entry.key == key for _, _, entry, _ in self._items)

    def put(self, parcel: Parcel, key: Key, weight: float) -> None:
        """Add an item; there must be room. What `order` raises is passed on, and nothing has changed."""
        assert not self.full, "a full queue"
        entry = Entry(next(self._numbers), key, weight)
        item = (self.order(entry), entry.number, entry, parcel)
        bisect.insort(self._items, item, key=lambda item: item[:2])

    def take(self, key: Key, items: int | None, weight: float | None, *, rest: bool) -> list[tuple[Parcel, Key, float]]:
        """The next items of this key: `items` of them, or the fewest that weigh `weight`, whichever are fewer; none if
        there are not enough. rest: then what there is."""
        places, heavy = [], 0.0
        for place, (_, _, entry, _) in enumerate(self._items):
            if key is None or entry.key == key:
                places.append(place)
                heavy += entry.weight
                if len(places) == items or (weight is not None and heavy >= weight):
                    break
        else:
            if not rest:
                return []
        taken = [(parcel, entry.key, entry.weight) for _, _, entry, parcel in map(self._items.__getitem__, places)]
        for place in reversed(places):
            del self._items[place]
        return taken
