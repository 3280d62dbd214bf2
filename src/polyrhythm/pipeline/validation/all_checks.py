"""Runs all checks of `polyrhythm check`: settings, machine, environment, policy, objective.

A failed check does not stop the others, unless they need its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from polyrhythm.config.objective_needs import describe_objective
from polyrhythm.config.schema import RunConfig
from polyrhythm.conformance import ContractViolation, Finding, run_checks
from polyrhythm.envs.checked_env import Arrays
from polyrhythm.errors import ConfigError, MissingError, PolyrhythmError, StartError
from polyrhythm.observe.prometheus import check_endpoint
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.placed import list_seat_warnings
from polyrhythm.pipeline.seats import group_seats
from polyrhythm.pipeline.validation.check import (
    check_build,
    check_devices,
    check_form_first,
    check_memory,
    check_processes,
    check_server,
    check_start,
    installed_env,
)
from polyrhythm.pipeline.validation.custom_objective import as_shown
from polyrhythm.pipeline.validation.env_trial import try_contract, try_spec
from polyrhythm.pipeline.validation.learning_checks import (
    check_learning,
    scale_findings,
    update_findings,
)
from polyrhythm.pipeline.validation.rollout_checks import check_rollout, settings_findings
from polyrhythm.pipeline.validation.room import check_room, warn_of_room
from polyrhythm.policies.base import Policy
from polyrhythm.policies.conformance import policy_checks
from polyrhythm.policies.form import PolicyForm
from polyrhythm.specs import EnvSpec


class Examined(NamedTuple):
    """A finding and its part: recipe, environment, policy or training."""

    part: str
    finding: Finding


def examine(config: RunConfig) -> Iterator[Examined]:
    """Run all checks of a configuration; yield each result as soon as it is known."""
    results: dict[str, Any] = {}

    def keep(name: str, make: Callable[[], Any]) -> None:
        results[name] = make()

    yield from _machine(config)
    yield from run_findings(
        "recipe", {"environment's spec": lambda: keep("spec", lambda: try_spec(config, installed_env(config)))}
    )
    if "spec" not in results:
        return
    spec: EnvSpec = results["spec"]
    yield from run_findings("recipe", {"rows and batches": lambda: check_rollout(config, spec)})
    yield from run_findings("recipe", {"policy's form": lambda: keep("form", lambda: check_form_first(config, spec))})
    if "form" in results:
        yield from run_findings(
            "recipe", {"memory": lambda: keep("room", lambda: check_room(config, spec, results["form"]))}
        )
    if "room" in results:
        yield from run_findings("recipe", {"policy's build": lambda: keep("policy", lambda: check_build(config, spec))})
    rows: Arrays = {}
    yield from _environment(config, rows)
    if "policy" not in results:
        return
    if not rows:
        detail = "not checked: the check needs observations of the environment, and there are none"
        yield Examined("policy", Finding("contract", "note", detail))
        return
    passed = True
    for examined in _policy(config, spec, rows):
        passed &= examined.finding.state != "failed"
        yield examined
    if passed:
        yield from _training(config, spec, results["policy"], results["form"])
        yield from (Examined("training", finding) for finding in scale_findings(config, rows))


def _machine(config: RunConfig) -> Iterator[Examined]:
    """Check devices, seats, the port for Prometheus, and whether the loss fits the lag."""
    yield from run_findings("recipe", {"devices": lambda: group_seats(check_devices(config))})
    if config.prometheus.port is not None:
        yield from run_findings("recipe", {"prometheus": lambda: check_endpoint(config.prometheus)})
    for sentence in list_seat_warnings(config):
        problem, _, fix = sentence.rpartition("; ")
        yield Examined("recipe", Finding("placement", "note", problem, fix))
    yield from (Examined("recipe", found) for found in settings_findings(config))


def _environment(config: RunConfig, rows: Arrays) -> Iterator[Examined]:
    """Check the environment's contract; a crash or a hang is a finding too. rows: receives the first rows."""
    failed = False
    try:
        for seen in try_contract(config, env_settings(config)):
            if isinstance(seen, Finding):
                failed |= seen.state == "failed"
                yield Examined("environment", seen)
            else:
                rows.update(seen)
    except PolyrhythmError as error:
        if not failed:  # else it is reported already
            yield Examined("environment", failed_finding("calls", error))


def _policy(config: RunConfig, spec: EnvSpec, rows: Arrays) -> Iterator[Examined]:
    """Check the policy's contract on the environment's first observations."""
    settings = policy_settings(config)
    try:
        checks = policy_checks(
            settings,
            as_shown(rows, spec),
            spec,
            learns=config.training.versions > 0,
            imitates=config.supervised is not None,
        )
    except ContractViolation as violation:
        yield Examined("policy", Finding("build", "failed", violation.problem, violation.fix))
        return
    for finding in run_checks(checks):
        yield Examined("policy", finding)


def _training(config: RunConfig, spec: EnvSpec, policy: Policy, form: PolicyForm) -> Iterator[Examined]:
    """Run the checks that need a policy that keeps its contract."""
    yield from run_findings(
        "training",
        {
            "objective": lambda: _objective(config, spec, policy, form),
            "files and threads": lambda: check_processes(config, spec),
            "shared memory": lambda: check_memory(config, spec, form),
            "first weights": lambda: check_start(config, spec, policy),
            "the engine's server": lambda: check_server(config, policy),
        },
    )
    yield from (Examined("training", finding) for finding in update_findings(config, spec, form))
    yield from note_shortage("training", config, spec, form)


def note_shortage(part: str, config: RunConfig, spec: EnvSpec, form: PolicyForm) -> Iterator[Examined]:
    """A note if the run is estimated to take more memory than there is. What is wrong is reported elsewhere."""
    with suppress(PolyrhythmError):
        if shortage := warn_of_room(config, spec, form):
            problem, _, fix = shortage.partition("; ")
            yield Examined(part, Finding("memory while it works", "note", problem, fix))


def _objective(config: RunConfig, spec: EnvSpec, policy: Policy, form: PolicyForm) -> str:
    """The name of the objective of another system, if any, after it was tried."""
    check_learning(config, spec, policy, form, trainer=True)
    return describe_objective(config.objective)


def run_findings(
    part: str, checks: Mapping[str, Callable[[], object]], *, tells_missing: bool = False
) -> Iterator[Examined]:
    """Run checks that raise a PolyrhythmError on failure; yield their findings.

    tells_missing: what this machine lacks (MissingError, StartError) is missing, not failed.
    """
    for name, check in checks.items():
        try:
            detail = check()
        except ConfigError as error:
            for problem in error.problems:
                yield Examined(part, failed_finding(name, type(error)(problem, origin=error.origin), tells_missing))
        except PolyrhythmError as error:
            yield Examined(part, failed_finding(name, error, tells_missing))
        else:
            yield Examined(part, Finding(name, "ok", detail if isinstance(detail, str) else ""))


def failed_finding(name: str, error: PolyrhythmError, tells_missing: bool = False) -> Finding:
    """Finding of an error of the form `setting = value: problem; fix`. tells_missing: as in `run_findings`."""
    problem, _, fix = " ".join(str(error).split()).rpartition("; ")
    missing = tells_missing and isinstance(error, MissingError | StartError)
    return Finding(name, "missing" if missing else "failed", problem or fix, fix if problem else "")
