"""Settings of where stations work: which devices and how many threads, by kind of station."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, model_validator

from polyrhythm.config.base import Count, Flag, InvalidSetting, NotNegative, Section, Whole
from polyrhythm.errors import nearest

#: Ranges and single device ids of at most four digits, such as 0-3,6.
_IDS = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
#: What `device`, the key for a single device, may say.
_ONE_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?")
_CHOICES = "write cpu, all, or device ids such as 0, 0-3 or 0,2,4"

Preset = Literal["colocated", "hybrid", "disaggregated"]


def parse_devices(value: Any) -> str | None:
    """`cpu`, `all`, or device ids as text: 2 → "2", [0, 2] → "0,2". InvalidSetting: anything else."""
    if value is None or value in ("cpu", "all"):
        return value  # type: ignore[no-any-return]
    numbers = value if isinstance(value, list | tuple) else [value]
    if all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        text = ",".join(map(str, numbers))
    else:
        text = value.replace(" ", "") if isinstance(value, str) else ""
    if not _IDS.fullmatch(text):
        known = _ONE_DEVICE.fullmatch(text)
        raise InvalidSetting("", value, f"not devices; write {known[1] or 0}" if known else f"not devices; {_CHOICES}")
    ids = list_device_ids(text)
    if len(set(ids)) < max(1, len(ids)):
        raise InvalidSetting("", value, "a device is named twice, or a range goes down; name each once, as in 0-3,6")
    return text


def list_device_ids(devices: str) -> tuple[int, ...]:
    """Ids of a list of devices in order: "0-2,6" → (0, 1, 2, 6); a descending range has none."""
    ids: list[int] = []
    for part in devices.split(","):
        first, _, last = part.partition("-")
        own = range(int(first), int(last or first) + 1)
        if not own:
            return ()
        ids += own
    return tuple(ids)


Devices = Annotated[str | None, BeforeValidator(parse_devices)]


class SeatSettings(Section):
    """Where the stations of one kind work."""

    devices: Devices = None
    """cpu, all, or device ids (0-3 or 0,2,4): station i has the i-th, counted round; null: by the preset, else cpu."""
    threads: Count = 1
    """Threads per operation (OMP_NUM_THREADS) of each such process."""

    @model_validator(mode="before")
    @classmethod
    def _from_device(cls, value: Any) -> Any:
        """Expand `device: cuda:1`, the key for a single device, to `devices: 1`."""
        if not isinstance(value, dict) or "device" not in value:
            return value
        device = value["device"]
        known = _ONE_DEVICE.fullmatch(device) if isinstance(device, str) else None
        if known is None:
            raise InvalidSetting("device", device, f"not cpu, cuda or cuda:N; use devices instead: {_CHOICES}")
        meant = "cpu" if device == "cpu" else known[1] or "0"
        if value.get("devices") is not None:
            raise InvalidSetting("device", device, f"devices = {value['devices']} is given too; set devices = {meant}")
        return {**{key: item for key, item in value.items() if key != "device"}, "devices": meant}


class ShardSettings(Section):
    """A trainer of several ranks with strategy shard: when its tensors are whole, and where its shards are."""

    reshard: Flag = True
    """Free a block's whole weights after its forward pass and gather them again for its backward pass."""
    cpu_offload: Flag = False
    """Keep shards, their gradients and the optimizer's moments in host memory; the optimizer steps on the CPU."""
    within: Literal["node", "all"] = "node"
    """node: the ranks of a node share the tensors, if several nodes have equally many ranks; all: all ranks do."""


class TrainerSeatSettings(SeatSettings):
    """Where the trainer works: a process for each of its ranks."""

    ranks: Count | None = None
    """Processes that train together, not inline; null: one for each device named or of the preset, else 1."""
    strategy: Literal["replicate", "shard"] = "replicate"
    """Several ranks: each has all weights (replicate, DDP), or a part of every tensor (shard, FSDP2)."""
    shard: ShardSettings = ShardSettings()
    """How weights are sharded, with strategy shard."""

    @model_validator(mode="after")
    def _shards_or_not(self) -> TrainerSeatSettings:
        if self.strategy != "shard" and self.shard != ShardSettings():
            usual = ShardSettings()
            name = next(name for name, value in self.shard if getattr(usual, name) != value)
            own = str(getattr(usual, name)).lower()
            why = f"it is for strategy shard, not {self.strategy}; leave it out, or set it to {own}"
            raise self.refusal(f"shard.{name}", why)
        return self


class LeaseSection(Section):
    """On which devices stations take turns, and how (`sharing: lease`)."""

    devices: Devices = None
    """Device ids, as 0-3 or 0,2: on the others all stations are together; null or all: no other."""
    min_hold_s: NotNegative = 1.0
    """Seconds that a station with work may keep a device that another one waits for."""
    switch_order: Literal["data_flow", "arrival"] = "data_flow"
    """Who gets a free device: data_flow: trainer, generators, simulators; arrival: whoever has waited longest."""

    @model_validator(mode="after")
    def _devices_are_ids(self) -> LeaseSection:
        if self.devices == "cpu":
            why = "the host is leased where no station has a device, and then alone; write device ids, or leave it out"
            raise self.refusal("devices", why)
        return self


class PlacementSettings(Section):
    """Devices and threads, by kind of station; `placement: NAME` is short for a preset, `placement: null` for none, and
    `placement: auto` for `start: plan` with `moves: true`.

    An inline run has one process, so threads do not count there.
    """

    preset: Preset | None = None
    """colocated, hybrid or disaggregated: devices of the kinds that name none (docs/placement.md); null for none."""
    simulators: SeatSettings = SeatSettings()
    """The simulators."""
    generators: SeatSettings = SeatSettings()
    """The generators."""
    trainer: TrainerSeatSettings = TrainerSeatSettings()
    """The trainer."""
    scorers: SeatSettings = SeatSettings()
    """The scorers; presets give them the CPU, and they lease no device."""
    sharing: Literal["share", "process", "mps", "lease"] = "share"
    """Of a device. share: time slices; process: generator and trainer as one; mps: NVIDIA's MPS; lease: in turn."""
    lease: LeaseSection = LeaseSection()
    """How they take turns."""
    start: Literal["recipe", "plan"] = "recipe"
    """plan: a new run starts as `polyrhythm plan` proposes by RECIPE.profile.json, if that file is there."""
    moves: Flag = False
    """Change between two versions what makes training faster, and keep it if measured (docs/placement.md)."""
    simulated_devices: Whole = 0
    """Devices that this machine, or each node of a cluster, is taken to have; they compute on the CPU."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        """Expand `hybrid`, and `{type: hybrid, …}` as merging writes it, to `{preset: hybrid, …}`; null means none.

        If both keys are present, a `preset` was merged over the short form, so it wins.
        """
        if value is None or isinstance(value, str):
            return _named(value)
        if isinstance(value, dict) and "type" in value:
            rest = {key: item for key, item in value.items() if key != "type"}
            return {**_named(value["type"]), **rest}
        return value


def _named(name: Any) -> dict[str, Any]:
    """The settings of a short form, `auto` or a preset's name."""
    if name == "auto":
        return {"start": "plan", "moves": True}
    if isinstance(name, str) and name not in get_args(Preset):
        known = [*get_args(Preset), "auto"]
        raise InvalidSetting("", name, f"{nearest(name, known)}it must be {', '.join(known[:-1])} or auto")
    return {"preset": name}
