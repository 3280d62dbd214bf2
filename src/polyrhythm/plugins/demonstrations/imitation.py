"""Supervised warm start: imitation of demonstrations before reinforcement learning.

The loss is the policy's (`sft_loss`, including soft labels). This module has the data order, the optimizer and its
schedule: AdamW, linear warm-up, half a cosine to zero.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.config.sections.learning import OptimizerSettings, SupervisedSettings
from polyrhythm.errors import RunFolderError, RunHalted
from polyrhythm.files import atomic_write
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import load_published, published_state
from polyrhythm.specs import INSTRUCTION
from polyrhythm.specs.finite import first_not_finite
from polyrhythm.training import optim
from polyrhythm.training.moments import update_normalizers
from polyrhythm.training.steps import Steps

_OBS = "obs/"
_TASKS, _REPEAT = "tasks", "action_repeat"


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """N demonstrated chunk steps. obs: name → [N,...]; actions [N,C,A] in env units, the expert's from that step on.

    tasks: names of the tasks that instructions index; action_repeat: env steps that an action was held. Both are
    checked against the run; () and 0 if unknown.
    """

    obs: dict[str, NDArray[np.generic]]
    actions: NDArray[np.generic]
    tasks: tuple[str, ...] = ()
    action_repeat: int = 0

    def __post_init__(self) -> None:
        lengths = {name: len(x) for name, x in self.obs.items()} | {"actions": len(self.actions)}
        if len(set(lengths.values())) != 1 or not len(self.actions):
            raise ValueError(f"demonstrations need as many observations as actions, and at least one; got {lengths}")

    def __len__(self) -> int:
        return len(self.actions)

    def save(self, path: Path) -> None:
        """Write an .npz of plain arrays, atomically."""
        arrays = {"actions": self.actions} | {_OBS + name: x for name, x in self.obs.items()}
        arrays |= {_TASKS: np.array(self.tasks, np.str_), _REPEAT: np.array(self.action_repeat)}
        objects = [name for name, x in arrays.items() if x.dtype.hasobject]
        if objects:
            raise ValueError(f"{path}: {objects} hold Python objects, which only pickle could store; use number arrays")
        with atomic_write(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Demonstrations:
        """Read what `save` wrote, without executing anything in the file. RunFolderError: the file is absent, not
        demonstrations, or contains NaN or infinity, which would make every imitating step non-finite."""
        if not path.is_file():
            raise RunFolderError(f"{path} is not there; name a file of demonstrations")
        if not zipfile.is_zipfile(path):
            raise RunFolderError(f"{path} holds no demonstrations: it is damaged, or something else; record them again")
        try:
            with np.load(path, allow_pickle=False) as file:
                if "actions" not in file:
                    raise KeyError("no array is named actions")
                obs = {name.removeprefix(_OBS): file[name] for name in file if name.startswith(_OBS)}
                tasks = tuple(file[_TASKS].tolist()) if _TASKS in file else ()
                found = cls(obs, file["actions"], tasks, int(file[_REPEAT]) if _REPEAT in file else 0)
        except Exception as error:  # arbitrary bytes may raise anything
            raise RunFolderError(f"{path} holds no demonstrations: {error}; record them again") from error
        floating = {n: x for n, x in (*found.obs.items(), ("actions", found.actions)) if x.dtype.kind == "f"}
        for row, name in first_not_finite(floating).items():
            instruction = found.obs.get(INSTRUCTION)
            of = "" if instruction is None or not tasks else f" of task {tasks[int(instruction[row])]}"
            raise RunFolderError(f"{path}: {name} of chunk step {row}{of} is not finite; record them again")
        return found


#: Optimizer steps between two checks that they were finite: a check waits for the device.
_CHECK_EVERY = 50


class SupervisedLearner:
    """A policy with its own optimizer; the policy stays on its device."""

    def __init__(self, policy: Policy, supervised: SupervisedSettings, *, seed: int) -> None:
        self.policy = policy
        self.step = 0
        self._supervised, self._seed = supervised, seed
        self._module = as_module(policy)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        optimizer = OptimizerSettings(lr=supervised.lr, weight_decay=supervised.weight_decay)
        self._optimizer = optim.adamw(self._module, optimizer)

    def steps(self, demonstrations: Demonstrations) -> Steps:
        """The remaining optimizer steps (all, or those after `load_state_dict`): one per `next()`.

        Returns means over the last tenth of all steps: train/sft/loss and train/sft/grad_norm. The policy is in
        training mode between the steps and in evaluation mode at the end. A step whose gradient is not finite is
        skipped; RunHalted within `_CHECK_EVERY` steps, with the cause.
        """
        settings = self._supervised
        obs = {name: torch.from_numpy(x) for name, x in demonstrations.obs.items()}
        actions = torch.from_numpy(demonstrations.actions)
        metrics: list[Tensor] = []
        if self.step == 0:
            update_normalizers(self._module, obs, torch.ones(len(demonstrations), dtype=torch.bool))
        self._module.train()
        try:
            while self.step < settings.steps:
                index = torch.from_numpy(rows_of_step(self.step, settings.batch_size, len(demonstrations), self._seed))
                picked = {name: x.index_select(0, index).to(self._device) for name, x in obs.items()}
                metrics.append(self._optimize(picked, actions.index_select(0, index).to(self._device)))
                self.step += 1
                if len(metrics) % _CHECK_EVERY == 0:
                    _check(metrics[-_CHECK_EVERY:], {**obs, "actions": actions})
                yield
        finally:
            self._module.eval()
        if not metrics:
            return {}
        _check(metrics, {**obs, "actions": actions})
        table = torch.stack(metrics)
        loss, norm = table[-max(1, settings.steps // 10) :].mean(0).tolist()
        return {"train/sft/loss": loss, "train/sft/grad_norm": norm}

    def _optimize(self, obs: dict[str, Tensor], actions: Tensor) -> Tensor:
        """One optimizer step; returns its loss and gradient norm [2]."""
        settings = self._supervised
        self._optimizer.scale_lr(optim.warmup_cosine(self.step, settings.steps, settings.warmup_steps))
        self._optimizer.zero_grad()
        loss = self.policy.sft_loss(obs, actions)
        loss.backward()
        norm = optim.clip_gradient(self._parameters, settings.grad_clip).total
        self._optimizer.step(norm.isfinite().float())
        return torch.stack([loss.detach().float(), norm.float()])

    def state_dict(self) -> dict[str, Any]:
        """Policy, optimizer and the number of steps done; tensors are live, not copies."""
        return {"policy": published_state(self._module), "optimizer": self._optimizer.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_published(self._module, state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])


def _check(metrics: list[Tensor], demonstrations: Mapping[str, Tensor]) -> None:
    """RunHalted: one of these steps had a loss or gradient that is not finite."""
    finite = torch.stack(metrics).isfinite().all(1)  # [steps]
    if finite.all():
        return
    for name, x in demonstrations.items():
        if not x.isfinite().all():
            raise RunHalted(f"the demonstrations hold {name} of NaN or infinity; correct the environment or its expert")
    bad = int((~finite).sum())
    raise RunHalted(
        f"supervised.lr: {bad} optimizer steps had a loss or gradient of NaN or infinity; lower it, or grad_clip"
    )


def rows_of_step(step: int, size: int, count: int, seed: int) -> NDArray[np.int64]:
    """Rows [size] int64 of a step: places step·size … of an endless sequence of shuffles of 0..count-1.

    Each shuffle depends on (seed, its number) alone, so any step can be repeated without those before it.
    """
    first, last = step * size, (step + 1) * size
    epochs = range(first // count, -(-last // count))
    sequence = np.concatenate([np.random.default_rng((seed, epoch)).permutation(count) for epoch in epochs])
    start = first - epochs.start * count
    return sequence[start : start + size]
