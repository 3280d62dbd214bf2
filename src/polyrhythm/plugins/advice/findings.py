"""What advice is made of: findings, each with the changes to make in order. Text and JSON are made from these alone.

{"kind": "throughput", "name": "in-turn", "limits": "", "measured": "rollout and training wait ...",
 "page": "docs/tuning.md#in-turn",
 "changes": [{"setting": "freshness.max_lag", "now": 0.0, "to": 1, "cost": "samples one version old",
              "effect": {"basis": "at most", "factor": 1.8}}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

#: Page of the table that has a row for each finding's name.
PAGE = "docs/tuning.md"
#: Factor from which a change of the throughput is worth naming.
_WORTH = 1.05
#: Largest factor of a bound: beyond, a share of idle time of nearly 1 says nothing.
_MOST = 100.0


@dataclass(frozen=True, slots=True)
class Effect:
    """Factor on transitions per second.

    basis: predicted (simulated from the run's own times), at most (what the measured waiting leaves, or simulated with
    what was not measured, as more work at once), or unknown, where the change acts on what is learned or its cost was
    not measured; then factor is None.
    """

    basis: Literal["predicted", "at most", "unknown"] = "unknown"
    factor: float | None = None

    def __str__(self) -> str:
        if self.factor is None:
            return "not predicted"
        return f"{self.basis} ×{self.factor:.2f}"


UNKNOWN = Effect()


def at_most(*factors: float) -> Effect:
    """The smallest of these bounds."""
    return Effect("at most", min(_MOST, max(1.0, min(factors))))


def without(share: float) -> float:
    """Factor that is gained if a share of the time goes."""
    return 1.0 / max(1.0 - share, 1.0 / _MOST)


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with its present and its proposed value. cost: what it takes besides; unstable: it makes samples older,
    so it waits until training is stable."""

    setting: str
    now: Any
    to: Any
    cost: str = ""
    effect: Effect = UNKNOWN
    unstable: bool = False

    @property
    def override(self) -> str:
        """The setting as an argument of `polyrhythm train`."""
        return f"{self.setting}={text_of(self.to)}"

    def __str__(self) -> str:
        cost = f"; cost: {self.cost}" if self.cost else ""
        return f"{self.override} (now {text_of(self.now)}): transitions/s {self.effect}{cost}"

    def as_json(self) -> dict[str, Any]:
        effect = {"basis": self.effect.basis, "factor": self.effect.factor}
        return {"setting": self.setting, "now": self.now, "to": self.to, "cost": self.cost, "effect": effect}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was measured, with what to change, the first first.

    name: row of the table; measured: a clause with its numbers; limits: the kind of station that limits the run, or "";
    remedy: what helps besides settings; note: why nothing is predicted; alarm: text of the alarm that it explains.
    """

    kind: Literal["stability", "throughput"]
    name: str
    measured: str
    changes: Sequence[Change] = ()
    limits: str = ""
    remedy: str = ""
    note: str = ""
    alarm: str = ""

    @property
    def page(self) -> str:
        return f"{PAGE}#{self.name}"

    def as_json(self) -> dict[str, Any]:
        own = {key: value for key, value in asdict(self).items() if key != "changes"}
        return {**own, "page": self.page, "changes": [change.as_json() for change in self.changes]}


def worthwhile(finding: Finding) -> Finding:
    """A finding on the throughput without changes that are known to gain nothing; one on stability as it is."""
    if finding.kind == "stability":
        return finding
    kept = (one for one in finding.changes if one.effect.factor is None or one.effect.factor >= _WORTH)
    return replace(finding, changes=tuple(kept))


def in_words(findings: Sequence[Finding]) -> list[str]:
    """Lines of text: numbered findings, each followed by its changes in order."""
    lines = []
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.kind}: {finding.measured} [{finding.page}]")
        lines += [f"   {'then ' * bool(place)}{change}" for place, change in enumerate(finding.changes)]
        lines += [f"   {words}" for words in (finding.remedy, finding.note) if words]
    return lines


def from_json(data: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Findings of a summary."""
    found = []
    for one in data:
        own = {key: value for key, value in one.items() if key not in ("page", "changes")}
        changes = (Change(**{**change, "effect": Effect(**change["effect"])}) for change in one["changes"])
        found.append(Finding(**own, changes=tuple(changes)))
    return found


def in_short(finding: Finding) -> str:
    """The finding and its first change, in one line."""
    first = finding.changes[0] if finding.changes else None
    step = f"{first.override} (transitions/s {first.effect})" if first else finding.remedy
    return f"{finding.kind}: {finding.measured}: {step}" if step else f"{finding.kind}: {finding.measured}"


def text_of(value: Any) -> str:
    """A setting's value as it is written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
