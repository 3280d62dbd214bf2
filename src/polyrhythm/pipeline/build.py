"""Builds all stations of a run from its configuration."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.conductors import build_conductor
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import DynamicBatching, LimitedBatching, StreamsBatching
from polyrhythm.config.streaming import why_whole_updates
from polyrhythm.envs.base import EnvSettings
from polyrhythm.errors import ConfigError, RunHalted
from polyrhythm.pipeline.array_specs import arena_layout, bucket_sizes, scored_evaluations, step_settings
from polyrhythm.pipeline.env_batches import env_batch_infos
from polyrhythm.pipeline.observers.failures import SampleFailureLog
from polyrhythm.pipeline.observers.metrics import check_metrics
from polyrhythm.pipeline.persistence.checkpoints import STATES, SavedRun
from polyrhythm.pipeline.persistence.restore import restore_run
from polyrhythm.pipeline.placed import (
    EVALUATION_GENERATOR,
    TRAINER,
    Placed,
    evaluator_name,
    generator_names,
    place,
    scorer_names,
    trainer_ranks,
)
from polyrhythm.pipeline.run_loop import RunLoop
from polyrhythm.pipeline.seats import describe_seat
from polyrhythm.plugins.cluster.hosts.build import Places, build_hosts_launcher, open_hosts
from polyrhythm.plugins.cluster.hosts.nodes import Node
from polyrhythm.plugins.cluster.places import slots_of, spread_over
from polyrhythm.plugins.join.places import OpenPlaces, open_places
from polyrhythm.plugins.scoring.scorer_factory import ScorerFactory
from polyrhythm.policies.base import Policy, PolicySettings, as_settings
from polyrhythm.policies.traits import settings_traits
from polyrhythm.runtime.factories import NOBODY_JOINS, StationFactory, StationList
from polyrhythm.runtime.launcher import Launcher, build_inline_launcher, build_local_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.tensors import use_one_thread
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.scheduler.records import EnvBatchInfo, Episode, SampleEvaluated, WeightsOffered
from polyrhythm.scheduler.settings import LeaseSettings, SchedulerSettings, ScoringRules
from polyrhythm.specs import EnvSpec, WeightsLayout
from polyrhythm.specs.finite import ENVIRONMENT, POLICY
from polyrhythm.stations.generator_factory import Evaluates, GeneratorFactory, PolicyFactory, StreamGeneratorFactory
from polyrhythm.stations.simulator_factory import SimulatorFactory
from polyrhythm.stations.trainer_factory import TrainerFactory
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import load_state

log = logging.getLogger(__name__)

#: Folder of the stations' logs in a run's folder.
LOGS = "logs"


@dataclass(slots=True)
class Pipeline:
    """The connected parts of a run. weights: the published ones; states: the trainer's, if there is a folder; failures:
    of samples; spec: of the environments; placed: its stations; places: for simulators that join, if any may."""

    loop: RunLoop
    launcher: Launcher
    weights: Weights
    states: TrainerStates | None
    failures: SampleFailureLog
    spec: EnvSpec
    placed: Placed
    places: OpenPlaces | None = None

    def evaluate(self, name: str, episodes: Sequence[Episode]) -> list[SampleEvaluated]:
        """Run these episodes and return their results in the order of finishing. RunHalted: all were dropped."""
        results = self.loop.evaluate(name, episodes)
        if not results:
            raise RunHalted(
                f"every episode of the evaluation was dropped, the last one: {self.failures.last}; fix what raised it"
            )
        if dropped := len(episodes) - len(results):
            message = "evaluation %s: %d of %d episodes were dropped and are missing in its result, the last one: %s"
            log.warning(message, name, dropped, len(episodes), self.failures.last)
        return results

    def close(self) -> None:
        try:
            self.launcher.close()
        finally:
            if self.places is not None:
                self.places.close()


def env_settings(config: RunConfig) -> EnvSettings:
    """The environment's settings. ConfigError if a user-defined class lacks a method."""
    if not isinstance(config.env, EnvSettings):
        raise ConfigError(f"env.type = {getattr(config.env, 'type', '')}: its settings need spec() and build(rows)")
    return config.env


def policy_settings(config: RunConfig) -> PolicySettings:
    """The policy's settings. ConfigError if a user-defined class does not fulfil the contract."""
    try:
        return as_settings(config.policy)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def scheduler_settings(
    config: RunConfig, spec: EnvSpec, buckets: tuple[int, ...] = (), lease: LeaseSettings | None = None
) -> SchedulerSettings:
    """The conductor's settings. buckets: row counts that passes are padded to; lease: stations that are on their
    devices in turn."""
    rollout, freshness, batching, groups = config.rollout, config.freshness, config.batching, config.groups
    limits: dict[str, Any] = {}
    if isinstance(batching, LimitedBatching):
        limits = {"max_rows": batching.max_rows, "max_requests": batching.max_requests}
    if isinstance(batching, StreamsBatching):
        limits = {"max_rows": batching.max_rows}
    if isinstance(batching, DynamicBatching):
        limits |= {"max_wait_s": batching.max_wait_ms / 1000.0, "fire_when_all_wait": batching.fire_when_all_wait}
    return SchedulerSettings(
        batch_size=config.training.batch_size,
        sync_interval=freshness.sync_interval,
        max_lag=freshness.max_lag,
        bound=freshness.bound,
        on_update=freshness.on_update,
        order=config.training.order,
        streaming=config.training.streaming,
        parts=not why_whole_updates(config, ranks=trainer_ranks(config), leased=config.placement.sharing == "lease"),
        group_size=groups.size,
        min_return=-math.inf if groups.min_return is None else groups.min_return,
        max_return=math.inf if groups.max_return is None else groups.max_return,
        max_filtered=groups.max_filtered,
        on_max_filtered=groups.on_max_filtered,
        extra_groups=groups.extra_groups,
        extra_members=groups.extra_members,
        evaluator=evaluator_name(config),
        evaluator_only=config.evaluation.weights == "own_generator",
        evaluation_priority=config.evaluation.priority,
        evaluation_max_wait_s=config.evaluation.max_wait_s,
        evaluation_hedge=config.evaluation.hedge,
        segments=rollout.segment_steps > 0,
        batching=batching.type,
        buckets=buckets,
        routing=rollout.routing,
        queue_key=rollout.queue_key,
        tasks=len(spec.tasks),
        training_states=spec.training_states,
        seed=config.seed,
        episode_deadline_s=rollout.episode_deadline_s,
        max_attempts=rollout.max_attempts,
        quarantine_after=rollout.quarantine_after,
        max_dropped=rollout.max_dropped,
        lease=lease,
        scoring=_scoring_rules(config, spec),
        **limits,
    )


def _scoring_rules(config: RunConfig, spec: EnvSpec) -> ScoringRules | None:
    if config.scoring is None:
        return None
    batches = [info for infos in env_batch_infos(config, spec) for info in infos]
    rows = sum(slot.rows for info in batches for slot in info.slots if not info.reserved)
    return ScoringRules(config.scoring.max_attempts, scored_evaluations(rows))


def build_pipeline(  # noqa: PLR0913 - what every run may be told
    config: RunConfig,
    initial: Policy | Path | None = None,
    folder: Path | None = None,
    *,
    saved: SavedRun | None = None,
    version: int = 0,
    trainer: bool = True,
    start: bool = True,
    record: bool = False,
    nodes: Sequence[Node] = (),
) -> Pipeline:
    """Build the parts of a run, and start them if `start`. The configuration has passed `pipeline.validation.check`.

    initial: the first weights, published as `version`, instead of those of the seed; with a trainer a policy file,
    which the trainer reads and publishes. folder: for logs and the trainer's states; launcher local needs one. saved:
    the run to resume. trainer: build one.
    record: keep every decision in `loop.trace`. nodes: places for the stations, in turn; none: as `launcher` says.
    StartError, RunHalted: the stations cannot be started.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        use_one_thread()
    spec = env_settings(config).spec()
    infos = env_batch_infos(config, spec, trainer=trainer)
    settings = policy_settings(config)
    form = settings.form(spec)
    states = _trainer_states(config, folder)
    placed = place(config, trainer=trainer, folder=folder)
    buckets = bucket_sizes(config, infos, on_device=placed.serves_on_device)
    places = open_places(config, folder)
    with ExitStack() as undo:
        if places is not None:
            undo.callback(places.close)
        factories = _rollout_factories(config, spec, infos, form.chunk, buckets, places)
        if trainer:
            assert not isinstance(initial, torch.nn.Module), "the trainer reads its first weights from a file"
            factories.append(_trainer_factory(config, spec, states, str(initial or ""), version))
        factories += _scorer_factories(config, spec)
        layout = arena_layout(config, spec, infos, form, trainer=trainer)
        stations = _with_seats(factories, placed)
        launcher = _launcher(config, stations, layout, WeightsLayout.of(form.published), folder, nodes, places)
        undo.callback(launcher.close)
        conductor = build_conductor(scheduler_settings(config, spec, buckets, placed.lease))
        if states is not None and trainer:
            states.reset(saved.trainer if saved else None)
        if saved is not None:
            conductor = restore_run(saved, conductor.settings, launcher, config.training.versions)
            version = saved.version
            launcher.weights.publish(version, saved.policy)
        elif not trainer:
            launcher.weights.publish(version, _state(initial, settings, spec, config.seed))
        failures = _failure_log(config, spec, folder)
        loop = RunLoop(conductor, launcher, time.monotonic, observers=[failures], record=record)
        _offer_weights(loop, version, there=launcher.weights.newest >= 0 or not placed.seats[TRAINER].leases)
        if places is not None:
            places.announce()
        if start:
            loop.start()
        undo.pop_all()
    return Pipeline(loop, launcher, launcher.weights, states, failures, spec, placed, places)


def _trainer_states(config: RunConfig, folder: Path | None) -> TrainerStates | None:
    """The states that the trainer saves in the run's folder, if it has one."""
    if folder is None:
        return None
    kept = config.checkpoint
    return TrainerStates(
        str(folder / STATES),
        kept.every_versions,
        kept.keep_last,
        last=config.training.versions,
        keep_every=kept.keep_every,
        sync_interval=config.freshness.sync_interval,
    )


def _failure_log(config: RunConfig, spec: EnvSpec, folder: Path | None) -> SampleFailureLog:
    """Of the run's samples that fail, by task."""
    logs = folder / LOGS if folder and config.launcher != "inline" else None
    return SampleFailureLog(logs, _sources_of_numbers(config), [task.name for task in spec.tasks])


def _with_seats(factories: Sequence[StationFactory], placed: Placed) -> StationList:
    """Each factory with the seat of its process, the trainer's with one for each rank; the log says which."""
    for name, seat in placed.seats.items():
        log.info("%s: %s", name, describe_seat(seat))
    for sentence in placed.warnings:
        log.warning(sentence)
    return [(factory, *placed.seats_of(factory.name)) for factory in factories]


def _offer_weights(loop: RunLoop, version: int, *, there: bool) -> None:
    """Have the generators take the first weights. there: they are published before any station can be told; else the
    trainer is told to publish them once it is on the device that it leases."""
    if there:
        loop.submit(WeightsOffered(version))


def _state(initial: Policy | Path | None, settings: PolicySettings, spec: EnvSpec, seed: int) -> Mapping[str, Tensor]:
    """The weights that the main process publishes in a run without a trainer."""
    if isinstance(initial, Path):
        state: Mapping[str, Tensor] = load_state(initial)["policy"]
        return state
    policy = initial if initial is not None else settings.build(spec, seed=seed, device="cpu", role="train")
    return policy.state_dict()


def _sources_of_numbers(config: RunConfig) -> dict[str, str]:
    """The settings that name the policy and the environment, for reports of NaN or inf."""
    sections = {POLICY: ("policy", config.policy), ENVIRONMENT: ("env", config.env)}
    return {who: f"{name}.type = {getattr(section, 'type', '')}" for who, (name, section) in sections.items()}


def _launcher(
    config: RunConfig,
    stations: StationList,
    layout: ArenaLayout,
    weights: WeightsLayout,
    folder: Path | None,
    nodes: Sequence[Node],
    joins: OpenPlaces | None,
) -> Launcher:
    joining = joins.joining if joins is not None else NOBODY_JOINS
    if config.launcher == "inline":
        return build_inline_launcher(stations, layout, weights, joining=joining)
    assert folder is not None, "processes write their logs to a folder"
    transport, logs = config.data_plane.transport, folder / LOGS
    if config.launcher == "ray":
        from polyrhythm.plugins.cluster.ray.launch import build_ray_launcher  # ray

        return build_ray_launcher(
            stations,
            layout,
            weights,
            config.supervision,
            logs,
            settings=config.ray,
            slots=slots_of(stations),
            trainer=TRAINER,
            generators=generator_names(config),
            check_report=check_metrics,
            joining=joining,
        )
    if nodes:
        places = Places(nodes[0].address, spread_over(nodes, stations), slots_of(stations), TRAINER)
        hosts = open_hosts(stations, layout, weights, config.supervision, logs, places, check_metrics, joining)
        return build_hosts_launcher(hosts)
    return build_local_launcher(
        stations, layout, weights, config.supervision, logs, transport, check_report=check_metrics, joining=joining
    )


def _rollout_factories(
    config: RunConfig,
    spec: EnvSpec,
    infos: Sequence[Sequence[EnvBatchInfo]],
    chunk: int,
    buckets: tuple[int, ...],
    places: OpenPlaces | None,
) -> list[StationFactory]:
    """The factories of simulators and generators, in this order. places: for simulators that join."""
    step = step_settings(config, chunk, whole=bool(spec.chunk))
    env = config.env.model_dump(mode="json")
    own = _policy_factory(config, spec)
    factories: list[StationFactory] = []
    for batches in infos:
        name, rows = batches[0].name.rpartition(".")[0], sum(slot.rows for slot in batches[0].slots)
        if places is not None and name in places.joining.stations:
            factories.append(places.factory(name, spec, batches[0], step))
            continue
        factories.append(SimulatorFactory(name, env, spec, rows, tuple(batches), step))
    evaluator = evaluator_name(config) if any(info.reserved for own_infos in infos for info in own_infos) else ""
    for name in generator_names(config):
        evaluates: Evaluates = "too" if name == evaluator else "no"
        factories.append(_generator_factory(config, name, own, evaluates, buckets))
    if evaluator == EVALUATION_GENERATOR:
        factories.append(_generator_factory(config, evaluator, own, "only", buckets))
    return factories


def _scorer_factories(config: RunConfig, spec: EnvSpec) -> list[StationFactory]:
    scoring = config.scoring
    if scoring is None:
        return []
    env = config.env.model_dump(mode="json")
    return [
        ScorerFactory(name, scoring.function, env, spec, scoring.at_a_time, dict(scoring.options))
        for name in scorer_names(config)
    ]


def _generator_factory(
    config: RunConfig, name: str, policy: PolicyFactory, evaluates: Evaluates, buckets: tuple[int, ...]
) -> StationFactory:
    """The factory of a generator of the form that `batching` asks for."""
    if isinstance(config.batching, StreamsBatching):
        resumes = config.freshness.on_update == "abort"
        return StreamGeneratorFactory(name, policy, evaluates, places=config.batching.max_rows, resumes=resumes)
    return GeneratorFactory(name, policy, evaluates, buckets, config.rollout.graphs)


def _trainer_factory(
    config: RunConfig, spec: EnvSpec, states: TrainerStates | None, initial: str, version: int
) -> StationFactory:
    """The factory of the trainer: it loads the policy file `initial` ("": the seed's weights), publishes `version`."""
    return TrainerFactory(
        TRAINER,
        _policy_factory(config, spec),
        config.algorithm.model_dump(mode="json"),
        config.training.model_dump(mode="json"),
        total_updates=config.training.versions * config.freshness.sync_interval,
        states=states,
        initial=initial,
        version=version,
        strategy=config.placement.trainer.strategy,
        shard=config.placement.trainer.shard.model_dump(mode="json"),
        token_versions=config.freshness.on_update == "abort" or settings_traits(config.policy).engine.fresh_cache,
        sync_interval=config.freshness.sync_interval,
    )


def _policy_factory(config: RunConfig, spec: EnvSpec) -> PolicyFactory:
    return PolicyFactory(config.policy.model_dump(mode="json"), spec, config.seed)
