"""A small π0 or π0.5 in a small world, without folders: for the tests of `FlowPolicy`."""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import BaseModel
from torch import Tensor

from polyrhythm.plugins.pretrained.adapting import Adaptation
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.decoder import DecoderSize
from polyrhythm.plugins.vla.flow_policy import FlowPolicy
from polyrhythm.plugins.vla.pi0.network import PI0, Pi0Network, Pi0Size, dead_tensors
from polyrhythm.plugins.vla.vision import VisionSize
from polyrhythm.policies.base import SETTINGS, Observations
from polyrhythm.policies.flow_matching import FlowMethod
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.mlp import seeded
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task

TASKS = (Task("push", "push the red block"), Task("close", "close the door"), Task("press", "press the button down"))
#: The network predicts 4 actions of 5 entries; the world takes 2 of 3, of which the second is the network's fifth.
CHUNK, DIMS, HORIZON, PADDED = 2, (0, 4, 1), 4, 5
SPEC = EnvSpec(
    {"image": ArraySpec((16, 16, 3), "uint8"), "proprio": ArraySpec((4,), "float32")},
    ActionSpec("continuous", 3, low=(-1.0, 0.0, -5.0), high=(1.0, 4.0, 5.0)),
    TASKS,
    50,
)
LANGUAGE = DecoderSize(24, 2, 32, heads=4, kv_heads=1, head_dim=8, activation="gelu_tanh", norm_offset=1.0)
SIZE = Pi0Size(
    vlm=LANGUAGE,
    expert=replace(LANGUAGE, width=16, mlp=24),
    vision=VisionSize(24, 1, 32, 4, image=16, patch=8),
    vocabulary=8,
    expert_vocabulary=8,
    horizon=HORIZON,
    action_dim=PADDED,
    state_dim=4,
)


class SmallInputs:
    """In place of `VlaInputs`: one camera, one word per task, actions scaled to the world's bounds."""

    chunk, action_dim, state_dim = CHUNK, len(DIMS), 4

    def __init__(self) -> None:
        low, high = SPEC.action.low, SPEC.action.high
        self.middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        self.half = [(b - a) / 2 for a, b in zip(low, high, strict=True)]

    def __call__(self, obs: Observations) -> dict[str, Tensor]:
        images = obs["image"].permute(0, 3, 1, 2).unsqueeze(1).float() / 127.5 - 1.0
        present = torch.ones(len(images), 1, dtype=torch.bool)
        words = torch.stack((obs[INSTRUCTION] + 1, torch.zeros_like(obs[INSTRUCTION])), dim=1)
        return {
            "images": images,
            "image_present": present,
            "tokens": words,
            "token_present": words > 0,
            "state": obs["proprio"].float(),
        }

    def executed(self, x: Tensor) -> Tensor:
        return x[:, :CHUNK, list(DIMS)]

    def actions(self, x: Tensor, obs: Observations) -> Tensor:
        return x.clamp(-1.0, 1.0) * torch.tensor(self.half) + torch.tensor(self.middle)

    def normalised_actions(self, actions: Tensor, obs: Observations) -> Tensor:
        return (actions - torch.tensor(self.middle)) / torch.tensor(self.half)


class SmallFlowSettings(BaseModel):
    """Settings of the small policy."""

    model_config = SETTINGS

    type: str = "small_flow"
    adaptive: bool = False
    method: FlowMethod
    steps: int = 3
    train: str = "all"
    value_detach: bool = True
    value_level: str = "chunk"
    sft_draws: int = 1
    bfloat16: bool = False

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        return describe(lambda role: self._make(role, 0), self.method.answers(self.steps, (HORIZON, PADDED)))

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> FlowPolicy:
        with seeded(seed):
            return self._make(role, seed)

    def _make(self, role: Role, seed: int) -> FlowPolicy:
        size = replace(SIZE, adaptive=self.adaptive, expert=replace(SIZE.expert, condition=0))
        network = Pi0Network(size)
        network.initialise()
        precision = Precision(torch.bfloat16 if self.bfloat16 else torch.float32, torch.float32, PI0.float32)
        dead = dead_tensors(size, features=not self.value_detach)
        adaptation = Adaptation(self.train, PI0.parts, precision, dead)  # type: ignore[arg-type]
        adaptation.prepare(network, role)
        adaptation.finish(network, role, seed)
        return FlowPolicy(network, SmallInputs(), self, precision)  # type: ignore[arg-type]


def observations(rows: int) -> dict[str, Tensor]:
    """A batch of random observations."""
    generator = torch.Generator().manual_seed(11)
    return {
        "image": torch.randint(0, 256, (rows, 16, 16, 3), generator=generator).to(torch.uint8),
        "proprio": torch.randn(rows, 4, generator=generator),
        INSTRUCTION: torch.arange(rows) % len(TASKS),
        PROGRESS: torch.rand(rows, generator=generator),
    }
