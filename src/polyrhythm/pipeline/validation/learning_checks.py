"""Checks that objective, optimizer and policy fit together."""

from __future__ import annotations

import torch

from polyrhythm.config.objective_needs import reward_level_of_objective
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.array_specs import blank
from polyrhythm.pipeline.validation.config_errors import errors_of, type_of
from polyrhythm.pipeline.validation.custom_objective import dry_run_objective
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import PolicyForm
from polyrhythm.specs import EnvSpec
from polyrhythm.training.optim import adamw_of


def check_learning(
    config: RunConfig, spec: EnvSpec, policy: Policy, form: PolicyForm, *, trainer: bool, tried: Policy | None = None
) -> None:
    """Check that objective, optimizer and policy fit together. tried: the policy's miniature, if it is too large."""
    check_value(config, form)
    check_tokens(config, form)
    if trainer and config.training.versions:
        _check_has_value(config, policy)
        check_trainable(config, spec, tried or policy)
        with errors_of("training.optimizer"):
            adamw_of(as_module(policy), config.training.optimizer)
        dry_run_objective(config.algorithm, policy)


def check_value(config: RunConfig, form: PolicyForm) -> None:
    """Check that the policy's value, where one is used, is per chunk or per action as `reward_level` says."""
    actual, expected = form.value, config.algorithm.reward_level
    if actual == expected or not config.algorithm.uses_value:
        return
    if reward_level_of_objective(config):
        other = "set policy.value_head true" if hasattr(config.policy, "value_head") else "use another policy"
        raise ConfigError(
            f"objective = {config.objective}: it needs a policy with one value per {expected} "
            f"(algorithm.reward_level), and {type_of(config.policy)} gives one per {actual}; {other}, add "
            f"algorithm.reward_level={actual}, or choose another objective"
        )
    raise ConfigError(
        f"algorithm.reward_level = {expected}: the policy {type_of(config.policy)} gives one value per "
        f"{actual}; set algorithm.reward_level to {actual}"
    )


def check_tokens(config: RunConfig, form: PolicyForm) -> None:
    """Check that passes can be bounded by tokens, where `training.micro_batch_tokens` asks for it."""
    if config.training.micro_batch_tokens and not form.row_tokens:
        raise ConfigError(
            f"training.micro_batch_tokens = {config.training.micro_batch_tokens}: rows of the policy "
            f"{type_of(config.policy)} do not differ in length; use micro_batch_steps"
        )


def _check_has_value(config: RunConfig, policy: Policy) -> None:
    """Check that the policy has a value if the algorithm uses one."""
    if config.algorithm.uses_value and not getattr(policy, "has_value", True):
        algorithm = config.algorithm
        head = ", or set policy.value_head true" if hasattr(config.policy, "value_head") else ""
        raise ConfigError(
            f"algorithm.advantage = {algorithm.advantage.type}, value.coef = {algorithm.value.coef:g}: the policy "
            f"{type_of(config.policy)} has no value; use grpo, rloo, reinforce_plus_plus, with value.coef 0{head}"
        )


def learns_from_rewards(spec: EnvSpec, policy: Policy) -> bool:
    """Whether the log-prob of an action depends on the parameters; computed for one blank row."""
    obs = blank(spec)
    act = policy.act(obs, torch.zeros(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64))
    return policy.evaluate(obs, act.forward_inputs).logprob.requires_grad


def check_trainable(config: RunConfig, spec: EnvSpec, policy: Policy) -> None:
    """Check that rewards can change what the policy does."""
    if not learns_from_rewards(spec, policy):
        raise ConfigError(
            f"policy.type = {type_of(config.policy)}: its log-probs do not depend on its parameters, so "
            "it cannot learn from rewards; use another head (openvla_oft: policy.head tokens, flow matching: the "
            "method flow_sde or flow_noise), or set training.versions to 0"
        )
