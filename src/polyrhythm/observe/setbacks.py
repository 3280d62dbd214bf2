"""Training alarms: conditions on a run's metrics; each fires once per occurrence. `alarms` has those that compare
updates.

A watch takes the lines of `metrics.jsonl` in their order, while the run writes them or afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from polyrhythm.observe.alarms import TrainingAlarms
from polyrhythm.observe.intervals import is_told, times_so_far

#: Share of an update's samples whose advantages are all 0, where groups are compared.
ZERO_ADVANTAGE = "train/actor/zero_advantage_fraction"
_WAYS = ("greedy", "sampled")


class Rate(NamedTuple):
    """An evaluation's success rate with its interval."""

    version: int
    rate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.rate:.2f} [{self.low:.2f}, {self.high:.2f}]"


def has_collapsed(best: Rate, newest: Rate) -> bool:
    """Whether the newest interval lies wholly below that of the best."""
    return newest.high < best.low


def better(one: Rate, other: Rate) -> Rate:
    """The one that is better for certain: of the higher lower bound."""
    return other if other.low > one.low else one


class SetbackWatch:
    """Sentences about collapsed evaluations, and about updates that teach nothing.

    A collapse lasts until an evaluation is not below the best earlier one any more; updates that teach nothing until
    one that does. Of the latter the first time is told, the tenth, and so on.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """lines: those that the run has already."""
        self._best: dict[str, Rate] = {}
        self._collapsed: set[str] = set()
        self._taught, self._stretches = True, 0
        self._alarms, self._raised = TrainingAlarms(), list[str]()
        for line in lines:
            self.take(line)

    def take(self, line: Mapping[str, Any]) -> list[str]:
        """What to say about one line of metrics: `step` and values by name."""
        said = [self._evaluated(way, line) for way in _WAYS] + [self._updated(line)]
        alarms = self._alarms.take(line)
        self._raised += alarms
        return [sentence for sentence in said if sentence] + alarms

    def overcome(self) -> list[str]:
        """The training alarms so far that no longer hold, since episodes have clearly become better."""
        return self._raised if self._alarms.overcome else []

    def conclusion(self) -> str:
        """What to say of the whole run at its end, "" for nothing."""
        return self._alarms.conclusion()

    def _evaluated(self, way: str, line: Mapping[str, Any]) -> str:
        values = [line.get(f"evaluation/{way}/{part}") for part in ("rate", "low", "high")]
        if None in values:
            return ""
        newest = Rate(int(line["step"]), *map(float, values))  # type: ignore[arg-type]
        best = self._best.get(way, newest)
        self._best[way] = better(best, newest)
        if not has_collapsed(best, newest):
            self._collapsed.discard(way)
            return ""
        if way in self._collapsed:
            return ""
        self._collapsed.add(way)
        return (
            f"evaluation/{way}/rate = {newest} at version {newest.version}: all of the interval is below that of "
            f"version {best.version}, {best}, so the policy has become worse; lower training.optimizer.lr or "
            "freshness.max_lag, or set algorithm.kl.coef, and evaluate best.pt, which the run has with "
            "evaluation.every"
        )

    def _updated(self, line: Mapping[str, Any]) -> str:
        share = line.get(ZERO_ADVANTAGE)
        if share is None:
            return ""
        before, self._taught = self._taught, share < 1
        if self._taught or not before:
            return ""
        self._stretches += 1
        if not is_told(self._stretches):
            return ""
        times = times_so_far(self._stretches)
        return (
            f"{ZERO_ADVANTAGE} = 1 in update {line['step']}{times}: in every group all samples have earned the same, "
            "so nothing is learned from them; take easier or harder tasks, or a reward with more levels, raise "
            "groups.size, or have such groups replaced (groups.min_return, groups.max_return)"
        )


def setbacks(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The sentences about all lines of a run, and its conclusion; without alarms that the run has overcome."""
    watch = SetbackWatch()
    said = [sentence for line in lines for sentence in watch.take(line)]
    overcome = watch.overcome()
    return [sentence for sentence in said if sentence not in overcome] + [watch.conclusion()] * bool(watch.conclusion())
