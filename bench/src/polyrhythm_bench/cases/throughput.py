"""Transitions per second of whole runs, beside a plain loop that does the same work.

An environment that costs next to nothing, a small MLP policy, PPO: the overhead of the system is measured. Three ways
to run it, each in a process of its own, take turns: `plain` (`plain_loop`), `inline` and `local` (the launchers, one
slot with all rows; local has a simulator, a generator and a trainer in three more processes). Every turn is so many
updates on one whole episode from each row. Checkpoints and metrics are left out everywhere.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self

from polyrhythm.imports import keep_freed_memory
from polyrhythm_bench.cases import memory
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.worker import Answer, Worker

ROWS = (16, 256)
#: Least throughput of `inline`, by rows, as a fraction of the plain loop's, that the design allows.
LIMITS = {16: 0.8, 256: 1.0}
WAYS = ("plain", "inline", "local")
_EPISODE = 128
_NEVER = 1_000_000


def run(rows: Sequence[int] = ROWS, updates: int = 0, repeats: int = 5) -> dict[str, Any]:
    """Measure every number of rows in `repeats` turns of `updates` updates (0: some 130,000 transitions).

    Returns for each way and number of rows the medians over the turns: transitions_per_s, cpu_s_per_million,
    training_share (of the wall time; local trains beside the rollout), pss_mb of all its processes; `ratio_inline` and
    `ratio_local`, medians of the ratios to the plain loop in the same turn; and what `memory` measures.
    """
    sizes = {str(count): measure(count, updates or max(2, 1024 // count), repeats) for count in rows}
    within = [sizes[str(count)]["ratio_inline"] >= limit for count, limit in LIMITS.items() if str(count) in sizes]
    return {"rows": sizes, "limits_inline": LIMITS, "within_limits": all(within), **memory.run()}


def measure(rows: int, updates: int, repeats: int) -> dict[str, Any]:
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        here = "polyrhythm_bench.cases.throughput"
        workers = {way: stack.enter_context(Worker(f"{here}:{way}", rows=rows)) for way in WAYS}
        for worker in workers.values():
            worker.begin(updates=2)
        for worker in workers.values():
            worker.answer()
        for _ in range(repeats):
            for way, worker in workers.items():
                turns[way].append(worker.ask(updates=updates))
    found: dict[str, Any] = {way: _medians(each) for way, each in turns.items()}
    for way in WAYS[1:]:
        pairs = zip(turns[way], turns["plain"], strict=True)
        ratios = [turn["transitions_per_s"] / plain["transitions_per_s"] for turn, plain in pairs]
        found[f"ratio_{way}"] = statistics.median(ratios)
        found[f"ratios_{way}"] = ratios
    return found


def _medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def config(rows: int, launcher: str) -> Any:
    from polyrhythm.config.load import validate

    return validate(
        {
            "name": "throughput",
            "launcher": launcher,
            "env": {"type": "polyrhythm_bench.workloads.drift_env:DriftSettings", "episode_steps": _EPISODE},
            "policy": {"type": "gaussian"},
            "rollout": {"rows": rows},
            "batching": {"type": "dynamic", "max_rows": rows},
            "freshness": {"max_lag": 1 if launcher == "local" else 0},
            "training": {
                "versions": _NEVER, "mini_batch_samples": rows, "epochs": 4, "minibatch_steps": max(512, rows * 32)
            },
            "algorithm": {"proximal": "behavior"},
            "checkpoint": {"every_versions": _NEVER},
        }
    )  # fmt: skip


@contextmanager
def plain(rows: int) -> Iterator[Answer]:
    """The plain loop."""
    from polyrhythm.pipeline.validation.check import validate_run
    from polyrhythm_bench.harness.plain_loop import PlainLoop

    loop = PlainLoop(validate_run(config(rows, "inline")))

    def turn(updates: int) -> dict[str, float]:
        with _Turn(rows * updates * _EPISODE) as turn:
            before = loop.training_s
            for _ in range(updates):
                loop.update()
            turn.training_s = loop.training_s - before
        return turn.figures

    yield turn


@contextmanager
def inline(rows: int) -> Iterator[Answer]:
    """All stations in one process."""
    with _pipeline(rows, "inline") as answer:
        yield answer


@contextmanager
def local(rows: int) -> Iterator[Answer]:
    """Each station in a process of its own."""
    with _pipeline(rows, "local") as answer:
        yield answer


@contextmanager
def _pipeline(rows: int, launcher: str) -> Iterator[Answer]:
    from polyrhythm.pipeline.build import build_pipeline
    from polyrhythm.pipeline.context import RunContext
    from polyrhythm.pipeline.validation.check import validate_run

    keep_freed_memory()  # as the command line does
    checked = validate_run(config(rows, launcher))
    with tempfile.TemporaryDirectory(prefix="polyrhythm-") as folder:
        own = Path(folder) if launcher == "local" else None
        with closing(build_pipeline(RunContext(checked.config, folder=own))) as pipeline:
            loop = pipeline.loop

            def training_s() -> float:
                return pipeline.launcher.hosting.statistics(fresh=True)["trainer"].get("busy_s", 0.0)

            def turn(updates: int) -> dict[str, float]:
                before = training_s()
                with _Turn(rows * updates * _EPISODE) as turn:
                    loop.train_until(loop.conductor.versions.trained + updates)
                turn.training_s = training_s() - before
                return turn.figures

            yield turn


class _Turn:
    """Measures what happens within its block."""

    def __init__(self, transitions: int) -> None:
        self._transitions, self.training_s = transitions, 0.0

    def __enter__(self) -> Self:
        self._cpu_s, self._began = resources.cpu_s(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wall_s = time.perf_counter() - self._began
        self._cpu_s = resources.cpu_s() - self._cpu_s
        self._pss_mb = resources.pss_mb()

    @property
    def figures(self) -> dict[str, float]:
        return {
            "transitions_per_s": self._transitions / self._wall_s,
            "cpu_s_per_million": 1e6 * self._cpu_s / self._transitions,
            "training_share": self.training_s / self._wall_s,
            "pss_mb": self._pss_mb,
        }
