"""The items of one channel: contents, orders and capacity, without any waiting.

Invariant: an item stays until it is taken, once, in whatever order; there are never more than `capacity`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyrhythm.plugins.workflow.carrier import Parcel
from polyrhythm.plugins.workflow.protocol import Key


@dataclass(frozen=True, slots=True)
class Entry:
    """An item as an order function sees it. number: of items put into the channel before; key, weight: as in `put`."""

    number: int
    key: Key
    weight: float


#: Sort key of items: the smallest goes first, equal ones in order of arrival.
Order = Callable[[Entry], Any]
#: One order, the name of one, several by name, or None for arrival.
Orders = Order | str | Mapping[str, Order] | None
#: Orders that every channel has.
ORDERS: Mapping[str, Order] = {
    "arrival": lambda entry: entry.number,
    "lightest": lambda entry: entry.weight,
    "heaviest": lambda entry: -entry.weight,
}


def orders_of(order: Orders) -> dict[str, Order]:
    """A channel's orders by name; "" is the default. Accepts a function, the name of one of `ORDERS`, several functions
    by name (the first is the default), or None for arrival. ValueError: the name is unknown."""
    if isinstance(order, Mapping):
        if not order or not all(isinstance(name, str) and callable(own) for name, own in order.items()):
            raise ValueError(f"order = {order!r}: not functions of an Entry by name")
        return {**ORDERS, "": next(iter(order.values())), **order}
    if isinstance(order, str) and order not in ORDERS:
        raise ValueError(f"order = {order!r}: write {', '.join(ORDERS)}, or give a function of an Entry")
    return {**ORDERS, "": ORDERS[order or "arrival"] if order is None or isinstance(order, str) else order}


@dataclass(slots=True)
class _Item:
    """sort_keys: its position in each sorted list of the queue."""

    entry: Entry
    parcel: Parcel
    sort_keys: dict[str, Any]


@dataclass(slots=True)
class Queue:
    """The items of a channel. orders: from `orders_of`. A sorted list is kept for the default and
    every order used so far."""

    capacity: int
    orders: Mapping[str, Order] = field(default_factory=lambda: orders_of(None))
    _items: dict[int, _Item] = field(default_factory=dict)
    _sorted: dict[str, list[tuple[Any, int]]] = field(default_factory=lambda: {"": []})
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        return len(self._items) >= self.capacity

    @property
    def weight(self) -> float:
        return math.fsum(item.entry.weight for item in self._items.values())

    def count(self, key: Key) -> int:
        """Number of items of this key; of all for None."""
        return sum(key is None or item.entry.key == key for item in self._items.values())

    def put(self, parcel: Parcel, key: Key, weight: float) -> None:
        """Add an item; requires room. If an order function raises, the queue is unchanged."""
        assert not self.full, "a full queue"
        entry = Entry(next(self._numbers), key, weight)
        places = []
        for name, own in self._sorted.items():
            mark = (self.orders[name](entry), entry.number)
            places.append((own, bisect.bisect_left(own, mark), name, mark))
        for own, place, _, mark in places:
            own.insert(place, mark)
        self._items[entry.number] = _Item(entry, parcel, {name: mark[0] for _, _, name, mark in places})

    def take(
        self, key: Key, items: int | None, weight: float | None, *, rest: bool, order: str = ""
    ) -> list[tuple[Parcel, Key, float]]:
        """The next items of this key by `order`: `items` of them, or the fewest that weigh `weight`, whichever are
        fewer. None if there are not enough, unless `rest`: then all that remain."""
        numbers, heavy = list[int](), 0.0
        for _, number in self._list(order):
            entry = self._items[number].entry
            if key is None or entry.key == key:
                numbers.append(number)
                heavy += entry.weight
                if len(numbers) == items or (weight is not None and heavy >= weight):
                    break
        else:
            if not rest:
                return []
        return [self._remove(number) for number in numbers]

    def _remove(self, number: int) -> tuple[Parcel, Key, float]:
        item = self._items.pop(number)
        for name, sort_key in item.sort_keys.items():
            own = self._sorted[name]
            del own[bisect.bisect_left(own, (sort_key, number))]
        return item.parcel, item.entry.key, item.entry.weight

    def _list(self, order: str) -> list[tuple[Any, int]]:
        """Sort keys and numbers of all items by this order. If an order function raises, the queue is unchanged."""
        if order not in self._sorted:
            marks = sorted((self.orders[order](item.entry), number) for number, item in self._items.items())
            self._sorted[order] = marks
            for sort_key, number in marks:
                self._items[number].sort_keys[order] = sort_key
        return self._sorted[order]
