"""Training alarms: conditions on a run's metrics; each fires once per occurrence.

A watch takes the lines of `metrics.jsonl` in order, during the run or afterwards.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

from polyrhythm.config.schema import RunConfig
from polyrhythm.observe.intervals import is_told, times_so_far
from polyrhythm.observe.metrics import read_lines
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.hooks import RunHooks, RunPart
from polyrhythm.pipeline.observers.base import Observer

log = logging.getLogger(__name__)

#: Metric: share of an update's samples whose advantages are all 0; reported if groups are compared.
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
    """Whether the newest interval is entirely below that of the best."""
    return newest.high < best.low


def better(one: Rate, other: Rate) -> Rate:
    """The one with the higher lower bound."""
    return other if other.low > one.low else one


class SetbackWatch:
    """Sentences about collapsed evaluations, and about updates without a learning signal.

    A collapse lasts until an evaluation is no longer below the best earlier one; updates without a signal, until one
    that has it. Of the latter the 1st, 10th, 100th, … occurrence is reported.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._best: dict[str, Rate] = {}
        self._collapsed: set[str] = set()
        self._taught, self._stretches = True, 0
        self._alarms, self._raised = TrainingAlarms(), list[str]()
        for line in lines:
            self.take(line)

    def take(self, line: Mapping[str, Any]) -> list[str]:
        """Sentences about one line of metrics: `step` and values by name."""
        said = [self._evaluated(way, line) for way in _WAYS] + [self._updated(line)]
        alarms = self._alarms.take(line)
        self._raised += alarms
        return [sentence for sentence in said if sentence] + alarms

    def overcome(self) -> list[str]:
        """Training alarms that no longer hold, since episodes have clearly improved."""
        return self._raised if self._alarms.overcome else []

    def conclusion(self) -> str:
        """Sentence about the whole run at its end, or ""."""
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
    """Sentences about all lines of a run, and its conclusion; without alarms that no longer hold."""
    watch = SetbackWatch()
    said = [sentence for line in lines for sentence in watch.take(line)]
    overcome = watch.overcome()
    return [sentence for sentence in said if sentence not in overcome] + [watch.conclusion()] * bool(watch.conclusion())


Line = Mapping[str, Any]

#: Metric: optimizer steps of an update.
STEPS = "train/actor/optimizer_steps"
_ENTROPY, _CLIPPED = "train/actor/entropy_loss", "train/actor/clip_fraction"
_BEHIND = "staleness/updates_mean"
_EXPLAINED = "train/critic/explained_variance"
#: KL from the policy in the ratio's denominator.
_KLS = ("train/actor/proximal_approx_kl", "train/actor/approx_kl")
_MEASURES = _SUCCESS, _RETURN = "env/success_once", "env/return"

#: Numbers of first and of newest updates that are compared.
_FIRST, _NEWEST = 5, 10
#: KL in nats below which an update of several steps changes nothing.
_STILL_KL = 1e-4
#: Remaining share of the first entropy at a collapse, and loss in nats at the collapse of a density.
_ENTROPY_LEFT, _NATS_LOST = 0.05, 2.0
#: Success rate at which a policy counts as good, regardless of its start.
_GOOD = 0.9
#: Standard errors of a change that counts as progress, and of one that clearly shows learning.
_PROGRESS, _CLEAR = 2.0, 4.0
#: Lag in updates, and share of clipped entries, from which samples are too old for the loss.
_OLD, _MOSTLY_CLIPPED = 1.0, 0.5
#: Explained variance below which values are worse than noise makes them.
_MISLED = -0.05


class _Updates(NamedTuple):
    first: Sequence[Line]
    newest: Sequence[Line]

    def means(self, name: str) -> tuple[float, float] | None:
        """Means of a metric over both; None if one of them lacks it."""
        both = [_values(name, part) for part in self]
        return (fmean(both[0]), fmean(both[1])) if all(both) else None


class TrainingAlarms:
    """Alarms about a run's updates, from their metrics in order.

    An alarm lasts as long as its condition holds and episodes are hardly better than at first. The 1st, 10th, 100th, …
    occurrence is reported.
    """

    def __init__(self) -> None:
        self._first: list[Line] = []
        self._newest: deque[Line] = deque(maxlen=_NEWEST)
        self._present: set[str] = set()
        self._times: dict[str, int] = {}

    def take(self, line: Line) -> list[str]:
        """Sentences about an update; empty for other lines."""
        if _ENTROPY not in line:
            return []
        if len(self._first) < _FIRST:
            self._first.append(line)
            return []
        self._newest.append(line)
        updates = _Updates(self._first, self._newest)
        found = (
            {}
            if self._learns(updates, _CLEAR)
            else {name: text for name, alarm in _ALARMS.items() if (text := alarm(updates))}
        )
        new = [name for name in found if name not in self._present]
        self._present = set(found)
        return [sentence for name in new if (sentence := self._sentence(name, found[name], int(line["step"])))]

    @property
    def overcome(self) -> bool:
        """Whether episodes have clearly improved, so that earlier alarms no longer hold."""
        return bool(self._newest) and self._learns(_Updates(self._first, self._newest), _CLEAR)

    def conclusion(self) -> str:
        """Sentence for the end of a run whose episodes have not improved; "" if they have, or it is too short to
        tell."""
        updates = _Updates(self._first, self._newest)
        if self._learns(updates, _PROGRESS) or "same" in self._present:  # the alarm about equal returns has the remedy
            return ""
        name = _SUCCESS if any(updates.means(_SUCCESS) or ()) else _RETURN
        before, after = updates.means(name) or (0.0, 0.0)
        return (
            f"{name} = {after:.3g} in the last {_NEWEST} updates, {before:.3g} in the first: training episodes have "
            "not become better; train longer (training.versions) on more samples (training.mini_batch_samples), or "
            "give a reward that grows on the way to success, or weights from demonstrations (supervised, init_from)"
        )

    def _learns(self, updates: _Updates, errors: float) -> bool:
        """Whether episodes improve by this number of standard errors, or too few have ended to tell."""
        if len(self._newest) < _NEWEST:
            return True
        judged = [_is_better(updates, name, errors) for name in _MEASURES]
        return any(judged) or all(better is None for better in judged)

    def _sentence(self, name: str, text: str, step: int) -> str:
        self._times[name] = times = self._times.get(name, 0) + 1
        if not is_told(times):
            return ""
        problem, _, fix = text.partition("; ")
        where = f"update {step}{times_so_far(times)}"
        return f"{problem} ({where}), and training episodes are hardly better than at first; {fix}"


def _values(name: str, lines: Sequence[Line]) -> list[float]:
    return [float(line[name]) for line in lines if line.get(name) is not None]


def _is_better(updates: _Updates, name: str, errors: float) -> bool | None:
    """Whether the newest episodes are better than the first ones, or good; None if too few have ended to tell."""
    first, newest = (_values(name, part) for part in updates)
    if min(len(first), len(newest)) < 2:
        return None
    if name == _SUCCESS and fmean(newest) >= _GOOD:
        return True
    error = sqrt(variance(first) / len(first) + variance(newest) / len(newest))
    return fmean(newest) - fmean(first) > errors * error


def _one_step(updates: _Updates) -> str:
    steps = _values(STEPS, updates.newest)
    if not steps or max(steps) > 1:
        return ""
    return (
        f"{STEPS} = 1: a whole update is one optimizer step; raise training.epochs (4 to 10), and cut updates by "
        "training.minibatch_steps (64 or 256)"
    )


def _unchanged_policy(updates: _Updates) -> str:
    name = next((name for name in _KLS if _values(name, updates.newest)), "")
    kls, clipped = _values(name, updates.newest), _values(_CLIPPED, updates.newest)
    steps = _values(STEPS, updates.newest)
    if not kls or max(kls) > _STILL_KL or any(clipped) or not steps or min(steps) <= 1:
        return ""
    return (
        f"{name} = {max(kls):.1g} at most and {_CLIPPED} = 0: updates hardly change the policy; raise "
        "training.optimizer.lr or training.epochs"
    )


def _entropy_collapse(updates: _Updates) -> str:
    first, newest = updates.means(_ENTROPY) or (0.0, 0.0)
    left = first > 0 and 0 <= newest < _ENTROPY_LEFT * first
    if not left and first - newest < _NATS_LOST:
        return ""
    return (
        f"{_ENTROPY} = {newest:.3g}, at first {first:.3g}: the policy hardly tries anything else any more; set "
        "algorithm.entropy_coef to 0.01, or lower training.optimizer.lr"
    )


def _poor_values(updates: _Updates) -> str:
    _, newest = updates.means(_EXPLAINED) or (0.0, 0.0)
    if newest >= _MISLED:
        return ""
    return (
        f"{_EXPLAINED} = {newest:.2g}: the values predict returns worse than a constant does; raise "
        "training.optimizer.value_lr or training.mini_batch_samples, or lower algorithm.gamma"
    )


def _old_samples(updates: _Updates) -> str:
    behind, clipped = _values(_BEHIND, updates.newest), _values(_CLIPPED, updates.newest)
    if not behind or not clipped or fmean(behind) < _OLD or fmean(clipped) < _MOSTLY_CLIPPED:
        return ""
    return (
        f"{_BEHIND} = {fmean(behind):.1f} and {_CLIPPED} = {fmean(clipped):.2f}: samples are from weights before these "
        "updates, and the loss clips most of what they say; lower freshness.sync_interval or freshness.max_lag, or "
        "set algorithm.loss to decoupled_ppo"
    )


def _equal_returns(updates: _Updates) -> str:
    returns = [x for part in updates for x in _values(_RETURN, part)]
    if not returns or max(returns) - min(returns) > 1e-6 * max(map(abs, returns)):
        return ""
    return (
        f"{_RETURN} = {returns[-1]:.4g} in every update: no episode earns anything else, so there is nothing to learn "
        "from; give a reward that grows on the way to success, an easier start, or a first policy from demonstrations "
        "(supervised, init_from)"
    )


_ALARMS: Mapping[str, Callable[[_Updates], str]] = {
    "one step": _one_step,
    "still": _unchanged_policy,
    "entropy": _entropy_collapse,
    "values": _poor_values,
    "old": _old_samples,
    "same": _equal_returns,
}


class AlarmPart(RunPart):
    """Logs the alarms of each line of metrics."""

    _watch: SetbackWatch | None = None

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:
        """None; lines of metrics count from now on, as a resumed run has none of updates that it repeats."""
        folder = pipeline.context.folder
        assert folder is not None, "a run that trains has a folder"
        self._watch = SetbackWatch(read_lines(folder))
        return ()

    def on_metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        for sentence in self._watch.take({"step": step, **values}) if self._watch is not None else ():
            log.warning("%s", sentence)


class AlarmHooks(RunHooks):
    def begin(self, config: RunConfig) -> RunPart:  # noqa: ARG002
        return AlarmPart()

    def warnings(self, lines: Sequence[Line]) -> list[str]:
        return setbacks(lines)

    def finish(self, folder: Path) -> None:
        if conclusion := SetbackWatch(read_lines(folder)).conclusion():
            log.warning("%s", conclusion)


HOOKS = AlarmHooks()
