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
from polyrhythm.runtime.devices import number_of
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.messages import station_of
from polyrhythm.scheduler.settings import LeaseSettings

#: Makes the parts of a station that leases devices (`Resources.wrapper`).
LEASED_PARTS = "polyrhythm.plugins.lease.station:leased_parts"
#: The number of the host among the leased devices; others have their number in the run.
HOST = -1


def share_seats(
    placement: PlacementSettings, seats: Mapping[str, Resources], *, simulators_leave: bool, offload: str
) -> SharedSeats:
    """The seats with the devices that each leases, the conductor's lease settings (None without leases), and a warning
    if `lease.devices` names devices that no stations share.

    simulators_leave: the environment can leave a device. offload: folder for tensors that leave, "": the system's.
    """
    own: dict[str, set[int]] = {}
    for name, seat in seats.items():
        if not name.startswith("scorer") and (simulators_leave or not name.startswith("simulator")):
            number = HOST if seat.device == "cpu" else number_of(seat.device)
            own.setdefault(station_of(name), set()).add(number)
    stations = Counter(number for numbers in own.values() for number in numbers)
    asked = placement.lease.devices  # the only devices that may be leased, if given
    named = () if asked is None or asked == "all" else list_device_ids(asked)
    leased = {*named} or stations.keys() - {HOST} or {HOST}
    taken = {name: tuple(sorted(n for n in numbers & leased if stations[n] > 1)) for name, numbers in own.items()}
    devices = {name: numbers for name, numbers in taken.items() if numbers}
    found = {
        name: replace(seat, wrapper=LEASED_PARTS, leases=numbers, offload=offload)
        if (numbers := devices.get(station_of(name), ()))
        else seat
        for name, seat in seats.items()
    }
    used = {number for numbers in devices.values() for number in numbers}
    idle = ", ".join(str(number) for number in named if number not in used)
    warning = (
        f"placement.lease.devices = {asked}: nobody takes turns on {idle}, as fewer than two stations there can leave "
        "it; leave it out, or place more there"
    )
    rules = LeaseSettings(devices, placement.lease.min_hold_s, placement.lease.switch_order) if devices else None
    return SharedSeats(found, rules, [warning] if idle else [])
