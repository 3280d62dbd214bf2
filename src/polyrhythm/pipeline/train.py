"""A run from its configuration to its summary.

    demonstrations → supervised warm start → evaluation → reinforcement learning → the same evaluation

Everything lands in the run's folder: config.yaml, progress.json, metrics.jsonl, tensorboard/, trace.json, logs/,
demonstrations.npz, checkpoints/, policy.pt, evaluations.json and best.pt (of evaluation during training),
settings_changes.jsonl (of a run that was resumed with others), ledger.json and, last, summary.json and report.html.
Each phase commits its result, so a run that was cut short goes on where it stood, and a finished one can be extended.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunDistrusted, RunHalted
from polyrhythm.files import atomic_write
from polyrhythm.observe import MetricsWriter, TraceWriter
from polyrhythm.observe.report import write_report
from polyrhythm.observe.run_folder import lock_run_folder
from polyrhythm.pipeline.build import Pipeline, build_pipeline, run_seats
from polyrhythm.pipeline.callbacks import Callbacks, StopTraining, UpdatesHeard
from polyrhythm.pipeline.evaluation.background import BackgroundEvaluator
from polyrhythm.pipeline.evaluation.manager import EvaluationManager
from polyrhythm.pipeline.observers.idle import IdleMeter, PassMeter
from polyrhythm.pipeline.observers.live import LiveDisplay
from polyrhythm.pipeline.observers.metrics import EpisodeTracker, LagHistogram, ProgressLogger, UpdateMetrics
from polyrhythm.pipeline.observers.mismatch import MismatchWarning, mismatch_limit
from polyrhythm.pipeline.observers.timeline import TraceObserver
from polyrhythm.pipeline.observers.totals import StationActivity
from polyrhythm.pipeline.persistence.checkpoints import (
    POLICY_FILE,
    STATES,
    SavedRun,
    save_policy,
)
from polyrhythm.pipeline.persistence.phases import SUMMARY_FILE, PhaseJournal
from polyrhythm.pipeline.persistence.resume import refuse_misplaced, take_up
from polyrhythm.pipeline.persistence.saver import RunCheckpointer
from polyrhythm.pipeline.run_loop import Interrupted, OrderlyHalt, RunLoop
from polyrhythm.pipeline.seats import describe_seats
from polyrhythm.pipeline.signals import Interrupts
from polyrhythm.pipeline.validation.check import ValidatedRun
from polyrhythm.pipeline.warm_start.initial_policy import prepare_initial_policy
from polyrhythm.scheduler.samples.ledger import SampleLedger
from polyrhythm.specs import Task

log = logging.getLogger(__name__)

#: Share of the samples whose loss by faults is worth a warning at the end.
_MANY_DROPPED = 0.05


def train(
    checked: ValidatedRun, folder: Path, live: LiveDisplay | None = None, callbacks: Callbacks | None = None
) -> dict[str, Any]:
    """Run all phases that the configuration asks for and that the folder does not have; the content of summary.json.

    checked: what `pipeline.validation.check` gave; nothing is left to refuse, so the folder may be made before. Its
    policy is trained in place. live: shows a person how it goes. Raises RunHalted when the run cannot go on,
    KeyboardInterrupt when it was told to stop, and what a callback raised.
    """
    refuse_misplaced(folder)
    callbacks = callbacks or Callbacks()
    with lock_run_folder(folder), Interrupts().handle_signals() as interrupts:
        progress = PhaseJournal(folder, live.phase if live else None)
        saved = take_up(checked, folder, progress)
        with MetricsWriter(folder) as metrics, TraceWriter(_new_path(folder / "trace.json")) as trace:
            finished = True
            try:
                _phases(checked, folder, saved, (progress, interrupts), (metrics, trace), live, callbacks)
            except Interrupted:
                finished = False
            except RunHalted:
                _tell_the_rest(callbacks)
                raise
        if not finished:
            if callbacks.ended is None:
                _tell_the_rest(callbacks)
                raise KeyboardInterrupt
            raise callbacks.ended
        summary = _summarise(checked.config, folder, progress)
        _report(folder)
    if callbacks.deliver() and not isinstance(callbacks.ended, StopTraining):
        assert callbacks.ended is not None
        raise callbacks.ended
    return summary


def _tell_the_rest(callbacks: Callbacks) -> None:
    """Updates that ended while the run wound down. What a callback raises here must not hide what ended the run."""
    if callbacks.ended is None and callbacks.deliver() and not isinstance(callbacks.ended, StopTraining):
        log.error("a callback failed while the run ended", exc_info=callbacks.ended)


def _phases(
    checked: ValidatedRun,
    folder: Path,
    saved: SavedRun | None,
    course: tuple[PhaseJournal, Interrupts],
    writers: tuple[MetricsWriter, TraceWriter],
    live: LiveDisplay | None,
    callbacks: Callbacks,
) -> None:
    """The phases that are asked for and not done."""
    config, spec, policy = checked
    (progress, interrupts), (metrics, trace) = course, writers
    version = saved.version if saved else prepare_initial_policy(checked, folder, progress, metrics)
    training = config.training.versions > 0 and progress.result("rl") is None
    initial = folder / POLICY_FILE if training else policy
    pipeline = build_pipeline(config, initial, folder, saved=saved, version=version, trainer=training, start=False)
    try:
        if live:
            live.watch(pipeline)
        pipeline.loop.add_observers(MismatchWarning(mismatch_limit(config.algorithm, policy)))
        run = _Run(config, folder, pipeline, progress, metrics, spec.tasks, live, callbacks)
        pipeline.loop.stop = lambda: interrupts.requested() or callbacks.deliver()
        if saved is None:
            run.start()
        if saved is None and progress.result("rl") is None:  # else the weights before training are not there any more
            with interrupts.defer_first():
                run.evaluations.evaluate(pipeline, "before")
        if training:
            run.learn(trace, saved, interrupts)
        if config.training.versions:
            with interrupts.defer_first():
                run.evaluations.evaluate(pipeline, "after")
            progress.commit("best", run.evaluations.best())
    finally:
        pipeline.close()


class _TrainingObservers(NamedTuple):
    """Those who watch training and are asked afterwards."""

    episodes: EpisodeTracker
    lags: LagHistogram
    saver: RunCheckpointer
    timeline: TraceObserver
    beside: BackgroundEvaluator


class _Run:
    """The phases that need stations."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        pipeline: Pipeline,
        progress: PhaseJournal,
        metrics: MetricsWriter,
        tasks: Sequence[Task],
        live: LiveDisplay | None,
        callbacks: Callbacks,
    ) -> None:
        self._config, self._folder, self._pipeline, self._callbacks = config, folder, pipeline, callbacks
        self._progress, self._metrics, self._tasks, self._live = progress, metrics, tasks, live
        self.evaluations = EvaluationManager(config, folder, progress, metrics, tasks, callbacks)

    def start(self) -> None:
        """Start the stations."""
        with self._progress.phase("start"):
            self._pipeline.loop.start()

    def learn(self, trace: TraceWriter, saved: SavedRun | None, interrupts: Interrupts) -> None:
        """Reinforcement learning, up to the last version. A saved run is started here, under the observers' eyes.

        What ends it between two events, the user or the conductor, leaves a run that is saved and can be resumed.
        """
        config, pipeline, progress = self._config, self._pipeline, self._progress
        loop, launcher, before = pipeline.loop, pipeline.launcher, pipeline.loop.observers
        episodes, lags, saver, timeline, beside = self._observe(trace, saved)
        if saved is None:
            saver.save()  # from here on policy.pt changes, so a run that is cut short goes on from a saved one
        else:
            self.start()
            saver.start(loop.clock())
        try:
            with interrupts.defer_first(), progress.phase("rl"):
                if self._live is not None:
                    self._live.train(self._updates, episodes, saver.account, lags, self.evaluations.after_s())
                loop.train_until(config.training.versions)
            saver.save()  # a run that is extended goes on from here
            totals = saver.totals()
            with interrupts.defer_first():
                self.evaluations.finish(beside)
        except (Interrupted, OrderlyHalt):
            ended = wind_down(loop, config.shutdown_s)
            saver.save()
            log.info(ended)
            raise
        finally:
            timeline.finish(loop.clock())
            beside.close()
            saver.wait()
            self._save_published()
        loop.remove_observers(*(observer for observer in loop.observers if observer not in before))
        lags.check_bound(config.freshness.max_lag, config.freshness.bound, clean=not saver.account.faults)
        ledger = self._balanced()
        _warn_of_dropped(ledger)
        told = {"lag": lags.summary(), "ledger": ledger.as_dict(), **loop.conductor.summary()}
        told |= {"failed_samples": dict(pipeline.failures.counts), "dropped_messages": launcher.dropped()}
        progress.commit("rl", {**totals, **told})

    def _observe(self, trace: TraceWriter, saved: SavedRun | None) -> _TrainingObservers:
        """Have training watched: by those who are asked afterwards, and by others. Each is told before who reads it."""
        config, pipeline, loop = self._config, self._pipeline, self._pipeline.loop
        began, launcher = loop.clock(), pipeline.launcher
        lags, episodes = LagHistogram(saved.counts["lags"] if saved else None), EpisodeTracker(len(self._tasks))
        saver = RunCheckpointer(
            *(self._folder / STATES, pipeline, config.checkpoint, lags, saved, began),
            deadline_s=config.supervision.update_s,
        )
        idle, passes = IdleMeter(loop.conductor, began), PassMeter(loop.conductor.settings.buckets)
        stations, timeline = StationActivity(launcher), TraceObserver(trace, launcher, began)
        sources = (loop.conductor.ledger, episodes, saver.account, stations, (idle, passes))
        metrics = UpdateMetrics(self._metrics, *sources, began=self._progress.began, now=began)
        heard = UpdatesHeard(metrics, self._callbacks)
        beside = self.evaluations.beside(pipeline, saved.version if saved else None)
        loop.add_observers(episodes, idle, passes, metrics, heard, lags, stations, timeline, beside, saver)
        if self._live is None:
            loop.add_observers(ProgressLogger(self._updates, episodes, began))
        return _TrainingObservers(episodes, lags, saver, timeline, beside)

    @property
    def _updates(self) -> int:
        """Updates of the whole run."""
        return self._config.training.versions * self._config.freshness.sync_interval

    def _balanced(self) -> SampleLedger:
        """The ledger. RunDistrusted: a sample vanished or was counted twice, or a block was never given back."""
        conductor = self._pipeline.loop.conductor
        ledger = conductor.ledger
        # A trainer that came back from an older state may have left samples that nobody needs any more.
        kept = {sample.payload_id for sample in conductor.rollout.samples.values() if sample.payload_id}
        leaked = sorted(set(self._pipeline.launcher.pool.finished()) - kept)
        if ledger.imbalance or leaked:
            raise RunDistrusted(
                f"the ledger does not balance: {ledger.as_dict()}, blocks never released: {leaked}; distrust this run, "
                "and report it with its folder"
            )
        return ledger

    def _save_published(self) -> None:
        """The newest published weights: whole even where an update was cut short or went wrong."""
        version, weights = self._pipeline.weights.read()
        save_policy(weights, self._config, self._folder / POLICY_FILE, version, self._pipeline.spec)


def _warn_of_dropped(ledger: SampleLedger) -> None:
    """A run that has come to its end may all the same have lost what matters: many samples, and not at random."""
    if ledger.dropped_by_faults > _MANY_DROPPED * ledger.started:
        log.warning(
            "%d of %d samples were dropped because they failed (%s), and the policy was trained on the others alone; "
            "to look for the reason: polyrhythm check RECIPE",
            *(ledger.dropped_by_faults, ledger.started),
            "; ".join(f"{count} x {reason}" for reason, count in ledger.dropped_for_faults().items()),
        )


def _summarise(config: RunConfig, folder: Path, progress: PhaseJournal) -> dict[str, Any]:
    """Put the phases' results together, in the files that others read."""
    rl = progress.result("rl") or {}
    summary: dict[str, Any] = {}
    for part in ("evaluation_before", "rl", "evaluation_after", "best"):
        summary |= progress.result(part) or {}
    summary["wall_s"] = progress.summary()
    summary["seats"] = describe_seats(run_seats(config))
    _write_json(folder / "ledger.json", rl.get("ledger", {}))
    _write_json(folder / SUMMARY_FILE, summary)
    return summary


def _report(folder: Path) -> None:
    """Write the run's page. The run is whole without it, so nothing that goes wrong there may cost it."""
    try:
        write_report([folder])
    except Exception:
        log.exception("no report was written; the run is whole, to try again: polyrhythm report %s", folder)


def _new_path(path: Path) -> Path:
    """The path, or with a number if a run's earlier part has written there."""
    number = 2
    found = path
    while found.exists():
        found = path.with_stem(f"{path.stem}-{number}")
        number += 1
    return found


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def wind_down(loop: RunLoop, seconds: float) -> str:
    """Let the update under way end and the trainer's state be saved; what became of them, in words."""
    under_way = bool(loop.conductor.updates.in_training)
    saved = loop.wind_down(seconds)
    if under_way:
        return f"the update under way is {'finished' if saved else 'abandoned'}"
    return "no update was under way" if saved else f"the trainer's state was not saved within {seconds:g} s"
