"""Checks that objective, optimizer and policy fit together."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from polyrhythm.checks import errors_of
from polyrhythm.config.load import training_defaults
from polyrhythm.config.presets import OBJECTIVE_PRESETS, is_unchanged, sets_reward_level
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.objectives import DecoupledPpoLoss, PpoLoss
from polyrhythm.config.streaming import why_whole_updates
from polyrhythm.conformance import Finding
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.array_specs import blank
from polyrhythm.pipeline.placed import trainer_ranks
from polyrhythm.pipeline.validation.custom_objective import dry_run_objective
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import policy_traits
from polyrhythm.specs import EnvSpec
from polyrhythm.training.optim import adamw

#: Samples and chunk steps below which the gradient of an update is mostly noise.
_FEW_SAMPLES, _FEW_STEPS = 8, 64
#: max_lag from which ppo with a higher upper clip lost least (bench/results/algorithms.md).
_LONG_LAG = 4
#: Magnitude of an observation's entry that saturates the units of a small network.
_LARGE = 10.0


def check_learning(
    config: RunConfig, spec: EnvSpec, policy: Policy, form: PolicyForm, *, trainer: bool, tried: Policy | None = None
) -> None:
    """ConfigError: they do not fit together. tried: the miniature of a policy that is too large to try."""
    check_value(config, form)
    check_tokens(config, form)
    if trainer and config.training.versions:
        _check_has_value(config, policy)
        check_trainable(config, spec, tried or policy)
        with errors_of("training.optimizer"):
            adamw(as_module(policy), config.training.optimizer)
        dry_run_objective(config.algorithm, policy)


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


def update_findings(config: RunConfig, spec: EnvSpec, form: PolicyForm) -> Iterator[Finding]:
    """Describe an update and the source of its defaults; notes on settings under which policies tend not to learn."""
    training, algorithm = config.training, config.algorithm
    if not training.versions:
        return
    defaults = training_defaults(config.policy)
    declared = _unchanged(defaults, training.model_dump())
    source = f"; as policy {config.policy_type} declares: {', '.join(declared)}" if declared else ""
    cut = f"steps of {training.minibatch_steps} chunk steps" if training.minibatch_steps else "one step"
    if training.require_batches > 1:
        cut = f"{training.require_batches} mini-batches of {training.mini_batch_samples} samples, each in {cut}"
    passes = f"{training.epochs} epoch{'s' * (training.epochs > 1)} in {cut}, lr {training.optimizer.lr:g}"
    yield Finding("updates", "ok", passes + source)
    if training.streaming:
        why = why_whole_updates(config, ranks=trainer_ranks(config), leased=config.placement.sharing == "lease")
        said = f"with all of its samples: {why}" if why else "with the first of its samples"
        yield Finding("streaming", "ok", f"an update begins {said}")
    longest = -(-spec.max_steps // (form.chunk * config.rollout.action_repeat))
    longest = min(longest, config.rollout.segment_steps or longest)
    steps = training.batch_size * longest
    least = training.epochs * training.require_batches * config.freshness.sync_interval  # optimizer steps of a version
    one_pass = least == 1 != defaults.get("epochs")  # language models declare one epoch
    if one_pass and (not training.minibatch_steps or steps <= training.minibatch_steps):
        yield Finding(
            "optimizer steps",
            "note",
            f"training.epochs = 1, minibatch_steps = {training.minibatch_steps}: an update of at most {steps:,} chunk "
            "steps is one optimizer step, so policies learn slowly",
            "set training.epochs to 4 to 10 and training.minibatch_steps to 64 or 256, unless one step is meant",
        )
    if training.batch_size < _FEW_SAMPLES or steps < _FEW_STEPS:
        enough = max(2 * _FEW_SAMPLES, -(-_FEW_STEPS // longest))
        yield Finding(
            "samples",
            "note",
            f"training.mini_batch_samples = {training.mini_batch_samples}: an update has {training.batch_size} samples "
            f"of at most {steps:,} chunk steps together, so its gradient is mostly noise",
            f"raise training.mini_batch_samples to {-(-enough // training.require_batches)} or more",
        )
    if (
        algorithm.value.coef
        and getattr(config.policy, "value_detach", True) is False
        and type(config.policy).model_fields["value_detach"].default  # language models share it by default
    ):
        yield Finding(
            "value loss",
            "note",
            "policy.value_detach = False: the value loss changes the network that acts, which destroyed small policies",
            "set policy.value_detach to true, or lower algorithm.value.coef",
        )


def staleness_findings(config: RunConfig) -> Iterator[Finding]:
    """Notes if the policy loss does not fit the expected age of the weights that acted.

    Rules: docs/objectives.md and measurements in bench/results/algorithms.md. Reads only the configuration.
    """
    algorithm, training, loss = config.algorithm, config.training, config.algorithm.loss
    lag, interval = config.freshness.max_lag, config.freshness.sync_interval
    age = interval * (math.ceil(lag) + 1) - 1
    acted = (
        f"the policy that acted, which may be {age} update{'s' * (age > 1)} old (freshness.max_lag = {lag:g}, "
        f"sync_interval = {interval})"
    )
    recompute = ["algorithm.proximal=recompute"] * (algorithm.proximal != "recompute")
    if not training.versions:
        return
    if age and algorithm.clips_around_behavior:
        setting, fixes, sibling = "algorithm.proximal", recompute, f"{config.objective}_async"
        if loss.corrects_staleness:  # type: ignore[union-attr]
            setting, fixes = "algorithm.loss.ratio_to", [*recompute, "algorithm.loss.ratio_to=proximal"]
        # Otherwise it would discard the recipe's own settings.
        elif sibling in OBJECTIVE_PRESETS and is_unchanged(config.objective, algorithm):
            fixes = [f"objective={sibling}"]
        yield _lag_note(f"{setting} = behavior: {loss.type} clips around {acted}", fixes)
    elif lag >= _LONG_LAG and (
        isinstance(loss, DecoupledPpoLoss) or (isinstance(loss, PpoLoss) and not _clips_higher(loss))
    ):
        detail = f"freshness.max_lag = {lag:g}: from {_LONG_LAG} on {loss.type} loses more than with clip-higher"
        yield _lag_note(detail, ["algorithm.loss={type: ppo, clip_high: 0.28}", *recompute])
    if loss.type != "vanilla":
        return
    weighted = algorithm.mismatch_cap is not None or algorithm.rollout_correction.weight != "none"
    if age and not weighted:
        detail = f"algorithm.loss = vanilla: it does not correct for {acted}"
        yield _lag_note(detail, ["algorithm.loss=decoupled_ppo", *recompute])
    elif training.epochs > 1 or 0 < training.minibatch_steps < training.batch_size:
        steps = f"training.epochs = {training.epochs}, minibatch_steps = {training.minibatch_steps}"
        detail = f"algorithm.loss = vanilla: it does not correct for the update's own steps ({steps})"
        yield _lag_note(detail, ["algorithm.loss=ppo"])


def _lag_note(detail: str, overrides: list[str]) -> Finding:
    return Finding("loss and lag", "note", detail, f"add {' '.join(map(shlex.quote, overrides))}")


def _clips_higher(loss: PpoLoss) -> bool:
    return loss.clip_high is None or loss.clip_low is None or loss.clip_high > loss.clip_low


def scale_findings(config: RunConfig, rows: Mapping[str, NDArray[Any]]) -> Iterator[Finding]:
    """A note if observations are large and the policy could normalise them. rows: first observations by name."""
    if getattr(config.policy, "normalize_observations", True):
        return
    sizes = {name: float(abs(x).max()) for name, x in rows.items() if x.dtype.kind == "f" and x.size}
    large = max(sizes, key=lambda name: sizes[name], default="")
    if large and sizes[large] > _LARGE:
        yield Finding(
            "observations",
            "note",
            f"the observation {large} has entries of {sizes[large]:.4g}, from which small networks may learn slowly",
            "try policy.normalize_observations=true",
        )


def _unchanged(declared: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Dotted names of the declared defaults that the configuration keeps."""
    names = []
    for name, value in declared.items():
        if isinstance(value, Mapping):
            names += [f"{name}.{inner}" for inner in _unchanged(value, found[name])]
        elif found[name] == value:
            names.append(name)
    return names
