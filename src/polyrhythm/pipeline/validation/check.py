"""Checks that environment, policy and settings fit together, before anything starts or a folder is made.

The schema checks the configuration alone; here are the checks that need the parts themselves, and the trial of the
policy on the environment's first observations. A failed check raises ConfigError: `setting = value: problem; fix`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from polyrhythm.config.catalog import check_installed
from polyrhythm.config.objective_needs import reward_level_of_objective
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import LimitedBatching, StreamsBatching
from polyrhythm.conformance import ContractViolation, own_place, raised
from polyrhythm.envs.base import EnvSettings
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.observe.prometheus import check_endpoint
from polyrhythm.pipeline.array_specs import arena_layout, blank, bucket_sizes
from polyrhythm.pipeline.build import env_settings, policy_settings, scheduler_settings
from polyrhythm.pipeline.env_batches import env_batch_infos
from polyrhythm.pipeline.lerobot.checking import check_dataset
from polyrhythm.pipeline.memory.needs import HOST
from polyrhythm.pipeline.placed import place, station_names
from polyrhythm.pipeline.validation.custom_objective import dry_run_objective, try_on
from polyrhythm.pipeline.validation.env_trial import declared_rows, try_env, try_spec
from polyrhythm.pipeline.validation.launcher_checks import check_launcher
from polyrhythm.pipeline.validation.rank_checks import check_ranks
from polyrhythm.pipeline.validation.room import check_room, free_memory, warn_of_room
from polyrhythm.pipeline.warm_start.demos import has_expert
from polyrhythm.pipeline.warm_start.init_from import load_init_weights
from polyrhythm.policies.base import Policy, PolicySettings, as_module
from polyrhythm.policies.conformance import check_attributes
from polyrhythm.policies.engine import Streams
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.vla.settings import VlaSettings
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.shared_folder import refuse_shortage, remove_orphans
from polyrhythm.runtime.processes.limits import check_limits
from polyrhythm.scheduler.records import EnvBatchInfo, Request
from polyrhythm.scheduler.user_functions import load_function
from polyrhythm.specs import EnvSpec, WeightsLayout
from polyrhythm.stations.reward_function import load_reward
from polyrhythm.stations.simulator.env_host import refuse_segments
from polyrhythm.training.optim import adamw_of

log = logging.getLogger(__name__)

#: Bytes of the largest published policy that is tried itself.
_TRIED = 256 * 2**20


class ValidatedRun(NamedTuple):
    """A checked configuration, its environment's spec, and its policy with the initial weights."""

    config: RunConfig
    spec: EnvSpec
    policy: Policy


def validate_run(config: RunConfig, *, trainer: bool = True) -> ValidatedRun:
    """Raise ConfigError for the first setting that cannot be run, StartError if the machine lacks resources.

    A checkpoint is compared with the environment's spec before anything else. Then the environment is built once, with
    two rows, and reset once, unless all simulators join; the policy is tried on these observations, or its miniature is
    (`policy_to_try`).
    trainer: whether the run has a trainer.
    """
    check_devices(config, trainer=trainer)
    if trainer:
        check_endpoint(config.prometheus)
    free = free_memory()  # before the policy is built here, which is gone when the stations work
    env = installed_env(config)
    declared, form = None, None
    if getattr(config.policy, "checkpoint", ""):
        declared = try_spec(config, env)
        form = _form_with_room(config, declared, trainer=trainer)
    spec, rows = try_env(config, env) if _simulates_here(config) else declared_rows(try_spec(config, env))
    check_rollout(config, spec)
    if form is None or spec != declared:
        form = _form_with_room(config, spec, trainer=trainer)
    policy = check_build(config, spec)
    tried, its_form = policy_to_try(config, spec, policy, form)
    learns = trainer and config.training.versions > 0
    try_on(rows, _type_of(config.policy), tried, its_form, spec, learns=learns)
    check_learning(config, spec, policy, form, trainer=trainer, tried=tried)
    check_processes(config, spec, trainer=trainer)
    check_memory(config, spec, form, trainer=trainer)
    check_start(config, spec, policy, trainer=trainer)
    shortage = warn_of_room(
        config, spec, form, trainer=trainer, free=lambda device: free if device == HOST else free_memory(device)
    )
    if shortage:
        log.warning(shortage)
    return ValidatedRun(config, spec, policy)


def _simulates_here(config: RunConfig) -> bool:
    """Whether the run builds environments itself; else all of its simulators join."""
    return bool(config.rollout.simulators or config.evaluation.reserved_rows)


def installed_env(config: RunConfig) -> EnvSettings:
    """The environment's settings. Raises ConfigError if a package that environment or policy requires is missing. Where
    all simulators join, the environment's packages are theirs."""
    env = env_settings(config)
    if _simulates_here(config):
        check_installed("env", config.env)
    check_installed("policy", config.policy)
    return env


def check_rollout(config: RunConfig, spec: EnvSpec) -> None:
    """Check rows, slots and batches against the environment's abilities."""
    with errors_of("config"):
        scheduler_settings(config, spec)
    _check_engine(config)
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
    if spec.splits and config.rollout.reset_ahead:
        raise ConfigError(
            f"rollout.reset_ahead = {config.rollout.reset_ahead}: this environment draws evaluations apart from "
            "training, which resets ahead do not know; set it to 0"
        )
    with errors_of("rollout"):
        _try_key(config.rollout.queue_key)
    if config.scoring is not None:
        load_reward(config.scoring.function, config.scoring.options)


def check_build(config: RunConfig, spec: EnvSpec, settings: PolicySettings | None = None) -> Policy:
    """Build the policy as the trainer does, with the seed's weights, and check the attributes of its contract.
    settings: in place of the configuration's."""
    what = f"policy.type = {_type_of(config.policy)}"
    settings = settings or policy_settings(config)
    with errors_of(what, "its build()"):
        policy = settings.build(spec, seed=config.seed, device="cpu", role="train")
    try:
        check_attributes(policy, spec)
    except ContractViolation as violation:
        raise ConfigError(f"{what}: {violation}") from violation
    if isinstance(config.batching, StreamsBatching) and not isinstance(policy, Streams):
        raise ConfigError(f"batching.type = streams: {what} answers in one pass; set batching.type to dynamic")
    return policy


def policy_to_try(config: RunConfig, spec: EnvSpec, policy: Policy, form: PolicyForm) -> tuple[Policy, PolicyForm]:
    """What the trial runs, and its form: the policy, or the miniature of a published one that is beyond `_TRIED`, whose
    dozens of passes would take minutes on a CPU. The miniature has the same inputs, method and settings."""
    settings = policy_settings(config)
    if form.train_bytes <= _TRIED or not isinstance(settings, VlaSettings):
        return policy, form
    miniature = settings.miniature()
    return check_build(config, spec, miniature), check_form(config, spec, miniature)


def check_form(config: RunConfig, spec: EnvSpec, settings: PolicySettings | None = None) -> PolicyForm:
    """The policy's declared form. settings: in place of the configuration's."""
    settings = settings or policy_settings(config)
    with errors_of(f"policy.type = {_type_of(config.policy)}", "its form()"):
        form = settings.form(spec)
    if not isinstance(form, PolicyForm):
        raise ConfigError(
            f"policy.type = {_type_of(config.policy)}: form() gave a {type(form).__name__}; "
            "return a PolicyForm (polyrhythm.policies.form.describe makes one)"
        )
    return form


def check_form_first(config: RunConfig, spec: EnvSpec) -> PolicyForm:
    """The declared form, before a policy was built that may not fit into memory. A defect that stops form() and build()
    alike is told as build()'s, which users can call by themselves."""
    try:
        return check_form(config, spec)
    except ConfigError:
        check_build(config, spec)
        raise


def _form_with_room(config: RunConfig, spec: EnvSpec, *, trainer: bool) -> PolicyForm:
    """The declared form, for which there is memory."""
    form = check_form_first(config, spec)
    check_room(config, spec, form, trainer=trainer)
    return form


def check_processes(config: RunConfig, spec: EnvSpec, *, trainer: bool = True) -> None:
    """Raise StartError unless this machine's limits allow the run's files and threads."""
    if config.launcher == "local":
        infos = env_batch_infos(config, spec, trainer=trainer)
        names = station_names(config, trainer=trainer)
        processes = len(names["generators"]) + len(names["trainer"]) + len(names.get("scorers", ()))
        if getattr(config.env, "python", ""):
            processes += sum(map(len, infos))  # each env batch has one in the other Python
        check_limits([*map(len, infos), *[1] * processes])


def check_memory(config: RunConfig, spec: EnvSpec, form: PolicyForm, *, trainer: bool = True) -> None:
    """Remove the shared memory of dead runs, then raise StartError unless the run's own fits."""
    if config.launcher == "local":
        remove_orphans()
        refuse_shortage(shared_sizes(config, spec, form, trainer=trainer))


def check_start(config: RunConfig, spec: EnvSpec, policy: Policy, *, trainer: bool = True) -> None:
    """Check the source of the first weights, and whether instructions can be swapped."""
    if trainer and config.init_from:
        _check_init_from(config, policy)
    elif trainer and config.demonstrations is not None:
        _check_demonstrations(config, spec)
    if config.evaluation.swapped:
        refuse_swapping(spec)


def _type_of(section: object) -> str:
    return getattr(section, "type", "")


def shared_sizes(config: RunConfig, spec: EnvSpec, form: PolicyForm, *, trainer: bool = True) -> dict[str, int]:
    """Bytes of shared memory that the run reserves, by segment."""
    infos = env_batch_infos(config, spec, trainer=trainer)
    layout = arena_layout(config, spec, infos, form, trainer=trainer)
    return {"arena": layout.nbytes, "weights": shared_nbytes(WeightsLayout.of(form.published))}


def refuse_swapping(spec: EnvSpec) -> None:
    """Raise ConfigError if the environment has only one task, so that there is no other instruction."""
    if len(spec.tasks) < 2:
        raise ConfigError(
            "swapping instructions: it takes at least 2 tasks, and the environment has 1; leave it out "
            "(evaluation.swapped=false, no --swap-instructions)"
        )


def check_devices(config: RunConfig, *, trainer: bool = True) -> dict[str, Resources]:
    """The seats of all stations. ConfigError: one has none on this machine, or updates do not fit the trainer's
    ranks, or the launcher cannot have what is asked of it."""
    check_launcher(config)
    placed = place(config, trainer=trainer)
    if trainer and config.training.versions:
        check_ranks(config, len(placed.names["trainer"]))
    return placed.seats


@contextmanager
def errors_of(what: str, call: str = "") -> Iterator[None]:
    """Turn a ValueError of this block into a ConfigError; prefix it with `what` unless its text begins so.

    call: of the user's code, if any; then every other exception becomes a ConfigError with the user's line.
    """
    try:
        yield
    except PolyrhythmError:
        raise
    except ValueError as error:
        text = str(error) + own_place(error) * bool(call)
        raise ConfigError(text if text.startswith(what.partition(" ")[0]) else f"{what}: {text}") from error
    except (Exception, SystemExit) as error:
        if not call:
            raise
        raise ConfigError(f"{what}: {call} {raised(error)}; fix it there") from error


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
    """Check that the policy's value is per chunk or per action as `reward_level` says."""
    actual, expected = form.value, config.algorithm.reward_level
    if actual == expected:
        return
    if reward_level_of_objective(config):
        raise ConfigError(
            f"objective = {config.objective}: it needs a policy with one value per {expected} "
            f"(algorithm.reward_level), and {_type_of(config.policy)} gives one per {actual}; use another policy, add "
            f"algorithm.reward_level={actual}, or choose another objective"
        )
    raise ConfigError(
        f"algorithm.reward_level = {expected}: the policy {_type_of(config.policy)} gives one value per "
        f"{actual}; set algorithm.reward_level to {actual}"
    )


def check_tokens(config: RunConfig, form: PolicyForm) -> None:
    """Check that passes can be bounded by tokens, where `training.micro_batch_tokens` asks for it."""
    if config.training.micro_batch_tokens and not form.row_tokens:
        raise ConfigError(
            f"training.micro_batch_tokens = {config.training.micro_batch_tokens}: rows of the policy "
            f"{_type_of(config.policy)} do not differ in length; use micro_batch_steps"
        )


def _check_has_value(config: RunConfig, policy: Policy) -> None:
    """Check that the policy has a value if the algorithm uses one."""
    if config.algorithm.uses_value and not getattr(policy, "has_value", True):
        raise ConfigError(
            f"algorithm.advantage = {config.algorithm.advantage.type}, value.coef = {config.algorithm.value.coef:g}: "
            f"the policy {_type_of(config.policy)} has no value; use grpo, rloo, reinforce_plus_plus, with value.coef 0"
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
            f"policy.type = {_type_of(config.policy)}: its log-probs do not depend on its parameters, so "
            "it cannot learn from rewards; use another head (openvla_oft: policy.head tokens, flow matching: the "
            "method flow_sde or flow_noise), or set training.versions to 0"
        )


def _check_engine(config: RunConfig) -> None:
    """Raise ConfigError if an engine that holds one version of the weights would have to hold several."""
    engine = getattr(config.policy, "one_engine", "")
    if not engine:
        return
    if not isinstance(config.batching, StreamsBatching):
        raise ConfigError(f"batching.type = {config.batching.type}: {engine} answers streams; set it to streams")
    if config.rollout.generators > 1:
        count = config.rollout.generators
        raise ConfigError(f"rollout.generators = {count}: {engine} has the weights of one of them; set it to 1")
    if config.evaluation.reserved_rows:
        raise ConfigError(
            f"evaluation.weights = {config.evaluation.weights}: {engine} has one version of the weights; set it to "
            "pause, or evaluation.every to 0"
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
    """Raise ValueError if the queue key function, if there is one, raises or returns keys that have no order."""
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


def _check_demonstrations(config: RunConfig, spec: EnvSpec) -> None:
    """Check that the dataset fits or, without one, that there is an expert; a resumed run may have its own copy."""
    dataset = config.demonstrations.dataset if config.demonstrations else None
    if dataset is not None:
        if config.resume == "never":
            check_dataset(dataset, spec, config.rollout.action_repeat)
        return
    if not has_expert(env_settings(config)):
        raise ConfigError(
            "demonstrations = set: this environment has no scripted expert; set demonstrations and supervised to null"
        )


def _check_init_from(config: RunConfig, policy: Policy) -> None:
    """Check the weights of `init_from`; a resumed run has its own, and the originals may be gone."""
    if config.resume == "never":
        load_init_weights(config, policy)
