"""Uses of a trained policy outside of runs: on a robot, without simulator, stations or the environment's class, and as
one folder of safetensors, in its released layout, as adapters, or by its own names.

The policy file holds the weights and the environment's spec.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.explain import explain
from polyrhythm.config.load import validate
from polyrhythm.config.registry import NestedRefusal, known_types, resolve
from polyrhythm.errors import ConfigError, MissingError, RunFolderError, nearest
from polyrhythm.files import name_in_errors, new_folder
from polyrhythm.observe.run_folder import find_run
from polyrhythm.pipeline.array_specs import blank
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.persistence.checkpoints import EXPORTED_MODEL, EXPORTED_SETTINGS, SavedPolicy, read_policy
from polyrhythm.pipeline.persistence.resume_rules import naming_where_it_began
from polyrhythm.plugin import import_address
from polyrhythm.policies.base import Policy, PolicySettings, as_module, as_settings
from polyrhythm.policies.form import load_published
from polyrhythm.policies.traits import settings_traits
from polyrhythm.runtime.memory.tensors import as_array, as_tensors
from polyrhythm.safetensors_files import write_tensors
from polyrhythm.sources import fetched_folder
from polyrhythm.specs import INSTRUCTION, PROGRESS, ArraySpec, EnvSpec
from polyrhythm.specs.hashing import mix, mix_array
from polyrhythm.specs.plain import as_plain


class StandalonePolicy:
    """A trained policy that maps observations to actions.

    spec: of its training environment (observation, action, tasks with their instructions, max_steps); chunk: actions
    per call (C); action_repeat: env steps per action in training; version: of the weights; reads_instruction,
    reads_progress: whether it uses the instruction, and the elapsed fraction of the episode.
    """

    def __init__(self, policy: Policy, spec: EnvSpec, action_repeat: int, version: int, device: str = "cpu") -> None:
        module = as_module(policy).to(device).eval().requires_grad_(False)
        self.spec, self.chunk, self.action_repeat, self.version = spec, policy.chunk, action_repeat, version
        self._policy, self._device = policy, next(module.parameters()).device
        obs = _ReadTracker({name: tensor.to(self._device) for name, tensor in blank(spec).items()})
        greedy = torch.ones(1, dtype=torch.bool, device=self._device)
        with torch.inference_mode():
            policy.act(obs, greedy, torch.zeros(1, dtype=torch.int64, device=self._device))
        self.reads_instruction, self.reads_progress = INSTRUCTION in obs.read, PROGRESS in obs.read

    def act(
        self,
        obs: Mapping[str, ArrayLike],
        instruction: str | Sequence[str] | None = None,
        *,
        step: int | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> NDArray[Any]:
        """The next actions [C,A] in the environment's units; [B,C,A] if the arrays of `obs` have B rows.

        obs: every array of `spec.observation`; others are ignored. instruction: an instruction or a name of one of
        `spec.tasks`, for all rows or for each; required if there are several tasks and the policy uses it. step: env
        steps since the episode began, for all rows or for each; required if the policy uses it. seed: sample as in
        training, with noise from (seed, step, row), which requires `step`; None: act without noise. ValueError: an
        argument does not fit.
        """
        arrays, batched = self._checked(obs)
        rows = len(next(iter(arrays.values()))) if arrays else 1
        if seed is not None and step is None:
            raise ValueError(
                f"seed = {seed}: without step the noise would be the same in every call; give step, the env steps "
                "since the episode began"
            )
        steps = self._steps(step, rows)
        arrays[INSTRUCTION] = self._instructions(instruction, rows)
        arrays[PROGRESS] = np.minimum(steps / self.spec.max_steps, 1.0).astype(np.float32)
        streams = np.array([mix(seed or 0, row) for row in range(rows)], np.int64)
        sampling = {"greedy": np.full(rows, seed is None), "noise_key": mix_array(streams, steps)}
        tensors, keys = as_tensors(arrays, self._device), as_tensors(sampling, self._device)
        with torch.inference_mode():
            actions = as_array(self._policy.act(tensors, keys["greedy"], keys["noise_key"]).actions)
        return actions if batched else actions[0]

    def _checked(self, obs: Mapping[str, ArrayLike]) -> tuple[dict[str, NDArray[Any]], bool]:
        """Copies of the arrays with a row dimension, and whether the input had one."""
        arrays, sizes = {}, {}
        for name, spec in self.spec.observation.items():
            if name not in obs:
                raise ValueError(f"obs: {name} is missing; give {', '.join(self.spec.observation)}")
            array = _of_dtype(name, np.asarray(obs[name]), spec)
            batched = array.ndim == len(spec.shape) + 1
            if array.shape[batched:] != spec.shape or array.size == 0:
                raise ValueError(
                    f"obs[{name!r}] has shape {list(array.shape)}: the policy needs {list(spec.shape)}, or rows of that"
                )
            sizes[name] = len(array) if batched else None
            arrays[name] = array if batched else array[None]
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {'one' if rows is None else rows}" for name, rows in sizes.items())
            raise ValueError(f"obs: the arrays have different numbers of rows ({listed}); make them equal")
        return arrays, bool(sizes) and next(iter(sizes.values())) is not None

    def _steps(self, step: int | Sequence[int] | None, rows: int) -> NDArray[np.int64]:
        if step is None and self.reads_progress:
            raise ValueError(
                "step = None: this policy uses the progress of the episode; give the env steps since it "
                f"began, of {self.spec.max_steps}"
            )
        steps = np.asarray(0 if step is None else step)
        if steps.dtype.kind not in "iu" or steps.shape not in ((), (rows,)) or (steps < 0).any():
            raise ValueError(f"step = {step}: it must be an integer of 0 or more, or one for each of {rows} rows")
        return np.broadcast_to(steps.astype(np.int64), rows)

    def _instructions(self, instruction: str | Sequence[str] | None, rows: int) -> NDArray[np.int64]:
        tasks = self.spec.tasks
        if instruction is None:
            if len(tasks) > 1 and self.reads_instruction:
                raise ValueError(f"instruction = None: this policy needs one; {self._known()}")
            return np.zeros(rows, np.int64)
        given = [instruction] * rows if isinstance(instruction, str) else list(instruction)
        if len(given) != rows:
            raise ValueError(f"instruction: {len(given)} sentences for {rows} rows; give one, or one for each row")
        known: dict[str, int] = {}
        for i, task in enumerate(tasks):  # of tasks with the same words, the first
            known.setdefault(_normalize(task.name), i)
            known.setdefault(_normalize(task.instruction), i)
        for sentence in given:
            if _normalize(sentence) not in known:
                near = nearest(sentence, [task.instruction for task in tasks])
                raise ValueError(f"instruction = {sentence!r}: the policy was not trained on it; {near}{self._known()}")
        return np.array([known[_normalize(sentence)] for sentence in given], np.int64)

    def _known(self) -> str:
        return f"it knows {', '.join(repr(task.instruction) for task in self.spec.tasks)}"


def load_standalone(path: Path, device: str = "cpu") -> StandalonePolicy:
    """Load the policy of a run folder, a checkpoint or a policy file to `device`.

    RunFolderError: there is none; ConfigError: its class cannot be found or does not fit its spec.
    """
    path = find_run(path)
    saved = read_policy(path)
    try:
        with naming_where_it_began(path):
            spec = saved.spec or env_settings(validate(saved.config, origin=str(saved.file))).spec()
            settings = _settings(saved)
        seed, action_repeat = int(saved.config["seed"]), int(saved.config["rollout"]["action_repeat"])
    except (KeyError, TypeError) as error:
        raise RunFolderError(
            f"{saved.file} is not of this version of polyrhythm ({type(error).__name__}: {error}); load it with the "
            "version that wrote it"
        ) from error
    policy = settings.build(spec, seed=seed, device=device, role="act")
    try:
        load_published(as_module(policy), saved.weights)
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}; these weights belong to other settings, name another") from error
    return StandalonePolicy(policy, spec, action_repeat, saved.version, device)


def _settings(saved: SavedPolicy) -> PolicySettings:
    try:
        settings = resolve("policy", saved.config["policy"])
    except NestedRefusal as error:
        raise ConfigError(*explain(error.error, error.model, "policy"), origin=str(saved.file)) from None
    except InvalidSetting as error:
        raise ConfigError(f"policy.{error}", origin=str(saved.file)) from None
    try:
        return as_settings(settings)
    except ValueError as error:
        raise ConfigError(str(error), origin=str(saved.file)) from error


def _of_dtype(name: str, array: NDArray[Any], spec: ArraySpec) -> NDArray[Any]:
    """A copy with the spec's dtype. ValueError: the kind of number differs, or a value does not fit."""
    dtype = np.dtype(spec.dtype)
    if array.dtype.kind != dtype.kind:
        raise ValueError(f"obs[{name!r}] is {array.dtype}: the policy needs {dtype}; convert it as in training")
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"obs[{name!r}] has NaN or inf; check the sensor")
    converted: NDArray[Any] = array.astype(dtype, order="C")
    if dtype.kind in "iu" and (converted != array).any():
        raise ValueError(f"obs[{name!r}] has values beyond {dtype}; convert it as in training")
    return converted


def _normalize(sentence: str) -> str:
    return " ".join(re.findall(r"\w+", sentence.lower()))


class _ReadTracker(Mapping[str, Tensor]):
    def __init__(self, obs: Mapping[str, Tensor]) -> None:
        self.read: set[str] = set()
        self._obs = obs

    def __getitem__(self, name: str) -> Tensor:
        found = self._obs[name]  # before `add`: a failed lookup, as by `in`, is not a read
        self.read.add(name)
        return found

    def __iter__(self) -> Iterator[str]:
        self.read.update(self._obs)
        return iter(self._obs)

    def __len__(self) -> int:
        return len(self._obs)


def export_policy(path: Path, out: Path, base: str | None = None) -> dict[str, Any]:
    """Write the policy at `path` into the new folder `out`; returns a summary for display.

    base: released folder that the policy was trained from, in place of the one in its settings. ConfigError: the policy
    has no released layout for that base.
    """
    saved = read_policy(path)
    section = saved.config["policy"]
    kind, own = section["type"], section.get("checkpoint", "")
    what = ""
    if folders := _folder_format(kind):
        settings = as_settings(resolve("policy", section))
        base = base or own
        if base and base == own and not fetched_folder(base, what="--base").exists():
            there = "name where it is now: --base FOLDER"
            raise MissingError(f"{path}: it was trained on {base}, which is not there; {there}")
        origin = (saved.spec, saved.config.get("seed"))
        what = import_address(folders)().export(settings, saved.weights, out, base=base, source=path, env=origin)
    elif base:
        have = [name for name in known_types("policy") if _folder_format(name)]
        raise ConfigError(
            f"--base = {base}: policy.type = {kind} has no released layout; leave it out (those that have one are "
            f"{', '.join(have)})"
        )
    if not what:
        spec, env = None if saved.spec is None else as_plain(saved.spec), saved.config.get("env")
        content = {"policy": section, "version": saved.version, "env": env, "spec": spec, "config": saved.config}
        with new_folder(out) as unfinished:
            with name_in_errors(unfinished / EXPORTED_SETTINGS):
                (unfinished / EXPORTED_SETTINGS).write_text(json.dumps(content, indent=1), encoding="utf-8")
            # safetensors refuses tensors that share memory.
            write_tensors({name: tensor.clone() for name, tensor in saved.weights.items()}, unfinished / EXPORTED_MODEL)
    named = {"base": str(base)} if what and base else {}
    return {"exported": what or "policy", "version": saved.version, **named, "out": str(out)}


def _folder_format(kind: str) -> str:
    """`SettingsTraits.folders` of a policy type; "" for a type outside the registry or with required settings."""
    try:
        return settings_traits(resolve("policy", kind)).folders if kind in known_types("policy") else ""
    except NestedRefusal:
        return ""
