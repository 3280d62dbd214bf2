"""Ordered list of a recipe's checks, for `polyrhythm check` and `polyrhythm train RECIPE --check`.

`train --check` runs checks up to the cost `machine`: seconds at any size, since it starts no simulator, reads no
weights and writes no file. Resources that this machine lacks (checkpoint folder, package, device, memory) are reported
as missing, not failed, and the remaining checks run as far as they can. Only `check` builds the policy and runs the
environment. A failed check does not stop the others, unless they need its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.checks import (
    Check,
    CheckContext,
    Cost,
    Examined,
    Result,
    errors_of,
    examine_all,
    examine_one,
    failed_finding,
    note_of,
    size_of,
    with_added,
)
from polyrhythm.config.catalog import check_installed, declared, need
from polyrhythm.config.presets import describe_objective
from polyrhythm.config.schema import RunConfig
from polyrhythm.conformance import ContractViolation, Finding, run_checks
from polyrhythm.errors import MissingError, PolyrhythmError
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.persistence.resume import check_init_settings
from polyrhythm.pipeline.placed import group_seats, list_seat_warnings
from polyrhythm.pipeline.validation.check import (
    check_build,
    check_devices,
    check_env_installed,
    check_form,
    check_form_first,
    check_memory,
    check_processes,
    check_server,
    check_start,
    installed_env,
    refuse_swapping,
    shared_sizes,
)
from polyrhythm.pipeline.validation.custom_objective import as_shown, dry_run_objective
from polyrhythm.pipeline.validation.env_trial import try_contract, try_spec
from polyrhythm.pipeline.validation.learning_checks import (
    check_learning,
    check_tokens,
    check_trainable,
    check_value,
    scale_findings,
    update_findings,
)
from polyrhythm.pipeline.validation.rollout_checks import check_rollout, check_weights_change, settings_findings
from polyrhythm.plugin import load
from polyrhythm.policies.base import Policy, extended_settings
from polyrhythm.policies.conformance import policy_checks
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import settings_traits
from polyrhythm.runtime.memory.shared_folder import refuse_shortage
from polyrhythm.specs import EnvSpec
from polyrhythm.training.optim import check_patterns

#: Bytes of the largest policy that `train --check` builds.
_SMALL = 64 * 2**20


def examine(config: RunConfig, depth: Cost = "trial") -> Iterator[Examined]:
    """Run all checks of a configuration up to the cost `depth`; yield each finding as soon as it is known."""
    yield from examine_all(with_added(CHECKS, depth), CheckContext(config, depth))


# ------------------------------------------------------------ settings and rows


def _rows(context: CheckContext) -> str:
    config, spec = context.config, context.spec
    check_rollout(config, spec)
    check_weights_change(config)
    return f"{config.all_rows} rows; an update has {config.training.batch_size} samples"


# ------------------------------------------------------------ environment


def _declared_environment(context: CheckContext) -> Iterator[Examined]:
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

    specs: list[EnvSpec] = []

    def spec(_: CheckContext) -> str:
        specs.append(try_spec(config, env_settings(config)))
        context.spec = specs[0]
        return _described(context.spec)

    for examined in examine_one(Check("environment", "environment", "machine", spec), context):
        if lacking and is_missing and examined.finding.state != "ok":
            detail = f"not checked without {lacking[0]}, and neither is the policy"
            yield Examined("environment", Finding("environment", "note", detail))
        elif told and not specs and (is_missing or examined.finding.detail in told):
            yield Examined("policy", Finding("policy", "note", "not checked without the environment"))
        elif lacking or not told or examined.finding.state != "ok":
            yield examined


def _described(spec: EnvSpec) -> str:
    arrays = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in spec.observation.items())
    tasks = f"{len(spec.tasks)} task{'s' * (len(spec.tasks) > 1)}"
    return f"{tasks} of {spec.max_steps} steps; {arrays}; actions of {spec.action.dim}"


def _spec(context: CheckContext) -> None:
    context.spec = try_spec(context.config, installed_env(context.config))


def _contract_of_environment(context: CheckContext) -> Iterator[Finding]:
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


# ------------------------------------------------------------ policy


def _declared_policy(context: CheckContext) -> Iterator[Examined]:
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
            context.sized = getattr(stand_in, "checkpoint", "") == getattr(settings, "checkpoint", "")
            yield Examined("policy", Finding("policy", "ok", _summary(context.form, sized=context.sized)))
            return


def _summary(form: PolicyForm, *, sized: bool) -> str:
    actions = f"chunk of {form.chunk} actions of {form.action_dim} entries"
    return f"{actions}; {form.parameters:,} parameters, {form.trainable:,} of them trained" if sized else actions


def _form(context: CheckContext) -> None:
    context.form = check_form_first(context.config, context.spec)


def _build(context: CheckContext) -> Result:
    if "memory" in context.failed:
        return ()
    context.policy = check_build(context.config, context.spec)
    return ""


def _contract_of_policy(context: CheckContext) -> Iterator[Finding]:
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
        yield Finding("build", "failed", violation.problem, violation.fix)
        return
    failed = False
    for finding in run_checks(checks):
        failed |= finding.state == "failed"
        yield finding
    context.tried = None if failed else True


# ------------------------------------------------------------ training


class _Built(NamedTuple):
    """A policy that can be tried. whole: it is the run's own rather than a miniature."""

    policy: Policy
    whole: bool


def _tried(context: CheckContext) -> _Built | None:
    """The policy if it is small, else its miniature; None for a large policy without one."""
    settings, spec, form = context.settings, context.spec, context.form
    if context.sized and form.train_bytes <= _SMALL and not getattr(settings, "checkpoint", ""):
        return _Built(check_build(context.config, spec, settings), whole=True)
    if settings is not None and settings_traits(settings).has_miniature:
        return _Built(check_build(context.config, spec, extended_settings(settings).miniature()), whole=False)
    return None


def _objective(context: CheckContext) -> str:
    config, spec, form = context.config, context.spec, context.form
    built = _Built(context.policy, whole=True) if context.tried else _tried(context)
    if built is not None and built.whole:
        check_learning(config, spec, built.policy, form, trainer=True)
        return describe_objective(config.objective)
    check_value(config, form)
    check_tokens(config, form)
    if config.training.versions:
        optimizer, names = config.training.optimizer, list(form.published)
        critic = any(name.startswith("critic.") for name in names)
        with errors_of("training.optimizer"):
            check_patterns(names, optimizer.groups, optimizer.value_lr, has_critic=critic)
        dry_run_objective(config.algorithm, form)
        if built is not None:
            check_trainable(config, spec, built.policy)
    return describe_objective(config.objective)


def _updates(context: CheckContext) -> Iterable[Finding]:
    return update_findings(context.config, context.spec, context.form)


def _declared_weights(context: CheckContext) -> str:
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
    built = _tried(context)
    if built is not None and built.whole:
        check_start(config, spec, built.policy)
    else:
        check_init_settings(config)
    return f"init_from = {config.init_from}"


# ------------------------------------------------------------ machine


def _processes(context: CheckContext) -> None:
    check_processes(context.config, context.spec)


def _declared_memory(context: CheckContext) -> Result:
    """Check and describe the sizes of shared memory; nothing if the policy's size is unknown."""
    if not context.sized:
        return ()
    sizes = shared_sizes(context.config, context.spec, context.form)
    if context.config.launcher == "local":
        refuse_shortage(sizes)
    return ", ".join(f"{name} {size_of(size)}" for name, size in sizes.items())


#: The core's checks. Rows with cost `machine` and `until="trial"` check what is known before anything is built.
CHECKS = (
    Check("devices", "recipe", "settings", lambda c: group_seats(check_devices(c.config))),
    Check("placement", "recipe", "settings", lambda c: [note_of("placement", x) for x in list_seat_warnings(c.config)]),
    Check("notes", "recipe", "settings", lambda c: settings_findings(c.config)),
    Check("environment", "environment", "machine", _declared_environment, until="trial"),
    Check("environment's spec", "recipe", "trial", _spec),
    Check("rows and batches", "recipe", "machine", _rows, needs=("spec",)),
    Check("policy", "policy", "machine", _declared_policy, needs=("spec",), until="trial"),
    Check("policy's form", "recipe", "trial", _form, needs=("spec",)),
    Check("policy's build", "recipe", "trial", _build, needs=("form",)),
    Check("environment's contract", "environment", "trial", _contract_of_environment, needs=("spec",)),
    Check("policy's contract", "policy", "trial", _contract_of_policy, needs=("policy",)),
    Check("objective", "training", "machine", _objective, needs=("form",), until="trial"),
    Check("updates", "training", "machine", _updates, needs=("form",), until="trial"),
    Check("first weights", "training", "machine", _declared_weights, needs=("form",), until="trial"),
    Check("files and threads", "machine", "machine", _processes, needs=("form",), until="trial"),
    Check("shared memory", "machine", "machine", _declared_memory, needs=("form",), until="trial"),
    Check("objective", "training", "trial", _objective, needs=("tried",)),
    Check("files and threads", "training", "trial", _processes, needs=("tried",)),
    Check("shared memory", "training", "trial", lambda c: check_memory(c.config, c.spec, c.form), needs=("tried",)),
    Check("first weights", "training", "trial", lambda c: check_start(c.config, c.spec, c.policy), needs=("tried",)),
    Check("the engine's server", "training", "trial", lambda c: check_server(c.config, c.policy), needs=("tried",)),
    Check("updates", "training", "trial", _updates, needs=("tried",)),
    Check("observations", "training", "trial", lambda c: scale_findings(c.config, c.rows), needs=("tried",)),
)
