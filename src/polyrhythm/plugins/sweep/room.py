"""How many runs of a sweep a machine has room for at the same time, and which devices each gets."""

from __future__ import annotations

import os
from collections.abc import Sequence

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.placed import place
from polyrhythm.runtime.devices import CPU, is_simulated, number_of
from polyrhythm.runtime.memory.tensors import count_devices


def slots(configs: Sequence[RunConfig], cores: int, visible: Sequence[str], at_once: int | None) -> list[str | None]:
    """One entry for each run at the same time: its devices as CUDA_VISIBLE_DEVICES, or None to leave them.

    A run needs a core for each thread of its processes that compute on the CPU; inline, one. It needs devices up to the
    highest number that its settings name, and gets devices of its own, which it counts from 0. visible: names of this
    machine's devices; at_once: the user's number, None to decide. Runs on other machines are one at a time.
    """
    threads, devices = 1, 0
    for config in configs:
        if config.launcher not in ("inline", "local"):
            return [None] * (at_once or 1)
        seats = place(config, devices=config.placement.simulated_devices or len(visible)).seats.values()
        on_device = [number_of(one.device) + 1 for one in seats if one.device != CPU and not is_simulated(one.device)]
        devices = max([devices, *on_device])
        if config.launcher == "local":
            own = (one.threads for one in seats if one.device == CPU or is_simulated(one.device))
            threads = max(threads, sum(own))
    by_cores = max(1, cores // threads)
    if not devices:
        return [None] * (at_once or by_cores)
    sets = [",".join(visible[first : first + devices]) for first in range(0, len(visible) - devices + 1, devices)]
    return [sets[place % len(sets)] for place in range(at_once or min(len(sets), by_cores))]


def visible_devices() -> list[str]:
    """Names of the devices that this process sees, as CUDA_VISIBLE_DEVICES has them."""
    count = count_devices()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
