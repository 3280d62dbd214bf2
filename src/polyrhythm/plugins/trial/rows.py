"""Rows of the trial in the list of checks.

`train --check` compares what settings, environment and policy declare. It takes seconds at any size, since it starts no
simulator, reads no weights and writes no file. Resources that this machine lacks (checkpoint folder, package, device,
memory) are missing, not failed, and the remaining rows run as far as they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from polyrhythm.checks import (
    Check,
    CheckContext,
    Examined,
    Result,
    errors_of,
    examine_one,
    failed_finding,
    require_added,
    size_of,
)
from polyrhythm.config.catalog import check_installed, declared, need
from polyrhythm.config.presets import describe_objective
from polyrhythm.conformance import ContractViolation, Finding, run_checks
from polyrhythm.error_codes import CONTRACT
from polyrhythm.errors import MissingError, PolyrhythmError
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.persistence.resume import check_init_settings
from polyrhythm.pipeline.placed import list_seat_warnings
from polyrhythm.pipeline.validation.check import (
    check_build,
    check_env_installed,
    check_form,
    check_processes,
    check_start,
    refuse_swapping,
    shared_sizes,
)
from polyrhythm.pipeline.validation.fit import check_learning, check_tokens, check_trainable, check_value
from polyrhythm.plugin import load
from polyrhythm.plugins.trial.advice import batching_findings, scale_findings, staleness_findings, update_findings
from polyrhythm.plugins.trial.environment import declared_rows, try_contract, try_env, try_spec
from polyrhythm.plugins.trial.objective import as_shown, dry_run_objective, try_on
from polyrhythm.plugins.trial.policy_contract import policy_checks
from polyrhythm.policies.base import Policy, extended_settings
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import released_folder, settings_traits
from polyrhythm.readable import counted
from polyrhythm.runtime.memory.shared_folder import refuse_shortage
from polyrhythm.specs import EnvSpec
from polyrhythm.training.optim import check_patterns

#: Bytes of the largest policy that is built.
_SMALL = 64 * 2**20


# ------------------------------------------------------------ environment


def check_environment(context: CheckContext) -> Iterator[Examined]:
    """Check packages, the environment's own check, and its spec; a failure of both is reported once.

    An environment whose package is missing may be unable to return its spec.
    """
    config = context.config
    lacking = [package for package in declared(config.env).needs if not need(package).found]
    installed = Check("environment's packages", "environment", "machine", lambda _: check_env_installed(config))
    packages = list(examine_one(installed, context))
    told = [one.finding.detail for one in packages if one.finding.state != "ok"]
    for one in packages:
        own = one.finding._replace(name="environment") if told and not lacking else one.finding
        yield one._replace(finding=own)
    is_missing = any(one.finding.state == "missing" for one in packages)

    def spec(_: CheckContext) -> str:
        set_spec(context)
        return _described(context.spec)

    for examined in examine_one(Check("environment", "environment", "machine", spec), context):
        if lacking and is_missing and examined.finding.state != "ok":
            detail = f"not checked without {lacking[0]}, and neither is the policy"
            yield Examined("environment", Finding("environment", "note", detail))
        elif told and context.spec is None and (is_missing or examined.finding.detail in told):
            yield Examined("policy", Finding("policy", "note", "not checked without the environment"))
        elif lacking or not told or examined.finding.state != "ok":
            yield examined


def _described(spec: EnvSpec) -> str:
    arrays = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in spec.observation.items())
    return f"{counted(len(spec.tasks), 'task')} of {spec.max_steps} steps; {arrays}; actions of {spec.action.dim}"


def check_policy(context: CheckContext) -> Iterator[Examined]:
    """Check packages and the form, which compares policy, environment and checkpoint.

    If the checkpoint or its tokenizer is missing, the form is that of the released network of this type.
    """
    config, spec = context.config, context.spec
    installed = Check("policy's packages", "policy", "machine", lambda _: check_installed("policy", config.policy))
    yield from examine_one(installed, context)
    settings, told = policy_settings(config), set[str]()
    stand_ins: list[Any] = [settings]  # settings that need ever less from this machine
    if settings_traits(settings).has_miniature:
        stand_ins += extended_settings(settings).stand_ins()
    for stand_in in stand_ins:
        try:
            context.form = check_form(config, spec, stand_in)
        except MissingError as error:
            if str(error) not in told:
                yield Examined("policy", failed_finding("policy's files", error, context.depth))
            told.add(str(error))
        except PolyrhythmError as error:
            yield Examined("policy", failed_finding("policy", error, context.depth))
            return
        else:
            context.settings = stand_in
            context.sized = released_folder(stand_in) == released_folder(settings)
            yield Examined("policy", Finding("policy", "ok", _summary(context.form, sized=context.sized)))
            return


def _summary(form: PolicyForm, *, sized: bool) -> str:
    actions = f"chunk of {form.chunk} actions of {form.action_dim} entries"
    return f"{actions}; {form.parameters:,} parameters, {form.trainable:,} of them trained" if sized else actions


def _tried(context: CheckContext) -> tuple[Policy | None, bool]:
    """The policy if it is small, else its miniature, None for a large policy without one; and whether it is the run's
    own."""
    settings, spec, form = context.settings, context.spec, context.form
    if context.sized and form.train_bytes <= _SMALL and not released_folder(settings):
        return check_build(context.config, spec, settings), True
    if settings is not None and settings_traits(settings).has_miniature:
        return check_build(context.config, spec, extended_settings(settings).miniature()), False
    return None, False


def check_objective(context: CheckContext) -> str:
    config, spec, form = context.config, context.spec, context.form
    policy, whole = _tried(context)
    if policy is not None and whole:
        check_learning(context, policy)
        return describe_objective(config.objective)
    check_value(config, form)
    check_tokens(config, form)
    if config.training.versions:
        optimizer, names = config.training.optimizer, list(form.published)
        critic = any(name.startswith("critic.") for name in names)
        with errors_of("training.optimizer"):
            check_patterns(names, optimizer.groups, optimizer.value_lr, has_critic=critic)
        require_added(context, "custom objective")
        if policy is not None:
            check_trainable(config, spec, policy)
    return describe_objective(config.objective)


def check_first_weights(context: CheckContext) -> str:
    config, spec = context.config, context.spec
    if config.evaluation.swapped:
        refuse_swapping(spec)
    if config.resume != "never":
        return ""
    if not config.init_from:
        if config.demonstrations is None:
            return ""
        # Not by building it: the expert of a text environment writes messages.
        return str(load("pipeline", "demonstrations").check_source(config, spec, builds=False))
    if not Path(config.init_from).exists():
        raise MissingError(
            f"init_from = {config.init_from}: it does not exist; name the folder of a run or its policy.pt"
        )
    policy, whole = _tried(context)
    if policy is not None and whole:
        check_start(context, policy)
    else:
        check_init_settings(config)
    return f"init_from = {config.init_from}"


def check_shared_memory(context: CheckContext) -> Result:
    """Check and describe the sizes of shared memory; nothing if the policy's size is unknown."""
    if not context.sized:
        return ()
    sizes = shared_sizes(context.config, context.spec, context.form)
    if context.config.launcher == "local":
        refuse_shortage(sizes)
    return ", ".join(f"{name} {size_of(size)}" for name, size in sizes.items())


# ------------------------------------------------------------ before a run, and `check`


def seat_warnings(context: CheckContext) -> Iterator[Finding]:
    for sentence in list_seat_warnings(context.config):
        problem, _, fix = sentence.rpartition("; ")
        yield Finding("placement", "note", problem, fix)


def settings_notes(context: CheckContext) -> Iterable[Finding]:
    """Notes on settings that are valid but do not fit together."""
    return [*staleness_findings(context.config), *batching_findings(context.config)] if context.trainer else ()


def describe_updates(context: CheckContext) -> Iterable[Finding]:
    return update_findings(context.config, context.spec, context.form)


def describe_scale(context: CheckContext) -> Iterable[Finding]:
    return scale_findings(context.config, context.rows)


def check_files(context: CheckContext) -> None:
    check_processes(context)


def set_spec(context: CheckContext) -> None:
    context.spec = try_spec(context.config, env_settings(context.config))


def try_environment(context: CheckContext) -> None:
    """The environment's spec and first rows, before a run; random rows if all simulators join."""
    config, env = context.config, env_settings(context.config)
    here = context.simulates
    tried = try_env(config, env, play=not context.begun) if here else declared_rows(try_spec(config, env))
    context.spec, context.rows = tried


def try_policy(context: CheckContext) -> None:
    """Try the policy, or its miniature, on the environment's first rows, before a run."""
    assert context.tried is not None
    learns = context.trainer and context.config.training.versions > 0
    try_on(context.rows, context.config.policy_type, *context.tried, context.spec, learns=learns)


def try_objective(context: CheckContext) -> None:
    dry_run_objective(context.config.algorithm, context.form)


def contract_of_environment(context: CheckContext) -> Iterator[Finding]:
    failed = False
    try:
        for seen in try_contract(context.config, env_settings(context.config)):
            if isinstance(seen, Finding):
                failed |= seen.state == "failed"
                yield seen
            else:
                context.rows.update(seen)
    except PolyrhythmError as error:
        if not failed:  # else it is reported already
            yield failed_finding("calls", error)


def contract_of_policy(context: CheckContext) -> Iterator[Finding]:
    config, spec = context.config, context.spec
    if not context.rows:
        detail = "not checked: the check needs observations of the environment, and there are none"
        yield Finding("contract", "note", detail)
        return
    try:
        checks = policy_checks(
            policy_settings(config),
            as_shown(context.rows, spec),
            spec,
            learns=config.training.versions > 0,
            imitates=config.supervised is not None,
        )
    except ContractViolation as violation:
        yield Finding("build", "failed", violation.problem, violation.fix, CONTRACT)
        return
    failed = False
    for finding in run_checks(checks):
        failed |= finding.state == "failed"
        yield finding
    context.tried = None if failed else (context.policy, context.form)
