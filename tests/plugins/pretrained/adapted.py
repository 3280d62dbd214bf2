"""A small policy with a backbone, an action expert and a head, of which each may be trained: what the tests of adapting
share. It has the form of pi0: the expert attends to the backbone's keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from polyrhythm.plugins.pretrained.adapting import ADAPTED, AdaptedPolicy
from polyrhythm.plugins.pretrained.fitting import Architecture
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.decoder import Decoder, DecoderSize, KeysValues
from polyrhythm.plugins.vla.settings import VlaSettings, adaptation_of
from polyrhythm.policies import distributions, noise
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.mlp import FlatObservation, seeded
from polyrhythm.specs import ArraySpec, EnvSpec

SMALL = Architecture(
    "small",
    lambda config, tensors: None,
    lambda size: None,
    parts={
        "expert": ("queries", "expert.*", "head.*"),
        "head": ("head.*",),
        "lora": ("backbone.*_proj.weight", "expert.*_proj.weight"),
    },
    dead=("spare.*",),
    float32=("head.*",),
)


class SmallNetwork(nn.Module):
    """One token per entry of the observation, then one query per choice."""

    def __init__(self, outputs: int, width: int = 32, layers: int = 2, expert_width: int = 16) -> None:
        super().__init__()
        same = {"layers": layers, "heads": 2, "kv_heads": 1, "head_dim": 8, "activation": "silu"}
        self.embed = nn.Linear(1, width)
        self.backbone = Decoder(DecoderSize(width=width, mlp=2 * width, **same))
        self.expert = Decoder(DecoderSize(width=expert_width, mlp=2 * expert_width, **same))
        self.queries = nn.Parameter(torch.randn(outputs, expert_width))
        self.head = nn.Linear(expert_width, 1)
        self.spare = nn.Linear(3, 3)
        self.prefixes = 0  # rows of which the prefix was computed

    def prefix(self, x: Tensor) -> tuple[list[KeysValues], Tensor]:
        """[B,I] -> keys and values by layer, features [B,width] float32."""
        self.prefixes += len(x)
        places = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        hidden, found = self.backbone(self.embed(x.unsqueeze(-1)), places, None)
        return found, hidden.float().mean(1)

    def forward(self, found: list[KeysValues]) -> Tensor:
        """Logits [B,outputs] float32."""
        rows, length = len(found[0][0]), found[0][0].shape[2]
        queries = self.queries.expand(rows, -1, -1)
        places = length + torch.arange(queries.shape[1], device=queries.device).expand(rows, -1)
        return self.head(self.expert(queries, places, None, past=found)[0]).squeeze(-1).float()


class SmallPolicy(AdaptedPolicy):
    """Categorical actions from the network; a critic on the prefix features."""

    traits = replace(ADAPTED, critic=True, precomputes=True, acts_from_precomputed=True, beside_precomputed=())

    def __init__(self, network: SmallNetwork, precision: Precision, spec: EnvSpec) -> None:
        super().__init__()
        self.chunk, self.action_dim, self.choices = 1, spec.action.dim, spec.action.choices
        self.exact, self.tolerance = False, 1e-5 if precision.is_single else 0.05
        self.flat, self.precision, self.network = FlatObservation(spec, progress=False), precision, network
        self.critic = nn.Linear(network.backbone.size.width, 1)

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        log_p, value = self.heads(obs)
        draws = noise.uniform(noise_key, self.action_dim).view(log_p.shape[:-1])
        tokens = distributions.categorical_sample(log_p, draws, greedy, log_p.argmax(-1))
        return Act(tokens, distributions.categorical_logprob(log_p, tokens), value, {"tokens": tokens})

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        log_p, value = self.heads(obs)
        logprob = distributions.categorical_logprob(log_p, forward_inputs["tokens"])
        return Evaluation(logprob, value, distributions.categorical_entropy(log_p))

    def value(self, obs: Observations) -> Tensor:
        return self.heads(obs)[1]

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        return -distributions.categorical_logprob(self.heads(obs)[0], actions.long()).mean()

    def precompute(self, obs: Observations) -> dict[str, Tensor]:
        network = self.network
        if any(p.requires_grad for part in (network.embed, network.backbone) for p in part.parameters()):
            return {}
        found, features = self.prefix(obs)
        kept = {f"prefix.{i}.{name}": x for i, pair in enumerate(found) for name, x in zip("kv", pair, strict=True)}
        return {**kept, "prefix.features": features}

    def prefix(self, obs: Observations) -> tuple[list[KeysValues], Tensor]:
        if "prefix.features" in obs:
            layers = range(len(self.network.backbone.layers))
            return [(obs[f"prefix.{i}.k"], obs[f"prefix.{i}.v"]) for i in layers], obs["prefix.features"]
        x = self.flat(obs)
        with self.precision.computing(x.device):
            return self.network.prefix(x)

    def heads(self, obs: Observations) -> tuple[Tensor, Tensor]:
        found, features = self.prefix(obs)
        with self.precision.computing(features.device):
            logits = self.network(found)
        log_p = distributions.log_probs(logits.view(-1, self.chunk, self.action_dim, self.choices))
        return log_p, self.critic(features.detach()).squeeze(1)


class SmallSettings(VlaSettings):
    """The small policy."""

    type: Literal["tests.plugins.pretrained.adapted:SmallSettings"] = "tests.plugins.pretrained.adapted:SmallSettings"
    size: Literal["released"] = "released"
    dtype: Literal["float32", "bfloat16"] = "float32"
    width: int = 32

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        answers = {"tokens": ArraySpec((1, env_spec.action.dim), "int64")}
        return describe(lambda role: self._make(env_spec, 0, role), answers)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> SmallPolicy:
        return self._make(env_spec, seed, role).to(device)

    def _make(self, spec: EnvSpec, seed: int, role: Role) -> SmallPolicy:
        adaptation = adaptation_of(self, SMALL)
        with seeded(seed):
            network = SmallNetwork(spec.action.dim * spec.action.choices, self.width)
            policy = SmallPolicy(network, adaptation.precision, spec)
        adaptation.prepare(network, role)
        adaptation.finish(network, role, seed)
        return policy
