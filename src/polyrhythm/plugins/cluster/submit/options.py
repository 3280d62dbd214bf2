"""Settings of a job, from `key=value,key=value` on the command line. Values are checked here, so that a job file needs
no quoting beyond the shell's."""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from polyrhythm.config.base import InvalidSetting, Section
from polyrhythm.config.explain import explain
from polyrhythm.errors import ConfigError


def _matching(pattern: str, why: str) -> AfterValidator:
    """Validator of text that matches the pattern as a whole."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise InvalidSetting("", text, why)
        return text

    return AfterValidator(check)


#: Seconds before a job's end at which Slurm signals it, and the shortest job of which a part remains for training.
SIGNAL_S = 120
_SHORTEST_S = 300
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+)(?::(\d+))?(?::(\d+))?)")


def _check_time(text: str) -> str:
    seconds = time_s(text)
    if seconds is None:
        raise InvalidSetting("", text, "write minutes, hours:minutes:seconds or days-hours, such as 04:00:00")
    if seconds < _SHORTEST_S:
        raise InvalidSetting(
            "", text, f"a job is requeued {SIGNAL_S} s before its end, so it would not train; write 5 or more"
        )
    return text


def time_s(text: str) -> int | None:
    """Seconds of a time limit as Slurm reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. None: it is none of these."""
    if (found := _TIME.fullmatch(text)) is None:
        return None
    days, *later = (int(part or 0) for part in found.groups()[:4])
    if found[1] is None:
        first, second, third = found.groups()[4:]
        numbers = [int(part) for part in (first, second, third) if part is not None]
        later = {1: [0, *numbers, 0], 2: [0, *numbers], 3: numbers}[len(numbers)]
    return 86400 * days + 3600 * later[0] + 60 * later[1] + later[2]


_Count = Annotated[int, Field(ge=1)]
_Whole = Annotated[int, Field(ge=0)]
_Name = Annotated[str, _matching(r"[\w.:+@/-]+", "it must have letters, digits and . _ - : + @ / only")]
_Names = Annotated[str, _matching(r"[\w.,:+@/-]+", "it must have letters, digits and . _ - : + @ / only")]
_Path = Annotated[str, _matching(r"[^\x00-\x1f]+", "it must be a path without line breaks")]


class JobSettings(Section):
    """Nodes of a job; each of them has the same."""

    nodes: _Count = 1
    """Nodes of the job."""
    cpus: _Count | None = None
    """CPUs of each node; without it as many as the recipe's stations take."""

    @property
    def devices(self) -> int:
        """GPUs of each node."""
        raise NotImplementedError

    @property
    def memory_gb(self) -> float | None:
        """Memory of each node, in 10^9 bytes; None: not given, or all that it has."""
        raise NotImplementedError


class SlurmSettings(JobSettings):
    """A job of Slurm."""

    gpus: Annotated[str, _matching(r"(?:[\w.-]+:)?\d+", "write a number, or TYPE:NUMBER such as h100:8")] = "0"
    """GPUs of each node, with their type if the cluster asks for one."""
    mem: Annotated[str, _matching(r"\d+[KMGT]?", "write a number and K, M, G or T, such as 64G; 0 for all")] | None = (
        None
    )
    """Memory of each node; without it the cluster's default, or all of it if nodes are more than one."""
    time: Annotated[str, AfterValidator(_check_time)] | None = None
    """Time limit of the job; without it the partition's. A run goes on in the requeued job."""
    partition: _Names | None = None
    """Partition, or several."""
    account: _Name | None = None
    """Account that pays."""
    qos: _Name | None = None
    """Quality of service."""
    setup: _Path | None = None
    """File for bash that each node reads first, such as one that loads modules."""

    @property
    def devices(self) -> int:
        return int(self.gpus.rpartition(":")[2])

    @property
    def memory_gb(self) -> float | None:
        found = re.fullmatch(r"(\d+)([KMGT]?)", self.mem or "0")
        assert found is not None
        return int(found[1]) * 1024 ** (1 + "KMGT".index(found[2] or "M")) / 1e9 or None


class KubeRaySettings(JobSettings):
    """A RayJob of KubeRay."""

    image: _Name
    """Image of all pods, with polyrhythm[ray] and what environment and policy need."""
    claim: _Name
    """PersistentVolumeClaim (ReadWriteMany) that is mounted at /runs, for the run's folder."""
    gpus: _Whole = 0
    """GPUs of each node."""
    mem: (
        Annotated[str, _matching(r"\d+(?:\.\d+)?(?:[KMGT]i?|k)?", "write a number with a unit, such as 64Gi")] | None
    ) = None
    """Memory of each node, its /dev/shm included."""
    namespace: Annotated[str, _matching(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "it must be a name of Kubernetes")] | None = (
        None
    )
    """Namespace; without it that of kubectl."""

    @property
    def devices(self) -> int:
        return self.gpus

    @property
    def memory_gb(self) -> float | None:
        found = re.fullmatch(r"([\d.]+)([KkMGT]?)(i?)", self.mem or "0")
        assert found is not None
        power = " KMGT".index(found[2].upper() or " ")
        return float(found[1]) * (1024 if found[3] else 1000) ** power / 1e9 or None


Settings = TypeVar("Settings", bound=JobSettings)


def parse_job(option: str, text: str, model: type[Settings]) -> Settings:
    """The settings in the text after `--OPTION`. ConfigError: with a sentence for each problem."""
    given: dict[str, str] = {}
    for part in re.split(r",(?=[A-Za-z_][\w-]*=)", text):  # a value may have commas
        key, equals, value = part.partition("=")
        if not (equals and key and value):
            raise ConfigError(f"--{option} {text}: {part!r} is not key=value; the keys are {', '.join(_keys(model))}")
        if key in given:
            raise ConfigError(f"--{option} {text}: {key} is there twice; leave one out")
        given[key] = value
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise ConfigError(*explain(error, model, option)) from None


def _keys(model: type[JobSettings]) -> list[str]:
    return list(model.model_fields)
