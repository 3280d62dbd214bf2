"""Runs all phases of a training run, from its configuration to its summary.

    demonstrations → supervised warm start → evaluation → reinforcement learning → the same evaluation

All files are in the run's folder: config.yaml, progress.json, metrics.jsonl, trace.json, logs/,
demonstrations.npz, checkpoints/, policy.pt, evaluations.json and best.pt (evaluation during training),
conversations.jsonl (text environments), settings_changes.jsonl (resumed with other settings), ledger.json and, last,
summary.json and report.html. Each phase commits its result, so an interrupted run resumes where it stopped, and a
finished one can be extended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.env_warnings import warnings_so_far
from polyrhythm.errors import HostLost, RunDistrusted, RunHalted
from polyrhythm.files import trouble, write_json
from polyrhythm.observe.metrics import MetricsWriter, read_lines
from polyrhythm.observe.run_folder import LEDGER_FILE, SUMMARY_FILE, lock_run_folder
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.callbacks import Callbacks, StopTraining, UpdateForwarder
from polyrhythm.pipeline.context import Launch, RunContext
from polyrhythm.pipeline.evaluation.background import BackgroundEvaluator
from polyrhythm.pipeline.evaluation.manager import EvaluationManager
from polyrhythm.pipeline.hooks import Display, RunPart, all_alarms, begin_parts, run_hooks
from polyrhythm.pipeline.observers.alarms import MismatchWarning, mismatch_limit
from polyrhythm.pipeline.observers.idle import IdleMeter, PassMeter
from polyrhythm.pipeline.observers.metrics import EpisodeTracker, LagHistogram, ProgressLogger, UpdateMetrics
from polyrhythm.pipeline.observers.totals import StationActivity, WeightsTraffic
from polyrhythm.pipeline.persistence.checkpoints import (
    POLICY_FILE,
    STATES,
    SavedRun,
    save_policy,
)
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.pipeline.persistence.resume import prepare_initial_policy, refuse_misplaced, remove_if_refused, take_up
from polyrhythm.pipeline.persistence.saver import RunCheckpointer
from polyrhythm.pipeline.persistence.snapshot import read_newest
from polyrhythm.pipeline.placed import describe_seats, place
from polyrhythm.pipeline.run_loop import Interrupted, OrderlyHalt, RunLoop
from polyrhythm.pipeline.signals import Interrupts
from polyrhythm.pipeline.validation.check import ValidatedRun
from polyrhythm.runtime.hosting import dropped_messages

log = logging.getLogger(__name__)

#: Share of samples lost to faults above which the run ends with a warning.
_MANY_DROPPED = 0.05


def train(
    checked: ValidatedRun,
    folder: Path,
    live: Display | None = None,
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
        for part in parts:
            part.on_start(folder)
        with MetricsWriter(folder, [part.on_metrics for part in parts]) as metrics:
            finished = True
            try:
                _Run(checked, folder, saved, progress, interrupts, metrics, callbacks, live, parts).run(launch)
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
        for hooks in run_hooks():  # such as the report
            try:
                hooks.finish(folder)
            except Exception:
                log.exception("%s failed after the run, which is complete", type(hooks).__name__)
    if callbacks.deliver() and not isinstance(callbacks.ended, StopTraining):
        assert callbacks.ended is not None
        raise callbacks.ended
    return summary


def _deliver_remaining(callbacks: Callbacks) -> None:
    """Make queued callback calls at shutdown; log an exception of theirs, so that it does not hide the run's own."""
    if callbacks.ended is None and callbacks.deliver() and not isinstance(callbacks.ended, StopTraining):
        log.error("a callback failed while the run ended", exc_info=callbacks.ended)


class _TrainingObservers(NamedTuple):
    """Observers of training that are read during or after it."""

    episodes: EpisodeTracker
    lags: LagHistogram
    saver: RunCheckpointer
    traffic: WeightsTraffic
    evaluator: BackgroundEvaluator


@dataclass(slots=True)
class _Run:
    """One part of a run, from its start or resume to its end or interruption."""

    checked: ValidatedRun
    folder: Path
    saved: SavedRun | None
    progress: PhaseJournal
    interrupts: Interrupts
    metrics: MetricsWriter
    callbacks: Callbacks
    live: Display | None
    parts: Sequence[RunPart]
    pipeline: Pipeline = field(init=False)
    evaluations: EvaluationManager = field(init=False)

    def run(self, launch: Launch | None) -> None:
        """All phases that are not done. Interrupted: the run can be resumed."""
        config, _, policy = self.checked
        saved, progress, folder, parts = self.saved, self.progress, self.folder, self.parts
        version = saved.version if saved else prepare_initial_policy(self.checked, folder, progress, self.metrics)
        training = config.training.versions > 0 and progress.result("rl") is None
        initial = folder / POLICY_FILE if training else policy
        context = RunContext(config, initial, folder, saved, version, trainer=training, launch=launch)
        pipeline = self.pipeline = build_pipeline(context, start=False)
        try:
            if self.live:
                self.live.watch(pipeline, parts)
            pipeline.loop.add_observers(*(one for part in parts for one in part.observers(pipeline)))
            pipeline.loop.add_observers(MismatchWarning(mismatch_limit(config.algorithm, policy)))
            pipeline.loop.stop = lambda: self.interrupts.requested() or self.callbacks.deliver()
            measured = (progress, self.metrics, pipeline.spec, self.callbacks)
            self.evaluations = EvaluationManager(config, folder, *measured, parts)
            if saved is None:
                self._start()
            if saved is None and progress.result("rl") is None:  # otherwise the weights before training are gone
                with self.interrupts.defer_first():
                    self.evaluations.evaluate(pipeline, "before")
            if training:
                self._learn()
                for part in parts:
                    part.on_trained()
            if config.training.versions:
                with self.interrupts.defer_first():
                    self.evaluations.evaluate(pipeline, "after")
                progress.commit("best", self.evaluations.best())
        finally:
            with self.interrupts.hold():
                pipeline.close()

    def _start(self) -> None:
        with self.progress.phase("start"):
            self.pipeline.loop.start()

    def _learn(self) -> None:
        """Train up to the last version. A resumed run's stations are started here, with observers attached."""
        config, loop, before = self.checked.config, self.pipeline.loop, self.pipeline.loop.observers
        trained = False
        try:
            seen = self._observe()
            if self.live is None:
                updates = config.training.versions * config.freshness.sync_interval
                loop.add_observers(ProgressLogger(updates, seen.episodes, loop.clock()))
            if self.saved is None:
                seen.saver.save()  # from here on policy.pt changes, so an interrupted run needs a saved run
            else:
                self._start()
                seen.saver.start(loop.clock())
            totals = self._train(seen)
            trained = True
        finally:
            try:
                loop.remove_observers(*(observer for observer in loop.observers if observer not in before))
            except Exception:
                if trained:
                    raise
                log.exception("an observer failed while the run ended")  # the run's own error is raised
        lags, undisturbed = seen.lags, seen.saver.totals.undisturbed
        lags.check_bound(config.freshness.max_lag, config.freshness.bound, clean=undisturbed)
        self.progress.commit("rl", {**totals, "lag": lags.summary(), **self._counts()})

    def _train(self, seen: _TrainingObservers) -> dict[str, Any]:
        """Train, and end the evaluations that run meanwhile; return the totals. The newest weights are in policy.pt.

        If the user or the conductor ends it between two events, the run is saved and can be resumed.
        """
        config, pipeline, loop, saver = self.checked.config, self.pipeline, self.pipeline.loop, seen.saver
        updates, whole = config.training.versions * config.freshness.sync_interval, False
        try:
            with self.interrupts.defer_first(), self.progress.phase("rl"):
                if self.live is not None:
                    self.live.train(updates, seen.episodes, saver.totals, seen.lags, self.evaluations.after_s())
                loop.train_until(config.training.versions)
            saver.save()  # an extended run resumes from here
            totals = {**saver.summary(), "weights": seen.traffic.summary()}
            with self.interrupts.defer_first():
                self.evaluations.finish(seen.evaluator)
            whole = True
            return totals
        except (Interrupted, OrderlyHalt):
            ended = wind_down(loop, config.shutdown_s)
            saver.save()
            log.info(ended)
            raise
        except HostLost as lost:  # the run cannot be saved, so the journal keeps its faults
            saver.totals.note_lost_host(lost.host, lost.stations)
            self.progress.keep_faults(saver.totals.faults)
            raise
        finally:
            # They are complete even if an update was interrupted or failed; needed if nothing else has ended the run.
            read = read_newest(pipeline.weights, POLICY_FILE, needed=whole)
            if read is not None:
                save_policy(read[1], config, self.folder / POLICY_FILE, read[0], pipeline.spec)

    def _observe(self) -> _TrainingObservers:
        """Attach the observers of training, each before those that read it; return those that are read later."""
        config, pipeline, loop, saved = self.checked.config, self.pipeline, self.pipeline.loop, self.saved
        began, launcher, placed = loop.clock(), pipeline.launcher, pipeline.placed
        lags = LagHistogram(saved.counts["lags"] if saved else None)
        earlier = read_lines(self.folder) if saved else ()
        episodes = EpisodeTracker(len(pipeline.spec.tasks), scored=config.scoring is not None, earlier=earlier)
        states, deadline_s = self.folder / STATES, config.supervision.update_s
        saver = RunCheckpointer(states, pipeline, config.checkpoint, lags, saved, began, deadline_s=deadline_s)
        saver.totals.recall(self.progress.faults)
        settings = loop.conductor.settings
        longest = settings.max_wait_s if settings.batching == "dynamic" else math.inf
        idle, passes = IdleMeter(loop.conductor, began), PassMeter(settings.buckets, longest, began)
        stations = StationActivity(launcher, began)
        traffic = WeightsTraffic(launcher, placed.ends, {name: seat.device for name, seat in placed.seats.items()})
        sources = (loop.conductor.ledger, episodes, saver.totals, stations, (idle, passes))
        metrics = UpdateMetrics(self.metrics, *sources, began=self.progress.began, now=began)
        metrics.added = [part.metrics for part in self.parts]
        forwarder = UpdateForwarder(metrics, self.callbacks)
        evaluator = self.evaluations.background(pipeline, saved.version if saved else None)
        loop.add_observers(episodes, idle, passes, metrics, forwarder, lags, stations, traffic)
        for hooks in run_hooks():
            loop.add_observers(*hooks.observers(pipeline))
        loop.add_observers(evaluator, saver)  # they finish last, as that may take long
        return _TrainingObservers(episodes, lags, saver, traffic, evaluator)

    def _counts(self) -> dict[str, Any]:
        """Counts for the summary. RunDistrusted: a sample is missing or counted twice, or a block was never
        released."""
        pipeline, conductor = self.pipeline, self.pipeline.loop.conductor
        ledger = conductor.ledger
        # A trainer restored from an older state may leave samples that are no longer needed.
        kept = {sample.payload_id for sample in conductor.rollout.samples.values() if sample.payload_id}
        leaked = sorted(set(pipeline.launcher.payloads.in_flight.finished()) - kept)
        if ledger.imbalance or leaked:
            raise RunDistrusted(
                f"the ledger does not balance: {ledger.as_dict()}, blocks never released: {leaked}; distrust this run, "
                "and report it with its folder"
            )
        if ledger.dropped_by_faults > _MANY_DROPPED * ledger.started:
            log.warning(
                "%d of %d samples were dropped because they failed (%s), and the policy was trained only on the "
                "others; the tracebacks are in the run's logs/",
                ledger.dropped_by_faults,
                ledger.started,
                "; ".join(f"{count} x {reason}" for reason, count in ledger.dropped_for_faults().items()),
            )
        counts = conductor.summary()
        return {
            "ledger": ledger.as_dict(),
            **counts,
            "failed_samples": dict(pipeline.failures.counts),
            "dropped_messages": dropped_messages(pipeline.launcher.hosting),
            "set_aside": [{**one, "task": pipeline.spec.tasks[one["task"]].name} for one in counts["set_aside"]],
        }


def _summarise(checked: ValidatedRun, folder: Path, progress: PhaseJournal) -> dict[str, Any]:
    """Merge the phases' results into ledger.json and summary.json; return the summary."""
    rl = progress.result("rl") or {}
    summary: dict[str, Any] = {}
    for part in ("evaluation_before", "rl", "evaluation_after", "best"):
        summary |= progress.result(part) or {}
    lines = read_lines(folder)
    summary["warnings"] = [*warnings_so_far(), *(alarm.text for alarm in all_alarms(lines))]
    summary["wall_s"] = progress.summary()
    summary["seats"] = describe_seats(place(checked.config).seats)
    for hooks in run_hooks():  # such as advice
        try:
            summary |= hooks.summarise(checked.config, summary, lines)
        except Exception:
            log.exception("%s failed after the run, whose summary lacks its fields", type(hooks).__name__)
    write_json(folder / LEDGER_FILE, rl.get("ledger", {}))
    write_json(folder / SUMMARY_FILE, summary)
    return summary


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
