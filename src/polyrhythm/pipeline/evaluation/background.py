"""Evaluates during training: requests evaluations, collects their results, and keeps the best policies.

    evaluations.json                    every evaluation during training, and the one after it
    checkpoints/policy-<version>.pt     the weights of the best `keep` versions
    best.pt                             the weights of the best version

Rank: lower end of the success interval (0 if no success was reported), then mean return, then age, older first. See
docs/design/conductor.md.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write, link_or_copy, write_json
from polyrhythm.observe.intervals import deciding
from polyrhythm.observe.run_folder import EVALUATIONS_FILE
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.persistence.checkpoints import BEST_FILE, STATES, save_policy
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)

#: Takes the version and all results of an evaluation.
OnResults = Callable[[int, Sequence[records.SampleEvaluated]], None]


class BackgroundEvaluator(Observer):
    """Observer that requests an evaluation every `evaluation.every` versions (0: never), one at a time.

    episodes: of each evaluation; on_results: called after a complete one, once its weights are in `best.path(version)`.
    """

    hears: ClassVar[tuple[type, ...]] = (
        # These can raise the applied version, including the first one of a run or of a resumed part.
        *(records.WeightsApplied, records.GeneratorJoined, records.StationLost, records.TrainUntil),
        *(records.StartRows, records.SampleEvaluated, records.EvaluationDone),
    )

    def __init__(
        self,
        config: RunConfig,
        pipeline: Pipeline,
        best: BestCheckpoints,
        episodes: Sequence[records.Episode],
        on_results: OnResults,
    ) -> None:
        self._config, self._pipeline, self._best = config, pipeline, best
        self._episodes, self._on_results = tuple(episodes), on_results
        self._every = config.evaluation.every or math.inf
        self._next = best.newest + self._every
        self._name = ""
        self._version = -1
        self._results: list[records.SampleEvaluated] = []
        self._saving: threading.Thread | None = None

    def memory(self) -> str:
        """Description of the memory that these evaluations use."""
        evaluation = self._config.evaluation
        copy = f"{self._pipeline.weights.layout.nbytes / 1e6:.3g} MB of weights"
        rows = f"{evaluation.reserved_rows} rows in a separate simulator"
        return {
            "pause": "no extra memory, training waits",
            "second_copy": f"{copy} more in the first generator, {rows}",
            "own_generator": f"a generator with {copy}, {rows}",
        }[evaluation.weights]

    @property
    def under_way(self) -> bool:
        return bool(self._name)

    def complete(self) -> None:
        """Wait for the current evaluation."""
        self._pipeline.loop.await_evaluation(self._name)

    def finish(self, now: float) -> None:  # noqa: ARG002
        """Abandon the current evaluation, if any, and wait until its weights are written."""
        if self._name:
            log.info("the evaluation under way is abandoned; a resumed run starts another")
        self._await_weights()

    def _await_weights(self) -> None:
        if self._saving is not None:
            self._saving.join()

    # ------------------------------------------------------------ as observer

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if self._name and isinstance(event, records.WeightsApplied) and event.pinned:
            self._begin(event.version)
        for command in commands if self._name else ():
            match command:
                case records.StartRows(grants=grants) if self._version < 0:
                    for grant in grants:
                        if grant.ticket.evaluation == self._name:
                            self._begin(grant.ticket.version)
                case records.SampleEvaluated(name=self._name):
                    self._results.append(command)
                case records.EvaluationDone(name=self._name, dropped=dropped):
                    self._end(dropped)
        versions, last = self._pipeline.loop.conductor.versions, self._config.training.versions
        if not self._name and self._next <= versions.applied < last:
            self._name, self._version, self._results = f"during-{versions.applied}", -1, []
            background = self._config.evaluation.weights != "pause"
            self._pipeline.loop.submit_later(records.Evaluate(self._name, self._episodes, background))

    def _begin(self, version: int) -> None:
        """Start to save the pinned version's weights while the weights bus still has them."""
        if self._version < 0:
            self._version, self._next = version, version + self._every
            self._saving = threading.Thread(target=self._save, args=(version,), name="evaluated weights")
            self._saving.start()

    def _save(self, version: int) -> None:
        try:
            found, weights = self._pipeline.weights.read(version)
            if found == version:
                save_policy(weights, self._config, self._best.path(version), version, self._pipeline.spec)
            else:
                log.warning("version %d is evaluated, but its weights were replaced before they were saved", version)
        except OSError as error:
            log.error("the weights of version %d cannot be saved (%s); make room", version, error.strerror)

    def _end(self, dropped: int) -> None:
        self._name = ""
        self._await_weights()
        if not dropped:
            self._on_results(self._version, self._results)
            return
        log.warning(
            "the evaluation of version %d is abandoned: %d of its %d episodes ended; the next one is of version %g",
            self._version,
            len(self._results),
            len(self._episodes),
            self._next,
        )
        self._best.forget(self._version)


class BestCheckpoints:
    """Best checkpoints of the run in `folder`; extends the list of a resumed run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._file = folder / EVALUATIONS_FILE
        self.listed: list[dict[str, Any]] = []
        try:
            if self._file.is_file():
                self.listed = _entries(json.loads(self._file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise RunFolderError(
                f"{self._file} is damaged ({error}); remove it to continue without its results"
            ) from error

    @property
    def newest(self) -> int:
        """The newest listed version; 0 before the first."""
        return max((entry["version"] for entry in self.listed), default=0)

    def path(self, version: int) -> Path:
        """File of a version's weights, whether or not the version is listed."""
        return self._folder / STATES / f"policy-{version:06d}.pt"

    def rewind(self, version: int) -> None:
        """Remove entries newer than `version`, from which the run resumes."""
        self.listed = [entry for entry in self.listed if entry["version"] <= version]
        self._write()

    def add(self, version: int, tallies: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """List an evaluation and return its entry. The weights are in `path(version)`, unless saving them failed.

        tallies: by action mode, greedy or sampled; the first one determines the rank. OSError: the list cannot be
        written.
        """
        entry = {"version": version, **tallies}
        self.listed = [*(other for other in self.listed if other["version"] != version), entry]
        self._write()
        return entry

    def forget(self, version: int) -> None:
        """Delete the weights of a version whose evaluation was abandoned."""
        if not any(entry["version"] == version for entry in self.listed):
            self.path(version).unlink(missing_ok=True)

    def best(self) -> dict[str, Any] | None:
        """Entry of the policy in `best.pt`; None before the first."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def _ranked(self) -> list[dict[str, Any]]:
        present = [entry for entry in self.listed if self.path(entry["version"]).is_file()]
        return sorted(present, key=_rank_key, reverse=True)

    def _write(self) -> None:
        write_json(self._file, self.listed)
        ranked = self._ranked()
        kept = {self.path(entry["version"]) for entry in ranked[: self._keep]}
        best = self._folder / BEST_FILE
        if not ranked:
            best.unlink(missing_ok=True)
        elif not (best.is_file() and best.samefile(self.path(ranked[0]["version"]))):
            with atomic_write(best) as unfinished:
                unfinished.unlink(missing_ok=True)
                link_or_copy(self.path(ranked[0]["version"]), unfinished)
        for path in (self._folder / STATES).glob("policy-*.pt*"):
            if path not in kept and path.is_file():
                path.unlink()


def _entries(content: Any) -> list[dict[str, Any]]:
    """Parse the content of evaluations.json. ValueError: it has another form."""
    try:
        entries = [{**entry, "version": int(entry["version"])} for entry in content]
        sum(sum(_rank_key(entry)) for entry in entries)
    except (LookupError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"it is not a list of evaluations: {type(error).__name__}: {error}") from error
    return entries


def _rank_key(entry: dict[str, Any]) -> tuple[float, float]:
    tally = deciding(entry)
    return tally["low"] or 0.0, tally["mean_return"]
