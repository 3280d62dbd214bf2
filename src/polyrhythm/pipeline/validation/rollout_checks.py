"""Checks that rows, slots, batches and the user's rollout functions fit the environment, and that updates fit the
trainer's ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from polyrhythm.checks import errors_of
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import DynamicBatching, LimitedBatching, StreamsBatching
from polyrhythm.conformance import Finding, raised
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.array_specs import bucket_sizes, env_batch_infos
from polyrhythm.pipeline.build import scheduler_settings
from polyrhythm.pipeline.validation.learning_checks import staleness_findings
from polyrhythm.policies.traits import settings_traits
from polyrhythm.scheduler.records import EnvBatchInfo, Request
from polyrhythm.scheduler.settings import load_function
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.env_host import refuse_segments

log = logging.getLogger(__name__)


def check_rollout(config: RunConfig, spec: EnvSpec) -> None:
    """Check rows, slots and batches against the environment's capabilities."""
    with errors_of("config"):
        scheduler_settings(config, spec)
    check_engine(config)
    infos = env_batch_infos(config, spec)
    bucket_sizes(config, infos)  # raises if they do not fit
    _check_slots(config, infos)
    with errors_of(f"rollout.segment_steps = {config.rollout.segment_steps}"):
        refuse_segments(spec, config.rollout.segment_steps)
    if spec.chunk and config.rollout.action_repeat > 1:
        raise ConfigError(
            f"rollout.action_repeat = {config.rollout.action_repeat}: a step of this environment takes a whole chunk, "
            "of which no action can be held; leave it out"
        )
    with errors_of("rollout"):
        _try_key(config.rollout.queue_key)
    episodes, states = config.evaluation.episodes, spec.initial_states * len(spec.tasks)
    if spec.training_states and episodes > states:
        log.warning(
            "evaluation.episodes = %d: the data hold out %d, which are then counted more than once, and intervals are "
            "too narrow; set it to %d",
            *(episodes, states, states),
        )


def check_engine(config: RunConfig) -> None:
    """Raise ConfigError if the engine does not support the configured batching, sharing, generators or evaluation."""
    engine = settings_traits(config.policy).engine
    if engine.streams_only and not isinstance(config.batching, StreamsBatching):
        raise ConfigError(
            f"batching.type = {config.batching.type}: {engine.streams_only} answers streams; set it to streams"
        )
    if engine.keeps_device and config.placement.sharing == "lease":
        raise ConfigError(
            f"placement.sharing = lease: {engine.keeps_device} keeps its memory on the device; set it to share"
        )
    if not engine.single:
        return
    if config.rollout.generators > 1:
        count = config.rollout.generators
        raise ConfigError(f"rollout.generators = {count}: {engine.single} has the weights of one of them; set it to 1")
    if config.evaluation.reserved_rows:
        raise ConfigError(
            f"evaluation.weights = {config.evaluation.weights}: {engine.single} has one version of the weights; set it "
            "to pause, or evaluation.every to 0"
        )


def check_weights_change(config: RunConfig) -> None:
    """Raise ConfigError if the run trains but the engine cannot receive new weights."""
    if config.training.versions and (fixed := settings_traits(config.policy).engine.fixed_weights):
        raise ConfigError(
            f"training.versions = {config.training.versions}: {fixed}, so the server cannot get new weights; name the "
            "path that loads them, or only evaluate"
        )


def settings_findings(config: RunConfig) -> Iterator[Finding]:
    """Notes on settings that are valid but do not fit together; reads only the configuration."""
    yield from staleness_findings(config)
    yield from batching_findings(config)


def batching_findings(config: RunConfig) -> Iterator[Finding]:
    """A note if every forward pass waits for requests that cannot come."""
    batching, rows = config.batching, config.all_rows
    if not isinstance(batching, DynamicBatching) or batching.fire_when_all_wait or not batching.max_wait_ms:
        return
    if rows < min(batching.max_rows, batching.max_requests):
        yield Finding(
            "batching",
            "note",
            f"batching.max_rows = {batching.max_rows}: all rows together are {rows}, so every forward pass waits for "
            f"batching.max_wait_ms = {batching.max_wait_ms:g}",
            f"set batching.fire_when_all_wait to true, or batching.max_rows to at most {rows}",
        )


def _check_slots(config: RunConfig, infos: Sequence[Sequence[EnvBatchInfo]]) -> None:
    """Raise ConfigError if a slot of a custom sharding function exceeds the batch limit."""
    if not isinstance(config.batching, LimitedBatching | StreamsBatching):
        return
    largest = max(slot.rows for own in infos for info in own if not info.reserved for slot in info.slots)
    if largest > config.batching.max_rows:
        raise ConfigError(
            f"batching.max_rows = {config.batching.max_rows}: a request is never split and {config.rollout.sharding} "
            f"makes a slot of {largest} rows; raise this, or make smaller slots"
        )


def _try_key(path: str) -> None:
    """Raise ValueError if the queue key function raises or returns keys that cannot be ordered or saved."""
    if not path:
        return
    key = load_function(path, "queue_key")
    first, second = (Request(f"e/{slot}", "simulator-0", 0, 1, 0, "", float(slot)) for slot in range(2))
    try:
        keys = key(first), key(second)
    except Exception as error:
        raise ValueError(f"queue_key {path!r} {raised(error)}; fix it there") from error
    if not all(map(_is_plain, keys)):
        raise ValueError(f"queue_key {path!r} returned {keys[0]!r}; return a number, a string, or a tuple of these")


def _is_plain(key: object) -> bool:
    """Whether the key can be ordered and saved in a checkpoint."""
    return all(map(_is_plain, key)) if isinstance(key, tuple) else type(key) in (int, float, str)


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError, with a problem for each setting, unless the mini-batches of this run fit this number of ranks.

    Groups are dealt to ranks whole, and each rank trains on its own steps; with fewer groups or steps some ranks would
    idle. ranks: of this machine (`pipeline.placed.trainer_ranks`).
    """
    if ranks == 1:
        return
    what, training = _named(config, ranks), config.training
    problems = []
    if config.launcher == "inline":
        problems.append(
            f"{what}: with launcher = inline there is one process, and so one rank; set launcher to local, or "
            "placement.trainer.ranks to 1"
        )
    size, samples = config.groups.size, training.mini_batch_samples
    if samples // size < ranks:
        those = f"{samples // size} groups of {size} samples" if size > 1 else f"{samples} samples"
        problems.append(
            f"{what}: training.mini_batch_samples = {samples} are {those}, and a rank "
            f"trains whole {'groups' if size > 1 else 'samples'}; use at most {_counted(samples // size)}, or "
            f"a training.mini_batch_samples of {ranks * size} or more"
        )
    if 0 < training.minibatch_steps < ranks:
        problems.append(
            f"{what}: training.minibatch_steps = {training.minibatch_steps} is fewer than one chunk step for each "
            f"rank; use at most {_counted(training.minibatch_steps)}, or a minibatch_steps of {ranks} or more (0: all)"
        )
    if problems:
        raise ConfigError(*problems)


def _counted(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _named(config: RunConfig, ranks: int) -> str:
    placement = config.placement
    if placement.trainer.ranks is not None:
        return f"placement.trainer.ranks = {ranks}"
    if placement.trainer.devices is not None:
        return f"placement.trainer.devices = {placement.trainer.devices} ({ranks} ranks)"
    return f"placement.preset = {placement.preset} ({ranks} ranks of the trainer)"
