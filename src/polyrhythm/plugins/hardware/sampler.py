"""Samples the main machine's cores and GPUs every two seconds, in a thread of the main process.

Reading a GPU can take long, as where its driver is loaded anew, so the thread that decides never does it. Stations on
other hosts are not measured.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import psutil

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.hooks import RunHooks, RunPart
from polyrhythm.plugins.hardware.gpus import Gpus, Reading, open_gpus
from polyrhythm.plugins.hardware.processor import cpu_s_of, family

log = logging.getLogger(__name__)

_SAMPLE_S = 2.0
#: Seconds that the end of a run waits for a reading.
_CLOSE_S = 5.0


class Samples:
    """What was read since the last update: means of shares, the largest memory. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[str, list[float]] = {}
        self._last: dict[str, float] = {}

    def add(self, cores: Mapping[str, float], gpus: Mapping[int, Reading]) -> None:
        """cores: metrics of their use."""
        found: dict[str, float | None] = dict(cores)
        for index, reading in gpus.items():
            found |= {f"gpu/{index}/{name}": value for name, value in reading._asdict().items()}
        with self._lock:
            for name, value in found.items():
                if value is not None:
                    self._new.setdefault(name, []).append(value)
                    self._last[name] = value

    def take(self) -> dict[str, float]:
        """Metrics since the last call; of shorter updates the last ones."""
        with self._lock:
            new, self._new = self._new, {}
            found = {name: max(own) if name.endswith("memory_gb") else fmean(own) for name, own in new.items()}
            return self._last | found

    def newest(self) -> dict[str, float]:
        with self._lock:
            return dict(self._last)


class CoreUse:
    """Use of the processor cores that this process may use, as shares of all of them; first called by the thread that
    calls `read`."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._last, self._seconds = time.monotonic(), self._processes()
        psutil.cpu_percent(percpu=True)

    def read(self) -> dict[str, float]:
        """Use since the last call, by all programs and by this process with its descendants."""
        shares = psutil.cpu_percent(percpu=True)
        used = [shares[core] for core in self._cores if core < len(shares)] or shares
        now, seconds = time.monotonic(), self._processes()
        new = sum(max(0.0, own - self._seconds.get(process, 0.0)) for process, own in seconds.items())
        passed, self._last, self._seconds = max(now - self._last, 1e-9), now, seconds
        return {"cpu/utilization": fmean(used) / 100.0, "cpu/own": min(1.0, new / passed / len(used))}

    @staticmethod
    def _processes() -> dict[tuple[int, float], float]:
        """Processor seconds so far by process."""
        found = {}
        for process in family():
            with suppress(psutil.Error):  # it has ended
                found[process.pid, process.create_time()] = cpu_s_of(process)
        return found


class HardwarePart(RunPart):
    """The sampling thread of one run, from its start to its end."""

    def __init__(self, find_gpus: Callable[[], Gpus | None] = open_gpus) -> None:
        self._find_gpus, self._samples, self._over = find_gpus, Samples(), threading.Event()
        self._thread = threading.Thread(target=self._sample, name="hardware", daemon=True)

    def on_start(self, folder: Path) -> None:  # noqa: ARG002
        self._thread.start()

    def _sample(self) -> None:
        """Consumes: readings of cores and GPUs. Waits for: the next sample. Unblocked by: that, or the end of the run.
        Produces: samples."""
        gpus = self._find_gpus()
        try:
            cores = CoreUse()
            while not self._over.wait(_SAMPLE_S):
                self._samples.add(cores.read(), gpus.read() if gpus else {})
        except Exception:
            log.exception("use of cores and GPUs is not measured any more; the run goes on")
        finally:
            if gpus:
                gpus.close()

    def metrics(self) -> Mapping[str, float]:
        return self._samples.take()

    def status(self) -> Sequence[str]:
        return (in_words(now),) if (now := self._samples.newest()) else ()

    def close(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)


def in_words(values: Mapping[str, float]) -> str:
    """The newest values in one line: `cores 97%, 60% by this run   gpu 0 43%, 12.3 GB`."""
    by_device: dict[str, list[str]] = {}
    for name, value in values.items():
        device, _, what = name.rpartition("/")
        told = f"{value:.1f} GB" if what == "memory_gb" else f"{value:.0%}" + " by this run" * (what == "own")
        by_device.setdefault("cores" if device == "cpu" else device.replace("/", " "), []).append(told)
    return "   ".join(f"{device} {', '.join(told)}" for device, told in by_device.items())


class HardwareHooks(RunHooks):
    def begin(self, config: RunConfig) -> RunPart:  # noqa: ARG002
        return HardwarePart()


HOOKS = HardwareHooks()
