"""Reward functions that misbehave on purpose, in whatever process they are."""

from __future__ import annotations

import os
import time

from tests.process.settings import once

from polyrhythm.specs import SampleView, Score


def one(sample: SampleView) -> float:
    """The same for all."""
    return 1.0


def by_seed(sample: SampleView) -> float:
    return float(sample.seed % 7)


class Faulty:
    """Misbehaves once in all processes: raises, returns NaN, hangs, or ends its process. marker: a file that says that
    it has."""

    def __init__(self, marker: str, fault: str) -> None:
        self._marker, self._fault = marker, fault

    def __call__(self, sample: SampleView) -> Score:
        if once(self._marker):
            if self._fault == "raise":
                raise ValueError("no opinion")
            if self._fault == "nan":
                return Score(float("nan"))
            if self._fault == "hang":
                time.sleep(1000)
            if self._fault == "exit":
                os._exit(7)
        return Score(1.0, success=True)


def picky(sample: SampleView, *, share: int) -> float:
    """Has no opinion on one seed in `share`."""
    if sample.seed % share == 0:
        raise ValueError("no opinion")
    return 1.0


def slow(sample: SampleView) -> float:
    time.sleep(0.2)
    return 1.0
