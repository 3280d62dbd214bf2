"""Converts an environment's observations to a policy's inputs, and the network's actions to the environment's.

network [B,H,A] ─ executed ─▶ [B,C,entries of the environment] ─ un-normalise ─ + state ─ gripper ─ clip ─▶ env

`input_plan.plan_inputs` checks that policy and environment match and makes every table: call it in `form()`, before
anything starts, and again in `build()`. `VlaInputs(plan)` is a module inside the policy; it has only non-persistent
buffers, can be made on any device (also meta), and never synchronises with its device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.vla import images
from polyrhythm.plugins.vla.input_plan import ActionPlan, InputPlan
from polyrhythm.plugins.vla.prompts import PromptTable, StatePrompt, StatePrompts
from polyrhythm.plugins.vla.scaling import Scaler, in_other_form
from polyrhythm.specs import INSTRUCTION


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


class VlaInputs(nn.Module):
    """Inputs and outputs of a policy on a device. chunk: C; action_dim: A of the environment; state_dim: S.

    `inputs(obs)` returns, rows first:
    π0, π0.5    images [B,N,3,S,S], image_present [B,N], tokens [B,L], token_present [B,L], state [B,S]
    OpenVLA-OFT pixel_values [B,6N,S,S], input_ids [B,L], attention_mask [B,L], state, proprio [B,S]
    GR00T       images [B,N,3,S,S], input_ids [B,L], attention_mask, visible [B,L], state [B,S]
    N: the environment's cameras; a slot without a camera is omitted, which equals masking it.
    ids are int64, masks bool, others float32. state: normalised and zero-padded.
    """

    tokens: Tensor
    token_present: Tensor

    def __init__(self, plan: InputPlan) -> None:
        super().__init__()
        self.plan, self.form = plan, plan.form
        self.state_dim = plan.form.state_dim or plan.state_scaling.size
        self.state = Scaler(plan.state_scaling)
        self.action_map = ActionMap(plan.actions)
        self.chunk, self.action_dim = self.action_map.chunk, self.action_map.action_dim
        self.state_prompt = StatePrompt(plan.prompts) if isinstance(plan.prompts, StatePrompts) else None
        if isinstance(plan.prompts, PromptTable):
            for name, array in (("tokens", plan.prompts.ids), ("token_present", plan.prompts.present)):
                self.register_buffer(name, torch.tensor(array.tolist()), persistent=False)

    def forward(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The network's inputs; see the class."""
        state = self._raw_state(obs)
        normalised = self.state.normalise(state)
        if self.plan.parts:
            normalised = in_other_form(normalised, self.plan.parts)
        ids, present = self._prompt(obs[INSTRUCTION], normalised)
        padding = self.state_dim - normalised.shape[1]
        found = {"state": functional.pad(normalised.float(), (0, padding))}
        seen = self.images(obs)
        prompt = {"input_ids": ids, "attention_mask": present}
        if self.form.architecture == "openvla_oft":
            return found | prompt | {"pixel_values": seen.flatten(1, 2), "proprio": found["state"]}
        if self.form.architecture == "groot_n1d5":
            visible = torch.ones_like(present) if self.plan.padding_counts else present
            return found | prompt | {"images": seen, "visible": visible}
        there = torch.ones(seen.shape[:2], dtype=torch.bool, device=seen.device)
        return found | {"images": seen, "image_present": there, "tokens": ids, "token_present": present}

    def images(self, obs: Mapping[str, Tensor]) -> Tensor:
        """The cameras' images for the network: [B,N,3 or 6,S,S] float32. Images of equal size share one pass."""
        cameras = [obs[name] for _, name in self.plan.cameras]
        if len({camera.shape for camera in cameras}) > 1:
            return torch.stack([self._image(camera) for camera in cameras], dim=1)
        seen: Tensor = self._image(torch.stack(cameras, dim=1).flatten(0, 1)).unflatten(0, (-1, len(cameras)))
        return seen

    def executed(self, x: Tensor) -> Tensor:
        """Select the executed actions and entries of [B,H,A padded,...], in the environment's order: [B,C,A,...]."""
        return self.action_map.executed(x)

    def actions(self, x: Tensor, obs: Mapping[str, Tensor]) -> Tensor:
        """Normalised actions [B,C,A] (after `executed`) -> env units, clipped to the bounds, float32."""
        return self.action_map.actions(x, self._raw_state(obs) if self.action_map.relative else None)

    def normalised_actions(self, actions: Tensor, obs: Mapping[str, Tensor]) -> Tensor:
        """Demonstrated actions [B,C,A] in env units -> normalised, float32: the inverse of `actions`."""
        return self.action_map.normalised(actions, self._raw_state(obs) if self.action_map.relative else None)

    def _image(self, camera: Tensor) -> Tensor:
        camera = camera.flip(1, 2) if self.plan.turn else camera
        if self.form.architecture == "openvla_oft":
            return images.oft_images(camera, self.form.image, crop=self.form.crop, colours=self.plan.colours)
        if self.form.architecture == "groot_n1d5":
            return images.groot_images(camera, self.form.image)
        return images.pi0_images(camera, self.form.image, self.plan.resizing)

    def _raw_state(self, obs: Mapping[str, Tensor]) -> Tensor:
        if self.plan.state:
            return obs[self.plan.state]
        rows = obs[INSTRUCTION]
        return torch.zeros(len(rows), 0, device=rows.device)

    def _prompt(self, tasks: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.state_prompt is not None:
            composed: tuple[Tensor, Tensor] = self.state_prompt(tasks, state)
            return composed
        return self.tokens[tasks], self.token_present[tasks]
