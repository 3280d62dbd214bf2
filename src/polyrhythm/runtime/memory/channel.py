"""A process's end of the weights channel of its host, for the place where it works."""

from __future__ import annotations

import logging
from pathlib import Path

from polyrhythm.runtime.memory.device_handles import CudaHandles, can_reach
from polyrhythm.runtime.memory.device_weights import DeviceWeights
from polyrhythm.runtime.memory.ways import CPU, Ends, choose_way, keeps_copy
from polyrhythm.runtime.memory.weights import SharedWeights, Weights
from polyrhythm.specs.weights import WeightsLayout

log = logging.getLogger(__name__)


def open_weights(layout: WeightsLayout, memory: memoryview, folder: Path, device: str, ends: Ends | None) -> Weights:
    """The end of a process on `device` (cpu or cuda:N). memory, folder: see `SharedWeights`; ends: where all ends are,
    None: not known, so the host's memory alone. The process's log says which way it takes and why."""
    host = SharedWeights(layout, memory, folder)
    if ends is None or CPU in (device, ends.trainer) or ends.host_only:
        return host
    choice = choose_way(ends, device, can_reach)
    log.info("weights at %s: %s, because %s", device, choice.way, choice.why)
    if choice.way == "host":
        return host
    return DeviceWeights(host, folder, CudaHandles(ends.trainer), choice.way, keeps=keeps_copy(ends, can_reach))
