"""Vision-language-action policy with 0.14 million parameters, small enough to post-train on one core.

It has the parts of large VLAs (image, sentence and proprioception as input, all tokens in one parallel pass, a chunk of
actions from a head with bins or flow matching), so it exercises every path of the system.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from torch import Tensor, nn

from polyrhythm.config.base import type_or
from polyrhythm.policies.base import SETTINGS, Act, Evaluation, Observations, named
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.gaussian import continuous_bounds
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.normalizer import ObservationNormalizer
from polyrhythm.policies.tiny_vla.heads import BinsSettings, FlowMatchingSettings, Head
from polyrhythm.policies.tiny_vla.trunk import Trunk, word_table
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits
from polyrhythm.specs import INSTRUCTION, PROGRESS, ArraySpec, EnvSpec

HeadSettings = Annotated[
    Annotated[BinsSettings, Tag("bins")] | Annotated[FlowMatchingSettings, Tag("flow_matching")],
    Discriminator(type_or("bins")),
    BeforeValidator(named),
]

#: Required observations: dtype and shape, None for any size.
_INPUTS: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "image": ("uint8", (None, None, 3)),
    "proprio": ("float32", (None,)),
}


class TinyVlaSettings(BaseModel):
    """Tiny vision-language-action model."""

    model_config = SETTINGS
    traits: ClassVar = SettingsTraits(policy=PolicyTraits(critic=True))
    needs: ClassVar = ("torch",)

    type: Literal["tiny_vla"] = "tiny_vla"
    """The policy's name."""
    width: int = Field(64, ge=8)
    """Features per token."""
    layers: int = Field(2, ge=1)
    """Transformer layers."""
    heads: int = Field(4, ge=1)
    """Attention heads; divides width."""
    expansion: int = Field(3, ge=1)
    """Hidden units of a transformer layer's MLP, in multiples of width."""
    tokens: int = Field(8, ge=1)
    """Tokens that the image is reduced to."""
    words: int = Field(8, ge=1)
    """Most words of an instruction."""
    vocabulary: int = Field(256, ge=2)
    """Rows of the word embedding that words are hashed into."""
    chunk: int = Field(2, ge=1)
    """Primitive actions per chunk step (C)."""
    head: HeadSettings = Field({"type": "bins"}, validate_default=True)
    """How features become actions, by type: bins (a token per entry) or flow_matching."""
    value_detach: bool = True
    """Keep the value loss out of the trunk; letting it in destroyed small policies."""
    normalize_observations: bool = False
    """Normalise proprioception by its running mean and variance, which are saved with the weights."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TinyVlaSettings:
        if self.width % self.heads:
            raise ValueError(
                f"policy.heads = {self.heads} does not divide policy.width = {self.width}: choose a divisor"
            )
        return self

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        answers = self.head.answers(self.chunk, env_spec.action.dim)
        return describe(lambda _role: TinyVla(self, env_spec), answers)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> TinyVla:  # noqa: ARG002
        """The same module for both roles, initialised on the CPU so that the weights are equal on every device."""
        with seeded(seed):
            return TinyVla(self, env_spec).to(device)


class TinyVla(nn.Module):
    """The tiny VLA. obs: image uint8 [B,H,W,3], proprio float [B,P], `INSTRUCTION` int64 [B], `PROGRESS` float32 [B].

    The head gets the trunk's features of the action entries and supplies forward_inputs; the value network gets the
    value query's feature and `PROGRESS`. `exact` holds on the CPU.
    """

    middle: Tensor
    half_range: Tensor

    def __init__(self, settings: TinyVlaSettings, env_spec: EnvSpec) -> None:
        super().__init__()
        low, high = continuous_bounds(env_spec.action, "tiny_vla")
        height, width_px, _ = _array(env_spec, "image").shape
        (proprio,) = _array(env_spec, "proprio").shape
        self.chunk, self.action_dim = settings.chunk, env_spec.action.dim
        self.exact, self.tolerance = True, 1e-4
        self.value_detach = settings.value_detach
        normalized = {"proprio": env_spec.observation["proprio"]}
        self.normalizer = ObservationNormalizer(normalized) if settings.normalize_observations else nn.Identity()
        self.trunk = Trunk(
            (height, width_px),
            proprio,
            word_table(env_spec.tasks, settings.words, settings.vocabulary),
            queries=1 + self.chunk * self.action_dim,
            size=settings,
        )
        self.head: Head = settings.head.build(settings.width, self.chunk, self.action_dim)
        self.critic = nn.Sequential(
            nn.Linear(settings.width + 1, settings.width), nn.Tanh(), nn.Linear(settings.width, 1)
        )
        self.head.initialise()
        for name, value in (("middle", (high + low) / 2), ("half_range", (high - low) / 2)):
            self.register_buffer(name, value, persistent=False)

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        features, value = self._forward(obs)
        act = self.head.act(features, greedy, noise_key)
        actions = self.middle + self.half_range * act.actions.clamp(-1.0, 1.0)
        return Act(actions, act.logprob, value, act.forward_inputs)

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        features, value = self._forward(obs)
        logprob, entropy = self.head.evaluate(features, forward_inputs)
        return Evaluation(logprob, value, entropy)

    def value(self, obs: Observations) -> Tensor:
        return self._forward(obs)[1]

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Loss of the head for demonstrated actions [B,C,A] in env units, clipped to their range."""
        target = ((actions.float() - self.middle) / self.half_range).clamp(-1.0, 1.0)
        return self.head.sft_loss(self._forward(obs)[0], target)

    def _forward(self, obs: Observations) -> tuple[Tensor, Tensor]:
        """Features of the action entries [B,C·A,width] and value [B]."""
        obs = self.normalizer(obs)
        features = self.trunk(obs["image"], obs["proprio"], obs[INSTRUCTION])
        seen = features[:, 0].detach() if self.value_detach else features[:, 0]
        value = self.critic(torch.cat((seen, obs[PROGRESS].float().unsqueeze(1)), dim=1)).squeeze(1)
        return features[:, 1:], value


def _array(env_spec: EnvSpec, name: str) -> ArraySpec:
    """The named observation array. ValueError: it does not have the dtype and shape of `_INPUTS`."""
    found = env_spec.observation.get(name)
    if found is None or not _fits(found, *_INPUTS[name]):
        dtype, shape = _INPUTS[name]
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"policy.type = 'tiny_vla' needs the observation {name!r} as {dtype} [{expected}], the environment shows "
            f"{dict(env_spec.observation)}: {_renaming(env_spec)}switch it on in the env's settings, or use "
            "policy.type = 'gaussian'"
        )
    return found


def _fits(array: ArraySpec, dtype: str, shape: tuple[int | None, ...]) -> bool:
    return (
        array.dtype == dtype
        and len(array.shape) == len(shape)
        and all(expected in (None, size) for expected, size in zip(shape, array.shape, strict=True))
    )


def _renaming(env_spec: EnvSpec) -> str:
    """Suggested setting that renames arrays to the missing inputs; "" if it is ambiguous."""
    others = {key: array for key, array in env_spec.observation.items() if key not in _INPUTS}
    new: dict[str, str] = {}
    for name in _INPUTS.keys() - env_spec.observation.keys():
        fitting = [key for key, array in others.items() if _fits(array, *_INPUTS[name])]
        if len(fitting) != 1:
            return ""
        new[fitting[0]] = name
    told = ", ".join(f"{old}: {name}" for old, name in sorted(new.items()))
    return f"rename them (env.rename={{{told}}}), " if new else ""
