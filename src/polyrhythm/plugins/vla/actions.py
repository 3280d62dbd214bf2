"""Maps a network's actions to the environment's, and back for supervised training.

network [B,H,A] ─ executed ─▶ [B,C,entries of the environment] ─ un-normalise ─ + state ─ gripper ─ clip ─▶ env
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.vla import scaling
from polyrhythm.plugins.vla.scaling import Scaler, Scaling
from polyrhythm.plugins.vla.statistics import RobotStatistics
from polyrhythm.policies.gaussian import continuous_bounds
from polyrhythm.specs import ActionSpec, EnvSpec

if TYPE_CHECKING:
    from polyrhythm.plugins.vla.input_plan import InputForm
    from polyrhythm.plugins.vla.settings import VlaSettings

Gripper = Literal["as_is", "open_is_one"]


@dataclass(frozen=True, slots=True, eq=False)
class ActionPlan:
    """How actions are mapped. entries: index in the network's action of each of the environment's entries; relative:
    number of leading entries that are predicted relative to the state."""

    chunk: int
    entries: tuple[int, ...]
    scaling: Scaling
    low: tuple[float, ...]
    high: tuple[float, ...]
    relative: int
    gripper: Gripper


def plan_actions(
    settings: VlaSettings, env_spec: EnvSpec, form: InputForm, statistics: RobotStatistics | None
) -> ActionPlan:
    """ConfigError: chunk, entries, statistics and the environment's actions do not match."""
    low, high = _bounds(env_spec.action, form.architecture)
    if settings.chunk > form.horizon:
        raise ConfigError(
            f"policy.chunk = {settings.chunk}: the network predicts {form.horizon} actions; lower it, or set "
            "policy.horizon to what it was trained with"
        )
    found = statistics.actions if statistics is not None else None
    if statistics is not None and found is None:
        raise ConfigError(f"{statistics.origin} has no statistics of actions; copy it again from its release")
    if statistics is not None and found is not None:
        _check_statistics(statistics, found.size, form)
    if found is not None and found.size == form.action_dim and not settings.entries:  # as some releases have it
        found = found.without_padding(env_spec.action.dim)
    origin = "" if statistics is None else statistics.origin
    entries = _entries(settings.entries, env_spec.action.dim, form, None if found is None else found.size, origin)
    plan = scaling.bounds(low, high, method="min_max") if found is None else found.chosen(entries)
    if settings.relative_entries:
        state = env_spec.observation.get(settings.state)
        width = 0 if state is None else state.shape[0]
        if settings.relative_entries > min(len(entries), width):
            raise ConfigError(
                f"policy.relative_entries = {settings.relative_entries}, but the action has {len(entries)} entries and "
                f"the state {settings.state!r} {width}; set it to at most the smaller number"
            )
    return ActionPlan(settings.chunk, entries, plan, low, high, settings.relative_entries, settings.gripper)


def _check_statistics(statistics: RobotStatistics, size: int, form: InputForm) -> None:
    """ConfigError: statistics have more entries than the network predicts, or fewer without padding."""
    if size > form.action_dim or (size < form.action_dim and not form.pads):
        whose = f" of {statistics.key}" if statistics.key else ""
        raise ConfigError(
            f"{statistics.origin} has statistics of {size} action entries{whose}, the network predicts "
            f"{form.action_dim}; copy that file again from the checkpoint's release, or set policy.robot to the robot "
            "that it was trained for"
        )


def _bounds(action: ActionSpec, architecture: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    with torch.device("cpu"):
        continuous_bounds(action, architecture)
    return action.low, action.high


def _entries(given: Sequence[int], dim: int, form: InputForm, found: int | None, origin: str) -> tuple[int, ...]:
    """The network's entry for each of the environment's entries. found: number of entries with statistics, in the
    file `origin`."""
    available = form.action_dim if found is None else min(found, form.action_dim)
    whose = "the network predicts" if found is None else f"{origin} has statistics of"
    if given:
        if len(given) != dim or not all(0 <= entry < available for entry in given) or len(set(given)) != len(given):
            raise ConfigError(
                f"policy.entries = {list(given)}: the environment takes {dim} entries and {whose} {available}; give "
                f"{dim} different numbers below {available}"
            )
        return tuple(given)
    if dim > available or (found is not None and dim != found):
        raise ConfigError(
            f"the environment takes actions of {dim} entries and {whose} {available}: choose the checkpoint of this "
            "robot, or set policy.entries to the policy's entry for each of the environment's"
        )
    return tuple(range(dim))


class ActionMap(nn.Module):
    """The mapping of an `ActionPlan` on a device. Computed in float64, returned in float32."""

    low: Tensor
    high: Tensor
    index: Tensor

    def __init__(self, plan: ActionPlan) -> None:
        super().__init__()
        self.chunk, self.action_dim = plan.chunk, len(plan.entries)
        self.relative, self.gripper = plan.relative, plan.gripper
        self.leading = plan.entries == tuple(range(self.action_dim))
        self.scaler = Scaler(plan.scaling)
        for name, value in (("low", plan.low), ("high", plan.high)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)
        self.register_buffer("index", torch.tensor(plan.entries, dtype=torch.int64), persistent=False)

    def executed(self, x: Tensor) -> Tensor:
        """Select the executed actions and entries of [B,H,A,...], in the environment's order: [B,C,dim,...]."""
        x = x[:, : self.chunk]
        return x[:, :, : self.action_dim] if self.leading else x.index_select(2, self.index)

    def actions(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Normalised [B,C,dim] -> env units, clipped to the bounds, float32. state [B,S]: raw, for relative entries."""
        actions = self.scaler.unnormalise(x)
        if self.relative and state is not None:
            actions = self._shifted(actions, state, 1.0)
        if self.gripper == "open_is_one":  # 1 open, 0 closed -> −1 open, 1 closed
            closing = torch.sign(1.0 - 2.0 * actions[..., -1:])
            actions = torch.cat((actions[..., :-1], closing), dim=-1)
        return torch.minimum(torch.maximum(actions.float(), self.low), self.high)

    def normalised(self, actions: Tensor, state: Tensor | None) -> Tensor:
        """Inverse of `actions` for demonstrated actions [B,C,dim] in env units: normalised, float32."""
        actions = actions.double()
        if self.gripper == "open_is_one":
            actions = torch.cat((actions[..., :-1], (1.0 - actions[..., -1:]) / 2.0), dim=-1)
        if self.relative and state is not None:
            actions = self._shifted(actions, state, -1.0)
        return self.scaler.normalise(actions).float()

    def _shifted(self, actions: Tensor, state: Tensor, sign: float) -> Tensor:
        n = self.relative
        moved = actions[..., :n] + sign * state[:, None, :n].double()
        return torch.cat((moved, actions[..., n:]), dim=-1)
