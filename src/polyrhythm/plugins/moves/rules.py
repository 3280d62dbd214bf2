"""What `placement.moves` may change in a run: by its devices, its settings, and what fits into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from polyrhythm.checks import CheckContext, Result
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.conformance import Finding
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.placed import Placed, evaluator_name, find_devices, generator_names, place
from polyrhythm.plugins.memory_estimate.needs import longest_sample, minibatch_rows
from polyrhythm.plugins.memory_estimate.plan import Machine, Planner, with_settings
from polyrhythm.plugins.memory_estimate.room import free_memory, free_on
from polyrhythm.plugins.moves.operation import LAG_LEVELS
from polyrhythm.runtime.devices import CPU, number_of
from polyrhythm.runtime.messages import TRAINER, station_of
from polyrhythm.scheduler.settings import MoveRules
from polyrhythm.specs import EnvSpec

#: Sizes of micro-batches, as multiples of the recipe's.
_SMALLER, _LARGER = (0.25, 0.5), (2, 4, 8)
#: Settings of stations that are on a leased device at once.
_TOGETHER = {"placement.sharing": "share"}


#: Free bytes of a device by its name, None if unknown.
Free = Callable[[str], int | None]


def move_rules(
    config: RunConfig, placed: Placed, spec: EnvSpec | None = None, free: Free | None = None
) -> MoveRules | None:
    """None if the run does not train, or for nothing. spec: of the environment; without it all is taken to fit. free:
    by default what is free now.

    Any size of micro-batches fits with any sharing. ConfigError: nothing could be changed in any memory; it is no error
    that none fits at present (`moves_found`)."""
    if not config.placement.moves or not placed.names["trainer"]:
        return None
    if isinstance(config.batching, StreamsBatching):
        raise ConfigError("placement.moves = true: streams have no passes whose times are forecast; leave it out")
    devices: dict[str, tuple[int, ...]] = dict(placed.lease.devices) if placed.lease is not None else {}
    for name, seat in placed.seats.items():
        if seat.device != CPU:
            own = devices.get(station_of(name), ())
            devices[station_of(name)] = tuple(sorted({*own, number_of(seat.device)}))
    memory = _Memory(config, spec, placed, free)
    leased = _leases_together(placed)
    together = leased and memory.fits(_TOGETHER)
    sizes = _micro_batches(config, memory, _TOGETHER if together else {})
    always = config.freshness.max_lag or _may_be_off(config, devices) or leased
    if not always and not _micro_batches(config, memory, None):
        raise ConfigError(
            "placement.moves = true: nothing can be moved, as freshness.max_lag is 0, training.micro_batch_steps is "
            "not set, and there are no two generators of which one shares a device; raise max_lag, set "
            "micro_batch_steps, place them so, or leave it out"
        )
    return MoveRules(devices, config.training.micro_batch_steps if sizes else 0, sizes, together)


def moves_found(context: CheckContext) -> Result:
    """What memory allows to be moved; a note on moves that do not fit into what is free now."""
    config = context.config
    if not context.trainer or not context.sized:
        return ()
    placed = place(config)
    found = move_rules(config, placed, context.spec, context.free)
    if found is None:
        return ()
    start, memory = config.training.micro_batch_steps, _Memory(config, context.spec, placed, context.free)
    most = max(found.micro_batches, default=start)
    wanted = max(_micro_batches(config, memory, None), default=start)
    lacking = [f"training.micro_batch_steps above {most} (up to {wanted})"] * (most < wanted)
    lacking += ["placement.sharing = share"] * (found.together < _leases_together(placed))
    if lacking:
        what = f"not tried, as by estimate it does not fit into the memory that is free: {', '.join(lacking)}"
        return Finding("moves", "note", f"placement.moves = true: {what}", "look at polyrhythm plan RECIPE --memory")
    able_to = [f"training.micro_batch_steps {min(found.micro_batches)} to {most}"] if found.micro_batches else []
    able_to += ["placement.sharing lease or share"] * found.together
    able_to += ["generators off"] * _may_be_off(config, found.devices)
    if lag := config.freshness.max_lag:
        able_to.append(f"freshness.max_lag {min(LAG_LEVELS) * lag:g} to {lag:g}")
    return ", ".join(able_to)


def _may_be_off(config: RunConfig, devices: Mapping[str, Sequence[int]]) -> bool:
    """Whether a generator may be switched off: another one goes on, and it shares a device. devices: of stations."""
    stations = Counter(number for own in devices.values() for number in own)
    generators, evaluator = generator_names(config), evaluator_name(config)
    able = [name for name in generators if name != evaluator]
    return len(generators) > 1 and any(stations[number] > 1 for name in able for number in devices.get(name, ()))


class _Memory:
    def __init__(self, config: RunConfig, spec: EnvSpec | None, placed: Placed, free: Free | None) -> None:
        self._config, self._ranks = config, len(placed.names["trainer"])
        devices = find_devices(config)
        self._planner = None if spec is None else Planner(spec, Machine(devices, free_on(devices, free or free_memory)))

    def fits(self, settings: Mapping[str, object]) -> bool:
        """Whether the run fits by estimate with these settings."""
        return self._planner is None or self._planner.plan(with_settings(self._config, settings)).fits

    def step_rows(self) -> int:
        """Most chunk steps of a rank in an optimizer step; 0 if unknown."""
        config, planner = self._config, self._planner
        if planner is None:
            return config.training.minibatch_steps
        steps = longest_sample(config, planner.spec, planner.form(config))
        return minibatch_rows(config, steps, self._ranks)


def _leases_together(placed: Placed) -> bool:
    """Whether a generator and the trainer lease one device."""
    leased = placed.lease.devices if placed.lease is not None else {}
    own = {*leased.get(TRAINER, ())}
    return any(own & {*devices} for name, devices in leased.items() if name in placed.names["generators"])


def _micro_batches(config: RunConfig, memory: _Memory, sharing: Mapping[str, object] | None) -> tuple[int, ...]:
    """Sizes that are a part or a multiple of the recipe's, up to those of an optimizer step, and that fit with this
    sharing (None: all are taken to fit); none where tokens bound them, or the recipe does not cut an optimizer step."""
    own = config.training.micro_batch_steps
    if not own or config.training.micro_batch_tokens:
        return ()
    most = memory.step_rows() or _LARGER[-1] * own
    found = {own, *(size for share in _SMALLER if (size := max(1, round(own * share))) < most)}
    for size in sorted({min(most, own * times) for times in _LARGER}):
        if size > own and sharing is not None and not memory.fits({**sharing, "training.micro_batch_steps": size}):
            break
        found |= {size} if size > own else set()
    return tuple(sorted(found)) if len(found) > 1 else ()
