"""Observers of a run's progress: metrics of every update, lags, and a line in the log."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from polyrhythm.errors import RunDistrusted
from polyrhythm.observe.intervals import episodes_in_words
from polyrhythm.observe.metrics import MetricsWriter, check_names
from polyrhythm.pipeline.evaluation.episodes import mean_metrics
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.idle import IdleMeter, PassMeter
from polyrhythm.pipeline.observers.totals import RunTotals, StationActivity
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records
from polyrhythm.scheduler.samples.groups import SampleLedger

log = logging.getLogger(__name__)

#: Number of last episodes that measure current performance.
_RECENT = 128


@dataclass(slots=True)
class _Episode:
    """An unfinished episode in one row, summed over its segments."""

    task: int
    reward: float = 0.0
    env_steps: int = 0
    metrics: Sequence[tuple[str, float]] = ()


class EpisodeTracker(Observer):
    """Completed training episodes; segments of one episode are joined. Attach it before the observers that read it.

    metrics: updated at an update's report, of the episodes completed since the one before: env/episodes, env/return,
    env/success_once (also by task if there are several), env/episode_len, and env/metrics/NAME for the environment's
    own metrics; empty if none completed. Success is None until an episode has reported it; from then on an episode
    without a report counts as a failure. recent: success and return of the last ones. scored: an episode counts once it
    has its score. earlier: lines of metrics before a resume, which tell the tasks that have reported success.
    """

    hears: ClassVar[tuple[type, ...]] = (
        *(records.SampleFinished, records.SampleFailed, records.StationLost),
        *(records.StartRows, records.CancelRow, records.ScoreCounted, records.ReleasePayloads),
    )

    def __init__(self, tasks: int, *, scored: bool = False, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        self.metrics: dict[str, float | None] = {}
        self.recent: deque[tuple[bool | None, float]] = deque(maxlen=_RECENT)
        self._tasks = tasks
        #: Tasks whose episodes have reported success.
        self._reporting = {
            task for task in range(tasks) if any(line.get(self._rate_of(task)) is not None for line in earlier)
        }
        self._running: dict[tuple[int, int], tuple[str, str, int]] = {}
        self._rows: dict[tuple[str, str, int], _Episode] = {}
        self._ended: list[tuple[_Episode, bool | None]] = []
        self._scored = scored
        self._unscored: dict[int, tuple[str, _Episode]] = {}  # by ticket, with the sample's payload id

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        match event:
            case records.SampleFinished():
                self._finish(event)
            case records.SampleFailed(ticket=ticket, attempt=attempt):
                self._running.pop((ticket, attempt), None)
            case records.StationLost(station=station):
                self._running = {key: place for key, place in self._running.items() if place[0] != station}
        for command in commands:
            match command:
                case records.StartRows(simulator=simulator, slot=slot, grants=grants):
                    for grant in grants:
                        self._start((simulator, slot, grant.row), grant)
                case records.CancelRow(ticket=ticket, attempt=attempt):
                    self._running.pop((ticket, attempt), None)
                case records.ScoreCounted():
                    self._score(command)
                case records.ReleasePayloads(payload_ids=released):  # samples without a score are dropped
                    kept = {ticket: own for ticket, own in self._unscored.items() if own[0] not in released}
                    self._unscored = kept

    def _score(self, counted: records.ScoreCounted) -> None:
        if counted.ticket not in self._unscored:
            return  # it finished before the run was interrupted
        _, episode = self._unscored.pop(counted.ticket)
        episode.reward += counted.score
        self._end(episode, success=counted.success)

    def _start(self, place: tuple[str, str, int], grant: records.Grant) -> None:
        ticket = grant.ticket
        if ticket.evaluation:
            return
        self._running[ticket.number, ticket.attempt] = place
        if not grant.resume:
            self._rows[place] = _Episode(ticket.task)

    def _finish(self, sample: records.SampleFinished) -> None:
        place = self._running.pop((sample.ticket, sample.attempt), None)
        if place is None:
            return
        episode = self._rows[place]
        episode.reward += sample.episode_return
        episode.env_steps += sample.env_steps
        if sample.end is not records.SampleEnd.SEGMENT:
            episode.metrics = sample.metrics
            del self._rows[place]
            if self._scored:
                self._unscored[sample.ticket] = sample.payload_id, episode
            else:
                self._end(episode, success=sample.success)

    def _end(self, episode: _Episode, *, success: bool | None) -> None:
        if success is not None:
            self._reporting.add(episode.task)
        self._ended.append((episode, success))
        self.recent.append((success, episode.reward))

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        ended, self._ended = self._ended, []
        self.metrics = {}
        if not ended:
            return
        self.metrics["env/episodes"] = float(len(ended))
        self.metrics["env/return"] = fmean(episode.reward for episode, _ in ended)
        self.metrics["env/success_once"] = _rate([success for _, success in ended], reported=bool(self._reporting))
        self.metrics["env/episode_len"] = fmean(episode.env_steps for episode, _ in ended)
        for task in range(self._tasks) if self._tasks > 1 else ():
            if own := [success for episode, success in ended if episode.task == task]:
                self.metrics[self._rate_of(task)] = _rate(own, reported=task in self._reporting)
        means = mean_metrics(episode.metrics for episode, _ in ended)
        self.metrics |= {f"env/metrics/{name}": mean for name, mean in means.items()}

    def _rate_of(self, task: int) -> str:
        return f"env/success_once/task_{task}" if self._tasks > 1 else "env/success_once"


def _rate(successes: Sequence[bool | None], *, reported: bool) -> float | None:
    return fmean(map(bool, successes)) if reported else None


def check_metrics(values: Mapping[str, float]) -> None:
    """ValueError: these are not the metrics that a trainer reports for an update."""
    check_names(values)
    if "staleness/lag_mean" not in values:
        raise ValueError("a report without staleness/lag_mean")


class UpdateMetrics(Observer):
    """Writes the metrics of each update: the trainer's and those of the other observers.

    An update that is repeated after the trainer was lost is rewritten. began: start time of the run; now: of training.
    added: give the metrics of plugins; latest: the last line, including `step` and `time_s`.
    """

    hears: ClassVar[tuple[type, ...]] = (records.TrainerJoined,)

    def __init__(
        self,
        writer: MetricsWriter,
        ledger: SampleLedger,
        episodes: EpisodeTracker,
        totals: RunTotals,
        stations: StationActivity,
        meters: tuple[IdleMeter, PassMeter],
        *,
        began: float,
        now: float,
    ) -> None:
        self.latest: dict[str, float | None] = {}
        self.added: Sequence[Callable[[], Mapping[str, float]]] = ()
        self._writer, self._ledger, self._episodes = writer, ledger, episodes
        self._totals, self._stations, (self._idle, self._passes) = totals, stations, meters
        self._began, self._last, self._transitions = began, now, totals.transitions
        self._updates = 0

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.TrainerJoined) and event.updates < self._updates:
            self._writer.rewind(event.updates)

    def on_report(self, now: float, report: Report) -> None:
        self._updates = report.step + 1
        values = {**self._episodes.metrics, **report.values}
        counts = self._ledger.as_dict()
        values |= {f"samples/{state}": float(count) for state, count in counts.items() if isinstance(count, int)}
        values |= {f"samples/dropped/{reason}": float(count) for reason, count in self._ledger.dropped.items()}
        transitions, seconds = self._totals.transitions, max(now - self._last, 1e-9)
        values["throughput/transitions"] = transitions
        values["throughput/transitions_per_s"] = (transitions - self._transitions) / seconds
        values |= self._stations.token_rates(now)
        self._last, self._transitions = now, transitions
        utilisation = self._stations.activity.utilisation()
        values |= self._idle.take(now, report.values.get("time/actor/update", 0.0))
        values |= self._passes.take(now) | self._stations.seconds()
        values |= {f"stations/utilisation/{name}": share for name, share in utilisation.items()}
        values["stations/faults"] = len(self._totals.faults)
        values |= self._of_hosts(utilisation)
        values["transport/dropped_messages"] = self._stations.dropped()
        for added in self.added:
            values |= added()
        self._writer.log(report.step, values, now - self._began)
        self.latest = {"step": report.step, "time_s": now - self._began, **values}

    def _of_hosts(self, utilisation: Mapping[str, float]) -> dict[str, float]:
        hosts = self._totals.hosts
        if hosts is None or not hosts.several:
            return {}
        shares = hosts.mean_of(utilisation)
        faults = dict.fromkeys(shares, 0) | self._totals.faults_by_host()
        return {f"hosts/utilisation/{host}": share for host, share in shares.items()} | {
            f"hosts/faults/{host}": float(count) for host, count in faults.items()
        }


class LagHistogram(Observer):
    """Lag of each trained sample, in versions behind the trainer. `counts`: number of samples by lag."""

    hears: ClassVar[tuple[type, ...]] = (records.UpdateDone, records.TrainerJoined, records.StartUpdate)

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        """counts: those of an earlier part of the run, from `summary`."""
        self.counts: Counter[int] = Counter({int(lag): count for lag, count in (counts or {}).items()})
        self._lent: list[int] = []

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.UpdateDone):
            self.counts.update(self._lent)
        if isinstance(event, records.UpdateDone | records.TrainerJoined):  # a new trainer receives them again
            self._lent = []
        for command in commands:
            if isinstance(command, records.StartUpdate):
                self._lent += [command.version - oldest for oldest in command.oldest]

    def check_bound(self, max_lag: float, bound: str, *, clean: bool) -> None:
        """Raise RunDistrusted if samples were older than `freshness` allows. A mean bound is checked only without
        faults (`clean`)."""
        found = self.summary()
        over = bound == "sample" and found["max"] > math.ceil(max_lag)
        if over or (bound == "mean" and clean and found["mean"] > max_lag + 1e-9):
            raise RunDistrusted(
                f"the promise of freshness.max_lag = {max_lag:g} (bound: {bound}) is broken: samples by lag are "
                f"{found['counts']}, the mean is {found['mean']:.3f}; distrust this run, and report it with its folder"
            )

    def summary(self) -> dict[str, Any]:
        """mean and max over all trained samples (0 before the first); counts: number of samples by lag."""
        total = self.counts.total()
        mean = sum(lag * count for lag, count in self.counts.items()) / total if total else 0.0
        counts = {str(lag): count for lag, count in sorted(self.counts.items())}
        return {"mean": mean, "max": max(self.counts, default=0), "counts": counts}


class ProgressLogger(Observer):
    """Logs the run's progress and recent `episodes`, at most every `every_s` seconds."""

    def __init__(self, updates: int, episodes: EpisodeTracker, now: float, every_s: float = 5.0) -> None:
        self._updates, self._episodes, self._every_s, self._said = updates, episodes, every_s, now

    def on_report(self, now: float, report: Report) -> None:
        if now - self._said < self._every_s and report.step + 1 < self._updates:
            return
        self._said = now
        lag = report.values["staleness/lag_mean"]
        since = report.values.get("staleness/updates_mean", lag)
        recent = self._episodes.recent
        went = episodes_in_words(recent) if recent else "no episode has ended"
        behind = f"lag {lag:.1f}" if since == lag else f"lag {lag:.1f} ({since:.1f} updates)"
        log.info("update %d of %d: %s, %s", report.step + 1, self._updates, went, behind)
