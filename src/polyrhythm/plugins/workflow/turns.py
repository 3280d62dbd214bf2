"""Which worker is on a device that several workers share (`Workflow(sharing="lease")`), decided without I/O by the
rules of the lease (`plugins.lease.lease`); the caller passes the time.

A worker wants its device while it has a call that does not wait for another worker. It is told to leave when another
worker wants the device and it waits itself, or has had the device for `min_hold_s` and `AMORTISED` times as long as the
longest of the latest switches took, so that switches take a tenth of the time at most. It leaves where it waits next,
or at the end of its call; with `Worker.device_lock` not before the end of the lock's body.

A free device goes to the worker that is furthest down the data flow: the one from which the fewest workers can be
reached over the channels used so far. Of workers that reach equally many, as in a cycle, the one that has waited
longest.

Invariants: a device has at most one holder, and a worker has at most one device, so workers without a lock never wait
for each other in a circle. Every wait for a device has a deadline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from polyrhythm.plugins.lease.lease import DeviceLeases, LeaseState
from polyrhythm.plugins.workflow.protocol import Close, Get, Put, Request
from polyrhythm.scheduler.records import DeviceCommand, DeviceTaken, DeviceYielded
from polyrhythm.scheduler.settings import LeaseSettings

#: A worker may keep its device for so many times the duration of a switch; two switches belong to each time.
AMORTISED = 20


class DeviceTurns:
    """devices: name of the device of each worker that can leave it; min_hold_s: as in `LeaseSettings`; with 0
    workers leave whenever they can. wait_s: limit of a wait for a device."""

    def __init__(self, devices: Mapping[str, str], min_hold_s: float) -> None:
        count = Counter(devices.values())
        self._names = sorted(device for device in count if count[device] > 1)
        shared: dict[str, tuple[int, ...]] = {
            name: (self._names.index(device),) for name, device in devices.items() if count[device] > 1
        }
        self._leases, self.wait_s = DeviceLeases(LeaseSettings(shared, min_hold_s)), math.inf
        for name in shared:
            self._leases.join(name, len(shared), interruptible=True)
        self._min_hold_s = min_hold_s
        self._switch_s: dict[tuple[str, type], float] = {}  # of the last one, by worker and direction
        self._calls: Counter[str] = Counter()  # that the worker has to finish
        self._open: set[tuple[str, int]] = set()  # requests that have no answer yet, by worker and number
        self._awaited: dict[str, int] = {}  # the open request for whose answer the worker's call waits
        self._flow = DataFlow()
        self._stages: dict[str, int] = {}  # of workers that have waited since the flow changed

    def __contains__(self, worker: object) -> bool:
        """Whether the worker shares its device with another one."""
        return worker in self._leases.present

    def on_call(self, worker: str, now: float) -> None:
        self._calls[worker] += 1
        self._update_wants(worker, now)

    def on_return(self, worker: str, now: float) -> None:
        self._calls[worker] -= 1
        self._awaited.pop(worker, None)
        self._update_wants(worker, now)

    def on_request(self, worker: str, number: int, request: Request) -> None:
        if self._leases.present:
            self._open.add((worker, number))
            if not isinstance(request, Close) and self._flow.add(request, worker):
                self._stages.clear()

    def on_wait(self, worker: str, number: int, now: float) -> None:
        """The worker's call waits for the answer to this request, unless that is on its way."""
        if (worker, number) in self._open:
            self._awaited[worker] = number
            self._update_wants(worker, now)

    def on_answer(self, worker: str, number: int, now: float) -> None:
        self._open.discard((worker, number))
        if self._awaited.get(worker) == number:
            del self._awaited[worker]
            self._update_wants(worker, now)

    def _update_wants(self, worker: str, now: float) -> None:
        state = self._leases.present.get(worker)
        if state is not None:
            wants = self._calls[worker] > 0 and worker not in self._awaited
            state.under_way = int(wants)
            self._leases.set_wants(state, wants, now)

    def is_due(self, event: DeviceTaken | DeviceYielded) -> bool:
        """Whether the worker was told to do this and has not yet."""
        state = self._leases.present.get(event.station)
        return (
            state is not None
            and 0 <= event.seconds < math.inf
            and event.device in (state.taking if isinstance(event, DeviceTaken) else state.yielding)
        )

    def on_switched(self, event: DeviceTaken | DeviceYielded, now: float) -> None:
        if isinstance(event, DeviceTaken):
            self._leases.on_taken(event, now)
            self._leases.present[event.station].worked = True  # it goes on with what it wanted the device for
        else:
            self._leases.on_yielded(event, now)
        self._switch_s[event.station, type(event)] = event.seconds
        if self._min_hold_s:
            hold_s = max(self._min_hold_s, AMORTISED * max(self._switch_s.values()))
            self._leases.rules = replace(self._leases.rules, min_hold_s=hold_s)

    def switch(self, now: float) -> list[DeviceCommand]:
        """What workers are to do now."""
        for name in self._leases.waiting:
            if name not in self._stages:
                self._stages[name] = self._leases.present[name].flow = self._flow.count_reached(name)
        self._leases.preempt(now)
        return list(self._leases.switch())

    def deadline(self) -> float:
        """Time at which `switch` or `overdue` finds something if nothing happens before."""
        waits = (self._leases.present[name].waits_since + self.wait_s for name in self._leases.waiting)
        return min(self._leases.deadline(), min(waits, default=math.inf))

    def overdue(self, now: float) -> tuple[str, str] | None:
        """The worker that another one has waited for too long, and for what; None: there is none."""
        for name in sorted(self._leases.waiting):
            state = self._leases.present[name]
            if state.waits_since + self.wait_s <= now:
                device = self._device_of(state)
                return self._holder(state), (
                    f"has not given {device} to {name} for {self.wait_s:g} s; have it wait for something or return "
                    "now and then, not within device_lock, or allow more time (wait_s)"
                )
        return None

    def waits(self) -> list[str]:
        found = (self._leases.present[name] for name in sorted(self._leases.waiting))
        return [
            f"{state.name} waits for {self._device_of(state)}, on which {self._holder(state)} is" for state in found
        ]

    def _device_of(self, state: LeaseState) -> str:
        return self._names[state.devices[0]]

    def _holder(self, state: LeaseState) -> str:
        return self._leases.holders.get(state.devices[0], "nobody")


class DataFlow:
    """Who puts into a channel from which whom gets."""

    def __init__(self) -> None:
        self._puts: dict[str, dict[str, None]] = {}  # channels by worker
        self._gets: dict[str, dict[str, None]] = {}  # workers by channel

    def add(self, request: Put | Get, worker: str) -> bool:
        """Add what a request shows; whether that is new."""
        channel = request.channel
        if isinstance(request, Put):
            found, new = self._puts.setdefault(worker, {}), channel
        else:
            found, new = self._gets.setdefault(channel, {}), worker
        if new in found:
            return False
        found[new] = None
        return True

    def count_reached(self, worker: str) -> int:
        """Number of other workers to which this one's items go, or items made of them."""
        reached: dict[str, None] = {}
        todo = [worker]
        while todo:
            for channel in self._puts.get(todo.pop(), ()):
                new = [name for name in self._gets.get(channel, ()) if name not in reached]
                reached |= dict.fromkeys(new)
                todo += new
        return len(reached.keys() - {worker})
