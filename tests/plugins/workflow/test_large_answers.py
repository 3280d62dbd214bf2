"""Answers that are larger than a message may be, over the bytes that would be sent, without processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.plugins.workflow.test_hostile import Hosting
from tests.plugins.workflow.test_values import carriers
from tests.plugins.workflow.workers import Echo

from polyrhythm.plugins.cluster.parcels import KeptParcels
from polyrhythm.plugins.workflow import protocol as p
from polyrhythm.plugins.workflow.channel import Channel
from polyrhythm.plugins.workflow.running import Controller, SkippableClock, WorkerSeat
from polyrhythm.plugins.workflow.station import WorkerFactory, WorkerStation
from polyrhythm.plugins.workflow.values import SMALL, pack_whole
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.messages import Channels
from polyrhythm.runtime.transport import wire


def test_a_batch_of_many_small_items_comes_in_several_messages(tmp_path: Any) -> None:
    """Together they are larger than any message that a worker takes."""
    count, item = 600, np.zeros(30_000, np.uint8)
    assert item.nbytes < SMALL < wire.LARGEST < count * item.nbytes
    hosting, said = Hosting(), list[Any]()
    controller = Controller(hosting, {"echo-0": WorkerSeat("echo", 0, "cpu")}, SkippableClock())  # type: ignore[arg-type]
    controller.exchange.open("c", count)
    context = StationContext(None, None, Channels(said.append, None, None))  # type: ignore[arg-type]
    echo = f"{Echo.__module__}:{Echo.__name__}"
    factory = WorkerFactory("echo-0", "echo", 0, echo, pack_whole(((), {}), "x"), {"echo": 1}, 9.0)
    station = WorkerStation(factory, context, 0, KeptParcels())
    messages = list[int]()

    def hear(seconds: float) -> None:
        """What the two say to each other, as bytes."""
        while said:
            controller.on_event(wire.decode(wire.encode(said.pop(0))))  # type: ignore[arg-type]
        messages.append(len(hosting.sent))
        assert hosting.sent, "the worker would wait for ever"
        while hosting.sent:
            station.handle(wire.decode(wire.encode(hosting.sent.pop(0))))  # type: ignore[arg-type]

    station.listen_by(hear)
    sender, _ = carriers("kept", tmp_path)
    for number in range(count):
        item[0] = number % 256
        (parcel,) = sender.pack(item, "the item")
        controller.ask(p.Put("c", parcel, timeout_s=9.0))
    future = controller.call("echo-0", "take_batch", pack_whole(((Channel("c", None), count), {}), "x"))  # type: ignore[arg-type]
    hear(0.0)
    station.work()
    controller.on_event(said.pop())
    assert sender.unpack(future.result(0).parcel) == sum(number % 256 for number in range(count))
    assert messages == [1, 5]


def test_a_key_that_no_message_should_carry_is_refused() -> None:
    hosting = Hosting()
    controller = Controller(hosting, {}, SkippableClock())  # type: ignore[arg-type]
    controller.exchange.open("c", 2)
    for request in (p.Put("c", p.Parcel(1, b"x"), "k" * 2000), p.Get("c", "k" * 2000)):
        answer = controller.ask(request).result(0)
        assert isinstance(answer, p.Denied)
        assert answer.why == "a key of 2000 characters: at most 1024 are possible"
