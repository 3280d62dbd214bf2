"""Checks that environment, policy and settings fit together, before anything starts or a folder is made.

The schema checks the configuration alone; here are the checks that need the parts themselves, and the trial of the
policy on the environment's first observations. A failed check raises ConfigError: `setting = value: problem; fix`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from polyrhythm.config.catalog import check_installed
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.conformance import ContractViolation
from polyrhythm.env_warnings import forget_warnings
from polyrhythm.envs.base import EnvSettings, traits_of
from polyrhythm.envs.mujoco import set_simulator_count
from polyrhythm.errors import ConfigError, RunHalted, StartError
from polyrhythm.observe.prometheus import check_endpoint
from polyrhythm.observe.run_folder import find_run
from polyrhythm.pipeline.array_specs import arena_layout
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.env_batches import env_batch_infos
from polyrhythm.pipeline.placed import place, station_names
from polyrhythm.pipeline.validation.config_errors import errors_of, type_of
from polyrhythm.pipeline.validation.custom_objective import try_on
from polyrhythm.pipeline.validation.env_trial import declared_rows, try_env, try_spec
from polyrhythm.pipeline.validation.launcher_checks import check_launcher
from polyrhythm.pipeline.validation.learning_checks import check_learning
from polyrhythm.pipeline.validation.rank_checks import check_ranks
from polyrhythm.pipeline.validation.rollout_checks import (
    check_rollout,
    check_weights_change,
    load_reward_function,
    settings_findings,
)
from polyrhythm.pipeline.validation.room import check_room, free_memory, warn_of_room
from polyrhythm.pipeline.warm_start.demos import check_expert, has_expert
from polyrhythm.pipeline.warm_start.init_from import load_init_weights
from polyrhythm.plugins.cluster.ray.reach import LOCAL
from polyrhythm.plugins.lerobot.checking import check_dataset
from polyrhythm.plugins.memory_estimate.needs import HOST
from polyrhythm.policies.base import Policy, PolicySettings, extended_settings
from polyrhythm.policies.conformance import check_attributes
from polyrhythm.policies.engine import streaming
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import policy_traits, settings_traits
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.shared_folder import refuse_shortage, remove_orphans
from polyrhythm.runtime.processes.limits import check_limits
from polyrhythm.specs import EnvSpec, WeightsLayout

log = logging.getLogger(__name__)

#: Bytes of the largest published policy that is tried itself.
_TRIED = 256 * 2**20


class ValidatedRun(NamedTuple):
    """A checked configuration, its environment's spec, and its policy with the initial weights."""

    config: RunConfig
    spec: EnvSpec
    policy: Policy


def validate_run(config: RunConfig, *, trainer: bool = True, begun: bool = False) -> ValidatedRun:
    """Raise ConfigError for the first setting that cannot be run, StartError if the machine lacks resources.

    A checkpoint is compared with the environment's spec before anything else. Then the environment is built once, with
    two rows, and reset once, unless all simulators join; of a text environment an episode is played, which a reward
    function gets. The policy is tried on these observations, or its miniature is (`policy_to_try`).
    trainer: whether the run has a trainer; begun: the run has begun before, so no episode is played: a judge that is
    down for a moment does not stop it.
    """
    log.info("checks of settings, environment and policy …")
    forget_warnings()
    if config.init_from and (run := find_run(Path(config.init_from))) != Path(config.init_from):
        config = config.model_copy(update={"init_from": str(run)})  # the new run may lie in that folder, too
    check_devices(config, trainer=trainer)
    if trainer:
        check_endpoint(config.prometheus)
        for finding in settings_findings(config):
            log.warning("%s; %s", finding.detail, finding.fix)
    free = free_memory()  # before the policy is built here, which is gone when the stations work
    env = installed_env(config)
    declared, form = None, None
    if getattr(config.policy, "checkpoint", ""):
        declared = try_spec(config, env)
        form = _form_with_room(config, declared, trainer=trainer)
    if _simulates_here(config):
        spec, rows = try_env(config, env, play=not begun)
    else:
        spec, rows = declared_rows(try_spec(config, env))
        load_reward_function(config)
    check_rollout(config, spec)
    if trainer:
        check_weights_change(config)
    if form is None or spec != declared:
        form = _form_with_room(config, spec, trainer=trainer)
    policy = check_build(config, spec)
    if trainer:
        check_server(config, policy)
    tried, its_form = policy_to_try(config, spec, policy, form)
    learns = trainer and config.training.versions > 0
    try_on(rows, type_of(config.policy), tried, its_form, spec, learns=learns)
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
        check_env_installed(config)
    check_installed("policy", config.policy)
    return env


def check_env_installed(config: RunConfig) -> None:
    """`check_installed` of the environment, which may measure how fast as many simulators draw as the run has."""
    here = config.rollout.simulators + bool(config.evaluation.reserved_rows)
    with set_simulator_count({"local": here, "inline": 1}.get(config.launcher, 0)):
        check_installed("env", config.env)


def check_build(config: RunConfig, spec: EnvSpec, settings: PolicySettings | None = None) -> Policy:
    """Build the policy as the trainer does, with the seed's weights, and check the attributes of its contract.
    settings: in place of the configuration's."""
    what = f"policy.type = {type_of(config.policy)}"
    settings = settings or policy_settings(config)
    with errors_of(what, "its build()"):
        policy = settings.build(spec, seed=config.seed, device="cpu", role="train")
    try:
        check_attributes(policy, spec)
    except ContractViolation as violation:
        raise ConfigError(f"{what}: {violation}") from violation
    if isinstance(config.batching, StreamsBatching) and not policy_traits(policy).streams:
        raise ConfigError(f"batching.type = streams: {what} answers in one pass; set batching.type to dynamic")
    return policy


def check_server(config: RunConfig, policy: Policy) -> None:
    """Raise StartError unless the server of the policy's engine, if it is at one, answers as it should. On a Ray
    cluster the generator, which may be on another host, asks it."""
    if config.launcher == "ray" or not isinstance(config.batching, StreamsBatching):
        return
    if policy_traits(policy).asks_server:
        try:
            streaming(policy).ask_server()
        except RunHalted as error:
            raise StartError(str(error)) from error


def policy_to_try(config: RunConfig, spec: EnvSpec, policy: Policy, form: PolicyForm) -> tuple[Policy, PolicyForm]:
    """What the trial runs, and its form: the policy, or the miniature of a published one that is beyond `_TRIED`, whose
    dozens of passes would take minutes on a CPU. The miniature has the same inputs, method and settings."""
    settings = policy_settings(config)
    if form.train_bytes <= _TRIED or not settings_traits(settings).has_miniature:
        return policy, form
    miniature = extended_settings(settings).miniature()
    return check_build(config, spec, miniature), check_form(config, spec, miniature)


def check_form(config: RunConfig, spec: EnvSpec, settings: PolicySettings | None = None) -> PolicyForm:
    """The policy's declared form. settings: in place of the configuration's."""
    settings = settings or policy_settings(config)
    with errors_of(f"policy.type = {type_of(config.policy)}", "its form()"):
        form = settings.form(spec)
    if not isinstance(form, PolicyForm):
        raise ConfigError(
            f"policy.type = {type_of(config.policy)}: form() gave a {type(form).__name__}; "
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
    """Raise StartError unless this machine's limits allow the run's files and threads. Of a cluster's other nodes they
    are not known."""
    if config.launcher == "inline":
        return
    on_ray = config.launcher == "ray"
    if on_ray and config.ray.address != LOCAL:
        check_limits([], agents=1)
        return
    infos = env_batch_infos(config, spec, trainer=trainer)
    names = station_names(config, trainer=trainer)
    processes = len(names["generators"]) + len(names["trainer"]) + len(names.get("scorers", ()))
    actors = len(infos) - config.join.simulators + processes if on_ray else 0
    if traits_of(config.env).own_process:
        processes += sum(map(len, infos))  # each env batch has one in the other Python
    check_limits([*map(len, infos), *[1] * processes], agents=int(on_ray), actors=actors)


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
    assert config.demonstrations is not None
    check_expert(env_settings(config), config.demonstrations)


def _check_init_from(config: RunConfig, policy: Policy) -> None:
    """Check the weights of `init_from`; a resumed run has its own, and the originals may be gone."""
    if config.resume == "never":
        load_init_weights(config, policy)
