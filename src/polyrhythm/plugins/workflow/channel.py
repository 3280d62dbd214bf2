"""Channels as workers and the driver use them, and their requests to the exchange that holds the items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from polyrhythm.plugins.workflow.protocol import (
    ERRORS,
    Answer,
    ChannelClosed,
    Close,
    Denied,
    Get,
    Given,
    Key,
    Put,
    Request,
    WorkflowError,
)
from polyrhythm.plugins.workflow.values import Carrier

#: Maximum puts of a process that nobody has waited for.
PUT_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Reply:
    """The future answer to a request. is_done: whether it has come; wait: blocks until it comes, and the exchange gives
    every request a deadline."""

    is_done: Callable[[], bool]
    wait: Callable[[], Answer]


class Pending:
    """A put or get under way, until its deadline. Only the process that began it may wait for it."""

    def __init__(self, reply: Reply, finish: Callable[[Reply], Any]) -> None:
        self._reply, self._finish = reply, finish
        self._found: Any = None
        self._error: Exception | None = None
        self.waited = False

    @property
    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self.waited or self._reply.is_done()

    def wait(self) -> Any:
        """The item of a get, None for a put. Raises the errors of `Channel.put` and `Channel.get`."""
        if not self.waited:
            try:
                self._found = self._finish(self._reply)
            except Exception as error:  # noqa: BLE001 - every call of `wait` raises it
                self._error = error
            self.waited = True
        if self._error is not None:
            raise self._error
        return self._found


class PendingPuts:
    """Puts that nobody has waited for, oldest first, at most `PUT_AHEAD`. A later `add` or
    `finish` raises their errors."""

    def __init__(self) -> None:
        self._puts: deque[Pending] = deque()

    def add(self, put: Pending) -> None:
        """Add a put; waits for the oldest if there are too many. It is added first, so that an error of an earlier
        one does not lose it."""
        self._puts.append(put)
        while len(self._puts) > 1 and (len(self._puts) > PUT_AHEAD or self._puts[0].done):
            self._wait_for_oldest()

    def finish(self) -> None:
        while self._puts:
            self._wait_for_oldest()

    def clear(self) -> None:
        """Forget all puts: the process has an error already."""
        self._puts.clear()

    def _wait_for_oldest(self) -> None:
        put = self._puts.popleft()
        if not put.waited:
            put.wait()


class Port(Protocol):
    """Connection of this process to the exchange. wait_s: default limit of a wait; puts: puts begun by
    `put_async` and `send_async`."""

    wait_s: float
    puts: PendingPuts

    @property
    def carrier(self) -> Carrier: ...

    def begin(self, request: Request) -> Reply: ...


class Channel:
    """A bounded queue of nested values between any workers and the driver. Made by `Workflow.channel`; it can be sent
    like a value, also as an argument of a call.

    Every wait ends after `timeout_s` (default: the workflow's `wait_s`) with `WaitTimeout`. on_device: items are only
    for workers of the device of those that put them.
    """

    def __init__(self, name: str, port: Port, on_device: bool = False) -> None:
        self.channel_name, self.on_device, self._port = name, on_device, port

    def __repr__(self) -> str:
        return f"Channel({self.channel_name!r})"

    def put(self, item: Any, *, key: Key = None, weight: float = 1.0, timeout_s: float | None = None) -> None:
        """Add an item, waiting for room. key: consumers may ask for it; weight: cost to the consumer, for balance.
        ChannelClosed: the channel is closed. TypeError: the item cannot be sent."""
        self._begin_put(item, key, weight, timeout_s).wait()

    def put_async(self, item: Any, *, key: Key = None, weight: float = 1.0, timeout_s: float | None = None) -> Pending:
        """As `put`, without waiting for room.

        An error of a put without `wait` is raised by a later `put_async`, at the end of the worker's method, or when
        the driver leaves the `with` statement; the latter two wait for the put. With 64 such puts under way in a
        process, the next one waits for the oldest.
        """
        put = self._begin_put(item, key, weight, timeout_s)
        self._port.puts.add(put)
        return put

    def _begin_put(self, item: Any, key: Key, weight: float, timeout_s: float | None) -> Pending:
        (parcel,) = self._port.carrier.pack(item, "the item", on_device=self.on_device)
        put = Put(self.channel_name, parcel, key, float(weight), or_default(self._port, timeout_s))
        return begin_parcel(self._port, put)

    def get(self, *, key: Key = None, order: str = "", timeout_s: float | None = None) -> Any:
        """The next item, of this key if given. order: one of the channel's orders by name, default its own.
        ChannelClosed: the channel is closed and empty."""
        return self.get_async(key=key, order=order, timeout_s=timeout_s).wait()

    def get_async(self, *, key: Key = None, order: str = "", timeout_s: float | None = None) -> Pending:
        """As `get`, without waiting. The item is assigned to this process as soon as there is one, so wait for it."""
        request = Get(self.channel_name, key, 1, None, or_default(self._port, timeout_s), order=order)
        return begin_get(self._port, request)

    def get_batch(
        self,
        items: int | None = None,
        *,
        weight: float | None = None,
        key: Key = None,
        order: str = "",
        timeout_s: float | None = None,
    ) -> list[Any]:
        """The next `items` items, or the fewest next ones that weigh at least `weight`, whichever are fewer. There are
        fewer only if no more can come: the channel is closed, or full. ChannelClosed: it is closed and empty."""
        heavy = None if weight is None else float(weight)
        get = Get(self.channel_name, key, items, heavy, or_default(self._port, timeout_s), order=order)
        return receive_items(self._port, get, self._port.begin(get))

    def close(self) -> None:
        """End this producer. Once all `producers` have, consumers get the remaining items, then `ChannelClosed`."""
        answered(self._port.begin(Close(self.channel_name)).wait())

    def __iter__(self) -> Iterator[Any]:
        """The items until the channel is closed and empty."""
        while True:
            try:
                item = self.get()
            except ChannelClosed:
                return
            yield item


def begin_parcel(port: Port, put: Put) -> Pending:
    """Begin to put one item."""

    def finish(reply: Reply) -> None:
        try:
            answered(reply.wait())
        except BaseException:
            port.carrier.drop(put.parcel)
            raise

    try:
        return Pending(port.begin(put), finish)
    except BaseException:
        port.carrier.drop(put.parcel)
        raise


def begin_get(port: Port, get: Get) -> Pending:
    return Pending(port.begin(get), lambda reply: receive_items(port, get, reply)[0])


def receive_items(port: Port, get: Get, reply: Reply) -> list[Any]:
    """The items given to a request. Raises the errors of `Channel.get_batch`."""
    answer = answered(reply.wait())
    assert isinstance(answer, Given), f"{answer} answers a Get"
    try:
        return [port.carrier.unpack(parcel) for parcel, _, _ in answer.items]
    except LookupError as error:
        raise WorkflowError(f"an item of channel {get.channel!r} cannot be had: {error}") from error


def answered(answer: Answer) -> Answer:
    """The answer; raises its error if it is `Denied`."""
    if isinstance(answer, Denied):
        raise ERRORS[answer.reason](answer.why)
    return answer


def or_default(port: Port, timeout_s: float | None) -> float:
    return port.wait_s if timeout_s is None else float(timeout_s)
