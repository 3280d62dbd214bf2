"""Writes the scalars of a run to `metrics.jsonl`, one JSON object per line.

A name is `group/name`, in one of the documented `GROUPS`; other groups are rejected, so that the first run finds the
mistake. docs/metrics.md has every name. Step is the trainer's update (evaluation: the version).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polyrhythm.files import atomic_write
from polyrhythm.observe.log_file import LogFile, warn_of_loss
from polyrhythm.observe.run_folder import METRICS_FILE

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
        "trainer's version minus a sample's oldest behaviour version: lag_mean, lag_max, and the same in updates: "
        "updates_mean, updates_max; samples in whose middle new "
        "weights came: partial_ratio, total_partial_num, and max_partial_span, by how many versions; with a lag: "
        "stale_trajectory_processed (samples), stale_samples_processed (groups)"
    ),
    "rollouter": (
        "since the update before: idle_ratio, share of row-seconds in which a row had no ticket; batch_rows, mean of "
        "training's passes; padding_ratio, share of padding in them; batching dynamic: batch_wait_ratio, share of the "
        "time in which a pass waited out batching.max_wait_ms"
    ),
    "trainer": "idle_ratio: share of the time since the update before in which it neither trained nor published",
    "time/env": "step: seconds inside the environments since the update before, all simulators together",
    "time/rollout": "forward: seconds of forward passes and weight changes since the update before, all generators",
    "time/actor": (
        "update: seconds that this update took the trainer; of these, by the host's clock: collate, targets, proximal, "
        "passes, await_publication, step; publish: of the publication before, which may overlap with the update"
    ),
    "train/actor": "policy_loss, ratio, clip_fraction, approx_kl, proximal_approx_kl, behav_approx_kl, grad_norm, …",
    "train/critic": "value_loss, explained_variance, lr (if it has its own), reward_scale (if there is one)",
    "train/sft": "supervised warm start: loss, grad_norm",
    "samples": "the ledger's counts by state; dropped/<reason>",
    "throughput": (
        "transitions: env steps of all samples that finished since training began, over all parts of the run; "
        "transitions_per_s: of those that finished since the update before; where generators serve by streams, "
        "tokens_per_s and prompt_tokens_per_s: generated in answers that ended, and read of prompts, since the line "
        "before that has them"
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
    """Writer of `<folder>/metrics.jsonl`.

    Each line is written at once: updates are seconds apart, and a killed run keeps its last one. A resumed run appends.
    Failed writes, as on a full disk, lose data with one warning. receivers: also called with step and values. OSError:
    the file cannot be opened.
    """

    def __init__(
        self, folder: Path, receivers: Sequence[Callable[[int, Mapping[str, float | None]], None]] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lines, self._receivers = folder, LogFile(folder / METRICS_FILE), receivers

    def log(self, step: int, values: Mapping[str, float | None], time_s: float) -> None:
        """Record scalars of one step. time_s: seconds since the run began. Numbers that are not finite become null."""
        check_names(values)
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        finite = {name: number if math.isfinite(number := numbers.get(name, math.nan)) else None for name in values}
        line = json.dumps({"step": step, "time_s": round(time_s, 3), **finite}, allow_nan=False)
        self._lines.write(line + "\n")
        for receive in self._receivers:
            receive(step, values)

    def rewind(self, step: int) -> None:
        """Remove the lines of updates from `step` on, which are repeated after the trainer was lost."""
        self._lines.close()
        path, failed = self._folder / METRICS_FILE, self._lines.failed
        try:
            rewind(self._folder, step)
        except OSError as error:
            warn_of_loss(path, error, again=failed)
            failed = True
        self._lines = LogFile(path)
        self._lines.failed = failed

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._lines.close()

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
    times: list[Any] = [line.get("time_s") for line in read_lines(folder)]
    return max((float(x) for x in times if type(x) in (int, float) and math.isfinite(x)), default=0.0)


def has_updates(folder: Path) -> bool:
    """Whether a line, even a truncated one, belongs to an update of reinforcement learning."""
    try:
        return any('"throughput/' in line for line in _lines(folder))
    except OSError:
        return False


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Undamaged lines of the run's metrics; empty if the file cannot be read."""
    try:
        return [content for line in _lines(folder) if (content := _content(line)) is not None]
    except OSError:
        return []


def _lines(folder: Path) -> list[str]:
    """Lines of metrics.jsonl, if it exists; a byte that is not UTF-8 damages only its own line."""
    path = folder / METRICS_FILE
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def rewind(folder: Path, step: int, version: int | None = None) -> None:
    """Remove the lines of updates from `step` on, before they are repeated; lines of phases are kept.

    version: also remove the evaluations of later versions, which are trained again.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        return
    found = _lines(folder)
    if damaged := [str(number) for number, line in enumerate(found, 1) if _content(line) is None]:
        log.warning("%s: removed damaged lines: %s", path, ", ".join(damaged))
    lines = [line for line in found if _is_kept(_content(line), step, version)]
    with atomic_write(path) as unfinished:
        unfinished.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _is_kept(content: Mapping[str, Any] | None, step: int, version: int | None) -> bool:
    """Whether a line is early enough, or of a phase; False for a damaged line, None."""
    if content is None:
        return False
    if any(name.startswith("throughput/") for name in content):
        return bool(content["step"] < step)
    evaluation = any(name.startswith("evaluation/") for name in content)
    return version is None or not evaluation or bool(content["step"] <= version)


def _content(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) and type(content.get("step")) is int else None
