"""Runs jobs as processes, as many at once as the machine has room for, and keeps their results.

    DIR/sweep.json              what the sweep is, the combinations that an optimizer proposed, and the results so far
    DIR/<settings>-s<seed>/     a run; job/sweep.log has what its process printed

A result is written when its run has ended, also a failure. If the sweep is killed, its runs save and stop; the next
call goes on with them (`resume=auto`), keeps the results and tries failed runs again, each with a line that says so.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyrhythm.errors import RunFolderError
from polyrhythm.files import write_json
from polyrhythm.observe.run_folder import CONFIG_FILE, JOB_FOLDER, LOCK_FILE, SUMMARY_FILE
from polyrhythm.plugins.sweep.plan import JobResult, SweepJob, SweepPlan

log = logging.getLogger(__name__)

SWEEP_FILE, LOG_FILE = "sweep.json", "sweep.log"
#: Seconds that a run has to save and stop.
_STOP_S = 120.0


@dataclass(slots=True)
class SweepJournal:
    """Content of sweep.json. results: by `name@versions`; proposed: combinations of an optimizer, in order."""

    folder: Path
    recipe: str
    results: dict[str, JobResult] = field(default_factory=dict)
    proposed: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, recipe: str) -> SweepJournal:
        """Read it, or begin one in a folder from `take_sweep_folder`. RunFolderError: it is of another recipe, or
        damaged."""
        file = folder / SWEEP_FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            results = {name: JobResult(**own) for name, own in found["results"].items()}
            journal = cls(folder, found["recipe"], results, found["proposed"])
        except FileNotFoundError:
            journal = cls(folder, recipe)
            journal.write()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunFolderError(
                f"{file} is damaged ({error}); remove it: the runs beside it are used again"
            ) from error
        if journal.recipe != recipe:
            raise RunFolderError(f"folder {folder} holds a sweep of {journal.recipe}, not of {recipe}; name another")
        return journal

    def forget(self, name: str) -> None:
        """Drop the results of a run that is not there any more; that it had failed stays known."""
        kept = {key: result for key, result in self.results.items() if key.rpartition("@")[0] != name or result.failure}
        if len(kept) < len(self.results):
            self.results = kept
            self.write()

    def write(self) -> None:
        results = {name: asdict(result) for name, result in self.results.items()}
        content = {"recipe": self.recipe, "proposed": self.proposed, "results": results}
        write_json(self.folder / SWEEP_FILE, content)


def take_sweep_folder(folder: Path) -> None:
    """Make the folder of a sweep. RunFolderError: it holds something else, or cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {one.name for one in folder.iterdir()}
    except OSError as error:
        raise RunFolderError(f"folder {folder} cannot be made ({error.strerror}); name another") from error
    if names - {LOCK_FILE} and SWEEP_FILE not in names:
        raise RunFolderError(f"folder {folder} is not empty and holds no sweep; name another")


@dataclass(frozen=True, slots=True)
class RunningJob:
    job: SweepJob
    process: subprocess.Popen[bytes]
    slot: int
    began: float


class Sweep:
    """Runs the jobs of a plan. name_of: folder of a job's run; words_of: its settings; versions_of: those it has in
    all; slots: device numbers, as text for CUDA_VISIBLE_DEVICES, for each run at the same time; None leaves them as
    they are. A known result is used only while its run is there."""

    def __init__(
        self,
        journal: SweepJournal,
        plan: SweepPlan,
        name_of: Callable[[SweepJob], str],
        words_of: Callable[[SweepJob], Sequence[str]],
        versions_of: Callable[[SweepJob], int],
        slots: Sequence[str | None],
    ) -> None:
        self._journal, self._plan, self._name_of, self._words_of = journal, plan, name_of, words_of
        self._versions_of = versions_of
        self._slots, self._free = slots, list(range(len(slots)))
        self._running: dict[int, RunningJob] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.results: dict[SweepJob, JobResult] = {}
        #: How the results came about: kept, resumed, again (it had failed before its first save) or new.
        self.origins: Counter[str] = Counter()

    def run(self) -> None:
        """Run all jobs. KeyboardInterrupt: every run has saved and stopped, or was killed after its deadline."""
        try:
            while True:
                while self._free and (job := self._plan.next()) is not None:
                    self._begin(job)
                if not self._running:
                    return
                self._end(self._running.pop(self._ended.get()))
        finally:
            self._stop()

    def folder_of(self, job: SweepJob) -> Path:
        return self._journal.folder / self._name_of(job)

    def _key(self, job: SweepJob) -> str:
        return f"{self._name_of(job)}@{self._versions_of(job)}"

    def _begin(self, job: SweepJob) -> None:
        folder = self.folder_of(job)
        if not (folder / CONFIG_FILE).is_file():
            self._journal.forget(self._name_of(job))
        known = self._journal.results.get(self._key(job))
        done = known is not None and known.tally is not None
        if not done and (summary := _summary(folder, self._versions_of(job))) is not None:
            known, done = self._keep(job, _result(summary)), True
        if known is not None and done:
            log.info("%s: kept, %s", self._name_of(job), in_words(known.tally or {}))
            self.origins["kept"] += 1
            self.results[job] = known
            self._plan.end(job, known)
            return
        origin = "resumed" if (folder / CONFIG_FILE).is_file() else "new" if known is None else "again"
        self.origins[origin] += 1
        (folder / JOB_FOLDER).mkdir(parents=True, exist_ok=True)
        slot = self._free.pop(0)
        variables = dict(os.environ)
        if (devices := self._slots[slot]) is not None:
            variables["CUDA_VISIBLE_DEVICES"] = devices
        words = ["train", *self._words_of(job), "resume=auto", "--out", str(folder)]
        with (folder / JOB_FOLDER / LOG_FILE).open("ab") as output:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "polyrhythm.plugins.sweep.child", str(os.getpid()), str(folder), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then stops its runs
            )
        self._running[process.pid] = RunningJob(job, process, slot, time.monotonic())
        threading.Thread(target=self._await, args=(process,), name=f"run {process.pid}", daemon=True).start()
        after = f" after it had failed: {known.failure}" if known is not None else ""
        log.info("%s: %s%s (%d running)", self._name_of(job), origin, after, len(self._running))

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._ended.put(process.pid)

    def _end(self, running: RunningJob) -> None:
        job, status = running.job, running.process.returncode
        self._free.append(running.slot)
        folder, took = self.folder_of(job), time.monotonic() - running.began
        summary = _summary(folder, self._versions_of(job)) if status == 0 else None
        if summary is not None:
            result = self._keep(job, _result(summary))
            log.info("%s: %s, in %.0f s", self._name_of(job), in_words(result.tally or {}), took)
        else:
            result = self._keep(job, JobResult(None, _why(status, folder / JOB_FOLDER / LOG_FILE), took))
            log.warning("%s: failed: %s", self._name_of(job), result.failure)
        self.results[job] = result
        self._plan.end(job, result)

    def _keep(self, job: SweepJob, result: JobResult) -> JobResult:
        self._journal.results[self._key(job)] = result
        self._journal.write()
        return result

    def _stop(self) -> None:
        """Let the runs save and stop; kill those that do not within `_STOP_S`."""
        if self._running:
            log.info("%d runs save and stop …", len(self._running))
        for running in self._running.values():
            running.process.terminate()
        deadline = time.monotonic() + _STOP_S
        for running in self._running.values():
            try:
                running.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        self._running.clear()


def _summary(folder: Path, versions: int) -> dict[str, Any] | None:
    """Summary of the finished run with this many versions; None: there is none yet."""
    from polyrhythm.config.recipes import read

    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        trained = read(folder / CONFIG_FILE)["training"]["versions"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return summary if versions == trained and _tally(summary) is not None else None


def _tally(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return summary.get("after") or summary.get("after_sampled")


def _result(summary: Mapping[str, Any]) -> JobResult:
    tally = _tally(summary) or {}
    kept = {name: tally[name] for name in ("rate", "low", "high", "successes", "episodes", "mean_return")}
    return JobResult(kept, "", float(summary["wall_s"]["total"]))


def _why(status: int, file: Path) -> str:
    """Why a run failed: the signal that killed it, or the last line that its process printed."""
    if status < 0:
        return f"killed by signal {-status}"
    lines = [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("polyrhythm: ")]
    return f"{(errors or lines or ['it printed nothing'])[-1].strip()} (status {status})"


def in_words(tally: Mapping[str, Any]) -> str:
    from polyrhythm.cli.show import result

    return result(tally)
