"""A channel as workers and the driver use it, and how they reach the exchange that has its items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from polyrhythm.workflow.carrier import Carrier
from polyrhythm.workflow.errors import ChannelClosed, WorkflowError, as_error
from polyrhythm.workflow.protocol import Answer, Close, Denied, Get, Given, Key, Put, Request


class Port(Protocol):
    """How this process reaches the exchange. wait_s: the longest wait, where none is given."""

    wait_s: float

    @property
    def carrier(self) -> Carrier:
        """By which values are sent and received."""
        ...

    def ask(self, request: Request) -> Answer:
        """The exchange's answer, once it comes: every request has a deadline there."""
        ...


class Channel:
    """A bounded queue of nested values between any workers and the driver. Made by `Workflow.channel`; it can be sent
    like a value, also as an argument of a call.

    Every wait ends after `timeout_s` (default: the workflow's `wait_s`) with `WaitTimeout`.
    """

    def __init__(self, name: str, port: Port) -> None:
        self.channel_name, self._port = name, port

    def __repr__(self) -> str:
        return f"Channel({self.channel_name!r})"

    def put(self, item: Any, *, key: Key = None, weight: float = 1.0, timeout_s: float | None = None) -> None:
        """Add an item, and wait until there is room for it. key: by which consumers may ask for it; weight: what it
        costs its consumer, for balance. ChannelClosed: the channel is closed. TypeError: it cannot be sent."""
        put_parcel(self._port, self.channel_name, item, key=key, weight=weight, timeout_s=timeout_s)

    def get(self, *, key: Key = None, timeout_s: float | None = None) -> Any:
        """The next item, of this key if one is given. ChannelClosed: it is closed, and has no more."""
        (item,) = get_items(self._port, self.channel_name, key=key, items=1, timeout_s=timeout_s)
        return item

    def get_batch(
        self,
        items: int | None = None,
        *,
        weight: float | None = None,
        key: Key = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """The next `items` items, or the fewest next ones that weigh `weight` or more, whichever are fewer. There are
        fewer only where no more can come: the channel is closed, or full. ChannelClosed: it has no more."""
        return get_items(self._port, self.channel_name, key=key, items=items, weight=weight, timeout_s=timeout_s)

    def close(self) -> None:
        """Say that this producer has no more. Once all have (`producers`), consumers get what is left, then
        `ChannelClosed`."""
        answered(self._port.ask(Close(self.channel_name)))

    def __iter__(self) -> Iterator[Any]:
        """The items until the channel is closed and empty."""
        while True:
            try:
                item = self.get()
            except ChannelClosed:
                return
            yield item


def put_parcel(
    port: Port,
    channel: str,
    item: Any,
    *,
    key: Key = None,
    weight: float = 1.0,
    timeout_s: float | None = None,
    direct: bool = False,
) -> None:
    """Put one item. The errors of `Channel.put`."""
    (parcel,) = port.carrier.pack(item, "the item")
    give_parcel(port, Put(channel, parcel, key, float(weight), _or_default(port, timeout_s), direct))


def give_parcel(port: Port, put: Put) -> None:
    """Put a parcel; if that is denied, the parcel is dropped."""
    try:
        answered(port.ask(put))
    except BaseException:
        port.carrier.drop(put.parcel)
        raise


def get_items(
    port: Port,
    channel: str,
    *,
    key: Key = None,
    items: int | None = None,
    weight: float | None = None,
    timeout_s: float | None = None,
    direct: bool = False,
) -> list[Any]:
    """Get items. The errors of `Channel.get_batch`."""
    heavy = None if weight is None else float(weight)
    answer = answered(port.ask(Get(channel, key, items, heavy, _or_default(port, timeout_s), direct)))
    assert isinstance(answer, Given), f"{answer} answers a Get"
    try:
        return [port.carrier.unpack(parcel) for parcel, _, _ in answer.items]
    except LookupError as error:
        raise WorkflowError(f"an item of channel {channel!r} cannot be had: {error}") from error


def answered(answer: Answer) -> Answer:
    """The answer, unless it is that it cannot be: then the error."""
    if isinstance(answer, Denied):
        raise as_error(answer)
    return answer


def _or_default(port: Port, timeout_s: float | None) -> float:
    return port.wait_s if timeout_s is None else float(timeout_s)
