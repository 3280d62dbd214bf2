"""Checks before anything is built that a run fits into the memory of this machine and its devices.

Certain memory raises an error, estimated memory a warning. Both list settings that would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from polyrhythm.checks import CheckContext, size_of
from polyrhythm.config.schema import RunConfig
from polyrhythm.conformance import Finding
from polyrhythm.errors import MissingError, PolyrhythmError, StartError
from polyrhythm.pipeline.placed import find_devices
from polyrhythm.plugins.memory_estimate.needs import HOST, SHARED, memory_by_station
from polyrhythm.plugins.memory_estimate.plan import DeviceMemory, Machine, Planner
from polyrhythm.plugins.memory_estimate.remedies import find_remedies
from polyrhythm.policies.form import PolicyForm
from polyrhythm.readable import few
from polyrhythm.runtime.devices import Devices, NodeMemory, number_of
from polyrhythm.specs import EnvSpec

#: Share of a device's memory below which what is certain says that its passes fit as well.
_NEGLIGIBLE = 0.02
#: Most remedies in a sentence.
_TOLD = 3


def free_memory(device: str = "cpu", *, now: bool = False) -> int:
    """Bytes of host memory that this process may still use, or the total bytes of a CUDA device.

    now: currently free bytes of a CUDA device instead; the query itself allocates a CUDA context.
    """
    if device != "cpu" and now:
        return int(torch.cuda.mem_get_info(device)[0])
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    free, limit = psutil.virtual_memory().available, container_limit()
    return min(free, limit) if limit is not None else free


def free_on(devices: Devices, free: Callable[[str], int | None]) -> Callable[[str], int | None]:
    """Free bytes of a cluster's nodes and of their devices, as far as a description has them, because other machines
    are not asked; else `free`."""
    if not devices.on_cluster:
        return free
    nodes = {node for node, _ in devices.nodes}

    def find(name: str) -> int | None:
        if name == HOST:
            return None if devices.memory else free(name)  # which node main will be on is not described
        if name in nodes:
            return devices.memory.get(name, NodeMemory()).host or None
        return devices.memory.get(devices.place(number_of(name))[0], NodeMemory()).device or None

    return find


def container_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left within the control group's limit, not counting page cache as used; None without a limit."""
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


def check_room(
    config: RunConfig,
    spec: EnvSpec,
    form: PolicyForm,
    *,
    trainer: bool = True,
    free: Callable[[str], int | None] = free_memory,
) -> None:
    """StartError: certain memory (weights, gradients, optimizer), besides what is shared, exceeds the available."""
    planner = _planner(config, spec, form, trainer=trainer, free=free)
    for device in planner.plan(config, certain=True).devices:
        own = device.without(SHARED)
        if not own.fits:
            raise StartError(
                f"policy.type = {config.policy_type}: at least {_described(own)}; "
                f"{_advice(planner, config, certain=True)}"
            )


def warn_of_room(
    config: RunConfig,
    spec: EnvSpec,
    form: PolicyForm,
    *,
    trainer: bool = True,
    free: Callable[[str], int | None] = free_memory,
) -> str:
    """A warning if the estimated memory of working stations exceeds the available memory, else ""."""
    planner = _planner(config, spec, form, trainer=trainer, free=free)
    certain = planner.plan(config, certain=True).devices
    if all(device.free is None or device.total(certain=True) < _NEGLIGIBLE * device.free for device in certain):
        return ""  # estimating takes half a second
    for device in planner.plan(config).devices:
        if not device.fits:
            what = f"policy.type = {config.policy_type}: by estimate {_described(device)}"
            return f"{what}; {_advice(planner, config)}; look at polyrhythm plan RECIPE --memory"
    return ""


def memory_found(context: CheckContext) -> Iterator[Finding]:
    """Findings: memory of each station, without activations, simulators and interpreters; equal stations are merged."""
    config, spec, form = context.config, context.spec, context.form
    if not context.sized:
        detail = "not checked: without the checkpoint's folder its size is unknown"
        yield Finding("memory by station", "note", detail)
        return
    memory = memory_by_station(config, spec, form)
    with suppress(MissingError):  # missing devices are reported elsewhere
        check_room(config, spec, form)
    groups: dict[str, list[str]] = {}
    for name, parts in memory.items():
        if name != SHARED and "arena blocks" not in parts:  # simulators write into shared memory
            groups.setdefault(size_of(sum(parts.values())), []).append(name)
    stations = ", ".join(
        f"{few(names, 1)}{', each' if len(names) > 1 else ''} {size}" for size, names in groups.items()
    )
    left_out = "without activations and simulators"
    if unknown := unknown_memory(config):
        left_out += f"; {unknown}"
    yield Finding("memory by station", "ok", f"{stations}; {left_out}")


def unknown_memory(config: RunConfig) -> str:
    """A sentence on the nodes of a cluster whose memory is not compared with what the run takes, "" if all are."""
    devices, unknown = find_devices(config), NodeMemory()
    sizes = [(node, devices.memory.get(node, unknown), count) for node, count in devices.nodes if node]
    nodes = [node for node, known, count in sizes if not known.host or (count and not known.device)]
    if not nodes:
        return ""
    if devices.memory:
        return (
            f"not compared with the memory of {few(nodes, 1)}: add memory_gb to these nodes, and gpu_memory_gb to "
            "those with GPUs"
        )
    return (
        f"not compared with the memory of {few(nodes, 1)}: other nodes are not asked (a description, --cluster FILE, "
        "has it)"
    )


def shortage_found(context: CheckContext) -> Iterator[Finding]:
    """A finding if estimated memory exceeds the available memory. Errors of the plan are reported elsewhere."""
    if not context.sized:
        return
    config, spec, form, free = context.config, context.spec, context.form, context.free or free_memory
    with suppress(PolyrhythmError):
        if shortage := warn_of_room(config, spec, form, trainer=context.trainer, free=free):
            problem, _, fix = shortage.partition("; ")
            yield Finding("memory while it works", "note", problem, fix)


def _planner(
    config: RunConfig, spec: EnvSpec, form: PolicyForm, *, trainer: bool, free: Callable[[str], int | None]
) -> Planner:
    devices = find_devices(config)
    planner = Planner(spec, Machine(devices, free_on(devices, free)), trainer)
    planner.take_form(config, form)
    return planner


def _described(device: DeviceMemory) -> str:
    """Text such as `18.3 GB of this machine's memory are wanted (generator-0 7.0 GB, trainer 11.3 GB), 18.0 GB are
    free`."""
    wanted = device.total()
    sizes = {name: sum(own.values()) for name, own in device.stations().items()}
    if sum(sizes.values()) < wanted:
        sizes = {"building the policy": wanted}
    parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in sizes.items())
    place = "this machine's memory" if device.name == HOST else f"the memory of {device.name}"
    return f"{_gigabytes(wanted)} of {place} are wanted ({parts}), {_gigabytes(device.free or 0)} are free"


def _advice(planner: Planner, config: RunConfig, *, certain: bool = False) -> str:
    """The computed remedies, else general ones. A row for more devices is first scaled down to the available ones."""
    if 0 < (devices := planner.machine.devices.count) < (config.devices or 0):
        return f"the row is for {config.devices} devices: add devices={devices}"
    if found := find_remedies(planner, config, most=_TOLD, certain=certain):
        which = "these would fit with " if certain else "it would fit with "
        return which + ", or ".join(remedy.text() for remedy in found)
    return (
        "train less of it (policy.train of the published policies), choose a smaller policy, or place its stations "
        "elsewhere (placement)"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
