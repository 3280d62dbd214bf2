"""Writes the scalars of a run to `metrics.jsonl`, one JSON object a line, and to TensorBoard.

A name is `group/name`, in one of the documented `GROUPS`; other groups are rejected, so that the first run finds the
mistake. docs/metrics.md has every name. Step is the trainer's update (evaluation: the version).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from polyrhythm.files import atomic_write
from polyrhythm.observe.log_file import LogFile, warn_of_loss

if TYPE_CHECKING:
    from tensorboard.summary import Writer

    from polyrhythm.observe.prometheus import PrometheusEndpoint

log = logging.getLogger(__name__)

#: Metrics of each group. Names follow public systems where these have one.
GROUPS: Mapping[str, str] = {
    "env": (
        "training episodes that ended since the update before, absent if none did: episodes (how many), return, "
        "success_once (also by task index, /task_N; null if none reported success), episode_len in env steps, the "
        "environment's own as metrics/NAME; "
        "samples of the update (episodes or segments): sample_env_steps, sample_chunk_steps; sample_score, by the "
        "reward function"
    ),
    "staleness": (
        "trainer's version minus a sample's oldest behaviour version: lag_mean, lag_max; samples in whose middle new "
        "weights came: partial_ratio, total_partial_num, and max_partial_span, by how many versions; with a lag: "
        "stale_trajectory_processed (samples), stale_samples_processed (groups)"
    ),
    "rollouter": (
        "since the update before: idle_ratio, share of row-seconds in which a row had no ticket; batch_rows, mean of "
        "training's passes; padding_ratio, share of padding in them"
    ),
    "trainer": "idle_ratio: share of the time since the update before in which it neither trained nor published",
    "time/env": "step: seconds inside the environments since the update before, all simulators together",
    "time/rollout": "forward: seconds of forward passes and weight changes since the update before, all generators",
    "time/actor": "update: seconds that this update took the trainer",
    "train/actor": "policy_loss, ratio, clip_fraction, approx_kl, proximal_approx_kl, behav_approx_kl, grad_norm, …",
    "train/critic": "value_loss, explained_variance, lr (if it has its own)",
    "train/sft": "supervised warm start: loss, grad_norm",
    "samples": "the ledger's counts by state; dropped/<reason>",
    "throughput": (
        "transitions: env steps of all samples that finished since training began, over all parts of the run; "
        "transitions_per_s: of those that finished since the update before"
    ),
    "stations": (
        "utilisation/NAME: share of the last ten seconds in which each was busy; faults: stations lost so far, over "
        "all parts of the run"
    ),
    "hosts": (
        "in a run on several: utilisation/HOST, the mean of its stations' in the last ten seconds; faults/HOST: "
        "stations lost there so far, over all parts of the run"
    ),
    "transport": "dropped_messages: so far in this part of the run, by main and all stations, launcher local",
    "evaluation": (
        "held-out episodes, greedy/, sampled/ and swapped/: rate of success, low, high (Wilson 95%; null if no episode "
        "reported it), mean_return, the environment's own as metrics/NAME"
    ),
}


class MetricsWriter:
    """Writer of `<folder>/metrics.jsonl` and, optionally, of `<folder>/tensorboard`.

    Each line is written at once: updates are seconds apart, and a killed run keeps its last one. TensorBoard is
    flushed when `flush_s` seconds of the given times have passed. A resumed run appends. Lines that cannot be written,
    as on a full disk, are lost with one warning. endpoint: gets the newest numbers too. OSError: the files cannot be
    opened.
    """

    def __init__(
        self,
        folder: Path,
        tensorboard: bool = True,
        flush_s: float = 10.0,
        endpoint: PrometheusEndpoint | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = _tensorboard_writer(folder / "tensorboard") if tensorboard else None
        self._folder, self._flush_s, self._flushed_s = folder, flush_s, 0.0
        self._lines, self._endpoint = LogFile(folder / "metrics.jsonl"), endpoint

    def log(self, step: int, values: Mapping[str, float | None], time_s: float) -> None:
        """Record scalars of one step. time_s: seconds since the run began. A number that is not finite becomes null; so
        does None, of which TensorBoard and the endpoint get nothing."""
        check_names(values)
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        finite = {name: number if math.isfinite(number := numbers.get(name, math.nan)) else None for name in values}
        line = json.dumps({"step": step, "time_s": round(time_s, 3), **finite}, allow_nan=False)
        self._lines.write(line + "\n")
        if self._endpoint:
            self._endpoint.take(step, numbers)
        if self._tensorboard:
            try:
                self._draw(self._tensorboard, step, numbers, time_s)
            except OSError as error:
                self._give_up_tensorboard(error)

    def _draw(self, board: Writer, step: int, numbers: Mapping[str, float], time_s: float) -> None:
        for name, value in numbers.items():
            board.add_scalar(name, value, step)
        if time_s - self._flushed_s >= self._flush_s:
            board.flush()
            self._flushed_s = time_s

    def _give_up_tensorboard(self, error: OSError) -> None:
        """Stop writing TensorBoard files: their writer cannot continue after an error. metrics.jsonl has the same."""
        warn_of_loss(self._folder / "tensorboard", error)
        self._tensorboard = None

    def rewind(self, step: int) -> None:
        """Remove the lines of updates from `step` on, which are redone after the trainer was lost."""
        self._lines.close()
        path, failed = self._folder / "metrics.jsonl", self._lines.failed
        try:
            rewind(self._folder, step)
        except OSError as error:
            warn_of_loss(path, error, again=failed)
            failed = True
        self._lines = LogFile(path)
        self._lines.failed = failed

    def close(self) -> None:
        """Flush and close both files; a second call does nothing."""
        self._lines.close()
        if self._tensorboard:
            try:
                self._tensorboard.close()
            except OSError as error:
                self._give_up_tensorboard(error)
            self._tensorboard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError if a name belongs to no group."""
    for name in names:
        if not any(name.startswith(f"{group}/") for group in GROUPS):
            raise ValueError(f"metric {name!r} belongs to no documented group; use one of {', '.join(GROUPS)}")


def last_time_s(folder: Path) -> float:
    """Time of the latest line, in seconds since the run began; 0 if no line can be read."""
    try:
        lines = _lines(folder)
    except OSError:
        return 0.0
    return max((_time_s(line) for line in lines), default=0.0)


def _time_s(line: str) -> float:
    """The line's time; 0 for a truncated line."""
    try:
        time_s = float(json.loads(line)["time_s"])
    except (ValueError, TypeError, KeyError):
        return 0.0
    return time_s if math.isfinite(time_s) else 0.0


def has_updates(folder: Path) -> bool:
    """Whether a line, even a truncated one, is of an update of reinforcement learning."""
    try:
        return any('"throughput/' in line for line in _lines(folder))
    except OSError:
        return False


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics; damaged ones are left out, and all if the file cannot be read."""
    try:
        return [content for line in _lines(folder) if (content := _content(line)) is not None]
    except OSError:
        return []


def _lines(folder: Path) -> list[str]:
    """The lines of metrics.jsonl, if there is one; a byte that is not UTF-8 damages its own line only."""
    path = folder / "metrics.jsonl"
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def rewind(folder: Path, step: int, version: int | None = None) -> None:
    """Remove the lines of updates from `step` on, before they are written again; keep those of phases.

    version: also remove the evaluations of later versions, whose weights are trained again.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return
    found = _lines(folder)
    if damaged := [str(number) for number, line in enumerate(found, 1) if _content(line) is None]:
        log.warning("%s: removed damaged lines: %s", path, ", ".join(damaged))
    lines = [line for line in found if _is_kept(line, step, version)]
    with atomic_write(path) as unfinished:
        unfinished.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _is_kept(line: str, step: int, version: int | None) -> bool:
    """Whether a line is early enough, or of a phase; False for a damaged line."""
    content = _content(line)
    if content is None:
        return False
    if any(name.startswith("throughput/") for name in content):
        return bool(content["step"] < step)
    evaluation = any(name.startswith("evaluation/") for name in content)
    return version is None or not evaluation or bool(content["step"] <= version)


def _content(line: str) -> dict[str, Any] | None:
    """The parsed line; None if it is truncated or damaged."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) and type(content.get("step")) is int else None


def _tensorboard_writer(folder: Path) -> Writer:
    from tensorboard.summary import Writer

    return Writer(str(folder))
