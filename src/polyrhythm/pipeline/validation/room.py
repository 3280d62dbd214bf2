"""Checks before anything is built that the weights of a run fit into this machine's memory and its devices'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import StartError
from polyrhythm.pipeline.build import run_seats
from polyrhythm.pipeline.memory_estimate import HOST, memory_by_station
from polyrhythm.policies.form import PolicyForm
from polyrhythm.runtime.factories import Resources
from polyrhythm.specs import EnvSpec

#: Device ("cpu", "cuda:0") -> station -> bytes.
Needs = dict[str, dict[str, int]]


def free_memory(device: str = "cpu") -> int:
    """Bytes that this process may still use of the host's memory, or all bytes of a CUDA device."""
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
    """Raise StartError if weights, gradients and optimizer alone take more memory than there is."""
    for device, stations in _needs(config, spec, form, trainer=trainer).items():
        wanted, there = sum(stations.values()), free(device)
        if wanted > there:
            parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in stations.items())
            place = "this machine's memory" if device == "cpu" else f"the memory of {device}"
            raise StartError(
                f"policy.type = {getattr(config.policy, 'type', '')}: at least {_gigabytes(wanted)} of {place} are "
                f"wanted ({parts}), {_gigabytes(there)} are free; train less of it (policy.train of the published "
                "policies), choose a smaller policy, or place its stations elsewhere (placement)"
            )


def _needs(config: RunConfig, spec: EnvSpec, form: PolicyForm, *, trainer: bool) -> Needs:
    """What the stations need for certain, by device. The main process builds the policy on the host before them, and
    does not need it any more when they are full."""
    seats, memory = run_seats(config, trainer=trainer), memory_by_station(config, spec, form)
    needs: Needs = {"cpu": {}}
    for name, parts in memory.items():
        if name not in seats or "weights" not in parts:  # simulators and shared memory, which is checked by itself
            continue
        learns = name != "trainer" or config.training.versions > 0
        for part, size in parts.items() if learns else [("weights", parts["weights"])]:
            own = needs.setdefault("cpu" if part.endswith(HOST) else seats[name].device, {})
            own[name] = own.get(name, 0) + size
    _take_turns(needs, seats)
    if sum(needs["cpu"].values()) < form.train_bytes:
        needs["cpu"] = {"building the policy": form.train_bytes}
    return needs


def _take_turns(needs: Needs, seats: Mapping[str, Resources]) -> None:
    """Of the stations that lease a device only the largest counts there: the others are off it, in host memory if it is
    a CUDA device, in a file if it is the host."""
    for device, stations in list(needs.items()):
        leased = sorted((size, name) for name, size in stations.items() if name in seats and seats[name].leases)
        for size, name in leased[:-1]:
            del stations[name]
            if device != "cpu":
                needs["cpu"][f"{name}, off {device},"] = size


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
