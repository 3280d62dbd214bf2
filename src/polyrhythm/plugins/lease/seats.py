"""Device leases (`placement.sharing: lease`) from the placement settings and seats.

A device is leased if at least two stations on it can leave it: generators, the trainer, and simulators whose
environment can (`leaves_device`); other simulators and scorers stay on it. `lease.devices` restricts the leased
devices; the others are shared. If no station has a CUDA device, the host counts as one device, so everything runs
without a GPU.

A trainer of several ranks is one station: it leases the devices of all ranks, which leave together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from polyrhythm.config.sections.placement import PlacementSettings, list_device_ids
from polyrhythm.pipeline.placed import SharedSeats
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.messages import station_of
from polyrhythm.scheduler.settings import LeaseSettings

#: Makes the parts of a station that leases devices (`Resources.wrapper`).
LEASED_PARTS = "polyrhythm.plugins.lease.station:leased_parts"
#: The number of the host among the leased devices; CUDA devices have those of torch.
HOST = -1


def share_seats(
    placement: PlacementSettings, seats: Mapping[str, Resources], *, simulators_leave: bool, offload: str
) -> SharedSeats:
    """Seats with leases for `placement.sharing: lease`; arguments as of `lease_devices`."""
    leased = lease_devices(placement, seats, simulators_leave=simulators_leave, offload=offload)
    return SharedSeats(leased, lease_settings(placement, leased), list_unleased(placement, leased))


def lease_devices(
    placement: PlacementSettings, seats: Mapping[str, Resources], *, simulators_leave: bool, offload: str = ""
) -> dict[str, Resources]:
    """The seats with the devices that each leases. simulators_leave: the environment can leave a device. offload:
    folder for tensors that leave the host, "" for the system's temporary one."""
    if placement.sharing == "share":
        return dict(seats)
    own: dict[str, set[int]] = {}
    for name, seat in seats.items():
        if not name.startswith("scorer") and (simulators_leave or not name.startswith("simulator")):
            own.setdefault(station_of(name), set()).add(_number(seat))
    stations = Counter(number for numbers in own.values() for number in numbers)
    leased = {*_named(placement)} or stations.keys() - {HOST} or {HOST}
    leases = {name: tuple(sorted(n for n in numbers & leased if stations[n] > 1)) for name, numbers in own.items()}
    return {
        name: replace(seat, wrapper=LEASED_PARTS, leases=numbers, offload=offload)
        if (numbers := leases.get(station_of(name), ()))
        else seat
        for name, seat in seats.items()
    }


def lease_settings(placement: PlacementSettings, seats: Mapping[str, Resources]) -> LeaseSettings | None:
    """The conductor's lease settings; None without leases."""
    devices = {station_of(name): seat.leases for name, seat in seats.items() if seat.leases}
    return LeaseSettings(devices, placement.lease.min_hold_s, placement.lease.switch_order) if devices else None


def list_unleased(placement: PlacementSettings, seats: Mapping[str, Resources]) -> list[str]:
    """A warning if `lease.devices` names devices that no stations share. seats: with their leases."""
    leased = {number for seat in seats.values() for number in seat.leases}
    idle = [number for number in _named(placement) if number not in leased]
    if placement.sharing == "share" or not idle:
        return []
    named, told = placement.lease.devices, ", ".join(map(str, idle))
    sentence = (
        f"placement.lease.devices = {named}: nobody takes turns on {told}, as fewer than two stations there can leave "
        "it; leave it out, or place more there"
    )
    return [sentence]


def _named(placement: PlacementSettings) -> tuple[int, ...]:
    """The only devices that may be leased; empty if all may."""
    asked = placement.lease.devices
    return () if asked is None or asked == "all" else list_device_ids(asked)


def _number(seat: Resources) -> int:
    return HOST if seat.device == "cpu" else int(seat.device.removeprefix("cuda:"))
