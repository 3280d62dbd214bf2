"""`polyrhythm plan RECIPE --memory`: what every device would hold, and settings with which it fits."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from polyrhythm.cli import show
from polyrhythm.cli.arguments import add_cluster, cluster_settings

if TYPE_CHECKING:
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.plugins.memory_estimate.plan import DeviceMemory, Machine, MemoryPlan
    from polyrhythm.plugins.memory_estimate.remedies import Remedy

#: Names of its options.
OPTIONS = ("devices", "device_memory", "host_memory", "cluster")
_GB = 10**9
_NOT_COUNTED = (
    "not counted: simulators, Python interpreters, CUDA contexts, and what kernels and allocators take beside tensors"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="--memory: plan for so many CUDA devices")
    parser.add_argument("--device-memory", type=float, metavar="GB", help="--memory: free memory of each of them")
    parser.add_argument("--host-memory", type=float, metavar="GB", help="--memory: free memory of the host")
    add_cluster(parser, "--memory: ")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns 0 if it fits, else 1."""
    from polyrhythm.config.load import load_config
    from polyrhythm.errors import ConfigError, MissingError
    from polyrhythm.pipeline.build import env_settings
    from polyrhythm.pipeline.placed import with_start
    from polyrhythm.pipeline.validation.fit import check_rollout
    from polyrhythm.plugins.memory_estimate.plan import Planner
    from polyrhythm.plugins.memory_estimate.remedies import find_remedies

    if arguments.run is None:
        raise ConfigError("plan --memory needs a recipe; name one, or the path of a YAML file")
    overrides = [*arguments.overrides, *cluster_settings(arguments.cluster)]
    config = load_config(arguments.run, overrides)
    machine = _machine(arguments, config)
    described = arguments.devices is not None or arguments.cluster is not None
    config, note = _with_stand_in(with_start(config, devices=machine.devices if described else None))
    spec = env_settings(config).spec()
    check_rollout(config, spec)
    planner = Planner(spec, machine)
    try:
        plan = planner.plan(config)
    except MissingError as error:  # a missing device
        if arguments.devices is None:
            error.add_note("to plan for another machine, add --devices N --device-memory GB")
        raise
    remedies = find_remedies(planner, config)
    if arguments.json:
        found = {"note": note, "remedies": [remedy.plain() for remedy in remedies]}
        print(json.dumps(plan.plain() | found, indent=2))
    else:
        idle = planner.machine.devices.count if len(plan.devices) == 1 else 0
        unused = f"nothing is placed on the {idle} CUDA devices; see placement, such as placement=colocated"
        print("\n".join([*[note] * bool(note), *plan_lines(plan, remedies), *[unused] * bool(idle)]))
    return 0 if plan.fits else 1


def _machine(arguments: argparse.Namespace, config: RunConfig) -> Machine:
    from polyrhythm.errors import ConfigError
    from polyrhythm.pipeline.placed import find_devices
    from polyrhythm.plugins.memory_estimate.plan import Machine
    from polyrhythm.plugins.memory_estimate.room import free_memory, free_on
    from polyrhythm.runtime.devices import devices_here

    given = {"cpu": arguments.host_memory, "cuda": arguments.device_memory}
    if arguments.devices is not None and arguments.devices < 0:
        raise ConfigError(f"--devices = {arguments.devices}: not a number of devices; write 0 or more")
    for name, value in (("--host-memory", given["cpu"]), ("--device-memory", given["cuda"])):
        if value is not None and not 0 < value < 1e6:
            raise ConfigError(f"{name} = {value}: not an amount of memory; write the gigabytes, such as 80")
    if arguments.cluster is not None and any(getattr(arguments, name) is not None for name in OPTIONS[:-1]):
        raise ConfigError(
            f"--cluster = {arguments.cluster}: the file has its nodes' devices and memory; leave the rest out"
        )
    found = find_devices(config) if arguments.devices is None else devices_here(arguments.devices)
    if given["cuda"] is not None and arguments.devices is None and not found.count:
        raise ConfigError(f"--device-memory = {given['cuda']}: of how many devices? add --devices N")
    if arguments.devices and given["cuda"] is None:
        raise ConfigError(f"--devices = {arguments.devices}: how large are they? add --device-memory GB, such as 80")

    def free(device: str) -> int:
        gigabytes = given[device.partition(":")[0]]
        return free_memory(device, now=True) if gigabytes is None else int(gigabytes * _GB)

    return Machine(found, free_on(found, free))


def _with_stand_in(config: RunConfig) -> tuple[RunConfig, str]:
    """The configuration, and a sentence if a released size replaces a checkpoint that is missing here."""
    from polyrhythm.errors import MissingError
    from polyrhythm.pipeline.build import env_settings, policy_settings
    from polyrhythm.policies.traits import settings_traits

    settings: Any = policy_settings(config)
    try:
        settings.form(env_settings(config).spec())
    except MissingError as error:
        if not settings_traits(settings).has_miniature:
            raise
        *_, released = settings.stand_ins()
        return config.model_copy(update={"policy": released}), f"{error}; planned with the released size of this type"
    return config, ""


# ---------------------------------------------------------------- text


def plan_lines(plan: MemoryPlan, remedies: list[Remedy]) -> list[str]:
    """A table for each device, then the remedies."""
    lines = []
    for device in plan.devices:
        lines += [*_device_lines(device), ""]
    lines.append(f"~ estimated; passes of the policy: {plan.activations}")
    lines.append(_NOT_COUNTED)
    if plan.fits:
        return lines
    lines += ["", "it would fit with" if remedies else "no setting known here makes it fit; choose a smaller policy"]
    for remedy in remedies:
        totals = ", ".join(f"{name} {show.size_text(size)}" for name, size in remedy.totals.items())
        lines.append(f"  {remedy.text()}  ({totals})")
    return lines


def _device_lines(device: DeviceMemory) -> list[str]:
    """A line for each station and purpose; equal stations are merged."""
    share = {"lease": "; one station at a time"}.get(device.sharing if device.name != "cpu" else "", "")
    name = "host" if device.name == "cpu" else device.name
    verdict = "fits" if device.fits else "DOES NOT FIT"
    head = f"{name}: {show.size_text(device.total())} of {show.size_text(device.free or 0)} free, {verdict}{share}"
    if device.free is None:
        head = f"{name}: {show.size_text(device.total())}, of how much is not known{share}"
    estimated = {(part.station, part.purpose) for part in device.parts if not part.certain}
    groups: dict[str, list[str]] = {}
    for station, parts in device.stations().items():
        told = ", ".join(
            f"{purpose} {'~' if (station, purpose) in estimated else ''}{show.size_text(size)}"
            for purpose, size in parts.items()
        )
        groups.setdefault(f"{show.size_text(sum(parts.values())):>9}   {told}", []).append(station)
    if device.building > sum(part.nbytes for part in device.parts):
        groups[f"{show.size_text(device.building):>9}   the policy, before the stations start"] = ["main"]
    names = {text: _together(stations) for text, stations in groups.items()}
    width = max(map(len, names.values()), default=0)
    return [head, *(f"  {names[text]:{width}}  {text}" for text in groups)]


def _together(stations: list[str]) -> str:
    return stations[0] if len(stations) == 1 else f"{stations[0]} … {stations[-1]} ({len(stations)}, each)"
