"""What `placement.moves` may change in a run: by its devices, its settings, and what fits into memory."""

from __future__ import annotations

from collections import Counter

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.placed import Placed, evaluator_name, find_devices, generator_names
from polyrhythm.plugins.memory_estimate.plan import Machine, Planner, with_settings
from polyrhythm.plugins.memory_estimate.room import free_memory, free_on
from polyrhythm.runtime.devices import CPU, number_of
from polyrhythm.runtime.messages import TRAINER, station_of
from polyrhythm.scheduler.settings import MoveRules
from polyrhythm.specs import EnvSpec

#: Sizes of micro-batches, as multiples of the recipe's.
_SMALLER, _LARGER = (0.25, 0.5), (2, 4, 8)


def move_rules(config: RunConfig, placed: Placed, spec: EnvSpec | None = None) -> MoveRules | None:
    """None if the run does not train, or for nothing. spec: of the environment; without it all is taken to fit.
    ConfigError: nothing could be changed."""
    if not config.placement.moves or not placed.names["trainer"]:
        return None
    if isinstance(config.batching, StreamsBatching):
        raise ConfigError("placement.moves = true: streams have no passes whose times are forecast; leave it out")
    devices: dict[str, tuple[int, ...]] = dict(placed.lease.devices) if placed.lease is not None else {}
    for name, seat in placed.seats.items():
        if seat.device != CPU:
            own = devices.get(station_of(name), ())
            devices[station_of(name)] = tuple(sorted({*own, number_of(seat.device)}))
    stations = Counter(number for own in devices.values() for number in own)
    generators, evaluator = generator_names(config), evaluator_name(config)
    able = [name for name in generators if name != evaluator]
    shared = any(stations[number] > 1 for name in able for number in devices.get(name, ()))
    memory = _Memory(config, spec)
    together = _leases_together(placed) and memory.fits({"placement.sharing": "share"})
    sizes = _micro_batches(config, memory)
    if not config.freshness.max_lag and (not shared or len(generators) == 1) and not together and not sizes:
        raise ConfigError(
            "placement.moves = true: nothing can be moved, as freshness.max_lag is 0, training.micro_batch_steps is "
            "not set, and there are no two generators of which one shares a device; raise max_lag, set "
            "micro_batch_steps, place them so, or leave it out"
        )
    return MoveRules(devices, config.training.micro_batch_steps if sizes else 0, sizes, together)


class _Memory:
    def __init__(self, config: RunConfig, spec: EnvSpec | None) -> None:
        self._config = config
        devices = find_devices(config)
        self._planner = None if spec is None else Planner(spec, Machine(devices, free_on(devices, free_memory)))

    def fits(self, settings: dict[str, object]) -> bool:
        """Whether the run fits by estimate with these settings."""
        return self._planner is None or self._planner.plan(with_settings(self._config, settings)).fits


def _leases_together(placed: Placed) -> bool:
    """Whether a generator and the trainer lease one device."""
    leased = placed.lease.devices if placed.lease is not None else {}
    own = {*leased.get(TRAINER, ())}
    return any(own & {*devices} for name, devices in leased.items() if name in placed.names["generators"])


def _micro_batches(config: RunConfig, memory: _Memory) -> tuple[int, ...]:
    """Sizes that are a part or a multiple of the recipe's, up to those of an optimizer step, and that fit; none where
    tokens bound them, or the recipe does not cut an optimizer step."""
    training = config.training
    own, most = training.micro_batch_steps, training.minibatch_steps or 8 * training.micro_batch_steps
    if not own or training.micro_batch_tokens:
        return ()
    smaller = {max(1, round(own * share)) for share in _SMALLER}
    larger = []
    for size in dict.fromkeys(min(most, own * times) for times in _LARGER):
        if size > own and not memory.fits({"training.micro_batch_steps": size}):
            break
        larger.append(size)
    found = tuple(sorted({*smaller, own, *larger}))
    return found if len(found) > 1 else ()
