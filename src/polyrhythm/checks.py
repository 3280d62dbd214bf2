"""Checks of recipes and machines, and functions that run lists of them.

They serve `check`, `train --check`, `doctor` and the start of a run. The core's list is in `pipeline.validation.check`;
a plugin adds rows under the kind "check" (docs/extending.md). This module imports no package that may be missing, so
that `doctor` can report it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from polyrhythm.conformance import Finding, own_place, raised, remedy
from polyrhythm.errors import ConfigError, MissingError, PolyrhythmError, StartError
from polyrhythm.plugin import PluginError, load_all

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from polyrhythm.config.schema import RunConfig
    from polyrhythm.policies.base import Policy, PolicySettings
    from polyrhythm.policies.form import PolicyForm
    from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)

#: Cost of a check: settings only reads them; machine looks at this machine (`train --check`); trial builds the parts
#: and runs them (before every run); contract tries all that they promise (`check`).
Cost = Literal["settings", "machine", "trial", "contract"]
_COSTS: tuple[Cost, ...] = get_args(Cost)
#: What a row of a plugin may follow other than another row (`Check`).
PLACES = ("", "spec", "environment's trial", "custom objective", "policies", "episode", "doctor")


class Examined(NamedTuple):
    """A finding and the part it belongs to: recipe, environment, policy, training or machine."""

    part: str
    finding: Finding


@dataclass(slots=True)
class CheckContext:
    """The configuration under check, and results of earlier checks; an unknown result is None.

    depth: checks up to this cost run. free: returns the free bytes of a device's memory; None: measured. settings: the
    policy's, or stand-ins if its files are missing; sized: the form has the run's own size. rows: the environment's
    first observations. tried: the policy that is run, or its miniature, with its form. failed: names of failed checks.
    done: rows whose followers ran ahead of their turn. simulates: environments are built here, not by joining
    simulators. begun: the run resumes. numbers: measurements by name, for JSON.
    """

    config: RunConfig
    depth: Cost = "trial"
    trainer: bool = True
    simulates: bool = True
    begun: bool = False
    free: Callable[[str], int] | None = None
    spec: EnvSpec = None  # type: ignore[assignment]
    form: PolicyForm = None  # type: ignore[assignment]
    policy: Policy = None  # type: ignore[assignment]
    settings: PolicySettings | None = None
    sized: bool = True
    rows: dict[str, NDArray[Any]] = field(default_factory=dict)
    tried: tuple[Policy, PolicyForm] | None = None
    failed: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    numbers: dict[str, Any] = field(default_factory=dict)


#: A detail, "" or None without one; or findings, which get the check's name and part unless they have their own.
Result = str | None | Finding | Iterable[Finding | Examined]


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the list. name, part: as displayed.

    cost: lowest depth that runs it. until: depth from which other rows replace it. run: takes the context; a
    PolyrhythmError is a failed finding. needs: fields of the context that must be known. after: for a plugin's row, the
    row that it follows, or one of

        ""                     before all
        "spec"                 where the environment's spec is read: sets it in the context
        "environment's trial"  at the start of a run: sets spec and rows in the context
        "custom objective"     within the row "objective"
        "policies"             in `policies TYPE --recipe`
        "episode"              in the environment's trial, with a `TriedEpisode` instead of the context
        "doctor"               at the end of `doctor`, with None
    """

    name: str
    part: str
    cost: Cost
    run: Callable[[Any], Result]
    needs: tuple[str, ...] = ()
    until: Cost | None = None
    after: str = ""

    def runs_at(self, depth: Cost) -> bool:
        reached = _COSTS.index(depth)
        return _COSTS.index(self.cost) <= reached and (self.until is None or reached < _COSTS.index(self.until))

    def is_ready(self, context: CheckContext) -> bool:
        return self.after not in context.done and all(getattr(context, name) is not None for name in self.needs)

    def findings(self, context: Any) -> Iterator[Examined]:
        """Run the check and yield its findings."""
        result = self.run(context)
        if result is None or isinstance(result, str):
            result = Finding(self.name, "ok", result or "")
        for found in [result] if isinstance(result, Finding) else result:
            yield found if isinstance(found, Examined) else Examined(self.part, found)


def added(depth: Cost, after: str) -> list[Check]:
    """Rows of plugins that follow this row of the core."""
    return [one for own in load_all("check") for one in own if one.after == after and one.runs_at(depth)]


def with_added(checks: Sequence[Check], depth: Cost) -> list[Check]:
    """Rows of this depth in order, including those of plugins. PluginError: one follows a row that is not there."""
    core, followers, rows = {check.name for check in checks}, dict[str, list[Check]](), list[Check]()
    for own in load_all("check"):
        for one in own:
            followers.setdefault(one.after, []).append(one)

    def follow(name: str) -> None:
        found = followers.pop(name, [])
        rows.extend(found)
        for one in found:
            if one.name not in core:
                follow(one.name)

    follow("")
    for check in checks:
        rows.append(check)
        follow(check.name)
    for after in followers.keys() - {*PLACES}:
        raise PluginError(
            f"check {followers[after][0].name}: after = {after}: there is no such row; name one of "
            f"{', '.join(check.name for check in checks)}, or a place that polyrhythm.checks.Check lists"
        )
    return [row for row in rows if row.runs_at(depth)]


def examine_all(checks: Iterable[Check], context: CheckContext) -> Iterator[Examined]:
    """Run checks in order, even after a failure; yield each finding as soon as it is known. A lack or a fault that
    several checks meet is yielded once."""
    seen: set[tuple[str, str]] = set()
    for check in checks:
        for examined in examine_one(check, context) if check.is_ready(context) else ():
            found = examined.finding
            if found.state == "failed":
                context.failed.add(check.name)
            if found.state in ("failed", "missing"):
                if (found.detail, found.fix) in seen:
                    continue
                seen.add((found.detail, found.fix))
            yield examined


def require_all(checks: Iterable[Check], context: CheckContext) -> None:
    """Run checks in order, before a run: raise the first failure, log notes."""
    for check in checks:
        for _, found in check.findings(context) if check.is_ready(context) else ():
            if found.state == "note":
                log.warning("%s; %s", found.detail, found.fix)


def examine_one(check: Check, context: CheckContext) -> Iterator[Examined]:
    """Run one check and yield its findings.

    Up to the depth `machine`, a lack of this machine (MissingError, StartError) is reported as missing rather than
    failed.
    """
    try:
        yield from check.findings(context)
    except ConfigError as error:
        for problem in error.problems:
            one = type(error)(problem, origin=error.origin)
            yield Examined(check.part, failed_finding(check.name, one, context.depth))
    except PolyrhythmError as error:
        yield Examined(check.part, failed_finding(check.name, error, context.depth))


def failed_finding(name: str, error: PolyrhythmError, depth: Cost = "trial") -> Finding:
    """Finding of an error of the form `setting = value: problem; fix`."""
    problem, _, fix = " ".join(str(error).split()).rpartition("; ")
    missing = depth in ("settings", "machine") and isinstance(error, MissingError | StartError)
    return Finding(name, "missing" if missing else "failed", problem or fix, fix if problem else "", error.codes[0])


def require_added(context: CheckContext, after: str) -> None:
    """`require_all` of the rows of plugins at this place."""
    require_all(added(context.depth, after), context)


def size_of(size: int) -> str:
    """Bytes in GB or MB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


@contextmanager
def errors_of(what: str, call: str = "") -> Iterator[None]:
    """Turn a ValueError of this block into a ConfigError, prefixed with `what` unless its text begins so.

    call: of the user's code; if given, any other exception becomes a ConfigError with the user's source line.
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
        raise ConfigError(f"{what}: {call} {raised(error)}; {remedy(error)}") from error
