"""A policy of LeRobot in a process of its own, for evaluation: settings, form by config.json, and the process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
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
from polyrhythm.plugins.lerobot.policies.folder import FolderLayout, not_trained
from polyrhythm.plugins.simulators import setup
from polyrhythm.policies import noise
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits
from polyrhythm.sources import local_folder
from polyrhythm.specs import INSTRUCTION, PROGRESS, EnvSpec

#: Seconds for the process to import lerobot and load the policy, to take or give the next bytes of a call, and to end.
_START_S, _CALL_S, _CLOSE_S = 600.0, 600.0, 5.0
_TRAITS = PolicyTraits(value=False)
_SEED_BITS = 31


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

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        return describe(lambda _: self._policy(env_spec, "cpu"), {})

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> LerobotPolicy:  # noqa: ARG002
        return self._policy(env_spec, device).to(device)

    def _policy(self, env_spec: EnvSpec, device: str) -> LerobotPolicy:
        return LerobotPolicy(self, FolderLayout.of(self, env_spec), device)


class LerobotPolicy(nn.Module):
    """A policy in a process with LeRobot. It acts; it has no likelihood and no value, so it cannot be trained.

    Each call is one prediction from what the observation has; what LeRobot keeps between the calls of an episode, such
    as ACT's temporal ensembling, is left out. A greedy row's noise depends on the episode's progress alone.
    """

    traits = _TRAITS
    exact, tolerance = False, 1e-4

    def __init__(self, settings: LerobotSettings, layout: FolderLayout, device: str) -> None:
        super().__init__()
        self.settings, self.layout, self.device = settings, layout, device
        self.chunk, self.action_dim = layout.chunk, layout.description.entries
        self.weight = nn.Parameter(torch.zeros(1))  # versions of weights have at least one number
        self._process: LerobotProcess | None = None

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        if self._process is None:
            self._process = LerobotProcess(self.settings, self.device)
        keys = torch.where(greedy, noise.content_keys(obs[PROGRESS].unsqueeze(1)), noise_key)
        arrays = {feature: array.cpu().numpy() for feature, array in self.layout.arrays(obs).items()}
        seeds = [key % (1 << _SEED_BITS) for key in keys.tolist()]
        found = self._process.act(arrays, self.layout.tasks(obs[INSTRUCTION]), seeds)[:, : self.chunk]
        low, high = (np.asarray(bound, np.float32) for bound in (self.layout.low, self.layout.high))
        actions = torch.from_numpy(np.clip(found, low, high)).to(keys.device)
        zeros = torch.zeros(len(actions), device=keys.device)
        return Act(actions, torch.zeros_like(actions), zeros, {})

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:  # noqa: ARG002
        zeros = torch.zeros(len(obs[PROGRESS]), self.chunk, self.action_dim, device=obs[PROGRESS].device)
        return Evaluation(zeros, self.value(obs), zeros)

    def value(self, obs: Observations) -> Tensor:
        return torch.zeros_like(obs[PROGRESS])

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:  # noqa: ARG002
        raise ConfigError(not_trained(self.settings.checkpoint, self.layout.description.kind))


class LerobotProcess:
    """Client of the process with the policy, which ends with this object or this process. call_s: longest wait for its
    next bytes in a call."""

    def __init__(self, settings: LerobotSettings, device: str, call_s: float = _CALL_S) -> None:
        self._call_s = call_s
        python, self._what = find_python(settings.python), f"policy.checkpoint = {settings.checkpoint}"
        folder = local_folder(settings.checkpoint, what="policy.checkpoint")
        temporary = tempfile.mkdtemp(prefix="polyrhythm-lerobot-")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603
                    [str(python), "-I", serve.__file__, str(theirs.fileno()), temporary],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                shutil.rmtree(temporary)
                raise ConfigError(f"policy.python = {settings.python}: {python}: {error.strerror}") from error
        self._process, self._socket = process, ours
        self._line: BufferedRWPair = ours.makefile("rwb")
        self.close = weakref.finalize(self, _end, process, ours, self._line, temporary)
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


def _end(process: subprocess.Popen[bytes], end: socket.socket, line: BufferedRWPair, temporary: str) -> None:
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
    shutil.rmtree(temporary, ignore_errors=True)


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
