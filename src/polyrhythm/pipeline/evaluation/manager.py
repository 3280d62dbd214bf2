"""How a run's policy is measured before, during and after training, and where the results go."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.files import atomic_write, trouble
from polyrhythm.observe import MetricsWriter
from polyrhythm.observe.intervals import counted, measures_success, success_in_words
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.callbacks import Callbacks, EvaluationResult
from polyrhythm.pipeline.evaluation.background import BackgroundEvaluator
from polyrhythm.pipeline.evaluation.best import BestCheckpoints
from polyrhythm.pipeline.evaluation.episodes import held_out, tally
from polyrhythm.pipeline.persistence.checkpoints import POLICY_FILE
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.scheduler.records import Episode, SampleEvaluated
from polyrhythm.specs import Task

log = logging.getLogger(__name__)

#: What of an evaluation's tally goes to the metrics.
_MEASURED = ("rate", "low", "high", "mean_return")
#: How the policy acts: greedy, swapped (each task is shown another's instruction); and what that is called.
Way = tuple[bool, bool]
_WORDS: dict[Way, str] = {(True, False): "greedy", (False, False): "sampled", (True, True): "swapped"}


class EvaluationManager:
    """Those of one run: the same seeds each time."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        progress: PhaseJournal,
        metrics: MetricsWriter,
        tasks: Sequence[Task],
        callbacks: Callbacks,
    ) -> None:
        self._config, self._folder, self._progress = config, folder, progress
        self._metrics, self._tasks, self._callbacks = metrics, tasks, callbacks
        self._best = BestCheckpoints(folder, config.checkpoint.keep_best)

    def evaluate(self, pipeline: Pipeline, name: str) -> None:
        """Measure the policy `before` or `after` training, unless that is done.

        The phase's result is {name: greedy tally, name_sampled: sampled tally, swapped: …}, of those asked for; the
        metrics get them too, at the step of the version that was measured. RunHalted: not one episode ended.
        """
        wanted, progress = self._config.evaluation, self._progress
        if not wanted.episodes or progress.result(f"evaluation_{name}") is not None:
            return
        ways = self._ways(name)
        with progress.phase(f"evaluation_{name}"):
            results = pipeline.evaluate(name, self._episodes(wanted.episodes, ways))
        tallies = self._tell(ways, results)
        if name == "after" and wanted.every:
            self._compete(results[0].version, tallies)
        progress.commit(f"evaluation_{name}", tallies)

    def beside(self, pipeline: Pipeline, resumed: int | None) -> BackgroundEvaluator:
        """Who evaluates during training. resumed: the version that the run goes on from, if it does."""
        evaluation = self._config.evaluation
        episodes = self._episodes(evaluation.episodes_beside, self._ways("during"))
        if self._best.listed or (evaluation.every and resumed is not None):
            self._best.rewind(resumed or 0)
        beside = BackgroundEvaluator(self._config, pipeline, self._best, episodes, self._during)
        if evaluation.every:
            words = "evaluation of %s every %s, weights: %s (%s)"
            every = counted(evaluation.every, "version")
            log.info(words, counted(len(episodes), "episode"), every, evaluation.weights, beside.memory())
        return beside

    def finish(self, beside: BackgroundEvaluator) -> None:
        """Wait for the evaluation during training that is under way, if there is one."""
        if beside.under_way:
            with self._progress.phase("evaluation_during"):
                beside.finish()

    def after_s(self) -> float:
        """What the evaluation after training will take, by what the one before did."""
        before, after = self._ways("before"), self._ways("after")
        return self._progress.wall_s.get("evaluation_before", 0.0) * len(after) / max(1, len(before))

    def best(self) -> dict[str, Any]:
        """{best: the evaluation of the policy in best.pt}; empty where there is none."""
        found = self._best.best()
        return {} if found is None else {"best": found}

    def _during(self, version: int, results: Sequence[SampleEvaluated]) -> None:
        ways = self._ways("during")
        self._list(version, ways, self._tell(ways, results))

    def _compete(self, version: int, tallies: Mapping[str, dict[str, Any]]) -> None:
        """The trained policy is among those that may be the best."""
        try:
            with atomic_write(self._best.path(version)) as unfinished:
                shutil.copyfile(self._folder / POLICY_FILE, unfinished)
        except OSError as error:
            log.error("the weights of version %d cannot be kept (%s); make room", version, error.strerror)
        self._list(version, self._ways("after"), tallies)

    def _list(self, version: int, ways: Mapping[str, Way], tallies: Mapping[str, dict[str, Any]]) -> None:
        """Among the evaluations that may be the best; a disk that takes nothing costs the entry, not the run."""
        try:
            self._best.add(version, {_WORDS[way]: tallies[key] for key, way in ways.items() if not way[1]})
        except OSError as error:
            why = trouble(error) or error.strerror
            log.error("the evaluation of version %d cannot be listed: %s", version, why)

    def _ways(self, name: str) -> dict[str, Way]:
        """What the tallies are called → how the policy acts; greedily first, if at all."""
        wanted = self._config.evaluation
        asked = (
            (name, True, False, wanted.greedy),
            (f"{name}_sampled", False, False, wanted.sampled),
            ("swapped", True, True, wanted.swapped and name == "after"),
        )
        return {key: (greedy, swap) for key, greedy, swap, is_asked in asked if is_asked}

    def _episodes(self, count: int, ways: Mapping[str, Way]) -> list[Episode]:
        """`count` held-out episodes in each of these ways."""
        seed, tasks = self._config.evaluation.seed, len(self._tasks)
        return [e for greedy, swap in ways.values() for e in held_out(count, seed, tasks, greedy=greedy, swap=swap)]

    def _tell(self, ways: Mapping[str, Way], results: Sequence[SampleEvaluated]) -> dict[str, dict[str, Any]]:
        """What an evaluation came to, by the names of `ways`; the metrics and the log get it too."""
        tallies = {}
        for key, (greedy, swap) in ways.items():
            own = [r for r in results if r.greedy == greedy and (r.instruction != r.task) == swap]
            total = tallies[key] = tally(own, self._tasks)
            way, version = _WORDS[greedy, swap], results[0].version
            self._callbacks.on_evaluation(EvaluationResult.of(key, {**total, "version": version, "greedy": greedy}))
            values = {f"evaluation/{way}/{part}": total[part] for part in _MEASURED}
            values |= {f"evaluation/{way}/metrics/{name}": mean for name, mean in total.get("metrics", {}).items()}
            self._metrics.log(version, values, self._progress.summary()["total"])
            said, earned = "%s, version %d: %s", f"return {total['mean_return']:.4g}"
            if measures_success([total["successes"]], [total["mean_return"]]):
                log.info(said, key, version, f"{success_in_words(total['successes'], total['episodes'])}, {earned}")
            else:
                log.info(said, key, version, f"{earned} over {counted(total['episodes'], 'episode')}")
        return tallies
