"""Rows of `train --check`, which compares what settings, environment and policy declare.

It takes seconds at any size, since it starts no simulator, reads no weights and writes no file. Resources that this
machine lacks (checkpoint folder, package, device, memory) are missing, not failed, and the remaining rows run as far as
they can.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from polyrhythm.conformance import Finding
from polyrhythm.errors import MissingError, PolyrhythmError
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.validation.check import (
    check_build,
    check_demonstrations,
    check_env_installed,
    check_form,
    check_start,
    read_spec,
    refuse_swapping,
    shared_sizes,
)
from polyrhythm.pipeline.validation.fit import check_learning, check_tokens, check_trainable, check_value
from polyrhythm.pipeline.warm_start.demos import check_expert
from polyrhythm.pipeline.warm_start.init_from import check_init_settings
from polyrhythm.policies.base import Policy, extended_settings
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import settings_traits
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

    specs: list[EnvSpec] = []

    def spec(_: CheckContext) -> str:
        specs.append(read_spec(context))
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
            context.sized = getattr(stand_in, "checkpoint", "") == getattr(settings, "checkpoint", "")
            yield Examined("policy", Finding("policy", "ok", _summary(context.form, sized=context.sized)))
            return


def _summary(form: PolicyForm, *, sized: bool) -> str:
    actions = f"chunk of {form.chunk} actions of {form.action_dim} entries"
    return f"{actions}; {form.parameters:,} parameters, {form.trainable:,} of them trained" if sized else actions


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


def check_objective(context: CheckContext) -> str:
    config, spec, form = context.config, context.spec, context.form
    built = _tried(context)
    if built is not None and built.whole:
        check_learning(context, built.policy)
        return describe_objective(config.objective)
    check_value(config, form)
    check_tokens(config, form)
    if config.training.versions:
        optimizer, names = config.training.optimizer, list(form.published)
        critic = any(name.startswith("critic.") for name in names)
        with errors_of("training.optimizer"):
            check_patterns(names, optimizer.groups, optimizer.value_lr, has_critic=critic)
        require_added(context, "custom objective")
        if built is not None:
            check_trainable(config, spec, built.policy)
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
        if (dataset := config.demonstrations.dataset) is not None:
            return check_demonstrations(config, dataset, spec)
        check_expert(env_settings(config), config.demonstrations)  # the expert of a text environment writes messages
        return ""
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


def check_shared_memory(context: CheckContext) -> Result:
    """Check and describe the sizes of shared memory; nothing if the policy's size is unknown."""
    if not context.sized:
        return ()
    sizes = shared_sizes(context.config, context.spec, context.form)
    if context.config.launcher == "local":
        refuse_shortage(sizes)
    return ", ".join(f"{name} {size_of(size)}" for name, size in sizes.items())
