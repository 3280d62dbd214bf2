"""Runs all phases of a training run, from its configuration to its summary.

    demonstrations → supervised warm start → evaluation → reinforcement learning → the same evaluation

All files are in the run's folder: config.yaml, progress.json, metrics.jsonl, tensorboard/, trace.json, logs/,
demonstrations.npz, checkpoints/, policy.pt, evaluations.json and best.pt (evaluation during training),
conversations.jsonl (text environments), settings_changes.jsonl (resumed with other settings), ledger.json and, last,
summary.json and report.html. Each phase commits its result, so an interrupted run resumes where it stopped, and a
finished one can be extended.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.env_warnings import warnings_so_far
from polyrhythm.errors import HostLost, RunDistrusted, RunHalted
from polyrhythm.files import atomic_write, trouble
from polyrhythm.observe.metrics import MetricsWriter, read_lines
from polyrhythm.observe.run_folder import SUMMARY_FILE, lock_run_folder
from polyrhythm.observe.setbacks import SetbackWatch, setbacks
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.callbacks import Callbacks, StopTraining, UpdateForwarder
from polyrhythm.pipeline.context import Launch, RunContext
from polyrhythm.pipeline.evaluation.background import BackgroundEvaluator
from polyrhythm.pipeline.evaluation.manager import EvaluationManager
from polyrhythm.pipeline.hooks import RunPart, begin_parts, run_hooks
from polyrhythm.pipeline.observers.alarms import MismatchWarning, SetbackWarning, mismatch_limit
from polyrhythm.pipeline.observers.idle import IdleMeter, PassMeter, limit_of
from polyrhythm.pipeline.observers.live import LiveDisplay
from polyrhythm.pipeline.observers.metrics import EpisodeTracker, LagHistogram, ProgressLogger, UpdateMetrics
from polyrhythm.pipeline.observers.totals import RunTotals, StationActivity
from polyrhythm.pipeline.observers.weights import WeightsTraffic
from polyrhythm.pipeline.persistence.checkpoints import (
    POLICY_FILE,
    STATES,
    SavedRun,
    save_policy,
)
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.pipeline.persistence.resume import refuse_misplaced, remove_if_refused, take_up
from polyrhythm.pipeline.persistence.saver import RunCheckpointer
from polyrhythm.pipeline.persistence.snapshot import read_newest
from polyrhythm.pipeline.placed import place
from polyrhythm.pipeline.run_loop import Interrupted, OrderlyHalt, RunLoop
from polyrhythm.pipeline.seats import describe_seats
from polyrhythm.pipeline.signals import Interrupts
from polyrhythm.pipeline.validation.check import ValidatedRun
from polyrhythm.pipeline.warm_start.initial_policy import prepare_initial_policy
from polyrhythm.runtime.hosting import dropped_messages
from polyrhythm.scheduler.samples.groups import SampleLedger

log = logging.getLogger(__name__)

#: Share of samples lost to faults above which the run ends with a warning.
_MANY_DROPPED = 0.05


def train(
    checked: ValidatedRun,
    folder: Path,
    live: LiveDisplay | None = None,
    callbacks: Callbacks | None = None,
    launch: Launch | None = None,
) -> dict[str, Any]:
    """Run all phases that the folder does not have yet; return the content of summary.json.

    checked: from `pipeline.validation.check`; its policy is trained in place. live: progress display. launch: see
    `RunContext`. StartError: it cannot start (a new run's files are then removed); RunHalted: it cannot continue;
    KeyboardInterrupt: it was interrupted; and any exception of a callback.
    """
    refuse_misplaced(folder)
    callbacks = callbacks or Callbacks()
    with (
        lock_run_folder(folder),
        remove_if_refused(folder, named=folder.parent != Path(checked.config.out_dir) / checked.config.name),
        begin_parts(checked.config) as parts,
        Interrupts().handle_signals() as interrupts,
    ):
        progress = PhaseJournal(folder, live.phase if live else None)
        saved = take_up(checked, folder, progress)
        with MetricsWriter(folder, receivers=[part.on_metrics for part in parts]) as metrics:
            finished = True
            session = _Session(checked, folder, saved, progress, interrupts, metrics, parts, callbacks, live, launch)
            try:
                _phases(session)
            except Interrupted:
                finished = False
            except RunHalted:
                _deliver_remaining(callbacks)
                raise
        if not finished:
            if callbacks.ended is None:
                _deliver_remaining(callbacks)
                raise interrupts.interruption()
            raise callbacks.ended
        summary = _summarise(checked, folder, progress)
        _finish(folder)
    if callbacks.deliver() and not isinstance(callbacks.ended, StopTraining):
        assert callbacks.ended is not None
        raise callbacks.ended
    return summary


def _deliver_remaining(callbacks: Callbacks) -> None:
    """Make queued callback calls at shutdown; log an exception of theirs, so that it does not hide the run's own."""
    if callbacks.ended is None and callbacks.deliver() and not isinstance(callbacks.ended, StopTraining):
        log.error("a callback failed while the run ended", exc_info=callbacks.ended)


@dataclass(frozen=True, slots=True)
class _Session:
    """State shared by the phases of one part of a run, from its start or resume to its end or interruption."""

    checked: ValidatedRun
    folder: Path
    saved: SavedRun | None
    progress: PhaseJournal
    interrupts: Interrupts
    metrics: MetricsWriter
    parts: Sequence[RunPart]
    callbacks: Callbacks
    live: LiveDisplay | None = None
    launch: Launch | None = None


def _phases(session: _Session) -> None:
    config, _, policy = session.checked
    saved, progress, folder = session.saved, session.progress, session.folder
    version = saved.version if saved else prepare_initial_policy(session.checked, folder, progress, session.metrics)
    training = config.training.versions > 0 and progress.result("rl") is None
    initial = folder / POLICY_FILE if training else policy
    context = RunContext(config, initial, folder, saved, version, trainer=training, launch=session.launch)
    pipeline = build_pipeline(context, start=False)
    try:
        if session.live:
            session.live.watch(pipeline)
        pipeline.loop.add_observers(*(one for part in session.parts for one in part.observers(pipeline)))
        pipeline.loop.add_observers(MismatchWarning(mismatch_limit(config.algorithm, policy)))
        run = _Run(session, pipeline)
        pipeline.loop.stop = lambda: session.interrupts.requested() or session.callbacks.deliver()
        if saved is None:
            run.start()
        if saved is None and progress.result("rl") is None:  # otherwise the weights before training are gone
            with session.interrupts.defer_first():
                run.evaluations.evaluate(pipeline, "before")
        if training:
            run.learn()
        if config.training.versions:
            with session.interrupts.defer_first():
                run.evaluations.evaluate(pipeline, "after")
            progress.commit("best", run.evaluations.best())
    finally:
        with session.interrupts.hold():
            pipeline.close()


class _TrainingObservers(NamedTuple):
    episodes: EpisodeTracker
    lags: LagHistogram
    saver: RunCheckpointer
    traffic: WeightsTraffic
    evaluator: BackgroundEvaluator


class _Run:
    def __init__(self, session: _Session, pipeline: Pipeline) -> None:
        self._session, self._pipeline = session, pipeline
        self._config, self._folder, self._callbacks = session.checked.config, session.folder, session.callbacks
        self._progress, self._metrics, self._live = session.progress, session.metrics, session.live
        self._setbacks = SetbackWatch(read_lines(session.folder))
        self.evaluations = EvaluationManager(
            self._config, self._folder, self._progress, self._metrics, pipeline.spec, self._callbacks, self._setbacks
        )

    def start(self) -> None:
        with self._progress.phase("start"):
            self._pipeline.loop.start()

    def learn(self) -> None:
        """Train up to the last version. A resumed run's stations are started here, with observers attached.

        If the user or the conductor ends it between two events, the run is saved and can be resumed.
        """
        config, pipeline, session, progress = self._config, self._pipeline, self._session, self._progress
        loop, launcher, before = pipeline.loop, pipeline.launcher, pipeline.loop.observers
        whole = False
        episodes, lags, saver, traffic, evaluator = self._observe()
        if session.saved is None:
            saver.save()  # from here on policy.pt changes, so an interrupted run needs a saved run
        else:
            self.start()
            saver.start(loop.clock())
        try:
            with session.interrupts.defer_first(), progress.phase("rl"), self._faults_kept(saver.totals):
                if self._live is not None:
                    self._live.train(self._updates, episodes, saver.totals, lags, self.evaluations.after_s())
                loop.train_until(config.training.versions)
            saver.save()  # an extended run resumes from here
            totals = saver.summary()
            totals["weights"] = traffic.summary()
            with session.interrupts.defer_first():
                self.evaluations.finish(evaluator)
            whole = True
        except (Interrupted, OrderlyHalt):
            ended = wind_down(loop, config.shutdown_s)
            saver.save()
            log.info(ended)
            raise
        finally:
            loop.remove_observers(*(observer for observer in loop.observers if observer not in before))
            self._save_published(needed=whole)
        lags.check_bound(config.freshness.max_lag, config.freshness.bound, clean=saver.totals.undisturbed)
        ledger = self._balanced()
        _warn_at_end(ledger, self._setbacks.conclusion())
        counts = {
            "lag": lags.summary(),
            "ledger": ledger.as_dict(),
            **loop.conductor.summary(),
            "failed_samples": dict(pipeline.failures.counts),
            "dropped_messages": dropped_messages(launcher.hosting),
        }
        counts["set_aside"] = [{**one, "task": pipeline.spec.tasks[one["task"]].name} for one in counts["set_aside"]]
        progress.commit("rl", {**totals, **counts})

    @contextmanager
    def _faults_kept(self, totals: RunTotals) -> Iterator[None]:
        """Keep the faults in the journal if the loss of a host ends the run, which then cannot be saved."""
        try:
            yield
        except HostLost as lost:
            totals.note_lost_host(lost.host, lost.stations)
            self._progress.keep_faults(totals.faults)
            raise

    def _observe(self) -> _TrainingObservers:
        """Attach the observers of training, each before those that read it; return those that are read after
        training."""
        config, pipeline, loop = self._config, self._pipeline, self._pipeline.loop
        saved, began, launcher = self._session.saved, loop.clock(), pipeline.launcher
        lags = LagHistogram(saved.counts["lags"] if saved else None)
        earlier = read_lines(self._folder) if saved else ()
        episodes = EpisodeTracker(len(pipeline.spec.tasks), scored=config.scoring is not None, earlier=earlier)
        states, deadline_s = self._folder / STATES, config.supervision.update_s
        saver = RunCheckpointer(states, pipeline, config.checkpoint, lags, saved, began, deadline_s=deadline_s)
        saver.totals.recall(self._progress.faults)
        settings = loop.conductor.settings
        longest = settings.max_wait_s if settings.batching == "dynamic" else math.inf
        idle, passes = IdleMeter(loop.conductor, began), PassMeter(settings.buckets, longest, began)
        stations = StationActivity(launcher, began)
        placed = pipeline.placed
        traffic = WeightsTraffic(launcher, placed.ends, {name: seat.device for name, seat in placed.seats.items()})
        sources = (loop.conductor.ledger, episodes, saver.totals, stations, (idle, passes))
        metrics = UpdateMetrics(self._metrics, *sources, began=self._progress.began, now=began)
        forwarder = UpdateForwarder(metrics, self._callbacks)
        evaluator = self.evaluations.background(pipeline, saved.version if saved else None)
        loop.add_observers(episodes, idle, passes, metrics, forwarder, lags, stations, traffic)
        loop.add_observers(evaluator, saver, SetbackWarning(self._setbacks, metrics))
        loop.add_observers(*(observer for hooks in run_hooks() for observer in hooks.observers(pipeline)))
        if self._live is None:
            loop.add_observers(ProgressLogger(self._updates, episodes, began))
        return _TrainingObservers(episodes, lags, saver, traffic, evaluator)

    @property
    def _updates(self) -> int:
        return self._config.training.versions * self._config.freshness.sync_interval

    def _balanced(self) -> SampleLedger:
        """The ledger. RunDistrusted: a sample is missing or counted twice, or a block was never released."""
        conductor = self._pipeline.loop.conductor
        ledger = conductor.ledger
        # A trainer restored from an older state may leave samples that are no longer needed.
        kept = {sample.payload_id for sample in conductor.rollout.samples.values() if sample.payload_id}
        leaked = sorted(set(self._pipeline.launcher.payloads.in_flight.finished()) - kept)
        if ledger.imbalance or leaked:
            raise RunDistrusted(
                f"the ledger does not balance: {ledger.as_dict()}, blocks never released: {leaked}; distrust this run, "
                "and report it with its folder"
            )
        return ledger

    def _save_published(self, *, needed: bool) -> None:
        """Save the newest published weights, which are complete even if an update was interrupted or failed.

        needed: nothing else has ended the run.
        """
        read = read_newest(self._pipeline.weights, POLICY_FILE, needed=needed)
        if read is not None:
            version, weights = read
            save_policy(weights, self._config, self._folder / POLICY_FILE, version, self._pipeline.spec)


def _warn_at_end(ledger: SampleLedger, conclusion: str) -> None:
    """Log the training alarms' conclusion, and warn if many samples failed: the policy was trained on a biased
    remainder."""
    if conclusion:
        log.warning("%s", conclusion)
    if ledger.dropped_by_faults > _MANY_DROPPED * ledger.started:
        log.warning(
            "%d of %d samples were dropped because they failed (%s), and the policy was trained only on the others; "
            "the tracebacks are in the run's logs/",
            ledger.dropped_by_faults,
            ledger.started,
            "; ".join(f"{count} x {reason}" for reason, count in ledger.dropped_for_faults().items()),
        )


def _summarise(checked: ValidatedRun, folder: Path, progress: PhaseJournal) -> dict[str, Any]:
    """Merge the phases' results into ledger.json and summary.json; return the summary."""
    rl = progress.result("rl") or {}
    summary: dict[str, Any] = {}
    for part in ("evaluation_before", "rl", "evaluation_after", "best"):
        summary |= progress.result(part) or {}
    lines = read_lines(folder)
    summary["warnings"] = warnings_so_far() + setbacks(lines)
    summary["wall_s"] = progress.summary()
    summary["seats"] = describe_seats(place(checked.config).seats)
    if (limit := limit_of(checked.config, summary, lines)) is not None:
        summary["bottleneck"] = limit
        log.info(limit)
    _write_json(folder / "ledger.json", rl.get("ledger", {}))
    _write_json(folder / SUMMARY_FILE, summary)
    return summary


def _finish(folder: Path) -> None:
    """Run the plugins' hooks for complete runs, such as the report."""
    for hooks in run_hooks():
        try:
            hooks.finish(folder)
        except Exception:
            log.exception("%s failed after the run, which is complete", type(hooks).__name__)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def wind_down(loop: RunLoop, seconds: float) -> str:
    """Finish the current update and save the trainer's state; return a sentence on the outcome."""
    under_way, before = bool(loop.conductor.updates.in_training), loop.conductor.versions.updates
    try:
        saved = loop.wind_down(seconds)
    except OSError as error:
        return f"the trainer's state was not saved: {trouble(error) or error}"
    if under_way:
        finished = saved and loop.conductor.versions.updates > before
        return f"the update under way is {'finished' if finished else 'abandoned'}"
    return "no update was under way" if saved else f"the trainer's state was not saved within {seconds:g} s"
