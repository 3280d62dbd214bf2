"""Sums a run's memory by device and compares it with the available memory.

Under `share` a device holds all its stations at once. Under `lease` it holds one at a time, so the largest counts, and
memory that stations keep is in host memory, too; without a CUDA device the host itself is leased. The main process
builds the policy on the host before the stations start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import PolyrhythmError
from polyrhythm.pipeline.build import policy_settings
from polyrhythm.pipeline.placed import Placed, place
from polyrhythm.plugins.lease.seats import HOST as HOST_NUMBER
from polyrhythm.plugins.memory_estimate.activations import Activations, estimate_activations
from polyrhythm.plugins.memory_estimate.needs import HOST, PUBLISHED, SHARED, MemoryPart, Sharing, list_parts
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import settings_traits
from polyrhythm.runtime.devices import Devices, number_of
from polyrhythm.runtime.messages import TRAINER, station_of
from polyrhythm.specs import EnvSpec


@dataclass(frozen=True, slots=True)
class Machine:
    """devices: of the run; free: bytes of `cpu`, the main process's host, of `cuda:N`, or of a cluster's node by its
    name; None if not known."""

    devices: Devices
    free: Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, or of a host. free: None if it is not known; building: bytes that the main process needs on
    its host before the stations start."""

    name: str
    free: int | None
    parts: tuple[MemoryPart, ...]
    sharing: Sharing = "share"
    building: int = 0

    def total(self, *, certain: bool = False) -> int:
        """Bytes held at the same time; certain: without estimated parts."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            if part.certain or not certain:
                station = station_of(part.station)  # ranks take turns together
                sizes[station] = sizes.get(station, 0) + part.nbytes
        shared = sizes.pop(SHARED, 0)
        return max(self.building, shared + (max if self.sharing == "lease" else sum)([*sizes.values(), 0]))

    @property
    def fits(self) -> bool:
        return self.excess <= 0

    @property
    def excess(self) -> int:
        """Bytes over the device's memory; negative if it fits, 0 if that is not known."""
        return 0 if self.free is None else self.total() - self.free

    def without(self, station: str) -> DeviceMemory:
        return replace(self, parts=tuple(part for part in self.parts if part.station != station))

    def stations(self) -> dict[str, dict[str, int]]:
        """Station -> purpose -> bytes."""
        found: dict[str, dict[str, int]] = {}
        for part in self.parts:
            own = found.setdefault(part.station, {})
            own[part.purpose] = own.get(part.purpose, 0) + part.nbytes
        return found


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The devices of a run, the host first. activations: method of their estimate, or why there is none."""

    devices: tuple[DeviceMemory, ...]
    activations: str

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    def excess(self) -> int:
        """Largest excess of a device over its memory in bytes; negative if all fit."""
        return max(device.excess for device in self.devices)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "fits": self.fits,
            "activations": self.activations,
            "devices": {
                device.name: {
                    "free": device.free,
                    "total": device.total(),
                    "certain": device.total(certain=True),
                    "fits": device.fits,
                    "sharing": device.sharing,
                    **({"building": device.building} if device.building else {}),
                    "stations": device.stations(),
                }
                for device in self.devices
            },
        }


@dataclass(slots=True)
class Planner:
    """Plans variants of one configuration; caches forms and passes of policies.

    trainer: whether the run has one. ConfigError, MissingError: as from `place` and the policy's `form`.
    """

    spec: EnvSpec
    machine: Machine
    trainer: bool = True
    _known: dict[str, tuple[PolicyForm, Activations | str]] = field(default_factory=dict)
    _acting: dict[str, Activations] = field(default_factory=dict)

    def take_form(self, config: RunConfig, form: PolicyForm) -> None:
        """Use this form of the configuration's policy instead of creating it."""
        found = estimate_activations(policy_settings(config), self.spec, form)
        if isinstance(found, Activations):
            like = self._acting.setdefault(_acting_key(config), found)
            found.acts_like = like if like is not found else None
        self._known[_key(config)] = (form, found)

    def form(self, config: RunConfig) -> PolicyForm:
        return self._of(config)[0]

    def plan(self, config: RunConfig, *, certain: bool = False) -> MemoryPlan:
        """certain: omit the estimated parts, which take time."""
        form, activations = self._of(config)
        placed = place(config, trainer=self.trainer, devices=self.machine.devices)
        parts = list_parts(config, self.spec, form, placed)
        if certain:
            kept = [part for part in parts if part.certain]
            return MemoryPlan(self._devices(config, form, placed, kept), "left out")
        if isinstance(activations, Activations):
            try:
                parts = list_parts(config, self.spec, form, placed, activations=activations)
                activations = activations.how
            except PolyrhythmError:
                raise
            except Exception as error:  # noqa: BLE001 - a policy of the user's may raise anything
                activations = f"{type(error).__name__} in a pass of zeros: {(str(error).splitlines() or [''])[0]}"
                self._known[_key(config)] = (form, activations)
        return MemoryPlan(self._devices(config, form, placed, parts), activations)

    def _of(self, config: RunConfig) -> tuple[PolicyForm, Activations | str]:
        key = _key(config)
        if key not in self._known:
            self.take_form(config, policy_settings(config).form(self.spec))
        return self._known[key]

    def _devices(
        self, config: RunConfig, form: PolicyForm, placed: Placed, parts: Sequence[MemoryPart]
    ) -> tuple[DeviceMemory, ...]:
        leased = _leased_devices(placed)
        parts = self._by_host([*parts, *_suspended(parts, leased)], placed)
        hosts = [HOST, *(node for node, _ in self.machine.devices.nodes if node)]
        used = {part.device for part in parts}
        names = [HOST, *(node for node in hosts[1:] if node in used), *sorted(used - {*hosts}, key=number_of)]
        learns = self.trainer and config.supervised is not None
        building = form.train_bytes + 3 * form.trainable_bytes * learns
        return tuple(
            DeviceMemory(
                name,
                self.machine.free(name),
                tuple(part for part in parts if part.device == name),
                "lease" if name in leased else "share",
                building * (name == HOST),
            )
            for name in names
        )

    def _by_host(self, parts: Sequence[MemoryPart], placed: Placed) -> Sequence[MemoryPart]:
        """The parts on a cluster: those of a process are on the host of its node, and what is shared on each host. A
        process on the CPU is left out, since the cluster places it when it starts. Main and a trainer on a device of
        another host both publish: each of their hosts also has what comes from the other."""
        if not self.machine.devices.on_cluster:
            return parts
        nodes = {name: seat.node for name, seat in placed.seats.items()}
        # Which node is main's is not known: with several, it is assumed not to be the trainer's.
        publisher = nodes.get(TRAINER, "") if len(self.machine.devices.nodes) > 1 else ""
        found: list[MemoryPart] = []
        for part in parts:
            if part.station == SHARED:
                found += [replace(part, device=host) for host in (HOST, *dict.fromkeys(filter(None, nodes.values())))]
                if publisher and part.purpose == PUBLISHED:
                    found += [
                        replace(part, purpose=f"{PUBLISHED} of other hosts", device=one) for one in (HOST, publisher)
                    ]
            elif part.device != HOST:
                found.append(part)
            elif node := nodes.get(part.station, ""):
                found.append(replace(part, device=node))
        return found


def _leased_devices(placed: Placed) -> set[str]:
    devices = placed.lease.devices.values() if placed.lease is not None else ()
    return {HOST if number == HOST_NUMBER else f"cuda:{number}" for own in devices for number in own}


def _suspended(parts: Sequence[MemoryPart], leased: set[str]) -> list[MemoryPart]:
    """Pinned copies on the host of stations that yield their device; all ranks of a trainer yield if one does."""
    sizes: dict[tuple[str, str], int] = {}
    leaving: set[str] = set()
    for part in parts:
        if part.device != HOST:
            place = (part.device, part.station)
            sizes[place] = sizes.get(place, 0) + part.nbytes * part.stays
            leaving |= {station_of(part.station)} if part.device in leased else set()
    return [
        MemoryPart(name, f"while suspended from {device}", HOST, size)
        for (device, name), size in sizes.items()
        if station_of(name) in leaving
    ]


def _key(config: RunConfig) -> str:
    """Key that is equal for policies with equal forms and passes."""
    policy: Any = config.policy
    return str(policy.model_dump_json())


def _acting_key(config: RunConfig) -> str:
    """Key that is equal for policies that act alike: the trained part matters to a generator only with adapters."""
    policy: Any = config.policy
    if settings_traits(policy).adapts:
        train = "lora" if policy.train == "lora" else "all"
        policy = policy.model_copy(update={"gradient_checkpointing": False, "train": train})
    return str(policy.model_dump_json())


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with these values, by dotted name, without validation."""
    for name, value in settings.items():
        config = _with(config, name.split("."), value)
    return config


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _with(getattr(section, path[0]), path[1:], value)
    return section.model_copy(update={path[0]: inner})
