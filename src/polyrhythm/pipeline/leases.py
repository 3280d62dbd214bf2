"""Which stations are on their device in turn (`placement.sharing: lease`): settings and seats in, leases out.

A device is leased where at least two stations on it can leave it: generators and the trainer, and simulators whose
environment says so (`leaves_device`); others stay on it. Where no station has a CUDA device the host counts as one
device, so the whole mechanism runs without a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from polyrhythm.config.sections.placement import PlacementSettings
from polyrhythm.errors import ConfigError
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.messages import station_of
from polyrhythm.scheduler.settings import LeaseSettings

#: The number of the host among the leased devices; CUDA devices have those of torch.
HOST = -1


def lease_devices(
    placement: PlacementSettings, seats: Mapping[str, Resources], *, simulators_leave: bool, offload: str = ""
) -> dict[str, Resources]:
    """The seats, with the devices that each station leases. simulators_leave: the environment can leave a device;
    offload: folder for what leaves the host, "" for the system's temporary one. ConfigError: the trainer has several
    ranks, which cannot leave their devices yet.
    """
    if placement.sharing == "share":
        return dict(seats)
    able = [name for name in seats if simulators_leave or not name.startswith("simulator")]
    numbers = Counter(_number(seats[name]) for name in able)
    if any(number != HOST for number in numbers):
        del numbers[HOST]
    leases = {name: (number,) for name in able if numbers[number := _number(seats[name])] > 1}
    ranks = [name for name in seats if station_of(name) == "trainer"]
    if len(ranks) > 1 and leases.keys() & ranks:
        raise ConfigError(
            f"placement.sharing = lease: the trainer has {len(ranks)} ranks, and only a trainer of one rank can leave "
            "its device; set placement.trainer.ranks to 1, or placement.sharing to share"
        )
    return {name: replace(seat, leases=leases.get(name, ()), offload=offload) for name, seat in seats.items()}


def lease_settings(placement: PlacementSettings, seats: Mapping[str, Resources]) -> LeaseSettings | None:
    """What the conductor is told of the leases; None if there are none."""
    devices = {name: seat.leases for name, seat in seats.items() if seat.leases}
    return LeaseSettings(devices, placement.lease.min_hold_s, placement.lease.switch_order) if devices else None


def _number(seat: Resources) -> int:
    return HOST if seat.device == "cpu" else int(seat.device.removeprefix("cuda:"))
