"""Settings of a policy of LeRobot, its form by config.json, and the policy, whose process begins with its first use."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedRWPair
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from polyrhythm.config.base import Section
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.lerobot.policies import serve
from polyrhythm.plugins.pretrained.folder_files import check_is_folder, read_json
from polyrhythm.plugins.simulators import setup
from polyrhythm.policies import noise
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits
from polyrhythm.sources import local_folder
from polyrhythm.specs import INSTRUCTION, PROGRESS, EnvSpec

_ACTION, _PREFIX = "action", "observation."
#: Seconds for the process to import lerobot and load the policy, to take or give the next bytes of a call, and to end.
_START_S, _CALL_S, _CLOSE_S = 600.0, 600.0, 5.0
_TRAITS = PolicyTraits(value=False)
#: Names of Gymnasium's environments for arrays that LeRobot calls otherwise.
_SYNONYMS = {"agent_pos": "observation.state", "pixels": "observation.image", "proprio": "observation.state"}
_SEED_BITS = 31


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


class LerobotSettings(Section):
    """A policy registered with LeRobot (ACT, diffusion, SmolVLA, or of a package), for evaluation."""

    traits: ClassVar = SettingsTraits(policy=_TRAITS)

    type: Literal["lerobot"] = "lerobot"
    """The policy's name."""
    checkpoint: str = ""
    """Folder of save_pretrained with its pre- and post-processor, or hf://owner/name@revision."""
    python: str = ""
    """Python that has lerobot: a name made by `polyrhythm envs setup`, or the path of an interpreter; empty: this."""
    chunk: int = Field(0, ge=0)
    """Actions that are executed of those predicted; 0: the checkpoint's n_action_steps."""
    keys: dict[str, str] = Field(default_factory=dict)
    """LeRobot's feature for an array of the environment, where the names differ: {front: observation.images.top}."""

    def description(self) -> Description:
        return Description.of(local_folder(self.checkpoint, what="policy.checkpoint"))

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        return describe(lambda _: self._policy(env_spec, "cpu"), {})

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> LerobotPolicy:  # noqa: ARG002
        return self._policy(env_spec, device).to(device)

    def _policy(self, env_spec: EnvSpec, device: str) -> LerobotPolicy:
        return LerobotPolicy(self, self.description(), env_spec, device)

    def features(self, description: Description, spec: EnvSpec) -> dict[str, str]:
        """Array of the environment → feature of the policy. ConfigError: they do not fit."""
        found: dict[str, str] = {}
        for name in spec.observation:
            feature = self.keys.get(name, f"{_PREFIX}{name}")
            if feature not in description.inputs and name not in self.keys:
                feature = _SYNONYMS.get(name, feature)
            if feature in description.inputs:
                found[name] = feature
        lacking = description.inputs.keys() - found.values()
        if lacking or (unknown := self.keys.keys() - spec.observation.keys()):
            named = f"no array for {', '.join(sorted(lacking))}" if lacking else f"no array {min(unknown)}"
            raise ConfigError(
                f"policy.keys = {self.keys}: the environment has {named} but {', '.join(spec.observation)}; name the "
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
                    f"policy.checkpoint = {self.checkpoint}: {feature} needs {wanted[1]} {list(wanted[0])}, the "
                    f"environment's {name} is {have.dtype} {list(have.shape)}{stacked or '; change the environment'}"
                )
        return found


class LerobotPolicy(nn.Module):
    """A policy in a process with LeRobot. It acts; it has no likelihood and no value, so it cannot be trained.

    Each call is one prediction from what the observation has; what LeRobot keeps between the calls of an episode, such
    as ACT's temporal ensembling, is left out. A greedy row's noise depends on the episode's progress alone.
    """

    traits = _TRAITS
    exact, tolerance = False, 1e-4

    def __init__(self, settings: LerobotSettings, description: Description, spec: EnvSpec, device: str) -> None:
        super().__init__()
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
        self.settings, self.description = settings, description
        self.chunk, self.action_dim = settings.chunk or description.steps, description.entries
        self.features = settings.features(description, spec)
        self.instructions = [task.instruction for task in spec.tasks]
        self.bounds = spec.action.low, spec.action.high
        self.device = device
        self.weight = nn.Parameter(torch.zeros(1))  # versions of weights have at least one number
        self._process: LerobotProcess | None = None

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        if self._process is None:
            self._process = LerobotProcess(self.settings, self.device)
        keys = torch.where(greedy, noise.content_keys(obs[PROGRESS].unsqueeze(1)), noise_key)
        arrays = {feature: _lerobot_array(obs[name]) for name, feature in self.features.items()}
        tasks = [self.instructions[i] for i in obs[INSTRUCTION].tolist()]
        seeds = [key % (1 << _SEED_BITS) for key in keys.tolist()]
        found = self._process.act(arrays, tasks, seeds)[:, : self.chunk]
        low, high = (np.asarray(bound, np.float32) for bound in self.bounds)
        actions = torch.from_numpy(np.clip(found, low, high)).to(keys.device)
        zeros = torch.zeros(len(actions), device=keys.device)
        return Act(actions, torch.zeros_like(actions), zeros, {})

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:  # noqa: ARG002
        zeros = torch.zeros(len(obs[PROGRESS]), self.chunk, self.action_dim, device=obs[PROGRESS].device)
        return Evaluation(zeros, self.value(obs), zeros)

    def value(self, obs: Observations) -> Tensor:
        return torch.zeros_like(obs[PROGRESS])

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:  # noqa: ARG002
        raise ConfigError(not_trained(self.settings, self.description))


#: Policies of LeRobot whose folders a policy type here trains, and others that have a flow head.
_TRAINED_HERE, _FLOW = ("pi0", "pi05"), ("smolvla", "groot", "xvla")


def not_trained(settings: LerobotSettings, description: Description) -> str:
    """Why training this policy is refused, and what trains it."""
    kind, train = description.kind, "train it with lerobot-train"
    why = "it has no likelihood that a loss here could use"
    if kind in (*_TRAINED_HERE, *_FLOW):
        why = "its flow head is in a process of its own, which sends no gradients"
    if kind in _TRAINED_HERE:
        train = f"train the same folder with policy.type={kind}"
    return (
        f"policy.checkpoint = {settings.checkpoint}: policy.type = lerobot evaluates a {kind!r} and does not train it: "
        f"{why}; {train}, or set training.versions=0 without demonstrations and supervised"
    )


def _lerobot_array(array: Tensor) -> np.ndarray[Any, Any]:
    """The array as LeRobot has it: float32, images [...,C,H,W] in 0..1."""
    if array.dtype != torch.uint8:
        return array.float().cpu().numpy()
    return (array.movedim(-1, -3).float() / 255.0).contiguous().cpu().numpy()


class LerobotProcess:
    """Client of the process with the policy, which ends with this object or this process. call_s: longest wait for its
    next bytes in a call."""

    def __init__(self, settings: LerobotSettings, device: str, call_s: float = _CALL_S) -> None:
        self._call_s = call_s
        python, self._what = find_python(settings.python), f"policy.checkpoint = {settings.checkpoint}"
        folder = local_folder(settings.checkpoint, what="policy.checkpoint")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603
                    [str(python), "-I", serve.__file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise ConfigError(f"policy.python = {settings.python}: {python}: {error.strerror}") from error
        self._process, self._socket = process, ours
        self._line: BufferedRWPair = ours.makefile("rwb")
        self.close = weakref.finalize(self, _end, process, ours, self._line)
        if self._ask({"open": str(folder), "device": device}, {}, limit_s=_START_S)[0].get("type") is None:
            raise ConfigError(f"{self._what}: the process of {python} does not answer as it should; install this again")

    def act(self, obs: dict[str, Any], tasks: list[str], seeds: list[int]) -> np.ndarray[Any, Any]:
        """Actions [B,H,A]."""
        found: np.ndarray[Any, Any] = self._ask({"tasks": tasks, "seeds": seeds}, obs, self._call_s)[1]["actions"]
        return found

    def _ask(self, message: dict[str, Any], arrays: dict[str, Any], limit_s: float) -> Any:
        try:
            self._socket.settimeout(limit_s)
            serve.write(self._line, message, arrays)
            told, found = serve.read(self._line)
        except TimeoutError as error:
            self.close()
            done = "it was not loaded" if "open" in message else "its process did not answer"
            raise ConfigError(f"{self._what}: {done} in {limit_s:g} s; see what its Python is doing") from error
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError(f"{self._what}: the process of LeRobot {self._how_it_ended()}") from error
        if "error" in told:
            raise ConfigError(f"{self._what}: LeRobot refuses: {told['error']}")
        return told, found

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_CLOSE_S)
            return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return "closed its connection"


def _end(process: subprocess.Popen[bytes], end: socket.socket, line: BufferedRWPair) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # what is not sent yet is not waited for
    for one in (line, end):
        with suppress(OSError):
            one.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_CLOSE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # and what it started
    process.wait()


def find_python(python: str) -> Path:
    """The interpreter for `policy.python`. MissingError: there is none, or this one lacks lerobot."""
    if not python:
        if importlib.util.find_spec("lerobot") is None:
            raise MissingError(
                "policy.python = '': this Python has no lerobot; make one: polyrhythm envs setup lerobot-policies "
                "--with lerobot --with torch, and set policy.python=lerobot-policies"
            )
        return Path(sys.executable)
    return setup.find_python(python, "policy.python")
