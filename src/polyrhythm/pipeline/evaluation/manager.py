"""Evaluates a run's policy before, during and after training, and records the results."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.files import atomic_write, trouble
from polyrhythm.observe.intervals import at_in_words, success_in_words
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.callbacks import Callbacks, EvaluationResult
from polyrhythm.pipeline.evaluation.background import BackgroundEvaluator, BestCheckpoints
from polyrhythm.pipeline.evaluation.episodes import conversations, held_out, tally
from polyrhythm.pipeline.hooks import RunPart, run_hooks
from polyrhythm.pipeline.persistence.checkpoints import POLICY_FILE
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.readable import counted
from polyrhythm.scheduler.records import Episode, SampleEvaluated
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)

#: Fields of an evaluation's tally that go to the metrics.
_MEASURED = ("rate", "low", "high", "mean_return")
#: An action mode is (greedy, swapped); swapped shows each task another task's instruction.
Mode = tuple[bool, bool]
_MODE_NAMES: dict[Mode, str] = {(True, False): "greedy", (False, False): "sampled", (True, True): "swapped"}


class EvaluationManager:
    """All evaluations of one run, with the same seeds each time."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        progress: PhaseJournal,
        metrics: MetricsWriter,
        spec: EnvSpec,
        callbacks: Callbacks,
        parts: Sequence[RunPart] = (),
    ) -> None:
        self._config, self._folder, self._progress = config, folder, progress
        self._metrics, self._spec, self._callbacks, self._parts = metrics, spec, callbacks, parts
        self._best = BestCheckpoints(folder, config.checkpoint.keep_best)

    def evaluate(self, pipeline: Pipeline, name: str) -> None:
        """Evaluate the policy `before` or `after` training, unless that is done already.

        Commits {name: greedy tally, name_sampled: sampled tally, swapped: …} for the requested modes, and logs the same
        as metrics at the evaluated version. RunHalted: every episode was dropped.
        """
        settings, progress = self._config.evaluation, self._progress
        if not settings.episodes or progress.result(f"evaluation_{name}") is not None:
            return
        modes = self._modes(name)
        with progress.phase(f"evaluation_{name}"):
            results = pipeline.evaluate(name, self._episodes(settings.episodes, modes))
        tallies = self._record(modes, results, settings.episodes)
        if name == "after" and settings.every:
            version = results[0].version
            try:
                with atomic_write(self._best.path(version)) as unfinished:
                    shutil.copyfile(self._folder / POLICY_FILE, unfinished)
            except OSError as error:
                log.error("the weights of version %d cannot be saved (%s); make room", version, error.strerror)
            self._list(version, modes, tallies)
        progress.commit(f"evaluation_{name}", tallies)

    def background(self, pipeline: Pipeline, resumed: int | None) -> BackgroundEvaluator:
        """Evaluator for the training phase. resumed: version from which the run resumes, else None."""
        evaluation = self._config.evaluation
        episodes = self._episodes(evaluation.episodes_beside, self._modes("during"))
        if self._best.listed or (evaluation.every and resumed is not None):
            self._best.rewind(resumed or 0)
        evaluator = BackgroundEvaluator(self._config, pipeline, self._best, episodes, self._on_results)
        if evaluation.every:
            template = "evaluation of %s every %s, weights: %s (%s)"
            every = counted(evaluation.every, "version")
            log.info(template, counted(len(episodes), "episode"), every, evaluation.weights, evaluator.memory())
        return evaluator

    def finish(self, evaluator: BackgroundEvaluator) -> None:
        """Wait for the current evaluation, if any."""
        if evaluator.under_way:
            with self._progress.phase("evaluation_during"):
                evaluator.complete()

    def after_s(self) -> float:
        """Estimated seconds of the evaluation after training, from the duration of the one before."""
        count = self._config.evaluation.episodes
        before, after = (len(self._episodes(count, self._modes(name))) for name in ("before", "after"))
        return self._progress.wall_s.get("evaluation_before", 0.0) * after / max(1, before)

    def best(self) -> dict[str, Any]:
        """{best: evaluation of the policy in best.pt}; empty if there is none."""
        found = self._best.best()
        return {} if found is None else {"best": found}

    def _on_results(self, version: int, results: Sequence[SampleEvaluated]) -> None:
        modes = self._modes("during")
        self._list(version, modes, self._record(modes, results, self._config.evaluation.episodes_beside))

    def _list(self, version: int, modes: Mapping[str, Mode], tallies: Mapping[str, dict[str, Any]]) -> None:
        """Add to the candidates for the best; a write error is logged and does not end the run."""
        try:
            self._best.add(version, {_MODE_NAMES[mode]: tallies[key] for key, mode in modes.items() if not mode[1]})
        except OSError as error:
            why = trouble(error) or error.strerror
            log.error("the evaluation of version %d cannot be listed: %s", version, why)

    def _modes(self, name: str) -> dict[str, Mode]:
        """Action mode by name of its tally; greedy first, if requested."""
        settings = self._config.evaluation
        candidates = (
            (name, True, False, settings.greedy),
            (f"{name}_sampled", False, False, settings.sampled),
            ("swapped", True, True, settings.swapped and name == "after"),
        )
        return {key: (greedy, swap) for key, greedy, swap, requested in candidates if requested}

    def _episodes(self, count: int, modes: Mapping[str, Mode]) -> list[Episode]:
        return [episode for mode in modes.values() for episode in self._of_mode(count, mode)]

    def _of_mode(self, count: int, mode: Mode) -> list[Episode]:
        settings, (greedy, swap) = self._config.evaluation, mode
        tasks, states = len(self._spec.tasks), self._spec.initial_states
        return held_out(
            count,
            settings.seed,
            tasks,
            greedy=greedy,
            swap=swap,
            initial_states=states,
            shown=settings.conversations,
            samples=1 if greedy else settings.samples,
        )

    def _record(
        self, modes: Mapping[str, Mode], results: Sequence[SampleEvaluated], episodes: int
    ) -> dict[str, dict[str, Any]]:
        """Tally an evaluation of `episodes` initial states in each mode, by the names of `modes`.

        Tallies go to the metrics, hooks, callbacks and the log; transcripts go to hooks and callbacks.
        """
        tallies = {}
        for key, (greedy, swap) in modes.items():
            own = [r for r in results if r.greedy == greedy and (r.instruction != r.task) == swap]
            wanted = self._of_mode(episodes, (greedy, swap))
            total = tallies[key] = tally(own, self._spec.tasks, len(wanted))
            mode, version = _MODE_NAMES[greedy, swap], results[0].version
            said = conversations(wanted, own, self._spec)
            result = {**total, "version": version, "greedy": greedy, "conversations": said}
            for hooks in run_hooks():
                hooks.on_evaluation(self._folder, key, result)
            for part in self._parts:
                part.on_evaluation(key, result)
            self._callbacks.on_evaluation(EvaluationResult.of(key, result))
            values = {f"evaluation/{mode}/{part}": total[part] for part in _MEASURED}
            values |= {f"evaluation/{mode}/metrics/{name}": mean for name, mean in total.get("metrics", {}).items()}
            for name, one in total.get("at", {}).items():
                named = f"evaluation/{mode}/{name.replace('@', '_at_')}"
                values |= {named: one["rate"], f"{named}_low": one["low"], f"{named}_high": one["high"]}
            self._metrics.log(version, values, self._progress.summary()["total"])
            mean_return = f"return {total['mean_return']:.4g}"
            if total["rate"] is not None:
                outcome = f"{success_in_words(total)}{at_in_words(total)}, {mean_return}"
            else:
                outcome = f"{mean_return} over {counted(total['episodes'], 'episode')}"
            log.info("%s, version %d: %s", key, version, outcome)
        return tallies
