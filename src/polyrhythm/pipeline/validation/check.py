"""Checks that environment, policy and settings fit together, before anything starts or a folder is made.

The schema checks the configuration alone; these checks need the parts themselves, and include the trial of the policy
on the environment's first observations. A failed check raises ConfigError: `setting = value: problem; fix`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from polyrhythm.checks import (
    Check,
    CheckContext,
    Cost,
    Examined,
    Result,
    errors_of,
    examine_all,
    require_added,
    require_all,
    with_added,
)
from polyrhythm.config.catalog import check_installed
from polyrhythm.config.presets import describe_objective
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.conformance import ContractViolation
from polyrhythm.env_warnings import forget_warnings
from polyrhythm.envs.base import EnvSettings, traits_of
from polyrhythm.envs.mujoco import Drawing, set_drawing
from polyrhythm.errors import ConfigError, RunHalted, StartError
from polyrhythm.observe.run_folder import find_run
from polyrhythm.pipeline.array_specs import arena_layout, env_batch_infos
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.persistence.resume import load_init_weights
from polyrhythm.pipeline.placed import find_drawing_device, group_seats, place, station_names
from polyrhythm.pipeline.validation.fit import (
    check_learning,
    check_rollout,
    check_weights_change,
)
from polyrhythm.plugin import load
from polyrhythm.policies.base import Policy, PolicySettings, as_module, extended_settings
from polyrhythm.policies.engine import streaming
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import policy_traits, released_folder, settings_traits
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.shared_folder import refuse_shortage, remove_orphans
from polyrhythm.runtime.processes.start import check_limits
from polyrhythm.specs import EnvSpec, WeightsLayout

log = logging.getLogger(__name__)

#: Size in bytes up to which a released policy is tried itself rather than its miniature.
_TRIED = 256 * 2**20


class ValidatedRun(NamedTuple):
    """A checked configuration, its environment's spec, and its policy with the initial weights."""

    config: RunConfig
    spec: EnvSpec
    policy: Policy


def validate_run(config: RunConfig, *, trainer: bool = True, begun: bool = False) -> ValidatedRun:
    """Raise ConfigError for the first setting that cannot be run, StartError if the machine lacks resources.

    A checkpoint is compared with the environment's spec first. Then the environment is built once with two rows and
    reset, unless all simulators join; in a text environment an episode is played and passed to the reward function. The
    policy, or its miniature (`policy_to_try`), is tried on these observations. trainer: whether the run has one; begun:
    the run resumes, so no episode is played and an unavailable judge does not stop it.
    """
    log.info("checks of settings, environment and policy …")
    forget_warnings()
    if config.init_from and (run := find_run(Path(config.init_from))) != Path(config.init_from):
        config = config.model_copy(update={"init_from": str(run)})  # the new run may lie in that folder, too
    context = CheckContext(config, trainer=trainer, simulates=_simulates_here(config), begun=begun)
    if config.prometheus.port is not None:
        load("observer", "prometheus")  # an error if the plugin is not there
    require_all(with_added(CHECKS, context.depth), context)
    return ValidatedRun(config, context.spec, context.policy)


def examine(config: RunConfig, depth: Cost = "contract") -> Iterator[Examined]:
    """Run all checks of a configuration up to the cost `depth`; yield each finding as soon as it is known."""
    yield from examine_all(with_added(CHECKS, depth), CheckContext(config, depth))


def read_spec(context: CheckContext) -> EnvSpec:
    """The environment's spec; a plugin's row after "spec" reads it where a crash or a hang ends no run."""
    require_added(context, "spec")
    if context.spec is None:
        with errors_of(f"env.type = {context.config.env_type}", "spec"):
            context.spec = env_settings(context.config).spec()
    return context.spec


def _simulates_here(config: RunConfig) -> bool:
    """Whether the run builds environments itself; otherwise all of its simulators join."""
    return bool(config.rollout.simulators or config.evaluation.reserved_rows)


def installed_env(config: RunConfig) -> EnvSettings:
    """The environment's settings. ConfigError: a package that environment or policy requires is missing.

    If all simulators join, the environment's packages are not needed here.
    """
    env = env_settings(config)
    if _simulates_here(config):
        check_env_installed(config)
    check_installed("policy", config.policy)
    return env


def check_env_installed(config: RunConfig) -> None:
    """`check_installed` of the environment, told where the run's simulators would draw."""
    here = config.rollout.simulators + bool(config.evaluation.reserved_rows)
    simulators = {"local": here, "inline": 1}.get(config.launcher, 0)
    with set_drawing(Drawing(simulators, find_drawing_device(config, os.environ))):
        check_installed("env", config.env)


def check_build(config: RunConfig, spec: EnvSpec, settings: PolicySettings | None = None) -> Policy:
    """Build the policy as the trainer does, with the seed's weights, and check its attributes.

    settings: replace the configuration's.
    """
    what = f"policy.type = {config.policy_type}"
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


def check_module(policy: object) -> None:
    if not isinstance(policy, torch.nn.Module):
        raise ContractViolation(
            f"build gave a {type(policy).__name__}", "return a torch.nn.Module with act, evaluate, value"
        )


def check_attributes(policy: Policy, spec: EnvSpec) -> str:
    """The policy is a module whose chunk, action_dim, exact and tolerance fit the environment."""
    check_module(policy)
    for name in ("chunk", "action_dim", "exact", "tolerance"):
        if not hasattr(policy, name):
            raise ContractViolation(f"the policy has no attribute {name}", f"set self.{name} in __init__")
    if not isinstance(policy.chunk, int) or isinstance(policy.chunk, bool) or policy.chunk < 1:
        raise ContractViolation(f"chunk is {policy.chunk!r}", "set it to a whole number, 1 or more")
    if policy.action_dim != spec.action.dim:
        raise ContractViolation(
            f"action_dim is {policy.action_dim!r}, the environment's actions have {spec.action.dim} entries",
            "set it to that",
        )
    if spec.chunk and policy.chunk != spec.chunk:
        raise ContractViolation(
            f"chunk is {policy.chunk}, a step of the environment takes chunks of {spec.chunk} actions", "set it to that"
        )
    if not isinstance(policy.tolerance, int | float) or not 0.0 <= policy.tolerance < float("inf"):
        raise ContractViolation(
            f"tolerance is {policy.tolerance!r}", "set it to the largest error of a log-prob, such as 1e-5"
        )
    if next(iter(as_module(policy).parameters()), None) is None:
        raise ContractViolation("the policy has no parameters", "register its networks as attributes of the module")
    exact = "exact" if policy.exact else f"tolerance {policy.tolerance:g}"
    return f"chunk {policy.chunk}, {policy.action_dim} action entries, {exact}"


def policy_to_try(context: CheckContext) -> tuple[Policy, PolicyForm]:
    """The policy for the trial, and its form: a released policy larger than `_TRIED` is replaced by its miniature.

    The trial's dozens of passes would take minutes on a CPU. The miniature has the same inputs, method and settings.
    """
    config, spec, settings = context.config, context.spec, policy_settings(context.config)
    if context.form.train_bytes <= _TRIED or not settings_traits(settings).has_miniature:
        return context.policy, context.form
    miniature = extended_settings(settings).miniature()
    return check_build(config, spec, miniature), check_form(config, spec, miniature)


def check_form(config: RunConfig, spec: EnvSpec, settings: PolicySettings | None = None) -> PolicyForm:
    """The policy's declared form. settings: replace the configuration's."""
    settings = settings or policy_settings(config)
    with errors_of(f"policy.type = {config.policy_type}", "its form()"):
        form = settings.form(spec)
    if not isinstance(form, PolicyForm):
        raise ConfigError(
            f"policy.type = {config.policy_type}: form() gave a {type(form).__name__}; "
            "return a PolicyForm (polyrhythm.policies.form.describe makes one)"
        )
    return form


def shared_sizes(config: RunConfig, spec: EnvSpec, form: PolicyForm, *, trainer: bool = True) -> dict[str, int]:
    """Bytes of shared memory that the run reserves, by segment."""
    infos = env_batch_infos(config, spec, trainer=trainer)
    layout = arena_layout(config, spec, infos, form, trainer=trainer)
    return {"arena": layout.nbytes, "weights": shared_nbytes(WeightsLayout.of(form.published))}


def refuse_swapping(spec: EnvSpec) -> None:
    """Raise ConfigError if the environment has only one task and hence no other instruction."""
    if len(spec.tasks) < 2:
        raise ConfigError(
            "swapping instructions: it takes at least 2 tasks, and the environment has 1; leave it out "
            "(evaluation.swapped=false, no --swap-instructions)"
        )


# ------------------------------------------------------------ the list


def check_devices(context: CheckContext) -> str:
    """The seats of all stations, in words. ConfigError: a device is missing."""
    placed = place(context.config, trainer=context.trainer)
    if context.config.placement.moves:
        load("pipeline", "move_rules")(context.config, placed)  # raises if nothing can be moved
    return group_seats(placed.seats)


def _spec(context: CheckContext) -> None:
    """Before a run, a checkpoint is compared with the environment's spec before the environment is tried."""
    installed_env(context.config)
    declared, checkpoint = None, released_folder(context.config.policy)
    if checkpoint and context.depth == "trial":
        declared = read_spec(context)
        _form(context)
        require_added(context, "policy's form")
    require_added(context, "environment's trial")
    if context.spec is None:
        read_spec(context)
    if context.spec != declared:
        context.form = None  # type: ignore[assignment]
    elif declared is not None:
        context.done.add("policy's form")


def _rows(context: CheckContext) -> str:
    config = context.config
    check_rollout(config, context.spec)
    if context.trainer:
        check_weights_change(config)
    return f"{config.all_rows} rows; an update has {config.training.batch_size} samples"


def _form(context: CheckContext) -> None:
    """A defect that breaks both form() and build() is reported as one of build(), which users can call by
    themselves."""
    if context.form is not None:
        return
    try:
        context.form = check_form(context.config, context.spec)
    except ConfigError:
        check_build(context.config, context.spec)
        raise


def _build(context: CheckContext) -> Result:
    if "memory" in context.failed:
        return ()
    context.policy = check_build(context.config, context.spec)
    if context.depth == "trial":
        if context.trainer:
            _server(context)
        context.tried = policy_to_try(context)
    return ""


def _objective(context: CheckContext) -> str:
    check_learning(context, context.policy)
    return describe_objective(context.config.objective)


def check_processes(context: CheckContext) -> None:
    """Raise StartError unless this machine's limits allow the run's files and threads. Limits of other cluster nodes
    are unknown."""
    config, trainer = context.config, context.trainer
    if config.launcher == "inline":
        return
    on_ray = config.launcher == "ray"
    if on_ray and config.ray.address != "local":
        check_limits([], agents=1)
        return
    infos = env_batch_infos(config, context.spec, trainer=trainer)
    names = station_names(config, trainer=trainer)
    processes = len(names["generators"]) + len(names["trainer"]) + len(names.get("scorers", ()))
    actors = len(infos) - config.join.simulators + processes if on_ray else 0
    if traits_of(config.env).own_process:
        processes += sum(map(len, infos))  # each env batch has a process in the other Python
    check_limits([*map(len, infos), *[1] * processes], agents=int(on_ray), actors=actors)


def check_memory(context: CheckContext) -> None:
    """Remove the shared memory of dead runs, then raise StartError unless the run's own fits."""
    if context.config.launcher == "local":
        remove_orphans()
        refuse_shortage(shared_sizes(context.config, context.spec, context.form, trainer=context.trainer))


def check_start(context: CheckContext, policy: Policy | None = None) -> None:
    """Check the source of the first weights, and whether instructions can be swapped. policy: else the context's."""
    config, spec = context.config, context.spec
    if context.trainer and config.init_from and config.resume == "never":  # a resumed run has its own weights
        load_init_weights(config, policy or context.policy)
    elif context.trainer and config.demonstrations is not None and not config.init_from:
        load("pipeline", "demonstrations").check_source(config, spec)
    if config.evaluation.swapped:
        refuse_swapping(spec)


def _server(context: CheckContext) -> None:
    """Raise StartError unless the server of the policy's engine, if it uses one, answers correctly.

    On a Ray cluster the generator asks it instead, since it may be on another host.
    """
    if context.config.launcher == "ray" or not isinstance(context.config.batching, StreamsBatching):
        return
    if policy_traits(context.policy).asks_server:
        try:
            streaming(context.policy).ask_server()
        except RunHalted as error:
            raise StartError(str(error)) from error


#: The core's checks, in the order in which they are run before a start and by `polyrhythm check`.
CHECKS = (
    Check("devices", "recipe", "settings", check_devices),
    Check("environment's spec", "recipe", "trial", _spec),
    Check("rows and batches", "recipe", "machine", _rows, needs=("spec",)),
    Check("policy's form", "recipe", "trial", _form, needs=("spec",)),
    Check("policy's build", "recipe", "trial", _build, needs=("form",)),
    Check("objective", "training", "trial", _objective, needs=("tried",)),
    Check("files and threads", "training", "trial", check_processes, needs=("tried",)),
    Check("shared memory", "training", "trial", check_memory, needs=("tried",)),
    Check("first weights", "training", "trial", check_start, needs=("tried",)),
    Check("the engine's server", "training", "contract", _server, needs=("tried",)),
)
