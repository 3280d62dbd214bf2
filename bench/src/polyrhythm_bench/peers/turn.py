"""Runs one turn of one system in its own processes: reads the question, measures, writes the answer.

A system's module calls `main(run)`. Question and answer are a line of JSON each: the question is the first argument,
the answer goes to standard output, all other output to the log. No process outlives its owner: when the owner's end of
standard input closes, the whole process group ends.

Runs in the environment of every peer, so it imports only modules of this package that need just numpy and psutil.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm_bench.harness import resources
from polyrhythm_bench.peers import groups
from polyrhythm_bench.peers.workload import Sleeping, ZeroCost

Work = Sleeping | ZeroCost


class Meter:
    """A counter of updates that measures from the end of update `warm_up` to the end of update warm_up + updates.

    figures: transitions_per_s, cpu_s_per_million (transitions; all processes), pss_mb (of all processes, at the end),
    seconds.
    """

    def __init__(self, transitions: int, warm_up: int, updates: int) -> None:
        self._transitions, self.warm_up, self.updates = transitions, warm_up, updates
        self._count = 0
        self._began = self._cpu_s = 0.0
        self.figures: dict[str, float] = {}

    @property
    def total(self) -> int:
        """Updates in all."""
        return self.warm_up + self.updates

    @property
    def over(self) -> bool:
        """Whether the measurement is complete."""
        return bool(self.figures)

    def updated(self) -> None:
        """Count a finished update."""
        self._count += 1
        if self._count == self.warm_up:
            self._cpu_s, self._began = resources.cpu_s(), time.perf_counter()
        elif self._count == self.total:
            seconds = time.perf_counter() - self._began
            cpu_s = resources.cpu_s() - self._cpu_s
            transitions = self._transitions * self.updates
            self.figures = {
                "transitions_per_s": transitions / seconds,
                "cpu_s_per_million": 1e6 * cpu_s / transitions,
                "pss_mb": resources.pss_mb(),
                "seconds": seconds,
            }


def work_of(question: dict[str, Any]) -> Work:
    """The workload that a question names, with its settings."""
    settings = question["settings"]
    return Sleeping(**settings) if question["workload"] == "sleeping" else ZeroCost(**settings)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions, Python's among them."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def main(run: Callable[[Work, Meter, dict[str, Any]], dict[str, Any]], packages: Sequence[str]) -> None:
    """Answer the question in the first argument with the settings that `run` returns, the metrics and the versions."""
    threading.Thread(target=groups.end_with_owner, daemon=True).start()
    question = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        work = work_of(question)
        meter = Meter(work.transitions, question["warm_up"], question["updates"])
        settings = run(work, meter, question.get("choice", {}))
        answers.write(json.dumps({**meter.figures, "settings": settings, "versions": versions(packages)}) + "\n")
