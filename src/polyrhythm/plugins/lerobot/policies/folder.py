"""Folders of LeRobot's save_pretrained: config.json, its match with an environment, export, what trains them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.building import save_changed, split_state
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.folder_files import check_is_folder, read_json
from polyrhythm.policies.base import FolderReport
from polyrhythm.sources import local_folder
from polyrhythm.specs import EnvSpec

_ACTION, _PREFIX, STATE = "action", "observation.", "observation.state"
#: Names of Gymnasium's environments for arrays that LeRobot calls otherwise.
_SYNONYMS = {"agent_pos": STATE, "pixels": "observation.image", "proprio": STATE}


@dataclass(frozen=True, slots=True)
class Description:
    """Content of a policy's config.json. inputs: feature → its type and shape; frames: observations that it reads;
    steps: actions that it executes of a prediction; entries: of an action."""

    kind: str
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    frames: int
    steps: int
    entries: int

    @classmethod
    def of(cls, folder: Path) -> Description:
        """ConfigError: the folder is not one of LeRobot's save_pretrained."""
        check_is_folder(folder)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"policy.checkpoint = {folder}: it has no config.json; name a folder of save_pretrained")
        found = read_json(folder / "config.json")
        try:
            inputs = {name: (one["type"], tuple(one["shape"])) for name, one in found["input_features"].items()}
            (entries,) = found["output_features"][_ACTION]["shape"]
            steps = found.get("n_action_steps") or found["chunk_size"]
            described = cls(str(found["type"]), inputs, int(found.get("n_obs_steps", 1)), int(steps), int(entries))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"policy.checkpoint = {folder}: config.json is not of a policy of LeRobot ({type(error).__name__}: "
                f"{error}); name a folder of its save_pretrained"
            ) from error
        for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
            if not (folder / name).is_file():
                raise ConfigError(
                    f"policy.checkpoint = {folder}: it has no {name}, which LeRobot saves beside the policy since 0.4; "
                    "convert it with lerobot.processor.migrate_policy_normalization"
                )
        return described


class FolderSettings(Protocol):
    """Settings that name a folder and match it with an environment."""

    @property
    def checkpoint(self) -> str: ...

    @property
    def chunk(self) -> int: ...

    @property
    def keys(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """A folder's match with an environment. features: array of the environment → feature of the policy; chunk: executed
    actions of a prediction; entries: of an action; state: of `observation.state`; low, high: bounds of the actions."""

    description: Description
    features: Mapping[str, str]
    chunk: int
    instructions: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, settings: FolderSettings, spec: EnvSpec) -> FolderLayout:
        """ConfigError: the folder is not one of LeRobot, or does not fit the environment."""
        description = Description.of(local_folder(settings.checkpoint, what="policy.checkpoint"))
        if spec.action.kind != "continuous" or spec.action.dim != description.entries:
            raise ConfigError(
                f"policy.checkpoint = {settings.checkpoint}: its actions have {description.entries} numbers, the "
                f"environment's are {spec.action.kind} with {spec.action.dim}; name another"
            )
        if settings.chunk > description.steps:
            raise ConfigError(
                f"policy.chunk = {settings.chunk}: the checkpoint executes at most {description.steps} actions "
                "(n_action_steps); lower it"
            )
        features = _features(settings, description, spec)
        tasks = tuple(task.instruction for task in spec.tasks)
        chunk = settings.chunk or description.steps
        return cls(description, features, chunk, tasks, tuple(spec.action.low), tuple(spec.action.high))

    @property
    def state_entries(self) -> int:
        _, shape = self.description.inputs.get(STATE, ("", (0,)))
        return prod(shape) * self.description.frames

    def arrays(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The observations as LeRobot has them: by feature, float32, images [...,C,H,W] in 0..1."""
        return {feature: _lerobot_array(obs[name]) for name, feature in self.features.items()}

    def tasks(self, numbers: Tensor) -> list[str]:
        return [self.instructions[i] for i in numbers.tolist()]


def _features(settings: FolderSettings, description: Description, spec: EnvSpec) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in spec.observation:
        feature = settings.keys.get(name, f"{_PREFIX}{name}")
        if feature not in description.inputs and name not in settings.keys:
            feature = _SYNONYMS.get(name, feature)
        if feature in description.inputs:
            found[name] = feature
    lacking = description.inputs.keys() - found.values()
    if lacking or (unknown := settings.keys.keys() - spec.observation.keys()):
        named = f"no array for {', '.join(sorted(lacking))}" if lacking else f"no array {min(unknown)}"
        raise ConfigError(
            f"policy.keys = {settings.keys}: the environment has {named} but {', '.join(spec.observation)}; name the "
            f"policy's inputs ({', '.join(description.inputs)}), as in policy.keys={{NAME: observation.state}}"
        )
    for name, feature in found.items():
        kind, shape = description.inputs[feature]
        visual = kind == "VISUAL"
        wanted = ((shape[1], shape[2], shape[0]) if visual else shape, "uint8" if visual else "float32")
        if description.frames > 1:
            wanted = ((description.frames, *wanted[0]), wanted[1])
        if (spec.observation[name].shape, spec.observation[name].dtype) != wanted:
            stacked = "; wrap it in gymnasium.wrappers:FrameStackObservation" * (description.frames > 1)
            have = spec.observation[name]
            raise ConfigError(
                f"policy.checkpoint = {settings.checkpoint}: {feature} needs {wanted[1]} {list(wanted[0])}, the "
                f"environment's {name} is {have.dtype} {list(have.shape)}{stacked or '; change the environment'}"
            )
    return found


def _lerobot_array(array: Tensor) -> Tensor:
    if array.dtype != torch.uint8:
        return array.float()
    return (array.movedim(-1, -3).float() / 255.0).contiguous()


#: Prefix of LeRobot's names within a policy's network.
_LEROBOTS = "policy."


class LerobotFolders:
    """Export into the folder's own layout, which LeRobot reads (`policies.base.FolderFormat`)."""

    def export(
        self,
        settings: Any,  # noqa: ARG002 - the contract's
        weights: Mapping[str, Tensor],
        out: Path,
        *,
        base: str,
        source: Path,  # noqa: ARG002
        env: Any,  # noqa: ARG002
    ) -> str:
        """The folder `base` with the trained tensors, and the critic beside them in polyrhythm.safetensors."""
        opened, (network, ours) = Checkpoint.open(base), split_state(weights)
        trained = {name.removeprefix(_LEROBOTS).removeprefix(opened.prefix): x for name, x in network.items()}
        for name, tensor in trained.items():
            if name not in opened.tensors or tensor.shape != opened.tensors[name].shape:
                raise ConfigError(f"{base} has no tensor {name} {list(tensor.shape)}; name the folder that was trained")
        save_changed(opened, trained.get, out, ours)
        return "network"

    def recognises(self, folder: Path) -> bool:  # noqa: ARG002 - `policies inspect` describes folders of networks here
        return False

    def inspect(self, folder: Path) -> FolderReport:
        raise NotImplementedError

    def merge(self, adapters: Path, base: Path, out: Path) -> None:
        raise NotImplementedError


_SENDS_NONE = "its process sends no gradients"
#: Type of a policy of LeRobot → why policy.type=lerobot does not train it, and what does; of others: "".
_REASONS = {
    "act": ("it regresses actions, so it has no likelihood", "train it with lerobot-train"),
    "diffusion": ("the likelihood of its denoising steps (DPPO) is not built here", "train it with lerobot-train"),
    "smolvla": (_SENDS_NONE, "train it with policy.type=lerobot_flow"),
    "pi0": (_SENDS_NONE, "train the same folder with policy.type=pi0"),
    "pi05": (_SENDS_NONE, "train the same folder with policy.type=pi05"),
    "": (_SENDS_NONE, "use policy.type=lerobot_flow if its class has flow_prefix, else lerobot-train"),
}
#: Types that policy.type=lerobot_flow refuses without looking at their class → why, and what to use.
_NO_FLOW = {kind: _REASONS[kind] for kind in ("act", "diffusion")} | {
    kind: ("its network is built here", f"use policy.type={kind}") for kind in ("pi0", "pi05")
}
_NO_HEAD = "its class has no flow_prefix, flow_velocity and flow_shape", "add these to it"


def not_trained(checkpoint: str, kind: str) -> str:
    """Why policy.type=lerobot does not train a policy of this kind, and what does."""
    why, remedy = _REASONS.get(kind, _REASONS[""])
    return (
        f"policy.checkpoint = {checkpoint}: policy.type = lerobot evaluates a {kind!r} and does not train it: {why}; "
        f"{remedy}, or set training.versions=0 without demonstrations and supervised"
    )


def has_no_flow(kind: str) -> bool:
    """Whether this is a type of LeRobot's own that policy.type=lerobot_flow refuses."""
    return kind in _NO_FLOW


def no_flow_head(checkpoint: str, kind: str) -> str:
    """Why policy.type=lerobot_flow cannot use a policy of this kind, and what can."""
    why, remedy = _NO_FLOW.get(kind, _NO_HEAD)
    return (
        f"policy.checkpoint = {checkpoint}: policy.type = lerobot_flow cannot use a {kind!r}: {why}; {remedy}, or "
        "evaluate it with policy.type=lerobot and training.versions=0"
    )
