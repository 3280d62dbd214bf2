"""A profile: what each station's work takes on one machine, by its amount, in time and memory. One JSON file.

    polyrhythm profile RECIPE ──▶ profile.json ──▶ simulate, plan, report
    a finished run            ──▶ (updates it)

Times are seconds, sizes bytes. Amounts are in the unit of the work: rows of a chunk step, a reset or a pass, chunk
steps of a micro-batch, bytes of weights or of a station that leaves its device.
"""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression
from typing import Annotated, Literal, Self

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polyrhythm.config.recipes import recipe_word
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.files import write_json
from polyrhythm.imports import count_cores
from polyrhythm.plugins.hardware.gpus import Model, open_gpus
from polyrhythm.runtime.memory.tensors import count_devices

FORMAT: Literal[1] = 1
Kind = Literal["simulator", "generator", "trainer", "scorer"]
WorkName = Literal[
    "step",
    "reset",
    "pass",
    "prepare",
    "micro_batch",
    "optimizer_step",
    "stage",
    "apply",
    "offload",
    "onload",
    "score",
    "handover",
    "sample",
]
#: What is measured, and its unit: chunk step and reset of a simulator; forward pass of a generator; of a trainer the
#: collation and targets of an update, forward and backward pass of a micro-batch, and an optimizer step; publishing
#: and loading weights; leaving and entering a device; a sample's score. handover: what a unit of the station's work
#: takes longer in a run, between the conductor's command and the report; sample: what each of a simulator's samples
#: takes besides its steps and its reset.
UNITS: dict[WorkName, str] = {
    "step": "row",
    "reset": "row",
    "pass": "row",
    "prepare": "chunk step",
    "micro_batch": "chunk step",
    "optimizer_step": "",
    "stage": "byte",
    "apply": "byte",
    "offload": "byte",
    "onload": "byte",
    "score": "sample",
    "handover": "",
    "sample": "sample",
}
#: Cores of other processes from which they are mentioned.
_MUCH = 0.2
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProfilePart(BaseModel):
    """A part of the file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Timing(ProfilePart):
    """The times of one amount of work. amount: in the work's unit; count: number of measurements; memory: bytes above
    the station's resident ones while it works, 0 if not measured."""

    amount: int = Field(ge=0)
    count: int = Field(ge=1)
    mean_s: Seconds
    median_s: Seconds
    p90_s: Seconds
    p99_s: Seconds
    memory: int = Field(default=0, ge=0)


class Work(ProfilePart):
    """A kind of work by its amount, in ascending order."""

    timings: tuple[Timing, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        amounts = [timing.amount for timing in self.timings]
        if amounts != sorted(set(amounts)):
            raise ValueError(f"amounts {amounts} do not ascend; write each once, the smallest first")
        return self

    def seconds(self, amount: int) -> float:
        """Mean seconds of an amount: as measured; between two measured ones on the line through both; beyond them
        parallel to the line of all."""
        first, last = self.timings[0], self.timings[-1]
        if amount <= first.amount:
            return max(0.0, first.mean_s - self.per_unit * (first.amount - amount))
        for low, high in pairwise(self.timings):
            if amount <= high.amount:
                share = (amount - low.amount) / (high.amount - low.amount)
                return low.mean_s + share * (high.mean_s - low.mean_s)
        return last.mean_s + self.per_unit * (amount - last.amount)

    def scaled(self, factor: float) -> Work:
        """All times multiplied."""
        names = ("mean_s", "median_s", "p90_s", "p99_s")
        return Work(
            timings=tuple(
                timing.model_copy(update={name: factor * getattr(timing, name) for name in names})
                for timing in self.timings
            )
        )

    @property
    def per_unit(self) -> float:
        """Slope of the least-squares line through the means, at least 0; 0 with one amount."""
        if len(self.timings) == 1:
            return 0.0
        amounts = [timing.amount for timing in self.timings]
        return max(0.0, linear_regression(amounts, [timing.mean_s for timing in self.timings]).slope)


class StationProfile(ProfilePart):
    """One kind of station. device: where it was measured; resident: bytes that it keeps there (host: in host memory).

    beside: factor by which its work takes longer while the named kind works on the same device (1: not at all).
    awake: share of its work in which it uses the processor; a simulator may sleep, or wait for what is elsewhere.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    resident: int = Field(default=0, ge=0)
    host: int = Field(default=0, ge=0)
    works: dict[WorkName, Work]
    beside: dict[Kind, Annotated[float, Field(ge=1, allow_inf_nan=False)]] = {}
    awake: float = Field(default=1.0, gt=0, le=1)


class Episodes(ProfilePart):
    """Lengths of whole episodes in chunk steps: mean, standard deviation, longest; chunk: env steps of a chunk step."""

    mean: float = Field(ge=1)
    deviation: float = Field(default=0.0, ge=0)
    longest: int = Field(ge=1)
    chunk: int = Field(default=1, ge=1)


class Machine(ProfilePart):
    """What it was measured on: cores, host memory, and devices of one name and memory (0: none)."""

    cores: int = Field(ge=1)
    memory: int = Field(ge=1)
    devices: int = Field(default=0, ge=0)
    device: str = ""
    device_memory: int = Field(default=0, ge=0)


class Profile(ProfilePart):
    """The whole file. recipe: its name; settings: digests of the sections that change what work costs
    (`settings_digest`); date: of the measurement, ISO; weights: bytes of a version. rate: transitions per second of the
    run in which the stations were measured together, 0 without one; simulated: those of the cluster that is simulated
    for this run, by this profile, 0 without; others_cores: cores that other processes of the machine used meanwhile,
    which lengthened what was measured then; left_out: a sentence for each measurement that was not made."""

    format: Literal[1] = FORMAT
    recipe: str
    settings: str
    date: str
    machine: Machine
    episodes: Episodes
    weights: int = Field(default=0, ge=0)
    stations: dict[Kind, StationProfile]
    rate: float = Field(default=0.0, ge=0)
    simulated: float = Field(default=0.0, ge=0)
    others_cores: float = Field(default=0.0, ge=0)
    left_out: tuple[str, ...] = ()

    @property
    def assumed(self) -> bool:
        """Whether its numbers were written by hand: it has no digests then."""
        return not self.settings

    def remarks(self) -> dict[str, str]:
        """What to know of predictions by this profile: how far one is from the run in which it was measured, and
        whether that had the machine for itself."""
        found = {}
        if self.rate and self.simulated:
            ratio = f"{self.simulated / self.rate:.2f} times the {self.rate:,.0f} transitions/s that it had"
            found["simulated"] = f"the run in which the profile was measured has {ratio}"
        elif not self.assumed:
            found["simulated"] = "no run of all stations was measured with the profile, so its error is not known"
        if self.others_cores > _MUCH:
            many = f"other processes used {self.others_cores:.1f} of {self.machine.cores} cores during the run"
            found["not alone"] = f"{many}, so what was measured in it is too long; measure again when they do not"
        return found

    def save(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))


def load_profile(path: Path) -> Profile:
    """Read a profile. ConfigError: there is none, or it is not one."""
    remedy = "measure one with `polyrhythm profile RECIPE`"
    if not path.is_file():
        raise ConfigError(f"profile {str(path)!r} is not a file; {remedy}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"profile {str(path)!r} is not JSON ({error}); {remedy}") from None
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"profile {str(path)!r}: {where or 'file'}: {first['msg']}; {remedy}") from None


def this_machine() -> Machine:
    """The cores, memory and devices of this machine. torch, which makes a CUDA context, is asked only where NVIDIA's
    library does not answer."""
    found: dict[str, int | str] = {}
    if count := count_devices():
        gpus = open_gpus()
        model = gpus.model() if gpus is not None else None
        if gpus is not None:
            gpus.close()
        if model is None:
            import torch

            properties = torch.cuda.get_device_properties(0)
            model = Model(count, properties.name, properties.total_memory)
        found = {"devices": count, "device": model.name, "device_memory": model.memory}
    return Machine.model_validate({"cores": count_cores(), "memory": psutil.virtual_memory().total, **found})


def settings_digest(config: RunConfig) -> str:
    """Digest of each section that changes what a unit of work costs: `env:1a2b3c4d policy:…`.

    Amounts are not in it, because a profile has its times by amount: rows, batches, epochs, versions, placement.
    """
    repeat, offload, algorithm = config.rollout.action_repeat, config.training.optimizer.offload, config.algorithm
    sections = {
        "env": {**config.env.model_dump(mode="json"), "action_repeat": repeat},
        "policy": config.policy.model_dump(mode="json"),
        "algorithm": [algorithm.loss.type, algorithm.proximal, bool(algorithm.kl.coef), offload],
    }
    texts = {name: json.dumps(section, sort_keys=True) for name, section in sections.items()}
    return " ".join(f"{name}:{sha256(text.encode()).hexdigest()[:8]}" for name, text in texts.items())


def refuse_other_recipe(profile: Profile, config: RunConfig, recipe: str | None = None) -> None:
    """ConfigError: the profile is of another environment, policy or algorithm; one with assumed numbers, which has no
    digests, is by the recipe's name alone. recipe: what a command calls it."""
    if profile.assumed and profile.recipe == config.name:
        return
    own, here = profile.settings.split(), settings_digest(config).split()
    if differing := [name.partition(":")[0] for name in here if name not in own]:
        raise ConfigError(
            f"profile: it is of recipe {profile.recipe!r}, whose {', '.join(differing)} "
            f"{'differs' if len(differing) == 1 else 'differ'} from this one's; measure this one with "
            f"`polyrhythm profile {recipe or recipe_word(config.name)}`"
        )


def refuse_other_machine(profile: Profile, machine: Machine) -> None:
    """ConfigError: the profile is of a machine with other cores or devices."""
    own = profile.machine
    pairs = [
        (f"{own.cores} cores", f"{machine.cores}", own.cores != machine.cores),
        (f"device {own.device or 'none'!r}", f"{machine.device or 'none'!r}", own.device != machine.device),
    ]
    if differing := [f"{theirs}, here {here}" for theirs, here, differs in pairs if differs]:
        raise ConfigError(
            f"profile: it was measured on a machine with {'; '.join(differing)}; measure here with "
            f"`polyrhythm profile {recipe_word(profile.recipe)}`"
        )
