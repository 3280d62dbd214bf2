"""Scalars of a run: `metrics.jsonl`, one object a line, and the same numbers for TensorBoard.

A name is `group/what_unit`, in one of the documented `GROUPS`; another group is refused, so that a misspelt name is
found by the first run and not by an empty chart. Step is the trainer's update (evaluation: the version).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tensorboard.summary import Writer

#: What the names of each group tell.
GROUPS: Mapping[str, str] = {
    "episode": "return, success, length and end of the samples of an update",
    "loss": "policy, value and entropy terms of the loss, as minimised",
    "policy": "drift of the policy: KL, clip fraction, ratio, entropy, explained variance",
    "optimizer": "learning rate, gradient norm, optimizer steps",
    "lag": "versions between a sample's behaviour and the trainer: mean and largest",
    "flow": "ledger, queue and buffer: counts of samples and requests, rows per batch",
    "utilisation": "busy share of each kind of station, 0..1",
    "throughput": "transitions, chunk steps and samples per second",
    "time": "seconds spent, by cause",
    "evaluation": "held-out success rate and return, with intervals",
    "supervised": "loss and learning rate of the supervised warm start",
}


class MetricsWriter:
    """Appends to `<folder>/metrics.jsonl` and, if asked, to `<folder>/tensorboard`.

    Each line is flushed as it is written: updates are seconds apart, and a run that is killed keeps its last one.
    TensorBoard is flushed when `flush_s` seconds of the given times have passed. A resumed run appends.
    """

    def __init__(self, folder: Path, tensorboard: bool = True, flush_s: float = 10.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = _tensorboard_writer(folder / "tensorboard") if tensorboard else None
        self._flush_s, self._flushed_s = flush_s, 0.0
        self._lines: IO[str] = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """Record scalars of one step. time_s: seconds since the run began. A number that is not finite becomes null."""
        numbers = {name: float(value) for name, value in values.items()}
        for name in numbers:
            group, slash, what = name.partition("/")
            if group not in GROUPS or not (slash and what):
                raise ValueError(f"metric {name!r} belongs to no documented group; use {', '.join(GROUPS)}/name")
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        line = json.dumps({"step": step, "time_s": round(time_s, 3), **finite}, allow_nan=False)
        self._lines.write(line + "\n")
        self._lines.flush()
        if self._tensorboard:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
            if time_s - self._flushed_s >= self._flush_s:
                self._tensorboard.flush()
                self._flushed_s = time_s

    def close(self) -> None:
        """Flush and close both files; a second call does nothing."""
        self._lines.close()
        if self._tensorboard:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tensorboard_writer(folder: Path) -> Writer:
    from tensorboard.summary import Writer

    return Writer(str(folder))
