"""Training alarms: conditions on a run's metrics; each fires once per occurrence.

A watch takes the lines of `metrics.jsonl` in order, during the run or afterwards.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from polyrhythm.config.schema import RunConfig
from polyrhythm.observe.intervals import is_told, times_so_far
from polyrhythm.observe.metrics import read_lines
from polyrhythm.pipeline.hooks import Alarm, RunHooks, RunPart

log = logging.getLogger(__name__)

Line = Mapping[str, Any]

#: Metric: share of an update's samples whose advantages are all 0; reported if groups are compared.
ZERO_ADVANTAGE = "train/actor/zero_advantage_fraction"
_WAYS = ("greedy", "sampled")
#: Metric: optimizer steps of an update.
STEPS = "train/actor/optimizer_steps"
_ENTROPY, _CLIPPED = "train/actor/entropy_loss", "train/actor/clip_fraction"
_BEHIND = "staleness/updates_mean"
_EXPLAINED = "train/critic/explained_variance"
#: KL from the policy in the ratio's denominator.
_KLS = ("train/actor/proximal_approx_kl", "train/actor/approx_kl")
_MEASURES = _SUCCESS, _RETURN = "env/success_once", "env/return"
_EPISODES = "env/episodes"

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


class _Rate(NamedTuple):
    """An evaluation's success rate with its interval."""

    version: int
    rate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.rate:.2f} [{self.low:.2f}, {self.high:.2f}]"


class _Updates(NamedTuple):
    first: list[Line]
    newest: deque[Line]

    def means(self, name: str) -> tuple[float, float] | None:
        """Means of a metric over both; None if one of them lacks it."""
        both = [_values(name, part) for part in self]
        return (fmean(both[0]), fmean(both[1])) if all(both) else None

    def episodes(self, name: str) -> list[tuple[float, float]]:
        """For both, mean over all episodes and its variance; empty if one of them has fewer than two updates."""
        both = [_over_episodes(name, part) for part in self]
        return [found for found in both if found] if all(both) else []

    def improve(self, errors: float) -> bool:
        """Whether episodes improve by this number of standard errors or are good, or too few have ended to tell."""
        if len(self.newest) < _NEWEST:
            return True
        known = False
        for name in _MEASURES:
            if not (both := self.episodes(name)):
                continue
            known = True
            (first, before), (newest, after) = both
            if (name == _SUCCESS and newest >= _GOOD) or newest - first > errors * sqrt(before + after):
                return True
        return not known


class SetbackWatch:
    """Sentences about collapsed evaluations, updates without a learning signal, and alarms about a run's updates.

    A collapse lasts until an evaluation is no longer below the best earlier one; updates without a signal, until one
    that has it; an alarm, as long as its condition holds and episodes are hardly better than at first. Of the latter
    two the 1st, 10th, 100th, … occurrence is reported.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._best: dict[str, _Rate] = {}
        self._present: set[str] = set()
        self._times: Counter[str] = Counter()
        self._updates = _Updates([], deque(maxlen=_NEWEST))
        self._raised: list[Alarm] = []
        for line in lines:
            self.take(line)

    def take(self, line: Line) -> list[Alarm]:
        """Alarms about one line of metrics: `step` and values by name."""
        step = line["step"]
        said = [Alarm(step, sentence, "collapse") for way in _WAYS if (sentence := self._evaluated(way, line))]
        if (share := line.get(ZERO_ADVANTAGE)) is not None and self._begins("no signal", holds=share >= 1):
            times = self._times["no signal"]
            if is_told(times):
                text = (
                    f"{ZERO_ADVANTAGE} = 1 in update {step + 1:.0f}{times_so_far(times)}: in every group all "
                    "samples have earned the same, so nothing is learned from them; take easier or harder tasks, or a "
                    "reward with more levels, raise groups.size, or have such groups replaced (groups.min_return, "
                    "groups.max_return)"
                )
                said.append(Alarm(step, text, "no signal"))
        alarms = self._alarms(line) if _ENTROPY in line else []
        self._raised += alarms
        return said + alarms

    def overcome(self) -> list[Alarm]:
        """Training alarms that no longer hold, since episodes have clearly improved."""
        return self._raised if self._updates.newest and self._updates.improve(_CLEAR) else []

    def conclusion(self) -> str:
        """Sentence for the end of a run whose episodes have not improved; "" if they have, or it is too short to
        tell."""
        if self._updates.improve(_PROGRESS) or "same" in self._present:  # the alarm about equal returns has the remedy
            return ""
        solved = any(mean for mean, _ in self._updates.episodes(_SUCCESS))
        name = _SUCCESS if solved else _RETURN
        before, after = [mean for mean, _ in self._updates.episodes(name)] or (0.0, 0.0)
        return (
            f"{name} = {after:.3g} in the last {_NEWEST} updates, {before:.3g} in the first: training episodes have "
            "not become better; train longer (training.versions) on more samples (training.mini_batch_samples), or "
            "give a reward that grows on the way to success, or weights from demonstrations (supervised, init_from)"
        )

    def _begins(self, name: str, *, holds: bool) -> bool:
        """Whether this condition begins to hold, which is counted."""
        begins = holds and name not in self._present
        if holds:
            self._present.add(name)
        else:
            self._present.discard(name)
        self._times[name] += begins
        return begins

    def _evaluated(self, way: str, line: Line) -> str:
        values = [line.get(f"evaluation/{way}/{part}") for part in ("rate", "low", "high")]
        if None in values:
            return ""
        newest = _Rate(int(line["step"]), *map(float, values))  # type: ignore[arg-type]
        best = self._best.get(way, newest)
        self._best[way] = newest if newest.low > best.low else best
        if not self._begins(way, holds=newest.high < best.low):
            return ""
        return (
            f"evaluation/{way}/rate = {newest} at version {newest.version}: all of the interval is below that of "
            f"version {best.version}, {best}, so the policy has become worse; lower training.optimizer.lr or "
            "freshness.max_lag, or set algorithm.kl.coef, and evaluate best.pt, which the run has with "
            "evaluation.every"
        )

    def _alarms(self, line: Line) -> list[Alarm]:
        """Alarms about an update."""
        if len(self._updates.first) < _FIRST:
            self._updates.first.append(line)
            return []
        self._updates.newest.append(line)
        learns, raised = self._updates.improve(_CLEAR), []
        for name, alarm in _ALARMS.items():
            text = "" if learns else alarm(self._updates)
            if self._begins(name, holds=bool(text)) and is_told(times := self._times[name]):
                problem, _, fix = text.partition("; ")
                where = f"update {line['step'] + 1:.0f}{times_so_far(times)}"
                told = f"{problem} ({where}), and training episodes are hardly better than at first; {fix}"
                raised.append(Alarm(line["step"], told, name))
        return raised


def setbacks(lines: Iterable[Line]) -> list[Alarm]:
    """Alarms about all lines of a run, and its conclusion; without those that no longer hold."""
    watch = SetbackWatch()
    raised = [alarm for line in lines for alarm in watch.take(line)]
    overcome, conclusion = watch.overcome(), watch.conclusion()
    ended = [Alarm(None, conclusion, "no progress")] if conclusion else []
    kept = [alarm for alarm in raised if alarm not in overcome]
    equal = any(alarm.name == "same" for alarm in kept)  # then updates change nothing, whatever their settings
    return [alarm for alarm in kept if not (equal and alarm.name == "still")] + ended


def _values(name: str, lines: Iterable[Line]) -> list[float]:
    return [float(line[name]) for line in lines if line.get(name) is not None]


def _over_episodes(name: str, lines: Iterable[Line]) -> tuple[float, float] | None:
    """Mean over all episodes of the updates, and the variance of that mean; None with fewer than two updates.

    An update's value is the mean of its episodes, so its variance is taken as inverse to their number.
    """
    found = [(float(line[name]), line.get(_EPISODES) or 1.0) for line in lines if line.get(name) is not None]
    if len(found) < 2:
        return None
    count = sum(weight for _, weight in found)
    mean = sum(value * weight for value, weight in found) / count
    spread = sum(weight * (value - mean) ** 2 for value, weight in found) / (len(found) - 1)
    return mean, spread / count


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
    """Logs the alarms of each line of metrics, and after training the conclusion."""

    def __init__(self) -> None:
        self._watch = SetbackWatch()

    def on_start(self, folder: Path) -> None:
        self._watch = SetbackWatch(read_lines(folder))

    def on_metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        for alarm in self._watch.take({"step": step, **values}):
            log.warning("%s", alarm.text)

    def on_trained(self) -> None:
        if conclusion := self._watch.conclusion():
            log.warning("%s", conclusion)


class AlarmHooks(RunHooks):
    def begin(self, config: RunConfig) -> RunPart:  # noqa: ARG002
        return AlarmPart()

    def alarms(self, lines: Sequence[Line]) -> list[Alarm]:
        return setbacks(lines)


HOOKS = AlarmHooks()
