"""Observers that log warnings: failed samples, quarantined tasks and seeds, skipped optimizer steps, generators that
disagree with the trainer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.observe.intervals import is_told, times_so_far
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.policies.base import Policy
from polyrhythm.readable import counted
from polyrhythm.runtime.messages import Report
from polyrhythm.runtime.processes.supervisor import find_log
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)

#: Metric: number of skipped optimizer steps of an update.
_SKIPPED = "train/actor/skipped_steps"
#: Drop reasons that are not failures. A refusal is logged once for its whole group.
_NO_FAILURES = (records.DropReason.CANCELLED, records.DropReason.EPISODE_REFUSED)
#: Maximum number of failure kinds that are counted separately.
_KINDS = 200
#: Number of quarantined seeds that are logged one by one.
_FIRST_SET_ASIDE = 10


class SampleFailureLog(Observer):
    """Warns at the 1st, 10th, 100th, … failure of each kind, and likewise at refused episodes.

    A kind is culprit and problem, or call and error type. logs: folder of the stations' logs with the tracebacks; None
    if stations log to this process. types: the setting that names a culprit (`specs.finite`), by culprit. tasks: their
    names. counts: failures by kind. last: description of the last failure.
    """

    hears: ClassVar[tuple[type, ...]] = (records.SampleFailed, records.ScoringFailed, records.EpisodeSetAside)

    def __init__(self, logs: Path | None, types: Mapping[str, str] | None = None, tasks: Sequence[str] = ()) -> None:
        self._logs, self._types, self._tasks = logs, types or {}, tasks
        self._skipped = self._set_aside = self._refused = 0
        self.counts: Counter[str] = Counter()
        self.last = "it ran out of attempts"

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.SampleFailed) and event.reason not in _NO_FAILURES:
            self._count(event.what, event.detail, event.simulator, event.incarnation)
        elif isinstance(event, records.ScoringFailed):
            self._count(event.error, event.detail, event.scorer, event.incarnation)
        for command in commands:
            if isinstance(command, records.EpisodeSetAside):
                if isinstance(event, records.SampleFailed) and event.reason is records.DropReason.EPISODE_REFUSED:
                    self._refused += 1
                    if is_told(self._refused):
                        log.warning("an episode is set aside%s: %s", times_so_far(self._refused), event.what)
                    continue
                self._set_aside += 1
                if self._set_aside <= _FIRST_SET_ASIDE or is_told(self._set_aside):
                    name = self._tasks[command.task] if self._tasks else command.task
                    said = "task %s, seed %d is set aside after %s%s (rollout.quarantine_after), the last one: %s"
                    times = times_so_far(self._set_aside) if self._set_aside > _FIRST_SET_ASIDE else ""
                    log.warning(said, name, command.seed, counted(command.failures, "failure"), times, command.reason)

    def _count(self, said: str, detail: str, station: str, incarnation: int) -> None:
        kind = ": ".join(said.split(": ")[:2])
        if kind not in self.counts and len(self.counts) >= _KINDS:
            kind = "others"
        self.counts[kind] += 1
        culprit, _, what = said.partition(": ")
        known = self._types.get(culprit)
        self.last = f"{f'{known}: {what}' if known else said}{f' ({detail})' if detail else ''}"
        if is_told(self.counts[kind]):
            file = find_log(self._logs, station, incarnation) if self._logs and known is None else None
            where = f"; the traceback: {file}" if file else ""
            log.warning("%s: a sample failed%s: %s%s", station, times_so_far(self.counts[kind]), self.last, where)

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        if skipped := int(report.values.get(_SKIPPED, 0)):
            self._skipped += 1
            if is_told(self._skipped):
                why = f"; why: {find_log(self._logs, report.station, report.incarnation)}" if self._logs else ""
                said = "update %d: %d optimizer steps were skipped, their gradient is not finite%s%s"
                log.warning(said, report.step + 1, skipped, times_so_far(self._skipped), why)


#: Minimum tolerance of log-prob differences: batches of different sizes round differently.
_ROUNDING = 0.01
_METRIC = "train/actor/mismatch_kl"


def mismatch_limit(algorithm: AlgorithmSettings, policy: Policy) -> float:
    """Approximate KL divergence, d²/2, of log-probs that differ by d.

    d: the policy's tolerance times the number of entries that one log-prob sums, at least 0.01.
    """
    summed = {"token": 1, "action": policy.action_dim, "chunk": policy.chunk * policy.action_dim}
    return max(_ROUNDING, policy.tolerance * summed[algorithm.logprob_level]) ** 2 / 2


class MismatchWarning(Observer):
    """Warns once, at the first update whose mismatch_kl exceeds the limit.

    The trial before the start compares two rows on this machine's CPU. Only a run reveals a policy that keeps state
    between calls, effects of another device or precision, or weights that did not arrive.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._warned = limit, False

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        found = report.values.get(_METRIC, 0.0)
        if self._warned or not found > self._limit:
            return
        self._warned = True
        log.warning(
            "%s = %.3g in update %d, the limit by the policy's tolerance is %.3g: generators and trainer compute other "
            "log-probs from the same weights and observations. Likely causes: act and evaluate are of different "
            "distributions, the policy keeps state between calls, or devices or precisions differ (then raise the "
            "policy's tolerance, or set algorithm.mismatch_cap); try polyrhythm check",
            _METRIC,
            found,
            report.step + 1,
            self._limit,
        )
