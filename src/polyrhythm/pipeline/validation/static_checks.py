"""Checks a recipe without starting anything, for `polyrhythm train RECIPE --check`: seconds at any size.

No simulator is started, no weight is read and no file written. What this machine lacks (a checkpoint's folder, a
package, a device, memory) is missing rather than failed, and the rest is checked as far as it can be without it.
`polyrhythm check` goes further: it builds the policy and runs the environment.

Left to that: whether the environment has an expert, and, for policies beyond `_SMALL`, whether the tensors of
`init_from` fit; the settings of its run are compared here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.config.catalog import check_installed, need
from polyrhythm.config.objective_needs import describe_objective
from polyrhythm.config.schema import RunConfig
from polyrhythm.conformance import Finding
from polyrhythm.errors import MissingError, PolyrhythmError
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.placed import list_seat_warnings
from polyrhythm.pipeline.seats import group_seats
from polyrhythm.pipeline.validation.all_checks import Examined, failed_finding, note_shortage, run_findings
from polyrhythm.pipeline.validation.check import (
    check_build,
    check_devices,
    check_env_installed,
    check_form,
    check_processes,
    check_start,
    refuse_swapping,
    shared_sizes,
)
from polyrhythm.pipeline.validation.config_errors import errors_of
from polyrhythm.pipeline.validation.custom_objective import dry_run_objective
from polyrhythm.pipeline.validation.env_trial import try_spec
from polyrhythm.pipeline.validation.learning_checks import (
    check_learning,
    check_tokens,
    check_trainable,
    check_value,
    update_findings,
)
from polyrhythm.pipeline.validation.rollout_checks import (
    check_rollout,
    check_weights_change,
    load_reward_function,
    settings_findings,
)
from polyrhythm.pipeline.validation.room import check_room
from polyrhythm.pipeline.warm_start.demos import check_expert
from polyrhythm.pipeline.warm_start.init_from import check_init_settings
from polyrhythm.plugins.lerobot.checking import check_dataset
from polyrhythm.plugins.memory_estimate.needs import memory_by_station
from polyrhythm.policies.base import Policy, PolicySettings, extended_settings
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import settings_traits
from polyrhythm.runtime.memory.shared_folder import refuse_shortage
from polyrhythm.specs import EnvSpec
from polyrhythm.training.optim import check_patterns

#: Bytes of the largest policy that is built for the check.
_SMALL = 64 * 2**20


class _Planned(NamedTuple):
    """A form, and the settings that it was made of. known: the size is that of the run's own policy, rather than that
    of the release in place of a checkpoint that is not there."""

    form: PolicyForm
    settings: PolicySettings
    known: bool


class _Built(NamedTuple):
    """A policy that can be tried. whole: it is the run's own; otherwise a miniature of it."""

    policy: Policy
    whole: bool


def check_unstarted(config: RunConfig) -> Iterator[Examined]:
    """Run all checks that start nothing; yield each finding as soon as it is known."""
    yield from _find("recipe", "devices", lambda: group_seats(check_devices(config)))
    for sentence in list_seat_warnings(config):
        problem, _, fix = sentence.rpartition("; ")
        yield Examined("recipe", Finding("placement", "note", problem, fix))
    yield from (Examined("recipe", found) for found in settings_findings(config))
    specs: list[EnvSpec] = []
    yield from _environment(config, specs)
    if not specs:
        return
    spec = specs[0]
    yield from _find("recipe", "rows and batches", lambda: _rows(config, spec))
    planned: list[_Planned] = []
    yield from _policy(config, spec, planned)
    if not planned:
        return
    plan, form = planned[0], planned[0].form
    yield from _find("training", "objective", lambda: _objective(config, spec, plan))
    yield from (Examined("training", finding) for finding in update_findings(config, spec, form))
    yield from _find("training", "first weights", lambda: _first_weights(config, spec, plan))
    yield from _find("machine", "files and threads", lambda: check_processes(config, spec))
    if not plan.known:
        detail = "not checked: without the checkpoint's folder its size is unknown"
        yield Examined("machine", Finding("memory by station", "note", detail))
        return
    yield from _find("machine", "shared memory", lambda: _shared_memory(config, spec, form))
    yield from _find("machine", "memory by station", lambda: _memory(config, spec, form))
    yield from note_shortage("machine", config, spec, form)


def _find(part: str, name: str, check: Callable[[], object]) -> Iterator[Examined]:
    yield from run_findings(part, {name: check}, tells_missing=True)


def _environment(config: RunConfig, specs: list[EnvSpec]) -> Iterator[Examined]:
    """Packages, the environment's own check, and its spec; what fails in both is told once. specs: receives the spec;
    an environment whose package is missing may not tell its own."""
    lacking = [package for package in getattr(config.env, "needs", ()) if not need(package).found]
    packages = list(_find("environment", "environment's packages", lambda: check_env_installed(config)))
    told = [one.finding.detail for one in packages if one.finding.state != "ok"]
    for one in packages:
        own = one.finding._replace(name="environment") if told and not lacking else one.finding
        yield one._replace(finding=own)
    is_missing = any(one.finding.state == "missing" for one in packages)

    def spec() -> str:
        specs.append(try_spec(config, env_settings(config)))
        return _described(specs[0])

    for examined in _find("environment", "environment", spec):
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


def _rows(config: RunConfig, spec: EnvSpec) -> str:
    check_rollout(config, spec)
    load_reward_function(config)
    check_weights_change(config)
    return f"{config.all_rows} rows; an update has {config.training.batch_size} samples"


def _policy(config: RunConfig, spec: EnvSpec, planned: list[_Planned]) -> Iterator[Examined]:
    """Packages, and the form, which compares policy, environment and checkpoint. planned: receives it.

    Where the checkpoint's folder or its tokenizer is missing, the form is that of the released network of this type.
    """
    yield from _find("policy", "policy's packages", lambda: check_installed("policy", config.policy))
    settings, told = policy_settings(config), set[str]()
    stand_ins: list[Any] = [settings]  # settings that need less and less of this machine
    if settings_traits(settings).has_miniature:
        stand_ins += extended_settings(settings).stand_ins()
    for stand_in in stand_ins:
        try:
            form = check_form(config, spec, stand_in)
        except MissingError as error:
            if str(error) not in told:
                yield Examined("policy", failed_finding("policy's files", error, tells_missing=True))
            told.add(str(error))
        except PolyrhythmError as error:
            yield Examined("policy", failed_finding("policy", error))
            return
        else:
            known = getattr(stand_in, "checkpoint", "") == getattr(settings, "checkpoint", "")
            planned.append(_Planned(form, stand_in, known))
            yield Examined("policy", Finding("policy", "ok", _summary(form, sized=known)))
            return


def _summary(form: PolicyForm, *, sized: bool) -> str:
    actions = f"chunk of {form.chunk} actions of {form.action_dim} entries"
    return f"{actions}; {form.parameters:,} parameters, {form.trainable:,} of them trained" if sized else actions


def _tried(config: RunConfig, spec: EnvSpec, plan: _Planned) -> _Built | None:
    """The policy if it is small, else its miniature; None where a policy of its own is too large to be built here."""
    settings = plan.settings
    if plan.known and plan.form.train_bytes <= _SMALL and not getattr(settings, "checkpoint", ""):
        return _Built(check_build(config, spec, settings), whole=True)
    if settings_traits(settings).has_miniature:
        return _Built(check_build(config, spec, extended_settings(settings).miniature()), whole=False)
    return None


def _objective(config: RunConfig, spec: EnvSpec, plan: _Planned) -> str:
    """The name of the objective of another system, if any, after all that can be tried of it."""
    built, form = _tried(config, spec, plan), plan.form
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


def _first_weights(config: RunConfig, spec: EnvSpec, plan: _Planned) -> str:
    """Where they come from, where a run names them."""
    if config.evaluation.swapped:
        refuse_swapping(spec)
    if config.resume != "never":
        return ""
    if not config.init_from:
        return _demonstrations(config, spec)
    if not Path(config.init_from).exists():
        raise MissingError(
            f"init_from = {config.init_from}: it does not exist; name the folder of a run or its policy.pt"
        )
    built = _tried(config, spec, plan)
    if built is not None and built.whole:
        check_start(config, spec, built.policy)
    else:
        check_init_settings(config)
    return f"init_from = {config.init_from}"


def _demonstrations(config: RunConfig, spec: EnvSpec) -> str:
    """The dataset that is imitated first, if any; only its small files are read. Without one, the expert of a text
    environment must be able to write its messages."""
    if config.demonstrations is None:
        return ""
    dataset = config.demonstrations.dataset
    if dataset is None:
        check_expert(env_settings(config), config.demonstrations)
        return ""
    found = check_dataset(dataset, spec, config.rollout.action_repeat)
    return f"{len(found.episodes)} episodes of {found.folder}"


def _shared_memory(config: RunConfig, spec: EnvSpec, form: PolicyForm) -> str:
    sizes = shared_sizes(config, spec, form)
    if config.launcher == "local":
        refuse_shortage(sizes)
    return ", ".join(f"{name} {_gigabytes(size)}" for name, size in sizes.items())


def _memory(config: RunConfig, spec: EnvSpec, form: PolicyForm) -> str:
    """What each station takes, without activations, simulators and interpreters; equal stations together."""
    memory = memory_by_station(config, spec, form)
    with suppress(MissingError):  # a device, which is reported already
        check_room(config, spec, form)
    groups: dict[str, list[str]] = {}
    for name, parts in memory.items():
        if name != "shared" and "arena blocks" not in parts:  # simulators write into shared memory
            groups.setdefault(_gigabytes(sum(parts.values())), []).append(name)
    more = {size: f" and {len(names) - 1} more, each" * (len(names) > 1) for size, names in groups.items()}
    return (
        ", ".join(f"{names[0]}{more[size]} {size}" for size, names in groups.items())
        + "; without activations and simulators"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
