"""The GPUs that this process may use, read through NVIDIA's management library (`nvidia-ml-py`).

Without the library, a driver or a GPU there are none. A number that a device does not have, as a MIG instance has no
utilisation, is left out.

NVML numbers GPUs in the order of their PCI buses. CUDA does so with CUDA_DEVICE_ORDER=PCI_BUS_ID only: else the fastest
comes first, so where the models of a machine's GPUs differ, its numbers may differ from these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

_GB = 1e9


class Reading(NamedTuple):
    """One GPU now. utilization: share of the last moments in which a kernel ran, 0..1; memory_gb: in use, by any
    process; None: not known."""

    utilization: float | None
    memory_gb: float | None


class Model(NamedTuple):
    """What the GPUs are. number: that may be used; name, memory in bytes: of the first."""

    number: int
    name: str
    memory: int


class Gpus:
    """The GPUs by their index in PCI order, among those in use; close it."""

    def __init__(self, nvml: Any, handles: Mapping[int, Any]) -> None:
        self._nvml, self._handles = nvml, handles

    def read(self) -> dict[int, Reading]:
        return {
            index: Reading(
                self._number(lambda handle: self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0, handle),
                self._number(lambda handle: self._nvml.nvmlDeviceGetMemoryInfo(handle).used / _GB, handle),
            )
            for index, handle in self._handles.items()
        }

    def model(self) -> Model | None:
        """None if it cannot be read. No process gets a CUDA context for it."""
        first = next(iter(self._handles.values()))
        with suppress(self._nvml.NVMLError):
            name, memory = self._nvml.nvmlDeviceGetName(first), self._nvml.nvmlDeviceGetMemoryInfo(first).total
            return Model(len(self._handles), name.decode() if isinstance(name, bytes) else name, int(memory))
        return None

    def _number(self, read: Callable[[Any], float], handle: Any) -> float | None:
        with suppress(self._nvml.NVMLError):
            return read(handle)
        return None

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def open_gpus(environment: Mapping[str, str] = os.environ) -> Gpus | None:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves; None if there are none, or they cannot be read."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    found: dict[int, Any] = {}
    with suppress(nvml.NVMLError):  # CUDA, too, uses no device from the first one on that is not there
        found.update(enumerate(_handles(nvml, environment.get("CUDA_VISIBLE_DEVICES"))))
    gpus = Gpus(nvml, found)
    if found:
        return gpus
    gpus.close()
    return None


def _handles(nvml: Any, visible: str | None) -> Iterator[Any]:
    """The devices in PCI order, or as listed. visible: indices in that order, or UUIDs of which the beginning is
    enough."""
    count = nvml.nvmlDeviceGetCount()
    if visible is None:
        yield from map(nvml.nvmlDeviceGetHandleByIndex, range(count))
        return
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal() and int(name) < count:
            yield nvml.nvmlDeviceGetHandleByIndex(int(name))
        elif name.startswith("MIG-"):
            yield nvml.nvmlDeviceGetHandleByUUID(name)
        else:
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(count))
            named = [handle for handle in handles if name and nvml.nvmlDeviceGetUUID(handle).startswith(name)]
            if len(named) != 1:
                return
            yield named[0]
