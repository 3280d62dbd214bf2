"""OpenVLA-OFT as a policy: one pass predicts a chunk of action tokens, or L1 actions, and a value.

    images, prompt, [state] ─ network ─▶ hidden states ─┬─ scores of the action rows / temperature ─▶ tokens ─▶ actions
                                                         └─ the prompt's last one, state, progress ─▶ value

`act` and `evaluate` share one distribution: softmax in float32 over the action rows, after temperature and top-k.

A row is one of the vocabulary's last `bins` rows, numbered from 0. A larger id is a smaller action. The `bins` rows map
to the `bins - 1` intervals between `bins` equally spaced edges of -1..1, so the first two rows map to the same action
(OpenVLA's convention).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.adapting import ADAPTED, AdaptedPolicy
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture
from polyrhythm.plugins.pretrained.precision import Precision, in_float32
from polyrhythm.plugins.vla.decoder import DecoderSize
from polyrhythm.plugins.vla.flow_policy import STORED, STORED_INPUT
from polyrhythm.plugins.vla.input_plan import InputForm
from polyrhythm.plugins.vla.input_settings import InputSizeSettings, OwnOrReleased
from polyrhythm.plugins.vla.inputs import VlaInputs
from polyrhythm.plugins.vla.openvla_oft.network import (
    OPENVLA_OFT,
    L1HeadSize,
    OpenVlaOft,
    OpenVlaOftSize,
    Vocabulary,
    dead_patterns,
    l1_head_from_config,
)
from polyrhythm.plugins.vla.settings import VlaSettings
from polyrhythm.policies import distributions, noise
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.specs import PROGRESS, ArraySpec, EnvSpec

log = logging.getLogger(__name__)


def centres(bins: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The action of each row: [bins] on the CPU, in -1..1."""
    edges = torch.linspace(-1.0, 1.0, bins, dtype=torch.float64, device="cpu")
    middles = (edges[:-1] + edges[1:]) / 2.0
    return middles[(bins - 1 - torch.arange(bins, device="cpu")).clamp(0, bins - 2)].to(dtype)


def rows_of(actions: Tensor, bins: int) -> Tensor:
    """Rows of actions, clipped to -1..1: [...] -> int64 [...]. An action on an edge belongs to the interval above."""
    edges = torch.linspace(-1.0, 1.0, bins, dtype=actions.dtype, device=actions.device)
    return bins - torch.bucketize(actions.clamp(-1.0, 1.0), edges, right=True)


class TokenDistribution(NamedTuple):
    """Categorical distributions over rows. log_p [...,K] float32: of the `kept` rows, or of all rows if `kept` is
    None; kept [...,K] uint8: the K likeliest rows at sampling time."""

    log_p: Tensor
    kept: Tensor | None

    def sample(self, uniform: Tensor, greedy: Tensor, best: Literal["mean", "mode"]) -> Tensor:
        """Rows drawn by inverse CDF from uniform [...] in (0,1), the `best` ones where greedy [B] -> int64 [...]."""
        index = distributions.categorical_sample(self.log_p, uniform, greedy, self._best(best))
        return index if self.kept is None else distributions.categorical_logprob(self.kept, index).long()

    def logprob(self, rows: Tensor) -> Tensor:
        """Log-prob of rows: int64 [...] -> [...] float32. A row that is not kept counts as the first kept one."""
        index = rows if self.kept is None else (self.kept == rows.unsqueeze(-1)).long().argmax(-1)
        return distributions.categorical_logprob(self.log_p, index)

    def entropy(self) -> Tensor:
        """Entropy in nats: [...] float32."""
        return distributions.categorical_entropy(self.log_p)

    def _best(self, kind: Literal["mean", "mode"]) -> Tensor:
        """Index of the likeliest row, or of the row nearest to the mean."""
        if kind == "mode":
            return self.log_p.argmax(-1)
        rows = torch.arange(self.log_p.shape[-1], device=self.log_p.device) if self.kept is None else self.kept
        mean = (self.log_p.exp() * rows).sum(-1, keepdim=True)
        return (rows - mean).abs().argmin(-1)


def token_distribution(
    logits: Tensor, temperature: float, top_k: int = 0, kept: Tensor | None = None
) -> TokenDistribution:
    """The float32 distribution for sampling tokens and evaluating them: logits [...,bins]. top_k: sample only from the
    k likeliest rows, 0 for all. kept: those rows at sampling time; the distribution is then over them, so a token keeps
    a log-prob even if the likeliest rows have changed."""
    scaled = logits.float() / temperature
    if kept is None and 0 < top_k < logits.shape[-1]:
        kept = scaled.detach().topk(top_k, dim=-1).indices.to(torch.uint8)
    if kept is not None:
        scaled = scaled.gather(-1, kept.long())
    return TokenDistribution(distributions.log_probs(scaled), kept)


_HIDDEN = (512, 128)


class ValueHead(nn.Module):
    """An MLP in float32 on the hidden state of the prompt's last token.

    `mlp` has the names and shapes of RLinf's value head, whose golden values the parity tests compare. `seen` adds the
    normalised state and the episode's progress to its first layer; it is initialised to zero. actions: number of
    values, one per action (RLinf's value_type: action_level); None for a single value.
    """

    def __init__(self, width: int, seen: int, actions: int | None = None) -> None:
        super().__init__()
        first, second = _HIDDEN
        self.mlp = nn.Sequential(
            nn.Linear(width, first),
            nn.GELU(),
            nn.Linear(first, second),
            nn.GELU(),
            nn.Linear(second, actions or 1, bias=False),
        )
        self._per_action = actions is not None
        self.seen = nn.Linear(seen, first, bias=False)
        nn.init.zeros_(self.seen.weight)

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """Hidden state [B,width] of any dtype, seen [B,entries] -> value [B] or [B,actions] float32."""
        with in_float32(hidden.device):
            first = self.mlp[0](hidden.float()) + self.seen(seen.float())
            value: Tensor = self.mlp[1:](first)
        return value if self._per_action else value.squeeze(-1)


#: What `precompute` adds to the observations: the vision towers' features [B,n·tokens,width], or the final hidden
#: states of the slots [B,H·A,width].
FEATURES, HIDDEN = f"{STORED}features", f"{STORED}hidden"
#: Beginnings of the names of the network's last layers.
HEADS = ("language_model.lm_head.", "action_head.")


TOKEN_TRAITS = replace(
    ADAPTED, critic=True, precomputes=True, acts_from_precomputed=True, beside_precomputed=(PROGRESS,)
)


class OpenVlaOftPolicy(AdaptedPolicy):
    """Policy around a network. forward_inputs: tokens int64 [B,C,A], rows of the action bins; with top-k also kept
    uint8 [B,C,A,k], the rows from which they were drawn. None with the L1 head, whose log-probs are constant zero.

    A is the number of entries of the environment's actions; log-probs are those of their tokens.
    """

    network: OpenVlaOft
    centres: Tensor

    def __init__(
        self, network: OpenVlaOft, inputs: VlaInputs, settings: OpenVlaOftSettings, precision: Precision
    ) -> None:
        super().__init__()
        self.traits = replace(TOKEN_TRAITS, dtype=precision.name)
        self.network, self.inputs = network, inputs
        self.chunk, self.action_dim = inputs.chunk, inputs.action_dim
        self.exact, self.tolerance = False, 1e-4 if precision.is_single else 5e-2
        self.settings, self.precision = settings, precision
        actions = self.chunk if settings.value_level == "action" else None
        self.critic = ValueHead(network.size.llama.width, inputs.state_dim + 1, actions)
        self.register_buffer("centres", centres(network.size.vocabulary.bins), persistent=False)

    @property
    def is_continuous(self) -> bool:
        """Whether the L1 head predicts the actions."""
        return self.network.size.l1_head is not None

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        hidden, value = self._forward(obs)
        if self.is_continuous:
            actions = self.inputs.actions(self._l1_actions(hidden), obs)
            return Act(actions, torch.zeros_like(actions), value, {})
        found = self._distribution(hidden)
        uniform = noise.uniform(noise_key, self.chunk * self.action_dim).view(-1, self.chunk, self.action_dim)
        tokens = found.sample(uniform, greedy, self.settings.greedy)
        forward_inputs = {"tokens": tokens} if found.kept is None else {"tokens": tokens, "kept": found.kept}
        return Act(self.inputs.actions(self.centres[tokens], obs), found.logprob(tokens), value, forward_inputs)

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        hidden, value = self._forward(obs)
        if self.is_continuous:
            zeros = value.new_zeros(len(value), self.chunk, self.action_dim)
            return Evaluation(zeros.detach(), value, zeros.detach())
        found = self._distribution(hidden, forward_inputs.get("kept"))
        return Evaluation(found.logprob(forward_inputs["tokens"]), value, found.entropy())

    def value(self, obs: Observations) -> Tensor:
        return self._forward(obs)[1]

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Loss of demonstrated actions [B,C,A] in env units: cross entropy of the tokens without temperature, or the
        mean absolute error of the L1 head."""
        hidden, _ = self._forward(obs)
        wanted = self.inputs.normalised_actions(actions, obs)
        if self.is_continuous:
            return (self._l1_actions(hidden) - wanted).abs().mean()
        log_p = token_distribution(self._scores(hidden), 1.0).log_p
        if self.settings.label_sigma == 0.0:
            return functional.nll_loss(log_p.flatten(0, -2), rows_of(wanted, log_p.shape[-1]).flatten())
        distance = (self.centres - wanted.clamp(-1.0, 1.0).unsqueeze(-1)) / self.settings.label_sigma
        return -((-0.5 * distance.square()).softmax(-1) * log_p).sum(-1).mean()

    @torch.no_grad()
    def precompute(self, obs: Observations) -> dict[str, Tensor]:
        """Arrays computed by frozen parts, which replace the images in the observations: the hidden states if only
        the last layer is trained, the vision features if only the towers are frozen, else {}."""
        trained = [name for name, p in self.network.named_parameters() if p.requires_grad]
        if any(name.startswith("vision_backbone.") for name in trained):
            return {}
        given = self.inputs(obs)
        with self.precision.computing(self.centres.device):
            found = self.network.features(given["pixel_values"])
            if all(name.startswith(HEADS) for name in trained):
                return {HIDDEN: self._hidden(found, given), f"{STORED_INPUT}state": given["state"]}
        beside = {f"{STORED_INPUT}{name}": x for name, x in given.items() if name != "pixel_values"}
        return {FEATURES: found, **beside}

    def _forward(self, obs: Observations) -> tuple[Tensor, Tensor]:
        """Hidden states of the slots [B,H·A,width] and value [B] or [B,C]; starts from `precompute`'s arrays in obs."""
        if HIDDEN in obs or FEATURES in obs:
            found = {name: x for name, x in obs.items() if name.startswith(STORED_INPUT)}
            given = {name.removeprefix(STORED_INPUT): x for name, x in found.items()}
        else:
            given = self.inputs(obs)
        if HIDDEN in obs:
            hidden = obs[HIDDEN]
        else:
            with self.precision.computing(self.centres.device):
                features = obs[FEATURES] if FEATURES in obs else self.network.features(given["pixel_values"])
                hidden = self._hidden(features, given)
        first = hidden[:, 0].detach() if self.settings.value_detach else hidden[:, 0]
        seen = torch.cat((given["state"].float(), obs[PROGRESS].float().unsqueeze(1)), dim=1)
        value: Tensor = self.critic(first, seen)
        return hidden, value

    def _hidden(self, features: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return self.network.hidden(self.network.patches(features), given)

    def _scores(self, hidden: Tensor) -> Tensor:
        """Scores of the action rows [B,C,A,bins] float32, for the environment's entries."""
        with self.precision.computing(hidden.device):
            logits = self.network.token_logits(hidden)
        return self.inputs.executed(logits.float())

    def _distribution(self, hidden: Tensor, kept: Tensor | None = None) -> TokenDistribution:
        return token_distribution(self._scores(hidden), self.settings.temperature, self.settings.top_k, kept)

    def _l1_actions(self, hidden: Tensor) -> Tensor:
        """Normalised actions [B,C,A] float32."""
        with self.precision.computing(hidden.device):
            return self.inputs.executed(self.network.l1_actions(hidden))


class OftSizeSettings(InputSizeSettings):
    """Form of a network that is not a checkpoint's. The default learns on a CPU."""

    multiples: ClassVar = (("width", 2, "heads"), *InputSizeSettings.multiples)

    width: int = Field(128, ge=8)
    """Features per token of the language model."""
    layers: int = Field(4, ge=2)
    """Its layers. The first gives every action slot the same features; only later ones tell them apart."""
    heads: int = Field(4, ge=1)
    """Its attention heads; width is an even multiple."""
    mlp: int = Field(384, ge=8)
    """Hidden units of its MLPs."""
    vision_layers: int = Field(3, ge=2)
    """Layers of each vision tower; the last is never computed."""
    bins: int = Field(256, ge=3, le=256)
    """Rows that stand for an action entry's values."""

    def network(self, *, horizon: int, action_dim: int, state_dim: int) -> OpenVlaOftSize:  # noqa: ARG002
        """Size of the network, without proprioception and L1 head."""
        tower, head_dim = self.tower(), self.width // self.heads
        return OpenVlaOftSize(
            dino=replace(tower, registers=4, layer_scale=True),
            siglip=replace(tower, pooled=True),
            llama=DecoderSize(self.width, self.layers, self.mlp, self.heads, self.heads, head_dim, "silu"),
            vocabulary=Vocabulary(self.words + self.bins, 0, self.bins, empty=3, pad=0),
            horizon=horizon,
            action_dim=action_dim,
        )


class OpenVlaOftSettings(VlaSettings):
    """OpenVLA-OFT."""

    architecture: ClassVar = OPENVLA_OFT
    policy_traits: ClassVar = TOKEN_TRAITS

    type: Literal["openvla_oft"] = "openvla_oft"
    """The policy's name."""
    size: OwnOrReleased[OftSizeSettings] = OftSizeSettings()
    """Form of the network without a checkpoint; released: full size (7.5 billion parameters), for measurements."""
    variant: Literal["rlinf", "official"] = "rlinf"
    """End of the sequence: rlinf drops the stop token, official keeps it. A checkpoint acts well only in the layout in
    which it was trained."""
    head: Literal["tokens", "l1"] = "tokens"
    """How actions are made: drawn as tokens, or by the L1 head, which cannot learn from rewards."""
    use_proprio: bool = False
    """Give the network the robot's state as a token (released for the official variant); the value sees it anyway."""
    crop: bool = False
    """Show the network the central 90% of an image's area: for checkpoints that were trained with random crops."""
    temperature: float = Field(1.0, gt=0.0)
    """Divides the scores of tokens, when they are drawn and when their log-probs are computed."""
    top_k: int = Field(0, ge=0)
    """Draw from the k likeliest tokens alone; 0: from all."""
    greedy: Literal["mode", "mean"] = "mode"
    """Greedy action of an entry: the likeliest token (published), or the one nearest to the expectation."""
    label_sigma: float = Field(0.0, ge=0.0)
    """Width of the soft labels of supervised training in units of half the action range; 0: the one token."""

    def answers(self, env_spec: EnvSpec, size: OpenVlaOftSize) -> dict[str, ArraySpec]:
        tokens = (self.chunk, env_spec.action.dim)
        answers = {"tokens": ArraySpec(tokens, "int64")} if size.l1_head is None else {}
        if answers and 0 < self.top_k < size.vocabulary.bins:
            answers["kept"] = ArraySpec((*tokens, self.top_k), "uint8")
        return answers

    def policy(self, network: nn.Module, inputs: VlaInputs, precision: Precision) -> OpenVlaOftPolicy:
        assert isinstance(network, OpenVlaOft)
        return OpenVlaOftPolicy(network, inputs, self, precision)

    def fitted_architecture(self, size: OpenVlaOftSize) -> Architecture:
        return replace(OPENVLA_OFT, dead=dead_patterns(size))

    def input_form(self, size: OpenVlaOftSize, source: Checkpoint | None) -> InputForm:  # noqa: ARG002
        ids = size.vocabulary
        return InputForm(
            architecture="openvla_oft",
            image=size.dino.image,
            horizon=size.horizon,
            action_dim=size.action_dim,
            vocabulary=ids.rows,
            words=ids.first_action,
            state_dim=size.proprio,
            needs_state=size.proprio > 0,
            fill="inside",
            bos=ids.bos,
            pad=ids.pad,
            empty=ids.empty,
            crop=self.crop,
        )

    def network_size(self, env_spec: EnvSpec, source: Checkpoint | None) -> OpenVlaOftSize:
        """Size of the network for this environment. ConfigError: the folder lacks a requested part; a missing L1 head
        is drawn."""
        size: OpenVlaOftSize = super().network_size(env_spec, source)
        proprio, head = self.state_entries(env_spec), L1HeadSize()
        if source is not None:
            self._check_side_files(source, size)
            proprio, head = size.proprio, size.l1_head or l1_head_from_config(source.config)
        elif not isinstance(self.size, str):
            head = L1HeadSize(self.size.width)
        return replace(
            size,
            stop_token=self.variant == "official",
            proprio=proprio if self.use_proprio else 0,
            l1_head=head if self.head == "l1" else None,
        )

    def _check_side_files(self, source: Checkpoint, size: OpenVlaOftSize) -> None:
        if self.use_proprio and not size.proprio:
            raise ConfigError(
                f"policy.use_proprio = true: checkpoint = {source.folder} has no file proprio_projector--*; copy it "
                "from the release, or set policy.use_proprio to false"
            )
        if self.head == "l1" and size.l1_head is None and not any("action_head." in name for name in source.ours):
            log.warning(
                "policy.head = l1: checkpoint = %s has no file action_head--*, so the head is drawn from the seed and "
                "acts at random until it was trained on demonstrations",
                source.folder,
            )
