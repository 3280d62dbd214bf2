"""CPU contention: the share of its usual CPU that other processes leave to the run.

Contention slows a run without any fault. Where others leave less CPU than the run usually takes, the expected
throughput is lowered by the same factor:

    share = (cores - what others take) / what the run usually takes        CPU seconds per second, within `LEAST`..1

Without other processes that is 1. It is measured only while the run has work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

import psutil

from polyrhythm_bench.chaos.throughput_window import KEPT, WINDOW_S

_EVERY_S = 0.25
#: Least factor: this much of the usual throughput is always expected.
LEAST = 0.2

#: (CPU seconds of the whole machine, those of the run) since some time in the past.
Measure = Callable[[], tuple[float, float]]


class CpuContention:
    """CPU that other processes left in the last `WINDOW_S` seconds, beside the usual CPU of the run."""

    def __init__(self, measure: Measure, cores: int) -> None:
        self._measure, self._cores = measure, cores
        self._samples: deque[tuple[float, float, float]] = deque()
        self._usual: deque[float] = deque(maxlen=KEPT)

    def look(self, now: float) -> None:
        """Measure, if the last time was long enough ago."""
        samples = self._samples
        if samples and now < samples[-1][0] + _EVERY_S:
            return
        samples.append((now, *self._measure()))
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()

    def keep(self) -> None:
        """The present window is undisturbed."""
        if len(self._samples) > 1:
            self._usual.append(self._taken()[1])

    def share(self) -> float:
        """The fraction of the run's usual CPU that others left, within `LEAST`..1."""
        if len(self._samples) < 2 or not self._usual:
            return 1.0
        whole, own = self._taken()
        needed = median(self._usual)
        left = self._cores - (whole - own)
        return min(1.0, max(LEAST, left / needed)) if needed > 0 else 1.0

    def _taken(self) -> tuple[float, float]:
        """CPU seconds per second of the machine and of the run, over the window."""
        (begin, *before), (end, *after) = self._samples[0], self._samples[-1]
        whole, own = ((late - early) / (end - begin) for early, late in zip(before, after, strict=True))
        return whole, own


def of_processes(pids: Callable[[], Iterable[int]]) -> CpuContention:
    """The load of this machine, where the run is this process, those with these ids, and those that have been."""
    me = psutil.Process()

    def measure() -> tuple[float, float]:
        whole = psutil.cpu_times()
        busy = sum(whole) - whole.idle - getattr(whole, "iowait", 0.0) - _guests(whole)
        mine = me.cpu_times()
        own = mine.user + mine.system + mine.children_user + mine.children_system
        return busy, own + sum(_cpu_s(pid) for pid in pids())

    return CpuContention(measure, psutil.cpu_count() or 1)


def _guests(times: object) -> float:
    """Counted in user and nice already."""
    return getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process; 0 if it has been reaped, then they are among its parent's."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
