"""Times units of work by amount, without what other programs take, within a share of the time that is left."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import psutil
import torch

from polyrhythm.plugins.planning.profile import Timing, Work, WorkName
from polyrhythm.runtime.devices import CPU
from polyrhythm.scheduler.inference.batching import powers

#: Most measurements of one amount, and fewest where time is left.
_MOST, FEWEST = 200, 3
#: Share of the times that must be without interruption for the others to be left out.
_CLEAN = 0.1
#: Least share of the time in which work counts as awake.
_LEAST_AWAKE = 0.01
#: CPU time, time without a core, and turns of this thread (Linux).
_SCHEDULED = Path("/proc/thread-self/schedstat")
#: Bytes that are read between two times: more than a core's own caches.
_OTHER_BYTES = 16 * 2**20


class Measurements:
    """Times of works by their amount. The first of each amount is not counted, as it warms up.

    On a machine that does other things too, a work waits for a core. Linux accounts for this wait, which is not
    counted; and times in which the process was interrupted are left out, if enough others remain: caches were cold.
    device: of the work, which is waited for. cold: other memory is read between two times, as in a run, where stations
    wait or alternate; with warm caches a small pass takes half as long.
    """

    def __init__(self, device: str = CPU, *, cold: bool = True) -> None:
        self.device, self._other = device, np.ones(_OTHER_BYTES // 8 if cold else 0)
        self._times: dict[tuple[WorkName, int], list[tuple[float, bool]]] = {}
        self._memory: dict[tuple[WorkName, int], int] = {}
        self._worked = self._computed = 0.0
        self._others = {*psutil.Process().children()}

    @contextmanager
    def time(self, name: WorkName, amount: int) -> Iterator[None]:
        """Measure the block as one unit of this work."""
        waited, interrupted = core_wait_s(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        begin, computed = time.perf_counter(), time.process_time()
        yield
        if self.device != CPU:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - begin
        clean = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == interrupted
        computed, waited = time.process_time() - computed, core_wait_s() - waited
        self._worked, self._computed = self._worked + seconds - waited, self._computed + computed
        self._times.setdefault((name, amount), []).append((max(0.0, seconds - waited), clean))

    @property
    def awake(self) -> float:
        """Share of the time in which this process computed; 1 if it has children that are newer than this, as they may
        do its work."""
        if {*psutil.Process().children()} - self._others or self._worked <= 0:
            return 1.0
        return min(1.0, max(_LEAST_AWAKE, self._computed / self._worked))

    def repeat(self, run: Callable[[], object], name: WorkName, amount: int, budget: Budget) -> None:
        """Call `run`, which measures the work itself, until the time is over, at least twice; and the peak memory."""
        with _peak(self.device) as peak:
            for count in range(_MOST):
                if budget.over and count > 1:
                    break
                self._other.sum()
                run()
        self._memory[name, amount] = max(0, peak())

    def works(self) -> dict[WorkName, Work]:
        """Each work with the statistics of its amounts."""
        found: dict[WorkName, list[Timing]] = {}
        for (name, amount), times in sorted(self._times.items()):
            found.setdefault(name, []).append(
                timing_of(amount, _undisturbed(times), self._memory.get((name, amount), 0))
            )
        return {name: Work(timings=tuple(timings)) for name, timings in found.items()}


def core_wait_s() -> float:
    """Seconds for which this thread was ready and had no core, since it began; 0 where the system does not say."""
    try:
        return int(_SCHEDULED.read_text(encoding="ascii").split()[1]) * 1e-9
    except OSError:
        return 0.0


def _undisturbed(times: Sequence[tuple[float, bool]]) -> list[float]:
    """The times but the first, without interrupted ones unless they are too many."""
    counted = times[1:] or times
    clean = [seconds for seconds, is_clean in counted if is_clean]
    return clean if len(clean) >= max(FEWEST, _CLEAN * len(counted)) else [seconds for seconds, _ in counted]


def timing_of(amount: int, seconds: Sequence[float], memory: int = 0) -> Timing:
    """Statistics of these times."""
    median, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99)).tolist()
    mean = fmean(seconds)
    return Timing(amount=amount, count=len(seconds), mean_s=mean, median_s=median, p90_s=p90, p99_s=p99, memory=memory)


@dataclass(slots=True)
class Budget:
    """Time that is left, by `time.monotonic`. Each call of `part` gets an equal share of what is left."""

    end: float
    parts: int

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end

    def part(self) -> Budget:
        now = time.monotonic()
        share = (self.end - now) / max(1, self.parts)
        self.parts -= 1
        return Budget(now + share, 1)


def sizes(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return sorted({*(n for n in powers(most) if n < most), most})


@contextmanager
def _peak(device: str) -> Iterator[Callable[[], int]]:
    """Bytes by which the memory grew meanwhile: allocated on the device, else resident in this process."""
    if device == CPU:
        before = psutil.Process().memory_info().rss
        yield lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        return
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    yield lambda: torch.cuda.max_memory_allocated(device) - allocated


def held_on(device: str) -> int:
    """Bytes that torch has allocated on the device, or that are resident in this process."""
    if device == CPU:
        return int(psutil.Process().memory_info().rss)
    return int(torch.cuda.memory_allocated(device))
