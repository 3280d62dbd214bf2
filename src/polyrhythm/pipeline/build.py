"""From a configuration to stations that stand ready: the one place where all parts meet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyrhythm.config.rollout import DynamicBatching
from polyrhythm.config.schema import RunConfig
from polyrhythm.envs.base import EnvBatch, EnvSettings
from polyrhythm.errors import ConfigError
from polyrhythm.flow.conductor import Conductor
from polyrhythm.flow.records import EnvBatchInfo, Event
from polyrhythm.flow.settings import FlowSettings
from polyrhythm.flow.sharding import shard
from polyrhythm.pipeline.loop import Loop, Observer
from polyrhythm.policies.base import Policy, PolicySettings
from polyrhythm.runtime.inline import InlineLauncher
from polyrhythm.runtime.tensors import use_one_thread
from polyrhythm.runtime.weights import InlineWeights
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.generator import Generator
from polyrhythm.stations.simulator import Simulator
from polyrhythm.stations.slot import StepSettings
from polyrhythm.stations.trainer import Trainer
from polyrhythm.training.learner import Learner

#: Every station's first incarnation.
FIRST_EPOCH = 0


@dataclass(slots=True)
class Pipeline:
    """A run's parts, joined. `policy` is the trainer's, generators hold copies; `weights` has what was published."""

    loop: Loop
    launcher: InlineLauncher
    policy: Policy
    learner: Learner
    weights: InlineWeights

    def close(self) -> None:
        self.launcher.close()


def env_settings(config: RunConfig) -> EnvSettings:
    """The environment's section as what it must be. ConfigError if a class of the user's own is not."""
    if not isinstance(config.env, EnvSettings):
        raise ConfigError(f"env.type = {getattr(config.env, 'type', '')}: its settings need spec() and build(rows)")
    return config.env


def policy_settings(config: RunConfig) -> PolicySettings:
    """The policy's section as what it must be. ConfigError if a class of the user's own is not."""
    if not isinstance(config.policy, PolicySettings):
        kind = getattr(config.policy, "type", "")
        raise ConfigError(f"policy.type = {kind}: its settings need build(env_spec, seed)")
    return config.policy


def flow_settings(config: RunConfig, spec: EnvSpec) -> FlowSettings:
    """What the conductor is told."""
    rollout, freshness, batching = config.rollout, config.freshness, config.batching
    limits: dict[str, Any] = {}
    if isinstance(batching, DynamicBatching):
        limits = {
            "max_rows": batching.max_rows,
            "max_requests": batching.max_requests,
            "max_wait_s": batching.max_wait_ms / 1000.0,
        }
    assert freshness.on_update != "abort", "the schema refuses abort for one-pass policies"
    return FlowSettings(
        batch_size=config.training.batch_size,
        sync_interval=freshness.sync_interval,
        max_lag=freshness.max_lag,
        bound=freshness.bound,
        on_update=freshness.on_update,
        order=config.training.order,
        group_size=config.groups.size,
        segments=rollout.segment_steps > 0,
        batching=batching.type,
        routing=rollout.routing,
        queue_key=rollout.queue_key,
        tasks=len(spec.tasks),
        seed=config.seed,
        episode_deadline_s=rollout.episode_deadline_s,
        max_attempts=rollout.max_attempts,
        max_dropped=rollout.max_dropped,
        **limits,
    )


def generator_names(config: RunConfig) -> list[str]:
    return [f"generator-{index}" for index in range(config.rollout.generators)]


def env_batch_infos(config: RunConfig, spec: EnvSpec) -> list[list[EnvBatchInfo]]:
    """Per simulator, its env batches cut into slots. ConfigError if they cannot be cut so."""
    rollout = config.rollout
    try:
        infos = [
            [
                shard(
                    f"simulator-{simulator}.{batch}",
                    rollout.rows,
                    rollout.sharding,
                    generator_names(config),
                    reset_rows=spec.reset_rows,
                )
                for batch in range(rollout.env_batches)
            ]
            for simulator in range(rollout.simulators)
        ]
    except ValueError as error:
        raise ConfigError(f"rollout.sharding = {rollout.sharding}: {error}") from error
    if not spec.step_rows and config.batching.type == "lockstep" and len(infos[0][0].slots) > 1:
        raise ConfigError(
            f"rollout.sharding = {rollout.sharding}: the environment steps only whole batches, so under lockstep its "
            "slots could wait for each other for ever; set rollout.sharding to whole, or batching.type to dynamic"
        )
    return infos


def build_pipeline(
    config: RunConfig,
    envs: Sequence[EnvBatch] | None = None,
    policy: Policy | None = None,
    *,
    observers: Sequence[Observer] = (),
    record: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Pipeline:
    """Build all stations and let them join.

    envs: env batches made already, simulators × env_batches; policy: the trainer's, made already (a warm start).
    record: keep every decision in `loop.trace`. The configuration has passed `pipeline.check`.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        use_one_thread()
    envs = build_envs(config) if envs is None else envs
    spec = envs[0].spec
    infos = env_batch_infos(config, spec)
    policy = policy_settings(config).build(spec, config.seed) if policy is None else policy
    launcher, weights = InlineLauncher(clock), InlineWeights()
    loop = Loop(Conductor(flow_settings(config, spec)), launcher, clock, observers=observers, record=record)
    joining: list[Event] = _add_simulators(config, envs, infos, policy.chunk, launcher)
    for name in generator_names(config):
        copy = policy_settings(config).build(spec, config.seed)
        generator = Generator(name, FIRST_EPOCH, copy, launcher.payloads, weights, launcher.emit, launcher.reply)
        launcher.add(generator)
        joining.append(generator.joined())
    learner = Learner(
        policy,
        config.algorithm,
        config.training,
        total_updates=config.training.versions * config.freshness.sync_interval,
        seed=config.seed,
    )
    trainer = Trainer("trainer", FIRST_EPOCH, learner, launcher.payloads, weights, launcher.emit, launcher.report)
    launcher.add(trainer)
    for event in (*joining, trainer.joined()):
        loop.tell(event)
    return Pipeline(loop, launcher, policy, learner, weights)


def build_envs(config: RunConfig) -> list[EnvBatch]:
    """All env batches of the run."""
    rollout = config.rollout
    count = rollout.simulators * rollout.env_batches
    settings = env_settings(config)
    return [settings.build(rollout.rows) for _ in range(count)]


def _add_simulators(
    config: RunConfig,
    envs: Sequence[EnvBatch],
    infos: Sequence[Sequence[EnvBatchInfo]],
    chunk: int,
    launcher: InlineLauncher,
) -> list[Event]:
    """The simulators' joining."""
    settings = StepSettings(chunk, config.rollout.action_repeat, config.rollout.segment_steps)
    unused = iter(envs)
    joining: list[Event] = []
    for index, batches in enumerate(infos):
        hosted = [(info, next(unused)) for info in batches]
        simulator = Simulator(f"simulator-{index}", FIRST_EPOCH, hosted, settings, launcher.payloads, launcher.emit)
        launcher.add(simulator)
        for info in batches:
            for slot in info.slots:
                launcher.connect(slot.slot, simulator.deliver)
        joining.append(simulator.joined())
    return joining
