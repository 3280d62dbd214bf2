"""Checks that settings fit the environment, the policy and the trainer's ranks: rows, batches, objective, optimizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from polyrhythm.checks import CheckContext, errors_of, require_added
from polyrhythm.config.presets import sets_reward_level
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import LimitedBatching, StreamsBatching
from polyrhythm.conformance import raised
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.array_specs import blank, bucket_sizes, env_batch_infos
from polyrhythm.pipeline.build import scheduler_settings
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import policy_traits, settings_traits
from polyrhythm.scheduler.records import EnvBatchInfo, Request
from polyrhythm.scheduler.settings import load_function
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.slot import StepSettings
from polyrhythm.training.optim import adamw

log = logging.getLogger(__name__)


# ------------------------------------------------------------ rows, slots, batches


def check_rollout(config: RunConfig, spec: EnvSpec) -> None:
    """Check rows, slots and batches against the environment's capabilities."""
    with errors_of("config"):
        scheduler_settings(config, spec)
    check_engine(config)
    infos = env_batch_infos(config, spec)
    bucket_sizes(config, infos)  # raises if they do not fit
    _check_slots(config, infos)
    with errors_of(f"rollout.segment_steps = {config.rollout.segment_steps}"):
        StepSettings(1, segment_steps=config.rollout.segment_steps).check(spec)
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


# ------------------------------------------------------------ objective, optimizer


def check_learning(context: CheckContext, policy: Policy) -> None:
    """ConfigError: they do not fit together."""
    config = context.config
    check_value(config, context.form)
    check_tokens(config, context.form)
    if context.trainer and config.training.versions:
        _check_has_value(config, policy)
        check_trainable(config, context.spec, context.tried[0] if context.tried else policy)
        with errors_of("training.optimizer"):
            adamw(as_module(policy), config.training.optimizer)
        require_added(context, "custom objective")


def check_value(config: RunConfig, form: PolicyForm) -> None:
    """Check that the policy's value, if used, has the level of `algorithm.reward_level`."""
    actual, expected = form.value, config.algorithm.reward_level
    if actual == expected or not config.algorithm.uses_value:
        return
    setting = ""
    if hasattr(config.policy, "value_level"):
        setting = f"policy.value_level {expected}"
    elif hasattr(config.policy, "value_head") and expected == "action":
        setting = "policy.value_head true"
    if sets_reward_level(config.objective, config.algorithm):
        other = f"set {setting}" if setting else "use another policy"
        raise ConfigError(
            f"objective = {config.objective}: it needs a policy with one value per {expected} "
            f"(algorithm.reward_level), and {config.policy_type} gives one per {actual}; {other}, add "
            f"algorithm.reward_level={actual}, or choose another objective"
        )
    raise ConfigError(
        f"algorithm.reward_level = {expected}: the policy {config.policy_type} gives one value per "
        f"{actual}; set algorithm.reward_level to {actual}{f', or {setting}' if setting else ''}"
    )


def check_tokens(config: RunConfig, form: PolicyForm) -> None:
    """Check that rows are messages of tokens, if settings count tokens."""
    if config.training.micro_batch_tokens and not form.row_tokens:
        raise ConfigError(
            f"training.micro_batch_tokens = {config.training.micro_batch_tokens}: rows of the policy "
            f"{config.policy_type} do not differ in length; use micro_batch_steps"
        )
    tokens = config.algorithm.overlong.tokens
    if tokens is None:
        return
    if not form.row_tokens:
        raise ConfigError(
            f"algorithm.overlong.tokens = {tokens}: the policy {config.policy_type} gives no messages of tokens; "
            "set it to null"
        )
    if tokens > form.chunk:
        raise ConfigError(
            f"algorithm.overlong.tokens = {tokens}: a message has at most {form.chunk} tokens (env.max_new_tokens); "
            "lower it"
        )


def _check_has_value(config: RunConfig, policy: Policy) -> None:
    if config.algorithm.uses_value and not policy_traits(policy).value:
        algorithm = config.algorithm
        head = ", or set policy.value_head true" if hasattr(config.policy, "value_head") else ""
        raise ConfigError(
            f"algorithm.advantage = {algorithm.advantage.type}, value.coef = {algorithm.value.coef:g}: the policy "
            f"{config.policy_type} has no value; use grpo, rloo, maxrl or reinforce_plus_plus with value.coef 0"
            f"{head}"
        )


def learns_from_rewards(spec: EnvSpec, policy: Policy) -> bool:
    """Whether the log-prob of an action depends on the parameters; computed for one blank row."""
    obs = blank(spec)
    act = policy.act(obs, torch.zeros(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64))
    return policy.evaluate(obs, act.forward_inputs).logprob.requires_grad


def check_trainable(config: RunConfig, spec: EnvSpec, policy: Policy) -> None:
    if not learns_from_rewards(spec, policy):
        raise ConfigError(
            f"policy.type = {config.policy_type}: its log-probs do not depend on its parameters, so "
            "it cannot learn from rewards; use another head (openvla_oft: policy.head tokens, flow matching: the "
            "method flow_sde, flow_cps or flow_noise), or set training.versions to 0"
        )
