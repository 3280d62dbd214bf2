"""What a placement decides: where stations are, how many there are, and how much each does at a time. Pure.

    RunConfig ──arrangement_of──▶ Arrangement ──arranged──▶ RunConfig

What it never changes is the recipe's: rows in all, samples of an update, freshness, everything that is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import LimitedBatching
from polyrhythm.pipeline.placed import assign_seats, station_names
from polyrhythm.plugins.memory_estimate.plan import with_settings
from polyrhythm.runtime.devices import CPU, Devices, number_of

#: Of a device: time slices, one process, or turns. `mps` is left as it is.
Sharing = Literal["share", "process", "mps", "lease"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Stations on devices. simulator_devices, generator_devices, trainer_devices: numbers in the run, of which station
    i has the i-th, counted round, and the trainer a rank on each; none: on the hosts. env_batches: of a simulator;
    rows: of an env batch; slots: of an env batch; max_rows, max_requests: of a pass, 0: the batching has no limit;
    micro_batch: chunk steps of a training pass of a rank, 0: those of an optimizer step."""

    simulators: int
    generators: int
    env_batches: int
    rows: int
    slots: int = 1
    max_rows: int = 64
    max_requests: int = 1_000_000
    micro_batch: int = 0
    sharing: Sharing = "share"
    simulator_devices: tuple[int, ...] = ()
    generator_devices: tuple[int, ...] = ()
    trainer_devices: tuple[int, ...] = ()

    @property
    def all_rows(self) -> int:
        return self.simulators * self.env_batches * self.rows

    @property
    def ranks(self) -> int:
        return max(1, len(self.trainer_devices))

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that have a station."""
        return tuple(sorted({*self.simulator_devices, *self.generator_devices, *self.trainer_devices}))

    def settings(self) -> dict[str, Any]:
        """The settings of a recipe that make it, by dotted name."""
        found = {
            "placement.preset": None,
            "placement.simulators.devices": devices_text(self.simulator_devices),
            "placement.generators.devices": devices_text(self.generator_devices),
            "placement.trainer.devices": devices_text(self.trainer_devices),
            "placement.trainer.ranks": None if self.trainer_devices else 1,
            "placement.sharing": self.sharing,
            "rollout.simulators": self.simulators,
            "rollout.generators": self.generators,
            "rollout.env_batches": self.env_batches,
            "rollout.rows": self.rows,
            "rollout.sharding": f"even:{self.slots}" if self.slots > 1 else "whole",
            "batching.max_rows": self.max_rows,
            "batching.max_requests": self.max_requests,
            "training.micro_batch_steps": self.micro_batch,
        }
        return found if self.max_rows else {key: value for key, value in found.items() if "batching" not in key}


def arranged(config: RunConfig, one: Arrangement) -> RunConfig:
    """The recipe with this arrangement, without the checks of `load_config`."""
    return with_settings(config, one.settings())


def arrangement_of(config: RunConfig, devices: Devices) -> Arrangement:
    """The recipe's own arrangement on these devices. ConfigError: it names a device that is not there.

    Slots of unequal size count as equal ones.
    """
    names = station_names(config, devices=devices)
    seats = assign_seats(config.placement, names, devices)
    rollout, batching = config.rollout, config.batching

    def numbers(kind: str) -> tuple[int, ...]:
        own = [seats[name].device for name in names[kind]]  # type: ignore[index]
        return tuple(dict.fromkeys(number_of(device) for device in own if device != CPU))

    return Arrangement(
        simulators=rollout.simulators,
        generators=rollout.generators,
        env_batches=rollout.env_batches,
        rows=rollout.rows,
        slots=max(1, rollout.rows // (rollout.largest_slot_rows or rollout.rows)),
        max_rows=batching.max_rows if isinstance(batching, LimitedBatching) else 0,
        max_requests=batching.max_requests if isinstance(batching, LimitedBatching) else 0,
        micro_batch=config.training.micro_batch_steps,
        sharing=config.placement.sharing,
        simulator_devices=numbers("simulators"),
        generator_devices=numbers("generators"),
        trainer_devices=numbers("trainer"),
    )


def changed_lines(config: RunConfig, one: Arrangement) -> list[str]:
    """The settings that differ from the recipe's, each as `section.key=value` to paste behind a command."""
    found = []
    for name, value in one.settings().items():
        own: Any = config
        for part in name.split("."):
            own = getattr(own, part)
        if own != value and (name, own, value) not in _THE_SAME:
            found.append(f"{name}={'null' if value is None else value}")
    return found


#: Values that mean what the recipe's own value means.
_THE_SAME = (
    *((f"placement.{kind}.devices", None, CPU) for kind in ("simulators", "generators", "trainer")),
    ("placement.trainer.ranks", None, 1),
)


def devices_text(devices: Sequence[int]) -> str:
    """Device ids as a recipe has them: (0, 1, 2, 6) → 0-2,6; none → cpu."""
    parts: list[list[int]] = []
    for number in devices:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{own[0]}-{own[-1]}" if len(own) > 1 else str(own[0]) for own in parts) or CPU


def neighbours(one: Arrangement, choices: Mapping[str, Sequence[Any]]) -> Iterator[Arrangement]:
    """Arrangements that differ in one of the choices, the next smaller or larger value, or any other of those that have
    no order; or in env batches and slots together. Rows stay the same in all."""
    for name, values in choices.items():
        own = getattr(one, name)
        ordered = all(isinstance(value, int) for value in values)
        place = values.index(own) if own in values else -1
        near = [values[i] for i in (place - 1, place + 1) if 0 <= i < len(values)] if ordered else values
        for value in near:
            if value == own:
                continue
            if (changed := reshaped(one, **{name: value})) is not None:
                yield changed
    for env_batches, slots in product(choices.get("env_batches", ()), choices.get("slots", ())):
        both = env_batches != one.env_batches and slots != one.slots
        if both and (changed := reshaped(one, env_batches=env_batches, slots=slots)) is not None:
            yield changed


def reshaped(one: Arrangement, **changes: Any) -> Arrangement | None:
    """The arrangement with these changes and as many rows in all; None if the rows do not divide, or a pass has fewer
    than a slot, whose request is never split."""
    changed = replace(one, **changes)
    rows, rest = divmod(one.all_rows, changed.simulators * changed.env_batches)
    if rest or rows < changed.slots or 0 < changed.max_rows < -(-rows // changed.slots):
        return None
    return replace(changed, rows=rows)
