"""Checks before anything is built that a run fits into this machine's memory and its devices'.

What follows from shapes refuses a run; with what is estimated, it is warned of. Both say what would fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import StartError
from polyrhythm.plugins.memory_estimate.needs import HOST, SHARED
from polyrhythm.plugins.memory_estimate.plan import DeviceMemory, Machine, Planner
from polyrhythm.plugins.memory_estimate.remedies import find_remedies
from polyrhythm.policies.form import PolicyForm
from polyrhythm.runtime.memory.tensors import count_devices
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)

#: Share of a device's memory below which what is certain says that its passes fit as well.
_NEGLIGIBLE = 0.02
#: Most remedies in a sentence.
_TOLD = 3


def free_memory(device: str = "cpu", *, now: bool = False) -> int:
    """Bytes that this process may still use of the host's memory, or all bytes of a CUDA device.

    now: those of a CUDA device that nobody uses at present; to ask takes a part of them for this process.
    """
    if device != "cpu" and now:
        return int(torch.cuda.mem_get_info(device)[0])
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    free, limit = psutil.virtual_memory().available, container_limit()
    return min(free, limit) if limit is not None else free


def check_room(
    config: RunConfig,
    spec: EnvSpec,
    form: PolicyForm,
    *,
    trainer: bool = True,
    free: Callable[[str], int] = free_memory,
) -> None:
    """Raise StartError if what stations keep for certain, weights, gradients and optimizer, takes more memory than
    there is. Shared memory has a check of its own."""
    planner = _planner(config, spec, form, trainer=trainer, free=free)
    for device in planner.plan(config, certain=True).devices:
        own = device.without(SHARED)
        if not own.fits:
            raise StartError(
                f"policy.type = {getattr(config.policy, 'type', '')}: at least {_described(own)}; "
                f"{_advice(planner, config, certain=True)}"
            )


def warn_of_room(
    config: RunConfig,
    spec: EnvSpec,
    form: PolicyForm,
    *,
    trainer: bool = True,
    free: Callable[[str], int] = free_memory,
) -> str:
    """A sentence if what stations are estimated to take while they work is more than there is, else ""."""
    planner = _planner(config, spec, form, trainer=trainer, free=free)
    certain = planner.plan(config, certain=True).devices
    if all(device.total(certain=True) < _NEGLIGIBLE * device.free for device in certain):
        return ""  # to estimate takes half a second
    for device in planner.plan(config).devices:
        if not device.fits:
            what = f"policy.type = {getattr(config.policy, 'type', '')}: by estimate {_described(device)}"
            return f"{what}; {_advice(planner, config)}; look at polyrhythm plan RECIPE --memory"
    return ""


def _planner(
    config: RunConfig, spec: EnvSpec, form: PolicyForm, *, trainer: bool, free: Callable[[str], int]
) -> Planner:
    planner = Planner(spec, Machine(count_devices(), free), trainer)
    planner.take_form(config, form)
    return planner


def _described(device: DeviceMemory) -> str:
    """`18.3 GB of this machine's memory are wanted (generator-0 7.0 GB, trainer 11.3 GB), 18.0 GB are free`."""
    wanted = device.total()
    sizes = {name: sum(own.values()) for name, own in device.stations().items()}
    if sum(sizes.values()) < wanted:
        sizes = {"building the policy": wanted}
    parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in sizes.items())
    place = "this machine's memory" if device.name == HOST else f"the memory of {device.name}"
    return f"{_gigabytes(wanted)} of {place} are wanted ({parts}), {_gigabytes(device.free)} are free"


def _advice(planner: Planner, config: RunConfig, *, certain: bool = False) -> str:
    """What would fit, as computed; else what may help. A row for more devices is first scaled to those there are."""
    if 0 < (devices := planner.machine.devices) < (config.devices or 0):
        return f"the row is for {config.devices} devices: add devices={devices}"
    if found := find_remedies(planner, config, most=_TOLD, certain=certain):
        which = "these would fit with " if certain else "it would fit with "
        return which + ", or ".join(remedy.text() for remedy in found)
    return (
        "train less of it (policy.train of the published policies), choose a smaller policy, or place its stations "
        "elsewhere (placement)"
    )


def container_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left within the control group's limit, files that are only cached not counted; None if it has no limit."""
    for folder, most, used, cached in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / most).read_text(encoding="ascii").strip()
            if limit.isdecimal() and int(limit) < 1 << 60:
                parts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
                return int(limit) - int((folder / used).read_text(encoding="ascii")) + int(parts.get(cached, 0))
        except OSError:
            continue
    return None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
