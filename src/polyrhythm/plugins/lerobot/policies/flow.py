"""A policy of LeRobot with a flow head, in a Python that has LeRobot: acts and is trained by `flow_matching`.

    observations ─ LeRobot's pre-processor ─ prefix ─ velocity at each of K steps ─ LeRobot's post-processor ─▶ actions

A flow head is SmolVLA's, or three members of the policy's class, which a package of policies may define:

    flow_shape      (H, A, W): predicted actions, entries of an action with padding, features of a prefix
    flow_prefix     batch of the pre-processor → ((keys, values) per layer, present [B,P] bool, features [B,W] float32):
                    what all steps share, rows first in every tensor
    flow_velocity   (keys and values, present, x [B,H,A], t [B]) → noise − data [B,H,A], t from 1 (noise) to 0 (data)

What is trained follows from the `requires_grad` that LeRobot's class sets by config.json (`train_expert_only`, ...).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.config.base import Section
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.plugins.lerobot.policies.folder import STATE, FolderLayout, no_flow_head
from polyrhythm.plugins.lerobot.policies.serve import open_config, open_processors
from polyrhythm.plugins.pretrained.building import load_ours
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.decoder import KeysValues
from polyrhythm.plugins.vla.flow_policy import FLOW_TRAITS, FlowNetwork, FlowPolicy, Prefix
from polyrhythm.plugins.vla.settings import RELEASED_TRAINING
from polyrhythm.policies.base import section_or
from polyrhythm.policies.flow_matching import FlowMethod, check_steps
from polyrhythm.policies.form import PolicyForm, Role, ValueKind, describe, weights_on_meta
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.traits import SettingsTraits, has_methods
from polyrhythm.sources import local_folder
from polyrhythm.specs import INSTRUCTION, EnvSpec

_FOLDERS, _SMOLVLA = "polyrhythm.plugins.lerobot.policies.folder:LerobotFolders", "smolvla"
_LANGUAGE = ("observation.language.tokens", "observation.language.attention_mask")


class LerobotFlowSettings(Section):
    """A policy of LeRobot with a flow head (SmolVLA, or of a package), in this Python, which has lerobot."""

    traits: ClassVar = SettingsTraits(policy=FLOW_TRAITS, folders=_FOLDERS)
    needs: ClassVar = ("torch", "lerobot", "safetensors")

    type: Literal["lerobot_flow"] = "lerobot_flow"
    """The policy's name."""
    checkpoint: str = ""
    """Folder of save_pretrained with its pre- and post-processor, or hf://owner/name@revision."""
    chunk: int = Field(0, ge=0)
    """Actions that are executed of those predicted; 0: the checkpoint's n_action_steps."""
    keys: dict[str, str] = Field(default_factory=dict)
    """LeRobot's feature for an array of the environment, where the names differ: {front: observation.images.top}."""
    steps: int = Field(4, ge=1)
    """Steps from noise to actions (K)."""
    method: Annotated[FlowMethod, Field(discriminator="type"), section_or("flow_sde")] = Field(
        {"type": "flow_sde"}, validate_default=True
    )
    """Where noise enters: flow_sde, flow_cps (one step per row), flow_noise (all steps, learned), ode (not for RL)."""
    sft_draws: int = Field(1, ge=1)
    """Pairs of time and noise per demonstrated chunk in supervised training, on one prefix pass."""
    value_detach: bool = True
    """Keep the value loss out of the network."""
    value_level: ValueKind = "chunk"
    """What one value covers: the chunk, or each action that is executed of it (algorithm.reward_level: action)."""

    @model_validator(mode="after")
    def _method_has_a_noisy_step(self) -> Self:
        check_steps(self.method, self.steps)
        return self

    @property
    def training_defaults(self) -> Mapping[str, Any]:
        return RELEASED_TRAINING

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        layout, folder = FolderLayout.of(self, env_spec), self._folder()
        with _calling_lerobot(folder):
            config, network_class = _opened(folder, "cpu")
            with weights_on_meta():
                policy = self._around(network_class(config), layout, None).to("meta")
        answers = self.method.answers(self.steps, policy.shape)
        return describe(lambda _: policy, answers, self.value_level)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> FlowPolicy:  # noqa: ARG002
        layout, folder, checkpoint = FolderLayout.of(self, env_spec), self._folder(), Checkpoint.open(self.checkpoint)
        with _calling_lerobot(folder), seeded(seed):
            config, network_class = _opened(folder, device)
            network = network_class.from_pretrained(folder, config=config, local_files_only=True).float()
            _check_whole(checkpoint, network)
            policy = self._around(network, layout, open_processors(config, str(folder))).to(device)
        load_ours(policy, checkpoint)
        return policy

    def _folder(self) -> Path:
        return local_folder(self.checkpoint, what="policy.checkpoint")

    def _around(self, policy: nn.Module, layout: FolderLayout, processors: tuple[Any, Any] | None) -> FlowPolicy:
        network = LerobotNetwork(policy, flow_head(self, policy))
        return FlowPolicy(network, LerobotInputs(layout, processors), self, Precision(torch.float32))


@contextmanager
def _calling_lerobot(folder: Path) -> Iterator[None]:
    """What LeRobot prints is no output of ours; what it raises, such as without a package or a file in the cache, is a
    ConfigError."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except PolyrhythmError:
        raise
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        raise ConfigError(f"policy.checkpoint = {folder}: LeRobot refuses: {told}") from error


def _opened(folder: Path, device: str) -> tuple[Any, Any]:
    """The configuration in the folder and the policy's class."""
    from lerobot.policies.factory import get_policy_class

    config = open_config(str(folder), device)
    if config.type == _SMOLVLA:
        config.load_vlm_weights = False  # all weights are in the folder
    return config, get_policy_class(config.type)


def _check_whole(checkpoint: Checkpoint, network: nn.Module) -> None:
    """ConfigError: the folder lacks a tensor of the network, which LeRobot would leave random."""
    stored = {checkpoint.prefix + name for name in checkpoint.tensors}
    names: dict[int, list[str]] = {}
    for name, tensor in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    if lacking := [tied[0] for tied in names.values() if stored.isdisjoint(tied)]:
        raise ConfigError(
            f"policy.checkpoint = {checkpoint.folder}: it has no tensor {lacking[0]} (and {len(lacking) - 1} more); "
            "save the whole policy again, merged if it has adapters"
        )


@dataclass(frozen=True, slots=True)
class FlowHead:
    """A policy's flow head; members as in the module's text. prefix_parameters: those that a prefix depends on."""

    shape: tuple[int, int, int]
    prefix: Callable[[Mapping[str, Tensor]], tuple[Sequence[KeysValues], Tensor, Tensor]]
    velocity: Callable[[Sequence[KeysValues], Tensor, Tensor, Tensor], Tensor]
    prefix_parameters: Callable[[], Iterable[Tensor]]


def flow_head(settings: LerobotFlowSettings, policy: Any) -> FlowHead:
    """ConfigError: the policy has none."""
    kind = policy.config.type
    shape = getattr(policy, "flow_shape", None)
    if shape is not None and has_methods(policy, ("flow_prefix", "flow_velocity")):
        return FlowHead(tuple(shape), policy.flow_prefix, policy.flow_velocity, policy.parameters)
    if kind != _SMOLVLA:
        raise ConfigError(no_flow_head(settings.checkpoint, kind))
    if policy.config.adapt_to_pi_aloha:
        raise ConfigError(
            f"policy.checkpoint = {settings.checkpoint}: adapt_to_pi_aloha, which changes actions outside the "
            "processors, is not supported; evaluate it with policy.type=lerobot"
        )
    head = SmolVla(policy)
    return FlowHead(head.shape, head.prefix, head.velocity, head.prefix_parameters)


class SmolVla:
    """The flow head of LeRobot's SmolVLA, by the methods of its class."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.model = policy, policy.model
        width = self.model.vlm_with_expert.config.text_config.hidden_size
        self.shape = policy.config.chunk_size, policy.config.max_action_dim, width

    def prefix_parameters(self) -> Iterable[Tensor]:
        yield from self.model.vlm_with_expert.vlm.parameters()
        yield from self.model.state_proj.parameters()

    def prefix(self, batch: Mapping[str, Tensor]) -> tuple[Sequence[KeysValues], Tensor, Tensor]:
        """Features are the mean hidden state of the present tokens."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        images, there = self.policy.prepare_images(batch)
        tokens, mask = (batch[name] for name in _LANGUAGE)
        state = self.policy.prepare_state(batch)
        embedded, present, blocks = self.model.embed_prefix(images, there, tokens, mask, state=state)
        (hidden, _), cache = self.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(present, blocks),
            position_ids=torch.cumsum(present, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        counted = present.unsqueeze(-1).float()
        features = (hidden.float() * counted).sum(1) / counted.sum(1)
        return [(layer.keys, layer.values) for layer in cache.layers], present, features

    def velocity(self, keys_values: Sequence[KeysValues], present: Tensor, x: Tensor, t: Tensor) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache()
        for index, (keys, values) in enumerate(keys_values):
            cache.update(keys, values, index)
        found: Tensor = self.model.denoise_step(present, cache, x, t)
        return found


class LerobotNetwork(FlowNetwork):
    """The network of a policy of LeRobot, with its names below `policy.`. The features behind a velocity, for learned
    noise, are the velocity itself."""

    step_inputs: tuple[str, ...] = ()

    def __init__(self, policy: nn.Module, head: FlowHead) -> None:
        super().__init__()
        for module in policy.modules():  # tensors that LeRobot moves itself, at each use
            for name in [name for name, x in vars(module).items() if isinstance(x, Tensor)]:
                module.register_buffer(name, vars(module).pop(name), persistent=False)
        self.policy, self.head = policy, head
        self.horizon, self.action_dim, self.feature_width = head.shape
        self.action_width = self.action_dim
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        self.frozen_names = frozenset(self.state_dict().keys() - trained)

    def prefix_parameters(self) -> Iterable[Tensor]:
        return self.head.prefix_parameters()

    def prefix(self, inputs: Mapping[str, Tensor], *, features: bool = True) -> Prefix:  # noqa: ARG002
        keys_values, present, summary = self.head.prefix(inputs)
        return Prefix(tuple(keys_values), present, summary)

    def velocity(
        self,
        prefix: Prefix,
        inputs: Mapping[str, Tensor],  # noqa: ARG002
        x: Tensor,
        t: Tensor,
    ) -> tuple[Tensor, Tensor]:
        v = self.head.velocity(prefix.keys_values, prefix.present, x, t)
        return v, v


class LerobotInputs:
    """Inputs and outputs of a policy by LeRobot's processors (`flow_policy.FlowInputs`). processors: pre and post; None
    where only shapes matter.

    Prompts are padded to the longest of the environment's tasks, so that a prefix has one length.
    """

    def __init__(self, layout: FolderLayout, processors: tuple[Any, Any] | None) -> None:
        self.layout, self.processors = layout, processors
        self.chunk, self.action_dim, self.state_dim = layout.chunk, layout.description.entries, layout.state_entries
        self._prompt = 0
        if processors is not None:
            frames = (layout.description.frames,) if layout.description.frames > 1 else ()
            shapes = layout.description.inputs.items()
            blank = {name: torch.zeros(1, *frames, *shape) for name, (_, shape) in shapes}
            each = (processors[0]({**blank, "task": [task]}) for task in layout.instructions)
            self._prompt = max(batch[_LANGUAGE[0]].shape[1] if _LANGUAGE[0] in batch else 0 for batch in each)

    def __call__(self, obs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        batch = self._processed(obs, {})
        for name in _LANGUAGE:
            if name in batch:
                batch[name] = functional.pad(batch[name], (0, self._prompt - batch[name].shape[1]))
        rows = obs[INSTRUCTION]
        state = batch[STATE].flatten(1) if STATE in batch else torch.zeros(len(rows), 0, device=rows.device)
        return {**batch, "state": state}

    def executed(self, x: Tensor) -> Tensor:
        """Select the executed actions and entries of [B,H,A padded,...]: [B,C,A,...]."""
        return x[:, : self.chunk, : self.action_dim]

    def actions(self, x: Tensor, obs: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - the processor keeps what it needs
        """Normalised actions [B,C,A] -> env units, clipped to the bounds, float32."""
        assert self.processors is not None
        found: Tensor = self.processors[1](x).to(x.device).float()
        low, high = (torch.tensor(bound, device=x.device) for bound in (self.layout.low, self.layout.high))
        return torch.minimum(torch.maximum(found, low), high)

    def normalised_actions(self, actions: Tensor, obs: Mapping[str, Tensor]) -> Tensor:
        """Demonstrated actions [B,C,A] in env units -> normalised, float32."""
        return self._processed(obs, {"action": actions.float()})["action"]

    def _processed(self, obs: Mapping[str, Tensor], further: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self.processors is not None
        batch = {**self.layout.arrays(obs), **further, "task": self.layout.tasks(obs[INSTRUCTION])}
        return {name: x for name, x in self.processors[0](batch).items() if isinstance(x, Tensor)}
