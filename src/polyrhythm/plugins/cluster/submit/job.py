"""A job that trains: checks that the recipe fits its nodes, and the command that it runs there."""

from __future__ import annotations

import math
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import yaml

from polyrhythm.checks import Examined, failed_finding
from polyrhythm.config.schema import RunConfig
from polyrhythm.conformance import Finding
from polyrhythm.errors import ConfigError, MissingError, StartError
from polyrhythm.pipeline.placed import JOINED, Placed, place
from polyrhythm.pipeline.validation.check import examine
from polyrhythm.plugins.cluster.ray.reach import Bundle, bundles_of
from polyrhythm.plugins.cluster.submit.options import JobSettings
from polyrhythm.plugins.ranks import check_ranks
from polyrhythm.runtime.devices import CPU, CUDA, SIMULATED, Devices
from polyrhythm.runtime.memory.tensors import count_devices

#: Settings of a run over the nodes of a job; Ray's nodes may take minutes.
ON_RAY = ("launcher=ray", "ray.address=auto", "ray.start_s=300")
#: Checks of this machine's devices, in place of which those of the job's node are checked.
_OF_THIS_MACHINE = frozenset({"devices", "placement", "ranks"})
#: Parts whose files and packages an image may have.
_OF_AN_IMAGE = frozenset({"environment", "policy", "training"})
#: Seconds for one command of the queue.
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A checked job. name: of its recipe; words: the command of its run; cpus: of each node; recipe: file of the run's
    settings, beside the job's others; out: the run's folder on the nodes; over_ray: its stations are on the nodes of a
    Ray cluster that the job starts; given: the user's command."""

    name: str
    words: Sequence[str]
    cpus: int
    recipe: Path
    out: str
    over_ray: bool
    given: str

    @property
    def command(self) -> str:
        """The words for a shell."""
        return shlex.join(self.words)


class Submission(NamedTuple):
    """A job that the queue has. watch, cancel: commands for the user."""

    job: str
    watch: Sequence[str]
    cancel: str


def overrides_for(option: str, nodes: int, overrides: Sequence[str], *, ray: bool) -> list[str]:
    """The user's overrides, with those that several nodes need. ray: one node is a Ray cluster, too. ConfigError: the
    user has set one of them otherwise."""
    given = dict(word.partition("=")[::2] for word in overrides)
    for key, only, why in (
        ("resume", "auto", "a job that is started again goes on with its own run"),
        ("out_dir", None, "the folder of a job's run is named by --out"),
    ):
        if key in given and given[key] != only:
            raise ConfigError(f"--{option}: {key} = {given[key]}: {why}; leave {key} out")
    if nodes == 1 and not ray:
        return list(overrides)
    if (launcher := given.get("launcher", "ray")) != "ray":
        raise ConfigError(
            f"--{option}: launcher = {launcher} uses one node of {nodes}; leave launcher out, or write nodes=1"
        )
    return [*overrides, *(word for word in ON_RAY if word.partition("=")[0] not in given)]


def examine_job(config: RunConfig, settings: JobSettings, option: str, *, here: bool) -> Iterator[Examined]:
    """Findings of `train --check` for the job's nodes. here: files and packages are those of this machine.

    A run on Ray is checked on a cluster that is described. Of a run on one node, what depends on this machine is left
    out (its devices, memory and limits). If it has no GPU and the nodes do, a lack of the environment is only a note,
    since it may be the GPU.
    """
    try:
        placed = place_job(config, settings, option)
        cpus = cpus_of_node(config, settings, option, placed)
        check_ranks(config, len(placed.names["trainer"]))
    except ConfigError as error:
        for problem in error.problems:
            yield Examined("recipe", failed_finding("nodes", ConfigError(problem)))
        return
    on_ray = config.launcher == "ray"
    with _described(config, settings, cpus) as planned:
        found = list(examine(planned, "machine"))
    for part, one in found:
        if not on_ray and (part == "machine" or one.name in _OF_THIS_MACHINE):
            continue
        gpu_may_lack = part == "environment" and settings.devices > 0 and not count_devices()
        if one.state == "missing" and part in _OF_AN_IMAGE and (gpu_may_lack or not here):
            note = one._replace(state="note", detail=f"{one.detail} (on this machine; the nodes may have it)")
            yield Examined(part, note)
        else:
            yield Examined(part, one)
    for one in _nodes(placed, settings, option, cpus, warned=on_ray):
        yield Examined("recipe", one)


def _nodes(placed: Placed, settings: JobSettings, option: str, cpus: int, *, warned: bool) -> Iterator[Finding]:
    for warning in () if warned else placed.warnings:
        detail, _, fix = warning.rpartition("; ")
        yield Finding("nodes", "note", detail, fix)
    on_devices, gpus = sum(seat.device != CPU for seat in placed.seats.values()), settings.nodes * settings.devices
    if gpus and not on_devices:
        detail = f"--{option}: the job has {gpus} GPUs, and this recipe places no station on a device"
        yield Finding("nodes", "note", detail, "see placement, or leave gpus out")
    seats = f"{len(placed.seats)} processes, {on_devices} of them on {gpus} GPUs"
    yield Finding("nodes", "ok", f"{settings.nodes} of {cpus} CPUs for {seats}")


@contextmanager
def _described(config: RunConfig, settings: JobSettings, cpus: int) -> Iterator[RunConfig]:
    """A run on Ray as one on a cluster that a file describes; another as it is."""
    if config.launcher != "ray":
        yield config
        return
    with TemporaryDirectory() as folder:
        file = Path(folder, "cluster.yaml")
        memory = {} if settings.memory_gb is None else {"memory_gb": settings.memory_gb}
        own = {"cpus": cpus, "gpus": settings.devices, **memory}
        nodes = [{"name": name, **own} for name in _names(settings)]
        file.write_text(yaml.safe_dump({"nodes": nodes}), encoding="utf-8")
        yield config.model_copy(update={"ray": config.ray.model_copy(update={"address": str(file)})})


def _names(settings: JobSettings) -> list[str]:
    return [f"node {index}" for index in range(settings.nodes)]


def place_job(config: RunConfig, settings: JobSettings, option: str) -> Placed:
    """Where the stations are on the job's nodes. ConfigError: the nodes lack devices, or are not those of the run."""
    if config.launcher == "ray" and config.ray.address not in ("auto", *["local"] * (settings.nodes == 1)):
        raise ConfigError(
            f"--{option}: ray.address = {config.ray.address} is not the Ray cluster of the job; leave it out"
        )
    try:
        return place(config, devices=devices_of(config, settings))
    except MissingError as error:
        asked = f"--{option} nodes={settings.nodes},gpus={settings.devices}"
        raise ConfigError(*(f"{asked}: {problem}" for problem in error.problems)) from None


def devices_of(config: RunConfig, settings: JobSettings) -> Devices:
    """The devices of the job's nodes."""
    simulated = config.placement.simulated_devices
    each, kind = min(settings.devices, simulated or settings.devices), SIMULATED if simulated else CUDA
    return Devices(tuple((name, each) for name in _names(settings)), kind)


def cpus_of_node(config: RunConfig, settings: JobSettings, option: str, placed: Placed) -> int:
    """CPUs of each node: as set, else the fewest with which all processes find room, and one for the main process and
    Ray. ConfigError: those set are too few."""
    own = {name: seat for name, seat in placed.seats.items() if not name.startswith(JOINED)}
    if config.launcher != "ray":
        return settings.cpus or 1 + sum(seat.threads for seat in own.values())
    bundles = bundles_of(own, config.ray.cpus_per_station)
    least = math.ceil(max(*(one.cpus for one in bundles), sum(one.cpus for one in bundles) / settings.nodes))
    while not _fits(bundles, _names(settings), least):
        least += 1
    if settings.cpus is not None and settings.cpus < least:
        raise ConfigError(
            f"--{option} nodes={settings.nodes},cpus={settings.cpus}: {len(own)} processes take {least} CPUs of each "
            f"node; raise cpus, or lower ray.cpus_per_station = {config.ray.cpus_per_station:g}"
        )
    return settings.cpus or least + 1


def _fits(bundles: Sequence[Bundle], nodes: Sequence[str], cpus: int) -> bool:
    """Whether bundles find room on nodes of so many CPUs: those of devices on their nodes, then the others."""
    free = dict.fromkeys(nodes, float(cpus))
    for bundle in sorted(bundles, key=lambda one: (not one.node, -one.cpus)):
        at = next((node for node in ([bundle.node] if bundle.node else free) if free[node] >= bundle.cpus - 1e-9), None)
        if at is None:
            return False
        free[at] -= bundle.cpus
    return True


def ask(words: Sequence[str], file: Path) -> str:
    """What a command of the queue prints. StartError: it fails or does not answer; the job's file is named."""
    shown, kept = shlex.join(words[:2]), f"the job is written: {file}"
    try:
        done = subprocess.run(  # noqa: S603 - a list of words, no shell
            words, check=False, capture_output=True, text=True, timeout=_ANSWER_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise StartError(
            f"{shown} did not answer within {_ANSWER_S:g} s; {kept}; submit it again if the queue has it not"
        ) from None
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split()) or f"it ended with status {done.returncode}"
        raise StartError(
            f"{shown} refuses the job ({why}); {kept}; change it there or in the command, and submit again"
        )
    return done.stdout
