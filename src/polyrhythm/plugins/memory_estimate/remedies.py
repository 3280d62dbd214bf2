"""Finds settings with which a run fits, each verified by a plan of the run.

First each change alone, the cheapest for the run first. If none suffices, changes are combined, each where memory is
still short, and unneeded ones are reverted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import LimitedBatching, StreamsBatching
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.pipeline.array_specs import env_batch_infos
from polyrhythm.pipeline.placed import trainer_ranks
from polyrhythm.plugins.memory_estimate.needs import (
    HOST,
    LENT,
    PRECOMPUTED,
    longest_sample,
    micro_batch_rows,
    pass_rows,
    stream_places,
)
from polyrhythm.plugins.memory_estimate.plan import DeviceMemory, MemoryPlan, Planner, with_settings
from polyrhythm.plugins.ranks import check_ranks
from polyrhythm.policies.traits import settings_traits
from polyrhythm.runtime.messages import station_of

_MICRO, _TOKENS = "training.micro_batch_steps", "training.micro_batch_tokens"
_ROWS, _SAMPLES = "batching.max_rows", "training.mini_batch_samples"
_DEVICES, _RANKS, _STRATEGY = "placement.trainer.devices", "placement.trainer.ranks", "placement.trainer.strategy"
_WITHIN = "placement.trainer.shard.within"
_CACHE = "policy.engine.cache_gib"
_SHARING, _LEASED = "placement.sharing", "placement.lease.devices"
#: Most changes that are put together.
_MOST = 12

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings with which the run fits. totals: device -> bytes, for devices that were too small."""

    settings: Settings
    totals: Mapping[str, int]

    def text(self) -> str:
        """`training.micro_batch_steps=32`, several separated by spaces."""
        return " ".join(f"{name}={_yaml(value)}" for name, value in self.settings.items())

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {"settings": dict(self.settings), "totals": dict(self.totals)}


def find_remedies(
    planner: Planner, config: RunConfig, *, most: int | None = None, certain: bool = False
) -> list[Remedy]:
    """Up to `most` remedies with which every device fits; [] if it fits already or none is known.

    certain: only the certain memory has to fit. Without it, each tried policy takes seconds.
    """
    start = _Variant(config, {})
    search = _Search(planner, start, certain)
    full = search.full(start)
    if not full:
        return []
    remedies = (change() for change in _single(search, start, full))
    found = list(islice((remedy for remedy in remedies if remedy is not None), most))
    if not found and (remedy := _together(search, start)) is not None:
        found = [remedy]
    return found


@dataclass(frozen=True, slots=True)
class _Variant:
    """The run with some settings changed."""

    config: RunConfig
    settings: Settings

    def changed(self, settings: Settings) -> _Variant:
        return _Variant(with_settings(self.config, settings), {**self.settings, **settings})


@dataclass(frozen=True, slots=True)
class _Search:
    """Plans variants of a run. certain: without estimated parts."""

    planner: Planner
    start: _Variant
    certain: bool

    def plan(self, variant: _Variant) -> MemoryPlan:
        """Plan a variant; omits the passes if the certain memory does not fit already."""
        certain = self.planner.plan(variant.config, certain=True)
        return self.planner.plan(variant.config) if certain.fits and not self.certain else certain

    def full(self, variant: _Variant) -> list[DeviceMemory]:
        """The devices that are too small."""
        return [device for device in self.plan(variant).devices if not device.fits]

    def is_possible(self, variant: _Variant) -> bool:
        try:
            self.planner.form(variant.config)
        except (PolyrhythmError, ValueError):
            return False
        return True

    def remedy(self, variant: _Variant) -> Remedy | None:
        if not self.is_possible(variant) or not (plan := self.plan(variant)).fits:
            return None
        names = {device.name for device in self.full(self.start)}
        return Remedy(variant.settings, {x.name: x.total() for x in plan.devices if x.name in names})

    def largest(self, variant: _Variant, setting: str, least: int, most: int, unit: int = 1) -> Remedy | None:
        """The largest multiple of `unit` in `least`..`most` - 1 with which the variant fits; memory must not
        decrease with it."""

        def fits(value: int) -> bool:
            return self.plan(variant.changed({setting: value * unit})).fits

        low, high = -(-least // unit), -(-most // unit)
        if low >= high or not fits(low):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return self.remedy(variant.changed({setting: low * unit}))


# ---------------------------------------------------------------- changes


def _single(search: _Search, start: _Variant, full: list[DeviceMemory]) -> Iterator[Callable[[], Remedy | None]]:
    """The changes that may help on the full devices, each alone."""
    purposes = {part.purpose for device in full for part in device.parts}
    lacks_passes = not purposes & {"micro-batch", "pass"}  # omitted, because the weights are too large already
    if "micro-batch" in purposes:
        yield lambda: _largest_micro_batch(search, start)
    if purposes & {"pass", "keys and values"} and isinstance(start.config.batching, LimitedBatching | StreamsBatching):
        yield lambda: _most_rows(search, start)
    if settings_traits(start.config.policy).engine.cache in purposes:
        yield lambda: _largest_cache(search, start)
    done: set[str] = set()  # the smallest number of ranks that fits is enough

    def tried(settings: Settings) -> Remedy | None:
        found = None if _DEVICES in done and _DEVICES in settings else search.remedy(start.changed(settings))
        done.update(settings if found else ())
        return found

    for settings in _switches(search.planner, start, full):
        if not (lacks_passes and "policy.gradient_checkpointing" in settings):
            yield lambda own=settings: tried(own)  # type: ignore[misc]
    if any(device.name == HOST for device in full) and purposes & {"arena", "samples of an update", *PRECOMPUTED}:
        yield lambda: _most_samples(search, start)


def _switches(planner: Planner, variant: _Variant, full: list[DeviceMemory]) -> Iterator[dict[str, Any]]:
    """Switches of settings that may help on these devices, the cheapest first; numbers of ranks ascending."""
    config = variant.config
    policy: Any = config.policy
    trained = {part.purpose for device in full for part in device.parts if station_of(part.station) == "trainer"}
    devices = [device for device in full if device.name != HOST]
    on_device = trained & {"weights", "gradients"} and devices
    yield from _copies(config, full)
    if on_device and not config.training.optimizer.offload:
        yield {"training.optimizer.offload": True}
    passes = trained - {LENT, *PRECOMPUTED, "samples of an update"}
    if passes and settings_traits(policy).adapts and not policy.gradient_checkpointing:
        yield {"policy.gradient_checkpointing": True}
    if on_device:
        yield from _divisions(planner, config)
    several = any(len({*map(station_of, device.stations())}) > 1 for device in devices)
    if several and config.placement.sharing == "share":
        yield {_SHARING: "lease"}
    elif several and config.placement.lease.devices not in (None, "all"):
        yield {_LEASED: None}
    if trained and settings_traits(policy).adapts:
        for part in {"all": ("expert", "lora"), "expert": ("lora",)}.get(policy.train, ()):
            yield {"policy.train": part}


def _copies(config: RunConfig, full: list[DeviceMemory]) -> Iterator[dict[str, Any]]:
    """Switches of what is kept twice, or elsewhere."""
    purposes = {part.purpose for device in full for part in device.parts}
    if (wanted := _precomputed_mib(full)) > config.training.precomputed_mib:
        yield {"training.precomputed_mib": wanted}
    if LENT in purposes:
        yield {"training.precomputed_mib": 0}
    if "weights of the evaluation" in purposes:
        yield {"evaluation.weights": "pause"}


def _divisions(planner: Planner, config: RunConfig) -> Iterator[dict[str, Any]]:
    """Ways to shard the trainer over its ranks, or over more ranks on separate devices, that `train` accepts."""
    own = trainer_ranks(config, planner.machine.devices)
    if own > 1 and config.placement.trainer.strategy == "replicate":
        yield {_STRATEGY: "shard"}
    if own > 1 and len(planner.machine.devices.nodes) > 1 and config.placement.trainer.shard.within == "node":
        yield {_STRATEGY: "shard", _WITHIN: "all"}
    for ranks in range(own + 1, planner.machine.devices.count + 1):
        try:
            check_ranks(config, ranks)
        except ConfigError:
            return
        told = {_RANKS: ranks} if config.placement.trainer.ranks is not None else {}
        yield {_DEVICES: f"0-{ranks - 1}", **told, _STRATEGY: "shard"}


def _precomputed_mib(full: list[DeviceMemory]) -> int:
    """MiB of precomputed outputs of a frozen part on the host, if the host is too small."""
    parts = [part for device in full if device.name == HOST for part in device.parts]
    return max((-(-part.nbytes // 2**20) for part in parts if part.purpose == PRECOMPUTED[0]), default=0)


def _largest_micro_batch(search: _Search, variant: _Variant) -> Remedy | None:
    """The largest micro-batch that fits, in chunk steps, or in tokens if rows differ in length."""
    form = search.planner.form(variant.config)
    steps = longest_sample(variant.config, search.planner.spec, form)
    ranks = trainer_ranks(variant.config, search.planner.machine.devices)
    rows = micro_batch_rows(variant.config, steps, ranks, form.row_tokens)
    if form.row_tokens:
        return search.largest(variant, _TOKENS, form.row_tokens, rows * form.row_tokens, form.row_tokens)
    return search.largest(variant, _MICRO, 1, rows)


def _most_rows(search: _Search, variant: _Variant) -> Remedy | None:
    spec = search.planner.spec
    most = stream_places(variant.config, spec) or pass_rows(variant.config, spec)
    return search.largest(variant, _ROWS, _fewest_rows(search, variant), most)


def _largest_cache(search: _Search, variant: _Variant) -> Remedy | None:
    """The largest key-value cache of the engine that fits, in whole GiB, with room for one row."""
    form = search.planner.form(variant.config)
    own = (form.engine or {}).get(settings_traits(variant.config.policy).engine.cache, 0)
    return search.largest(variant, _CACHE, max(1, -(-form.row_cache // 2**30)), -(-own // 2**30))


def _most_samples(search: _Search, variant: _Variant) -> Remedy | None:
    """The most samples per update that fit, in whole groups."""
    unit = variant.config.groups.size
    return search.largest(variant, _SAMPLES, unit, variant.config.training.mini_batch_samples, unit)


def _together(search: _Search, start: _Variant) -> Remedy | None:
    """Combine changes, each where memory is still short, until the smallest micro-batch fits."""
    if (found := _fewer_rows(search, start)) is not None:
        return found
    variant = start
    for _ in range(_MOST):
        switches = _switches(search.planner, variant, search.full(variant))
        changed = next((x for x in map(variant.changed, switches) if search.is_possible(x)), None)
        if changed is None:
            return None
        variant = changed
        if _fewer_rows(search, variant):
            return _without_needless(search, start, variant)
    return None


def _fewer_rows(search: _Search, variant: _Variant) -> Remedy | None:
    """The variant unchanged; else with the largest micro-batch; else with the fewest rows per pass, then the largest
    micro-batch, then as many rows as still fit."""
    found = search.remedy(variant) or _largest_micro_batch(search, variant)
    if (
        found is not None
        or search.certain
        or not isinstance(variant.config.batching, LimitedBatching | StreamsBatching)
    ):
        return found
    fewest = variant.changed({_ROWS: _fewest_rows(search, variant)})
    if (found := _largest_micro_batch(search, fewest)) is None:
        return None
    return _most_rows(search, variant.changed({**found.settings, _ROWS: variant.config.batching.max_rows})) or found


def _fewest_rows(search: _Search, variant: _Variant) -> int:
    infos = env_batch_infos(variant.config, search.planner.spec)
    return max(slot.rows for own in infos for info in own for slot in info.slots)


def _without_needless(search: _Search, start: _Variant, variant: _Variant) -> Remedy | None:
    """The variant without unneeded changes, and with its largest micro-batch."""
    for name in variant.settings:
        if name not in (_STRATEGY, _RANKS) or _DEVICES not in variant.settings:
            dropped = {_DEVICES, _RANKS, _STRATEGY} if name == _DEVICES else {name}
            left = {key: value for key, value in variant.settings.items() if key not in dropped}
            fewer = start.changed(left)
            if left and _fewer_rows(search, fewer):
                variant = fewer
    return _fewer_rows(search, variant)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
