"""Builds all stations of a run from its configuration."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.conductors import build_conductor
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import AutoBatching, DynamicBatching, StreamsBatching
from polyrhythm.config.streaming import why_whole_updates
from polyrhythm.envs.base import EnvSettings
from polyrhythm.errors import ConfigError, RunHalted
from polyrhythm.pipeline.array_specs import (
    arena_layout,
    bucket_sizes,
    env_batch_infos,
    scored_evaluations,
    step_settings,
)
from polyrhythm.pipeline.context import AddedStations, LaunchPlan, RunContext, StationPlan, launch
from polyrhythm.pipeline.observers.alarms import SampleFailureLog
from polyrhythm.pipeline.observers.totals import StationHosts
from polyrhythm.pipeline.persistence.checkpoints import STATES
from polyrhythm.pipeline.persistence.snapshot import restore_run
from polyrhythm.pipeline.placed import (
    EVALUATION_GENERATOR,
    Placed,
    describe_seat,
    evaluator_name,
    generator_names,
    joined_names,
    place,
    prefix_lenders,
    trainer_ranks,
)
from polyrhythm.pipeline.run_loop import RunLoop
from polyrhythm.plugin import load, table
from polyrhythm.policies.base import PolicySettings, as_settings
from polyrhythm.policies.traits import settings_traits
from polyrhythm.runtime.factories import NOBODY_JOINS, StationFactory, StationList
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.memory.tensors import use_one_thread
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.runtime.messages import TRAINER
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import Episode, SampleEvaluated, WeightsOffered
from polyrhythm.scheduler.settings import SchedulerSettings, ScoringRules
from polyrhythm.specs import EnvSpec, WeightsLayout
from polyrhythm.specs.finite import ENVIRONMENT, POLICY
from polyrhythm.stations.generator_factory import Evaluates, GeneratorFactory, PolicyFactory
from polyrhythm.stations.simulator.station import SimulatorFactory
from polyrhythm.stations.trainer_factory import TrainerFactory
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import load_state

log = logging.getLogger(__name__)

#: Folder of the stations' logs in a run's folder, and the file with what simulators need to join it.
LOGS, TOKEN_FILE = "logs", "join.token"


@dataclass(slots=True)
class Pipeline:
    """The connected parts of a run.

    states: the trainer's saved states, None without a run folder; failures: log of
    failed samples; context: what it was built from; spec: of the environment; placed: devices of the stations; hosts:
    host of each station; undo: clean-up that `close` runs, the launcher's first.
    """

    loop: RunLoop
    launcher: Launcher
    states: TrainerStates | None
    failures: SampleFailureLog
    context: RunContext
    spec: EnvSpec
    placed: Placed
    hosts: StationHosts
    undo: ExitStack

    def evaluate(self, name: str, episodes: Sequence[Episode]) -> list[SampleEvaluated]:
        """Run these episodes and return their results in the order of completion. RunHalted: every episode was
        dropped."""
        results = self.loop.evaluate(name, episodes)
        if not results:
            raise RunHalted(
                f"every episode of the evaluation was dropped, the last one: {self.failures.last}; fix what raised it"
            )
        if dropped := len(episodes) - len(results):
            message = "evaluation %s: %d of %d episodes were dropped and are missing in its result, the last one: %s"
            log.warning(message, name, dropped, len(episodes), self.failures.last)
        return results

    @property
    def weights(self) -> Weights:
        """The published versions."""
        return self.launcher.weights

    def close(self) -> None:
        self.undo.close()


def env_settings(config: RunConfig) -> EnvSettings:
    """The environment's settings. ConfigError if a user-defined class lacks a method."""
    if not isinstance(config.env, EnvSettings):
        raise ConfigError(f"env.type = {config.env_type}: its settings need spec() and build(rows)")
    return config.env


def policy_settings(config: RunConfig) -> PolicySettings:
    """The policy's settings. ConfigError if a user-defined class does not implement `PolicySettings`."""
    try:
        return as_settings(config.policy)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def scheduler_settings(
    config: RunConfig, spec: EnvSpec, buckets: tuple[int, ...] = (), placed: Placed | None = None
) -> SchedulerSettings:
    """The conductor's settings. buckets: row counts that passes are padded to; placed: the stations, if known."""
    rollout, freshness, batching, groups = config.rollout, config.freshness, config.batching, config.groups
    limits: dict[str, Any] = {}
    if isinstance(batching, DynamicBatching | AutoBatching):
        limits = {"max_rows": batching.max_rows, "max_requests": batching.max_requests}
    if isinstance(batching, StreamsBatching):
        limits = {"max_rows": batching.max_rows}
    if isinstance(batching, DynamicBatching):
        limits |= {"max_wait_s": batching.max_wait_ms / 1000.0, "fire_when_all_wait": batching.fire_when_all_wait}
    scoring = None
    if config.scoring is not None:
        batches = [info for infos in env_batch_infos(config, spec) for info in infos]
        rows = sum(slot.rows for info in batches for slot in info.slots if not info.reserved)
        scoring = ScoringRules(config.scoring.max_attempts, scored_evaluations(rows))
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
        lease=None if placed is None else placed.lease,
        scoring=scoring,
        moves=load("pipeline", "move_rules")(config, placed, spec) if placed and config.placement.moves else None,
        **limits,
    )


def build_pipeline(context: RunContext, *, start: bool = True, record: bool = False) -> Pipeline:
    """Build the parts of a run, and start them if `start`. record: keep every decision in `loop.trace`.

    StartError, RunHalted: the stations cannot be started.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        use_one_thread()
    config, folder = context.config, context.folder
    spec = env_settings(config).spec()
    infos = env_batch_infos(config, spec, trainer=context.trainer)
    form = policy_settings(config).form(spec)
    states = _trainer_states(config, folder)
    placed = place(config, trainer=context.trainer, folder=folder)
    buckets = bucket_sizes(config, infos, on_device=placed.serves_on_device)
    if folder is not None:
        (folder / TOKEN_FILE).unlink(missing_ok=True)  # of an earlier part of the run that was killed
    station_plan = StationPlan(context, spec, infos, step_settings(config, form.chunk, whole=bool(spec.chunk)))
    with ExitStack() as undo:
        logs = folder / LOGS if folder is not None else None
        placed = undo.enter_context(_served(placed, logs))
        added = _added_stations(station_plan)
        for one in added:
            undo.push(one.undo)
        own = _own_factories(station_plan, buckets, states, placed)
        factories = [*own, *(factory for one in added for factory in one.factories)]
        stations = _in_order(factories, placed)
        layout, published = arena_layout(config, spec, infos, form, trainer=context.trainer), form.published
        joining = next((one.joining for one in added if one.joining.stations), NOBODY_JOINS)
        plan = LaunchPlan(config, stations, layout, WeightsLayout.of(published), logs, joining)
        launcher = (context.launch or launch)(plan)
        undo.callback(launcher.close)
        if states is not None and context.trainer:
            states.reset(context.saved.trainer if context.saved else None)
        conductor = _conductor(context, scheduler_settings(config, spec, buckets, placed), launcher, spec)
        sources = {POLICY: f"policy.type = {config.policy_type}", ENVIRONMENT: f"env.type = {config.env_type}"}
        tracebacks = None if config.launcher == "inline" else logs
        failures = SampleFailureLog(tracebacks, sources, [task.name for task in spec.tasks])
        hosts = StationHosts(launcher)
        loop = RunLoop(conductor, launcher, time.monotonic, observers=[failures, hosts], record=record)
        # A trainer that leases its device publishes the first weights itself, once it is on it.
        if launcher.weights.newest >= 0 or not placed.seats[TRAINER].leases:
            loop.submit(WeightsOffered(context.saved.version if context.saved else context.version))
        for one in added:
            one.announce()
        if start:
            loop.start()
        kept = undo.pop_all()
    return Pipeline(loop, launcher, states, failures, context, spec, placed, hosts, kept)


@contextmanager
def _served(placed: Placed, logs: Path | None) -> Iterator[Placed]:
    """Within the block runs what stations that share devices need; the seats with what they need to find it."""
    if placed.service is None:
        yield placed
        return
    with placed.service(placed.seats, logs) as seats:
        yield replace(placed, seats=dict(seats))


def _conductor(context: RunContext, settings: SchedulerSettings, launcher: Launcher, spec: EnvSpec) -> AnyConductor:
    """A new conductor, or the saved run's with its samples. The first weights, unless a trainer makes them, go to the
    launcher's memory."""
    if (saved := context.saved) is not None:
        conductor = restore_run(saved, settings, launcher, context.config.training.versions)
        launcher.weights.publish(saved.version, saved.policy)
        return conductor
    if not context.trainer:
        config, initial = context.config, context.initial
        if isinstance(initial, Path):
            state: Mapping[str, Tensor] = load_state(initial)["policy"]
        else:
            if initial is None:
                initial = policy_settings(config).build(spec, seed=config.seed, device="cpu", role="train")
            state = initial.state_dict()
        launcher.weights.publish(context.version, state)
    return build_conductor(settings)


def _added_stations(plan: StationPlan) -> list[AddedStations]:
    """Stations of plugins. `join` and `scoring` are loaded only if the configuration uses them."""
    config = plan.context.config
    used = {"join": config.join.simulators > 0, "scoring": config.scoring is not None}
    others = (name for name in table("station") if name not in used)
    names = [*(name for name, is_used in used.items() if is_used), *others]
    return [load("station", name)(plan) for name in names]


def _in_order(factories: Sequence[StationFactory], placed: Placed) -> StationList:
    """Pair each factory with its seats (the trainer: one per rank) in start order, and log the placement."""
    for name, seat in placed.seats.items():
        log.info("%s: %s", name, describe_seat(seat))
    for sentence in placed.warnings:
        log.warning(sentence)
    names = (name for own in placed.names.values() for name in own)  # in this order
    order = {name: index for index, name in enumerate(names)}
    ranked = sorted(factories, key=lambda factory: order.get(factory.name, len(order)))
    return [(factory, *placed.seats_of(factory.name)) for factory in ranked]


def _trainer_states(config: RunConfig, folder: Path | None) -> TrainerStates | None:
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


def _own_factories(
    plan: StationPlan, buckets: tuple[int, ...], states: TrainerStates | None, placed: Placed
) -> list[StationFactory]:
    """Simulators, generators, and the trainer, which loads the file `initial` if given, else initializes from the
    seed, and publishes the weights."""
    context, spec, infos, step = plan.context, plan.spec, plan.infos, plan.step
    config, batching, initial = context.config, context.config.batching, context.initial
    env, joined = config.env.model_dump(mode="json"), joined_names(config)
    policy = PolicyFactory(config.policy.model_dump(mode="json"), spec, config.seed)
    factories: list[StationFactory] = []
    for batches in infos:
        name, rows = batches[0].name.rpartition(".")[0], sum(slot.rows for slot in batches[0].slots)
        if name not in joined:
            factories.append(SimulatorFactory(name, env, spec, rows, tuple(batches), step))
    evaluator = evaluator_name(config) if any(info.reserved for own_infos in infos for info in own_infos) else ""
    evaluates: dict[str, Evaluates] = {name: "too" if name == evaluator else "no" for name in generator_names(config)}
    if evaluator == EVALUATION_GENERATOR:
        evaluates[evaluator] = "only"
    aborts, lenders = config.freshness.on_update == "abort", prefix_lenders(config, placed)
    for name, how in evaluates.items():
        if isinstance(batching, StreamsBatching):
            factories.append(GeneratorFactory(name, policy, how, places=batching.max_rows, resumes=aborts))
        else:
            graphs = config.rollout.graphs
            factories.append(GeneratorFactory(name, policy, how, buckets, graphs, lends=name in lenders))
    if not context.trainer:
        return factories
    assert not isinstance(initial, torch.nn.Module), "the trainer reads its first weights from a file"
    trainer = TrainerFactory(
        TRAINER,
        policy,
        config.algorithm.model_dump(mode="json"),
        config.training.model_dump(mode="json"),
        total_updates=config.training.versions * config.freshness.sync_interval,
        states=states,
        initial=str(initial or ""),
        version=context.version,
        strategy=config.placement.trainer.strategy,
        shard=config.placement.trainer.shard.model_dump(mode="json"),
        token_versions=aborts or settings_traits(config.policy).engine.fresh_cache,
        sync_interval=config.freshness.sync_interval,
        lenders=tuple(placed.seats[name].device for name in lenders),
    )
    return [*factories, trainer]
