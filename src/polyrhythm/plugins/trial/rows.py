"""Rows of the trial in the list of checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from polyrhythm.checks import CheckContext, failed_finding
from polyrhythm.conformance import ContractViolation, Finding, run_checks
from polyrhythm.errors import PolyrhythmError
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.placed import list_seat_warnings
from polyrhythm.pipeline.validation.check import check_processes
from polyrhythm.plugins.trial.advice import batching_findings, scale_findings, staleness_findings, update_findings
from polyrhythm.plugins.trial.environment import declared_rows, try_contract, try_env, try_spec
from polyrhythm.plugins.trial.objective import as_shown, dry_run_objective, try_on
from polyrhythm.plugins.trial.policy_contract import policy_checks


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


def check_files_and_threads(context: CheckContext) -> None:
    check_processes(context.config, context.spec)


def read_spec(context: CheckContext) -> None:
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
        yield Finding("build", "failed", violation.problem, violation.fix)
        return
    failed = False
    for finding in run_checks(checks):
        failed |= finding.state == "failed"
        yield finding
    context.tried = None if failed else (context.policy, context.form)
