"""All channels of a workflow and the requests that wait at them, decided without I/O; the caller passes the time.

    ask     a request is answered at once, or waits until another request or its deadline answers it
    expire  requests past their deadline are answered with an error
    end     all waiting and later requests are answered with the reason for the workflow's end

Invariants: a request is answered once. An item is given once, to a consumer that asked for it; a channel never holds
more than its capacity. Every waiting request has a deadline. Of several waiting consumers, the one with the least
weight received so far is served first.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyrhythm.plugins.workflow.protocol import (
    LONGEST_KEY,
    Answer,
    Close,
    Denied,
    Done,
    Get,
    Given,
    Key,
    Parcel,
    Put,
    Request,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """An item as an order function sees it. number: of items put into the channel before; key, weight: as in `put`."""

    number: int
    key: Key
    weight: float


#: Puts and gets of a channel by which it is known who feeds whom.
TRACED = 1000
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


#: Sender and number of a request.
Asker = tuple[str, int]
Answers = list[tuple[Asker, Answer]]
#: Items between two workers that the receiver has not taken yet.
SEND_AHEAD = 64
#: Maximum number of other waits listed in a timeout's message.
_LISTED = 6
#: Characters of an error of the user's order, and of a channel's name that is unknown.
_ERROR_CHARS, _NAME_CHARS = 1000, 200


@dataclass(slots=True)
class _Wait:
    asker: Asker
    request: Put | Get
    deadline: float


@dataclass(slots=True)
class _Channel:
    """producers: number of producers that have not closed it; putting, getting: waiting requests in order of arrival.
    given: weight received, by consumer; traced: puts and gets in `Exchange.traffic`."""

    name: str
    queue: Queue
    producers: int
    putting: deque[_Wait] = field(default_factory=deque)
    getting: list[_Wait] = field(default_factory=list)
    given: Counter[str] = field(default_factory=Counter)
    traced: Counter[bool] = field(default_factory=Counter)

    @property
    def closed(self) -> bool:
        return self.producers <= 0


class Exchange:
    """traffic: who has put into, and who has asked for items of, each channel, by its first `TRACED` of each; also
    direct ones, `sender>receiver`."""

    def __init__(self) -> None:
        self.traffic: dict[str, tuple[set[str], set[str]]] = {}
        self.passed: set[tuple[str, str, str]] = set()
        self._channels: dict[str, _Channel] = {}
        self._over = ""

    def open(self, name: str, capacity: int, producers: int = 1, order: Orders = None) -> None:
        """Create a channel. ValueError: the name is taken, or the order is unknown."""
        if name in self._channels:
            raise ValueError(f"channel {name!r} is there already; give this one another name")
        self._channels[name] = _Channel(name, Queue(capacity, orders_of(order)), producers)

    def ask(self, asker: Asker, request: Request, now: float) -> Answers:
        """All answers that a request causes; its own is among them unless it waits."""
        if self._over:
            return [(asker, Denied("over", self._over))]
        channel = self._find(request)
        if denied := self._why_not(channel, request):
            return [(asker, denied)]
        assert channel is not None
        answers: Answers = []
        if isinstance(request, Close):
            channel.producers -= 1
            answers.append((asker, Done()))
        else:
            puts = isinstance(request, Put)
            waiting: deque[_Wait] | list[_Wait] = channel.putting if puts else channel.getting
            if channel.traced[puts] < TRACED:
                channel.traced[puts] += 1
                self.traffic.setdefault(channel.name, (set(), set()))[not puts].add(asker[0])
                if puts:
                    had = [name for name, (_, gets) in self.traffic.items() if asker[0] in gets]
                    self.passed.update((asker[0], name, channel.name) for name in had)
            waiting.append(_Wait(asker, request, now + request.timeout_s))
        answers += _serve(channel)
        return answers

    def _find(self, request: Request) -> _Channel | None:
        channel = self._channels.get(request.channel)
        if channel is None and not isinstance(request, Close) and request.direct:
            channel = self._channels[request.channel] = _Channel(request.channel, Queue(SEND_AHEAD), 1)
        return channel

    def _why_not(self, channel: _Channel | None, request: Request) -> Denied | None:
        """The error of a request that can never be granted, else None."""
        if channel is None:
            return Denied("refused", f"there is no channel {request.channel[:_NAME_CHARS]!r}")
        name = channel.name
        match request:
            case Close() if channel.closed:
                return Denied("refused", f"channel {name!r} is closed already; see its producers")
            case Put() if channel.closed:
                return Denied("closed", f"channel {name!r} is closed; nothing can be put into it")
            case Put(key=str(key)) | Get(key=str(key)) if len(key) > LONGEST_KEY:
                return Denied("refused", f"a key of {len(key)} characters: at most {LONGEST_KEY} are possible")
            case Put(weight=weight) if not 0 <= weight < math.inf:
                return Denied("refused", f"weight = {weight}: not a number of 0 or more")
            case Get() if why := _why_no_batch(request, channel.queue):
                return Denied("refused", f"{why} (channel {name!r})")
            case Put(timeout_s=timeout_s) | Get(timeout_s=timeout_s) if not timeout_s >= 0:
                return Denied("refused", f"timeout_s = {timeout_s}: not 0 or more seconds")
        return None

    def deadline(self) -> float:
        return min((wait.deadline for _, wait in self._waiting()), default=math.inf)

    def expire(self, now: float, others: Sequence[str] = ()) -> Answers:
        """Answer the requests whose deadline has passed. others: waits for something else, for the message."""
        answers: Answers = []
        late = [(channel, wait) for channel, wait in self._waiting() if wait.deadline <= now]
        waits = [_words(channel, wait) for channel, wait in self._waiting() if wait.deadline > now] if late else []
        waits += others
        for channel, wait in late:
            if isinstance(wait.request, Put):
                channel.putting.remove(wait)
            else:
                channel.getting.remove(wait)
            request, beside = wait.request, f" (meanwhile {', '.join(waits[:_LISTED])})" if waits else ""
            why = (
                f"{request.timeout_s:g} s were over while it waited {_describe(channel, request)}; look at who should "
                f"have {'given' if isinstance(request, Get) else 'taken'} something, or allow more time (timeout_s)"
                f"{beside}"
            )
            answers.append((wait.asker, Denied("timeout", why)))
        for channel, _ in late:
            answers += _serve(channel)
        return answers

    def end(self, why: str) -> Answers:
        """Answer all waiting requests; later ones get the same answer."""
        self._over = why
        answers: Answers = [(wait.asker, Denied("over", why)) for _, wait in self._waiting()]
        self._channels.clear()
        return answers

    def sizes(self) -> dict[str, int]:
        return {name: len(channel.queue) for name, channel in self._channels.items()}

    def waits(self) -> list[str]:
        return [_words(channel, wait) for channel, wait in self._waiting()]

    def _waiting(self) -> Iterator[tuple[_Channel, _Wait]]:
        for channel in self._channels.values():
            for wait in (*channel.putting, *channel.getting):
                yield channel, wait


def _why_no_batch(request: Get, queue: Queue) -> str:
    """Why no such batch can ever form; "" if it can."""
    items, weight, capacity = request.items, request.weight, queue.capacity
    if request.order not in queue.orders:
        return f"order = {request.order[:_NAME_CHARS]!r}: there are {', '.join(filter(None, queue.orders))}"
    if items is None and weight is None:
        return "items and weight are None; give one of them"
    if items is not None and not 0 < items <= capacity:
        return f"items = {items}: not 1 to {capacity}, the capacity"
    return f"weight = {weight}: not a number above 0" if weight is not None and not 0 < weight < math.inf else ""


def _serve(channel: _Channel) -> Answers:
    answers: Answers = []
    while answer := _admit(channel) or _give(channel):
        answers.append(answer)
    return answers


def _admit(channel: _Channel) -> tuple[Asker, Answer] | None:
    """Accept the next item that waits for room."""
    if not channel.putting or channel.queue.full:
        return None
    wait = channel.putting.popleft()
    assert isinstance(wait.request, Put)
    try:
        channel.queue.put(wait.request.parcel, wait.request.key, wait.request.weight)
    except Exception as error:  # noqa: BLE001 - the order is the user's
        return wait.asker, _refused(channel, error)
    return wait.asker, Done()


def _give(channel: _Channel) -> tuple[Asker, Answer] | None:
    """Items for the next consumer that can be served, or the channel's end."""
    over, given = channel.closed and not channel.putting, channel.given
    for wait in sorted(channel.getting, key=lambda wait: given[wait.asker[0]]):
        request = wait.request
        assert isinstance(request, Get)
        rest = over or channel.queue.full
        try:
            items = channel.queue.take(request.key, request.items, request.weight, rest=rest, order=request.order)
        except Exception as error:  # noqa: BLE001 - the order is the user's
            channel.getting.remove(wait)
            return wait.asker, _refused(channel, error)
        if items or over:
            channel.getting.remove(wait)
            given[wait.asker[0]] += sum(weight for _, _, weight in items)  # type: ignore[assignment] # weights
            why = f"channel {channel.name!r} is closed, and has no more{_of_key(request)}"
            return wait.asker, Given(tuple(items)) if items else Denied("closed", why)
    return None


def _refused(channel: _Channel, error: Exception) -> Denied:
    why = f"the order of channel {channel.name!r} raised {type(error).__name__}: {error}"
    return Denied("refused", why[:_ERROR_CHARS])


def _of_key(request: Put | Get) -> str:
    return "" if request.key is None else f" of key {request.key!r}"


def _describe(channel: _Channel, request: Put | Get) -> str:
    """`for 2 items of channel 'samples' (it holds 1)`."""
    if request.direct:
        sender, _, receiver = channel.name.partition(">")
        return f"for something from {sender}" if isinstance(request, Get) else f"until {receiver} receives something"
    if isinstance(request, Put):
        return f"for room in channel {channel.name!r} (it is full: {channel.queue.capacity})"
    wanted = [] if request.items is None else [f"{request.items} item{'s' * (request.items != 1)}"]
    wanted += [] if request.weight is None else [f"items of weight {request.weight:g}"]
    return f"for {' or '.join(wanted)}{_of_key(request)} of channel {channel.name!r} (it holds {len(channel.queue)})"


def _words(channel: _Channel, wait: _Wait) -> str:
    return f"{wait.asker[0]} waits {_describe(channel, wait.request)}"
