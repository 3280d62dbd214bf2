"""`polyrhythm plan FILE.py:function --gpus N`: which workers of a user's workflow share devices, and which stand apart.

    function() ──watching──▶ traffic, seconds of work ──▶ WorkflowGraph, WorkCosts ──find_schedules──▶ ranked schedules

The function is run for a while; what its workers did then is a version. Assumed: a group's work divides evenly over
devices, and its memory there is what a worker freed when it left.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.cli import show
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.planning.arrangement import devices_text
from polyrhythm.plugins.planning.graph import WorkflowGraph, graph_of_workflow
from polyrhythm.plugins.planning.profile import this_machine
from polyrhythm.plugins.planning.search import Schedule, find_schedules
from polyrhythm.plugins.workflow.watching import TimeOver, WatchedWorkflow, watching
from polyrhythm.runtime.devices import CPU

#: Seconds that a workflow is watched.
_WATCHED_S = 60.0
#: Schedules in the table.
_SHOWN = 5
#: Least seconds of work, so that shares can be told.
_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class WorkCosts:
    """What groups of workers take (`search.Costs`). work: seconds of all ranks together; sizes: bytes of a rank;
    switches: seconds to leave a device or to come back; hosted: groups that need no device."""

    work: Mapping[str, float]
    sizes: Mapping[str, int]
    switches: Mapping[str, float]
    hosted: frozenset[str]
    ranks: Mapping[str, int]

    def seconds(self, node: str, devices: int, parts: int) -> float:
        del parts  # an item's own cost is in the work
        return self.work[node] / (devices or self.ranks[node])

    def memory(self, node: str, devices: int) -> int:
        del devices
        return self.sizes[node]

    def switch(self, node: str) -> float:
        return 2 * self.switches[node]

    def on_host(self, node: str) -> bool:
        return node in self.hosted


def is_function(name: str | None) -> bool:
    """Whether a command's argument names a function: FILE.py:function or module:function."""
    path, _, function = (name or "").rpartition(":")
    return bool(path) and function.isidentifier() and not Path(name or "").exists()


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.plugins.planning.placing import parse_devices

    if arguments.profile is not None:
        raise ConfigError(f"plan {arguments.run}: a workflow is measured as it runs; leave --profile out")
    devices = parse_devices(arguments.gpus, arguments.nodes)
    if not devices.count:
        raise ConfigError("--gpus = 0: a workflow's workers are placed on GPUs; write how many there are, 1 or more")
    if len(devices.nodes) > 1:
        raise ConfigError(f"--gpus = {arguments.gpus}: a workflow is planned on one node; give one number of GPUs")
    call = _function(arguments.run, arguments.overrides)
    began = time.monotonic()
    watched = watch(call, arguments.run)
    seconds = time.monotonic() - began
    graph, costs = problem(watched)
    found = find_schedules(graph, devices.count, costs, room=this_machine().device_memory, kept=_SHOWN)
    if not found:
        raise ConfigError(
            f"--gpus = {devices.count}: no schedule fits; write more devices, or give the groups less memory"
        )
    if arguments.json:
        print(json.dumps(as_data(graph, costs, found), indent=2))
    else:
        print(f"{arguments.run}, watched for {seconds:.3g} s; predicted, not measured\n")
        print("\n".join(lines(graph, costs, found)))
    return 0


def watch(call: Callable[[], object], name: str) -> WatchedWorkflow:
    """What the one workflow of the call did within `_WATCHED_S` seconds. ConfigError: it made none, or several."""
    with watching(_WATCHED_S) as found, suppress(TimeOver):
        call()
    if len(found) != 1:
        many = "no workflow" if not found else f"{len(found)} workflows"
        raise ConfigError(f"plan {name}: the function ran {many}; name one that runs a single Workflow")
    return found[0]


def problem(watched: WatchedWorkflow) -> tuple[WorkflowGraph, WorkCosts]:
    """The graph and what its nodes take. If no worker has a device, all are planned as if each needed one."""
    groups = list(watched.devices)
    hosted = {name for name, devices in watched.devices.items() if all(device == CPU for device in devices)}
    own = {
        name: [watched.statistics.get(f"{name}-{rank}", {}) for rank in range(len(watched.devices[name]))]
        for name in groups
    }
    switched = {name: sum(one.get("switches", 0.0) for one in ranks) for name, ranks in own.items()}
    return graph_of_workflow(groups, watched.traffic, watched.passed), WorkCosts(
        work={name: max(_LEAST_S, sum(one.get("work_s", 0.0) for one in ranks)) for name, ranks in own.items()},
        sizes={name: round(max(one.get("offloaded_bytes", 0.0) for one in ranks)) for name, ranks in own.items()},
        switches={
            name: sum(one.get("switch_s", 0.0) for one in ranks) / switched[name] if switched[name] else 0.0
            for name, ranks in own.items()
        },
        hosted=frozenset() if len(hosted) == len(groups) else frozenset(hosted),
        ranks={name: len(ranks) for name, ranks in own.items()},
    )


def _function(name: str, settings: Sequence[str]) -> Callable[[], object]:
    """The function with its arguments. ConfigError: it cannot be had, or does not take them."""
    path, _, function = name.rpartition(":")
    file = Path(path)
    if file.suffix == ".py":
        if not file.is_file():
            raise ConfigError(f"plan {name}: there is no file {path}; write FILE.py:function, or module:function")
        sys.path.insert(0, str(file.parent.resolve()))  # workers' processes import their classes from there
    else:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(file.stem if file.suffix == ".py" else path), function, None)
    except ImportError as error:
        raise ConfigError(f"plan {name}: {path} cannot be imported ({error}); write FILE.py:function") from None
    if not callable(found):
        raise ConfigError(f"plan {name}: {path} has no function {function}; name the one that runs the workflow")
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"plan {name}: {setting!r} is not an argument; write name=value")
        given[key] = yaml.safe_load(value)
    signature = inspect.signature(found)
    if "launcher" in signature.parameters:
        given.setdefault("launcher", "local")
    try:
        bound = signature.bind(**given)
    except TypeError as error:
        raise ConfigError(f"plan {name}: {error}; give the function's arguments as name=value") from None
    return lambda: found(*bound.args, **bound.kwargs)


# ------------------------------------------------------------ text and data


def _seats(schedule: Schedule) -> dict[str, tuple[int, ...]]:
    return {node: tuple(range(first, first + count)) for node, (first, count) in schedule.seats}


def _waits(schedule: Schedule) -> str:
    """In words, which workers take turns on a device."""
    seats = _seats(schedule)
    shared = [f"{one} and {two}" for one in seats for two in seats if one < two and {*seats[one]} & {*seats[two]}]
    how = "in turn" if schedule.turns else "together"
    return f"{', '.join(shared)}: {how}" if shared else "all apart"


def lines(graph: WorkflowGraph, costs: WorkCosts, found: Sequence[Schedule]) -> list[str]:
    """The graph, the ranked schedules, and the seats to write."""
    total = sum(costs.work.values())
    text = [" → ".join(" ~ ".join(part) for part in graph.components())]
    text += [
        f"{name}: {costs.work[name] / total:.0%} of the work, {costs.work[name]:.3g} s"
        + (f", {costs.sizes[name] / 1e9:.3g} GB" if costs.sizes[name] else "")
        + (", on the host" if costs.on_host(name) else "")
        for name in graph.nodes
    ]
    rows = [
        {
            "": str(rank),
            "time": f"{one.seconds:.3g} s",
            **{name: devices_text(own) for name, own in _seats(one).items()},
            "shared": _waits(one),
        }
        for rank, one in enumerate(found, 1)
    ]
    legend = "time: of what was watched; ids of devices by group; ~: a cycle, planned as one"
    best = found[0]
    seats = [f'{name}: seats(devices="{devices_text(own)}")' for name, own in _seats(best).items() if own]
    lease = ['Workflow(sharing="lease")'] if best.turns else []
    unknown = [] if any(costs.sizes.values()) else ["memory is not known: no worker has left a device"]
    return [*text, "", show.records(rows), legend, *unknown, "", *seats, *lease]


def as_data(graph: WorkflowGraph, costs: WorkCosts, found: Sequence[Schedule]) -> dict[str, Any]:
    """The same as JSON data."""
    return {
        "components": [list(part) for part in graph.components()],
        "work_s": dict(costs.work),
        "memory": dict(costs.sizes),
        "schedules": [
            {"seconds": one.seconds, "turns": one.turns, "devices": {n: list(own) for n, own in _seats(one).items()}}
            for one in found
        ],
    }
